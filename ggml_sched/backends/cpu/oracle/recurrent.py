"""State space models: ssm_conv, ssm_scan (Gu and Dao 2023; Dao and Gu 2024).

The scan goes token by token, for whole heads at once; the heads are its parts, each within one group, of whose B and C
all its heads read.  A state id outside the table raises BackendError before anything is written.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backends.cpu.oracle.job import Job, int_param
from ggml_sched.backends.cpu.oracle.registry import F32, I32, kernel, types
from ggml_sched.backends.cpu.oracle.rows import check_ids

HEADS = 1 << 14
"""Elements of the states that one part updates: they stay in a core's cache from token to token."""

LINEAR = np.float32(20)
"""ggml: above it softplus is the identity."""

_CONV = types(F32, F32, F32)
_SCAN = types(F32, F32, F32, F32, F32, F32, F32, I32)


def _conv_fits(node: Tensor) -> bool:
    if not _CONV(node):
        return False
    sx, c = (source.ne for source in node.src)
    return (sx[3] == c[2] == c[3] == 1 and c[1] == sx[1] and 1 <= c[0] <= sx[0] + 1
            and node.ne == (sx[1], sx[0] - c[0] + 1, sx[2], 1))


@kernel("SSM_CONV", fits=_conv_fits)
def ssm_conv(job: Job) -> None:
    if job.dst.size == 0:
        return
    filters = job.src(1)[0, 0]                                     # [d_inner, d_conv]
    n_tokens = job.node.ne[1]
    inputs, out = job.src(0)[0], job.dst[0]                        # [n_seqs, d_inner, n], [n_seqs, n_tokens, d_inner]
    step = max(1, HEADS // n_tokens)
    for start in range(0, filters.shape[0], step):
        here = slice(start, start + step)
        part = job.part()
        x, f, y = inputs[:, here], filters[here], out[..., here].swapaxes(1, 2)
        total, product = part.temp(y.shape), part.temp(y.shape)
        part.do(_convolve, x, f, total, product, y)


def _convolve(x: np.ndarray, filters: np.ndarray, total: np.ndarray, product: np.ndarray, y: np.ndarray) -> None:
    """Tap after tap, so that the order of the sums is one for all lengths."""
    n_tokens = total.shape[-1]
    np.multiply(x[..., :n_tokens], filters[:, :1], out=total)
    for tap in range(1, filters.shape[1]):
        np.multiply(x[..., tap : tap + n_tokens], filters[:, tap : tap + 1], out=product)
        np.add(total, product, out=total)
    np.copyto(y, total)


def _scan_fits(node: Tensor) -> bool:
    if not _SCAN(node) or int_param(node, 0) not in (0, 1):        # 1: the last state of each sequence is kept
        return False
    s, x, dt, a, b, c, ids = (source.ne for source in node.src)
    d_state, head_dim, n_head, _ = s
    n_tokens, n_seqs = x[2:]
    return (x[:2] == (head_dim, n_head) and dt == (n_head, n_tokens, n_seqs, 1)
            and a in ((d_state, n_head, 1, 1), (1, n_head, 1, 1)) and b == c
            and b[0] == d_state and b[2:] == (n_tokens, n_seqs) and b[1] > 0 and n_head % b[1] == 0
            and ids == (n_seqs, 1, 1, 1)
            and node.ne == (head_dim * n_head * n_tokens * n_seqs + d_state * head_dim * n_head * n_seqs, 1, 1, 1))


@kernel("SSM_SCAN", fits=_scan_fits)
def ssm_scan(job: Job) -> None:
    table, x, ids = job.src(0), job.src(1), job.src(6)[0, 0, 0]
    dt, a, b, c = job.src(2)[0], job.src(3)[0, 0], job.src(4), job.src(5)
    d_state, head_dim, n_head, _ = job.node.src[0].ne
    if job.dst.size == 0:
        return
    job.do(check_ids, ids, table.shape[0], job)
    flat = job.dst.reshape(-1)
    y = flat[: x.size].reshape(x.shape)                            # [n_seqs, n_tokens, n_head, head_dim]
    states = flat[x.size :].reshape(x.shape[0], n_head, head_dim, d_state)
    together = n_head // b.shape[2]
    step = min(together, max(1, HEADS // max(1, head_dim * d_state)))
    for group in range(b.shape[2]):
        for start in range(group * together, (group + 1) * together, step):
            heads = slice(start, min(start + step, (group + 1) * together))
            part = job.part()
            n = heads.stop - heads.start
            room = (part.temp((n, head_dim, d_state)), part.temp((n, head_dim, d_state)))
            part.do(_scan, table[:, heads], ids, x[:, :, heads], dt[..., heads], a[heads, None], b[:, :, group],
                    c[:, :, group], y[:, :, heads], states[:, heads], room)


def _scan(table: np.ndarray, ids: np.ndarray, x: np.ndarray, dt: np.ndarray, a: np.ndarray, b: np.ndarray,
          c: np.ndarray, y: np.ndarray, states: np.ndarray, room: tuple[np.ndarray, np.ndarray]) -> None:
    """Some heads of one group, all sequences."""
    decay, t = room
    for sequence, start in enumerate(ids):
        state = states[sequence]
        np.copyto(state, table[start])
        for token in range(x.shape[1]):
            step = np.ascontiguousarray(dt[sequence, token])
            step = np.where(step > LINEAR, step, np.log1p(np.exp(step)))[:, None, None]
            np.copyto(decay, np.exp(step * a))
            np.multiply(state, decay, out=state)
            np.multiply(x[sequence, token][..., None] * step, b[sequence, token], out=t)
            np.add(state, t, out=state)
            np.multiply(state, c[sequence, token], out=t)
            np.add.reduce(t, -1, out=y[sequence, token])
