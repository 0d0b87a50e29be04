"""The former name of `ggml_sched.testing.deferred`, for one release."""

import warnings

from ggml_sched.testing.deferred import DeferredBackend as LateBackend
from ggml_sched.testing.deferred import DeferredEvent as LateEvent
from ggml_sched.testing.deferred import DeferredQueues as LateWorld

__all__ = ["LateBackend", "LateEvent", "LateWorld"]

warnings.warn("ggml_sched.backends.late: use ggml_sched.testing.deferred", DeprecationWarning, stacklevel=2)
