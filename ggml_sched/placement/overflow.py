"""How many bytes of weights each evaluation fetches, where not all fit: branch and bound over these bytes.

A placement with fetched weights is one for a host with `more` bytes, with some weights of the host in a store.  Its
computing, copies and splits take no less than those of the placement for the larger host, and its fetches, which run
beside them, no less than those of the cheapest weights of as many bytes.  So for all placements with between `low` and
`high` bytes in the store, `Shares.least(low, bound for a host with high bytes more)` is a bound: the larger of both,
or more where experts are read, beside which nothing computes.  `overflow` divides the bytes into intervals, until the
least of their bounds is near the best placement found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from ggml_sched.placement.shares import Fetched, Placement, Shares

__all__ = ["bisected", "overflow"]

PROBES = 8
"""The most searches for one answer."""
SMALL = 0.2
"""An interval is not divided where this can raise its bound by at most this part of what the best is above it."""
BISECTIONS = 8


@dataclass(order=True, frozen=True)
class Interval:
    """The placements with between `low` and `high` bytes of weights in the store."""

    bound: float
    low: int
    high: int
    above: float | None
    """The bound of what computes with `high` bytes; None: it was not searched."""


def overflow(shares: Shares, probe: Callable[[int], tuple[Placement | None, float]], within: float, low: int,
             best: Fetched | None, is_late: Callable[[], bool]) -> tuple[Fetched | None, float]:
    """(The best placement found, a bound of all placements).

    `probe(more)` searches with so many bytes more on the host, and returns a placement, None where it found none, and
    the bound of all such placements.  `low`: bytes that are in the store at least.  `best`: a placement that is known.
    """
    left = [Interval(shares.least(low), low, shares.most, None)]
    closed = math.inf
    for _ in range(PROBES):
        if not left or best is not None and is_late():
            break
        one = heappop(left)
        if one.bound >= closed or best is not None and best.seconds <= one.bound * (1 + within):
            closed = min(closed, one.bound)
            break
        if one.above is None:
            middle = one.high if best is None else min(one.high, max(one.low, shares.within(best.seconds)))
        else:
            most = shares.least(one.high, one.above)
            if best is not None and most - one.bound <= SMALL * (best.seconds - one.bound):
                closed = min(closed, one.bound)
                continue
            middle = shares.within(one.above)
            if not one.low < middle < one.high:
                middle = (one.low + one.high) // 2
        placement, bound = probe(middle)
        found = None if placement is None else shares.place(placement)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
        if bound < math.inf:
            heappush(left, Interval(max(one.bound, shares.least(one.low, bound)), one.low, middle, bound))
        if one.above is not None:
            heappush(left, Interval(max(one.bound, shares.least(middle, one.above)), middle, one.high, one.above))
        elif middle < one.high:
            heappush(left, Interval(shares.least(middle), middle, one.high, None))
    return best, min([closed, *(one.bound for one in left)])


def bisected(shares: Shares, bound: Callable[[int], tuple[float, float | None]], low: int, best: float,
             is_late: Callable[[], bool]) -> float:
    """A bound of all placements with at least `low` bytes in the store, at most `best`.  `bound(more)`: of all
    placements with at most `more` bytes there, without the time of fetches; and of their computing alone, if known."""
    high = max(low, shares.within(best))       # with more bytes the fetches alone take longer than the best
    above = bound(high)
    found, first = shares.least(low, *above), low
    for _ in range(BISECTIONS):
        if is_late():
            break
        middle = (first + high) // 2
        fewer, more = shares.least(low, *bound(middle)), shares.least(middle, *above)
        found = max(found, min(fewer, more))
        if fewer > more:
            first = middle
        else:
            high = middle
    return min(found, best)
