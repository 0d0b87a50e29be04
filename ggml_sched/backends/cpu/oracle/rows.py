"""Ops that select rows of a table by id: get_rows, set_rows, add_id.

An id outside the table raises BackendError before anything is written.  The check is needed because NumPy takes -1 for
the last row.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Type
from ggml_sched.backends.cpu.oracle.operands import Operands, encode, load
from ggml_sched.backends.cpu.oracle.registry import kernel
from ggml_sched.errors import BackendError


def check_ids(ids: np.ndarray, n_rows: int, of: Operands) -> None:
    """Raise BackendError unless every id is in 0 .. n_rows - 1."""
    if ids.size and not (ids.min() >= 0 and ids.max() < n_rows):
        bad = ids[(ids < 0) | (ids >= n_rows)][0]
        raise BackendError(f"{of.label}: id {bad} does not name one of {n_rows} rows")


@kernel("GET_ROWS")
def get_rows(of: Operands) -> None:
    table, ids, kind = of.raw(0), of.raw(1)[0], of.type(0)
    check_ids(ids, table.shape[2], of)
    for at in np.ndindex(of.dst.shape[:2]):
        rows = table[at][ids[at]]
        of.dst[at] = rows if kind == Type.I32 else load(rows, kind)


@kernel("SET_ROWS")
def set_rows(of: Operands) -> None:
    """Where several rows have the same id, the last one stays: NumPy promises this for an assignment by index."""
    rows, ids = of.raw(0), of.raw(1)[0]
    check_ids(ids, of.dst.shape[2], of)
    for i3, i2 in np.ndindex(of.dst.shape[:2]):
        of.dst[i3, i2][ids[i3 % ids.shape[0], i2 % ids.shape[1]]] = encode(rows[i3, i2], of.node.type)


@kernel("ADD_ID")
def add_id(of: Operands) -> np.ndarray:
    b, ids = of.raw(1)[0, 0], of.raw(2)[0, 0]
    check_ids(ids, b.shape[0], of)
    found: np.ndarray = of.raw(0) + b[ids]
    return found
