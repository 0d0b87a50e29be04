"""`fit`: where every weight and cache of some graphs should live, with a bound of how much better it could be.

It puts together `tables`, which price patterns of stages, `branching`, which searches the tables, and `candidates`,
which plans the placements found; and it makes the answer.  It also has the fallbacks for when the search finds nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from ggml_sched.backend import Backend
from ggml_sched.errors import OutOfMemory
from ggml_sched.placement.answer import Fetching, Fit, Placed, Slotted
from ggml_sched.placement.arguments import (
    Goal,
    Graphs,
    devices_of,
    end_of,
    given_devices,
    groups_of,
    part_of,
    pins_of,
    streams_of,
    weights_of,
    with_driver,
)
from ggml_sched.placement.branching import Branching
from ggml_sched.placement.candidates import Candidates, Found
from ggml_sched.placement.devices import Device, Link, LinkLike, Links
from ggml_sched.placement.measure import is_driven, measure_links
from ggml_sched.placement.nodebound import Key, node_bound
from ggml_sched.placement.plainer import plainer
from ggml_sched.placement.refusal import Least, refusal
from ggml_sched.placement.tables import Tables
from ggml_sched.placement.trials import Trial, Trials
from ggml_sched.threads.cached import cached_property

if TYPE_CHECKING:
    from ggml_sched.placement.fetching import Fetches
    from ggml_sched.placement.residency import Choice
    from ggml_sched.placement.shares import Fetched, Nodes, Part, Placement, Shares

__all__ = ["Refit", "Refits", "fit"]

ENDLESS = 1 << 55
"""The bytes of a host that takes everything; `_Search._spare_host` uses it to find out how much the host needs."""
DEAR = 1000.0
"""A byte on such a host adds this many times the seconds of reading it once to the price, so that the search leaves
little there."""
INSTANT = 1e30
"""The bytes a second of a link whose copies take no time."""
MORE_PINS = 2
"""How often more caches are pinned to other devices where those on the host exceed it: they cannot be fetched."""
PARTS = (1.0, 0.5)
"""The parts of the caches of the host that are pinned to other devices in a last try, whatever the host's memory."""
FULL = (1.2, 1.1, 1.0, 0.9)
"""The memory of the host in the searches of this try, as parts of all weights and caches."""
FEW, TINY, MOST = 1024, 128, 1 << 14
"""Where every model has at most `TINY` placements, all are planned; with up to `FEW` they are if the search did not
come close enough to the bound.  In both cases all models together must have at most `MOST` combinations."""


def fit(graphs: Graphs, devices: Sequence[Device | Backend], link: LinkLike = None, goal: Goal = None,
        pins: Mapping[str, Device | Backend | str] | None = None, within: float = 0.005, fill: float = 1.0,
        stream: bool | Sequence[bool] = False, turns: bool = False, seconds: float | None = None) -> Fit:
    """Place the weights and caches of graphs on devices, so that they take the least time within all budgets.

    `graphs`: all that will run on the same weights and caches, such as those of one token and of the largest prompt; or
    a list of such lists, one for each of several models, which share the devices.  `devices`: exactly one of them is
    the host, or, if some are backends of other processes, none: then this process is the host, as a device "driver"
    that has only inputs and outputs.  A real backend in place of a `Device` is measured first, and without `link` so
    are the links between real backends.  `link`: see `Links`.
    `goal`: what to minimise: a weight for each graph, "decode" (default: only the graph with the fewest operations of
    each model counts), or "prompt" (only the one with the most).  Graphs of weight 0 decide the arenas, not the time;
    at least one graph of each model has a larger weight.
    `pins`: {name or pattern like "blk.*.ffn_*": device}; a name counts more than a pattern.
    `within`: a gap at which the search may stop, 0.005 is 0.5 %.
    `fill`: the part of a cache that a token reads on average.  `stream`: whether weights of the host may be streamed to
    another device, copied anew for each compute: a flag for each graph, or True for all graphs of many tokens.
    `turns`: whether several models never compute at the same time, so that they share their arenas.
    `seconds`: after so many seconds the search ends with the best placement that it has found, or goes on until it has
    found one; the gap says how far from best that may be.  Without it equal calls have equal results.

    Raises OutOfMemory, which says what is missing and, where known, a change that suffices, if nothing fits;
    PlacementError for pins that name nothing or contradict each other; GraphError for residents without a name, or of
    one name and different sizes; ValueError and TypeError for other arguments.
    """
    end = end_of(seconds)
    groups = groups_of(graphs)
    chosen = with_driver(given_devices(devices), groups)
    backends = [given for given in chosen if isinstance(given, Backend)]
    devices = devices_of(chosen)
    if link is None and (len(backends) > 1 or is_driven(backends)):
        link = measure_links(backends)
    links = Links(devices, link)
    within = part_of("within", within, "between 0 and 1", whole=False)
    fill = part_of("fill", fill, "a part of a cache: larger than 0, at most 1", whole=True)
    models = [Trials(group, devices, links, (), fill) for group in groups]
    weights = weights_of(goal, models)
    at = 0
    for model in models:
        model.weights = weights[at : at + len(model.graphs)]
        at += len(model.graphs)
    streams = streams_of(stream, models)
    search = _Search(models, devices, links, pins_of(pins, models, devices), streams, within, turns,
                     end=end)
    best = search.found() or search.spare()
    if best is not None and not any(best.missing):
        return search.answer(best, link, fill)
    if devices[-1].fetch is None:
        raise search.refusal(best)
    return search.fetched(best, link, fill)


class Refit(NamedTuple):
    """A placement that `Refits` has found."""

    residents: Mapping[str, str]
    """{weight or cache: its device}."""
    arenas: tuple[int, ...]
    """Bytes of the arena of each device."""


class Refits:
    """Searches for other placements than that of a fit of one model: with other pins ({name: device}), or with
    less room on the devices.  Facts are made once, and tables once for each set of pins."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._links = Links(fit.devices, fit.link)
        self._tables: dict[tuple[object, ...], list[Tables]] = {}

    @cached_property
    def model(self) -> Trials:
        """The graphs of the fit; plans of these graphs are valid until the next search or plan."""
        fit = self._fit
        return Trials([plan.graph for plan in fit.plans], fit.devices, self._links, fit.goal, fit.fill)

    def search(self, pins: Mapping[str, str], more: Sequence[int]) -> Refit | None:
        """The best placement with these pins that leaves `more` bytes of each device free; None if nothing was found
        that fits."""
        names = [device.name for device in self._fit.devices]
        fixed = {name: names.index(device) for name, device in pins.items()}
        devices = tuple(device.replace(reserve=device.reserve + size)
                        for device, size in zip(self._fit.devices, more, strict=True))
        tables = self._tables.setdefault(tuple(sorted(fixed.items())), [])
        search = _Search([self.model], devices, self._links, [fixed], [self._fit.stream], self._fit.within, False,
                         tables=tables)
        found = search.found()
        return None if found is None else Refit({name: names[d] for name, d in found.residents[0].items()},
                                                found.arenas)


class _Search:
    """The search for one call of `fit` or of `Refits.search`.

    `pins`: for each model {name: index of its device}; `streams`: for each model and graph whether weights may be
    streamed; `fine`: see `Candidates`; `tables`: those of an earlier search with the same pins, or an empty list, which
    receives the tables of this search; `end`: see `Candidates`.
    """

    def __init__(self, models: Sequence[Trials], devices: tuple[Device, ...], links: Links,
                 pins: Sequence[Mapping[str, int]], streams: Sequence[Sequence[bool]], within: float,
                 turns: bool, fine: float = 0.0, tables: list[Tables] | None = None, end: float = math.inf) -> None:
        self.models, self.devices, self.links, self.pins = models, devices, links, pins
        self.streams, self.within, self.turns = streams, within, turns
        self._made = [] if tables is None else tables
        self.candidates = Candidates(models, devices, within, turns, fine, end)
        self.bound = math.inf
        for model, fixed in zip(models, pins, strict=True):
            model.unread = {name: fixed.get(name, len(devices) - 1) for name in model.unread}

    # -- the search -------------------------------------------------------------------

    def found(self) -> Found | None:
        """The best placement found, None where there is none; of two that take nearly as long the one with fewer
        splits."""
        if not self._made:
            self._made += self._tables(self.streams)
        self._all_cases(self._made)
        if any(any(stream) for stream in self.streams):
            # Streamed weights need room in an arena, where residents may save more seconds: also search without.
            self._all_cases(self._tables([[False] * len(stream) for stream in self.streams]))
        candidates = self.candidates
        if candidates.is_late:
            return candidates.best
        # The tables leave out placements that divide an atom.  A tiny model has so few placements that all are planned.
        near = candidates.best is not None and candidates.best.seconds <= self.bound * (1 + self.within)
        self._every_one(TINY if near else FEW)
        if candidates.best is None:
            self._by_size()
        if candidates.best is not None:
            plainer(candidates, self._made)
        return candidates.best

    def _all_cases(self, tables: Sequence[Tables]) -> None:
        """Search all cases of arenas of these tables; lowers `bound` to the bound of these cases if that is lower."""
        self.bound = min(self.bound, Branching(self.candidates, tables, self.pins).run())

    def _tables(self, streams: Sequence[Sequence[bool]]) -> list[Tables]:
        return [Tables(model.facts, model.weights, self.devices, self.links, stream, pins)
                for model, stream, pins in zip(self.models, streams, self.pins, strict=True)]

    def spare(self) -> Found | None:
        """A last try where nothing was found: the placement with nearly the fewest bytes on the host, whether it fits
        or the host lacks memory; None where there is none.  It does not depend on the memory of the host."""
        host = self.devices[-1]
        endless = (*self.devices[:-1], host.replace(memory=ENDLESS, reserve=0))
        if host.budget >= endless[-1].budget:
            return None
        more = _Search(self.models, endless, self.links, self.pins, self.streams, self.within, self.turns,
                       DEAR / host.bandwidth, end=self.candidates.end)
        found = more.found() or more.spare()
        # The same placement under the budgets of this search, whose host is not endless.
        return None if found is None else self.candidates.found(found.trials, found.residents, found.nodes)

    def refusal(self, found: Found | None) -> OutOfMemory:
        """The error that says what a placement would need, or, without one, what pinned residents would need."""
        if found is None:
            return refusal(self.models, self.devices, self.pins, pinned=self._pinned_needs())
        return refusal(self.models, self.devices, self.pins, Least(_used(found)[-1], sum(found.arenas)))

    def _pinned_needs(self) -> list[int]:
        """For each device the bytes that suffice for what is pinned to it, and for its arena, with all other residents
        on the host."""
        host = len(self.devices) - 1
        endless = tuple(device.replace(memory=ENDLESS, reserve=0) for device in self.devices)
        pins = [{name: fixed.get(name, host) for name in model.sizes}
                for model, fixed in zip(self.models, self.pins, strict=True)]
        found = _Search(self.models, endless, self.links, pins, self.streams, self.within, self.turns,
                        end=self.candidates.end).found()
        return [] if found is None else _used(found)

    # -- with weights that are fetched ---------------------------------------------------

    def fetched(self, spare: Found | None, link: LinkLike, fill: float) -> Fit:
        """The answer under which each evaluation fetches weights, where nothing fits otherwise.  `spare`: the placement
        with nearly the fewest bytes on the host.  OutOfMemory where this is not enough, or cannot be."""
        from ggml_sched.placement.overflow import bisected, overflow
        from ggml_sched.placement.shares import Shares

        if any(map(any, self.streams)):
            error = self.refusal(spare)
            raise OutOfMemory(f"{error}; {self.devices[-1].name} fetches no weights that are streamed to other devices",
                              error.backend, error.needed, error.available)
        host = self.devices[-1]
        shares = Shares(self.models, link, self.turns)

        def with_more(more: int) -> tuple[Device, ...]:
            return (*self.devices[:-1], host.replace(memory=host.budget + host.reserve + more))

        seen: list[Placement] = [] if spare is None else [(spare.residents, spare.nodes)]

        def probed(pins: Sequence[Mapping[str, int]], tables: list[Tables],
                   more: int) -> tuple[Placement | None, float]:
            search = _Search(self.models, with_more(more), self.links, pins, self.streams, self.within, self.turns,
                             tables=tables, end=self.candidates.end)
            found = search.found()
            if found is None:
                return None, search.bound
            seen.append((found.residents, found.nodes))
            return seen[-1], min(search.bound, found.seconds)

        def is_late() -> bool:
            return time.monotonic() >= self.candidates.end

        total = sum(min(model.bytes_on(d, name) for d in range(len(self.devices)))
                    for model in self.models for name in model.sizes)
        low = min(shares.most, max(0, total - sum(device.budget for device in self.devices)))
        known = shares.place(seen[0]) if seen else None
        best, bound = overflow(shares, partial(probed, self.pins, self._made), self.within, low, known, is_late)
        for _ in range(MORE_PINS):
            need = None if best is not None or not seen else shares.least_bytes(seen[-1])
            pins = None if need is None else self._fewer_on_host(shares, seen[-1], need.on_host - host.budget)
            if pins is None:
                break
            best = overflow(shares, partial(probed, pins, []), self.within, low, None, is_late)[0]
        if best is None:
            # What was found so far depends on the memory of the host; these do not, so that more never refuses them.
            sure = [] if spare is None else [(spare.residents, spare.nodes), *self._spares(shares, spare)]
            placed = [found for placement in sure if (found := shares.place(placement)) is not None]
            best = min(placed, key=lambda found: found.seconds, default=None)
        if best is None:
            needs = [need for placement in sure or seen if (need := shares.least_bytes(placement)) is not None]
            raise refusal(self.models, self.devices, self.pins, min(needs, default=None), fetches=True,
                          pinned=() if needs else self._pinned_needs()[:-1])    # the host may fetch what is left

        def node_bounds(more: int) -> tuple[float, float | None]:
            given = with_more(more)
            return self._node_bound(given), self._node_bound(given, alone=True) if shares.needs_alone else None

        full = bisected(shares, node_bounds, low, best.seconds, is_late)
        return self.fetched_answer(shares, best, full, max(full, min(bound, best.seconds)), link, fill)

    def _spares(self, shares: Shares, spare: Found) -> Iterator[Placement]:
        """Placements with fewer caches on the host than the spare one has there, whatever the memory of the host."""
        host = len(self.devices) - 1
        lasting = sum(part.model.bytes_on(host, name) for part, at in zip(shares.parts, spare.residents, strict=True)
                      for name, d in at.items() if d == host and not part.may_fetch(name))
        total = sum(size for model in self.models for size in model.sizes.values())
        for part in PARTS if lasting else ():
            pins = self._fewer_on_host(shares, (spare.residents, spare.nodes), math.ceil(lasting * part))
            if pins is None:
                continue
            tables: list[Tables] = []
            for full in FULL:
                # A host with no more than this has small arenas, which a search with an endless one does not seek.
                limited = (*self.devices[:host], self.devices[host].replace(memory=int(total * full), reserve=0))
                search = _Search(self.models, limited, self.links, pins, self.streams, self.within, self.turns,
                                 tables=tables, end=self.candidates.end)
                found = search.found()
                if found is not None:
                    yield found.residents, found.nodes

    def _fewer_on_host(self, shares: Shares, placement: Placement, missing: int) -> list[dict[str, int]] | None:
        """Pins to other devices of caches of the host of a placement, of at least `missing` bytes; None where the
        others have no room for them."""
        host = len(self.devices) - 1
        room = [device.budget for device in self.devices[:host]]
        found: list[dict[str, int]] = []
        layers: dict[tuple[int, str], list[str]] = {}   # the caches of a layer have its number, and stay together
        for k, (part, residents, fixed) in enumerate(zip(shares.parts, placement[0], self.pins, strict=True)):
            lasting = {name: d for name, d in residents.items() if not part.may_fetch(name)}
            found.append({**fixed, **{name: d for name, d in lasting.items() if d != host}})
            for name, d in found[k].items():
                if d != host:
                    room[d] -= part.model.bytes_on(d, name)
            for name, d in lasting.items():
                if d == host and name not in found[k]:
                    layers.setdefault((k, "".join(filter(str.isdigit, name))), []).append(name)
        for (k, _), names in layers.items():
            if missing <= 0 or not room:
                break
            d, model = max(range(host), key=lambda d: room[d]), self.models[k]
            room[d] -= sum(model.bytes_on(d, name) for name in names)
            missing -= sum(model.bytes_on(host, name) for name in names)
            found[k].update(dict.fromkeys(names, d))
        return found if missing <= 0 and min(room, default=-1) >= 0 else None

    def _every_one(self, most: int) -> None:
        """Plan every placement, if each model has at most `most` placements."""
        n, candidates = len(self.devices), self.candidates
        free = [[name for name in model.sizes if name not in pins]
                for model, pins in zip(self.models, self.pins, strict=True)]
        ways = [n ** len(names) for names in free]
        if max(ways) > most or math.prod(ways) > MOST:
            return
        options: list[list[tuple[Trial, dict[str, int]]]] = []
        for model, pins, names in zip(self.models, self.pins, free, strict=True):
            planned = []
            for chosen in product(range(n), repeat=len(names)):
                placed = {**pins, **dict(zip(names, chosen, strict=True))}
                held = [0] * n
                for name, d in placed.items():
                    held[d] += model.bytes_on(d, name)
                if all(size <= budget for size, budget in zip(held, candidates.budgets, strict=True)):
                    planned.append((replace(model.run(placed), plans=()), placed))
            options.append(planned)
        for pairs in product(*options):
            candidates.keep(candidates.found([trial for trial, _ in pairs], [placed for _, placed in pairs]))

    def _by_size(self) -> None:
        """Plan three placements without the solver, where it has found none: each resident, the largest first, goes
        to the device with the most room.  The second and the third leave room for the arenas of the plans before."""
        held = [0] * len(self.devices)
        for _ in range(3):
            room = self.candidates.room(held)
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
            found = self.candidates.found(trials, placed)
            self.candidates.keep(found)
            held = [max(pair) for pair in zip(held, found.arenas, strict=True)]

    # -- the answer -------------------------------------------------------------------

    def _node_bound(self, devices: Sequence[Device] | None = None, alone: bool = False) -> float:
        """The bound of all placements of all models; `devices`: with other budgets than those of the search; `alone`:
        of the seconds of nodes, without copies and splits."""
        several = len(self.models) > 1
        allowed: dict[Key, list[bool]] = {}
        for k, pins in enumerate(self.pins):
            for name, at in pins.items():
                allowed[(k, name) if several else name] = [d == at for d in range(len(self.devices))]
        facts = [found for model in self.models for found in model.facts]
        weights = [weight for model in self.models for weight in model.weights]
        numbers = [k for k, model in enumerate(self.models) for _ in model.facts] if several else None
        budgets = [device.budget for device in devices or self.devices]
        priced, links = self.devices, self.links
        if alone:
            priced = tuple(device.replace(split=0) for device in priced)
            links = Links(priced, Link(INSTANT))
        return node_bound(facts, weights, priced, links, budgets, allowed, numbers).seconds

    def answer(self, best: Found, link: LinkLike, fill: float) -> Fit:
        """The value to return: the best placement planned once more, with its bounds."""
        trials = [model.run(residents, nodes)
                  for model, residents, nodes in zip(self.models, best.residents, best.nodes, strict=True)]
        bound = min(self._node_bound(), best.seconds)
        # Where no case of arenas fits, the cases prove nothing about a placement that was found without the solver.
        rules_bound = bound if math.isinf(self.bound) else max(bound, min(self.bound, best.seconds))
        return self._made_of(trials, best.residents, best.nodes, best.arenas, bound, rules_bound, self.candidates.worth,
                             link, fill)

    def fetched_answer(self, shares: Shares, best: Fetched, bound: float, rules_bound: float, link: LinkLike,
                       fill: float) -> Fit:
        """The value to return for a placement with fetched weights, planned once more, with its bounds."""
        more, trials = shares.with_more(best), shares.again(best)
        fetchings = tuple(self._fetching(*of) for of in zip(shares.parts, best.parts, trials, more, strict=True))
        return self._made_of(trials, [part.residents for part in best.parts], [part.nodes for part in best.parts],
                             best.arenas, bound, rules_bound, (shares.worth(best),) * len(self.devices), link, fill,
                             [part.stored for part in best.parts], fetchings)

    def _made_of(self, trials: Sequence[Trial], residents: Sequence[Mapping[str, int]], nodes: Sequence[Nodes],
                 arenas: Sequence[int], bound: float, rules_bound: float, worth: tuple[float, ...], link: LinkLike,
                 fill: float, stored: Sequence[Collection[str]] | None = None,
                 fetchings: tuple[Fetching, ...] = ()) -> Fit:
        """The value of these trials, one of each model; `stored`: for each the weights that are in a file."""
        in_file = stored or [()] * len(trials)
        placed = tuple(Placed(name, model.kinds[name], model.bytes_on(d, name), d, k, name in self.pins[k],
                              name in in_file[k])
                       for k, (model, at) in enumerate(zip(self.models, residents, strict=True))
                       for name, d in sorted(at.items()))
        seconds = sum(trial.seconds for trial in trials)
        return Fit(self.devices, link, tuple(weight for model in self.models for weight in model.weights), self.within,
                   seconds, bound, rules_bound, tuple(arenas), tuple(trial.arenas for trial in trials),
                   tuple(k for k, trial in enumerate(trials) for _ in trial.plans),
                   tuple(price for trial in trials for price in trial.prices), placed, worth,
                   any(of is not None for of in nodes), fill, tuple(flag for flags in self.streams for flag in flags),
                   tuple(plan for trial in trials for plan in trial.plans), fetchings)

    def _fetching(self, fetches: Fetches, part: Part, trial: Trial, more: tuple[Choice, int]) -> Fetching:
        """What one model fetches; `more`: its choice, and the number of its slots, with 1 GiB more on the host."""
        choice, still = part.choice, more[0]
        return Fetching(fetches.disk, tuple(use.name for use in choice.fetched), part.way.rows, choice.nbytes,
                        choice.window, still.nbytes, tuple(use.name for use in still.fetched), part.share,
                        self._slotted(fetches, part, trial, more[1]))

    @staticmethod
    def _slotted(fetches: Fetches, part: Part, trial: Trial, more_slots: int) -> Slotted | None:
        slots = part.way.slots
        if slots is None:
            return None
        reads = [fetches.expected(slots, g, n) for n in (trial.n_slots, more_slots) for g in range(len(trial.plans))]
        used = tuple(fetches.expected(slots, g, 0) for g in range(len(trial.plans)))
        return Slotted(part.way.slotted, trial.n_slots, slots.n_experts, slots.slot_nbytes, used,
                       tuple(reads[: len(used)]), more_slots, tuple(reads[len(used) :]))


def _used(found: Found) -> list[int]:
    """For each device the bytes of residents and arena of a placement."""
    return [arena + sum(trial.residents[d] for trial in found.trials) for d, arena in enumerate(found.arenas)]
