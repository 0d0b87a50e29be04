"""Launches of recurrent.cu: ssm_conv, ssm_scan."""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backends.cupy.launch import Builder
from ggml_sched.backends.cupy.ops.registry import computes


@computes("SSM_CONV")
def _ssm_conv(b: Builder, node: Tensor) -> None:
    b.each("recurrent.ssm_conv", node)


@computes("SSM_SCAN")
def _ssm_scan(b: Builder, node: Tensor) -> None:
    x = node.src[1]
    n = x.ne[0] * x.ne[1] * x.ne[3]
    b.flat("recurrent.ssm_scan", 32 * n, *(b.source(node, i) for i in range(7)), b.region(node), np.int64(n), b.error,
           b.position)
