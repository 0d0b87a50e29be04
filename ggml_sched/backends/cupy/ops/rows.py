"""Launches of rows.cu: get_rows, set_rows, add_id."""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cupy.launch import Builder
from ggml_sched.backends.cupy.ops.copies import WRITABLE
from ggml_sched.backends.cupy.ops.registry import computes, kind, n_rows
from ggml_sched.backends.cupy.repack import is_packed

MANY = 2048
"""The most rows for which SET_ROWS is one launch, which looks for a later row with the same id for each row: only the
last one is written.  For more rows there are three launches, which note the last row of each id in scratch memory."""


@computes("GET_ROWS")
def _get_rows(b: Builder, node: Tensor) -> None:
    table = node.src[0]
    if is_packed(table):
        n = node.n_elements // 32
        b.flat(f"packed_rows.{table.type.name.lower()}", n, b.source(node, 0), b.source(node, 1), b.region(node),
               np.int64(n), b.error, b.position)
    else:
        b.each("rows.get_rows", node, kind(table), b.error, b.position)


def _set_rows_work(node: Tensor) -> int:
    return 4 * n_rows(node) if node.src[0].ne[1] > MANY else 0


@computes("SET_ROWS", only=lambda node: node.type in WRITABLE, work=_set_rows_work)
def _set_rows(b: Builder, node: Tensor) -> None:
    rows, ids = node.src[:2]
    if rows.n_elements == 0:
        return
    source, numbers, d = b.source(node, 0), b.source(node, 1), b.region(node)
    wide, n = np.int32(ids.type == Type.I64), n_rows(rows)
    if rows.ne[1] <= MANY:
        b.rows("rows.set_rows", n, rows.ne[0], source, numbers, d, np.int64(n), kind(node), wide, b.error, b.position)
        return
    owner = b.scratch(_set_rows_work(node))
    for forget in (1, 0):
        b.flat("rows.claim_rows", n, source, numbers, d, np.int64(n), wide, np.int32(forget), owner, b.error,
               b.position)
    b.flat("rows.write_owned", rows.n_elements, source, numbers, d, np.int64(rows.n_elements), kind(node), wide, owner)


@computes("ADD_ID")
def _add_id(b: Builder, node: Tensor) -> None:
    b.each("rows.add_id", node, b.error, b.position)
