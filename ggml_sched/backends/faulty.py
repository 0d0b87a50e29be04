"""The former name of `ggml_sched.testing.faulty`, for one release."""

import warnings

from ggml_sched.testing.faulty import FaultyCpuBackend

__all__ = ["FaultyCpuBackend"]

warnings.warn("ggml_sched.backends.faulty: use ggml_sched.testing.faulty", DeprecationWarning, stacklevel=2)
