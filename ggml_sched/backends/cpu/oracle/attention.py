"""Attention: causal masks, soft_max, and flash_attn_ext.

soft_max follows IEEE rules: a row of -inf gives NaN.  In flash_attn_ext, as in ggml, the content of KV cache cells
whose mask is -inf, even a NaN, does not affect the result, and a row without any unmasked cell gives zeros.
"""

from __future__ import annotations

import numpy as np

from ggml_sched.backends.cpu.oracle.operands import Operands, float_param, int_param
from ggml_sched.backends.cpu.oracle.registry import kernel, repeated


@kernel("DIAG_MASK_INF", "DIAG_MASK_ZERO")
def diag_mask(of: Operands) -> np.ndarray:
    value = np.float32(-np.inf if of.node.op == "DIAG_MASK_INF" else 0)
    n1, n0 = of.dst.shape[2:]
    future = np.arange(n0) > int_param(of.node, 0) + np.arange(n1)[:, None]
    return np.where(future, value, of.raw(0))


def alibi_slopes(n_head: int, max_bias: np.float32) -> np.ndarray | None:
    """ALiBi: the factor of the mask for each head (Press et al. 2021); None if there is no bias, so that all are 1."""
    if max_bias <= 0:
        return None
    whole = 1 << (n_head.bit_length() - 1) if n_head else 1
    head = np.arange(n_head)
    exponent = np.where(head < whole, (head + 1) / whole, (2 * (head - whole) + 1) / (2 * whole))
    return np.exp2(-float(max_bias) * exponent).astype(np.float32)


def _bias(of: Operands, i: int, shape: tuple[int, ...], slopes: np.ndarray | None) -> np.ndarray | None:
    """Source i, a mask, times the ALiBi factor of each head: an array that broadcasts to scores of `shape`, [n_batch,
    n_head, n_rows, n_kv]; None without a mask."""
    if not of.has(i):
        return None
    mask = of.f32(i)[:, :, : shape[2]]
    mask = repeated(mask, (*shape[:2], *mask.shape[2:]))        # head h has mask h % (number of masks), as in ggml
    return mask if slopes is None else mask * slopes.reshape(1, -1, 1, 1)


def _exponents(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Replace each score by exp(score - largest of its row), in place, and return the sum of each row.  A sink counts
    as one more score of every row of its head."""
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks)
    np.exp(np.subtract(scores, top, scores), scores)
    total = np.add.reduce(scores, -1, keepdims=True)
    return total if sinks is None else total + np.exp(sinks - top)


@kernel("SOFT_MAX")
def soft_max(of: Operands) -> np.ndarray:
    scores = of.dense(0) * float_param(of.node, 0)
    bias = _bias(of, 1, scores.shape, alibi_slopes(scores.shape[1], float_param(of.node, 1)))
    if bias is not None:
        scores += bias
    total = _exponents(scores, of.dense(2).reshape(1, -1, 1, 1) if of.has(2) else None)
    found: np.ndarray = scores / total
    return found


# -- flash attention ----------------------------------------------------------------


@kernel("FLASH_ATTN_EXT")
def flash_attn_ext(of: Operands) -> np.ndarray:
    """Computes one key head of one batch after the other, together with the query heads that share it."""
    q, k, v = of.raw(0), of.dense(1), of.dense(2)
    n_batch, n_head, n_rows, d = q.shape
    n_head_kv, n_kv = k.shape[1:3]
    out = np.zeros((n_batch, n_head, n_rows, v.shape[3]), np.float32)
    softcap, scale = float_param(of.node, 2), float_param(of.node, 0)
    q = np.ascontiguousarray(q * (scale / softcap if softcap else scale))
    bias = _bias(of, 3, (n_batch, n_head, n_rows, n_kv), alibi_slopes(n_head, float_param(of.node, 1)))
    if bias is not None:
        bias = np.broadcast_to(bias, (n_batch, n_head, n_rows, n_kv))
    sinks = of.dense(4).reshape(n_head, 1, 1) if of.has(4) else None
    group = n_head // n_head_kv
    for batch, head in np.ndindex((n_batch, n_head_kv) if n_kv else (0, 0)):
        heads = slice(head * group, (head + 1) * group)
        _attend(q[batch, heads], k[batch, head], v[batch, head], softcap, None if bias is None else bias[batch, heads],
                None if sinks is None else sinks[heads], out[batch, heads])
    return out.swapaxes(1, 2)


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, softcap: np.float32, bias: np.ndarray | None,
            sinks: np.ndarray | None, out: np.ndarray) -> None:
    """Attention of the query heads q[n_head, n_rows, d] that share one key head: writes out[n_head, n_rows, d_v] from
    k[n_kv, d], v[n_kv, d_v] and bias[.., n_kv]."""
    n_head, n_rows, d = q.shape
    scores = np.matmul(q.reshape(n_head * n_rows, d), k.T).reshape(n_head, n_rows, len(k))
    if softcap:
        scores = np.tanh(scores) * softcap
    if bias is not None:
        scores += bias
    total = _exponents(scores, sinks)
    np.divide(np.matmul(scores.reshape(-1, len(k)), v).reshape(out.shape), total, out)
    if bias is not None:
        # A NaN may come from a masked cell: compute rows with NaNs again, from their unmasked cells alone.
        for head, row in np.argwhere(np.isnan(out).any(axis=-1)):
            cells = np.flatnonzero(bias[head, row] != -np.inf)
            scores = k[cells] @ q[head, row]
            if softcap:
                scores = np.tanh(scores) * softcap
            scores += bias[head, row, cells]
            sink = np.float32(-np.inf) if sinks is None else sinks[head, 0, 0]
            top = max(scores.max(initial=-np.inf), sink)
            weights = np.exp(scores - top)
            total = weights.sum() + np.exp(sink - top)
            out[head, row] = weights @ v[cells] / total if cells.size and total != 0 else 0
