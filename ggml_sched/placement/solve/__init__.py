"""Solves a chain: the cheapest pattern for each stage within the budgets, and a bound that proves how good it is.

`solve` tries fast methods first, and ends as soon as the gap is small enough: the bound by multipliers (`bound`); the
paths of its relaxations, repaired and improved by exchanges (`search`); paths by labels (`labels`); branch and bound
over numbers of columns (`branches`); a bound by merged labels (`merged`); counts of equal stages by an integer program
(`counts`) where HiGHS is installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.chain import Chain, Solution
from ggml_sched.placement.solve.bound import Bound, Relaxation, best_bound, relax
from ggml_sched.placement.solve.branches import Branches
from ggml_sched.placement.solve.counts import Counts, has_highs, highs, linear
from ggml_sched.placement.solve.labels import Labels
from ggml_sched.placement.solve.merged import MergedBound
from ggml_sched.placement.solve.problem import Problem
from ggml_sched.placement.solve.search import improve, repair, splice

__all__ = ["solve"]

Ints = NDArray[np.int64]

SOLVERS = ("auto", "own", "highs")
SPLICED, REPAIRED = 2, 3
"""How many of the paths that fit are spliced, and how many of the others, nearest to fitting, are repaired."""
STEEPER = (1.001, 1.003, 1.01, 1.03, 1.1, 1.3, 2.0, 5.0)
"""Multiples of the best multipliers, at which paths take fewer bytes."""

EFFORTS: dict[str, tuple[tuple[int, int], ...]] = {
    "few": ((8, 40_000),), "bound": ((8, 40_000),), "some": ((64, 300_000),),
    "all": ((64, 300_000), (1024, 1_500_000)), "more": ((8192, 12_000_000),), "most": ((32768, 50_000_000),)}
"""{effort: for each search by labels (the most labels kept after a stage, about how many columns are tried)}."""
MERGED = {"few": 1 << 19, "bound": 1 << 21, "all": 1 << 24, "more": 1 << 25}
"""{effort: about how many columns the bound by merged labels tries}."""
MAX_MERGED = 2
"""Labels are merged only where at most so many devices are scarce: with more, branch and bound proves more, and sooner.
"""
BRANCHED = {"few": (1 << 20, 1 << 18), "bound": (1 << 22, 1 << 20), "all": (1 << 23, 1 << 21),
            "more": (1 << 24, 1 << 22)}
"""{effort: over about how many columns branch and bound seeks paths, and where labels are merged after it}."""
MIN_BRANCHED = 2
"""Branch and bound is for so many scarce devices or more: with one, labels prove as much."""
ROUNDS, NODES = 4, 1000
"""The most integer programs that are solved one after another, each with one more row, and the most nodes of HiGHS's
search for each."""
COUNTED = ("bound", "all")
"""The efforts with which the solver "auto" solves integer programs."""
MOST_COUNTED = 300
"""The most columns of such a program: HiGHS takes seconds for a thousand columns."""
TINY = 1e-12
"""The part by which two sums of the same seconds, in different order, may differ."""


def solve(chain: Chain, budget: Sequence[int], within: float = 0.005, *, solver: str = "auto",
          cutoff: float = math.inf, effort: str = "all") -> Solution:
    """The cheapest choices for `chain` that take at most `budget[d]` bytes on each device d.

    Ends when the cost is proven to be at most 1 + `within` times the least, or when its bounded effort is spent: then
    the gap between `cost` and `bound` is larger.  `bound` is infinite if it is proven that no choices fit; `path` is
    None if none were found.  The same call gives the same result.  The search also ends as soon as the bound reaches
    `cutoff` seconds: then `path` is None if no path below `cutoff` was found before.

    `effort`: "few" searches with few labels; "bound" as "few", with better bounds; "some" with more labels; "all" with
    labels for some tenths of a second, and by counts; "more" with labels for up to a second; "most" with labels for
    some seconds.

    `solver`: "own" uses this package alone; "highs" uses HiGHS (the extra `fit`) for what labels do not prove; "auto"
    uses HiGHS if it is installed, for programs so small that they take about a second.

    ValueError or TypeError for arrays of wrong shapes or types, NaN, negative seconds or bytes, a chain without stages,
    an unknown `solver` or `effort`, and "highs" where it is not installed.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver is {solver!r}; it must be one of {', '.join(SOLVERS)}")
    if effort not in EFFORTS:
        raise ValueError(f"effort is {effort!r}; it must be one of {', '.join(EFFORTS)}")
    if solver == "highs" and not has_highs():
        raise ValueError("solver is 'highs', and SciPy is not installed: pip install 'ggml-sched[fit]'")
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
        labels, is_merged = Labels(problem, bound), effort in MERGED and len(problem.scarce) <= MAX_MERGED
        path = search_labels(labels, path, within, cutoff, EFFORTS[effort][:1])
        if effort in BRANCHED and len(problem.scarce) >= MIN_BRANCHED and not is_done(labels, path, within, cutoff):
            path = search_branches(labels, path, within, cutoff, BRANCHED[effort][is_merged])
        if is_merged and not is_done(labels, path, within, cutoff):
            bound.value = MergedBound(problem, bound).best(bound.value, stop_at(problem, path, within, cutoff),
                                                           MERGED[effort])
        if not is_done(labels, path, within, cutoff):
            path = search_labels(labels, path, within, cutoff, EFFORTS[effort][1:])
        counts = effort in COUNTED and (solver == "highs" or (solver == "auto" and has_highs()))
        if counts and not is_done(labels, path, within, cutoff):
            path = search_counts(labels, path, within, cutoff, None if solver == "highs" else MOST_COUNTED)
    return answer(problem, bound, path)


def is_near(problem: Problem, bound: Bound, path: Ints | None, within: float) -> bool:
    """Whether the path is proven to cost at most 1 + `within` times the least."""
    return path is not None and problem.cost_of(path) <= bound.value * (1 + within)


def is_done(labels: Labels, path: Ints | None, within: float, cutoff: float) -> bool:
    """Whether the search may end: the bound has reached `cutoff`, or the path is proven to be near the least."""
    return labels.bound.value >= cutoff or is_near(labels.problem, labels.bound, path, within * (1 + TINY) + 2 * TINY)


def stop_at(problem: Problem, path: Ints | None, within: float, cutoff: float) -> float:
    """The seconds below which another path must be to be of use: below `cutoff`, and below `path` by more than the gap.
    """
    return cutoff if path is None else min(cutoff, problem.cost_of(path) / (1 + within) * (1 - TINY))


def cheaper(problem: Problem, bound: Bound, path: Ints | None, found: Ints | None) -> Ints | None:
    """The cheaper of `path` and of `found` after exchanges; each may be None."""
    if found is None:
        return path
    found = improve(problem, found, bound.multipliers)
    return found if path is None or problem.cost_of(found) < problem.cost_of(path) else path


def search_labels(labels: Labels, path: Ints | None, within: float, cutoff: float,
                  widths: Sequence[tuple[int, int]]) -> Ints | None:
    """The best of `path` and of the paths of searches by labels; raises `labels.bound.value`.

    `widths`: for each search, one after the other until one suffices, (labels kept after a stage, columns tried).
    """
    problem, bound = labels.problem, labels.bound
    for width, effort in widths:
        found, proven = labels.search(stop_at(problem, path, within, cutoff), width, effort)
        bound.value = max(bound.value, proven)
        path = cheaper(problem, bound, path, found)
        if is_done(labels, path, within, cutoff):
            break
    return path


def search_branches(labels: Labels, path: Ints | None, within: float, cutoff: float, effort: int) -> Ints | None:
    """The best of `path` and of a path that branch and bound has met; raises `labels.bound.value`."""
    problem, bound = labels.problem, labels.bound
    branches = Branches(problem, bound)
    bound.value = max(bound.value, branches.best(stop_at(problem, path, within, cutoff), effort))
    return cheaper(problem, bound, path, branches.path)


def search_counts(labels: Labels, path: Ints | None, within: float, cutoff: float, most: int | None) -> Ints | None:
    """The best of `path` and of the paths of integer programs over counts; raises `labels.bound.value`.  Nothing is
    done where more than `most` columns are left (None: no limit)."""
    problem, bound = labels.problem, labels.bound
    stop = stop_at(problem, path, within, cutoff)
    kept = labels.kept(stop)
    if most is not None and len(kept) > most:
        return path
    counts = Counts(problem, kept)
    counts.connect()
    value, least = linear(counts.program)
    bound.value = max(bound.value, min(stop, value))
    return path if bound.value >= stop else search_program(labels, kept[least[:len(kept)] < stop], stop, path, within)


def search_program(labels: Labels, kept: Ints, stop: float, path: Ints | None, within: float) -> Ints | None:
    """The best of `path` and of the paths of integer programs over the columns `kept`, each with one more row than the
    one before; raises `labels.bound.value`, at most to `stop`: no path with other columns costs less."""
    problem, bound = labels.problem, labels.bound
    counts = Counts(problem, kept)
    counts.connect()
    for _ in range(ROUNDS):
        found, proven = highs(counts.program, max(within / 2, TINY), NODES)
        bound.value = max(bound.value, min(stop, proven))
        if found is None:
            break
        trail = counts.path(found)
        if trail is not None and problem.fits(trail):
            path = cheaper(problem, bound, path, trail)
        else:
            used = kept[np.flatnonzero(found[:len(kept)])]
            path = cheaper(problem, bound, path, labels.search(stop, *EFFORTS["some"][0], among=used)[0])
        if bound.value >= stop or is_near(problem, bound, path, within) or not counts.cut(found):
            break
    return path


def first_paths(problem: Problem, bound: Bound) -> Ints | None:
    """The best path that comes from the paths of the bound's relaxations; None if there is none.  The cheapest that fit
    are spliced, the ones nearest to fitting repaired, and all of these improved."""
    met = list(bound.relaxations)
    met += [found for steeper in STEEPER if (found := relax(problem, bound.multipliers * steeper)) is not None]
    unit = np.maximum(problem.total, 1.0)
    fitting = sorted((one for one in met if (one.memory <= problem.budget).all()), key=lambda one: one.cost)
    if not len(problem.scarce):
        return fitting[0].path if fitting else None
    over = sorted((one for one in met if (one.memory > problem.budget).any()),
                  key=lambda one: float((np.maximum(one.memory - problem.budget, 0) / unit).sum()))
    paths = [splice(problem, one.path, bound) for one in distinct(fitting, SPLICED)]
    paths += [path for one in distinct(over, REPAIRED)
              if (path := repair(problem, one.path, bound.multipliers)) is not None]
    paths = [improve(problem, path, bound.multipliers) for path in paths]
    return min(paths, key=problem.cost_of, default=None)


def distinct(relaxations: Sequence[Relaxation], most: int) -> list[Relaxation]:
    """The first `most` of these relaxations; of several with equal seconds and bytes only the first counts."""
    return list({(one.cost, *one.memory.tolist()): one for one in reversed(relaxations)}.values())[::-1][:most]


def answer(problem: Problem, bound: Bound, path: Ints | None) -> Solution:
    """The Solution with this bound, and with the path if there is one."""
    multipliers = [0.0] * len(problem.all_budgets)
    for device, worth in zip(problem.scarce, bound.multipliers.tolist(), strict=True):
        multipliers[device] = worth
    if path is None:
        return Solution(np.inf, bound.value, None, None, tuple(multipliers))
    cost = problem.cost_of(path)
    return Solution(cost, min(bound.value, cost), problem.choices(path), problem.bytes_of(path), tuple(multipliers))
