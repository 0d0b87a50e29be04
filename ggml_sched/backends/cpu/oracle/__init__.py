"""Kernels in NumPy, which define what each op computes: slow, and complete.  Tests compare compiled kernels to them.

    registry     the table of kernels: the nodes that each computes, and the sources it may overwrite
    operands     the sources and the result of a node as NumPy arrays
    elementwise, matrix, rows, copies, reduce, rope, attention, recurrent: the kernels
"""

from __future__ import annotations

from ggml_sched.backends.cpu.oracle import (  # noqa: F401 - the kernels register themselves
    attention,
    copies,
    elementwise,
    matrix,
    recurrent,
    reduce,
    rope,
    rows,
)
