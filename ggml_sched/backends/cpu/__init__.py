"""The CPU backend.

    buffer       memory, the caller's or ours          registry     the table of kernels
    lanes        a few threads                         elementwise, unary, matrix, rows, copies,
    work         scratch memory                        reduce, norm, rope, attention: the kernels
    job          from a node to calls on numpy arrays  backend      CpuBackend, plans, run_nodes
"""

from __future__ import annotations

from ggml_sched.backends.cpu.backend import CpuBackend, CpuPlan, run_nodes
from ggml_sched.backends.cpu.buffer import CpuBuffer

__all__ = ["CpuBackend", "CpuBuffer", "CpuPlan", "run_nodes"]
