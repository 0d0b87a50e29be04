"""The group of two products of the same columns and the gated unit of both: one kernel, one pass over the weights.

    mul_mat mul_mat glu          a feed-forward of few tokens
    mul_mat_id mul_mat_id glu    the same through chosen experts
"""

from __future__ import annotations

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cupy.launch import Builder
from ggml_sched.backends.cupy.ops.groups import Group, Wiring, lies_apart
from ggml_sched.backends.cupy.ops.matrix import few, is_few
from ggml_sched.backends.cupy.ops.registry import OPS
from ggml_sched.backends.cupy.repack import is_packed

__all__ = ["GROUPS"]

_GATES = {"GLU:SWIGLU": 0, "GLU:GEGLU": 1, "GLU:REGLU": 2}
"""`enum Gate` of matvec.cuh."""


def _group(op: str) -> Group:
    products = frozenset({op})

    def find(last: Tensor, wiring: Wiring) -> tuple[Tensor, ...] | None:
        if len(last.src) != 2 or last.type != Type.F32 or last.view_src is not None or last.n_elements == 0:
            return None
        gate, up = (wiring.inner(t, products) for t in last.src)
        if gate is None or up is None or gate is up or gate.src[1:] != up.src[1:]:
            return None
        a, b = gate.src[0], up.src[0]
        same = a.type == b.type and a.ne == b.ne and a.nb == b.nb and gate.ne == up.ne == last.ne
        fits = same and is_few(gate) and OPS[op].fits(gate) and OPS[op].fits(up) and last.nb[0] == 4
        # The products are not written to memory, so no source of theirs may be a view of one of them.
        if not fits or any(t.root in (gate, up) for t in (*gate.src, *up.src)):
            return None
        return (gate, up, last)

    def build(b: Builder, nodes: tuple[Tensor, ...]) -> bool:
        last = nodes[-1]
        gate, up = last.src
        if b.is_needed(gate) or b.is_needed(up) or is_packed(gate.src[0]) != is_packed(up.src[0]):
            return False
        if not lies_apart(b, (last,), (*gate.src, up.src[0])):
            return False
        few(b, gate, up.src[0], last, _GATES[last.op])
        return True

    return Group((products, products, frozenset(_GATES)), find, build)


GROUPS: list[Group] = [_group("MUL_MAT"), _group("MUL_MAT_ID")]
