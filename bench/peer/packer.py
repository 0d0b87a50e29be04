"""omnimalloc's exact search (`pip install omnimalloc`; written for 1.0.0), with a capacity to meet.

Without the package `available()` is False.  To stop early it gets the capacity as its bound, and the smallest time
limit, found by halving, with which it still succeeds.  Only runs with that limit count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

try:
    # Its public allocators take no capacity, and stop only at a time limit: hence the solver below them.
    from omnimalloc import Allocation, __version__
    from omnimalloc._cpp import Partition, max_threads, try_solve_many
except ImportError:
    try_solve_many = None

__all__ = ["Search", "available", "search", "version"]

RUNS = 3
"""Runs with that limit, of which the fastest counts."""


class Search(NamedTuple):
    """`capped`: it had found no packing after `patience` seconds, so it needs more than `seconds`."""

    seconds: float
    capped: bool


def available() -> bool:
    return try_solve_many is not None


def version() -> str:
    return __version__


def search(rows: Sequence[tuple[int, int, int]], capacity: int, patience: float = 20.0) -> Search:
    """The time to find a packing of rows (lower, upper, size) within capacity, on all processors."""
    first = min(lower for lower, _, _ in rows)
    items = [Allocation(i, size, lower - first, upper - first) for i, (lower, upper, size) in enumerate(rows)]
    limit = 0.002
    while True:
        took, solved = _run(items, capacity, limit)
        if solved:
            more = [_run(items, capacity, limit) for _ in range(RUNS - 1)]
            return Search(min([took, *(seconds for seconds, again in more if again)]), False)
        if limit >= patience:
            return Search(took, True)
        limit = min(1.5 * limit, patience)


def _run(items: list, capacity: int, limit: float) -> tuple[float, bool]:
    start = time.perf_counter()
    base = Partition.from_allocations(items)
    ways = [base.reorder(keys).with_bound(capacity + 1) for keys in ("WAT", "TAW", "TWA")]
    found = try_solve_many(ways, capacity + 1, None, canonical=True, dominance=True, floor_inference=True,
                           monotonic_floor=True, decompose=True, timeout=limit, num_threads=max_threads())
    took = time.perf_counter() - start
    return took, found is not None and found.peak <= capacity
