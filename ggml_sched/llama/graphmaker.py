"""Graphs of a model by their shape, made as fast as can be.

Owns, for the last few kinds of shape (tokens, outputs), two graphs that differ in the rows of the cache that they read.
Invariant: a graph that was worked out from those two equals the one that `build_graph` would have built, which takes
several times as long.  While a text grows, all but the first two graphs are of that sort.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import fields, replace

from ggml_sched._graph import Graph, GraphFamily, Tensor
from ggml_sched.llama.batchgraph import BatchGraph, Inputs, Shape
from ggml_sched.llama.builder import build_graph
from ggml_sched.llama.hparams import Hparams
from ggml_sched.llama.kvcache import KVCache
from ggml_sched.llama.weights import Weights

__all__ = ["GraphMaker"]

KEPT_KINDS = 4
"""One token, and some lengths of batches."""


class GraphMaker:
    """`build(shape)` is a new graph of an architecture's model."""

    def __init__(self, arch, hparams: Hparams, weights: Weights, cache: KVCache) -> None:
        self.arch, self.hparams, self.weights, self.cache = arch, hparams, weights, cache
        self._first: OrderedDict[Shape, BatchGraph] = OrderedDict()
        self._families: dict[Shape, GraphFamily] = {}

    def build(self, shape: Shape) -> BatchGraph:
        """A graph that nobody else has."""
        kind = replace(shape, n_kv=0)
        first, family = self._first.get(kind), self._families.get(kind)
        if first is not None:
            self._first.move_to_end(kind)
        if family is None:
            built = build_graph(self.arch, self.hparams, self.weights, self.cache, shape, self.cache.flash)
            if first is None:
                self._first[kind] = built
                if len(self._first) > KEPT_KINDS:
                    self._families.pop(self._first.popitem(last=False)[0], None)
            elif first.shape != shape:
                self._families[kind] = GraphFamily(first.graph, built.graph, first.shape.n_kv, shape.n_kv)
            return built
        graph = family.at(shape.n_kv)
        graph.meta["n_kv"] = shape.n_kv
        return like(first, graph, shape, self.cache.n_ctx)

    def clear(self) -> None:
        """Forget all of them: they keep weights and caches alive."""
        self._first.clear()
        self._families.clear()


def like(first: BatchGraph, graph: Graph, shape: Shape, n_ctx: int) -> BatchGraph:
    """The batch graph of `graph`, whose tensors stand in the places of those of `first`."""
    def its(t: Tensor | None) -> Tensor | None:
        return None if t is None else graph.tensors[first.graph.id_of(t)]

    found = {}
    for field in fields(Inputs):
        value = getattr(first.inputs, field.name)
        found[field.name] = {k: its(t) for k, t in value.items()} if isinstance(value, dict) else its(value)
    return BatchGraph(graph, its(first.output), shape, Inputs(**found), n_ctx, first.n_positions)
