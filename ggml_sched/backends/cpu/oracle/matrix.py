"""Matrix products: mul_mat and mul_mat_id.

Weights that are not f32 are converted a chunk of rows at a time, so that the work memory stays small, and BLAS
multiplies the chunk.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Type
from ggml_sched.backends.cpu.oracle.operands import Operands, load
from ggml_sched.backends.cpu.oracle.registry import kernel
from ggml_sched.backends.cpu.oracle.rows import check_ids

CONVERTED = 1 << 18
"""Elements of a chunk of weights that is converted to f32: 1 MiB, which fits the cache of a core."""

DIRECT = 1 << 22
"""Elements of a chunk of f32 weights, which is larger because these need no conversion."""


def _multiply(x: np.ndarray, a: np.ndarray, kind: Type, out: np.ndarray) -> None:
    """Multiply columns x[..., columns, k] by weights a[rows, k] of type `kind`, to out[..., columns, rows]."""
    rows = max(1, (DIRECT if kind == Type.F32 else CONVERTED) // max(1, x.shape[-1]))
    for start in range(0, len(a), rows):
        w = np.ascontiguousarray(load(a[start : start + rows], kind))
        np.matmul(x, w.T, out[..., start : start + rows])


@kernel("MUL_MAT")
def mul_mat(of: Operands) -> np.ndarray:
    """Matrices of b that are multiplied with the same matrix of a (grouped-query attention) are joined to one, because
    one larger product is faster."""
    a, b = of.raw(0), of.dense(1)
    a3, a2 = a.shape[:2]
    b3, b2, n, k = b.shape
    folded = (a3, b3 // a3, a2, b2 // a2 * n)
    x, out = b.reshape(*folded, k), np.empty((*folded, of.dst.shape[3]), np.float32)
    for i3 in range(a3):
        for i2 in range(a2):
            _multiply(x[i3, :, i2], a[i3, i2], of.type(0), out[i3, :, i2])
    return out.reshape(of.dst.shape)


@kernel("MUL_MAT_ID")
def mul_mat_id(of: Operands) -> np.ndarray:
    """For each expert, the columns of all tokens that chose it are multiplied as one matrix.  `slot`: the place of the
    expert among those that its token chose."""
    experts, b, ids = of.raw(0)[0], of.f32(1)[0], of.raw(2)[0, 0]
    check_ids(ids, len(experts), of)
    out = np.empty((ids.size, of.dst.shape[3]), np.float32)
    for expert in np.unique(ids):
        token, slot = np.nonzero(ids == expert)
        product = np.empty((len(token), out.shape[1]), np.float32)
        _multiply(b[token, slot % b.shape[1]], experts[expert], of.type(0), product)
        out[token * ids.shape[1] + slot] = product
    return out.reshape(of.dst.shape)
