"""Packing: offsets for buffers, each with a lifetime and a size in bytes; independent of tensors."""
