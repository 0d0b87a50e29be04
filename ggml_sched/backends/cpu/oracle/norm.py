"""Norms: norm rms_norm l2_norm of rows, group_norm of channels.

Sums run pairwise in f32 over contiguous scratch.
"""

from __future__ import annotations

import numpy as np

from ggml_sched.backends.cpu.oracle.job import Job, Part, float_param, int_param
from ggml_sched.backends.cpu.oracle.registry import F32, kernel, types

_FITS = types(F32, F32, like=0)


def _mean_of_squares(part: Part, x: np.ndarray, count: np.ndarray | None) -> np.ndarray:
    """Scratch with the mean (count None: the sum) of the squares of each row of x."""
    squares, total = part.temp(x.shape), part.temp((*x.shape[:-1], 1))
    part.do(np.square, x, squares)
    part.do(np.add.reduce, squares, -1, None, total, True)
    if count is not None:
        part.do(np.divide, total, count, total)
    return total


def _by_root(part: Part, x: np.ndarray, total: np.ndarray, eps: np.ndarray, out: np.ndarray) -> None:
    """out = x / sqrt(total + eps)."""
    part.do(np.add, total, eps, total)
    part.do(np.sqrt, total, total)
    part.do(np.divide, x, total, out)


def _centred(part: Part, x: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Scratch with each row of x less its mean."""
    t, mean = part.temp(x.shape), part.temp((*x.shape[:-1], 1))
    part.do(np.copyto, t, x)
    part.do(np.add.reduce, t, -1, None, mean, True)
    part.do(np.divide, mean, count, mean)
    part.do(np.subtract, t, mean, t)
    return t


def _rows(job: Job) -> np.ndarray:
    return np.array(job.node.ne[0], np.float32)


@kernel("RMS_NORM", fits=_FITS, inplace=0b1)
def rms_norm(job: Job) -> None:
    eps, count = np.array(float_param(job.node, 0)), _rows(job)
    for part in job.parts():
        x = part.f32(0)
        _by_root(part, x, _mean_of_squares(part, x, count), eps, part.out())


@kernel("NORM", fits=_FITS, inplace=0b1)
def norm(job: Job) -> None:
    eps, count = np.array(float_param(job.node, 0)), _rows(job)
    for part in job.parts():
        t = _centred(part, part.f32(0), count)
        _by_root(part, t, _mean_of_squares(part, t, count), eps, part.out())


@kernel("L2_NORM", fits=_FITS, inplace=0b1)
def l2_norm(job: Job) -> None:
    eps = np.array(float_param(job.node, 0))
    for part in job.parts():
        x = part.f32(0)
        total = _mean_of_squares(part, x, None)
        part.do(np.sqrt, total, total)
        part.do(np.maximum, total, eps, out=total)
        part.do(np.divide, x, total, part.out())


@kernel("GROUP_NORM", fits=lambda node: _FITS(node) and int_param(node, 0) > 0, inplace=0b1)
def group_norm(job: Job) -> None:
    """Groups of ceil(channels / n_groups) channels; as in ggml the last one may be smaller."""
    eps, src, dst = np.array(float_param(job.node, 1)), job.src(0), job.dst
    if dst.size == 0:
        return
    n3, channels, n1, n0 = dst.shape
    width = -(-channels // int_param(job.node, 0))
    for i3 in range(n3):
        for start in range(0, channels, width):
            part = job.part()
            x, out = src[i3, start : start + width], dst[i3, start : start + width]
            count = np.array(x.size, np.float32)
            t = part.temp(x.shape)
            part.do(np.copyto, t, x)
            row = _centred(part, t.reshape(1, -1), count)
            total = _mean_of_squares(part, row, count)
            _by_root(part, row, total, eps, row)
            part.do(np.copyto, out, row.reshape(x.shape))
