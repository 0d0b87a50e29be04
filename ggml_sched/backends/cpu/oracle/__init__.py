"""Kernels in NumPy: complete, exact in f32, and slow.  The compiled kernels are compared with them.

    registry     the table of kernels                  job      makes a node's calls on numpy arrays
    elementwise, unary, matrix, rows, copies,          lanes    a few threads
    reduce, norm, rope, attention, recurrent: kernels  work     scratch memory
"""

from __future__ import annotations

from ggml_sched.backends.cpu.oracle import (  # noqa: F401 - the kernels register themselves
    attention,
    copies,
    elementwise,
    matrix,
    norm,
    recurrent,
    reduce,
    rope,
    rows,
    unary,
)
