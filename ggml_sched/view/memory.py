"""Memory maps: which bytes of each arena a tensor takes, and for how long, as arrays; and when splits and copies are.

Time counts the copies and the nodes that compute, in the order of execution: views take no time.  A memory map has a
block for each owner, whose memory views and in-place results share; where a tail is freed early it has two blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ggml_sched.planning.plan import Plan
from ggml_sched.view.roles import COPIES, roles_of

__all__ = ["Ints", "MemoryMap", "clock_of", "copy_times", "memory_maps", "split_times"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class MemoryMap:
    """The arena of one backend; all arrays have an element for each block."""

    backend: str
    arena: int
    """Bytes of the arena."""
    live: int
    """The most bytes that are alive at once."""
    owner: Ints
    """The id of the tensor that the memory was allocated for."""
    first: Ints
    """The time at which the block begins."""
    stop: Ints
    """The time at which the block has ended."""
    low: Ints
    """Bytes from the start of the arena to the block's begin; the chunks of an arena count one after another."""
    high: Ints
    role: Ints

    def curve(self) -> tuple[Ints, Ints]:
        """(times, bytes that are alive from each of these times to the next); the last number of bytes is 0."""
        times = np.unique(np.concatenate([self.first, self.stop]))
        change = np.zeros(len(times), np.int64)
        size = self.high - self.low
        np.add.at(change, np.searchsorted(times, self.first), size)
        np.subtract.at(change, np.searchsorted(times, self.stop), size)
        return times, np.cumsum(change)


def clock_of(plan: Plan) -> Ints:
    """The time at each position of a plan's sequence, and at its end: how many copies and computing nodes ran."""
    data, tensors = plan.data, plan.graph.tensors
    steps = [i >= data.n_tensors or tensors[i].computes for i in data.sequence]
    return np.concatenate([[0], np.cumsum(steps, dtype=np.int64)]).astype(np.int64)


def split_times(plan: Plan, clock: Ints) -> list[tuple[int, int, int, int]]:
    """For each split of a plan (index of its backend, time at which it begins, time at which it has ended, number of
    nodes)."""
    graph = plan.graph
    position = {i: p for p, i in enumerate(plan.data.sequence)}
    return [(b, int(clock[position[graph.id_of(graph.nodes[start])]]),
             int(clock[position[graph.id_of(graph.nodes[stop - 1])] + 1]), stop - start)
            for b, start, stop, _ in plan.data.splits]


def copy_times(plan: Plan, clock: Ints) -> list[tuple[int, int, int, int, int]]:
    """For each copy of a plan (index of the backend that it is from, of the one that it is for, time, id of the copy,
    number of the split that reads it).

    The time is when the split begins; for a weight that a store fetches ahead, when the fetch is.
    """
    data = plan.data
    position = {i: p for p, i in enumerate(data.sequence)}
    found = []
    for k, ((_, first, _, _), (_, _, _, inputs)) in enumerate(zip(split_times(plan, clock), data.splits, strict=True)):
        for c in inputs:
            like, to = data.copies[c]
            source = data.backend_index(plan.index_of(plan.graph.tensors[like].root))
            ahead = source >= 0 and plan.backends[source].is_store
            when = int(clock[position[data.n_tensors + c]]) if ahead else first
            found.append((source, to, when, data.n_tensors + c, k))
    return found


def memory_maps(plan: Plan) -> tuple[MemoryMap, ...]:
    """The memory map of each backend of a plan, in order; the map of a backend without an arena has no blocks."""
    data, clock = plan.data, clock_of(plan)
    roles = [*roles_of(plan.graph), *[COPIES] * (data.n_copies + len(data.slot_copies))]
    starts = [np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64) for sizes in plan.chunk_sizes]
    rows: list[list[tuple[int, int, int, int, int, int]]] = [[] for _ in plan.backends]

    def time(position: int) -> int:
        return int(clock[min(position, len(clock) - 1)])

    for i, role in enumerate(roles):
        home, size, lifetime = data.memory_index(i), data.size(i), data.lifetime(i)
        if home < 0 or not size or lifetime is None:
            continue
        birth, death = lifetime
        low = int(starts[home][data.chunk(i)]) + data.offset(i)
        trimmed, rest = data.trimmed(i) or (death, size)
        first, stop = time(birth), max(time(death + 1), time(birth) + 1)
        if rest:
            rows[home].append((i, first, stop, low, low + rest, role))
        if rest < size:
            rows[home].append((i, first, max(time(trimmed + 1), first + 1), low + rest, low + size, role))
    return tuple(
        MemoryMap(backend.name, arena, live, *np.array(found, np.int64).reshape(-1, 6).T)
        for backend, arena, live, found in zip(plan.backends, plan.buffer_sizes, plan.live_bytes, rows, strict=True))
