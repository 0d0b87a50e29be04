"""ggml's first generation: allocators that work without a scheduler, and the seed policy's passes."""
