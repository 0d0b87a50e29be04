"""Matrix products: mul_mat and mul_mat_id.

Weights that are not f32 are converted a chunk of rows at a time, so that the work memory stays small, and BLAS
multiplies the chunk.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cpu.oracle.operands import Operands, load
from ggml_sched.backends.cpu.oracle.registry import F32, FLOATS, I32, WEIGHTS, kernel, types
from ggml_sched.backends.cpu.oracle.rows import check_ids

CONVERTED = 1 << 18
"""Elements of a chunk of weights that is converted to f32: 1 MiB, which fits the cache of a core."""

DIRECT = 1 << 22
"""Elements of a chunk of f32 weights, which need no conversion."""


def _multiply(x: np.ndarray, a: np.ndarray, kind: Type, out: np.ndarray) -> None:
    """Multiply columns x[..., columns, k] by weights a[rows, k] of type `kind`, to out[..., columns, rows]."""
    rows = max(1, (DIRECT if kind == Type.F32 else CONVERTED) // max(1, x.shape[-1]))
    for start in range(0, len(a), rows):
        w = np.ascontiguousarray(load(a[start : start + rows], kind))
        np.matmul(x, w.T, out[..., start : start + rows])


_TYPES = types(F32, WEIGHTS, FLOATS)


def _mul_mat_fits(node: Tensor) -> bool:
    if not _TYPES(node):
        return False
    a, b = node.src
    if a.ne[0] != b.ne[0] or node.ne != (a.ne[1], *b.ne[1:]):
        return False
    return all(n == m if n == 0 else m % n == 0 for n, m in zip(a.ne[2:], b.ne[2:], strict=True))


@kernel("MUL_MAT", fits=_mul_mat_fits)
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


_ID_TYPES = types(F32, WEIGHTS, FLOATS, I32)


def _mul_mat_id_fits(node: Tensor) -> bool:
    if not _ID_TYPES(node):
        return False
    a, b, ids = node.src
    return (a.ne[0] == b.ne[0] and a.ne[3] == b.ne[3] == ids.ne[2] == ids.ne[3] == 1 and ids.ne[1] == b.ne[2]
            and b.ne[1] > 0 and ids.ne[0] % b.ne[1] == 0 and node.ne == (a.ne[1], ids.ne[0], b.ne[2], 1))


@kernel("MUL_MAT_ID", fits=_mul_mat_id_fits)
def mul_mat_id(of: Operands) -> np.ndarray:
    """For each expert, the columns of all tokens that chose it are multiplied as one matrix.  `slot`: which of a
    token's chosen experts it is."""
    experts, b, ids = of.raw(0)[0], of.f32(1)[0], of.raw(2)[0, 0]
    check_ids(ids, len(experts), of)
    out = np.empty((ids.size, of.dst.shape[3]), np.float32)
    for expert in np.unique(ids):
        token, slot = np.nonzero(ids == expert)
        product = np.empty((len(token), out.shape[1]), np.float32)
        _multiply(b[token, slot % b.shape[1]], experts[expert], of.type(0), product)
        out[token * ids.shape[1] + slot] = product
    return out.reshape(of.dst.shape)
