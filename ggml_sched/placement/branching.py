"""Branch and bound over the cases of arenas: a bound of all placements of the tables, and candidates on the way.

Each case is bounded with its floors as arenas, and the case with the least bound comes first: its solution is planned
for real where it may fit, and the case is cut in two at what the solution needs of an arena.  While the bound is far
below the best, the case is cut without a search, and the path of its bound is planned with the arenas that this path
needs: a bound so far off comes from arenas that were assumed too small, not from the patterns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heappop
from itertools import product

from ggml_sched._graph import Tensor
from ggml_sched.placement.arenas import Case, first_case, mirrors
from ggml_sched.placement.candidates import Candidates, Found, chains_of, grown
from ggml_sched.placement.case_bounds import CaseBounds
from ggml_sched.placement.chain import Choice, Solution
from ggml_sched.placement.chains import dearer, joined
from ggml_sched.placement.devices import Device
from ggml_sched.placement.last_bounds import FIRST, LastBounds
from ggml_sched.placement.open_cases import Open, OpenCases
from ggml_sched.placement.phases import Phase
from ggml_sched.placement.tables import Tables
from ggml_sched.placement.trials import Trials

__all__ = ["Branching"]

MAX_CASES = 48
"""The most cases of arenas that are searched."""
MAX_SEARCHED = 3
"""The most of them in a wide search: branch and bound, with which `LastBounds` goes on, proves more in this time."""
MAX_CUTS = 160
"""The most cases that are cut in two without a search, because their bounds are far below the best."""
MAX_BEYOND = 4
"""The most cases that are searched after the bound of all cases can rise no more."""
MAX_THOROUGH = 4
"""In a wide search, the most cases that are solved with the effort "all" one by one; branch and bound of `LastBounds`
goes on with the others."""
MAX_ROUNDS = 12
"""How often one case is solved and planned, at most; each round assumes larger arenas."""
POLISHED = 0.1
"""The gap at which the search with the arenas of the best placement ends, as a part of `within`."""
POLISHES = 2
"""The most solutions of one such search; the second one assumes the arenas of the first one's plan."""
MAX_WAYS = 32
"""The most ways to place residents that several stages read, such as an embedding that is also the output matrix."""


class Branching:
    """The cases of some tables; `run` searches them."""

    def __init__(self, candidates: Candidates, tables: Sequence[Tables], pins: Sequence[Mapping[str, int]]) -> None:
        self.candidates: Candidates = candidates
        self.tables: Sequence[Tables] = tables
        self.pins: Sequence[Mapping[str, int]] = pins
        self.cases: OpenCases = OpenCases(candidates, tables)
        self.bounds: CaseBounds = CaseBounds(self.cases, self._explore)
        self._thorough = 0          # cases that were solved with the effort "all"
        self._assumed: set[tuple[object, ...]] = set()

    def run(self) -> float:
        """Search until all bounds are near the best, the cases are too many, or it is late; returns the bound of all
        cases."""
        candidates, cases, table = self.candidates, self.cases, self.tables[0]
        cases.orders = mirrors(table.devices, table.links, {d for of in self.pins for d in of.values()})
        first = tuple(first_case(each.needs, candidates.budgets, each.n_sets) for each in self.tables)
        for shared in product(*(_ways(each.shared, model, each.devices, pins) for each, model, pins in zip(
                self.tables, candidates.models, self.pins, strict=True))):
            cases.add(first, shared, 0.0)
        beyond = cuts = searched = 0
        most = MAX_SEARCHED if cases.is_wide else MAX_CASES
        while (searched < most and cases.left and not candidates.is_near(cases.left[0][0])
               and not candidates.is_late):
            # The bound of all cases cannot rise above that of a closed case: more search only finds better candidates.
            beyond += cases.left[0][0] >= min([cases.closed, *(bound for bound, _, _ in cases.weak[:1])])
            if beyond > MAX_BEYOND and candidates.best is not None:
                break
            bound, _, made = heappop(cases.left)
            if cases.is_wide and cases.is_far(bound) and not made.turns:
                better = self.bounds.branched(made, bound, FIRST)
                if better > bound and cases.left and better > cases.left[0][0]:
                    cases.put(better, made)
                    continue
                bound = better
            if cuts < MAX_CUTS and self._cut(bound, made):
                cuts += 1
            else:
                searched += 1
                self._search(bound, made)
        if not candidates.is_late:
            self._polish()
        return LastBounds(cases, self.bounds, self._explore).raised()

    def _cut(self, bound: float, made: Open) -> bool:
        """If the bound of a case is far below the best, cut the case in two, and plan the path of its bound (`_dive`);
        returns whether the case was cut."""
        if not self.cases.is_far(bound):
            return False
        parts = self.cases.halves(made, made.mixture)
        if parts is None:
            return not self.cases.is_wide and self.bounds.above(made, bound)
        self._dive(made, made.solution)
        for part in parts:
            self.cases.add(part, made.shared, bound)
        return True

    def _search(self, bound: float, made: Open) -> None:
        """Search one case: plan what may fit, and cut it in two, or close it."""
        candidates = self.candidates
        solution = candidates.solve(made.chain, made.floors, cutoff=candidates.cutoff, effort="few")
        assert solution is not None
        bound = max(bound, solution.bound)
        if bound == math.inf:
            return
        if solution.path is not None and (candidates.best is None or self.cases.may_fit(made, solution)):
            self._explore(made, solution)
        if candidates.is_near(bound):
            self.cases.closed = min(self.cases.closed, bound)
            return
        parts = self.cases.halves(made, _paths(solution)) or self.cases.halves(made, made.mixture)
        if parts is None and self.bounds.above(made, bound):
            return
        if parts is None and self.cases.is_wide and self._thorough == MAX_THOROUGH:
            self.cases.weaken(bound, made)
            return
        if parts is None:
            self._thorough += 1
            solution = candidates.solve(made.chain, made.floors, cutoff=candidates.cutoff)
            assert solution is not None
            bound = max(bound, solution.bound)
            self._explore(made, solution)
            parts = None if candidates.is_near(bound) else self.cases.halves(made, _paths(solution))
        if parts is None:
            bound = self.bounds.finest(made, bound)
            if candidates.is_near(bound):
                self.cases.closed = min(self.cases.closed, bound)
            else:
                self.cases.weaken(bound, made)
        for part in parts or ():
            self.cases.add(part, made.shared, bound)

    def _explore(self, made: Open, solution: Solution | None) -> None:
        """Plan a solution of a case; while the arenas of the plans do not fit, solve again with arenas of that size,
        and plan the new solution."""
        candidates = self.candidates
        assumed: Sequence[int] = made.floors
        for _ in range(MAX_ROUNDS):
            if solution is None or solution.path is None:
                break
            found = self._planned(made, solution)
            if not any(found.missing):
                self._fill(made, found, assumed)
                break
            assumed = grown(assumed, found)
            if self._is_tried(made.cases, made.shared, assumed, made.phases):
                break
            solution = candidates.solve(made.chain, assumed, cutoff=candidates.cutoff, effort="few")

    def _fill(self, made: Open, found: Found, assumed: Sequence[int]) -> None:
        """Solve once more with the arenas of a placement that fits, if they are smaller than those assumed for it."""
        if all(size >= held for size, held in zip(found.arenas, assumed, strict=True)) or self._is_tried(
                made.cases, made.shared, found.arenas, made.phases):
            return
        solution = self.candidates.solve(made.chain, found.arenas, cutoff=self.candidates.cutoff, effort="few")
        if solution is not None and solution.path is not None:
            self._planned(made, solution)

    def _planned(self, made: Open, solution: Solution) -> Found:
        """The real plans of a solution of the chain of a case."""
        assert solution.path is not None
        if made.phased is not None:
            solution = replace(solution, path=made.phased.translated(solution.path))
        return self.candidates.plan(self.tables, made.chains, solution, made.cases, made.shared)

    def _is_tried(self, cases: Sequence[Case], shared: Sequence[Mapping[str, int]], arenas: Sequence[int],
                  phases: Sequence[Phase] = ()) -> bool:
        """Whether the patterns of some cases were solved with these arenas before; from now on they count as solved."""
        key = (*((case.limits, case.caches) for case in cases), *arenas, *phases,
               *(tuple(sorted(fixed.items())) for fixed in shared))
        if key in self._assumed:
            return True
        self._assumed.add(key)
        return False

    def _dive(self, made: Open, solution: Solution) -> None:
        """Solve a case again with exactly the arenas that the path of `solution` needs, and with patterns that need no
        larger ones; plan the solution found."""
        candidates = self.candidates
        assert solution.path is not None
        cases = []
        for case, needs in zip(made.cases, self.cases.needs(made, solution.path), strict=True):
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

    def _polish(self) -> None:
        """Solve thoroughly, once, with the arenas of the best placement and with caches on the devices that have some:
        the costs then include the copies that its plan makes.  In a wide search, where the first one leaves most, a
        second and more thorough one follows."""
        best = self.candidates.best
        if best is None or not best.cases or self._is_best():
            return
        candidates = self.candidates
        self._resolve(best, best.cases, "some")
        if self.cases.is_wide and not self._is_best() and not candidates.is_late:
            best = candidates.best
            assert best is not None
            limits = tuple(candidates.budgets)
            cases = tuple(Case(limits, best.arenas, _held(table, residents, nodes))
                          for table, residents, nodes in zip(self.tables, best.residents, best.nodes, strict=True))
            self._resolve(best, cases, "all")

    def _is_best(self) -> bool:
        """Whether the best is near the bound of all cases."""
        return self.candidates.is_near(self.cases.bound)

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


def _held(table: Tables, residents: Mapping[str, int],
          nodes: Sequence[Mapping[Tensor, int]] | None) -> tuple[bool | None, ...]:
    """The entries of `Case.caches` for placements with the caches of this one, and with its inputs on more devices."""
    first = len(table.readers) * len(table.devices)
    entries = table.caches_of(residents, nodes)
    return (*entries[:first], *(held or None for held in entries[first:]))


def _paths(solution: Solution) -> tuple[tuple[Choice, ...], ...]:
    return () if solution.path is None else (solution.path,)


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
