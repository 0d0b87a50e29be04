"""Kernels in NumPy: complete, exact in f32, and slow.  The compiled kernels are compared with them.

    registry     the table of kernels, and which nodes each computes       operands     a node as arrays
    elementwise, matrix, rows, copies, reduce, rope, attention, recurrent: kernels
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
