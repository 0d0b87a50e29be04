"""Launches of rope.cu: rope, alone or with the write of its rows to a cache."""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cpu.oracle.rope import Angles
from ggml_sched.backends.cupy.launch import Builder, Op
from ggml_sched.backends.cupy.ops._oracle import int_param, kind, like_oracle

__all__ = ["OPS", "PAIRS", "emit_rope_set_rows", "has_factors"]

PAIRS = 128
"""The pairs whose frequencies one launch takes; more pairs take several launches."""

ANGLES = np.dtype([("per_position", "<f8", PAIRS)])
"""`struct Angles`."""


def has_factors(node: Tensor) -> bool:
    return len(node.src) > 2 and node.src[2] is not None


def _angles(angles: Angles, first: int) -> np.ndarray:
    value = np.zeros(1, ANGLES)
    part = angles.per_position[first : first + PAIRS]
    value["per_position"][0, : len(part)] = part
    return value


def _rope(b: Builder, node: Tensor) -> None:
    n_dims, angles = int_param(node, 1), Angles(node)
    half, a, d = n_dims // 2, b.source_location(node, 0), b.location(node)
    positions = b.source(node, 1)
    factors = b.source(node, 2) if has_factors(node) else d.arg()
    for first in range(0, half, PAIRS):
        pairs = min(PAIRS, half - first)
        n = pairs * node.ne[1] * node.ne[2] * node.ne[3]
        b.flat("rope.rope", n, a.arg(), positions, factors, d.arg(), np.int64(n), np.int32(first), np.int32(pairs),
               np.int32(half), np.int32(int_param(node, 2) == 2), np.int32(has_factors(node)),
               np.float32(angles.magnitude), kind(node), _angles(angles, first))
    if n_dims < node.ne[0] and a != d:
        rest = (node.ne[0] - n_dims, *node.ne[1:])
        b.move(a.moved(n_dims * a.nb[0]).shaped(rest), d.moved(n_dims * d.nb[0]).shaped(rest), rest,
               node.type.type_size)


def emit_rope_set_rows(b: Builder, rope: Tensor, write: Tensor) -> None:
    """The rows of `write`, a SET_ROWS of a contiguous f32 rope's result, written instead of that result."""
    angles, half, n = Angles(rope), int_param(rope, 1) // 2, rope.ne[2]
    d, ids = b.view(write), write.src[1]
    b.rows("rope.rope_set_rows", n, rope.ne[0] * rope.ne[1] // 2, b.view(rope.src[0]), b.view(rope.src[1]),
           b.view(rope.src[2]) if has_factors(rope) else d, b.view(ids), d, np.int32(half),
           np.int32(int_param(rope, 2) == 2), np.int32(has_factors(rope)), np.float32(angles.magnitude), kind(write),
           np.int32(ids.type == Type.I64), b.error, b.position, _angles(angles, 0), each=1)


OPS: dict[str, Op] = {"ROPE": like_oracle("ROPE", _rope)}
