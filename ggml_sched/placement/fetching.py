"""Weights of the host that each evaluation fetches from a disk: which ones, real plans with them, and their prices.

A weight that nodes of the host read as a whole is fetched for each of these evaluations; of a weight of which nodes
read single rows only these are read.  Caches and the weights of experts are not fetched.  The plans are those of
`llama.load`: with a store, which is no faster than the host, and a window in the arena of the host (residency.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ggml_sched._core import Devices, Policy, Request, make_plan
from ggml_sched._graph import Tensor, bind_resident
from ggml_sched.backend import Buffer
from ggml_sched.backends.dry import DryStore
from ggml_sched.backends.store.files import ROOM
from ggml_sched.backends.store.rows import fits, rows_size
from ggml_sched.errors import PlacementError, UnsupportedOp
from ggml_sched.placement.devices import Device, LinkLike, Links
from ggml_sched.placement.pricing import Price, Pricer
from ggml_sched.placement.residency import (
    Choice,
    Read,
    Use,
    choose,
    chosen,
    least_choice,
    most_whole_reads,
    reads_of,
)
from ggml_sched.placement.trials import Trial, Trials
from ggml_sched.planning.plan import Plan

__all__ = ["Fetched", "Fetches", "FetchingTrials"]

GIB = 1 << 30
NO_MEMORY = 1 << 62
"""The size of a buffer without memory in which stored weights have addresses for planning."""
ROUNDS = 8
"""The most rounds of choosing weights and planning the graphs; a round counts the arenas of the round before."""
EXPERTS = {"MUL_MAT_ID": 0, "ADD_ID": 1}
"""{op that reads some experts of a weight: the slot of the weight}."""


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
class Fetched:
    """A placement with fetched weights that was planned for real."""

    trial: Trial
    """The arena of the host has the bytes that the store takes, too; residents in the store take none."""
    residents: Mapping[str, int]
    """{weight or cache: index of its device}; those in the store are on the host."""
    nodes: Sequence[Mapping[Tensor, int]] | None
    choice: Choice
    rows: tuple[str, ...]
    """The weights in the store of which nodes read single rows, or nothing."""
    more: Choice
    """The choice with 1 GiB more on the host."""

    @property
    def seconds(self) -> float:
        return self.trial.seconds


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
        self.uses, self.rows, self.has_experts = self._uses(reads)
        self._curve = self._least(reads)

    # -- which weights, and at what price --------------------------------------------------

    def _uses(self, reads: Sequence[Sequence[Read]]) -> tuple[tuple[Use, ...], frozenset[str], bool]:
        """(The weights that nodes read as a whole, in the order of the first graph; those of which nodes read single
        rows or nothing; whether there are weights of experts, which are neither).  `reads`: those of each graph."""
        model = self.model
        counts = most_whole_reads(reads)
        experts = {read.source.root.name for graph in reads for read in graph if EXPERTS.get(read.node.op) == read.slot}
        weights = [name for name in (*counts, *(name for name in model.sizes if name not in counts))
                   if model.kinds[name] == "weight" and name not in experts]
        margin = self.disk.backend.margin
        whole = tuple(Use(name, self._size(name), self._size(name, margin), counts[name]) for name in weights
                      if counts.get(name))
        return whole, frozenset(weights).difference(use.name for use in whole), bool(experts)

    def _size(self, name: str, margin: int = 0) -> int:
        """The bytes of a weight on the host; with the `margin` of a store, those of a fetched copy of it."""
        alignment = self.model.devices[self.host].alignment
        return -(-(self.model.bytes_on(self.host, name) + margin) // alignment) * alignment

    def _least(self, reads: Sequence[Sequence[Read]]) -> tuple[list[float], list[float]]:
        """(Bytes, seconds): the corners of `least`; `reads`: those of each graph."""
        cost: dict[str, float] = {}
        for graph, weight in zip(reads, self.model.weights, strict=True):
            most: dict[str, int] = {}
            for read in graph if weight else ():
                if read.is_whole:
                    name = read.source.root.name
                    most[name] = max(most.get(name, 0), read.source.nbytes)
            for name, nbytes in most.items():
                cost[name] = cost.get(name, 0.0) + weight * (self.disk.launch + nbytes / self.disk.bandwidth)
        sizes = {name: self._size(name) for name in (*self.rows, *(use.name for use in self.uses))}
        order = sorted((name for name in sizes if sizes[name]), key=lambda name: cost.get(name, 0.0) / sizes[name])
        return ([0.0, *np.cumsum([sizes[name] for name in order]).tolist()],
                [0.0, *np.cumsum([cost.get(name, 0.0) for name in order]).tolist()])

    def may_fetch(self, name: str) -> bool:
        """Whether a weight or cache may be in the store."""
        return name in self.rows or any(use.name == name for use in self.uses)

    @property
    def most(self) -> int:
        """Bytes of all weights that may be in the store."""
        return int(self._curve[0][-1])

    def least(self, nbytes: float) -> float:
        """The seconds of the goal that fetches take at least where weights of so many bytes are in the store."""
        return float(np.interp(nbytes, *self._curve)) * (1 - 1e-12)

    def within(self, seconds: float) -> int:
        """The most bytes of weights in the store for which `least` is at most so many seconds."""
        nbytes, costs = self._curve
        k = int(np.searchsorted(costs, seconds, "right"))
        if k == len(costs):
            return self.most
        part = (seconds - costs[k - 1]) / (costs[k] - costs[k - 1])
        return int(nbytes[k - 1] + part * (nbytes[k] - nbytes[k - 1]))

    def worth(self, found: Fetched) -> float:
        """The seconds that a byte less in the store is worth in a placement; 0 where nothing waits for fetches."""
        pairs = zip(self.model.weights, found.trial.prices, strict=True)
        if not any(weight * price.stalled for weight, price in pairs):
            return 0.0
        nbytes, costs = self._curve
        stored = sum(self._size(name) for name in (*found.rows, *(use.name for use in found.choice.fetched)))
        k = min(max(1, int(np.searchsorted(nbytes, stored))), len(nbytes) - 1)
        return (costs[k] - costs[k - 1]) / (nbytes[k] - nbytes[k - 1])

    # -- real plans ---------------------------------------------------------------------

    def place(self, residents: Mapping[str, int],
              nodes: Sequence[Mapping[Tensor, int]] | None) -> Fetched | None:
        """The placement with as few weights of the host in the store as its budget allows; None where even the fewest
        that stay exceed it, or where another device lacks room."""
        residents = {**self.model.unread, **residents}
        budget = self.model.devices[self.host].budget
        uses, rows, fixed = self._on_host(residents)
        choice, best = least_choice(uses), None
        tried: set[Choice] = set()
        # Beside the window the arena is a little larger or smaller with other weights in the store.
        for _ in range(ROUNDS):
            tried.add(choice)
            found = self.run(residents, nodes, choice, rows)
            if found is None or any(size for d, size in enumerate(found.missing) if d != self.host):
                return best
            beside = found.arenas[self.host] - choice.window
            if found.residents[self.host] + found.arenas[self.host] <= budget:
                if best is None or choice.seconds < best.choice.seconds:
                    more = self._choice(uses, budget + GIB - fixed - beside)
                    best = Fetched(found, residents, nodes, choice, tuple(sorted(rows)), more)
            elif best is None:
                return None
            choice = self._choice(uses, budget - fixed - beside)
            if choice in tried:
                return best
        return best

    def least_bytes(self, residents: Mapping[str, int],
                    nodes: Sequence[Mapping[Tensor, int]] | None) -> tuple[int, int] | None:
        """(The bytes that the host needs at least for this placement, those of all arenas); None where another device
        lacks room."""
        residents = {**self.model.unread, **residents}
        uses, rows, _ = self._on_host(residents)
        found = self.run(residents, nodes, least_choice(uses), rows)
        if found is None or any(size for d, size in enumerate(found.missing) if d != self.host):
            return None
        return found.residents[self.host] + found.arenas[self.host], sum(found.arenas)

    def _on_host(self, residents: Mapping[str, int]) -> tuple[list[Use], list[str], int]:
        """(Uses of the weights on the host, those that are always in the store, bytes of all else on the host)."""
        uses = [use for use in self.uses if residents[use.name] == self.host]
        rows = [name for name in self.rows if residents[name] == self.host]
        known = {*rows, *(use.name for use in uses)}
        fixed = sum(self._size(name) for name, d in residents.items() if d == self.host and name not in known)
        return uses, rows, fixed

    def _choice(self, uses: Sequence[Use], room: int) -> Choice:
        return choose(uses, room) or least_choice(uses)

    def again(self, found: Fetched) -> Trial:
        """The plans of a placement, made once more."""
        made = self.run(found.residents, found.nodes, found.choice, found.rows)
        assert made is not None
        return made

    def of(self, residents: Mapping[str, int], nodes: Sequence[Mapping[Tensor, int]] | None,
           names: Collection[str]) -> Trial | None:
        """The plans with exactly these of the host's weights fetched; None where a backend does not support a node."""
        uses, rows, _ = self._on_host(residents)
        return self.run(residents, nodes, chosen(uses, names), rows)

    def run(self, residents: Mapping[str, int], nodes: Sequence[Mapping[Tensor, int]] | None, choice: Choice,
            rows: Collection[str]) -> Trial | None:
        """Plan all graphs with the weights of a choice, and those in `rows`, in the store; None where a backend does
        not support a node that is assigned to it."""
        model, n = self.model, len(self.model.devices)
        stored = {*rows, *(use.name for use in choice.fetched)}
        held = [0] * n
        for name, d in residents.items():
            held[d] += 0 if name in stored else model.bytes_on(d, name)
        policy = Policy(windows=(0,) * n + (choice.window,))
        try:
            plans = [self._plan(g, residents, None if nodes is None else nodes[g], stored, policy)
                     for g in range(len(model.graphs))]
        except (UnsupportedOp, PlacementError):
            return None
        sizes = [[plan.buffer_sizes[k] + plan.work_sizes[k] for k in range(n + 1)] for plan in plans]
        store, *arenas = [max(of) for of in zip(*sizes, strict=True)]
        # The store's arena and work memory need not be largest for the same graph: load gives it both.
        store = max(plan.buffer_sizes[0] for plan in plans) + max(plan.work_sizes[0] for plan in plans)
        arenas[self.host] += store + max(model.backends[self.host].host_work(graph.nodes) for graph in model.graphs)
        missing = tuple(max(0, h + a - device.budget)
                        for h, a, device in zip(held, arenas, model.devices, strict=True))
        prices = tuple(self._folded(pricer.price(plan)) for pricer, plan in zip(self._pricers, plans, strict=True))
        seconds = sum(weight * price.seconds for weight, price in zip(model.weights, prices, strict=True) if weight)
        splits = sum(plan.data.n_splits for weight, plan in zip(model.weights, plans, strict=True) if weight)
        return Trial(tuple(held), tuple(arenas), missing, prices, seconds, splits, nodes is not None, tuple(plans))

    def _folded(self, price: Price) -> Price:
        """The price with the seconds of the rows that the store reads among those of the host."""
        *compute, rows = price.compute
        compute[self.host] += rows
        return replace(price, compute=tuple(compute))

    def _plan(self, g: int, residents: Mapping[str, int], nodes: Mapping[Tensor, int] | None, stored: Collection[str],
              policy: Policy) -> Plan:
        """The plan of graph number g: a node that reads a whole weight of the store is on the host, whatever `nodes`,
        the devices of the assigned nodes, have for it; the store reads single rows."""
        model = self.model
        self._move(model.tensors[g], residents, stored)
        assigned = {}
        for node in model.facts[g].nodes:
            read = [s.root.name for s in node.src if s is not None and s.root.name in stored and s.root.resident]
            if fits(node) and node.src[0].root.name in read:
                continue
            if read or nodes is not None and node in nodes:
                assigned[node] = model.backends[self.host if read or nodes is None else nodes[node]]
        request = Request(model.graphs[g], self._core, assigned)
        return Plan(model.graphs[g], make_plan(request, policy), self._order, "default", assigned_by="the placement")

    def _move(self, tensors: Mapping[str, Tensor], residents: Mapping[str, int], stored: Collection[str]) -> None:
        """Give the residents of a graph addresses on their devices or in the store, in buffers without memory."""
        buffers: dict[tuple[object, bool], Buffer] = {}
        for name, t in tensors.items():
            backend = self._order[0] if name in stored else self.model.backends[residents[name]]
            key = backend, t.resident == "weight"
            if key not in buffers:
                buffers[key] = Buffer(backend, NO_MEMORY, usage="weights" if key[1] else "any")
            bind_resident(t, buffers[key], 0)


class FetchingTrials:
    """Trials of a model beside a placement with fetched weights: what such a trial moves to the host is fetched, too.

    `residents`: {weight or cache: index of its device}, and `names`: the fetched weights of that placement.
    """

    def __init__(self, model: Trials, link: LinkLike, residents: Mapping[str, int], names: Collection[str]) -> None:
        self.devices, self.facts, self.weights, self.graphs = model.devices, model.facts, model.weights, model.graphs
        self.bytes_on = model.bytes_on
        self._fetches = Fetches(model, link)
        self._before, self._names = residents, names

    def run(self, residents: Mapping[str, int], nodes: Sequence[Mapping[Tensor, int]] | None = None) -> Trial:
        """As `Trials.run`; PlacementError where a backend does not support a node that is assigned to it."""
        host = self._fetches.host
        came = {name for name, d in residents.items() if d == host and self._before[name] != host}
        found = self._fetches.of(residents, nodes, {*self._names, *came})
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
