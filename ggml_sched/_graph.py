"""The names of `ggml_sched.core.graph`."""

from ggml_sched.core.graph import *  # noqa: F403
from ggml_sched.core.graph import __all__ as __all__
