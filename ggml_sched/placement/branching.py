"""Branch and bound over the cases of arenas: a bound of all placements of the tables, and candidates on the way.

Each case is bounded with its floors as arenas, and the case with the least bound comes first: its solution is planned
for real where it may fit, and the case is cut in two at what the solution needs of an arena.  While the bound is far
below the best, the case is cut without a search, and the path of its bound is planned with the arenas that this path
needs: a bound so far off comes from arenas that were assumed too small, not from the patterns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import product

from ggml_sched._graph import Tensor
from ggml_sched.placement.arenas import Case, by_caches, first_case, halves, mirrored, mirrors, raised, united
from ggml_sched.placement.candidates import Candidates, Found, chains_of, grown
from ggml_sched.placement.chain import Chain, Choice, Solution
from ggml_sched.placement.chains import dearer, entered, joined, parted, phased
from ggml_sched.placement.devices import Device
from ggml_sched.placement.solve import answer
from ggml_sched.placement.solve.bound import best_bound
from ggml_sched.placement.solve.branches import Branches
from ggml_sched.placement.solve.problem import Problem
from ggml_sched.placement.tables import TableChain, Tables
from ggml_sched.placement.trials import Trials
from ggml_sched.planning.plan import Plan

__all__ = ["Branching"]

MAX_CASES = 48
"""The most cases of arenas that are searched."""
MAX_CUTS = 160
"""The most cases that are cut in two without a search, because their bounds are far below the best."""
FAR = 0.01
"""A bound is far below the best if the seconds of the best exceed it by more than this part of the bound."""
MAX_BEYOND = 4
"""The most cases that are searched after the bound of all cases can rise no more."""
EFFORTS = {"more": 8, "most": 2}
"""{effort of `solve`: the most cases that are solved once more with this effort}."""
MAX_DEVICES = 2
"""With more devices no case is solved with the efforts of `EFFORTS`: that takes five seconds, and proves little."""
FIRST, LATER, BRANCHED = 1 << 22, 1 << 23, 1 << 26
"""With more than `MAX_DEVICES` devices, about how many columns branch and bound tries for a case that is far below the
best: in its first two turns, in each later turn, and for all cases together after the search."""
NEARER = 8
"""A turn for a case that is no longer far below the best counts for so many."""
SLOW = 2e-4
"""Branch and bound ends where a turn raises the bound of a case by less than this part."""
LASTING = 0.5
"""A case is parted by how long copies stay on a device if this raises the bound of the part with smaller arenas by at
least so much of what it may raise that of the other part."""
MAX_THOROUGH = 4
"""With more than `MAX_DEVICES` devices, the most cases that are solved with the effort "all" one by one; the others are
left to unions of cases."""
MAX_UNITED = 6
"""With more than `MAX_DEVICES` devices, the most unions of cases that are bounded in place of these."""
UNITED = 0.25
"""A case is united with others if this lowers their bound by at most this part of `within`."""
MAX_FINEST = 12
"""The most cases whose bounds are improved at the end: those with the least bounds."""
MAX_ROUNDS = 12
"""How often one case is solved and planned, at most; each round assumes larger arenas."""
MAX_WITHOUT = 6
"""The most searches for one case that exclude the patterns at the peaks of arenas (see `_without`)."""
FEW_CACHES = 0.02
"""Seconds that `_finer` adds to the cost of a stage with caches, as a part of the best seconds."""
BELOW, MAX_BELOW = 0.03, 8
"""The bound of placements with smaller arenas is improved by `solve` where it is below the bound that is wanted by at
most the part `BELOW`, and at most `MAX_BELOW` times."""
WORTH = 0.04
"""A gain in a bound is worth an attempt only if it is at least this part of `within`, times the bound."""
POLISHED = 0.1
"""The gap at which the search with the arenas of the best placement ends, as a part of `within`."""
POLISHES = 2
"""The most solutions of one such search; the second one assumes the arenas of the first one's plan."""
MAX_ENTERED = 3
"""`_by_entered` improves the bound of a case only if at most this many entries of `Case.caches` are True, without those
that others imply."""
MAX_WAYS = 32
"""The most ways to place residents that several stages read, such as an embedding that is also the output matrix."""


@dataclass
class Open:
    """A case that is not searched yet; of several models one case each, which are searched together."""

    cases: tuple[Case, ...]
    shared: tuple[Mapping[str, int], ...]
    chains: Sequence[TableChain]
    chain: Chain
    floors: Sequence[int]
    """For each device the bytes that its arenas have at least, of all models together."""
    solution: Solution
    """The bound with the floors as arenas, and the path at its multipliers; the path may exceed the budgets."""
    mixture: tuple[tuple[Choice, ...], ...]
    """Paths of which a weighted mean keeps the budgets; the bound is nearly the same mean of their seconds."""
    is_raised: bool = False
    """Whether `_by_entered` was called for this case."""
    turns: int = 0
    """How often `_branched` was called for this case."""
    branches: Branches | None = None
    """The branch and bound of `_branched`, which goes on in its next turn."""
    is_parted: bool = False
    """Whether `_parted` was called for this case, or need not be."""


class Branching:
    """The cases of some tables; `run` searches them."""

    def __init__(self, candidates: Candidates, tables: Sequence[Tables], pins: Sequence[Mapping[str, int]]) -> None:
        self.candidates: Candidates = candidates
        self.tables: Sequence[Tables] = tables
        self.pins: Sequence[Mapping[str, int]] = pins
        self.left: list[tuple[float, int, Open]] = []
        """A heap of the cases that are not searched yet: (bound, number of the case, the case)."""
        self.closed: float = math.inf
        """The least bound of the cases that need no more search, because their bounds are near the best."""
        self._weak: list[tuple[float, int, Open]] = []      # as `left`: searched, no cut raises the bound
        self._orders: list[tuple[int, ...]] = []            # orders of the devices that keep all prices: see `mirrors`
        self._added: set[tuple[object, ...]] = set()
        self._count = 0
        self._left_of = dict(EFFORTS)
        self._thorough = 0          # cases that were solved with the effort "all"
        self._below = 0             # bounds of placements with smaller arenas that `solve` improved
        self._assumed: set[tuple[object, ...]] = set()

    def run(self) -> float:
        """Search until all bounds are near the best, the cases are too many, or it is late; returns the bound of all
        cases."""
        candidates, budgets, table = self.candidates, self.candidates.budgets, self.tables[0]
        self._orders = mirrors(table.devices, table.links, {d for of in self.pins for d in of.values()})
        cases = tuple(first_case(each.needs, budgets, len(each.readers)) for each in self.tables)
        for shared in product(*(_ways(each.shared, model, each.devices, pins) for each, model, pins in zip(
                self.tables, candidates.models, self.pins, strict=True))):
            self._add(cases, shared, 0.0)
        beyond = cuts = searched = 0
        while (searched < MAX_CASES and self.left and not candidates.is_near(self.left[0][0])
               and not candidates.is_late):
            # The bound of all cases cannot rise above that of a closed case: more search only finds better candidates.
            beyond += self.left[0][0] >= min([self.closed, *(bound for bound, _, _ in self._weak[:1])])
            if beyond > MAX_BEYOND and candidates.best is not None:
                break
            bound, _, made = heappop(self.left)
            if len(candidates.budgets) > MAX_DEVICES and self._is_far(bound) and not made.turns:
                better = self._branched(made, bound, FIRST)
            else:
                better = self._by_entered(made, bound)
            if better > bound and self.left and better > self.left[0][0]:
                self._put(better, made)
                continue
            bound = better
            if cuts < MAX_CUTS and self._cut(bound, made):
                cuts += 1
            else:
                searched += 1
                self._search(bound, made)
        if not candidates.is_late:
            self._polish()
        return self._raised()

    def _raised(self) -> float:
        """The bound of all cases, after the cases with the least bounds were bounded with more effort."""
        if self.candidates.best is not None and len(self.candidates.budgets) > MAX_DEVICES:
            return self._finish()
        cases, searched = [*self.left, *self._weak], {count for _, count, _ in self._weak}
        heapify(cases)
        least = min([self.closed, *(bound for bound, _, _ in cases[:1])])
        done = self.closed
        for _ in range(MAX_FINEST):
            if not cases or cases[0][0] >= done or self.candidates.is_near(least) or self.candidates.is_late:
                break
            bound, count, made = heappop(cases)
            if count not in searched:
                bound = self._finest(made, bound)
            solution = self._most(made, bound)
            if solution is not None:
                bound = max(bound, solution.bound)
                self._explore(made, solution)
            done = min(done, bound)
            least = min([done, *(bound for bound, _, _ in cases[:1])])
        return least

    def _finish(self) -> float:
        """The bound of all cases, after branch and bound for the cases with the least bounds, by turns.  A case that
        stays far below the best after its first turn is parted once, if that may raise its bound."""
        candidates, effort = self.candidates, BRANCHED
        self.left += self._weak
        self._weak = []
        self._unite()
        while (self.left and not candidates.is_near(self.left[0][0]) and self.left[0][0] < self.closed and effort > 0
               and not candidates.is_late):
            bound, count, made = heappop(self.left)
            if made.branches is not None and not made.is_parted and self._is_far(bound) and self._parted(made, bound):
                continue
            turn = FIRST if made.turns < 2 else LATER
            effort -= turn * (1 if self._is_far(bound) else NEARER)
            before = -math.inf if made.branches is None else made.branches.value
            better = self._branched(made, bound, turn)
            assert made.branches is not None
            is_stuck = made.branches.is_stuck
            if is_stuck and not made.is_parted and self._is_far(better) and self._parted(made, better):
                continue
            heappush(self.left, (better, count, made))
            if is_stuck or made.branches.value < before * (1 + SLOW):
                break
        return min([self.closed, *(bound for bound, _, _ in self.left[:1])])

    def _branched(self, made: Open, bound: float, effort: int) -> float:
        """A better bound of a case, by branch and bound over numbers of columns; `bound` if that is better."""
        candidates = self.candidates
        assert candidates.best is not None
        made.turns += 1
        if made.branches is None:
            problem = Problem(made.chain, [budget - floor for budget, floor in zip(candidates.budgets, made.floors,
                                                                                    strict=True)])
            made.branches = Branches(problem, best_bound(problem))
        branches, before = made.branches, made.branches.path
        stop = candidates.best.seconds / (1 + candidates.within / 2) * (1 + 1e-12)      # near the best: see `is_near`
        bound = max(bound, branches.best(stop, effort))
        if made.chains and branches.path is not None and branches.path is not before:
            solution = answer(branches.problem, branches.bound, branches.path)
            if solution.cost < candidates.cutoff and self._may_fit(made, solution):
                self._explore(made, solution)
        return bound

    def _parted(self, made: Open, bound: float) -> bool:
        """Put two parts in place of a case, cut at what the paths of its bound need of an arena, or by how long copies
        stay on a device; returns whether it was parted."""
        made.is_parted = True
        if not made.chains:
            return False
        assert made.branches is not None
        problem = made.branches.problem
        paths = tuple(problem.choices(one.path) for one in made.branches.mixture) or made.mixture
        parts = self._halves(made, paths)
        for part in parts or ():
            self._add(part, made.shared, bound)
        return parts is not None or self._by_lasting(made, bound, paths)

    def _by_lasting(self, made: Open, bound: float, paths: Sequence[Sequence[Choice]]) -> bool:
        """Part a case by how long copies of the inputs that are read with caches stay on one device (see `_lasting`):
        the arena is at least what one of these paths needs, or less is needed where the copies stay.  Only the first
        part is a case; the second has a bound, and no placements are sought there.  Returns whether it was parted."""
        if len(self.tables) > 1:
            return False
        [table], [case] = self.tables, made.cases
        candidates = self.candidates
        gain, number, d, need = max(
            (made.solution.multipliers[d] * (need - case.floors[d]), number, d, need)
            for number in range(len(table.lasting)) for d in range(len(case.floors))
            for need in [max(table.needed(made.chains[0], path, (number, d))[d] for path in paths)]
        ) if table.lasting else (0.0, 0, 0, 0)
        if gain <= candidates.within * WORTH * bound:
            return False
        chain = dearer(self._smaller(made, number, d, need), candidates.fine)
        room = [budget - floor for budget, floor in zip(candidates.budgets, made.floors, strict=True)]
        solution, mixture = relaxed(chain, room)
        if solution.bound - made.solution.bound < LASTING * gain:
            return False
        self._put(max(bound, solution.bound), Open(made.cases, made.shared, (), chain, made.floors, solution, mixture))
        self._add((case._replace(floors=(*case.floors[:d], need, *case.floors[d + 1:])),), made.shared, bound)
        return True

    def _smaller(self, made: Open, number: int, d: int, need: int) -> Chain:
        """The chain of the placements of a case of which no stage between the first and the last that read the inputs
        `lasting[number]` on device d needs `need` bytes there."""
        [table], [case], [shared] = self.tables, made.cases, made.shared
        limits = (*case.limits[:d], min(case.limits[d], need - 1), *case.limits[d + 1:])
        outer, inner = (table.chain(case.caches, shared, limits, within) for within in (None, (number, d)))
        return phased(outer, inner, [of[rows] for of, rows in zip(table.reads(number, d), outer.rows, strict=True)])

    def _unite(self) -> None:
        """Put unions in place of the cases that are far below the best.  Cases which differ in their arenas alone are
        bounded together, by their union, if that costs little: one proof serves many cases of nearly the same bound."""
        rest = sorted(self.left, key=lambda each: each[:2])
        for _ in range(MAX_UNITED):
            if not rest or not self._is_far(rest[0][0]):
                break
            made, members = self._union(rest)
            taken = {count for _, count, _ in members}
            rest = [each for each in rest if each[1] not in taken]
            if len(members) > 1:
                made.is_parted = True
                self.left = [each for each in self.left if each[1] not in taken]
                self._put(members[0][0], made)
        heapify(self.left)

    def _union(self, open_: Sequence[tuple[float, int, Open]]) -> tuple[Open, list[tuple[float, int, Open]]]:
        """(The union of the first of some cases and of others, its members): of those that differ from the first one in
        their arenas alone, and are far below the best, each whose part lowers the bound by multipliers little."""
        candidates = self.candidates
        first = open_[0][2]
        made, members = first, [open_[0]]
        least = first.solution.bound * (1 - UNITED * candidates.within)
        for each in open_[1:]:
            if (not self._is_far(each[0]) or each[2].shared != first.shared
                    or any(a.caches != b.caches for a, b in zip(each[2].cases, first.cases, strict=True))):
                continue
            cases = tuple(united(pair) for pair in zip(made.cases, each[2].cases, strict=True))
            chains = chains_of(self.tables, cases, first.shared)
            chain = dearer(joined(chains), candidates.fine)
            floors = candidates.joined([case.floors for case in cases])
            room = [budget - floor for budget, floor in zip(candidates.budgets, floors, strict=True)]
            solution, mixture = relaxed(chain, room)
            if solution.bound >= least:
                made, members = Open(cases, first.shared, chains, chain, floors, solution, mixture), [*members, each]
        return made, members

    def _add(self, cases: tuple[Case, ...], shared: tuple[Mapping[str, int], ...], bound: float) -> None:
        """Bound a case with its floors as arenas, and put it among those that are left.  A case that differs from an
        earlier one only by an exchange of equal devices is left out."""
        cases = tuple(raised(case, table.floors(case.caches)) for case, table in zip(cases, self.tables, strict=True))
        if any(floor > limit for case in cases for floor, limit in zip(case.floors, case.limits, strict=True)):
            return
        if len(self._orders) > 1:
            key = mirrored(cases, shared, self._orders)
            if key in self._added:
                return
            self._added.add(key)
        chains = chains_of(self.tables, cases, shared)
        chain = dearer(joined(chains), self.candidates.fine)
        floors = self.candidates.joined([case.floors for case in cases])
        room = [budget - floor for budget, floor in zip(self.candidates.budgets, floors, strict=True)]
        if min(room) < 0:
            return
        solution, mixture = relaxed(chain, room)
        bound = max(bound, solution.bound)
        if solution.path is None:
            self.closed = min(self.closed, bound)
        else:
            self._put(bound, Open(cases, shared, chains, chain, floors, solution, mixture))

    def _put(self, bound: float, made: Open) -> None:
        """Put a case among those that are left, or drop it if its bound is infinite: then it has no placement."""
        if bound < math.inf:
            heappush(self.left, (bound, self._count, made))
            self._count += 1

    def _is_far(self, bound: float) -> bool:
        """Whether a bound is far below the best."""
        best = self.candidates.best
        return best is not None and bound * (1 + FAR) <= best.seconds

    def _cut(self, bound: float, made: Open) -> bool:
        """If the bound of a case is far below the best, cut the case in two, and plan the path of its bound (`_dive`);
        returns whether the case was cut."""
        if not self._is_far(bound):
            return False
        parts = self._halves(made, made.mixture)
        if parts is None:
            return len(self.candidates.budgets) <= MAX_DEVICES and self._above(made, bound)
        self._dive(made, made.solution)
        for part in parts:
            self._add(part, made.shared, bound)
        return True

    def _dive(self, made: Open, solution: Solution) -> None:
        """Solve a case again with exactly the arenas that the path of `solution` needs, and with patterns that need no
        larger ones; plan the solution found."""
        candidates = self.candidates
        assert solution.path is not None
        cases = []
        for case, needs in zip(made.cases, self._needs(made, solution.path), strict=True):
            least = tuple(max(pair) for pair in zip(case.floors, needs, strict=True))
            cases.append(case._replace(floors=least, limits=least))
        if self._is_tried(tuple(cases), made.shared, ()):
            return
        floors = candidates.joined([case.floors for case in cases])
        chains = chains_of(self.tables, cases, made.shared)
        chain = dearer(joined(chains), candidates.fine)
        found = candidates.solve(chain, floors, cutoff=candidates.cutoff, effort="few")
        if found is not None and found.path is not None:
            self._explore(Open(tuple(cases), made.shared, chains, chain, floors, found, ()), found)

    def _search(self, bound: float, made: Open) -> None:
        """Search one case: plan what may fit, and cut it in two, or close it."""
        candidates = self.candidates
        solution = candidates.solve(made.chain, made.floors, cutoff=candidates.cutoff, effort="few")
        assert solution is not None
        bound = max(bound, solution.bound)
        if bound == math.inf:
            return
        first = None
        if solution.path is not None and (candidates.best is None or self._may_fit(made, solution)):
            first = self._explore(made, solution)
        if candidates.is_near(bound):
            self.closed = min(self.closed, bound)
            return
        parts = self._halves(made, _paths(solution)) or self._halves(made, made.mixture)
        if parts is None and self._above(made, bound):
            return
        if parts is None and len(candidates.budgets) > MAX_DEVICES and self._thorough == MAX_THOROUGH:
            heappush(self._weak, (bound, self._count, made))
            self._count += 1
            return
        if parts is None:
            self._thorough += 1
            solution = candidates.solve(made.chain, made.floors, cutoff=candidates.cutoff)
            assert solution is not None
            bound = max(bound, solution.bound)
            first = self._explore(made, solution) or first
            parts = None if candidates.is_near(bound) else self._halves(made, _paths(solution))
        if parts is None:
            bound = self._finest(made, bound)
            if candidates.is_near(bound):
                self.closed = min(self.closed, bound)
            else:
                heappush(self._weak, (bound, self._count, made))
                self._count += 1
                if first is not None:
                    self._without(made, first)
        for part in parts or ():
            self._add(part, made.shared, bound)

    def _needs(self, made: Open, path: Sequence[Choice]) -> list[list[int]]:
        """For each model the bytes that a path needs at least of the arena of each device."""
        return [table.needed(chain, part)
                for table, chain, part in zip(self.tables, made.chains, parted(path, made.chains), strict=True)]

    def _may_fit(self, made: Open, solution: Solution) -> bool:
        """Whether a solution keeps the budgets with the arenas that it needs at least."""
        assert solution.path is not None and solution.memory is not None
        needs = self.candidates.joined(self._needs(made, solution.path))
        return all(held + max(need, floor) <= budget for held, need, floor, budget in zip(
            solution.memory, needs, made.floors, self.candidates.budgets, strict=True))

    def _halves(self, made: Open, paths: Sequence[Sequence[Choice]]) -> tuple[tuple[Case, ...], ...] | None:
        """The two parts of the case, cut where that may raise its bound most; None if no cut at what these paths need
        raises the bound."""
        if not paths:
            return None
        best: tuple[float, int, tuple[Case, Case]] | None = None
        least = self.candidates.within * WORTH * made.solution.bound
        used, parts = [], [parted(path, made.chains) for path in paths]
        for k, (case, table, chain) in enumerate(zip(made.cases, self.tables, made.chains, strict=True)):
            used.append([max(of) for of in zip(*(table.needed(chain, own[k]) for own in parts), strict=True)])
            unpaid = [max(of) for of in zip(*(table.unpaid(chain, own[k]) for own in parts), strict=True)]
            # Models that take turns share arenas as large as the largest floor: a smaller floor of one model may rise
            # to the largest without effect.
            spare = [floor - own if self.candidates.turns else 0
                     for floor, own in zip(made.floors, case.floors, strict=True)]
            for found in (halves(case, used[k], made.solution.multipliers, spare, table.levels),
                          by_caches(case, [price if price > least else 0.0 for price in unpaid], table.implied)):
                if found is not None and (best is None or found[0] > best[0]):
                    best = found[0], k, found[1]
        best = best or self._raised_by_floors(made, used, least)
        if best is None:
            return None
        _, k, cut = best
        return tuple((*made.cases[:k], part, *made.cases[k + 1:]) for part in cut)

    def _raised_by_floors(self, made: Open, used: Sequence[Sequence[int]],
                          least: float) -> tuple[float, int, tuple[Case, Case]] | None:
        """(Seconds, model, the two cases): the cut of one model's case whose larger floor raises the bound most; None
        if none raises it by more than `least`.  For when no budget binds, so that all multipliers are 0 and do not
        show the best cut: each cut is tried.

        `used`: for each model the bytes that paths need of the arena of each device.
        """
        candidates = self.candidates
        best: tuple[float, int, tuple[Case, Case]] | None = None
        for k, (case, needs) in enumerate(zip(made.cases, used, strict=True)):
            for d in range(len(needs)):
                worth = [float(other == d) for other in range(len(needs))]
                cut = halves(case, needs, worth, [0] * len(needs), self.tables[k].levels)
                if cut is None:
                    continue
                above = (*made.cases[:k], cut[1][0], *made.cases[k + 1:])
                floors = candidates.joined([each.floors for each in above])
                room = [budget - floor for budget, floor in zip(candidates.budgets, floors, strict=True)]
                gain = math.inf if min(room) < 0 else relaxed(made.chain, room)[0].bound - made.solution.bound
                if gain > least and (best is None or gain > best[0]):
                    best = gain, k, cut[1]
        return best

    def _most(self, made: Open, bound: float) -> Solution | None:
        """The solution of a case with more effort, if this raises `bound`, else None.  More effort is spent only where
        the best is above the bound by more than `within`, and for few cases (`EFFORTS`, `MAX_DEVICES`)."""
        candidates, best = self.candidates, None
        if len(candidates.budgets) > MAX_DEVICES:
            return None
        for effort in self._left_of:
            if (candidates.best is not None and self._left_of[effort] > 0
                    and candidates.best.seconds > bound * (1 + candidates.within)):
                self._left_of[effort] -= 1
                solution = candidates.solve(made.chain, made.floors, cutoff=candidates.cutoff, effort=effort)
                if solution is not None and solution.bound > bound:
                    best, bound = solution, solution.bound
        return best

    # -- candidates ---------------------------------------------------------------------

    def _explore(self, made: Open, solution: Solution | None) -> Found | None:
        """Plan a solution of a case; while the arenas of the plans do not fit, solve again with arenas of that size,
        and plan the new solution.  Returns the first placement if its arenas did not fit, else None."""
        candidates, first = self.candidates, None
        assumed: Sequence[int] = made.floors
        for _ in range(MAX_ROUNDS):
            if solution is None or solution.path is None:
                break
            found = candidates.plan(self.tables, made.chains, solution, made.cases, made.shared)
            if not any(found.missing):
                self._fill(made, found, assumed)
                break
            first = first or found
            assumed = grown(assumed, found)
            if self._is_tried(made.cases, made.shared, assumed):
                break
            solution = candidates.solve(made.chain, assumed, cutoff=candidates.cutoff, effort="few")
        return first

    def _is_tried(self, cases: Sequence[Case], shared: Sequence[Mapping[str, int]], arenas: Sequence[int]) -> bool:
        """Whether the patterns of some cases were solved with these arenas before; from now on they count as solved."""
        key = (*((case.limits, case.caches) for case in cases), *arenas,
               *(tuple(sorted(fixed.items())) for fixed in shared))
        if key in self._assumed:
            return True
        self._assumed.add(key)
        return False

    def _fill(self, made: Open, found: Found, assumed: Sequence[int]) -> None:
        """Solve once more with the arenas of a placement that fits, if they are smaller than those assumed for it."""
        if all(size >= held for size, held in zip(found.arenas, assumed, strict=True)) or self._is_tried(
                made.cases, made.shared, found.arenas):
            return
        solution = self.candidates.solve(made.chain, found.arenas, cutoff=self.candidates.cutoff, effort="few")
        if solution is not None and solution.path is not None:
            self.candidates.plan(self.tables, made.chains, solution, made.cases, made.shared)

    def _polish(self) -> None:
        """Solve thoroughly, once, with the arenas of the best placement and with caches on the devices that have some:
        the costs then include the copies that its plan makes.  With more than `MAX_DEVICES` devices, where the first
        search leaves most, a second and more thorough search follows."""
        best = self.candidates.best
        if best is None or not best.cases or self._is_best():
            return
        candidates = self.candidates
        self._resolve(best, best.cases, "some")
        if len(candidates.budgets) > MAX_DEVICES and not self._is_best() and not candidates.is_late:
            best = candidates.best
            assert best is not None
            limits = tuple(candidates.budgets)
            cases = tuple(Case(limits, best.arenas, table.caches_of(residents))
                          for table, residents in zip(self.tables, best.residents, strict=True))
            self._resolve(best, cases, "all")

    def _is_best(self) -> bool:
        """Whether the best is near the bound of all cases."""
        return self.candidates.is_near(min([self.closed, *(bound for bound, _, _ in (*self.left, *self._weak))]))

    def _resolve(self, best: Found, cases: tuple[Case, ...], effort: str) -> None:
        """Solve with the patterns of some cases and the arenas of a placement, and plan the solution; once more if its
        arenas are larger."""
        candidates, arenas = self.candidates, list(best.arenas)
        chains = chains_of(self.tables, cases, best.shared)
        chain = dearer(joined(chains), candidates.fine)
        for _ in range(POLISHES):
            solution = candidates.solve(chain, arenas, cutoff=candidates.cutoff, effort=effort, part=POLISHED)
            if solution is None or solution.path is None:
                break
            found = candidates.plan(self.tables, chains, solution, cases, best.shared)
            if not any(found.missing):
                break
            arenas = grown(arenas, found)

    def _without(self, made: Open, found: Found) -> None:
        """Solve again, with the floors as arenas, after a placement whose arenas are too large.

        Each time, the patterns of the stages whose nodes are computed at the peaks of these arenas are excluded, for
        all stages of their class: other placements of nearly the same price may have smaller arenas.
        """
        candidates, chain = self.candidates, made.chain
        for _ in range(MAX_WITHOUT):
            assert found.solution.path is not None
            banned = self._at_peaks(found)
            if not banned:
                break
            costs = list(chain.cost)
            for stage in banned:
                number = chain.classes[stage]
                costs[number] = costs[number].copy()
                costs[number][found.solution.path[stage].pattern] = math.inf
            chain = replace(chain, cost=tuple(costs))
            solution = candidates.solve(chain, made.floors, cutoff=candidates.cutoff, effort="few")
            if solution is None or solution.path is None:
                break
            found = candidates.plan(self.tables, made.chains, solution, made.cases, made.shared)
            if not any(found.missing):
                break

    def _at_peaks(self, found: Found) -> set[int]:
        """The stages, as indices in the joined chain, whose nodes run while an arena that is too large is fullest."""
        stages, first = set(), 0
        for table, model, trial in zip(self.tables, self.candidates.models, found.trials, strict=True):
            for d, missing in enumerate(found.missing):
                if missing:
                    plan, facts = max(zip(trial.plans, model.facts, strict=True),
                                      key=lambda pair: pair[0].buffer_sizes[d])
                    node = _node_at_peak(plan, d, facts.nodes)
                    if node >= 0:
                        stages.add(first + table.models[0].stage_of[model.facts.index(facts)][node])
            first += len(table.classes)
        return stages

    # -- bounds -------------------------------------------------------------------------

    def _finest(self, made: Open, bound: float) -> float:
        """The bound of a case, improved by `_finer` and `_by_phases` if it is not near the best."""
        if len(self.tables) > 1 or self.candidates.best is None or self.candidates.is_near(bound):
            return bound
        bound = max(bound, self._finer(made))
        return bound if self.candidates.is_near(bound) else max(bound, self._by_phases(made))

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

    def _by_entered(self, made: Open, bound: float) -> float:
        """A better bound of a case in which some devices have caches: the bound over paths with caches on all of these
        devices.  Returns `bound` if that is better, or if too many caches are decided.

        Each path of the case pays for copies of inputs to all of these devices, but may have caches on fewer of them,
        and so fewer copies of activations and fewer splits.  The bound by multipliers is a mean of paths such as these.
        """
        if len(self.tables) > 1 or made.is_raised:
            return bound
        made.is_raised = True
        [table], [chain], [case] = self.tables, made.chains, made.cases
        there = {entry for entry, held in enumerate(case.caches) if held}
        required = sorted(there - {other for entry in there for other in table.implied[entry]})
        if not 0 < len(required) <= MAX_ENTERED:
            return bound
        held = [of[rows] for of, rows in zip(table.reading, chain.rows, strict=True)]
        room = [budget - floor for budget, floor in zip(self.candidates.budgets, made.floors, strict=True)]
        return max(bound, relaxed(entered(made.chain, held, required), room)[0].bound)

    def _by_phases(self, made: Open) -> float:
        """Another bound of a case: the least of its bound with arenas as large as `_lasting` finds, and of the bounds
        of the placements with smaller arenas."""
        candidates = self.candidates
        floors, bounds = self._lasting(made, -math.inf)
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
                room = [budget - floor for budget, floor in zip(candidates.budgets, floors, strict=True)]
                chain = dearer(self._smaller(made, number, d, need), candidates.fine)
                bound = relaxed(chain, room)[0].bound
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
            room = [budget - (need if other == d else floor)
                    for other, (budget, floor) in enumerate(zip(self.candidates.budgets, floors, strict=True))]
            gain = math.inf if min(room) < 0 else relaxed(made.chain, room)[0].bound - made.solution.bound
        return gain >= self.candidates.within * WORTH * made.solution.bound

    def _above(self, made: Open, bound: float) -> bool:
        """Replace a case by one of larger floors (see `_lasting`), if all placements with smaller arenas are proven to
        be near the best, or above it; returns whether it was replaced."""
        best = self.candidates.best
        if len(self.tables) > 1 or best is None:
            return False
        floors, bounds = self._lasting(made, best.seconds / (1 + (FAR * (1 - 1e-6) if self._is_far(bound)
                                                                  else self.candidates.within)))
        if not bounds:
            return False
        self.closed = min([self.closed, *bounds])
        self._add((made.cases[0]._replace(floors=tuple(floors)),), made.shared, bound)
        return True


def relaxed(chain: Chain, room: Sequence[int]) -> tuple[Solution, tuple[tuple[Choice, ...], ...]]:
    """The bound of a chain by multipliers, with the path at the best multipliers, which may take more bytes than
    `room`; and the paths of which the bound is a mean."""
    problem = Problem(chain, room)
    found = best_bound(problem)
    worth = [0.0] * len(room)
    for d, multiplier in zip(problem.scarce, found.multipliers.tolist(), strict=True):
        worth[d] = multiplier
    if not found.relaxations or found.value == math.inf:
        return Solution(math.inf, found.value, None, None, tuple(worth)), ()
    best = max(found.relaxations, key=lambda one: one.value)
    mixture = {tuple(each.path.tolist()): each for each in (best, *found.mixture)}
    return (Solution(best.cost, found.value, problem.choices(best.path), problem.bytes_of(best.path), tuple(worth)),
            tuple(problem.choices(each.path) for each in mixture.values()))


def _paths(solution: Solution) -> tuple[tuple[Choice, ...], ...]:
    return () if solution.path is None else (solution.path,)


def _node_at_peak(plan: Plan, d: int, nodes: Sequence[Tensor]) -> int:
    """The index in `nodes` of the node that is computed when the arena of device d is fullest; -1: none."""
    data, graph = plan.data, plan.graph
    births = [life[0] for i in data.live_at_peak(d) if (life := data.lifetime(i)) is not None]
    if not births:
        return -1
    peak = max(births)
    positions = [graph.position_of(node) for node in nodes]
    return next((i for i, position in enumerate(positions) if position >= peak), -1)


def _ways(shared: Sequence[Sequence[str]], model: Trials, devices: Sequence[Device],
          pins: Mapping[str, int]) -> list[dict[str, int]]:
    """The ways to place residents that several stages read, as {first name of a group: its device}: all combinations of
    devices for the largest groups, with the others on the host."""
    fixed = {group[0]: next((pins[name] for name in group if name in pins), len(devices) - 1) for group in shared}
    free = [group for group in shared if not any(name in pins for name in group)]
    free.sort(key=lambda group: (-sum(model.sizes[name] for name in group), group))
    few = 0
    while few < len(free) and len(devices) ** (few + 1) <= MAX_WAYS:
        few += 1
    return [{**fixed, **dict(zip([group[0] for group in free[:few]], chosen, strict=True))}
            for chosen in product(range(len(devices)), repeat=few)]
