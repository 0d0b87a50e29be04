"""Launches of recurrent.cu: ssm_conv, ssm_scan."""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backends.cupy.launch import Builder, Op
from ggml_sched.backends.cupy.ops._oracle import like_oracle

__all__ = ["OPS"]


def _ssm_conv(b: Builder, node: Tensor) -> None:
    b.each("recurrent.ssm_conv", node)


def _ssm_scan(b: Builder, node: Tensor) -> None:
    x = node.src[1]
    n = x.ne[0] * x.ne[1] * x.ne[3]
    b.flat("recurrent.ssm_scan", 32 * n, *(b.source(node, i) for i in range(7)), b.view(node), np.int64(n), b.error,
           b.position)


OPS: dict[str, Op] = {"SSM_CONV": like_oracle("SSM_CONV", _ssm_conv), "SSM_SCAN": like_oracle("SSM_SCAN", _ssm_scan)}
