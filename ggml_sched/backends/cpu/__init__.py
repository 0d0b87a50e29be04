"""The CPU backend.

    buffer       memory, allocated here or the caller's
    oracle/      every kernel in NumPy: slow and complete; compiled kernels are compared with these
    backend      CpuBackend, plans, run_nodes
"""

from __future__ import annotations

from ggml_sched.backends.cpu.backend import CpuBackend, CpuPlan, run_nodes
from ggml_sched.backends.cpu.buffer import CpuBuffer

__all__ = ["CpuBackend", "CpuBuffer", "CpuPlan", "run_nodes"]
