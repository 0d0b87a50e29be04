"""A better bound by multipliers for several scarce devices: over those paths of which no run exceeds a budget.

A scarce device is one whose budget a path may exceed.  A run is a part of a path: from where the activation that passes
from stage to stage enters a scarce device to where it enters another one.  If a path fits, the bytes of each of its
runs on the run's device are within the budget.  The bound by multipliers alone (bound.py) mixes paths that have
everything on one device, several times its budget, and so counts fewer copies and splits than a path that fits has.
The bound by runs leaves these paths out.  The dynamic program is that of a shortest path with one resource at a time:
it keeps labels by state, device of the run, and bytes of the run.  Cutting planes choose multipliers; the next ones to
try are half-way between the best ones found and those that promise most.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.solve._chain import runs, suffixes
from ggml_sched.placement.solve.bound import Bound, cheapest, constant
from ggml_sched.placement.solve.master import Master
from ggml_sched.placement.solve.problem import Problem

__all__ = ["RunBound"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CELLS, MOST_SLOTS = 128, 1 << 13
"""A budget is divided into at most `CELLS` equal parts, and one label is kept for each; a stage has at most
`MOST_SLOTS` labels."""
VISITS = 20
"""The most times that the dynamic program is computed for one bound."""
AROUND = (0.7, 1.4)
"""Multiples of each multiplier of bound.py that are tried before cutting planes choose multipliers."""
STEP = 0.5
"""The next multipliers to try are this part of the way from the best ones found to those that promise most."""
CLOSE = 2e-5
"""The search ends when the bound that the planes promise is above the present bound by at most this part of it."""
STEEPEST = 1e6


class RunBound:
    """Bounds of one problem by runs."""

    def __init__(self, problem: Problem) -> None:
        self.problem: Problem = problem
        slots = problem.n_states * (len(problem.scarce) + 1)
        self.cells: int = min(CELLS, MOST_SLOTS // slots)
        pairs = problem.group // problem.n_states
        counts = np.bincount(pairs, minlength=problem.n_classes * problem.n_states)
        self._pairs: Ints = pairs
        self._ranges: Ints = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @property
    def helps(self) -> bool:
        """Whether the bound by runs may be better: several devices are scarce, labels have more than one cell for each
        budget, and a scarce device alone has some state."""
        return len(self.problem.scarce) > 1 and self.cells > 1 and bool((self.problem.row_of >= 0).any())

    def relax(self, multipliers: Floats, stop: float) -> tuple[float, Ints | None]:
        """(bound, path): seconds, at most `stop`, that no path within the budgets undercuts; and the path that gave
        this bound, whose runs keep the budgets as far as the labels count their bytes.  (stop, None) if no path gives a
        bound below `stop`."""
        problem = self.problem
        reduced = problem.cost + problem.bytes @ multipliers
        suffix = suffixes(problem.classes, cheapest(problem, reduced)[0])
        value = float((problem.start + suffix[0]).min())
        offset = constant(problem, multipliers, value)
        order = np.lexsort((reduced, self._pairs))
        seconds, path = runs(problem.classes, problem.start, self._ranges, reduced[order], problem.memory[order],
                             problem.after[order].astype(np.int32), problem.budget, problem.row_of, suffix,
                             stop - offset, self.cells)
        return (stop, None) if path is None else (min(stop, seconds + offset), order[path])

    def raise_(self, bound: Bound, stop: float, ends_below: bool = False) -> Floats:
        """Raise `bound.value`, up to `stop`; returns the multipliers that gave the best value.  `ends_below`: whether
        to end as soon as the planes show that no multipliers reach `stop`."""
        problem, n = self.problem, len(self.problem.scarce)
        seconds, unit = max(problem.dearest, 1e-300), np.maximum(problem.total, 1.0)
        master, best, multipliers = Master(n, STEEPEST), -np.inf, bound.multipliers
        first = [bound.multipliers]
        for row in range(n):
            for scale in AROUND:
                first.append(bound.multipliers.copy())
                first[-1][row] *= scale
        for number in range(VISITS):
            if number < len(first):
                tried = first[number]
            else:
                promised, scaled = master.solve()
                if promised * seconds - best <= CLOSE * abs(best) or (ends_below and promised * seconds < stop):
                    break
                tried = multipliers + STEP * (scaled * seconds / unit - multipliers)
            value, path = self.relax(tried, stop)
            if value > best:
                best, multipliers = value, tried
            if path is None or best >= stop:
                break
            master.add(problem.cost_of(path) / seconds, (problem.memory_of(path) - problem.budget) / unit)
        bound.value = max(bound.value, best)
        return multipliers
