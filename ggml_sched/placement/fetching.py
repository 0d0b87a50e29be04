"""Weights of the host that each evaluation of a model fetches from a disk: real plans with them, and their prices.

A weight that nodes of the host read as a whole is fetched for each of these evaluations; of a weight of which nodes
read single rows only these are read.  Weights of experts have slots, as many as the other weights leave memory for, and
experts that are in none are read when nodes have chosen them (slots.py); or they are fetched as a whole, where that
takes less time, or where the fewest slots do not fit.  Caches are not fetched.  The plans are those of `llama.load`:
with a store, which is no faster than the host, and a window in the arena of the host (residency.py).  How much memory
of the host a model has for its weights is for shares.py to say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ggml_sched._core import Devices, Policy, Request, make_plan
from ggml_sched._graph import Graph, Tensor, bind_resident
from ggml_sched.backend import Buffer
from ggml_sched.backends.dry import DryStore
from ggml_sched.backends.store.files import ROOM
from ggml_sched.backends.store.rows import fits, rows_size
from ggml_sched.backends.store.slots import slot_nbytes
from ggml_sched.errors import PlacementError, UnsupportedOp
from ggml_sched.placement.devices import Device, LinkLike, Links
from ggml_sched.placement.facts import Facts, expected_reads
from ggml_sched.placement.leastfetches import Costs, seconds_beside
from ggml_sched.placement.plan_bytes import arena_bytes, store_bytes
from ggml_sched.placement.pricing import Price, Pricer
from ggml_sched.placement.residency import Choice, Read, Use, chosen, most_whole_reads, reads_of
from ggml_sched.placement.slots import Bank, ByExpert, Slots, may_have_slots
from ggml_sched.placement.trials import Trial, Trials
from ggml_sched.planning.plan import Plan

__all__ = ["Fetches", "FetchingTrials", "Planned", "Way"]

NO_MEMORY = 1 << 62
"""The size of a buffer without memory in which stored weights have addresses for planning."""
APART = 0.1
"""The part of fetches, or of what computes, if that takes less, that counts as not beside the other in estimates."""


class PlannedStore(DryStore):
    """A `FileStore` for planning: it has the same margin and work memory, and computes the same GET_ROWS."""

    def __init__(self, name: str) -> None:
        super().__init__(name, ROOM, 64, supports_op=lambda node: not node.computes or fits(node))

    def work_size(self, nodes: Sequence[Tensor]) -> int:
        return rows_size(nodes, self.margin)


def disk_of(devices: Sequence[Device]) -> Device:
    """The disk of the host as a device: what `gs.price` needs to price a plan that fetches.

    It is no faster than the host in anything, as what it reads goes to the host's memory."""
    host = devices[-1]
    assert host.fetch is not None
    names = [device.name for device in devices]
    name = next(name for name in ("file", *(f"file{k}" for k in range(len(names)))) if name not in names)
    most = host.fetch.bandwidth
    return Device(name, NO_MEMORY, min(most, host.bandwidth), host.flops, launch=max(host.fetch.latency, host.launch),
                  split=host.split, bandwidths={kind: min(most, rate) for kind, rate in host.bandwidths.items()},
                  flops_of=host.flops_of, backend=PlannedStore(name))


def links_with(devices: Sequence[Device], disk: Device, link: LinkLike) -> Links:
    """The links of the devices and of the disk, which is in the memory of the host, the last of the devices."""
    made, host = Links((*devices, disk), link), len(devices) - 1
    for prices in (made.latency, made.per_byte):
        prices[-1, :], prices[:, -1] = prices[host, :], prices[:, host]
        prices[-1, -1] = prices[-1, host] = prices[host, -1] = 0.0
    return made


@dataclass(frozen=True)
class Way:
    """Which weights of a model on the host may be fetched as a whole, and which are read expert by expert."""

    uses: tuple[Use, ...]
    """The weights of the host that may be fetched as a whole, in the order of an evaluation."""
    rows: tuple[str, ...]
    """The weights in the store of which nodes read single rows, or nothing."""
    fixed: int
    """Bytes of all else on the host that stays, the fewest slots among it."""
    slots: Slots | None
    """The slots of weights that are read expert by expert; None where no weight is."""

    @property
    def slotted(self) -> tuple[str, ...]:
        """The weights that are read expert by expert."""
        return () if self.slots is None else tuple(self.slots.bank_of)

    @property
    def least_slots(self) -> int:
        """Bytes of the fewest slots."""
        return 0 if self.slots is None else self.slots.fewest * self.slots.slot_nbytes

    @property
    def more_slots(self) -> int:
        """Bytes of the slots that there could be besides the fewest: one for each expert."""
        return 0 if self.slots is None else (self.slots.n_experts - self.slots.fewest) * self.slots.slot_nbytes

    def n_slots(self, left: int) -> int:
        """The number of slots if `left` bytes of the host are free beside the fewest slots and everything else."""
        return 0 if self.slots is None else self.slots.within(left + self.least_slots)


@dataclass(frozen=True)
class Planned:
    """The real plans of a model with some weights in the store, before its slots are counted; valid until the next."""

    plans: tuple[Plan, ...]
    held: tuple[int, ...]
    """Bytes of weights and caches on each device, without slots."""
    arenas: tuple[int, ...]
    """Bytes of each device's arena and of the work memory there, without those of the store."""
    work: int
    """Bytes of the host that its kernels take besides buffers."""
    store: int
    """Bytes of the host that the store takes, to read rows."""
    assigned: bool

    @property
    def on_host(self) -> int:
        """Bytes of the host, without slots."""
        return self.held[-1] + self.arenas[-1] + self.work + self.store


class Fetches:
    """The graphs of one model with some weights of the host in a store; the host is the last device."""

    def __init__(self, model: Trials, link: LinkLike) -> None:
        self.model = model
        self.host: int = len(model.devices) - 1
        self.disk: Device = disk_of(model.devices)
        store = self.disk.backend
        self._order = (store, *model.backends)
        self._core = Devices(self._order)
        devices, links = (*model.devices, self.disk), links_with(model.devices, self.disk, link)
        self._pricers = [Pricer(found, devices, links) for found in model.facts]
        reads = [[*reads_of(facts.nodes, tensors, fits)]
                 for facts, tensors in zip(model.facts, model.tensors, strict=True)]
        self.uses: tuple[Use, ...]
        self.rows: frozenset[str]
        self.uses, self.rows = self._uses(reads)
        self._by_expert = self._experts(reads)
        self._fetches: tuple[dict[str, float], ...] = tuple(map(self._whole_reads, reads))
        self.costs: Costs = self._costs()
        """What fetches of each weight cost."""

    # -- which weights, and at what price --------------------------------------------------

    def _uses(self, reads: Sequence[Sequence[Read]]) -> tuple[tuple[Use, ...], frozenset[str]]:
        """(The weights that nodes read as a whole, in the order of the first graph; those of which nodes read single
        rows or nothing).  `reads`: those of each graph."""
        model = self.model
        counts = most_whole_reads(reads)
        weights = [name for name in (*counts, *(name for name in model.sizes if name not in counts))
                   if model.kinds[name] == "weight"]
        margin = self.disk.backend.margin
        whole = tuple(Use(name, self._size(name), self._size(name, margin), counts[name]) for name in weights
                      if counts.get(name))
        return whole, frozenset(weights).difference(use.name for use in whole)

    def _experts(self, reads: Sequence[Sequence[Read]]) -> dict[str, ByExpert]:
        """The weights that may have slots for their experts; `reads`: those of each graph."""
        found = {name: entry for name, entry in may_have_slots(self.model.backends[self.host], reads).items()
                 if self.model.kinds[name] == "weight"}
        # Slots count whole pages, and a weight its alignment: `least` relies on slots for all not taking fewer bytes.
        if any(self._size(name) > entry.n_experts * slot_nbytes([entry.nbytes]) for name, entry in found.items()):
            return {}
        return found

    def _size(self, name: str, margin: int = 0) -> int:
        """The bytes of a weight on the host; with the `margin` of a store, those of a fetched copy of it."""
        alignment = self.model.devices[self.host].alignment
        return -(-(self.model.bytes_on(self.host, name) + margin) // alignment) * alignment

    def _whole_reads(self, graph: Sequence[Read]) -> dict[str, float]:
        """{weight that nodes of a graph read as a whole: seconds of fetching it}."""
        most: dict[str, int] = {}
        for read in graph:
            if read.is_whole:
                name = read.source.root.name
                most[name] = max(most.get(name, 0), read.source.nbytes)
        return {name: self.disk.launch + nbytes / self.disk.bandwidth for name, nbytes in most.items()}

    def _costs(self) -> Costs:
        """Of a weight in slots a graph reads, for each byte that is in none, no less than the part of its experts that
        it uses: `expected_reads` is at least so much."""
        whole: dict[str, float] = {}
        experts: dict[str, float] = {}
        disk = self.disk
        beside: float | None = 0.0
        for g, (fetches, weight) in enumerate(zip(self._fetches, self.model.weights, strict=True)):
            for name, seconds in fetches.items() if weight else ():
                whole[name] = whole.get(name, 0.0) + weight * seconds
            for name, one in self._by_expert.items() if weight else ():
                taken = one.used[g] * (disk.launch + one.nbytes / disk.bandwidth)
                experts[name] = experts.get(name, 0.0) + weight * taken
            if weight and beside is not None:
                found = seconds_beside(self.model.facts[g], self._by_expert, self.model.devices)
                beside = None if found is None else beside + weight * found
        sizes = {name: self._size(name) for name in (*self.rows, *(use.name for use in self.uses))}
        return Costs(sizes, whole, experts, beside)

    def may_fetch(self, name: str) -> bool:
        """Whether a weight or cache may be in the store."""
        return name in self.costs.sizes

    def stored(self, way: Way, choice: Choice, n_slots: int) -> int:
        """The bytes of weights that are in the store, and in no slot."""
        names = (*way.rows, *way.slotted, *(use.name for use in choice.fetched))
        return sum(map(self._size, names)) - (0 if way.slots is None else n_slots * way.slots.slot_nbytes)

    def expected(self, slots: Slots, g: int, n_slots: int) -> float:
        """The bytes of experts that graph number g is expected to read with so many slots; with none, of all experts
        that it uses."""
        return sum(expected_reads(one.used[g], n_slots, slots.n_experts) * one.nbytes
                   for one in map(self._by_expert.__getitem__, slots.bank_of))

    def reading(self, slots: Slots, n_slots: int) -> float:
        """The seconds of the goal of reading experts with so many slots."""
        total = 0.0
        for g, weight in enumerate(self.model.weights):
            for one in map(self._by_expert.__getitem__, slots.bank_of) if weight else ():
                total += (weight * expected_reads(one.used[g], n_slots, slots.n_experts)
                          * (self.disk.launch + one.nbytes / self.disk.bandwidth))
        return total

    def estimate(self, way: Way, choice: Choice, n_slots: int, computing: Sequence[float]) -> float:
        """About the seconds of the goal with a choice and so many slots; `computing`: seconds of each graph without
        fetches.  Where either takes longer, most of the other is beside it, but not all (`APART`)."""
        total = 0.0 if way.slots is None else self.reading(way.slots, n_slots)
        for fetches, weight, taken in zip(self._fetches, self.model.weights, computing, strict=True):
            if weight:
                reading = sum(fetches.get(use.name, 0.0) for use in choice.fetched)
                total += weight * (max(taken, reading) + APART * min(taken, reading))
        return total

    # -- real plans ---------------------------------------------------------------------

    def ways(self, residents: Mapping[str, int]) -> list[Way]:
        """The ways to have the weights of the host: none is read expert by expert, and, if any can be, all that can."""
        slotted = [name for name in self._by_expert if residents[name] == self.host]
        return [self._way(residents, names) for names in ([[], slotted] if slotted else [[]])]

    def _way(self, residents: Mapping[str, int], slotted: Collection[str]) -> Way:
        """The weights `slotted` are read expert by expert."""
        uses = [use for use in self.uses if residents[use.name] == self.host and use.name not in slotted]
        rows = [name for name in self.rows if residents[name] == self.host]
        known = {*rows, *slotted, *(use.name for use in uses)}
        fixed = sum(self._size(name) for name, d in residents.items() if d == self.host and name not in known)
        slots = Slots(self.disk.backend, {name: self._by_expert[name] for name in slotted}) if slotted else None
        return Way(tuple(uses), tuple(sorted(rows)), fixed + (0 if slots is None else slots.nbytes), slots)

    def of(self, residents: Mapping[str, int], nodes: Sequence[Mapping[Tensor, int]] | None,
           names: Collection[str], slotted: Collection[str] = ()) -> Trial | None:
        """The plans with exactly these of the host's weights fetched, and those in `slotted` read expert by expert,
        with as many slots as the host leaves memory for; None where a backend does not support a node."""
        way = self._way(residents, [name for name in self._by_expert
                                    if name in slotted and residents[name] == self.host])
        planned = self.planned(residents, nodes, way, chosen(way.uses, names))
        if planned is None:
            return None
        left = self.model.devices[self.host].budget - planned.on_host - way.least_slots
        return self.priced(planned, way, way.n_slots(left))

    def planned(self, residents: Mapping[str, int], nodes: Sequence[Mapping[Tensor, int]] | None, way: Way,
                choice: Choice) -> Planned | None:
        """Plan all graphs with the weights of a choice, and others as a way has them, in the store; None where a
        backend does not support a node that is assigned to it."""
        model, n = self.model, len(self.model.devices)
        stored = {*way.rows, *(use.name for use in choice.fetched)}
        banks: Mapping[str, Bank] = {} if way.slots is None else way.slots.bank_of
        held = [0] * n
        for name, d in residents.items():
            held[d] += 0 if name in stored or name in banks else model.bytes_on(d, name)
        policy = Policy(windows=(0,) * n + (choice.window,))
        try:
            plans = [self._plan(g, residents, None if nodes is None else nodes[g], stored, banks, policy)
                     for g in range(len(model.graphs))]
        except (UnsupportedOp, PlacementError):
            return None
        arenas = tuple(arena_bytes(plans, k) for k in range(1, n + 1))
        work = max(model.backends[self.host].host_work(graph.nodes) for graph in model.graphs)
        return Planned(tuple(plans), tuple(held), arenas, work, store_bytes(plans, 0), nodes is not None)

    def priced(self, planned: Planned, way: Way, n_slots: int) -> Trial:
        """The trial of these plans with so many slots for experts."""
        model, held, arenas = self.model, [*planned.held], [*planned.arenas]
        arenas[self.host] += planned.work + planned.store
        if way.slots is not None:
            way.slots.n_slots = n_slots         # the pricer counts the experts that are in none
            held[self.host] += way.slots.nbytes
        missing = tuple(max(0, h + a - device.budget)
                        for h, a, device in zip(held, arenas, model.devices, strict=True))
        prices = tuple(self._folded(pricer.price(plan))
                       for pricer, plan in zip(self._pricers, planned.plans, strict=True))
        seconds = sum(weight * price.seconds for weight, price in zip(model.weights, prices, strict=True) if weight)
        splits = sum(plan.data.n_splits for weight, plan in zip(model.weights, planned.plans, strict=True) if weight)
        return Trial(tuple(held), tuple(arenas), missing, prices, seconds, splits, planned.assigned, planned.plans,
                     n_slots)

    def _folded(self, price: Price) -> Price:
        """The price with the seconds of the rows that the store reads among those of the host."""
        *compute, rows = price.compute
        compute[self.host] += rows
        return replace(price, compute=tuple(compute))

    def _plan(self, g: int, residents: Mapping[str, int], nodes: Mapping[Tensor, int] | None, stored: Collection[str],
              banks: Mapping[str, Bank], policy: Policy) -> Plan:
        """The plan of graph number g: a node that reads a whole weight of the store, or one of a bank, is on the host,
        whatever `nodes`, the devices of the assigned nodes, have for it; the store reads single rows."""
        model = self.model
        self._move(model.tensors[g], residents, stored, banks)
        assigned = {}
        for node in model.facts[g].nodes:
            read = [s.root.name for s in node.src if s is not None and s.root.resident
                    and (s.root.name in stored or s.root.name in banks)]
            if fits(node) and node.src[0].root.name in read:
                continue
            if read or nodes is not None and node in nodes:
                assigned[node] = model.backends[self.host if read or nodes is None else nodes[node]]
        request = Request(model.graphs[g], self._core, assigned)
        return Plan(model.graphs[g], make_plan(request, policy), self._order, "default", assigned_by="the placement")

    def _move(self, tensors: Mapping[str, Tensor], residents: Mapping[str, int], stored: Collection[str],
              banks: Mapping[str, Bank]) -> None:
        """Give the residents of a graph addresses on their devices, in their banks or in the store, in buffers without
        memory."""
        buffers: dict[tuple[object, bool, Bank | None], Buffer] = {}
        for name, t in tensors.items():
            backend = self._order[0] if name in stored else self.model.backends[residents[name]]
            key = backend, t.resident == "weight", banks.get(name)
            if key not in buffers:
                buffers[key] = Buffer(backend, NO_MEMORY, usage="weights" if key[1] else "any")
                buffers[key].experts = banks.get(name)
            bind_resident(t, buffers[key], 0)


class FetchingTrials:
    """Trials of a model beside a placement with fetched weights: what such a trial moves to the host is fetched, too.

    `residents`: {weight or cache: index of its device}; `names`: the fetched weights of that placement; `slotted`:
    those that it reads expert by expert.
    """

    def __init__(self, model: Trials, link: LinkLike, residents: Mapping[str, int], names: Collection[str],
                 slotted: Collection[str] = ()) -> None:
        self.devices: tuple[Device, ...] = model.devices
        self.facts: tuple[Facts, ...] = model.facts
        self.weights: tuple[float, ...] = model.weights
        self.graphs: tuple[Graph, ...] = model.graphs
        self.bytes_on: Callable[[int, str], int] = model.bytes_on
        self._fetches = Fetches(model, link)
        self._before, self._names, self._slotted = residents, names, slotted

    def run(self, residents: Mapping[str, int], nodes: Sequence[Mapping[Tensor, int]] | None = None) -> Trial:
        """As `Trials.run`; PlacementError where a backend does not support a node that is assigned to it."""
        host = self._fetches.host
        came = {name for name, d in residents.items() if d == host and self._before[name] != host}
        found = self._fetches.of(residents, nodes, {*self._names, *came},
                                 {*self._slotted, *(came if self._slotted else ())})
        if found is None:
            raise PlacementError("a backend does not support a node that is assigned to it")
        return found

    def cheapest(self, residents: Mapping[str, int], nodes: Sequence[Mapping[Tensor, int]]) -> Trial:
        """As `Trials.cheapest`."""
        own = self.run(residents)
        try:
            assigned = self.run(residents, nodes)
        except PlacementError:
            return own
        return min(assigned, own, key=lambda trial: (sum(trial.missing), trial.seconds, trial.splits))
