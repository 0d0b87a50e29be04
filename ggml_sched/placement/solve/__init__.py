"""Solves a chain: the cheapest pattern for each stage within the budgets, and a bound that proves how good it is.

`solve` goes from cheap to dear, and ends as soon as the gap is small enough: the bound by multipliers (`bound`), paths
met on the way, repaired and improved by exchanges (`search`), paths by labels (`labels`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.chain import Chain, Solution
from ggml_sched.placement.solve.bound import Bound, best_bound, visit
from ggml_sched.placement.solve.labels import Labels
from ggml_sched.placement.solve.problem import Problem
from ggml_sched.placement.solve.search import improve, repair

__all__ = ["solve"]

Ints = NDArray[np.int64]

SOLVERS = ("auto", "own", "highs")
REPAIRED = 6
"""So many of the nearest paths are repaired."""
STEEPER = (1.001, 1.003, 1.01, 1.03, 1.1, 1.3, 2.0, 5.0)
"""Multiples of the best multipliers, at which paths take fewer bytes."""

WIDTHS = ((64, 300_000), (1024, 1_500_000))
"""Labels kept after a stage, and columns tried, of each search."""
TINY = 1e-12
"""Part of the seconds by which sums of the same numbers may differ."""


def solve(chain: Chain, budget: Sequence[int], within: float = 0.005, *, solver: str = "auto",
          cutoff: float = math.inf) -> Solution:
    """The cheapest choices for `chain` that take at most `budget[d]` bytes on each device d.

    Ends when the cost is proven to be at most 1 + `within` times the least, or when its bounded effort is spent: then
    the gap between `cost` and `bound` is larger.  `bound` is infinite if it is proven that no choices fit; `path` is
    None if none were found.  The same call gives the same result.  As soon as the bound reaches `cutoff` seconds the
    search ends: then `path` is None, unless a path below `cutoff` was found.

    ValueError or TypeError for arrays of wrong shapes or types, NaN, negative seconds or bytes, a chain without stages,
    and an unknown `solver`.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver is {solver!r}; it must be one of {', '.join(SOLVERS)}")
    if not within >= 0:
        raise ValueError(f"within is {within}; it must be 0 or a positive part")
    if math.isnan(cutoff):
        raise ValueError("cutoff is NaN; it must be a number of seconds")
    problem = Problem(chain, budget)
    bound = best_bound(problem)
    if bound.value == np.inf or bound.value >= cutoff:
        return answer(problem, bound, None)
    path = first_paths(problem, bound)
    if not is_near(problem, bound, path, within):
        path = search_labels(problem, bound, path, within, cutoff)
    return answer(problem, bound, path)


def is_near(problem: Problem, bound: Bound, path: Ints | None, within: float) -> bool:
    """Whether the path is proven to cost at most 1 + `within` times the least."""
    return path is not None and problem.cost_of(path) <= bound.value * (1 + within)


def search_labels(problem: Problem, bound: Bound, path: Ints | None, within: float, cutoff: float) -> Ints | None:
    """The best of `path` and of searches by labels, wider and wider; raises the bound's value."""
    labels = Labels(problem, bound)
    for width, effort in WIDTHS:
        stop = cutoff if path is None else min(cutoff, problem.cost_of(path) / (1 + within) * (1 - TINY))
        found, proven = labels.search(stop, width, effort)
        bound.value = max(bound.value, proven)
        if found is not None:
            found = improve(problem, found)
            if path is None or problem.cost_of(found) < problem.cost_of(path):
                path = found
        if bound.value >= cutoff or is_near(problem, bound, path, within * (1 + TINY) + 2 * TINY):
            break
    return path


def first_paths(problem: Problem, bound: Bound) -> Ints | None:
    """The best of the paths met while bounding that fit, and of those nearest to fitting, repaired; improved."""
    met = list(bound.visits)
    met += [found for steeper in STEEPER if (found := visit(problem, bound.multipliers * steeper)) is not None]
    unit = np.maximum(problem.total, 1.0)
    fitting = sorted((one for one in met if (one.memory <= problem.budget).all()), key=lambda one: one.cost)[:1]
    over = sorted((one for one in met if (one.memory > problem.budget).any()),
                  key=lambda one: float((np.maximum(one.memory - problem.budget, 0) / unit).sum()))[:REPAIRED]
    paths = [one.path for one in fitting]
    paths += [path for one in over if (path := repair(problem, one.path, bound.multipliers)) is not None]
    if not len(problem.scarce):
        return paths[0] if paths else None
    paths = [improve(problem, path) for path in paths]
    return min(paths, key=problem.cost_of, default=None)


def answer(problem: Problem, bound: Bound, path: Ints | None) -> Solution:
    multipliers = [0.0] * len(problem.all_budgets)
    for device, worth in zip(problem.scarce, bound.multipliers.tolist(), strict=True):
        multipliers[device] = worth
    if path is None:
        return Solution(np.inf, bound.value, None, None, tuple(multipliers))
    cost = problem.cost_of(path)
    return Solution(cost, min(bound.value, cost), problem.choices(path), problem.bytes_of(path), tuple(multipliers))
