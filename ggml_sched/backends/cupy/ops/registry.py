"""The table of the device's ops: which nodes kernels compute, and the functions that build their launches.

The kernels here compute the same nodes as the CPU's, and may overwrite the same sources: so the rules are the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ggml_sched._graph import Tensor, op_numbers
from ggml_sched.backends.cpu._kernels import fits, inplace_sources
from ggml_sched.backends.cpu.oracle.operands import float_param, int_param
from ggml_sched.backends.cupy.launch import Builder

__all__ = ["OPS", "computes", "float_param", "int_param", "kind", "n_rows", "optional"]

Build = Callable[[Builder, Tensor], None]


class Op(NamedTuple):
    """How the device computes an op.  `fits(node)`: whether it computes this node; `build`: appends the node's
    launches; `inplace`: bit i is set if source i, of equal layout, may share the result's memory; `work(node)`: bytes
    of scratch memory that the node needs if no source overlaps the result."""

    fits: Callable[[Tensor], bool]
    build: Build
    inplace: int
    work: Callable[[Tensor], int]


OPS: dict[str, Op] = {}


def computes(*ops: str, only: Callable[[Tensor], bool] | None = None,
             work: Callable[[Tensor], int] = lambda node: 0) -> Callable[[Build], Build]:
    """Register the function that builds these ops, for the nodes that the CPU computes; with `only`, for those of them
    for which it is true."""

    def register(build: Build) -> Build:
        for op in ops:
            OPS[op] = Op(fits if only is None else lambda node: fits(node) and only(node), build,
                         inplace_sources(op_numbers()[op]), work)
        return build

    return register


def kind(t: Tensor) -> np.int32:
    """The number of a tensor's type, as in kernels (`enum Kind`)."""
    return np.int32(t.type)


def optional(node: Tensor, i: int) -> Tensor | None:
    """Source i, which a node may lack."""
    return node.src[i] if i < len(node.src) else None


def n_rows(t: Tensor) -> int:
    """Rows of a tensor, over all outer extents."""
    return t.ne[1] * t.ne[2] * t.ne[3]
