"""Plans one graph with this package and with ggml in this process: times, and bytes of arenas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

import peer
from timing import in_turns, ratio, timed

import ggml_sched as gs

Make = Callable[[tuple | None], tuple[gs.Graph, tuple]]
"""A function that makes the same graph each time, with its backends: new ones, or the given ones."""


@dataclass
class Times:
    """Microseconds, medians of blocks; the last three need the peer and are None without it."""

    nodes: int
    blocks: dict[str, list[float]] = field(repr=False)
    memory: float | None = None
    """Bytes of all arenas / ggml's."""

    def __getitem__(self, what: str) -> float:
        """Of "build", "plan", "anew", "same"; with the peer also "reserve" and "alloc"."""
        return median(self.blocks[what])

    @property
    def plan_ratio(self) -> float | None:
        return ratio(self.blocks["plan"], self.blocks["reserve"]) if "reserve" in self.blocks else None

    @property
    def alloc_ratio(self) -> float | None:
        return ratio(self.blocks["anew"], self.blocks["alloc"]) if "alloc" in self.blocks else None


def measure(make: Make, rounds: int) -> Times:
    graph, backends = make(None)
    twins = [graph, make(backends)[0]]
    built = [graph]
    with ExitStack() as stack:
        other = stack.enter_context(peer.Peer(*make(None))) if peer.available() else None
        planner = stack.enter_context(gs.Scheduler(backends, plan_cache=0))
        scheduler = stack.enter_context(gs.Scheduler(backends))
        size = sum(scheduler.alloc(graph).buffer_sizes)

        def anew() -> float:
            twins.reverse()
            built[0] = again(twins[0])
            return timed(lambda: scheduler.alloc(built[0]))

        runs: dict[str, Callable[[], float]] = {
            "build": lambda: timed(lambda: again(graph)),
            "plan": lambda: timed(lambda: planner.plan(graph))}
        if other is not None:
            runs |= {"reserve": other.reserve, "alloc": other.alloc}
        runs |= {"anew": anew, "same": lambda: timed(lambda: scheduler.alloc(built[0]))}
        blocks = in_turns(runs, rounds)
        return Times(len(graph), blocks, None if other is None else size / sum(other.buffer_sizes))


def again(graph: gs.Graph) -> gs.Graph:
    """An equal graph, built anew of the same tensors."""
    return gs.Graph.from_order(graph.tensors, graph.nodes, graph.leafs)
