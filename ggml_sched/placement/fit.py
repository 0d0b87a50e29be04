"""`fit`: where every weight and cache of some graphs should live, with a bound of how much better it could be.

Owns the search: cases of arenas, solving with assumed arenas, planning for real until the arenas agree, candidates.
It puts together `tables`, which price patterns of stages, `solve`, which chooses them, and `trials`, which plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import product
from typing import TYPE_CHECKING

from ggml_sched._graph import Tensor
from ggml_sched.backend import Backend
from ggml_sched.errors import OutOfMemory, PlacementError, UnsupportedOp
from ggml_sched.placement.answer import Fit, Placed
from ggml_sched.placement.arenas import Case, first_case, halves
from ggml_sched.placement.arguments import Goal, Graphs, devices_of, groups_of, pins_of, streams_of, weights_of
from ggml_sched.placement.chain import Chain, Choice, Solution
from ggml_sched.placement.chains import fined, joined, parted
from ggml_sched.placement.devices import Device, LinkLike, Links
from ggml_sched.placement.measure import measure_links
from ggml_sched.placement.nodebound import node_bound
from ggml_sched.placement.pricing import Price
from ggml_sched.placement.refusal import refusal
from ggml_sched.placement.solve import solve
from ggml_sched.placement.solve.bound import best_bound
from ggml_sched.placement.solve.problem import Problem
from ggml_sched.placement.tables import Tables
from ggml_sched.placement.trials import Trial, Trials
from ggml_sched.planning.plan import Plan

if TYPE_CHECKING:
    from ggml_sched.placement.tables import Assignment, TableChain

__all__ = ["fit"]

MAX_CASES = 24
"""Cases of arenas that are searched, at most."""
MAX_ROUNDS = 12
"""Solving and planning for one case, at most; each round's assumed arenas are larger."""
FINES = (2.0, 8.0, 30.0)
"""Fines for each device more in a stage, in prices of the dearest split."""
PLAIN = 0.2
"""The part of `within` that fewer splits may cost."""
FEW_SPLITS = 3
"""Splits for each device that are not worth a second search for fewer."""
MAX_WITHOUT = 6
"""Searches without the patterns at the peaks, for one case."""
FEW_CACHES = 0.02
"""The fine for a stage with caches, in parts of the best seconds, to bound placements with few such stages."""
NEARLY = 1 - 1e-4
"""A case whose bound is above this part of the best is not searched."""
ENDLESS = 1 << 55
"""Bytes of a host without a bound."""
FEW = 1024
"""Placements of a model that are planned one by one where the search does not come close enough."""
MAX_WAYS = 32
"""Ways to place what several stages read, such as an embedding that is the output matrix, at most."""


def fit(graphs: Graphs, devices: Sequence[Device | Backend], link: LinkLike = None, goal: Goal = None,
        pins: Mapping[str, Device | Backend | str] | None = None, within: float = 0.005, fill: float = 1.0,
        stream: bool | Sequence[bool] = False, turns: bool = False) -> Fit:
    """Place the weights and caches of graphs on devices, so that they take the least time within all budgets.

    `graphs`: all that will run on the same weights and caches, such as those of one token and of the largest prompt; or
    a list of such lists, one for each of several models, which share the devices.  `devices`: exactly one of them the
    host; a real backend in place of a `Device` is measured first, and without `link` so are the links between such
    backends.  `link`: see `Links`.
    `goal`: what to minimise: a weight for each graph, "decode" (default: the graph with the fewest operations alone,
    of each model), or "prompt" (the one with the most).  Graphs of weight 0 decide the arenas, not the time.
    `pins`: {name or pattern like "blk.*.ffn_*": device}.  `within`: a gap at which the search may stop, 0.005 is 0.5 %.
    `fill`: the part of a cache that a token reads on average.  `stream`: whether weights of the host may be brought to
    another device for each compute of a graph: for each graph, or for all of many tokens.  `turns`: several models
    never compute at the same time, and share their arenas.

    Raises OutOfMemory if nothing fits, which says what is missing and the smallest change that would do;
    PlacementError for pins that name nothing; GraphError for residents without a name, or of one name and different
    sizes; ValueError and TypeError for other arguments.
    """
    groups = groups_of(graphs)
    backends = [given for given in devices if isinstance(given, Backend)]
    devices = devices_of(devices)
    if link is None and len(backends) > 1:
        link = measure_links(backends)
    links = Links(devices, link)
    if not 0 < within < 1:
        raise ValueError(f"within = {within!r} is not between 0 and 1")
    if not 0 < fill <= 1:
        raise ValueError(f"fill = {fill!r} is not a part of a cache: larger than 0, at most 1")
    models = [Trials(group, devices, links, (), fill) for group in groups]
    weights = weights_of(goal, models)
    at = 0
    for model in models:
        model.weights = weights[at : at + len(model.graphs)]
        at += len(model.graphs)
    streams = streams_of(stream, models)
    search = _Search(models, devices, links, pins_of(pins, models, devices), streams, within, turns)
    best = search.run()
    return search.answer(best, link, fill)


@dataclass(frozen=True)
class _Found:
    """A placement that was planned for real, of every model."""

    trials: tuple[Trial, ...]
    residents: tuple[Mapping[str, int], ...]
    nodes: tuple[Sequence[Mapping[Tensor, int]] | None, ...]
    arenas: tuple[int, ...]
    """Bytes of each device's arena, of all models together."""
    missing: tuple[int, ...]
    """Bytes by which each device's budget is exceeded."""
    solution: Solution
    case: Case
    shared: tuple[Mapping[str, int], ...]
    """For each model the devices of residents that several stages read."""

    @property
    def seconds(self) -> float:
        return sum(trial.seconds for trial in self.trials)

    @property
    def splits(self) -> int:
        return sum(trial.splits for trial in self.trials)


@dataclass(frozen=True)
class _Open:
    """A case that is not searched yet."""

    case: Case
    shared: tuple[Mapping[str, int], ...]
    chains: Sequence[TableChain]
    chain: Chain
    solution: Solution
    """The bound with the floors as arenas, and the path that has it, which may exceed the budgets."""


class _Search:
    """The search for one call of `fit`."""

    def __init__(self, models: Sequence[Trials], devices: tuple[Device, ...], links: Links,
                 pins: Sequence[Mapping[str, int]], streams: Sequence[Sequence[bool]], within: float,
                 turns: bool) -> None:
        self.models, self.devices, self.links, self.pins = models, devices, links, pins
        self.streams, self.within, self.turns = streams, within, turns
        self.budgets = [device.budget for device in devices]
        self.bound = math.inf
        self.worth: tuple[float, ...] = (0.0,) * len(devices)
        self.best: _Found | None = None
        self._assumed: set[tuple[object, ...]] = set()

    # -- the search -------------------------------------------------------------------

    def run(self) -> _Found:
        """The best placement found; OutOfMemory where there is none."""
        tables = self._tables(self.devices, self.streams)
        self._all_cases(tables)
        if any(any(stream) for stream in self.streams):
            # Room for weights that are brought over may be worth less than what it pushes out.
            never = [[False] * len(stream) for stream in self.streams]
            self._all_cases(self._tables(self.devices, never))
        if self.best is None or self.best.seconds > self.bound * (1 + self.within):
            self._every_one()
        if self.best is None:
            self._by_size()
        if self.best is None:
            raise self._refusal()
        self._plainer(tables)
        return self.best

    def _refusal(self) -> OutOfMemory:
        """The error for a search without a result: what a host without a bound would need."""
        host = self.devices[-1]
        endless = (*self.devices[:-1], host.replace(memory=ENDLESS, reserve=0))
        if host.budget >= endless[-1].budget:
            return refusal(self.models, self.devices, self.pins, None, 0)
        more = _Search(self.models, endless, self.links, self.pins, self.streams, self.within, self.turns)
        try:
            found = more.run()
        except OutOfMemory:
            return refusal(self.models, self.devices, self.pins, None, 0)
        used = found.arenas[-1] + sum(trial.residents[-1] for trial in found.trials)
        return refusal(self.models, self.devices, self.pins, used, sum(found.arenas))

    def _every_one(self) -> None:
        """Plan every placement of a model of few residents."""
        model, pins = self.models[0], self.pins[0]
        free = [name for name in model.sizes if name not in pins]
        n = len(self.devices)
        if len(self.models) > 1 or n ** len(free) > FEW:
            return
        for chosen in product(range(n), repeat=len(free)):
            placed = {**pins, **dict(zip(free, chosen, strict=True))}
            held = [0] * n
            for name, d in placed.items():
                held[d] += model.bytes_on(d, name)
            if all(size <= budget for size, budget in zip(held, self.budgets, strict=True)):
                self._keep(self._unsolved([model.run(placed)], [placed]))

    def _unsolved(self, trials: Sequence[Trial], placed: Sequence[Mapping[str, int]]) -> _Found:
        """Plans of residents that no solution has."""
        nothing = Solution(math.inf, 0.0, None, None, self.worth)
        return self._found(trials, placed, [None] * len(trials), nothing, Case((), ()), tuple({} for _ in trials))

    def _by_size(self) -> None:
        """Where the solver has found nothing: residents by size, each on the device with the most room; planned, and
        with the arenas that this shows once more."""
        held = [0] * len(self.devices)
        for _ in range(3):
            room = [budget - arena for budget, arena in zip(self.budgets, held, strict=True)]
            placed: list[dict[str, int]] = []
            for model, pins in zip(self.models, self.pins, strict=True):
                chosen = dict(pins)
                for name, d in pins.items():
                    room[d] -= model.bytes_on(d, name)
                for name in sorted(model.sizes, key=lambda name: (-model.sizes[name], name)):
                    if name not in chosen:
                        chosen[name] = max(range(len(room)), key=lambda d: (room[d], -d))
                        room[chosen[name]] -= model.bytes_on(chosen[name], name)
                placed.append(chosen)
            trials = [model.run(chosen) for model, chosen in zip(self.models, placed, strict=True)]
            found = self._unsolved(trials, placed)
            self._keep(found)
            held = [max(pair) for pair in zip(held, found.arenas, strict=True)]

    def _tables(self, devices: tuple[Device, ...], streams: Sequence[Sequence[bool]]) -> list[Tables]:
        return [Tables(model.facts, model.weights, devices, self.links, stream, pins)
                for model, stream, pins in zip(self.models, streams, self.pins, strict=True)]

    def _all_cases(self, tables: Sequence[Tables]) -> None:
        """Search the cases of arenas, those with the least bound first, until all bounds are near the best."""
        if len(tables) == 1:
            case = first_case(tables[0].needs, self.budgets)
        else:
            case = Case(tuple(self.budgets), (0,) * len(self.devices))
        ways = [_ways(table.shared, model, self.devices, pins)
                for table, model, pins in zip(tables, self.models, self.pins, strict=True)]
        left: list[tuple[float, int, _Open]] = []
        closed, count = math.inf, 0

        def add(case: Case, shared: tuple[Mapping[str, int], ...], bound: float) -> None:
            nonlocal count, closed
            made = self._open(tables, case, shared)
            if made is not None:
                bound = max(bound, made.solution.bound)
                if made.solution.path is None:
                    closed = min(closed, bound)
                else:
                    heappush(left, (bound, count, made))
                    count += 1

        for shared in product(*ways):
            add(case, shared, 0.0)
        for _ in range(MAX_CASES):
            if not left or self._is_near(left[0][0]):
                break
            bound, _, made = heappop(left)
            first = self._explore(tables, made)
            parts = None
            if not self._is_near(bound) and len(tables) == 1:
                parts = halves(made.case, _needed(tables[0], made), made.solution.multipliers)
                if parts is None:
                    exact = self._solve(made.chain, made.case.floors, self._cutoff())
                    bound = bound if exact is None else max(bound, exact.bound)
                    if exact is not None and exact.path is not None:
                        made = replace(made, solution=exact)
                        parts = halves(made.case, _needed(tables[0], made), made.solution.multipliers)
                        first = (self._explore(tables, made) or first) if parts is None else None
            if parts is None:
                bound = self._finest(tables, made, bound)
                closed = min(closed, bound)
                if first is not None and not self._is_near(bound):
                    self._without(tables, made.chains, made.chain, first)
            for part in parts or ():
                add(part, made.shared, bound)
        least = min((self._finest(tables, made, bound) for bound, _, made in left), default=math.inf)
        self.bound = min(self.bound, closed, least)

    def _finest(self, tables: Sequence[Tables], made: _Open, bound: float) -> float:
        """The bound of a case, or a better one where that is not near the best."""
        if len(tables) > 1 or self.best is None or self._is_near(bound):
            return bound
        return max(bound, self._finer(tables[0], made.case, made.shared[0]))

    def _finer(self, table: Tables, case: Case, shared: Mapping[str, int]) -> float:
        """Another bound of a case, by which devices have caches in three or more stages: there arenas need more.

        For the placements with at most two on a device every such stage costs `fine` more, and two fines are taken off:
        no such placement costs less than that (Lagrange).
        """
        assert self.best is not None
        chain = table.chain(None, shared, case.limits)
        held = [held[rows] for held, rows in zip(table.holds_caches, chain.rows, strict=True)]
        cutoff, fine = self.best.seconds * NEARLY, FEW_CACHES * self.best.seconds
        floors, bounds = list(case.floors), []
        for d, cached in enumerate(table.cached):
            if cached > floors[d] and any(there[:, d].any() for there in held):
                floors[d] = cached
                costs = tuple(cost + fine * there[:, d, None, None] for cost, there in zip(chain.cost, held,
                                                                                         strict=True))
                few = self._solve(replace(chain, cost=costs), case.floors, cutoff + 2 * fine)
                bounds.append(math.inf if few is None else few.bound - 2 * fine)
        most = self._solve(chain, floors, cutoff)
        return min([math.inf if most is None else most.bound, *bounds])

    def _is_near(self, bound: float) -> bool:
        """Whether the best is near enough to a bound."""
        return self.best is not None and self.best.seconds <= bound * (1 + self.within / 2)

    def _open(self, tables: Sequence[Tables], case: Case, shared: tuple[Mapping[str, int], ...]) -> _Open | None:
        """A case bounded with its floors as arenas; None where nothing fits."""
        chains = [table.chain(None, fixed, case.limits) for table, fixed in zip(tables, shared, strict=True)]
        chain = joined(chains)
        room = [budget - floor for budget, floor in zip(self.budgets, case.floors, strict=True)]
        if min(room) < 0:
            return None
        solution = relaxed(chain, room)
        return None if solution.bound == math.inf else _Open(case, shared, chains, chain, solution)

    def _cutoff(self) -> float:
        return math.inf if self.best is None else self.best.seconds * NEARLY

    def _explore(self, tables: Sequence[Tables], made: _Open) -> _Found | None:
        """Plan the solution of a case, and solve with the plan's arenas until they agree; returns the first plans if
        their arenas were too large."""
        assumed: Sequence[int] = made.case.floors
        solution: Solution | None = made.solution
        first = None
        for _ in range(MAX_ROUNDS):
            if solution is None or solution.path is None:
                break
            found = self._plan(tables, made.chains, solution, made.case, made.shared)
            if not any(found.missing):
                self._fill(tables, made.chains, made.chain, found, assumed)
                break
            first = first or found
            assumed = _grown(assumed, found)
            key = (made.case.limits, tuple(assumed))
            if key in self._assumed:
                break
            self._assumed.add(key)
            solution = self._solve(made.chain, assumed, self._cutoff())
        return first

    def _without(self, tables: Sequence[Tables], chains: Sequence[TableChain], chain: Chain, found: _Found) -> None:
        """From a placement whose arenas are too large: solve with the least arenas again, without the patterns that are
        computed at the peaks.  Other placements of nearly the same price may have smaller arenas."""
        for _ in range(MAX_WITHOUT):
            assert found.solution.path is not None
            banned = self._at_peaks(tables, found)
            if not banned:
                break
            costs = list(chain.cost)
            for stage in banned:
                number = chain.classes[stage]
                costs[number] = costs[number].copy()
                costs[number][found.solution.path[stage].pattern] = math.inf
            chain = replace(chain, cost=tuple(costs))
            solution = self._solve(chain, found.case.floors, self._cutoff())
            if solution is None or solution.path is None:
                break
            found = self._plan(tables, chains, solution, found.case, found.shared)
            if not any(found.missing):
                break

    def _at_peaks(self, tables: Sequence[Tables], found: _Found) -> set[int]:
        """The stages of the joined chain whose nodes are computed where arenas that are too large have their peaks."""
        stages, first = set(), 0
        for table, model, trial in zip(tables, self.models, found.trials, strict=True):
            for d, missing in enumerate(found.missing):
                if missing:
                    plan, facts = max(zip(trial.plans, model.facts, strict=True),
                                      key=lambda pair: pair[0].buffer_sizes[d])
                    node = _node_at_peak(plan, d, facts.nodes)
                    if node >= 0:
                        stages.add(first + table.models[0].stage_of[model.facts.index(facts)][node])
            first += len(table.classes)
        return stages

    def _fill(self, tables: Sequence[Tables], chains: Sequence[TableChain], chain: Chain, found: _Found,
              assumed: Sequence[int]) -> None:
        """Solve once more with the arenas that a placement has, where they are smaller than it assumed."""
        key = (found.case.limits, found.arenas)
        if key in self._assumed or all(size >= held for size, held in zip(found.arenas, assumed, strict=True)):
            return
        self._assumed.add(key)
        solution = self._solve(chain, found.arenas)
        if solution is not None and solution.path is not None:
            self._plan(tables, chains, solution, found.case, found.shared)

    def _solve(self, chain: Chain, arenas: Sequence[int], cutoff: float = math.inf) -> Solution | None:
        room = [budget - arena for budget, arena in zip(self.budgets, arenas, strict=True)]
        if min(room) < 0:
            return None
        return solve(chain, room, self.within / 2, cutoff=cutoff)

    def _plan(self, tables: Sequence[Tables], chains: Sequence[TableChain], solution: Solution, case: Case,
              shared: Sequence[Mapping[str, int]]) -> _Found:
        """Plan a solution for real, with its nodes assigned and with its residents alone, and keep what is better than
        the best.  Returns the plans whose price the solution has: those with the nodes assigned."""
        assert solution.path is not None
        own, trials, residents, nodes = [], [], [], []
        for model, table, chain, part in zip(self.models, tables, chains, parted(solution.path, chains), strict=True):
            found: Assignment = table.assignment(chain, replace(solution, path=part))
            own.append(model.run(found.residents))
            try:
                trials.append(model.run(found.residents, found.nodes))
            except (UnsupportedOp, PlacementError):
                trials.append(own[-1])      # a real backend that does not compute a node that is assigned to it
            residents.append(found.residents)
            nodes.append(found.nodes if trials[-1].assigned else None)
        assigned = self._found(trials, residents, nodes, solution, case, shared)
        self._keep(assigned)
        self._keep(self._found(own, residents, [None] * len(own), solution, case, shared))
        return assigned

    def _found(self, trials: Sequence[Trial], residents: Sequence[Mapping[str, int]],
               nodes: Sequence[Sequence[Mapping[Tensor, int]] | None], solution: Solution, case: Case,
               shared: Sequence[Mapping[str, int]]) -> _Found:
        join = max if self.turns else sum
        arenas = [join(sizes) for sizes in zip(*(trial.arenas for trial in trials), strict=True)]
        held = [sum(sizes) for sizes in zip(*(trial.residents for trial in trials), strict=True)]
        missing = [max(0, h + a - budget) for h, a, budget in zip(held, arenas, self.budgets, strict=True)]
        return _Found(tuple(trials), tuple(residents), tuple(nodes), tuple(arenas), tuple(missing), solution, case,
                      tuple(shared))

    def _keep(self, found: _Found) -> None:
        if any(found.missing):
            return
        if self.best is None or (found.seconds, found.splits) < (self.best.seconds, self.best.splits):
            self.best = found
            self.worth = found.solution.multipliers

    def _plainer(self, tables: Sequence[Tables]) -> None:
        """Of placements that take nearly as long, the one with the fewest splits: solve with a fine for each device
        more in a stage, larger and larger."""
        best = self.best
        assert best is not None
        if not best.case.limits or best.splits <= FEW_SPLITS * len(self.devices):
            return
        most = best.seconds * (1 + PLAIN * self.within)
        chains = [table.chain(None, fixed, best.case.limits) for table, fixed in zip(tables, best.shared, strict=True)]
        weight = sum(sum(model.weights) for model in self.models) * max(device.split for device in self.devices)
        tried: set[tuple[Choice, ...]] = set()
        for factor in FINES:
            chain = joined([fined(chain, table.states, factor * weight)
                            for chain, table in zip(chains, tables, strict=True)])
            assumed: Sequence[int] = best.arenas
            for _ in range(MAX_ROUNDS):
                solution = self._solve(chain, assumed)
                if solution is None or solution.path is None:
                    break
                if solution.path in tried:
                    break
                tried.add(solution.path)
                found = self._plan(tables, chains, solution, best.case, best.shared)
                if found.seconds > most:
                    break
                if not any(found.missing):
                    best = found if found.splits < best.splits else best
                    break
                assumed = _grown(assumed, found)
        self.best = best

    # -- the answer -------------------------------------------------------------------

    def _node_bound(self) -> float:
        """The bound of all placements: each model with all budgets to itself."""
        total = 0.0
        for model, pins in zip(self.models, self.pins, strict=True):
            if any(model.weights):
                allowed = {name: [d == at for d in range(len(self.devices))] for name, at in pins.items()}
                total += node_bound(model.facts, model.weights, self.devices, self.links, self.budgets, allowed).seconds
        return total

    def answer(self, best: _Found, link: LinkLike, fill: float) -> Fit:
        """The value to return: the best placement planned once more, with its bounds."""
        plans: list[Plan] = []
        prices: list[Price] = []
        placed: list[Placed] = []
        models: list[int] = []
        for k, (model, residents, nodes) in enumerate(zip(self.models, best.residents, best.nodes, strict=True)):
            trial = model.run(residents, nodes)
            plans += trial.plans
            prices += trial.prices
            models += [k] * len(trial.plans)
            placed += [Placed(name, model.kinds[name], model.bytes_on(d, name), d, k)
                       for name, d in sorted(residents.items())]
        goal = tuple(weight for model in self.models for weight in model.weights)
        bound = min(self._node_bound(), best.seconds)
        # Where no case of arenas fits, the cases prove nothing about the placement that was found otherwise.
        rules_bound = bound if math.isinf(self.bound) else max(bound, min(self.bound, best.seconds))
        return Fit(self.devices, link, goal, self.within, best.seconds, bound, rules_bound, best.arenas,
                   tuple(trial.arenas for trial in best.trials), tuple(models), tuple(prices), tuple(placed),
                   self.worth, any(nodes is not None for nodes in best.nodes), fill,
                   tuple(flag for flags in self.streams for flag in flags), tuple(plans))


def _needed(table: Tables, made: _Open) -> list[int]:
    """What the patterns of a case's solution need of each arena, at least."""
    assert made.solution.path is not None
    [chain] = made.chains
    rows = [table.needs[number][chain.rows[number][choice.pattern]]
            for number, choice in zip(chain.classes, made.solution.path, strict=True)]
    return [max(int(row[d]) for row in rows) for d in range(len(table.devices))]


def _node_at_peak(plan: Plan, d: int, nodes: Sequence[Tensor]) -> int:
    """The index in `nodes` of the node that is computed when the arena of device d is fullest; -1: none."""
    data, graph = plan.data, plan.graph
    births = [life[0] for i in data.live_at_peak(d) if (life := data.lifetime(i)) is not None]
    if not births:
        return -1
    peak = max(births)
    positions = [graph.position_of(node) for node in nodes]
    return next((i for i, position in enumerate(positions) if position >= peak), -1)


def _grown(assumed: Sequence[int], found: _Found) -> list[int]:
    """The arenas to assume next: never smaller, and larger by what is missing where the plan's are not."""
    grown = [max(pair) for pair in zip(assumed, found.arenas, strict=True)]
    return grown if grown != list(assumed) else [size + more
                                                 for size, more in zip(assumed, found.missing, strict=True)]


def relaxed(chain: Chain, room: Sequence[int]) -> Solution:
    """The bound of a chain by multipliers, and the path at the best of them, which may take more bytes than `room`."""
    problem = Problem(chain, room)
    found = best_bound(problem)
    worth = [0.0] * len(room)
    for d, multiplier in zip(problem.scarce, found.multipliers.tolist(), strict=True):
        worth[d] = multiplier
    if not found.visits or found.value == math.inf:
        return Solution(math.inf, found.value, None, None, tuple(worth))
    best = max(found.visits, key=lambda visit: visit.value)
    return Solution(best.cost, found.value, problem.choices(best.path), problem.bytes_of(best.path), tuple(worth))


def _ways(shared: Sequence[Sequence[str]], model: Trials, devices: Sequence[Device],
          pins: Mapping[str, int]) -> list[dict[str, int]]:
    """The ways to place residents that several stages read: the largest groups of them everywhere, the others on the
    host."""
    fixed = {group[0]: next((pins[name] for name in group if name in pins), len(devices) - 1) for group in shared}
    free = [group for group in shared if not any(name in pins for name in group)]
    free.sort(key=lambda group: (-sum(model.sizes[name] for name in group), group))
    few = 0
    while few < len(free) and len(devices) ** (few + 1) <= MAX_WAYS:
        few += 1
    return [{**fixed, **dict(zip([group[0] for group in free[:few]], chosen, strict=True))}
            for chosen in product(range(len(devices)), repeat=few)]
