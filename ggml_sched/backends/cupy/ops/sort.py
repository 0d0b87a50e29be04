"""Launches of sort.cu: argsort, top_k."""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backends.cupy.launch import Builder
from ggml_sched.backends.cupy.ops.registry import computes, int_param, n_rows

__all__ = ["CHUNK", "KEY"]

CHUNK = 4096
"""The most keys that a block sorts in shared memory; a longer row is sorted in several launches."""
KEY = 8
"""Bytes of a key: what a row is sorted by, and its position."""


def _padded(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _work(node: Tensor) -> int:
    a = node.src[0]
    return KEY * _padded(a.ne[0]) * n_rows(a) if a.ne[0] > CHUNK else 0


@computes("ARGSORT", "TOP_K", work=_work)
def _sort(b: Builder, node: Tensor) -> None:
    a = node.src[0]
    n, rows = _padded(a.ne[0]), n_rows(a)
    descending = np.int32(node.op == "TOP_K" or bool(int_param(node, 0)))
    source, d = b.source(node, 0), b.region(node)
    if n <= CHUNK:
        b.rows("sort.sort_rows", rows, n, source, d, np.int64(rows), np.int32(n), descending, shared=KEY * n, each=2)
        return
    keys, chunks, shared = b.scratch(_work(node)), rows * (n // CHUNK), KEY * CHUNK
    counts = np.int64(rows), np.int64(n)
    b.rows("sort.sort_chunks", chunks, CHUNK, source, keys, *counts, descending, shared=shared, each=2)
    size = 2 * CHUNK
    while size <= n:
        far = size // 2
        while far >= CHUNK:
            b.flat("sort.exchange_far", rows * n // 2, keys, np.int64(rows * n // 2), np.int64(n), np.int64(far),
                   np.int64(size))
            far //= 2
        b.rows("sort.merge_chunks", chunks, CHUNK, keys, *counts, np.int64(size), shared=shared, each=2)
        size *= 2
    b.flat("sort.take_indices", node.n_elements, keys, d, np.int64(node.n_elements), np.int64(n))
