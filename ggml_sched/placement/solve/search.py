"""Paths that fit, from paths that nearly do, and cheaper ones: repair, exchanges in one and in two stages, splices.

An exchange replaces a column by another with the same class and states, so that the path stays connected.  Stages with
the same column are interchangeable, so an exchange is tried once for each column in use.  A splice replaces a part of
the path by another part between the same states: the one of the fewest reduced seconds at some multipliers.  The loops
are compiled, in `_exchange`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.solve._exchange import improved, repaired, spliced
from ggml_sched.placement.solve.bound import Bound, cheapest
from ggml_sched.placement.solve.problem import Problem

__all__ = ["improve", "repair", "splice"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAST_GAIN = 1e-12
"""The least part of a path's seconds that an exchange has to save."""
PAIRED = 32
"""The most columns of each stage that are tried in exchanges of two stages."""
SPLICES = 24
"""The most splices of one path."""
SCALES = (0.0, 0.5, 0.8, 0.95, 1.0, 1.05, 1.25, 2.0)
"""Multiples of the best multipliers at which parts to splice in are sought."""
NEAREST = 6
"""The multipliers of so many relaxations, those with the best bounds, are used beside multiples of the best ones."""


def repair(problem: Problem, path: Ints, multipliers: Floats) -> Ints | None:
    """A path that fits, after exchanges in `path` that free the most bytes for the fewest reduced seconds; None if the
    exchanges end before it fits."""
    path = path.copy()
    fits = repaired(problem.first, problem.group, problem.cost, problem.memory, problem.budget, path, multipliers,
                    np.maximum(problem.total, 1.0))
    return path if fits else None


def improve(problem: Problem, path: Ints, multipliers: Floats) -> Ints:
    """`path`, which has to fit, after exchanges of one or two stages, until none saves seconds within the budgets.

    In exchanges of two stages only the `PAIRED` columns of the fewest reduced seconds are tried for each.
    """
    path = path.copy()
    improved(problem.first, problem.group, problem.cost, problem.memory, problem.budget, path, multipliers,
             LEAST_GAIN * problem.cost_of(path), PAIRED)
    return path


def splice(problem: Problem, path: Ints, bound: Bound) -> Ints:
    """`path`, which has to fit, after splices that save seconds within the budgets: at most SPLICES of them."""
    near = sorted(bound.relaxations, key=lambda one: -one.value)[:NEAREST]
    rows = np.unique([*(bound.multipliers * scale for scale in SCALES), *(one.multipliers for one in near)], axis=0)
    found = [cheapest(problem, problem.cost + problem.bytes @ row) for row in rows]
    tables, columns = np.stack([table for table, _ in found]), np.stack([column for _, column in found])
    path = path.copy()
    least = LEAST_GAIN * problem.cost_of(path)
    for _ in range(SPLICES):
        if not spliced(problem.classes, problem.before, problem.after, problem.cost, problem.memory, problem.budget,
                       tables, columns, path, least):
            break
    return path
