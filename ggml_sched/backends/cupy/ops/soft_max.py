"""Launches of soft_max.cu: soft_max, causal masks."""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backends.cupy.launch import Builder, Op
from ggml_sched.backends.cupy.ops._oracle import float_param, int_param, kind, like_oracle, n_rows

__all__ = ["OPS"]


def _soft_max(b: Builder, node: Tensor) -> None:
    mask, sinks = (i < len(node.src) and node.src[i] is not None for i in (1, 2))
    rows, d = n_rows(node), b.view(node)
    b.rows("soft_max.soft_max", rows, node.ne[0], b.source(node, 0), b.source(node, 1) if mask else d,
           b.source(node, 2) if sinks else d, d, np.int64(rows), float_param(node, 0), float_param(node, 1),
           kind(node.src[1]) if mask else np.int32(-1), np.int32(sinks))


def _diag_mask(b: Builder, node: Tensor) -> None:
    value = np.float32(-np.inf if node.op == "DIAG_MASK_INF" else 0)
    b.each("soft_max.diag_mask", node, np.int32(int_param(node, 0)), value)


OPS: dict[str, Op] = {
    "SOFT_MAX": like_oracle("SOFT_MAX", _soft_max),
    "DIAG_MASK_INF": like_oracle("DIAG_MASK_INF", _diag_mask),
    "DIAG_MASK_ZERO": like_oracle("DIAG_MASK_ZERO", _diag_mask),
}
