"""Cases of arenas: what the arena of each device may need, from the least to the most, as floors and limits.

The arena of a device depends on what is placed there: it has to hold what is alive at the heaviest node.  So the needs
of all patterns are cut into levels for each device.  A case chooses one level for each device: patterns that need more
than the level's `limits` are not allowed, and the arena takes at least `floors`.  Every placement belongs to the case
of its own largest needs, so the least bound over all cases is a bound of all placements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Case", "cases"]

MAX_CASES = 16
"""Cases that are solved, at most: with more devices each has fewer levels."""


class Case(NamedTuple):
    """One choice of levels."""

    limits: tuple[int, ...]
    """The most bytes of each device's arena that an allowed pattern needs."""
    floors: tuple[int, ...]
    """The least bytes that each device's arena has in this case."""


def cases(needs: Sequence[NDArray[np.int64]], budgets: Sequence[int], host: int, most: int = MAX_CASES) -> list[Case]:
    """The cases of arenas, those with the largest arenas first: what is fast has large ones.

    `needs`: for each class of stages the bytes [patterns, devices] of the arenas; `budgets` in bytes.  The host's arena
    has one level: what a host has to hold is a small part of its memory.
    """
    n = len(budgets)
    found = [np.unique(np.concatenate([table[:, d] for table in needs])) for d in range(n)]
    found = [values[values <= budget] if len(values) else values for values, budget in zip(found, budgets, strict=True)]
    others = [d for d in range(n) if d != host]
    per_device = 8
    while per_device > 1 and per_device ** len(others) > most:
        per_device -= 1
    levels = [list(_levels(found[d], per_device if d != host else 1, budgets[d])) for d in range(n)]
    made = [Case(tuple(high for _, high in chosen), tuple(low for low, _ in chosen)) for chosen in product(*levels)]
    return sorted(made, key=lambda case: (-sum(case.floors), case))


def _levels(values: NDArray[np.int64], most: int, budget: int) -> Iterator[tuple[int, int]]:
    """(floor, limit) of each of at most `most` levels: ranges of needs, cut where neighbours differ most."""
    if len(values) == 0:
        yield 0, budget
        return
    cuts = np.sort(np.argsort(-np.diff(values), kind="stable")[: most - 1]) + 1
    floors = [int(values[cut]) for cut in (0, *cuts)]
    # A pattern may need more than the least, so a level reaches up to the next one's floor.
    yield from zip(floors, [*(floor - 1 for floor in floors[1:]), budget], strict=True)
