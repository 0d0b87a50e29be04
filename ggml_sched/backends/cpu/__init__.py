"""The CPU backend.

    buffer       memory, the caller's or ours
    oracle/      every kernel in NumPy: slow, complete, and what compiled kernels are compared with
    backend      CpuBackend, plans, run_nodes
"""

from __future__ import annotations

from ggml_sched.backends.cpu.backend import CpuBackend, CpuPlan, run_nodes
from ggml_sched.backends.cpu.buffer import CpuBuffer

__all__ = ["CpuBackend", "CpuBuffer", "CpuPlan", "run_nodes"]
