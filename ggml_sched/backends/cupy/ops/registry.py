"""The table of the device's ops: which nodes kernels compute, and the functions that build their launches.

The kernels here compute the same nodes as the CPU's, and may overwrite the same sources: so the rules are the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ggml_sched._graph import Tensor, label, op_numbers
from ggml_sched.backends.cpu._kernels import fits, inplace_sources
from ggml_sched.backends.cpu.oracle.operands import float_param, int_param
from ggml_sched.backends.cupy.launch import Builder
from ggml_sched.backends.cupy.regions import is_aligned, unit_of
from ggml_sched.backends.cupy.repack import is_packed
from ggml_sched.errors import UnsupportedOp

__all__ = ["OPS", "build", "computes", "float_param", "int_param", "kind", "n_rows", "optional", "supports"]

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
_PACKED = frozenset({"MUL_MAT", "MUL_MAT_ID", "GET_ROWS", "FLASH_ATTN_EXT"})
"""Ops with kernels for rows that repack.py rearranged."""


def computes(*ops: str, only: Callable[[Tensor], bool] | None = None,
             work: Callable[[Tensor], int] = lambda node: 0) -> Callable[[Build], Build]:
    """A decorator that registers the function that builds these ops, for the nodes that the CPU's kernels compute; with
    `only`, for those of these nodes for which `only` is true.  `work`: see `Op`."""

    def register(build: Build) -> Build:
        for op in ops:
            OPS[op] = Op(fits if only is None else lambda node: fits(node) and only(node), build,
                         inplace_sources(op_numbers()[op]), work)
        return build

    return register


def supports(node: Tensor) -> bool:
    """Whether there is a kernel for a node, by its types, extents and strides."""
    op = OPS.get(node.op)
    # Strides and offsets must be such that kernels load whole elements.
    return op is not None and op.fits(node) and all(
        t is None or not t.n_elements or is_aligned(t, unit_of(t)) for t in (node, *node.src))


def build(b: Builder, position: int, node: Tensor) -> None:
    """Append the launches of one node; UnsupportedOp, which names the node, if there is no kernel."""
    if not node.computes:
        return
    if not supports(node):
        sources = ", ".join("none" if s is None else f"{s.type} {list(s.ne)}" for s in node.src)
        raise UnsupportedOp(f"backend {b.name!r}: no kernel for node {label(node)}: {node.op} of {sources} to "
                            f"{node.type} {list(node.ne)}")
    if node.op not in _PACKED:
        for t in (node, *node.src):
            if t is not None and is_packed(t):
                raise UnsupportedOp(f"backend {b.name!r}: node {label(node)} ({node.op}) has no kernel for the "
                                    f"rearranged rows of {label(t)} ({t.type})")
    if node.n_elements == 0 and node.op != "SET_ROWS":      # SET_ROWS to a table without rows: every id is a fault
        return
    op = OPS[node.op]
    b.begin(position, node, op.inplace)
    op.build(b, node)


def kind(t: Tensor) -> np.int32:
    """The number of a tensor's type, as in kernels (`enum Kind`)."""
    return np.int32(t.type)


def optional(node: Tensor, i: int) -> Tensor | None:
    """Source i of a node; None if the node lacks it."""
    return node.src[i] if i < len(node.src) else None


def n_rows(t: Tensor) -> int:
    """The number of rows of a tensor, over all outer extents."""
    return t.ne[1] * t.ne[2] * t.ne[3]
