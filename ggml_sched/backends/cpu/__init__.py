"""The CPU backend.

    buffer       memory, allocated here or given by the caller
    kernels/     compiled kernels in C; _kernels: lists of their calls, and the threads that run them
    oracle/      every kernel in NumPy: slow, and complete; tests compare the compiled kernels with these
    backend      CpuBackend, its graph plans, and run_nodes
"""

from __future__ import annotations

from ggml_sched.backends.cpu.backend import CpuBackend, CpuPlan, run_nodes
from ggml_sched.backends.cpu.buffer import CpuBuffer

__all__ = ["CpuBackend", "CpuBuffer", "CpuPlan", "run_nodes"]
