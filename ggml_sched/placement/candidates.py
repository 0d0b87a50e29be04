"""Candidates of one search: solutions with real plans, each with the seconds and the bytes of its plans, and the best.

Owns `Found` and `Candidates`.  A solution is planned twice: with its nodes assigned to devices as the tables had them,
and with its residents alone, so that the scheduler's own rules place the nodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ggml_sched._graph import Tensor
from ggml_sched.errors import PlacementError, UnsupportedOp
from ggml_sched.placement.arenas import Case
from ggml_sched.placement.chain import Chain, Solution
from ggml_sched.placement.chains import parted
from ggml_sched.placement.devices import Device
from ggml_sched.placement.solve import solve
from ggml_sched.placement.tables import TableChain, Tables
from ggml_sched.placement.trials import Trial, Trials

__all__ = ["Candidates", "Found", "chains_of", "grown"]

NEARLY = 1 - 1e-4
"""Only solutions that cost less than this part of the best are sought."""


@dataclass(frozen=True)
class Found:
    """A placement that was planned for real, of every model."""

    trials: tuple[Trial, ...]
    residents: tuple[Mapping[str, int], ...]
    """For each model {weight or cache: index of its device}."""
    nodes: tuple[Sequence[Mapping[Tensor, int]] | None, ...]
    """For each model, for each graph {node: index of its device}; None where the scheduler's rules place the nodes."""
    arenas: tuple[int, ...]
    """Bytes of each device's arena, of all models together."""
    missing: tuple[int, ...]
    """For each device the bytes by which its budget is exceeded."""
    solution: Solution
    cases: tuple[Case, ...]
    """For each model the case of arenas in which the solver found the placement; empty if it was found otherwise."""
    shared: tuple[Mapping[str, int], ...]
    """For each model the devices of residents that several stages read."""
    fined: float
    """Seconds that are added for the bytes of weights and caches on the host; see `Candidates.fine`."""

    @property
    def seconds(self) -> float:
        """The prices of the plans, each times its graph's weight in the goal, plus `fined`."""
        return sum(trial.seconds for trial in self.trials) + self.fined

    @property
    def splits(self) -> int:
        """Splits of the graphs that count in the goal."""
        return sum(trial.splits for trial in self.trials)


class Candidates:
    """What was planned so far in one search, and the best of it.

    `within`: the gap at which the search may stop; `turns`: whether several models take turns and share their arenas;
    `end`: the time of the clock `time.monotonic` from which on a placement that was found is enough.
    """

    def __init__(self, models: Sequence[Trials], devices: Sequence[Device], within: float, turns: bool,
                 fine: float, end: float = math.inf) -> None:
        self.models: Sequence[Trials] = models
        self.budgets: list[int] = [device.budget for device in devices]
        self.within: float = within
        self.turns: bool = turns
        self.end: float = end
        self.fine: float = fine
        """Seconds that are added to the price for each byte of weights and caches on the host."""
        self.best: Found | None = None
        self.worth: tuple[float, ...] = (0.0,) * len(devices)
        """For each device the seconds that one more byte of it is worth, by the solution of which `best` is a plan."""

    @property
    def cutoff(self) -> float:
        """Solutions of this many seconds or more are not used."""
        return math.inf if self.best is None else self.best.seconds * NEARLY

    def is_near(self, bound: float) -> bool:
        """Whether the seconds of the best are above a bound by at most half of `within`."""
        return self.best is not None and self.best.seconds <= bound * (1 + self.within / 2)

    @property
    def is_late(self) -> bool:
        """Whether the search has to stop: it has found a placement, and `end` is over."""
        return self.best is not None and time.monotonic() >= self.end

    def room(self, arenas: Sequence[int]) -> list[int]:
        """For each device the bytes that arenas of so many bytes leave of its budget; below 0 where they exceed it."""
        return [budget - arena for budget, arena in zip(self.budgets, arenas, strict=True)]

    def joined(self, arenas: Sequence[Sequence[int]]) -> list[int]:
        """Bytes of each device's arena of all models together; `arenas` [models, devices] has those of each model."""
        join = max if self.turns else sum
        return [join(sizes) for sizes in zip(*arenas, strict=True)]

    def solve(self, chain: Chain, arenas: Sequence[int], *, cutoff: float = math.inf, effort: str = "all",
              part: float = 0.5) -> Solution | None:
        """The solution of a chain within what these arenas leave of the budgets; None where the arenas alone exceed a
        budget.  The search ends when the gap of the solution is proven to be at most `part` * `within`."""
        room = self.room(arenas)
        return None if min(room) < 0 else solve(chain, room, self.within * part, cutoff=cutoff, effort=effort)

    def plan(self, tables: Sequence[Tables], chains: Sequence[TableChain], solution: Solution, cases: tuple[Case, ...],
             shared: Sequence[Mapping[str, int]]) -> Found:
        """Make the real plans of a solution twice, with its nodes assigned and with its residents alone, and keep what
        is better than the best.  Returns the placement with the nodes assigned: the solution's price is that of this
        one."""
        assert solution.path is not None
        own, trials, residents, nodes = [], [], [], []
        for model, table, chain, part in zip(self.models, tables, chains, parted(solution.path, chains), strict=True):
            found = table.assignment(chain, replace(solution, path=part))
            own.append(model.run(found.residents))
            try:
                trials.append(model.run(found.residents, found.nodes))
            except (UnsupportedOp, PlacementError):
                trials.append(own[-1])      # a real backend does not support a node that is assigned to it
            residents.append(found.residents)
            nodes.append(found.nodes if trials[-1].assigned else None)
        assigned = self.found(trials, residents, nodes, solution, cases, shared)
        self.keep(assigned)
        self.keep(self.found(own, residents, [None] * len(own), solution, cases, shared))
        return assigned

    def found(self, trials: Sequence[Trial], residents: Sequence[Mapping[str, int]],
              nodes: Sequence[Sequence[Mapping[Tensor, int]] | None] | None = None, solution: Solution | None = None,
              cases: tuple[Case, ...] = (), shared: Sequence[Mapping[str, int]] | None = None) -> Found:
        """The trials of all models as one placement; `solution` is None if the solver has not found it."""
        arenas = self.joined([trial.arenas for trial in trials])
        held = [sum(sizes) for sizes in zip(*(trial.residents for trial in trials), strict=True)]
        missing = [max(0, h + a - budget) for h, a, budget in zip(held, arenas, self.budgets, strict=True)]
        nodes = [None] * len(trials) if nodes is None else nodes
        placed = [{**model.unread, **at} for model, at in zip(self.models, residents, strict=True)]
        return Found(tuple(trials), tuple(placed), tuple(nodes), tuple(arenas), tuple(missing),
                     solution or Solution(math.inf, 0.0, None, None, self.worth), cases,
                     tuple({} for _ in trials) if shared is None else tuple(shared), self.fine * held[-1])

    def keep(self, found: Found) -> None:
        """Make a placement the best if it fits, and is cheaper, or as cheap with fewer splits."""
        if not any(found.missing) and (self.best is None or (found.seconds, found.splits)
                                       < (self.best.seconds, self.best.splits)):
            self.best, self.worth = found, found.solution.multipliers


def chains_of(tables: Sequence[Tables], cases: Sequence[Case],
              shared: Sequence[Mapping[str, int]]) -> list[TableChain]:
    """For each model its chain, with only the patterns that its case allows."""
    return [table.chain(case.caches, fixed, case.limits)
            for table, fixed, case in zip(tables, shared, cases, strict=True)]


def grown(assumed: Sequence[int], found: Found) -> list[int]:
    """The arenas to assume next, after the plan for the arenas `assumed` did not fit: for each device the larger one of
    `assumed` and of the plan; if no arena of the plan is larger, the assumed ones plus the missing bytes."""
    larger = [max(pair) for pair in zip(assumed, found.arenas, strict=True)]
    return larger if larger != list(assumed) else [size + more for size, more in zip(assumed, found.missing,
                                                                                   strict=True)]
