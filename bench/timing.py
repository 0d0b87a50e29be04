"""Timing in short alternating blocks, so that other load on the machine affects all measured functions alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

BLOCK = 5
"""Runs in a row.  Their median is one value."""


def timed(work: Callable[[], object]) -> float:
    """Microseconds."""
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e3


def in_turns(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """For each function in `runs`, which returns its own time, the value of its block in each round.  Each round has
    one block of each.  A first round goes uncounted.
    """
    seen: dict[str, list[float]] = {what: [] for what in runs}
    for _ in range(rounds + 1):
        for what, run in runs.items():
            seen[what].append(median(run() for _ in range(BLOCK)))
    return {what: values[1:] for what, values in seen.items()}


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the ratios of blocks of the same round, so that load during a whole round cancels out."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))
