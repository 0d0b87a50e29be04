"""Packing: offsets for rectangles, which live for a time and take some bytes.  Knows no tensors."""

from ggml_sched.core.pack.api import Packing, method_name, pack

__all__ = ["Packing", "method_name", "pack"]
