"""Products with many columns by the device's own library: f16 times f16, summed in f32.

A launch of "blas.gemm" has no kernel: the plan calls `Blas.gemm` of device.py with its arguments, in that
order.  Columns become f16 once; those with magnitudes beyond the range of f16 are divided by a power of two first, and
their products are multiplied by it.  Weights become f16 in scratch memory some rows at a time, so that these are still
in the device's cache when they are read again, and scratch memory stays small.
"""

from __future__ import annotations

from math import prod

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cupy.launch import Builder, scratch_size
from ggml_sched.backends.cupy.ops.blocks import is_multiple, to_dense
from ggml_sched.backends.cupy.regions import Scratch

__all__ = ["PRODUCT", "multiply", "suits", "work"]

PRODUCT = "blas.gemm"

MANY = 16
"""Fewest columns for which decoding weights to f16 pays: our own kernels compute tiles of 64 columns, so that 16 take
as long as 64."""

MANY_QUANTISED = 192
"""As MANY, for quantised weights where our kernels use tensor cores, and read the weights without decoding them.
From this many columns on, the library's f16 products make up for the decoding, if our tiles reach no more than 0.11
(RTX 4090) to 0.21 (RTX 3060) of the tensor cores' rate (bench/gpu_model.py).  The rate of our tiles was not measured
yet; llama.cpp's tiles reach 0.25."""

PIECE = 1 << 24
"""Elements of weights that are in scratch memory as f16 at once: 32 MiB."""


def suits(node: Tensor, tensor: bool) -> bool:
    """Whether the library multiplies: many columns, and a result in the layout that it writes.  `tensor`: whether our
    kernels use tensor cores.

    Weights in f32, which are few, are not rounded to f16.
    """
    a, x = node.src[:2]
    least = MANY_QUANTISED if tensor and a.type.is_quantized else MANY
    return (node.op == "MUL_MAT" and a.type != Type.F32 and x.ne[1] >= least and a.ne[1] >= 16 and a.ne[0] % 8 == 0
            and node.nb[1] % 4 == 0 and node.nb[2] % 4 == 0 and a.ne[0] > 0)


def work(node: Tensor) -> int:
    """Scratch bytes that `multiply` takes, at most."""
    a, x = node.src[:2]
    scales = () if x.type == Type.F16 else (4 * prod(x.ne[1:]),)
    return scratch_size(2 * x.n_elements, *scales, 2 * a.ne[0] * min(a.ne[1], _rows(a)))


def _rows(a: Tensor) -> int:
    """The rows of weights that are decoded at a time."""
    return max(256, PIECE // a.ne[0] // 256 * 256)


def multiply(b: Builder, node: Tensor) -> None:
    """Append the product: columns to f16; for some rows of weights at a time, decoding and a call of the library; then
    the multiplication by the columns' powers of two."""
    a, x = node.src[:2]
    w, columns, result = b.source(node, 0), b.source(node, 1), b.region(node)
    # Whether the library reads the weights where they are; it does not support rows that share elements.
    direct = a.type == Type.F16 and w.nb[0] == 2 and w.nb[1] >= 2 * a.ne[0] and is_multiple(w, 16)
    right = b.scratch(2 * x.n_elements)
    n_columns = prod(x.ne[1:])
    scales = None if x.type == Type.F16 else b.scratch(4 * n_columns)
    if scales is None:
        to_dense(b, x, columns, right, Type.F16)
    else:
        b.rows("activations.to_scaled_f16", n_columns, x.ne[0], columns, right, scales, np.int64(n_columns),
               np.int32(x.type))
    k, n = x.ne[:2]
    r2, r3 = (m // m_a for m, m_a in zip(x.ne[2:], a.ne[2:], strict=True))
    rows = a.ne[1] if direct else min(a.ne[1], _rows(a))
    piece = None if direct else b.scratch(2 * k * rows)
    # One call multiplies all matrices of axis 2, if each has its own weights, in f16 already; else those that share
    # them.
    together = x.ne[2] if direct and r2 == 1 else r2
    for a3 in range(a.ne[3]):
        for a2 in range(0, x.ne[2] // r2, together // r2):
            for first in range(0, a.ne[1], rows):
                m = min(rows, a.ne[1] - first)
                part = w.moved(first * w.nb[1] + a2 * w.nb[2] + a3 * w.nb[3]).shaped((k, m, 1, 1))
                left, lda = part.pointer(), w.nb[1] // 2
                if piece is not None:
                    to_dense(b, a, part, piece, Type.F16)
                    left, lda = piece, k
                for i3 in range(a3 * r3, a3 * r3 + r3):
                    i2 = a2 * r2
                    at = Scratch(right.offset + 2 * k * n * (i2 + x.ne[2] * i3))
                    to = result.moved(4 * first + i2 * node.nb[2] + i3 * node.nb[3]).pointer()
                    stride = w.nb[2] // 2 if together > r2 else 0
                    b.launch(PRODUCT, (1,), (1,), *map(np.int64, (m, n, k)), left, np.int64(lda), at, np.int64(k), to,
                             *map(np.int64, (node.nb[1] // 4, together, stride, k * n, node.nb[2] // 4)))
    if scales is not None:
        b.rows("activations.scale_columns", n_columns, node.ne[0], result, scales, np.int64(n_columns))
