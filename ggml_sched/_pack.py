"""The names that Python code uses from `ggml_sched.core.pack`."""

from ggml_sched.core.pack.api import Packing, method_name, pack

__all__ = ["Packing", "method_name", "pack"]
