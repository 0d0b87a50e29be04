"""Sums, means, norms, and the order of rows: sum sum_rows mean, norm rms_norm l2_norm group_norm, argmax argsort top_k,
arange.

Rows are made contiguous and summed in f32: NumPy adds contiguous rows pairwise, which loses little precision; `sum`
adds in f64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggml_sched.backends.cpu.oracle.operands import Operands, float_param, int_param
from ggml_sched.backends.cpu.oracle.registry import kernel

if TYPE_CHECKING:
    from ggml_sched.backends.cpu.oracle.operands import Floats


@kernel("SUM")
def sum_(of: Operands) -> Floats:
    found: Floats = np.add.reduce(of.dense(0).reshape(-1), dtype=np.float64).astype(np.float32)
    return found


def _sums(x: np.ndarray) -> Floats:
    """The sum of each row of a contiguous array."""
    return np.add.reduce(x, -1, keepdims=True)


@kernel("SUM_ROWS")
def sum_rows(of: Operands) -> Floats:
    return _sums(of.dense(0))


def _means(x: np.ndarray) -> Floats:
    return _sums(x) / np.float32(x.shape[-1])


@kernel("MEAN")
def mean(of: Operands) -> Floats:
    return _means(of.dense(0))


@kernel("RMS_NORM")
def rms_norm(of: Operands) -> np.ndarray:
    return _by_root(of.dense(0), float_param(of.node, 0))


@kernel("NORM")
def norm(of: Operands) -> np.ndarray:
    x = of.dense(0)
    return _by_root(x - _means(x), float_param(of.node, 0))


@kernel("L2_NORM")
def l2_norm(of: Operands) -> np.ndarray:
    x = of.dense(0)
    return x / np.maximum(np.sqrt(_sums(np.square(x))), float_param(of.node, 0))


@kernel("GROUP_NORM")
def group_norm(of: Operands) -> None:
    """Groups of ceil(channels / n_groups) channels; as in ggml, the last group may be smaller."""
    x, channels = of.dense(0), of.dst.shape[1]
    width = -(-channels // int_param(of.node, 0))
    for batch in range(len(x)):
        for start in range(0, channels, width):
            group = x[batch, start : start + width]
            row = group.reshape(1, -1)
            of.dst[batch, start : start + width] = _by_root(
                row - _means(row), float_param(of.node, 1)).reshape(group.shape)


def _by_root(x: np.ndarray, eps: np.float32) -> np.ndarray:
    """Each row divided by the root of the mean of its squares plus eps."""
    found: Floats = x / np.sqrt(_means(np.square(x)) + eps)
    return found


# -- order ------------------------------------------------------------------------------


@kernel("ARGMAX")
def argmax(of: Operands) -> None:
    of.dst[...] = of.raw(0)[0, 0].argmax(axis=-1)


@kernel("ARGSORT", "TOP_K")
def order(of: Operands) -> None:
    """The indices that sort each row.  Elements of equal value keep their order; NaNs come last in either order."""
    descending = of.node.op == "TOP_K" or int_param(of.node, 0)
    rows = np.negative(of.raw(0)) if descending else of.raw(0)
    of.dst[...] = rows.argsort(axis=-1, kind="stable")[..., : of.node.ne[0]]


@kernel("ARANGE")
def arange(of: Operands) -> Floats:
    start, step = float_param(of.node, 0), float_param(of.node, 2)
    return start + step * np.arange(of.dst.size, dtype=np.float32)
