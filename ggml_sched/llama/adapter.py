"""Today's builder and cache behind the contract of tomorrow's; goes when that is there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ggml_sched._graph import Graph, Tensor
from ggml_sched.llama.builder import BatchGraph as OldGraph
from ggml_sched.llama.builder import Builder
from ggml_sched.llama.kvcache import KVCache


@dataclass(frozen=True, slots=True)
class Shape:
    n_tokens: int
    n_kv: int
    n_outputs: int
    embeddings: bool = False


@dataclass(frozen=True, slots=True)
class BatchGraph:
    graph: Graph
    output: Tensor
    old: OldGraph

    def set_inputs(self, batch, rows, mask_of, state_row) -> None:
        old = self.old
        old.tokens.set(batch.tokens)
        old.positions.set(batch.positions)
        old.k_rows.set(rows)
        n_ctx = old.graph.meta["n_ctx"]
        width = old.v_rows.ne[0] // len(rows)
        old.v_rows.set((rows[:, None] + np.arange(width) * n_ctx).reshape(-1))
        old.mask.set(np.where(mask_of(0), np.float32(0), np.float32(-np.inf)))


def build_graph(arch, hparams, weights, cache, shape, flash) -> BatchGraph:
    builder = Builder(hparams, weights, cache, shape.n_tokens, shape.n_kv)
    old = builder.finish(arch.build(builder))
    return BatchGraph(old.graph, old.logits, old)


def clear_rows(cache: KVCache, rows: np.ndarray) -> None:
    for k, v in zip(cache.k, cache.v, strict=True):
        for row in rows:
            k.backend.set_tensor(k, bytes(k.nb[1]), k.nb[1] * int(row))
        values = np.zeros(v.nbytes, np.uint8).reshape(v.ne[0], cache.n_ctx, v.nb[0])
        v.backend.get_tensor(v, values.reshape(-1))
        values[:, rows] = 0
        v.backend.set_tensor(v, values.reshape(-1))


def read_rows(cache: KVCache, rows: np.ndarray) -> bytes:
    parts = []
    for k, v in zip(cache.k, cache.v, strict=True):
        values = np.zeros(k.nbytes, np.uint8)
        k.backend.get_tensor(k, values)
        parts.append(values.reshape(-1, k.nb[1])[rows].tobytes())
        values = np.zeros(v.nbytes, np.uint8)
        v.backend.get_tensor(v, values)
        parts.append(values.reshape(v.ne[0], cache.n_ctx, v.nb[0])[:, rows].tobytes())
    return b"".join(parts)


def write_rows(cache: KVCache, rows: np.ndarray, data: bytes) -> None:
    data, n, at = np.frombuffer(data, np.uint8), len(rows), 0
    for k, v in zip(cache.k, cache.v, strict=True):
        values = np.zeros(k.nbytes, np.uint8)
        k.backend.get_tensor(k, values)
        values.reshape(-1, k.nb[1])[rows] = data[at : at + n * k.nb[1]].reshape(n, -1)
        k.backend.set_tensor(k, values)
        at += n * k.nb[1]
        values = np.zeros(v.nbytes, np.uint8)
        v.backend.get_tensor(v, values)
        size = n * v.nb[1]
        values.reshape(v.ne[0], cache.n_ctx, v.nb[0])[:, rows] = data[at : at + size].reshape(v.ne[0], n, -1)
        v.backend.set_tensor(v, values)
        at += size
