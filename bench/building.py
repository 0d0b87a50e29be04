"""A graph of a llama-like model built by this package's calls: the same calls in the same order as peer/builder.cpp.
Measures a step without its compute: `Model.step` makes a new context and a new graph and allocates it; the plan cache
finds the plan by the graph's fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import peer
from timing import in_turns, timed

import ggml_sched as gs

__all__ = ["SHAPES", "Model", "Shape", "measure"]


class Shape(NamedTuple):
    """The numbers of a model and of a step; `peer_shape` of peer/builder.cpp."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    n_tokens: int
    n_kv: int
    n_ctx: int


SHAPES = {
    "TinyLlama 1.1B, decode": Shape(22, 2048, 32, 4, 5632, 32000, 1, 512, 4096),
    "Llama 2 7B, decode": Shape(32, 4096, 32, 32, 11008, 32000, 1, 512, 4096),
    "Llama 2 7B, 512 tokens": Shape(32, 4096, 32, 32, 11008, 32000, 512, 512, 4096),
    "Llama 3.1 405B, decode": Shape(126, 16384, 128, 8, 53248, 128256, 1, 512, 4096),
}


class Layer(NamedTuple):
    attn_norm: gs.Tensor
    wq: gs.Tensor
    wk: gs.Tensor
    wv: gs.Tensor
    wo: gs.Tensor
    ffn_norm: gs.Tensor
    gate: gs.Tensor
    up: gs.Tensor
    down: gs.Tensor
    cache_k: gs.Tensor
    cache_v: gs.Tensor


class Model:
    """Weights and caches on one device without memory, and a scheduler.  A context manager."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.backend = gs.DryBackend("CPU")
        self.weights, self.caches = gs.Context("weights"), gs.Context("caches")
        n_kv = shape.n_embd // shape.n_head * shape.n_head_kv
        self.layers = [self._layer(n_kv) for _ in range(shape.n_layer)]
        self.embedding = self._matrix(shape.n_embd, shape.n_vocab)
        self.norm = self.weights.tensor("f32", shape.n_embd)
        self.output = self._matrix(shape.n_embd, shape.n_vocab)
        self.backend.alloc_tensors(self.weights)
        self.backend.alloc_tensors(self.caches, usage="any")
        self.scheduler = gs.Scheduler([self.backend])
        self.graph = self.build()
        self.scheduler.alloc(self.graph)

    def _matrix(self, *ne: int) -> gs.Tensor:
        return self.weights.tensor("q4_0", ne)

    def _layer(self, n_kv: int) -> Layer:
        n, n_ff, n_ctx = self.shape.n_embd, self.shape.n_ff, self.shape.n_ctx
        return Layer(self.weights.tensor("f32", n), self._matrix(n, n), self._matrix(n, n_kv), self._matrix(n, n_kv),
                     self._matrix(n, n), self.weights.tensor("f32", n), self._matrix(n, n_ff), self._matrix(n, n_ff),
                     self._matrix(n_ff, n), self.caches.tensor("f16", (n_kv, n_ctx)),
                     self.caches.tensor("f16", (n_kv, n_ctx)))

    def build(self) -> gs.Graph:
        """The calls of peer_builder::build."""
        _, n_embd, heads, kv_heads, _, _, n, n_kv, _ = self.shape
        d = n_embd // heads
        scale = d**-0.5
        ctx = gs.Context()
        tokens, positions = ctx.tensor("i32", n, input=True), ctx.tensor("i32", n, input=True)
        rows, mask = ctx.tensor("i64", n, input=True), ctx.tensor("f32", (n_kv, n), input=True)
        outputs = []
        x = ctx.get_rows(self.embedding, tokens)
        for layer in self.layers:
            y = ctx.mul(ctx.rms_norm(x, 1e-5), layer.attn_norm)
            q = ctx.reshape_3d(ctx.mul_mat(layer.wq, y), d, heads, n)
            k = ctx.reshape_3d(ctx.mul_mat(layer.wk, y), d, kv_heads, n)
            v = ctx.mul_mat(layer.wv, y)
            q = ctx.rope_ext(q, positions, None, d, 0, 4096, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0)
            k = ctx.rope_ext(k, positions, None, d, 0, 4096, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0)
            k = ctx.set_rows(layer.cache_k, ctx.reshape_2d(k, d * kv_heads, n), rows)
            v = ctx.set_rows(layer.cache_v, v, rows)
            outputs += q, k, v
            head, row = 2 * d, layer.cache_k.nb[1]
            k = ctx.permute(ctx.view_3d(layer.cache_k, d, kv_heads, n_kv, head, row, 0), 0, 2, 1, 3)
            v = ctx.permute(ctx.view_3d(layer.cache_v, d, kv_heads, n_kv, head, row, 0), 0, 2, 1, 3)
            scores = ctx.mul_mat(k, ctx.permute(q, 0, 2, 1, 3))
            scores = ctx.soft_max_ext(scores, mask, scale, 0.0)
            y = ctx.mul_mat(ctx.cont(ctx.transpose(v)), scores)
            y = ctx.cont(ctx.permute(y, 0, 2, 1, 3), (n_embd, n))
            x = ctx.add(ctx.mul_mat(layer.wo, y), x)
            y = ctx.mul(ctx.rms_norm(x, 1e-5), layer.ffn_norm)
            y = ctx.swiglu_split(ctx.mul_mat(layer.gate, y), ctx.mul_mat(layer.up, y))
            x = ctx.add(ctx.mul_mat(layer.down, y), x)
        x = ctx.mul_mat(self.output, ctx.mul(ctx.rms_norm(x, 1e-5), self.norm))
        return gs.Graph(*outputs, ctx.set_output(x))

    def step(self) -> None:
        """Build the graph anew and allocate it; releases the previous one."""
        self.graph = self.build()
        self.scheduler.alloc(self.graph)

    def close(self) -> None:
        self.scheduler.close()
        self.weights.close()
        self.caches.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class Times(NamedTuple):
    """Medians of blocks in microseconds."""

    nodes: int
    blocks: dict[str, list[float]]
    """Of "step" and "build", ours; with the peer also of "ggml step" and "ggml build"."""


def measure(shape: Shape, rounds: int) -> Times:
    """Times of both builders, measured in turn; RuntimeError unless they build the same nodes."""
    with Model(shape) as ours:
        runs: dict[str, Callable[[], float]] = {"step": lambda: timed(ours.step), "build": lambda: timed(ours.build)}
        if not peer.available():
            return Times(len(ours.graph), in_turns(runs, rounds))
        with peer.Builder(shape) as theirs:
            named = [t.op.rpartition(":")[2] for t in ours.graph.nodes]
            if theirs.ops != named:
                raise RuntimeError(f"ggml built {len(theirs.ops)} nodes, not the same as our {len(named)}")
            runs |= {"ggml step": theirs.run, "ggml build": lambda: theirs.run(False)}
            return Times(len(ours.graph), in_turns(runs, rounds))
