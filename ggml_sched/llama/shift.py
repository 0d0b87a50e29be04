"""The context shift: moves cached tokens to other positions, by rotating their keys.

When a context is full, old tokens are forgotten and the later ones move to the positions that this frees.  Owns a graph
over the K caches.  Invariant: a row with delta d becomes the key of its token at its position plus d, up to rounding; a
row with delta 0 keeps its values.  Corresponds to llama.cpp's build_graph_shift.

Rotations add up, so the shift by d is rope at position d.  Rope also multiplies by a factor (YaRN's magnitude), which
is 1 here, because it was applied when the row was written (llama.cpp applies it a second time).
"""

from __future__ import annotations

from typing import NamedTuple

from ggml_sched._graph import Context, Graph, Tensor, Type
from ggml_sched.llama.builder import rope_factors
from ggml_sched.llama.hparams import Hparams
from ggml_sched.llama.kvcache import KVCache
from ggml_sched.llama.weights import Weights

__all__ = ["ShiftGraph", "build_shift"]

ROWS = 1024
"""The most rows that a node rotates: it makes a copy of them, which takes memory, also where few rows move."""
TURNED = (Type.F32, Type.F16)
"""Types of K caches that rope rotates as they are; rows of other types are converted to f32 and back."""


class ShiftGraph(NamedTuple):
    """`graph`, and its only input, i32 [n_ctx]: what is added to the position of each row of the cache."""

    graph: Graph
    deltas: Tensor


def build_shift(hparams: Hparams, weights: Weights, cache: KVCache) -> ShiftGraph | None:
    """The graph that rotates every row of every layer's K cache; None for a model without rope, and for a recurrent
    one, whose states no graph can move."""
    if hparams.recurrent:
        return None
    ctx = Context(f"{hparams.arch} shift of {cache.n_ctx} rows")
    deltas = ctx.tensor("i32", cache.n_ctx, "K_shift", input=True)
    factors = rope_factors(hparams, weights, cache)
    order = []
    for k, layer in zip(cache.k, hparams.layers, strict=True):
        r = layer.rope
        if k is None or r is None:
            continue
        kind, head = k.type, k.nb[1] // layer.n_head_kv
        # A block type is converted to f32 and back by whole blocks.  If the rotated part of a head is no whole number
        # of blocks, the whole head is converted.
        whole = r.k_first % kind.block_size or r.n_dims % kind.block_size
        first, width = (0, k.ne[0] // layer.n_head_kv) if whole else (r.k_first, r.n_dims)
        for row in range(0, cache.n_ctx, ROWS):
            n = min(ROWS, cache.n_ctx - row)
            part = ctx.view_3d(k, width, layer.n_head_kv, n, head, k.nb[1],
                               row * k.nb[1] + first // kind.block_size * kind.type_size)
            by = deltas if n == cache.n_ctx else ctx.view_1d(deltas, n, row * deltas.nb[0])
            x = part if kind in TURNED else ctx.cast(part, "f32")
            if whole and r.k_first:
                still = ctx.view_3d(x, r.k_first, layer.n_head_kv, n, x.nb[1], x.nb[2])
                x = ctx.view_3d(x, width - r.k_first, layer.n_head_kv, n, x.nb[1], x.nb[2], r.k_first * x.nb[0])
            x = ctx.rope(x, by, r.n_dims, r.mode, factors, r.n_ctx_orig, r.freq_base, r.freq_scale, r.ext_factor,
                         1.0 / r.yarn_magnitude, r.beta_fast, r.beta_slow)
            if whole and r.k_first:
                x = ctx.concat(still, x, 0)
            order.append(ctx.cpy(x, part))
    if not order:
        return None
    graph = Graph(*order)
    graph.meta = {"model": hparams.arch, "n_layer": hparams.n_layer, "n_ctx": cache.n_ctx, "shift": True}
    return ShiftGraph(graph, deltas)
