"""Launches of soft_max.cu: soft_max, causal masks."""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backends.cupy.launch import Builder
from ggml_sched.backends.cupy.ops.registry import computes, float_param, int_param, kind, n_rows, optional


@computes("SOFT_MAX")
def _soft_max(b: Builder, node: Tensor) -> None:
    mask, sinks = optional(node, 1), optional(node, 2)
    rows, d = n_rows(node), b.region(node)
    b.rows("soft_max.soft_max", rows, node.ne[0], b.source(node, 0), d if mask is None else b.source(node, 1),
           d if sinks is None else b.source(node, 2), d, np.int64(rows), float_param(node, 0), float_param(node, 1),
           np.int32(-1) if mask is None else kind(mask), np.int32(sinks is not None))


@computes("DIAG_MASK_INF", "DIAG_MASK_ZERO")
def _diag_mask(b: Builder, node: Tensor) -> None:
    value = np.float32(-np.inf if node.op == "DIAG_MASK_INF" else 0)
    b.each("soft_max.diag_mask", node, np.int32(int_param(node, 0)), value)
