"""Launches of reduce.cu: sum, sum_rows, mean, argmax, arange."""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backends.cupy.launch import Builder
from ggml_sched.backends.cupy.ops.registry import computes, float_param, kind, n_rows

SHARE = 4096
"""Elements that a block of SUM adds; more, where there would be more than 1,024 blocks."""

THREADS = 256


def _parts(node: Tensor) -> int:
    return min(1024, max(1, -(-node.src[0].n_elements // SHARE)))


@computes("SUM", work=lambda node: 8 * _parts(node))
def _sum(b: Builder, node: Tensor) -> None:
    a, parts = node.src[0], _parts(node)
    partial = b.scratch(8 * parts)
    source = b.source(node, 0)
    b.launch("reduce.sum_parts", (parts,), (THREADS,), source, partial, np.int64(a.n_elements), kind(a))
    b.launch("reduce.sum_of_parts", (1,), (THREADS,), partial, np.int32(parts), b.region(node), kind(node))


@computes("SUM_ROWS", "MEAN")
def _sum_rows(b: Builder, node: Tensor) -> None:
    a = node.src[0]
    rows, divisor = n_rows(a), np.float32(a.ne[0] if node.op == "MEAN" else 1)
    b.rows("reduce.sum_rows", rows, a.ne[0], b.source(node, 0), b.region(node), np.int64(rows), divisor)


@computes("ARGMAX")
def _argmax(b: Builder, node: Tensor) -> None:
    a = node.src[0]
    b.rows("reduce.argmax", a.ne[1], a.ne[0], b.source(node, 0), b.region(node), np.int64(a.ne[1]))


@computes("ARANGE")
def _arange(b: Builder, node: Tensor) -> None:
    b.each("reduce.arange", node, float_param(node, 0), float_param(node, 2))
