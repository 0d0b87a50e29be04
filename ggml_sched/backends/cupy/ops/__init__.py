"""The ops of the device: for each file of kernels (.cu) a module with the nodes that it computes, and their launches.

`OPS` is the table over all of them, `GROUPS` are the fused kernels; `build` computes a node, `build_group` those of a
group that `fusion_groups` found.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_sched._graph import Tensor, label
from ggml_sched.backends.cupy.launch import Builder, scratch_size
from ggml_sched.backends.cupy.locations import is_aligned, unit_of
from ggml_sched.backends.cupy.ops import (  # noqa: F401 - those that are not used below register their ops
    attention,
    copies,
    elementwise,
    matrix,
    norm,
    projections,
    recurrent,
    reduce,
    rope,
    routing,
    rows,
    soft_max,
    sort,
)
from ggml_sched.backends.cupy.ops.fused import GROUPS
from ggml_sched.backends.cupy.ops.groups import Wiring, find, group_of
from ggml_sched.backends.cupy.ops.registry import OPS
from ggml_sched.backends.cupy.repack import is_packed
from ggml_sched.errors import UnsupportedOp

__all__ = ["GROUPS", "OPS", "build", "build_group", "fusion_groups", "supports", "work_size"]

_PACKED = frozenset({"MUL_MAT", "MUL_MAT_ID", "GET_ROWS", "FLASH_ATTN_EXT"})
"""Ops with kernels for rows that repack.py rearranged."""


def supports(node: Tensor) -> bool:
    """Whether there are kernels for a node, by types, extents and strides."""
    op = OPS.get(node.op)
    # Strides and offsets must be such that kernels load whole elements.
    return op is not None and op.fits(node) and all(
        t is None or not t.n_elements or is_aligned(t, unit_of(t)) for t in (node, *node.src))


def work_size(nodes: Sequence[Tensor], exact: bool, by_library: bool, tensor: bool) -> int:
    """The most bytes of scratch memory that one of these nodes needs.  `exact`, `by_library`, `tensor`: how matrix
    products are computed.  Copies of sources that overlap results are not counted: no plan lets them overlap."""
    needed = 0
    for node in nodes:
        op = OPS.get(node.op)
        if node.computes and op is not None:
            size = matrix.work(node, exact, by_library, tensor) if node.op in matrix.PRODUCTS else op.work(node)
            needed = max(needed, size)
    return scratch_size(needed)


def build(b: Builder, position: int, node: Tensor) -> None:
    """Append the launches of one node; UnsupportedOp naming it."""
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


def fusion_groups(nodes: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Positions of the nodes of a graph that one kernel may compute together: see `Backend.fusion_groups`."""
    wiring = Wiring(nodes)
    found = routing.merged(wiring, projections.merged(wiring, find(wiring, GROUPS)))
    return [group for group in found if all(supports(nodes[i]) for i in group)]


def build_group(b: Builder, positions: Sequence[int], nodes: Sequence[Tensor]) -> None:
    """Append the launches of a group's members: one fused kernel if memory allows, else those of each member.

    `b.needed` says which of them to write, besides the last.  UnsupportedOp as `build`.
    """
    b.begin(positions[-1], nodes[-1])
    for member in nodes[:-1]:
        b.written(member)
    group, members = group_of(nodes, GROUPS), tuple(nodes)
    if group is not None:
        is_built = group.build(b, members)
    elif routing.is_sum(nodes):
        is_built = routing.build_sum(b, members)
    else:
        is_built = projections.is_one(nodes) and projections.build(b, members, positions)
    if is_built:
        return
    for position, node in zip(positions, nodes, strict=True):
        build(b, position, node)
