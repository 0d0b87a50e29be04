"""The bound of all cases of arenas after the search: the cases with the least bounds are bounded with more effort.

With one or two devices single cases are solved with more effort.  With more devices, or where the bound is still far
below the best, branch and bound over numbers of columns goes on by turns for the case with the least bound, and a case
that stays far below the best is parted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import product

from ggml_sched.placement.candidates import Candidates
from ggml_sched.placement.case_bounds import CaseBounds
from ggml_sched.placement.chain import Choice, Solution
from ggml_sched.placement.chains import dearer
from ggml_sched.placement.open_cases import WORTH, Open, OpenCases, relaxed
from ggml_sched.placement.phases import MOST_PHASES, Phase, PhasedCase
from ggml_sched.placement.tables import Tables

__all__ = ["FIRST", "LastBounds"]

EFFORTS = {"more": 8, "most": 2}
"""{effort of `solve`: the most cases that are solved once more with this effort}."""
FIRST, LATER, BRANCHED = 1 << 22, 1 << 23, 3 << 27
"""In a wide search, about how many columns branch and bound tries for a case that is far below the best: in its first
two turns, in each later turn, and for all cases together after the search."""
PARTED = 1 << 22
"""Two parts in place of a case take as long as so many more columns would."""
NEARER = 8
"""A turn for a case that is no longer far below the best counts for so many."""
SLOW = 2e-4
"""Branch and bound ends where a turn raises the bound of a case that is no longer far below the best by less than this
part."""
TURNS, HOPELESS = 4, 0.05
"""Branch and bound ends after more than so many turns for a case, where `BRANCHED` columns would raise its bound by
less than this part of what it is below the best, if all turns raised it as the last one has."""
LASTING = 0.5
"""A case is parted by how long copies stay on a device if this raises the bound of the part with smaller arenas by at
least so much of what it may raise that of the other part."""
MAX_FINEST = 12
"""The most cases whose bounds are improved at the end: those with the least bounds."""


class LastBounds:
    """The last bounds of one search; `explore`: plans a solution of a case for real."""

    def __init__(self, cases: OpenCases, bounds: CaseBounds, explore: Callable[[Open, Solution], object]) -> None:
        self.cases: OpenCases = cases
        self.candidates: Candidates = cases.candidates
        self.tables: Sequence[Tables] = cases.tables
        self._bounds = bounds
        self._explore = explore
        self._left_of = dict(EFFORTS)

    def raised(self) -> float:
        """The bound of all cases, after the cases with the least bounds were bounded with more effort.  Also where the
        search is not wide, branch and bound goes first if the bound is far below the best."""
        if self.candidates.best is not None and (self.cases.is_wide or self.cases.is_far(self.cases.bound)):
            self._finish()
            if self.cases.is_wide:
                return self.cases.bound
        cases, searched = [*self.cases.left, *self.cases.weak], {count for _, count, _ in self.cases.weak}
        heapify(cases)
        least = self.cases.bound
        done = self.cases.closed
        for _ in range(MAX_FINEST):
            if not cases or cases[0][0] >= done or self.candidates.is_near(least) or self.candidates.is_late:
                break
            bound, count, made = heappop(cases)
            if count not in searched:
                bound = self._bounds.finest(made, bound)
            solution = self._most(made, bound)
            if solution is not None:
                bound = max(bound, solution.bound)
                self._explore(made, solution)
            done = min(done, bound)
            least = min([done, *(bound for bound, _, _ in cases[:1])])
        return least

    def _most(self, made: Open, bound: float) -> Solution | None:
        """The solution of a case with more effort, if this raises `bound`, else None.  More effort is spent only where
        the best is above the bound by more than `within`, and for few cases (`EFFORTS`)."""
        candidates, best = self.candidates, None
        if self.cases.is_wide:
            return None
        for effort in self._left_of:
            if (candidates.best is not None and self._left_of[effort] > 0
                    and candidates.best.seconds > bound * (1 + candidates.within)):
                self._left_of[effort] -= 1
                solution = candidates.solve(made.chain, made.floors, cutoff=candidates.cutoff, effort=effort)
                if solution is not None and solution.bound > bound:
                    best, bound = solution, solution.bound
        return best

    def _finish(self) -> float:
        """The bound of all cases, after branch and bound for the cases with the least bounds, by turns.  A case that
        stays far below the best after its first turn is parted once, if that may raise its bound."""
        candidates, cases, effort = self.candidates, self.cases, BRANCHED
        cases.left += cases.weak
        cases.weak = []
        heapify(cases.left)
        while (cases.left and not candidates.is_near(cases.left[0][0]) and cases.left[0][0] < cases.closed
               and effort > 0 and not candidates.is_late):
            bound, count, made = heappop(cases.left)
            if made.branches is not None and not made.is_parted and cases.is_far(bound) and self._parted(made, bound):
                continue
            turn = FIRST if made.turns < 2 else LATER
            effort -= turn * (1 if cases.is_far(bound) else NEARER)
            before = -math.inf if made.branches is None else made.branches.value
            better = self._bounds.branched(made, bound, turn)
            assert made.branches is not None
            is_stuck = made.branches.is_stuck
            if self._parted_at_path(made, better) or (is_stuck and self._parted(made, better)):
                effort -= PARTED
                continue
            heappush(cases.left, (better, count, made))
            rise, best = made.branches.value - before, candidates.best
            assert best is not None
            if is_stuck or (rise < before * SLOW if not cases.is_far(better) else
                            made.turns > TURNS and rise * BRANCHED < HOPELESS * (best.seconds - better) * turn):
                break
        return cases.bound

    def _parted_at_path(self, made: Open, bound: float) -> bool:
        """Divide a case in two if branch and bound has found a path that costs too little to be near the best: no bound
        of the case exceeds this cost.  The case is cut where the path needs more than the case counts.  Returns whether
        it was parted."""
        candidates, branches = self.candidates, made.branches
        assert candidates.best is not None and branches is not None
        if not made.chains or branches.path is None or candidates.is_near(branches.problem.cost_of(branches.path)):
            return False
        path, memory = branches.problem.choices(branches.path), branches.problem.bytes_of(branches.path)
        parts = self.cases.halves_at(made, path, memory)
        for part in parts or ():
            self.cases.add(part, made.shared, bound, made.phases)
        return parts is not None or self._lasting_at(made, bound, made.own(path)[0], memory)

    def _lasting_at(self, made: Open, bound: float, path: Sequence[Choice], memory: Sequence[int]) -> bool:
        """Part a case where a path of it exceeds the budget of a device by most while copies of inputs stay there:
        either the arena is what the path needs, or less is needed where the copies stay.  Returns whether it was
        parted."""
        if len(self.tables) > 1:
            return False
        [case], budgets, limits = made.cases, self.candidates.budgets, {old[:2]: old.need for old in made.phases}
        over, _, phase = max((
            ((memory[one.device] + one.need - budgets[one.device]) / max(budgets[one.device], 1), -one.number, one)
            for one in self._while_lasting(made, [path])
            if case.floors[one.device] < one.need < limits.get(one[:2], math.inf)
        ), default=(0.0, 0, None))
        return phase is not None and over > 0 and self._part_by(made, bound, phase)

    def _while_lasting(self, made: Open, paths: Sequence[Sequence[Choice]]) -> Iterator[Phase]:
        """For each set of inputs whose copies last, and each device, the phase that excludes the one of these paths of
        the model's own chain which needs most of the arena while the copies stay."""
        [table], [chain] = self.tables, made.chains
        for number, d in product(range(len(table.lasting)), range(len(made.floors))):
            yield Phase(number, d, max(table.needed(chain, path, (number, d))[d] for path in paths))

    def _part_by(self, made: Open, bound: float, phase: Phase) -> bool:
        """Part a case by a phase; returns False where a part would have too many phases."""
        [case], (number, d, need) = made.cases, phase
        phases = (*(old for old in made.phases if old[:2] != (number, d)), phase)
        if len(phases) > MOST_PHASES:
            return False
        self.cases.add((case,), made.shared, bound, phases)
        self.cases.add((case._replace(floors=(*case.floors[:d], need, *case.floors[d + 1:])),), made.shared, bound,
                       made.phases)
        return True

    def _parted(self, made: Open, bound: float) -> bool:
        """Put two parts in place of a case, cut at what the paths of its bound need of an arena, or by how long copies
        stay on a device; returns whether it was parted."""
        made.is_parted = True
        if not made.chains:
            return False
        assert made.branches is not None
        problem = made.branches.problem
        paths = tuple(problem.choices(one.path) for one in made.branches.mixture) or made.mixture
        parts = self.cases.halves(made, paths)
        for part in parts or ():
            self.cases.add(part, made.shared, bound, made.phases)
        return parts is not None or self._by_lasting(made, bound, paths)

    def _by_lasting(self, made: Open, bound: float, paths: Sequence[Sequence[Choice]]) -> bool:
        """Part a case by how long copies of the inputs that are read with caches stay on one device (see `CaseBounds`):
        the arena is at least what one of these paths needs, or less is needed where the copies stay.  Returns whether
        it was parted."""
        if len(self.tables) > 1 or made.phases:
            return False
        [table], [case] = self.tables, made.cases
        candidates = self.candidates
        gain, phase = max((
            (made.solution.multipliers[one.device] * (one.need - case.floors[one.device]), one)
            for one in self._while_lasting(made, [made.own(path)[0] for path in paths])
        ), default=(0.0, None))
        if phase is None or gain <= candidates.within * WORTH * bound:
            return False
        chain = dearer(PhasedCase(table, case, made.shared[0], (phase,)).chain, candidates.fine)
        if relaxed(chain, candidates.room(made.floors))[0].bound - made.solution.bound < LASTING * gain:
            return False
        return self._part_by(made, bound, phase)
