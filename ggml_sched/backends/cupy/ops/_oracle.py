"""Properties of ops, taken from the oracle: valid nodes, sources that may share the result's memory, and parameters.

The kernels here compute the same nodes as the oracle's, so its checks are used instead of being repeated.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import ggml_sched.backends.cpu.oracle  # noqa: F401 - its kernels register themselves
from ggml_sched._graph import Tensor
from ggml_sched.backends.cpu.oracle.operands import float_param, int_param
from ggml_sched.backends.cpu.oracle.registry import KERNELS
from ggml_sched.backends.cupy.launch import Builder, Op, no_work

__all__ = ["float_param", "int_param", "kind", "like_oracle", "n_rows"]


def like_oracle(op: str, build: Callable[[Builder, Tensor], None], *, only: Callable[[Tensor], bool] | None = None,
                work: Callable[[Tensor], int] = no_work) -> Op:
    """An op that computes the nodes that the oracle computes; with `only`, those of them for which it is true."""
    kernel = KERNELS[op]
    if only is None:
        return Op(kernel.fits, build, kernel.inplace, work)
    return Op(lambda node: kernel.fits(node) and only(node), build, kernel.inplace, work)


def kind(t: Tensor) -> np.int32:
    """The number of a tensor's type, as in kernels (`enum Kind`)."""
    return np.int32(t.type)


def n_rows(t: Tensor) -> int:
    """Rows of a tensor, over all outer extents."""
    return t.ne[1] * t.ne[2] * t.ne[3]
