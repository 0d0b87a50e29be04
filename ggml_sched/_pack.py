"""The names of `ggml_sched.core.pack`."""

from ggml_sched.core.pack import Packing, method_name, pack

__all__ = ["Packing", "method_name", "pack"]
