"""State space models: ssm_conv, ssm_scan (Gu and Dao 2023; Dao and Gu 2024).

The scan goes token by token, for all heads at once; several heads in a row may read the same B and C.  Source 0 of
ssm_scan is a table of states, source 6 says which of them each sequence begins with.  An id outside the table raises
BackendError before anything is written.
"""

from __future__ import annotations

import numpy as np

from ggml_sched.backends.cpu.oracle.operands import Operands
from ggml_sched.backends.cpu.oracle.registry import kernel
from ggml_sched.backends.cpu.oracle.rows import check_ids

LINEAR = np.float32(20)
"""Above this argument, softplus is the identity in ggml."""


@kernel("SSM_CONV")
def ssm_conv(of: Operands) -> np.ndarray:
    """Adds tap after tap of the filters, so that results do not depend on the number of tokens."""
    x, filters, n_tokens = of.raw(0)[0], of.raw(1)[0, 0], of.node.ne[1]     # [n_seqs, d_inner, n], [d_inner, d_conv]
    total = x[..., :n_tokens] * filters[:, :1]
    for tap in range(1, filters.shape[1]):
        total += x[..., tap : tap + n_tokens] * filters[:, tap : tap + 1]
    found: np.ndarray = total.swapaxes(1, 2)
    return found


@kernel("SSM_SCAN")
def ssm_scan(of: Operands) -> np.ndarray:
    table, x, dt, a = of.raw(0), of.raw(1), of.raw(2)[0], of.raw(3)[0, 0][:, None]
    ids, n_head = of.raw(6)[0, 0, 0], x.shape[2]
    check_ids(ids, len(table), of)
    b, c = (np.repeat(of.raw(i), n_head // of.raw(i).shape[2], axis=2)[:, :, :, None] for i in (4, 5))
    y, states = np.empty(x.shape, np.float32), table[ids]          # y[n_seqs, n_tokens, n_head, head_dim]
    for sequence, state in enumerate(states):
        for token in range(x.shape[1]):
            step = np.ascontiguousarray(dt[sequence, token])
            step = np.where(step > LINEAR, step, np.log1p(np.exp(step)))[:, None, None]
            state *= np.exp(step * a)
            state += x[sequence, token][..., None] * step * b[sequence, token]
            np.add.reduce(state * c[sequence, token], -1, out=y[sequence, token])
    return np.concatenate([y.reshape(-1), states.reshape(-1)])
