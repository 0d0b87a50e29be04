"""The context shift: moves cached tokens to other positions, by rotating their keys.

When a context is full, old tokens are forgotten and the later ones move to the positions that this frees.  Owns graphs
over the K caches.  Invariants: a row with delta d becomes the key of its token at its position plus d, up to rounding;
a row with delta 0 keeps its values; what fails half way can be undone.  Corresponds to llama.cpp's build_graph_shift.

Rotations add up, so the shift by d is rope at position d.  Rope also multiplies by a factor (YaRN's magnitude), which
is 1 here, because it was applied when the row was written (llama.cpp applies it a second time).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ggml_sched._graph import Context, Graph, Tensor, Type
from ggml_sched.llama.builder import rope_factors
from ggml_sched.llama.hparams import Hparams
from ggml_sched.llama.kvcache import KVCache
from ggml_sched.llama.weights import Weights

__all__ = ["Rotation", "ShiftGraph", "build_shifts"]

ROWS = 1024
"""The most rows that a node rotates: it makes a copy of them, which takes memory, also where few rows move."""
TURNED = (Type.F32, Type.F16)
"""Types of K caches that rope rotates as they are; rows of other types are converted to f32 and back."""


class ShiftGraph(NamedTuple):
    """A graph that rotates every row of the K caches of some layers."""

    graph: Graph
    deltas: Tensor
    """Its only input, i32 [n_ctx]: what is added to the position of each row of the cache."""
    layers: tuple[int, ...]

    def nbytes(self, cache: KVCache) -> int:
        """The bytes of the keys of its layers, which a `Rotation` copies."""
        return sum(k.nbytes for k in (cache.k[layer] for layer in self.layers) if k is not None)


class Rotation:
    """One context shift: rotates the keys of `rows`, one graph after another, and undoes that where one fails.

    It has a copy of the keys that one graph rotates, so that under a limit of memory each layer has a graph of its own.
    """

    def __init__(self, cache: KVCache, rows: np.ndarray, graphs: Sequence[ShiftGraph],
                 compute: Callable[[ShiftGraph, np.ndarray], None]) -> None:
        self._cache, self._rows, self._graphs, self._compute = cache, rows, graphs, compute
        self._deltas: np.ndarray | None = None
        self._copied: tuple[int, int, list[np.ndarray] | None] = 0, 0, None
        """(n, k, keys): once `keys`, if there are any, are written to the layers of graph k, those of the first n
        graphs have been rotated.  One value, so that an interrupt finds either the old or the new one."""

    def apply(self, deltas: np.ndarray) -> None:
        """Rotate the keys of each row by `deltas`, i32 [n_ctx]; call `undo` after an exception."""
        self._deltas = deltas
        for k, graph in enumerate(self._graphs):
            self._rotate(k, graph, k, deltas)
            self._copied = k + 1, 0, None

    def undo(self) -> None:
        """Restore the keys: those of the graph that failed exactly, those of graphs before it by rotating them back,
        which rounds.  Idempotent, also after an exception."""
        while True:
            n, k, keys = self._copied
            if keys is not None:
                self._cache.write_keys(self._rows, self._graphs[k].layers, keys)
            if n == 0 or self._deltas is None:
                return
            del keys
            self._copied = n, 0, None
            self._rotate(n - 1, self._graphs[n - 1], n, -self._deltas)
            self._copied = n - 1, 0, None

    def _rotate(self, k: int, graph: ShiftGraph, n: int, deltas: np.ndarray) -> None:
        self._copied = n, k, self._cache.read_keys(self._rows, graph.layers)
        self._compute(graph, deltas)


def build_shifts(hparams: Hparams, weights: Weights, cache: KVCache, each_layer: bool) -> list[ShiftGraph]:
    """The graphs that rotate every row of every layer's K cache: one for all layers, or one for `each_layer`.  Empty
    for a model without rope, and for a recurrent one, whose states no graph can move."""
    if hparams.recurrent:
        return []
    turned = [i for i, (k, layer) in enumerate(zip(cache.k, hparams.layers, strict=True))
              if k is not None and layer.rope is not None]
    groups = [(i,) for i in turned] if each_layer else [tuple(turned)] if turned else []
    return [_build(hparams, weights, cache, layers) for layers in groups]


def _build(hparams: Hparams, weights: Weights, cache: KVCache, layers: tuple[int, ...]) -> ShiftGraph:
    ctx = Context(f"{hparams.arch} shift of {cache.n_ctx} rows")
    deltas = ctx.tensor("i32", cache.n_ctx, "K_shift", input=True)
    factors = rope_factors(hparams, weights, cache)
    order = []
    for i in layers:
        k, layer = cache.k[i], hparams.layers[i]
        r = layer.rope
        assert k is not None and r is not None
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
    graph = Graph(*order)
    graph.meta = {"model": hparams.arch, "n_layer": hparams.n_layer, "n_ctx": cache.n_ctx, "shift": True}
    return ShiftGraph(graph, deltas, layers)
