"""Sums, means, and the order of rows: sum sum_rows mean argmax argsort top_k arange.

Sums run over contiguous rows, pairwise in f32 within a row; `sum` adds in f64.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backends.cpu.oracle.job import Job, float_param, int_param, store_call
from ggml_sched.backends.cpu.oracle.registry import F32, FLOATS, I32, kernel, types

_SUM = types(None, FLOATS)
_ROWS = types(F32, F32)
_INDICES = types(I32, F32)


def _per_row(fits):
    return lambda node: fits(node) and node.ne == (1, *node.src[0].ne[1:])


@kernel("SUM", fits=lambda node: _SUM(node) and node.ne == (1, 1, 1, 1))
def sum_(job: Job) -> None:
    values = job.values(0, dense=True).reshape(-1)
    part = job.part()
    total = part.temp((1, 1, 1, 1))
    part.do(np.add.reduce, values, 0, np.float64, total.reshape(()))
    part.calls.append(store_call(total, job.dst, job.node.type))


@kernel("SUM_ROWS", fits=_per_row(_ROWS))
def sum_rows(job: Job) -> None:
    for part in job.parts():
        part.do(np.add.reduce, part.f32(0, dense=True), -1, None, part.out(), True)


@kernel("MEAN", fits=_per_row(_ROWS))
def mean(job: Job) -> None:
    n = np.array(job.node.src[0].ne[0], np.float32)
    for part in job.parts():
        out = part.out()
        part.do(np.add.reduce, part.f32(0, dense=True), -1, None, out, True)
        part.do(np.divide, out, n, out)


def _argmax_fits(node: Tensor) -> bool:
    if not _INDICES(node):
        return False
    n, rows, *outer = node.src[0].ne
    return n > 0 and outer == [1, 1] and node.ne == (rows, 1, 1, 1)


@kernel("ARGMAX", fits=_argmax_fits)
def argmax(job: Job) -> None:
    rows, out = job.src(0)[0, 0], job.dst[0, 0, 0]
    job.part().do(lambda: np.copyto(out, rows.argmax(axis=-1), "unsafe"))


def _order(rows: np.ndarray, descending: bool) -> np.ndarray:
    """Indices that sort each row; equal elements stay in order, NaNs come last either way."""
    return (np.negative(rows) if descending else rows).argsort(axis=-1, kind="stable")


@kernel("ARGSORT", fits=lambda node: _INDICES(node) and node.ne == node.src[0].ne)
def argsort(job: Job) -> None:
    descending = bool(int_param(job.node, 0))
    for part in job.parts():
        rows, out = part.raw(0), part.cut(job.dst)
        part.do(lambda rows=rows, out=out: np.copyto(out, _order(rows, descending), "unsafe"))


def _top_k_fits(node: Tensor) -> bool:
    return _INDICES(node) and node.ne[0] <= node.src[0].ne[0] and node.ne[1:] == node.src[0].ne[1:]


@kernel("TOP_K", fits=_top_k_fits)
def top_k(job: Job) -> None:
    k = job.node.ne[0]
    for part in job.parts():
        rows, out = part.raw(0), part.cut(job.dst)
        part.do(lambda rows=rows, out=out: np.copyto(out, _order(rows, True)[..., :k], "unsafe"))


@kernel("ARANGE", fits=lambda node: types(F32)(node) and node.ne[1:] == (1, 1, 1))
def arange(job: Job) -> None:
    start, step = float_param(job.node, 0), float_param(job.node, 2)
    out = job.dst[0, 0, 0]
    job.part().do(lambda: np.copyto(out, start + step * np.arange(out.size, dtype=np.float32)))
