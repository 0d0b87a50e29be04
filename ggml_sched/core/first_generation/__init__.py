"""ggml's first generation: allocators that work without a scheduler, and the seed policy's passes."""

from ggml_sched.core.first_generation.allocators import (
    Allocator,
    GraphAllocator,
    TensorAllocator,
    register_host_memory,
)

__all__ = ["Allocator", "GraphAllocator", "TensorAllocator", "register_host_memory"]
