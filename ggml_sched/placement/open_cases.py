"""Cases of arenas that are left to search, each with a bound, and how one of them is cut in two.

A case is bounded with its floors as arenas.  It is cut at what the paths of its bound need of an arena, or by whether a
device has caches: so that the bound of one part, or of both, is higher.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappush

from ggml_sched.placement.arenas import Case, by_caches, halves, mirrored, raised
from ggml_sched.placement.candidates import Candidates, chains_of
from ggml_sched.placement.chain import Chain, Choice, Solution
from ggml_sched.placement.chains import dearer, joined, parted
from ggml_sched.placement.phases import Phase, PhasedCase
from ggml_sched.placement.solve.bound import best_bound
from ggml_sched.placement.solve.branches import Branches
from ggml_sched.placement.solve.problem import Problem
from ggml_sched.placement.tables import TableChain, Tables

__all__ = ["WORTH", "Open", "OpenCases", "relaxed"]

FAR = 0.01
"""A bound is far below the best if the seconds of the best exceed it by more than this part of the bound."""
MAX_DEVICES = 2
"""With more devices the search is wide: see `OpenCases.is_wide`."""
WORTH = 0.04
"""A gain in a bound is worth an attempt only if it is at least this part of `within`, times the bound."""

Bounded = tuple[float, int, "Open"]
"""(Bound, number of the case, the case)."""


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
    turns: int = 0
    """How often `CaseBounds.branched` was called for this case."""
    branches: Branches | None = None
    """The branch and bound of `CaseBounds.branched`, which goes on in its next turn."""
    is_parted: bool = False
    """Whether `LastBounds` has tried to part this case."""
    phased: PhasedCase | None = None
    """What copies of inputs leave free of arenas in all placements of this case; only of one model."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        return () if self.phased is None else self.phased.phases

    def own(self, path: Sequence[Choice]) -> list[tuple[Choice, ...]]:
        """For each model its choices in a path of `chain`, as a path of its chain in `chains`."""
        return parted(path, self.chains) if self.phased is None else [self.phased.translated(path)]


class OpenCases:
    """The cases of some tables that are left, and the bound of those that are not searched again."""

    def __init__(self, candidates: Candidates, tables: Sequence[Tables]) -> None:
        self.candidates: Candidates = candidates
        self.tables: Sequence[Tables] = tables
        self.left: list[Bounded] = []
        """A heap of the cases that are not searched yet."""
        self.weak: list[Bounded] = []
        """As `left`: cases that were searched, of which no cut raises the bound."""
        self.closed: float = math.inf
        """The least bound of the cases that need no more search, because their bounds are near the best."""
        self.orders: Sequence[Sequence[int]] = ()
        """Orders of the devices that keep all prices: see `mirrors`."""
        self._added: set[tuple[object, ...]] = set()
        self._count = 0

    @property
    def is_wide(self) -> bool:
        """Whether the devices are so many that no single case is searched with most effort, which takes five seconds
        and proves little; branch and bound over numbers of columns takes its place."""
        return len(self.candidates.budgets) > MAX_DEVICES

    @property
    def bound(self) -> float:
        """The bound of all cases."""
        return min([self.closed, *(of[0][0] for of in (self.left, self.weak) if of)])

    def add(self, cases: tuple[Case, ...], shared: tuple[Mapping[str, int], ...], bound: float,
            phases: tuple[Phase, ...] = ()) -> None:
        """Bound a case with its floors as arenas, and put it among those that are left.  A case that differs from an
        earlier one only by an exchange of equal devices is left out."""
        cases = tuple(raised(case, table.floors(case.caches)) for case, table in zip(cases, self.tables, strict=True))
        if any(floor > limit for case in cases for floor, limit in zip(case.floors, case.limits, strict=True)):
            return
        if len(self.orders) > 1 and not phases:
            key = mirrored(cases, shared, self.orders)
            if key in self._added:
                return
            self._added.add(key)
        floors = self.candidates.joined([case.floors for case in cases])
        room = self.candidates.room(floors)
        if min(room) < 0:
            return
        phased = PhasedCase(self.tables[0], cases[0], shared[0], phases) if phases else None
        chains = chains_of(self.tables, cases, shared) if phased is None else [phased.every]
        chain = dearer(joined(chains) if phased is None else phased.chain, self.candidates.fine)
        solution, mixture = relaxed(chain, room)
        bound = max(bound, solution.bound)
        if solution.path is None:
            self.closed = min(self.closed, bound)
        else:
            self.put(bound, Open(cases, shared, chains, chain, floors, solution, mixture, phased=phased))

    def put(self, bound: float, made: Open) -> None:
        """Put a case among those that are left, or drop it if its bound is infinite: then it has no placement."""
        if bound < math.inf:
            heappush(self.left, (bound, self._count, made))
            self._count += 1

    def weaken(self, bound: float, made: Open) -> None:
        """Put a searched case among those of which no cut raises the bound."""
        heappush(self.weak, (bound, self._count, made))
        self._count += 1

    def is_far(self, bound: float) -> bool:
        """Whether a bound is far below the best."""
        best = self.candidates.best
        return best is not None and bound * (1 + FAR) <= best.seconds

    def halves(self, made: Open, paths: Sequence[Sequence[Choice]]) -> tuple[tuple[Case, ...], ...] | None:
        """The two parts of the case, cut where that may raise its bound most; None if no cut at what these paths need
        raises the bound."""
        if not paths:
            return None
        best: tuple[float, int, tuple[Case, Case]] | None = None
        least = self.candidates.within * WORTH * made.solution.bound
        used, parts = [], [made.own(path) for path in paths]
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

    def halves_at(self, made: Open, path: Sequence[Choice],
                  memory: Sequence[int]) -> tuple[tuple[Case, ...], ...] | None:
        """The two parts of the case, cut so that no part has the path at its cost: at what its arena needs on the
        device whose budget it exceeds most, or else by the copies of inputs of which its cost leaves out most; None if
        it keeps all budgets, and pays for these copies.  `memory`: bytes of the path on each device."""
        needs = self.needs(made, path)
        arenas = self.candidates.joined([[max(pair) for pair in zip(of, case.floors, strict=True)]
                                         for of, case in zip(needs, made.cases, strict=True)])
        over = [(held + arena - budget) / max(budget, 1)
                for held, arena, budget in zip(memory, arenas, self.candidates.budgets, strict=True)]
        d = max(range(len(over)), key=lambda d: over[d])
        if over[d] > 0:
            k = max(range(len(needs)), key=lambda k: needs[k][d] - made.cases[k].floors[d])
            case, need = made.cases[k], needs[k][d]
            if need > case.floors[d]:
                cut = (case._replace(floors=(*case.floors[:d], need, *case.floors[d + 1:])),
                       case._replace(limits=(*case.limits[:d], need - 1, *case.limits[d + 1:])))
                return tuple((*made.cases[:k], part, *made.cases[k + 1:]) for part in cut)
        best = max(((found, k) for k, (case, table, chain, own) in enumerate(zip(
            made.cases, self.tables, made.chains, made.own(path), strict=True))
            for found in [by_caches(case, table.unpaid(chain, own), table.implied)] if found is not None),
            key=lambda found: found[0][0], default=None)
        if best is None or best[0][0] <= self.candidates.within * WORTH * made.solution.bound:
            return None
        (_, cut), k = best
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
                room = candidates.room(floors)
                gain = math.inf if min(room) < 0 else relaxed(made.chain, room)[0].bound - made.solution.bound
                if gain > least and (best is None or gain > best[0]):
                    best = gain, k, cut[1]
        return best

    def needs(self, made: Open, path: Sequence[Choice]) -> list[list[int]]:
        """For each model the bytes that a path needs at least of the arena of each device."""
        return [table.needed(chain, part)
                for table, chain, part in zip(self.tables, made.chains, made.own(path), strict=True)]

    def may_fit(self, made: Open, solution: Solution) -> bool:
        """Whether a solution keeps the budgets with the arenas that it needs at least."""
        assert solution.path is not None and solution.memory is not None
        needs = self.candidates.joined(self.needs(made, solution.path))
        return all(held + max(need, floor) <= budget for held, need, floor, budget in zip(
            solution.memory, needs, made.floors, self.candidates.budgets, strict=True))


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
