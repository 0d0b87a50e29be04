"""Solves a chain: the cheapest pattern for each stage within the budgets, and a bound that proves how good it is.

`solve` goes from cheap to dear, and ends as soon as the gap is small enough: the bound by multipliers (`bound`), paths
met on the way, repaired and improved by exchanges (`search`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.chain import Chain, Solution
from ggml_sched.placement.solve.bound import Bound, best_bound, visit
from ggml_sched.placement.solve.problem import Problem
from ggml_sched.placement.solve.search import improve, repair

__all__ = ["solve"]

SOLVERS = ("auto", "own", "highs")
REPAIRED = 6
"""So many of the nearest paths are repaired."""
STEEPER = (1.001, 1.003, 1.01, 1.03, 1.1, 1.3, 2.0, 5.0)
"""Multiples of the best multipliers, at which paths take fewer bytes."""


def solve(chain: Chain, budget: Sequence[int], within: float = 0.005, *, solver: str = "auto") -> Solution:
    """The cheapest choices for `chain` that take at most `budget[d]` bytes on each device d.

    Ends when the cost is proven to be at most 1 + `within` times the least, or when its bounded effort is spent: then
    the gap between `cost` and `bound` is larger.  `bound` is infinite if it is proven that no choices fit; `path` is
    None if none were found.  The same call gives the same result.

    ValueError or TypeError for arrays of wrong shapes or types, NaN, negative seconds or bytes, a chain without stages,
    and an unknown `solver`.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver is {solver!r}; it must be one of {', '.join(SOLVERS)}")
    if not within >= 0:
        raise ValueError(f"within is {within}; it must be 0 or a positive part")
    problem = Problem(chain, budget)
    bound = best_bound(problem)
    if bound.value == np.inf:
        return answer(problem, bound, None)
    path = first_paths(problem, bound)
    return answer(problem, bound, path)


def first_paths(problem: Problem, bound: Bound) -> NDArray[np.int64] | None:
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


def answer(problem: Problem, bound: Bound, path: NDArray[np.int64] | None) -> Solution:
    multipliers = [0.0] * len(problem.all_budgets)
    for device, worth in zip(problem.scarce, bound.multipliers.tolist(), strict=True):
        multipliers[device] = worth
    if path is None:
        return Solution(np.inf, bound.value, None, None, tuple(multipliers))
    cost = problem.cost_of(path)
    return Solution(cost, min(bound.value, cost), problem.choices(path), problem.bytes_of(path), tuple(multipliers))
