"""Launches of rope.cu: rope, alone or with the write of its rows to a cache."""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cpu.oracle.rope import Angles
from ggml_sched.backends.cupy.launch import MAX_BLOCKS, Builder, struct
from ggml_sched.backends.cupy.ops.registry import computes, int_param, kind, optional

__all__ = ["PAIRS", "emit_rope_set_rows"]

PAIRS = 128
"""The pairs whose frequencies one launch takes; more pairs take several launches."""

ANGLES = np.dtype([("per_position", "<f8", PAIRS)])
"""`struct Angles` of rope.cu."""


def _angles(angles: Angles, first: int) -> np.ndarray:
    part = angles.per_position[first : first + PAIRS]
    return struct(ANGLES, per_position=np.pad(part, (0, PAIRS - len(part))))


@computes("ROPE")
def _rope(b: Builder, node: Tensor) -> None:
    n_dims, angles = int_param(node, 1), Angles(node)
    half, a, d = n_dims // 2, b.source(node, 0), b.region(node)
    positions, has_factors = b.source(node, 1), optional(node, 2) is not None
    factors = b.source(node, 2) if has_factors else d
    for first in range(0, half, PAIRS):
        pairs = min(PAIRS, half - first)
        n = pairs * node.ne[1] * node.ne[2] * node.ne[3]
        b.flat("rope.rope", n, a, positions, factors, d, np.int64(n), np.int32(first), np.int32(pairs),
               np.int32(half), np.int32(int_param(node, 2) == 2), np.int32(has_factors),
               np.float32(angles.magnitude), kind(node), _angles(angles, first))
    if n_dims < node.ne[0] and a != d:
        rest = (node.ne[0] - n_dims, *node.ne[1:])
        b.move(a.moved(n_dims * a.nb[0]).shaped(rest), d.moved(n_dims * d.nb[0]).shaped(rest), rest,
               node.type.type_size)


def emit_rope_set_rows(b: Builder, rope: Tensor, write: Tensor) -> None:
    """Append the launch that computes `rope`, contiguous and f32, and writes its rows where `write`, their SET_ROWS,
    writes them; the result of the rope itself is not written to memory."""
    angles, half, n = Angles(rope), int_param(rope, 1) // 2, rope.ne[2]
    d, ids, factors = b.region(write), write.src[1], optional(rope, 2)
    threads = min(1024, -(-(rope.ne[0] - half) // 32) * 32)
    b.launch("rope.rope_set_rows", (min(n, MAX_BLOCKS), rope.ne[1]), (threads,), b.region(rope.src[0]),
             b.region(rope.src[1]), d if factors is None else b.region(factors), b.region(ids), d, np.int32(half),
             np.int32(int_param(rope, 2) == 2), np.int32(factors is not None), np.float32(angles.magnitude),
             kind(write), np.int32(ids.type == Type.I64), b.error, b.position, _angles(angles, 0))
