"""Better bounds of one case of arenas than the one by multipliers, which is a mean of paths with different arenas.

A case is divided into kinds of placements: with caches in few stages of a device or in many, with copies that last
through several stages or not.  A kind needs larger arenas, or its patterns need smaller ones; the least of the bounds
of all kinds is a bound of the case.  Or the paths of its bound are divided: `solve.branches`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ggml_sched.placement.candidates import Candidates
from ggml_sched.placement.chain import Solution
from ggml_sched.placement.chains import dearer
from ggml_sched.placement.open_cases import FAR, WORTH, Open, OpenCases, relaxed
from ggml_sched.placement.phases import Phase, PhasedCase
from ggml_sched.placement.solve import answer
from ggml_sched.placement.solve.bound import best_bound
from ggml_sched.placement.solve.branches import Branches
from ggml_sched.placement.solve.problem import Problem
from ggml_sched.placement.tables import Tables

__all__ = ["CaseBounds"]

FEW_CACHES = 0.02
"""Seconds that `_finer` adds to the cost of a stage with caches, as a part of the best seconds."""
BELOW, MAX_BELOW = 0.03, 8
"""The bound of placements with smaller arenas is improved by `solve` where it is below the bound that is wanted by at
most the part `BELOW`, and at most `MAX_BELOW` times."""


class CaseBounds:
    """Bounds of the cases of one search.  `explore`: plans a solution of a case for real."""

    def __init__(self, cases: OpenCases, explore: Callable[[Open, Solution], object]) -> None:
        self.cases: OpenCases = cases
        self.candidates: Candidates = cases.candidates
        self.tables: Sequence[Tables] = cases.tables
        self._explore = explore
        self._below = 0             # bounds of placements with smaller arenas that `solve` improved

    def finest(self, made: Open, bound: float) -> float:
        """The bound of a case, improved by `_finer` if it is not near the best."""
        if len(self.tables) > 1 or made.phased is not None or self.candidates.best is None or self.candidates.is_near(
                bound):
            return bound
        return max(bound, self._finer(made))

    def _finer(self, made: Open) -> float:
        """Another bound of a case: the least of several, one for each kind of placement.  A placement either has, on
        some device, at most two stages with caches (a kind for each device); or it has three or more on every device,
        and then needs larger arenas.

        For the first kinds every stage with caches on the device costs `fine` more, and two fines are taken off the
        bound: no placement of that kind costs less (Lagrange).
        """
        [table], [chain], [case] = self.tables, made.chains, made.cases
        candidates = self.candidates
        assert candidates.best is not None
        held = [held[rows] for held, rows in zip(table.holds_caches, chain.rows, strict=True)]
        fine = FEW_CACHES * candidates.best.seconds
        floors, bounds = list(case.floors), []
        for d, cached in enumerate(table.cached):
            if cached > floors[d] and any(there[:, d].any() for there in held):
                floors[d] = cached
                costs = tuple(cost + fine * there[:, d, None, None] for cost, there in zip(made.chain.cost, held,
                                                                                         strict=True))
                few = candidates.solve(replace(made.chain, cost=costs), case.floors,
                                       cutoff=candidates.cutoff + 2 * fine, effort="bound")
                bounds.append(math.inf if few is None else few.bound - 2 * fine)
        if not bounds:
            return -math.inf
        most = candidates.solve(made.chain, floors, cutoff=candidates.cutoff, effort="bound")
        return min([math.inf if most is None else most.bound, *bounds])

    def _lasting(self, made: Open, least: float) -> tuple[list[int], list[float]]:
        """(Floors, bounds) of a case, from how long copies of the inputs that are read with caches stay on a device:
        from the first stage that reads them there to the last.

        For each device the placements are of two kinds: the arena is at least what the case's path needs with these
        copies, or no stage between the first and the last that reads them there needs as much.  The floors are those of
        the first kinds; the bounds those of the second kinds, which are used where they are at least `least`.
        """
        [table], [case] = self.tables, made.cases
        candidates, path = self.candidates, made.solution.path
        assert path is not None
        floors, bounds = list(case.floors), []
        for d in range(len(floors)):
            for number in range(len(table.lasting)):
                need = table.needed(made.chains[0], path, (number, d))[d]
                if not self._is_worth(made, floors, d, need):
                    continue
                phased = PhasedCase(table, case, made.shared[0], (Phase(number, d, need),))
                chain = dearer(phased.chain, candidates.fine)
                bound = relaxed(chain, candidates.room(floors))[0].bound
                if least * (1 - BELOW) <= bound < least and self._below < MAX_BELOW:
                    self._below += 1
                    solution = candidates.solve(chain, floors, cutoff=least, effort="bound")
                    bound = bound if solution is None else max(bound, solution.bound)
                if bound >= least:
                    bounds.append(bound)
                    floors[d] = need
        return floors, bounds

    def _is_worth(self, made: Open, floors: Sequence[int], d: int, need: int) -> bool:
        """Whether the bound of a case is much higher where the arena of device d has `need` bytes, and those of other
        devices have their `floors`."""
        if need <= floors[d]:
            return False
        gain = made.solution.multipliers[d] * (need - floors[d])
        if not any(made.solution.multipliers):      # no budget binds: then multipliers say nothing of larger arenas
            room = self.candidates.room([*floors[:d], need, *floors[d + 1:]])
            gain = math.inf if min(room) < 0 else relaxed(made.chain, room)[0].bound - made.solution.bound
        return gain >= self.candidates.within * WORTH * made.solution.bound

    def above(self, made: Open, bound: float) -> bool:
        """Replace a case by one of larger floors (see `_lasting`), if all placements with smaller arenas are proven to
        be near the best, or above it; returns whether it was replaced."""
        best = self.candidates.best
        if len(self.tables) > 1 or best is None:
            return False
        floors, bounds = self._lasting(made, best.seconds / (1 + (FAR * (1 - 1e-6) if self.cases.is_far(bound)
                                                                  else self.candidates.within)))
        if not bounds:
            return False
        self.cases.closed = min([self.cases.closed, *bounds])
        self.cases.add((made.cases[0]._replace(floors=tuple(floors)),), made.shared, bound)
        return True

    def branched(self, made: Open, bound: float, effort: int) -> float:
        """A better bound of a case, by branch and bound over numbers of columns; `bound` if that is better."""
        candidates = self.candidates
        assert candidates.best is not None
        made.turns += 1
        if made.branches is None:
            problem = Problem(made.chain, candidates.room(made.floors))
            made.branches = Branches(problem, best_bound(problem))
        branches, before = made.branches, made.branches.path
        stop = candidates.best.seconds / (1 + candidates.within / 2) * (1 + 1e-12)      # near the best: see `is_near`
        bound = max(bound, branches.best(stop, effort))
        if made.chains and branches.path is not None and branches.path is not before:
            solution = answer(branches.problem, branches.bound, branches.path)
            if solution.cost < candidates.cutoff and self.cases.may_fit(made, solution):
                self._explore(made, solution)
        return bound
