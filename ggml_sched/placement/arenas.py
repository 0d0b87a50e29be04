"""Cases of arenas: what the arena of each device may need, from the least to the most, as floors and limits.

The arena of a device depends on what is placed there: it has to hold what is alive at the heaviest node.  A case allows
patterns that need at most its `limits`, and its arenas take at least its `floors`.  The first case allows everything.
A case is cut in two either at the bytes that a solution of it needs, or by whether a device has caches of some stages:
a device with such caches, however few, gets one copy of the inputs that these stages read.  Every placement belongs to
the case of its own largest needs and caches, so the least bound over all cases that are left is a bound of all
placements (branch and bound: Land and Doig, 1960).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.devices import Device, Links

__all__ = ["Case", "by_caches", "first_case", "halves", "mirrored", "mirrors", "raised"]


NEAR = 0.75
"""A level is a number of bytes that some pattern needs of an arena.  It is near what a solution needs if it is at least
this part of that, both counted from the floor."""


class Case(NamedTuple):
    """For each device a range of bytes, in which the need of its arena is."""

    limits: tuple[int, ...]
    """For each device the most bytes that an allowed pattern needs of its arena."""
    floors: tuple[int, ...]
    """For each device the least bytes that its arena has in this case."""
    caches: tuple[bool | None, ...] = ()
    """For each set of stages that read the same inputs with caches, set after set (`Tables.readers`), for each device
    whether caches of these stages may be on it; then for each input of `Tables.copied`, for each device whether it may
    read the input.  If True, the price has one copy of these inputs.  None: not decided; an empty tuple: nothing is
    decided."""


def first_case(needs: Sequence[NDArray[np.int64]], budgets: Sequence[int], sets: int = 1) -> Case:
    """The case of all placements; `needs`: for each class of stages the bytes of arenas [patterns, devices]; `sets`:
    the number of sets in `Case.caches` (`Tables.n_sets`)."""
    # Every stage has a pattern, so no arena is smaller than the least need of the class that needs most.
    least = [max((int(table[:, d].min()) for table in needs if len(table)), default=0) for d in range(len(budgets))]
    return Case(tuple(budgets), tuple(min(pair) for pair in zip(least, budgets, strict=True)),
                (None,) * (sets * len(budgets)))


def halves(case: Case, used: Sequence[int], worth: Sequence[float], spare: Sequence[int],
           levels: Sequence[NDArray[np.int64]]) -> tuple[float, tuple[Case, Case]] | None:
    """Cut a case in two on the device where the bound may rise most: (seconds by which it may rise, the two cases).
    In the first case the arena is nearly what a solution needs there, or more; in the second all patterns need less.
    None where no cut raises the bound.

    `used`: what the solution needs on each device; `worth`: for each device the seconds that one more byte is worth;
    `spare`: for each device the bytes above its floor that arenas have anyway; `levels`: for each device the bytes that
    patterns need, rising.  The cut is at the least level that is near what the solution needs (`NEAR`), so that levels
    which differ little are separated last.
    """
    cuts = [int(of[np.searchsorted(of, floor + NEAR * (need - floor))]) if need > floor else need
            for need, floor, of in zip(used, case.floors, levels, strict=True)]
    gains = [price * (need - floor - more)
             for need, floor, price, more in zip(cuts, case.floors, worth, spare, strict=True)]
    d = max(range(len(gains)), key=lambda d: gains[d])
    if gains[d] <= 0:
        return None
    need = cuts[d]
    above = case._replace(floors=(*case.floors[:d], need, *case.floors[d + 1:]))
    below = case._replace(limits=(*case.limits[:d], need - 1, *case.limits[d + 1:]))
    return gains[d], (above, below)


def by_caches(case: Case, unpaid: Sequence[float],
              implied: Sequence[Sequence[int]]) -> tuple[float, tuple[Case, Case]] | None:
    """Cut a case in two: one in which a device has caches of some set of stages, and one in which it has none.

    `unpaid`: for each entry of `case.caches` the seconds of copying the inputs of these stages to the device, as far as
    the cost of a solution with their caches there leaves them out; 0 where it has none there.  `implied`: for each
    entry the others that are True if it is.  The cut is by the entry with the most seconds among those that are None.
    Returns these seconds and the two cases; None if there is no such entry.
    """
    open_ = [0.0 if decided is not None else price for decided, price in zip(case.caches, unpaid, strict=True)]
    chosen = max(range(len(open_)), key=lambda entry: open_[entry])
    if open_[chosen] <= 0:
        return None
    wider = {chosen, *implied[chosen]}
    narrower = {chosen, *(entry for entry, others in enumerate(implied) if chosen in others)}
    there, not_there = (case._replace(caches=tuple(held if entry in of else known for entry, known in
                                                   enumerate(case.caches)))
                        for held, of in ((True, wider), (False, narrower)))
    return open_[chosen], (there, not_there)


def raised(case: Case, least: Sequence[int]) -> Case:
    """The same case where every placement needs at least `least` bytes of the arena of each device."""
    return case._replace(floors=tuple(max(pair) for pair in zip(case.floors, least, strict=True)))


MOST_MIRRORS = 24
"""The most orders that `mirrors` returns."""
MOST_EXCHANGES = 5040
"""The most orders that `mirrors` tries: all of seven equal devices."""


def mirrors(devices: Sequence[Device], links: Links, pinned: Iterable[int]) -> list[tuple[int, ...]]:
    """Orders of the devices that keep all prices: only equal devices, with equal links, change places.  `pinned`:
    devices that keep their place.  The first order is the given one."""
    n, fixed = len(devices), set(pinned)
    unnamed = [(device.replace(name="any", measured=frozenset()), type(device.backend)) for device in devices]
    sets: list[list[int]] = []
    for d in range(n):
        alike = next((of for of in sets if not fixed & {d, of[0]} and unnamed[of[0]] == unnamed[d]), None)
        if alike is None:
            sets.append([d])
        else:
            alike.append(d)
    found = []
    for orders in islice(_exchanges(sets), MOST_EXCHANGES):
        order = [0] * n
        for of, to in zip(sets, orders, strict=True):
            for d, other in zip(of, to, strict=True):
                order[d] = other
        rows = np.ix_(order, order)
        if np.array_equal(links.latency[rows], links.latency) and np.array_equal(links.per_byte[rows], links.per_byte):
            found.append(tuple(order))
        if len(found) == MOST_MIRRORS:
            break
    return found


def _exchanges(sets: Sequence[Sequence[int]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """A permutation of each set, in every combination, made one at a time: fifteen equal devices have 10**12."""
    if not sets:
        yield ()
        return
    for first in permutations(sets[0]):
        for rest in _exchanges(sets[1:]):
            yield first, *rest


def mirrored(cases: Sequence[Case], shared: Sequence[Mapping[str, int]],
             orders: Sequence[Sequence[int]]) -> tuple[object, ...]:
    """A value that is equal for cases which differ only by an exchange of equal devices.

    `shared`: for each model the devices of residents that several stages read; `orders`: those of `mirrors`.
    """
    found = []
    for order in orders:
        place = {d: k for k, d in enumerate(order)}
        found.append((
            tuple(tuple((case.limits[d], case.floors[d], *(-1 if held is None else int(held)
                                                           for held in case.caches[d::len(case.limits)]))
                        for d in order) for case in cases),
            tuple(tuple(sorted((name, place[d]) for name, d in fixed.items())) for fixed in shared)))
    return min(found)
