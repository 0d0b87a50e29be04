"""Packing: offsets for buffers, each with a lifetime and a size in bytes; independent of tensors."""

from ggml_sched.core.pack.api import Packing, method_name, pack

__all__ = ["Packing", "method_name", "pack"]
