"""Launches of elementwise.cu: arithmetic, functions of one element, gated units."""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backends.cupy.launch import Builder, Op
from ggml_sched.backends.cupy.ops._oracle import like_oracle

__all__ = ["OPS"]

_BINARY = ("ADD", "SUB", "MUL", "DIV")


def kind(t: Tensor) -> np.int32:
    return np.int32(t.type)


def _binary(b: Builder, node: Tensor) -> None:
    number = _BINARY.index(node.op) if node.op in _BINARY else 0
    left, right = node.src[:2]
    if node.n_elements:
        b.flat("elementwise.binary", node.n_elements, b.source(node, 0), b.source(node, 1), b.view(node),
               np.int64(node.n_elements), np.int32(number), kind(left), kind(right), kind(node))


OPS: dict[str, Op] = {op: like_oracle(op, _binary) for op in (*_BINARY, "ADD1")}
