"""Attention: causal masks, soft_max, and flash_attn_ext.

soft_max follows IEEE rules: a row of -inf gives NaN.  flash_attn_ext does not read
cells whose mask is -inf, as in ggml: the content of an unused cell of a KV cache, even a NaN,
does not affect the result, and a row without any unmasked cell gives zeros.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cpu.oracle.job import Job, Part, float_param, int_param
from ggml_sched.backends.cpu.oracle.registry import F32, WEIGHTS, kernel, types

_ROWS = types(F32, F32, like=0)
_MASK = frozenset({Type.F32, Type.F16})


@kernel("DIAG_MASK_INF", "DIAG_MASK_ZERO", fits=_ROWS, inplace=0b1)
def diag_mask(job: Job) -> None:
    value = np.array(-np.inf if job.node.op == "DIAG_MASK_INF" else 0, np.float32)
    n1, n0 = job.dst.shape[2:]
    future = np.arange(n0) > int_param(job.node, 0) + np.arange(n1)[:, None]
    for part in job.parts():
        out = part.out()
        part.do(np.copyto, out, part.f32(0))
        part.do(np.copyto, out, value, where=part.cut(future[None, None]))


def alibi_slopes(n_head: int, max_bias: np.float32) -> np.ndarray | None:
    """The factor of the mask for each head (Press et al. 2021), or None where all are 1."""
    if max_bias <= 0:
        return None
    whole = 1 << (n_head.bit_length() - 1) if n_head else 1
    head = np.arange(n_head)
    exponent = np.where(head < whole, (head + 1) / whole, (2 * (head - whole) + 1) / (2 * whole))
    return np.exp2(-float(max_bias) * exponent).astype(np.float32)


def _mask_fits(mask: Tensor | None, n_kv: int, n_rows: int, n_head: int, n_batch: int) -> bool:
    return mask is None or (
        mask.ne[0] == n_kv and mask.ne[1] >= n_rows
        and all(n > 0 and m % n == 0 for n, m in zip(mask.ne[2:], (n_head, n_batch), strict=True)))


def _optional(node: Tensor, i: int) -> Tensor | None:
    return node.src[i] if i < len(node.src) else None


_SOFT_MAX = types(F32, F32, optional=(_MASK, F32), like=0)


def _soft_max_fits(node: Tensor) -> bool:
    if not _SOFT_MAX(node):
        return False
    sinks = _optional(node, 2)
    return (_mask_fits(_optional(node, 1), *node.ne)
            and (sinks is None or sinks.n_elements == node.ne[2]))


def _mask_for(job: Job, i: int, n_rows: int, n_head: int, n_batch: int) -> np.ndarray | None:
    """Source i, a mask, as an array [n_batch or 1, n_head or 1, n_rows, n_kv] of its own type."""
    if not job.has(i):
        return None
    mask = job.src(i)
    if mask.shape[0] not in (1, n_batch) or mask.shape[1] not in (1, n_head):
        # 2 masks over 6 heads: ggml takes them in turn.
        mask = job.operand(i, (n_batch, n_head, *mask.shape[2:]))
    return mask[:, :, :n_rows]


@kernel("SOFT_MAX", fits=_soft_max_fits, inplace=0b1)
def soft_max(job: Job) -> None:
    n_kv, n_rows, n_head, n_batch = job.node.ne
    if job.dst.size == 0:
        return
    scale, slopes = np.array(float_param(job.node, 0)), alibi_slopes(n_head, float_param(job.node, 1))
    mask = _mask_for(job, 1, n_rows, n_head, n_batch)
    sinks = job.flat(2).reshape(1, n_head, 1, 1) if job.has(2) else None
    if slopes is not None:
        slopes = slopes.reshape(1, n_head, 1, 1)
    for part in job.parts():
        out = part.out(dense=True)
        part.do(np.multiply, part.f32(0), scale, out)
        if mask is not None:
            _add_mask(part, out, part.load(part.cut(mask), job.type(1)),
                      None if slopes is None else part.cut(slopes))
        _normalise(part, out, None if sinks is None else part.cut(sinks))


def _add_mask(part: Part, scores: np.ndarray, mask: np.ndarray, slopes: np.ndarray | None) -> None:
    """scores += slope * mask."""
    if slopes is not None:
        biased = part.temp(np.broadcast_shapes(mask.shape, slopes.shape))
        part.do(np.multiply, mask, slopes, biased)
        mask = biased
    part.do(np.add, scores, mask, scores)


def _exponents(part: Part, scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """scores become exp(scores - largest of the row); returns scratch with each row's sum."""
    top, total = part.temp((*scores.shape[:-1], 1)), part.temp((*scores.shape[:-1], 1))
    part.do(np.maximum.reduce, scores, -1, None, top, True)
    if sinks is not None:
        part.do(np.maximum, top, sinks, out=top)
    part.do(np.subtract, scores, top, scores)
    part.do(np.exp, scores, scores)
    part.do(np.add.reduce, scores, -1, None, total, True)
    if sinks is not None:
        part.do(np.subtract, sinks, top, top)
        part.do(np.exp, top, top)
        part.do(np.add, total, top, total)
    return total


def _normalise(part: Part, scores: np.ndarray, sinks: np.ndarray | None) -> None:
    part.do(np.divide, scores, _exponents(part, scores, sinks), scores)


# -- flash attention ----------------------------------------------------------------

SCORES = 1 << 20
"""Scores of one part of a flash attention node."""

_FLASH = types(F32, F32, WEIGHTS, WEIGHTS, optional=(_MASK, F32))


def _flash_fits(node: Tensor) -> bool:
    if not _FLASH(node):
        return False
    q, k, v = node.src[:3]
    sinks = _optional(node, 4)
    d, n_rows, n_head, n_batch = q.ne
    return (k.ne[0] == d and k.ne[1:] == v.ne[1:] and k.ne[3] == n_batch
            and (n_head % k.ne[2] == 0 if k.ne[2] else n_head == 0)
            and node.ne == (v.ne[0], n_head, n_rows, n_batch)
            and _mask_fits(_optional(node, 3), k.ne[1], n_rows, n_head, n_batch)
            and (sinks is None or sinks.n_elements == n_head))


@kernel("FLASH_ATTN_EXT", fits=_flash_fits)
def flash_attn_ext(job: Job) -> None:
    q, k, v = job.src(0), job.src(1), job.src(2)
    d, n_rows, n_head, n_batch = job.node.src[0].ne
    n_kv, n_head_kv = job.node.src[1].ne[1:3]
    if job.dst.size == 0:
        return
    if n_kv == 0:
        job.part().do(job.dst.fill, 0)
        return
    group = n_head // n_head_kv
    mask = _mask_for(job, 3, n_rows, n_head, n_batch)
    settings = _Settings(job, n_head)
    heads = max(1, min(n_head_kv, SCORES // (n_kv * group * n_rows)))
    rows = max(1, min(n_rows, SCORES // (n_kv * group)))
    out = job.dst.transpose(0, 2, 1, 3)      # [n_batch, n_head, n_rows, d_v]
    for i3 in range(n_batch):
        for h in range(0, n_head_kv, heads):
            kv = slice(h, min(h + heads, n_head_kv))
            mine = slice(kv.start * group, kv.stop * group)
            for r in range(0, n_rows, rows):
                lines = slice(r, min(r + rows, n_rows))
                m = None
                if mask is not None:
                    heads_of_mask = mine if mask.shape[1] > 1 else slice(None)
                    m = mask[i3 if mask.shape[0] > 1 else 0, heads_of_mask, lines]
                part = job.part()
                keys = part.load(k[i3, kv], job.type(1), dense=True)
                values = part.load(v[i3, kv], job.type(2), dense=True)
                _attend(part, q[i3, mine, lines], keys, values, m, settings, mine, out[i3, mine, lines])


class _Settings:
    """The numbers of a flash attention node."""

    def __init__(self, job: Job, n_head: int) -> None:
        node = job.node
        self.softcap = float_param(node, 2)
        scale = float_param(node, 0)
        with np.errstate(all="ignore"):
            self.scale = np.array(scale / self.softcap if self.softcap else scale, np.float32)
        self.slopes = alibi_slopes(n_head, float_param(node, 1))
        self.mask_type = job.type(3) if job.has(3) else None
        self.sinks = job.flat(4) if job.has(4) else None


def _attend(part: Part, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None,
            settings: _Settings, heads: slice, out: np.ndarray) -> None:
    """Some heads of one batch.

    q[n_head, n_rows, d], k[n_head_kv, n_kv, d], v[n_head_kv, n_kv, d_v], mask[n_head or 1, n_rows, n_kv].
    """
    n_head, n_rows, d = q.shape
    n_head_kv, n_kv, _ = k.shape
    # The query heads that share a key head are rows of one product.
    scaled = part.temp((n_head, n_rows, d))
    part.do(np.multiply, q, settings.scale, scaled)
    scores = part.temp((n_head, n_rows, n_kv))
    by_head = scores.reshape(n_head_kv, -1, n_kv)
    part.do(np.matmul, scaled.reshape(n_head_kv, -1, d), k.swapaxes(1, 2), by_head)
    if settings.softcap:
        cap = np.array(settings.softcap)
        part.do(np.tanh, scores, scores)
        part.do(np.multiply, scores, cap, scores)
    bias = None
    if mask is not None:
        bias = part.load(mask, settings.mask_type)
        slopes = None if settings.slopes is None else settings.slopes[heads].reshape(-1, 1, 1)
        _add_mask(part, scores, bias, slopes)
    sinks = None if settings.sinks is None else settings.sinks[heads].reshape(-1, 1, 1)
    total = _exponents(part, scores, sinks)
    mixed = part.temp((n_head, n_rows, v.shape[2]))
    part.do(np.matmul, by_head, v, mixed.reshape(n_head_kv, -1, v.shape[2]))
    part.do(np.divide, mixed, total, mixed)
    if bias is not None:
        part.do(_without_masked_cells, mixed, scaled, k, v, bias, settings, heads)
    part.do(np.copyto, out, mixed)


def _without_masked_cells(mixed: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray,
                          settings: _Settings, heads: slice) -> None:
    """Recompute the rows whose result is NaN from unmasked cells alone."""
    lost = np.isnan(mixed)
    if not lost.any():
        return
    for head, row in np.argwhere(lost.any(axis=-1)):
        bias = mask[head if mask.shape[0] > 1 else 0, row]
        cells = np.flatnonzero(bias != -np.inf)
        kv = head // (q.shape[0] // k.shape[0])
        scores = k[kv, cells] @ q[head, row]
        if settings.softcap:
            scores = np.tanh(scores) * settings.softcap
        slope = np.float32(1) if settings.slopes is None else settings.slopes[heads][head]
        scores += slope * bias[cells]
        sink = np.float32(-np.inf) if settings.sinks is None else settings.sinks[heads][head]
        top = max(scores.max(initial=-np.inf), sink)
        weights = np.exp(scores - top)
        total = weights.sum() + np.exp(sink - top)
        mixed[head, row] = weights @ v[kv, cells] / total if cells.size and total != 0 else 0
