"""Planning for CPU backends, which get support queries for every kind of node, compared with dry backends and with
ggml's.  A graph is planned whose kinds of nodes are in the support cache: the same graph object again, and a new
object.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import NamedTuple

import peer
import samples
from timing import in_turns, ratio, timed

import ggml_sched as gs

__all__ = ["Times", "measure"]


class Times(NamedTuple):
    """Microseconds, medians of blocks."""

    nodes: int
    kinds: int
    blocks: dict[str, list[float]]

    def __getitem__(self, what: str) -> float:
        """Of "dry", "asked", "dry first", "asked first"; with the peer also "reserve"."""
        return median(self.blocks[what])

    def ratio(self, ours: str, other: str) -> float | None:
        return ratio(self.blocks[ours], self.blocks[other]) if other in self.blocks else None


def measure(name: str, config: str, rounds: int) -> Times | None:
    """None for a graph with ops that the CPU backend does not support."""
    cpus = tuple(gs.CpuBackend(1, name=device) for device in samples.CONFIGS[config])
    with ExitStack() as stack:
        for backend in cpus:
            stack.enter_context(backend)
        sides = {}
        for what, backends in (("dry", None), ("asked", cpus)):
            graph, backends = samples.configured(name, config, backends)
            sides[what] = graph, stack.enter_context(gs.Scheduler(backends, plan_cache=0))
        graph, scheduler = sides["asked"]
        try:
            scheduler.plan(graph)
        except gs.UnsupportedOp:
            return None

        def again(what: str) -> float:
            graph, scheduler = sides[what]
            return timed(lambda: scheduler.plan(graph))

        def first(what: str) -> float:
            graph, scheduler = sides[what]
            twin = gs.Graph.from_order(graph.tensors, graph.nodes, graph.leafs)
            return timed(lambda: scheduler.plan(twin))

        runs: dict[str, Callable[[], float]] = {}
        for what in sides:
            runs[what] = lambda what=what: again(what)
            runs[f"{what} first"] = lambda what=what: first(what)
        if peer.available():
            runs["reserve"] = stack.enter_context(peer.Peer(graph, cpus, asks_cpu=True)).reserve
        return Times(len(graph), len(set(graph.kinds())), in_turns(runs, rounds))
