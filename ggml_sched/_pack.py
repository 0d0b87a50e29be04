"""The names of `ggml_sched.core.pack`."""

from ggml_sched.core.pack import *  # noqa: F403
from ggml_sched.core.pack import __all__ as __all__
