"""Ops that select rows of a table by id: get_rows, set_rows, add_id.

An id outside the table raises BackendError before anything is written.  The check is needed because NumPy takes -1 for
the last row.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cpu.oracle.operands import Operands, encode, load
from ggml_sched.backends.cpu.oracle.registry import F32, I32, WEIGHTS, kernel, types
from ggml_sched.errors import BackendError


def check_ids(ids: np.ndarray, n_rows: int, of: Operands) -> None:
    """Raise BackendError unless every id is in 0 .. n_rows - 1."""
    if ids.size and not (ids.min() >= 0 and ids.max() < n_rows):
        bad = ids[(ids < 0) | (ids >= n_rows)][0]
        raise BackendError(f"{of.label}: id {bad} does not name one of {n_rows} rows")


_GET_FLOATS = types(F32, WEIGHTS, I32)
_GET_INTS = types(I32, I32, I32)


def _get_rows_fits(node: Tensor) -> bool:
    if not (_GET_FLOATS(node) or _GET_INTS(node)):
        return False
    a, ids = node.src
    return (ids.ne[3] == 1 and (a.ne[2], a.ne[3]) == (ids.ne[1], ids.ne[2])
            and node.ne == (a.ne[0], ids.ne[0], ids.ne[1], ids.ne[2]))


@kernel("GET_ROWS", fits=_get_rows_fits)
def get_rows(of: Operands) -> None:
    table, ids, kind = of.raw(0), of.raw(1)[0], of.type(0)
    check_ids(ids, table.shape[2], of)
    for at in np.ndindex(of.dst.shape[:2]):
        rows = table[at][ids[at]]
        of.dst[at] = rows if kind == Type.I32 else load(rows, kind)


def _set_rows_fits(node: Tensor) -> bool:
    if len(node.src) != 3 or any(s is None for s in node.src):
        return False
    b, ids, a = node.src
    return (b.type == Type.F32 and ids.type in (Type.I64, Type.I32) and a.type in WEIGHTS
            and node.type == a.type and node.ne == a.ne and b.ne[0] == a.ne[0] and b.ne[2:] == a.ne[2:]
            and ids.ne[3] == 1 and b.ne[1] == ids.ne[0]
            and all(n > 0 and m % n == 0 for n, m in zip(ids.ne[1:3], b.ne[2:], strict=True)))


@kernel("SET_ROWS", fits=_set_rows_fits)
def set_rows(of: Operands) -> None:
    """Where several rows have the same id, the last one stays: NumPy promises this for an assignment by index."""
    rows, ids = of.raw(0), of.raw(1)[0]
    check_ids(ids, of.dst.shape[2], of)
    for i3, i2 in np.ndindex(of.dst.shape[:2]):
        of.dst[i3, i2][ids[i3 % ids.shape[0], i2 % ids.shape[1]]] = encode(rows[i3, i2], of.node.type)


_ADD_ID = types(F32, F32, F32, I32, like=0)


def _add_id_fits(node: Tensor) -> bool:
    if not _ADD_ID(node):
        return False
    a, b, ids = node.src
    return (a.ne[0] == b.ne[0] and a.ne[1:3] == ids.ne[:2] and b.ne[2] == b.ne[3] == 1
            and a.ne[3] == ids.ne[2] == ids.ne[3] == 1)


@kernel("ADD_ID", fits=_add_id_fits, inplace=0b1)
def add_id(of: Operands) -> np.ndarray:
    b, ids = of.raw(1)[0, 0], of.raw(2)[0, 0]
    check_ids(ids, b.shape[0], of)
    return of.raw(0) + b[ids]
