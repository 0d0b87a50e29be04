"""Windows: how far ahead of its readers a store fetches weights, as far as the memory of each backend allows.

A window bounds the bytes of fetched copies that are alive at the same time (core/plan/fetching.pxi).  The arena grows
with the window, and only a plan shows by how much.  So `widest` makes a few plans, to find the widest window with which
arena and work memory stay within the backend's limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ggml_sched.backend import Backend
from ggml_sched.planning.plan import Plan

__all__ = ["fetched_sizes", "widest", "windows_of"]

TRIES = 12
"""The most plans that the search for the window of one backend makes."""


def fetched_sizes(plan: Plan) -> list[list[int]]:
    """For each backend the bytes of each copy that stores fetch to it, in the order of the copies."""
    data = plan.data
    found: list[list[int]] = [[] for _ in plan.backends]
    for c, (like, b) in enumerate(data.copies):
        owner = plan.graph.tensors[like].root.backend
        if owner is not None and owner.is_store:
            found[b].append(data.size(data.n_tensors + c))
    return found


def windows_of(plan: Plan) -> list[int]:
    """For each backend the least window with which the fetches of a plan begin where they do: the most bytes of fetched
    copies that are alive in a split between the beginning of a fetch and the first split that reads it; 0 where every
    fetch begins directly before its first reader."""
    data, graph = plan.data, plan.graph
    begun = {c: k for k, split in enumerate(data.splits) for c in split[3]}
    numbers = {(like, b): c for c, (like, b) in enumerate(data.copies) if c in begun
               and (owner := graph.tensors[like].root.backend) is not None and owner.is_store}
    read: dict[int, tuple[int, int]] = {}
    for k, (b, start, stop, _) in enumerate(data.splits):
        for node in graph.nodes[start:stop] if numbers else ():
            for source in node.src if node.computes else ():
                c = -1 if source is None else numbers.get((graph.id_of(source), b), -1)
                if c >= 0:
                    read[c] = read.get(c, (k, k))[0], k
    alive = [[0] * (data.n_splits + 1) for _ in plan.backends]
    for c, (_, last) in read.items():
        b, size = data.copies[c][1], data.size(data.n_tensors + c)
        for k in range(begun[c], last + 1):
            alive[b][k] += size
    windows = [0] * len(plan.backends)
    for c, (first, _) in read.items():
        b = data.copies[c][1]
        windows[b] = max(windows[b], *alive[b][begun[c]:first], 0)
    return windows


def widest(made: Callable[[Sequence[int]], Plan], backends: Sequence[Backend], given: Mapping[int, int],
           limits: Sequence[int | None]) -> Plan:
    """The plan with the widest windows whose arenas stay within the limits, of the plans that `made(windows)` returns.

    `given`: {position of a backend: its window}, for windows that are not searched.  `limits`: for each backend the
    bytes of its arena and work memory; None for no limit: the window is then twice the largest copy, so that one copy
    is fetched while another is read.  A backend whose limit is exceeded even without a window gets none.
    """
    plan = made([0] * len(backends))
    sizes = fetched_sizes(plan)
    windows = [given.get(i, 0) for i in range(len(backends))]
    plan = made(windows) if any(windows) else plan
    for i, copies in enumerate(sizes):
        if not copies or i in given:
            continue
        limit = limits[i]
        if limit is None:
            windows[i] = 2 * max(copies)
            plan = made(windows)
            continue
        # Bisection: a window of `low` fits; one of `high` does not, or is wider than all copies together.
        low, high, wanted = 0, sum(copies) + 1, sum(copies)
        for _ in range(TRIES):
            if _needed(plan, i) > limit or high - low <= max(max(copies) // 4, 1):
                break
            windows[i] = wanted
            tried = made(windows)
            if _needed(tried, i) <= limit:
                low, plan = wanted, tried
            else:
                high = wanted
            windows[i] = low
            # Try a window wider by the bytes that the present plan leaves: it fits unless the arena grows by more.
            room = limit - _needed(plan, i) + (0 if low else max(copies))
            wanted = low + room if 0 < room < high - low else (low + high) // 2
    return plan


def _needed(plan: Plan, i: int) -> int:
    """The bytes that a limit bounds: of backend i the arena and the work memory."""
    return plan.buffer_sizes[i] + plan.work_sizes[i]
