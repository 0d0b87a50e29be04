"""Fusion groups, nodes that one kernel computes: what they are, finding them in a graph, and building them.

    [add] norm mul [add]     a sum, its norm, times a weight, plus a bias or a residual: norm_rows of norm.cu
    rope set_rows            rope_set_rows of rope.cu
    mul_mat mul_mat glu      a feed-forward of few tokens, in one pass over both weights: matvec.cuh
    mul_mat_id mul_mat_id glu      a feed-forward of few tokens, through the experts that each has chosen

Others are in projections.py and routing.py; groups.py searches a graph for groups of a given form.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cupy.launch import MAX_GRID, Builder
from ggml_sched.backends.cupy.ops import projections, routing
from ggml_sched.backends.cupy.ops.groups import Group, Wiring, find, group_of, lies_apart
from ggml_sched.backends.cupy.ops.matrix import few, is_few
from ggml_sched.backends.cupy.ops.norm import emit_norm
from ggml_sched.backends.cupy.ops.registry import OPS, build, int_param, supports
from ggml_sched.backends.cupy.ops.rope import PAIRS, emit_rope_set_rows
from ggml_sched.backends.cupy.repack import is_packed

__all__ = ["GROUPS", "build_group", "fusion_groups"]

_NORMS = frozenset({"RMS_NORM", "NORM"})
_ADD, _MUL = frozenset({"ADD"}), frozenset({"MUL"})
_FLOATS = frozenset({Type.F32, Type.F16, Type.BF16})

_GATES = {"GLU:SWIGLU": 0, "GLU:GEGLU": 1, "GLU:REGLU": 2}
"""`enum Gate` of matvec.cuh."""


def _is_row_op(node: Tensor | None, width: int) -> bool:
    """Whether a node is a sum or product in f32 whose second operand consists of whole rows, which may repeat."""
    return (node is not None and node.view_src is None and node.type == Type.F32
            and all(t.type == Type.F32 and t.ne[0] == width for t in node.src[:2]) and node.ne == node.src[0].ne
            and all(n and m % n == 0 for n, m in zip(node.src[1].ne, node.ne, strict=True)))


def _norm_group(before: bool, after: bool) -> Group:
    def find(last: Tensor, wiring: Wiring) -> tuple[Tensor, ...] | None:
        mul = wiring.inner(last.src[0], _MUL) if after else last
        norm = None if mul is None else wiring.inner(mul.src[0], _NORMS)
        if mul is None or norm is None or norm.n_elements == 0 or not OPS[norm.op].fits(norm):
            return None
        # Only the first sum may have other readers: it is written where they need it.
        first, second = ((norm.src[0],) if before else ()), ((last,) if after else ())
        if any(add.op not in _ADD or add not in wiring.position for add in first):
            return None
        # The second operands are read from memory, so none may be a member's result, which might not be written there.
        members = (*first, norm, mul, *second)
        if not all(_is_row_op(node, norm.ne[0]) and node.src[1].root not in members for node in (*first, mul, *second)):
            return None
        return members

    def build(b: Builder, nodes: tuple[Tensor, ...]) -> bool:
        add, last = (nodes[0] if before else None), nodes[-1]
        norm, mul = nodes[int(before) : int(before) + 2]
        if any(b.is_needed(node) for node in (norm, mul) if node is not last):
            return False
        if not all(_is_row_op(node, norm.ne[0]) and node.ne == norm.ne for node in nodes if node is not norm):
            return False
        operands = (norm.src[0],) if add is None else add.src[:2]
        shift = last.src[1] if after else None
        results = (last, add) if add is not None and b.is_needed(add) else (last,)
        if not lies_apart(b, results, (*operands, mul.src[1], *([] if shift is None else [shift])), same=True):
            return False
        x, *added = map(b.region, operands)
        kept = [b.region(result) for result in results[1:]]
        emit_norm(b, norm, last, x, added=added[0] if added else None, kept=kept[0] if kept else None,
                  scale=b.region(mul.src[1]), shift=None if shift is None else b.region(shift))
        return True

    return Group((*([_ADD] if before else []), _NORMS, _MUL, *([_ADD] if after else [])), find, build)


def _find_rope_set_rows(last: Tensor, wiring: Wiring) -> tuple[Tensor, ...] | None:
    rope = wiring.inner(wiring.under_views(last.src[0]), ("ROPE",))
    return (rope, last) if rope is not None and _rope_fits_set_rows(rope, last) else None


def _rope_fits_set_rows(rope: Tensor, write: Tensor) -> bool:
    """Whether one kernel can compute a rope and the SET_ROWS of all of its rows, by their types and layouts."""
    rows, ids = write.src[:2]
    if (rope.type != Type.F32 or write.type not in _FLOATS or rope.n_elements == 0
            or not OPS["SET_ROWS"].fits(write) or not OPS["ROPE"].fits(rope)):
        return False
    n0, n1, n2, n3 = rope.ne
    return (n3 == 1 and n0 < 1 << 31 and n1 <= MAX_GRID and int_param(rope, 1) <= 2 * PAIRS
            and rope.is_contiguous and rows.is_contiguous
            and rows.ne == (n0 * n1, n2, 1, 1) and ids.ne == (n2, 1, 1, 1))


def _build_rope_set_rows(b: Builder, nodes: tuple[Tensor, ...]) -> bool:
    rope, write = nodes
    sources = (*(t for t in rope.src if t is not None), write.src[1])
    if b.is_needed(rope) or not _rope_fits_set_rows(rope, write) or not lies_apart(b, (write,), sources):
        return False
    emit_rope_set_rows(b, rope, write)
    return True


def _gated_group(op: str) -> Group:
    products = frozenset({op})

    def fits(last: Tensor) -> bool:
        """Whether a node is a gated unit of two products for one kernel, by their types and layouts."""
        if len(last.src) != 2 or last.type != Type.F32 or last.view_src is not None or last.n_elements == 0:
            return False
        if any(t is None or t.op != op for t in last.src):
            return False
        gate, up = last.src
        a, b = gate.src[0], up.src[0]
        same = a.type == b.type and a.ne == b.ne and a.nb == b.nb and gate.ne == up.ne == last.ne
        return same and is_few(gate) and OPS[op].fits(gate) and OPS[op].fits(up) and last.nb[0] == 4

    def find(last: Tensor, wiring: Wiring) -> tuple[Tensor, ...] | None:
        if not fits(last):
            return None
        gate, up = (wiring.inner(t, products) for t in last.src)
        if gate is None or up is None or gate is up or gate.src[1:] != up.src[1:]:
            return None
        # The two products are not written to memory, so neither may read the other, directly or through a view.
        if any(t.root in (gate, up) for t in (*gate.src, *up.src)):
            return None
        return (gate, up, last)

    def build(b: Builder, nodes: tuple[Tensor, ...]) -> bool:
        last = nodes[-1]
        if not fits(last):
            return False
        gate, up = last.src
        if b.is_needed(gate) or b.is_needed(up) or is_packed(gate.src[0]) != is_packed(up.src[0]):
            return False
        if not lies_apart(b, (last,), (*gate.src, up.src[0])):
            return False
        few(b, gate, up.src[0], last, _GATES[last.op])
        return True

    return Group((products, products, frozenset(_GATES)), find, build)


GROUPS: list[Group] = [
    _norm_group(True, True),
    _norm_group(False, True),
    _norm_group(True, False),
    _norm_group(False, False),
    Group((frozenset({"ROPE"}), frozenset({"SET_ROWS"})), _find_rope_set_rows, _build_rope_set_rows),
    _gated_group("MUL_MAT"),
    _gated_group("MUL_MAT_ID"),
    *routing.GROUPS,
]


def fusion_groups(nodes: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """The fusion groups of a graph, each as the positions of its nodes: see `Backend.fusion_groups`."""
    wiring = Wiring(nodes)
    found = routing.merged(wiring, projections.merged(wiring, find(wiring, GROUPS)))
    return [group for group in found if all(supports(nodes[i]) for i in group)]


def build_group(b: Builder, positions: Sequence[int], nodes: Sequence[Tensor]) -> None:
    """Append the launches of a group's members: one fused kernel if memory allows, else those of each member.

    `b.needed` has the members whose results are written, besides the last.  Raises UnsupportedOp, as `build` does.
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
