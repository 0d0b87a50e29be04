"""Tables: from graphs and devices to the chain that the solver reads, and from its solution back to tensors.

A chain has a stage for every stage of every model, model after model, and a table for every class of stages.  A state
is a device for each graph that counts in the goal (its weight is not 0); a model begins and ends in state 0, which is
the host for each.  `Tables` depends on graphs, devices and the goal alone.  The chains of one search differ in the
devices that may hold caches, the bytes of arenas, and the devices of residents that several stages read: these only
select among the patterns, which costs little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from operator import or_
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ggml_sched._graph import Tensor
from ggml_sched.backend import same_layout
from ggml_sched.errors import PlacementError
from ggml_sched.placement.atoms import FEW_ATOMS, MAX_ATOMS, Atoms, find_atoms
from ggml_sched.placement.chain import Chain, Choice, Solution
from ggml_sched.placement.costs import Costs, Machine, costs, needs, undominated, where
from ggml_sched.placement.devices import Device, Links
from ggml_sched.placement.facts import Facts
from ggml_sched.placement.outline import GLOBAL, Outline, Shared, outline, places_of, shared_values
from ggml_sched.placement.patterns import Sites, patterns, sites
from ggml_sched.placement.stages import Model, find_models, large_bytes
from ggml_sched.placement.wiring import Wiring
from ggml_sched.threads.cached import cached_property

__all__ = ["Assignment", "TableChain", "Tables"]

_MAX_STATES = 27        # up to so many combinations of devices, as of three graphs on three devices, all are states
_MAX_STREAM_TO = 4      # the most devices that weights may be streamed to
_MAX_READERS = 8        # the most sets of stages that read the same inputs with caches
_MAX_COPIED = 2         # the most other inputs of which a case says to which devices they are copied


@dataclass(frozen=True)
class Assignment:
    """The devices, as indices, on which a solution has residents and nodes."""

    residents: dict[str, int]
    """{name of a weight or cache: device}."""
    nodes: tuple[dict[Tensor, int], ...]
    """For each graph {node: device}, of all nodes that are no views."""
    streamed: tuple[tuple[str, ...], ...]
    """For each graph the names of the weights that nodes of another device read."""


@dataclass(frozen=True, eq=False)
class TableChain(Chain):
    """A chain whose tables have only some patterns of each class, and which patterns and variants these are."""

    rows: tuple[NDArray[np.intp], ...] = field(default=())
    """For each class: for each row of the chain's table the index of its pattern among all patterns of the class."""
    variants: tuple[tuple[NDArray[np.int16], ...], ...] = field(default=())
    """For each class, for each of its graphs that count in the goal, the variant [all patterns, device of the incoming
    activation, device of the activation passed on]."""
    caches: tuple[bool | None, ...] = field(default=())
    """The entries of `Case.caches`."""


@dataclass(frozen=True, eq=False)
class Lasting:
    """Inputs that the same stages with caches read: their copies on a device last from the first of these stages with
    caches there to the last."""

    model: int
    stages: frozenset[int]
    """The stages of the model that read all of these inputs."""
    inputs: tuple[frozenset[int], ...]
    """For each graph the ids of the inputs that all of these stages read."""
    classes: tuple[bool, ...]
    """For each class of stages whether it reads these inputs."""


_Kept: TypeAlias = tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.int64], tuple[NDArray[np.int16], ...]]
"""The table of one class for a chain, as `Tables._table` returns it."""
Within: TypeAlias = tuple[int, int] | None
"""(Index of inputs in `Tables.lasting`, a device other than the host); None: none."""


@dataclass(frozen=True, eq=False)
class _Class:
    """What stages of one class share."""

    model: int
    outline: Outline
    atoms: Atoms
    rules: tuple[Sites, ...]
    patterns: NDArray[np.int8]      # the device of each atom without a pin [patterns, such atoms]
    devices: NDArray[np.int8]       # the device of each atom [patterns, atoms], pinned ones included
    memory: NDArray[np.int64]       # bytes of residents [patterns, devices]
    ins: tuple[int, ...]            # devices that the activation from the stage before may be on
    active: tuple[int, ...]         # graphs that count in the goal, as indices into the model's graphs
    costs: tuple[Costs, ...]        # of the active graphs
    held_back: NDArray[np.float64]  # [sets of `Tables.readers`, devices] seconds of the stage's part of the copies of
                                    # `_held_back` inputs, if its caches are there
    needs: NDArray[np.int64]        # [patterns, devices] bytes that an arena has to hold, whichever the variant


class Tables:
    """The stages of some graphs, and the costs of every pattern of every class of stages.

    `graphs`: the facts of every graph that will run; `weights`: for each graph its weight in the goal, 0 if only its
    memory counts.  `devices`: exactly one is a host.  `stream`: for each graph whether weights on the host may be
    streamed to another device.  `pins`: {name of a resident: index of its device}.

    Raises ValueError for lengths that differ, a weight that is infinite or below 0, weights that are all 0,
    devices without a host or with several; GraphError for residents without a name, or of one name and different sizes;
    PlacementError for a pin to a device that does not exist.
    """

    def __init__(self, graphs: Sequence[Facts], weights: Sequence[float], devices: Sequence[Device], links: Links,
                 stream: Sequence[bool] | None = None, pins: Mapping[str, int] | None = None) -> None:
        stream = [False] * len(graphs) if stream is None else stream
        self.graphs: tuple[Facts, ...] = tuple(graphs)
        self.devices: tuple[Device, ...] = tuple(devices)
        self.links: Links = links
        self.weights: tuple[float, ...] = tuple(float(weight) for weight in weights)
        self.pins: dict[str, int] = dict(pins or {})
        self._check(stream)
        self._stream: list[bool] = [bool(flag) for flag in stream]
        self._host = next(i for i, device in enumerate(devices) if device.host)
        self._machine = Machine(len(devices), self._host, np.array([device.split for device in devices]), links)
        self._wirings = [Wiring(of) for of in graphs]
        self.models: tuple[Model, ...] = tuple(find_models(self._wirings))
        self._seconds = [np.array([of.seconds(device) for device in devices]).reshape(len(devices), len(of.nodes)).T
                         for of in graphs]
        self.residents: dict[str, int] = {name: int(w.nbytes[i]) for w in self._wirings
                                          for i, name in w.residents.items()}
        """{name: bytes} of all residents that nodes read or write."""
        self.readers: tuple[tuple[bool, ...], ...] = ()
        """Sets of stages that read the same inputs with caches: for each set, for each class of stages whether it is in
        the set.  The first set has all stages with caches."""
        self.copied: tuple[tuple[int, int], ...] = ()
        """(Graph, id of an input) of the dearest inputs that several stages read, also with nodes without caches."""
        self.shared: tuple[tuple[str, ...], ...] = ()
        """The names of residents that several stages read, in groups: all residents of a group are read by the same
        stages, and are on one device."""
        self.states: tuple[tuple[int, ...], ...] = self._states(stream)
        """For each state, for each graph that counts in the goal, the device of the activation that passes from one
        stage to the next."""
        self._stream_to = self._find_stream_to()
        self._reusing: dict[str, int] = {}      # {op: bits of the sources whose memory some device may reuse}
        self._sizes: dict[tuple[str, int], int] = {}
        self._shared_values: dict[int, Shared] = {}
        self._outlines: list[Outline] = []
        self._of_stage: list[tuple[int, int]] = []      # (model, stage of the model)
        self.classes: tuple[int, ...] = ()
        """The class of each stage of the chain."""
        self._classes: tuple[_Class, ...] = self._find_classes(stream)
        self._within: dict[int, tuple[tuple[NDArray[np.int64], ...], ...]] = {}
        self._kept: dict[tuple[object, ...], _Kept] = {}
        self._known: dict[tuple[int, int], tuple[NDArray[np.float64], NDArray[np.int64], Any]] = {}

    # -- making ---------------------------------------------------------------------------

    def _check(self, stream: Sequence[bool]) -> None:
        if not len(self.graphs) == len(self.weights) == len(stream):
            raise ValueError(f"{len(self.graphs)} graphs, {len(self.weights)} weights and {len(stream)} entries of "
                             "`stream`")
        if not self.graphs:
            raise ValueError("no graphs")
        for weight in self.weights:
            if not 0 <= weight < np.inf:
                raise ValueError(f"the weight of a graph is {weight}; weights are finite numbers from 0 on")
        if not any(self.weights):
            raise ValueError("no graph has a weight in the goal")
        hosts = [device.name for device in self.devices if device.host]
        if len(hosts) != 1:
            raise ValueError(f"{len(hosts)} hosts among the devices{': ' * bool(hosts)}{', '.join(hosts)}; there must "
                             "be one, because inputs start there")
        if len(self.devices) > 127:
            raise ValueError(f"{len(self.devices)} devices; 127 are the limit")
        for name, device in self.pins.items():
            if not 0 <= device < len(self.devices):
                raise PlacementError(f"{name!r} is pinned to device {device}; there are {len(self.devices)}")

    def _states(self, stream: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
        """The combinations of devices for the graphs of one model that count in the goal.

        If these are more than `_MAX_STATES`, only two kinds of them: one device for all graphs; or one device for all
        graphs that stream weights, and the host for all others.
        """
        streams = max(([bool(stream[g]) for g in model.graphs if self.weights[g]] for model in self.models), key=len)
        order = [self._host, *(d for d in range(len(self.devices)) if d != self._host)]
        if len(order) ** len(streams) <= _MAX_STATES:
            return tuple(product(order, repeat=len(streams)))
        found = [(d,) * len(streams) for d in order]
        found += [tuple(d if streamed else self._host for streamed in streams) for d in order]
        return tuple(dict.fromkeys(found))

    def _find_stream_to(self) -> list[int]:
        """The devices that weights may be streamed to: all but the host, or the fastest `_MAX_STREAM_TO` of them."""
        others = [d for d in range(len(self.devices)) if d != self._host]
        return sorted(sorted(others, key=lambda d: -self.devices[d].flops)[:_MAX_STREAM_TO])

    def _reuses(self, node: Tensor) -> bool:
        """Whether some device may compute a node into the memory of a source, which then has the node's layout."""
        slots = self._reusing.get(node.op)
        if slots is None:
            slots = self._reusing[node.op] = reduce(or_, (device.backend.inplace_sources(node.op)
                                                          for device in self.devices))
        return any(slots >> k & 1 and source is not None and same_layout(node, source)
                   for k, source in enumerate(node.src)) if slots else False

    def _find_classes(self, stream: Sequence[bool]) -> tuple[_Class, ...]:
        """The classes of stages of all models; also sets the class and the outline of each stage."""
        classes: dict[tuple[object, ...], int] = {}
        first: list[tuple[int, int]] = []       # of each class its first stage: (model, index of the outline)
        of_stage: list[int] = []
        large: list[int] = []
        for m, model in enumerate(self.models):
            wirings = [self._wirings[g] for g in model.graphs]
            for g in model.graphs:
                passed = [w.root[i] for stage in model.stages for i in (stage.incoming[model.graphs.index(g)],)
                          for w in (self._wirings[g],) if i >= 0]
                self._shared_values[g] = shared_values(self._wirings[g], model.stage_of[model.graphs.index(g)], passed)
            groups = self._share(model, wirings)
            names = {name for w in wirings for name in w.residents.values()}
            large.append(large_bytes(sum(self.residents[name] for name in names)))
            places = [places_of(model, n) for n in range(len(wirings))]
            counted: set[str] = set()
            for k in range(len(model.stages)):
                made = outline(wirings, model, k, [self._shared_values[g] for g in model.graphs], places, groups,
                               counted, self.pins, self._reuses)
                key = (m, made.key)
                if key not in classes:
                    classes[key] = len(first)
                    first.append((m, len(self._outlines)))
                of_stage.append(classes[key])
                self._outlines.append(made)
                self._of_stage.append((m, k))
        self.classes = tuple(of_stage)
        prepared = []
        # Routers that are atoms of their own multiply the patterns: with two devices, which give few, more may be.
        most = MAX_ATOMS if len(self.devices) == 2 else FEW_ATOMS
        for m, k in first:
            atoms = find_atoms(self._outlines[k], large[m], most)
            prepared.append((m, k, self._outlines[k], atoms, sites(self._outlines[k], atoms)))
        self._held = self._held_back(prepared)
        self._set_readers(prepared)
        self._set_copied()
        return tuple(self._class(*each, self._held, stream) for each in prepared)

    def _share(self, model: Model, wirings: Sequence[Wiring]) -> dict[str, int]:
        """{name: index of its group in `self.shared`} of the residents that several stages read; adds the groups."""
        stages: dict[str, set[int]] = {}
        for w, of in zip(wirings, model.stage_of, strict=True):
            for i, sources in enumerate(w.sources):
                for s in (*sources, w.ids[i]):
                    name = w.residents.get(w.root[s])
                    if name is not None:
                        stages.setdefault(name, set()).add(of[i])
        alike: dict[tuple[int, ...], list[str]] = {}
        for name, at in stages.items():
            if len(at) > 1:
                alike.setdefault(tuple(sorted(at)), []).append(name)
        groups = {name: len(self.shared) + i for i, names in enumerate(alike.values()) for name in names}
        self.shared += tuple(tuple(names) for names in alike.values())
        return groups

    def _held_back(self, prepared: Sequence[tuple[int, int, Outline, Atoms, list[Sites]]]) -> list[set[int]]:
        """For each graph the inputs that several stages read, if every node that reads them is on the device of the
        caches under every rule."""
        found = [set(self._shared_values[g].stages) for g in range(len(self.graphs))]
        for m, _, made, atoms, rules in prepared:
            for n, g in enumerate(self.models[m].graphs):
                nodes = made.graphs[n]
                shared = {v: value.number for v, value in enumerate(nodes.values) if value.origin == GLOBAL}
                for i, reads in enumerate(nodes.reads):
                    for v in reads:
                        if v in shared and any(rule[n][i] != atoms.cache for rule in rules):
                            found[g].discard(shared[v])
        return found

    def _set_readers(self, prepared: Sequence[tuple[int, int, Outline, Atoms, list[Sites]]]) -> None:
        """Find `readers`, and the seconds of copying the inputs of each set to each device once for each graph, times
        its weight.  Inputs of further sets than `_MAX_READERS` are no longer held back."""
        reading: dict[tuple[int, int], set[int]] = {}
        for c, (m, _, made, _, _) in enumerate(prepared):
            for n, g in enumerate(self.models[m].graphs):
                for value in made.graphs[n].values:
                    if value.origin == GLOBAL and value.number in self._held[g]:
                        reading.setdefault((g, value.number), set()).add(c)
        first = frozenset(c for c, (_, _, made, _, _) in enumerate(prepared)
                          if any(resident.cache for resident in made.residents))
        prices = {first: np.zeros(len(self.devices))}
        for (g, s), classes in reading.items():
            price = prices.setdefault(frozenset(classes), np.zeros(len(self.devices)))
            price += self._price_of_input(g, s)
        order = [first, *sorted((of for of in prices if of != first), key=lambda of: (-prices[of].max(), sorted(of)))]
        self._sets = {of: number for number, of in enumerate(order[:_MAX_READERS])}
        self._set_of = {}
        for (g, s), classes in reading.items():
            number = self._sets.get(frozenset(classes))
            if number is None:
                self._held[g].discard(s)
            else:
                self._set_of[g, s] = number
        self._inputs: NDArray[np.float64] = np.array([prices[of] for of in self._sets])
        self.readers = tuple(tuple(c in of for c in range(len(prepared))) for of in self._sets)

    def _set_copied(self) -> None:
        """Find `copied`, and the price of an entry of `Case.caches`: the seconds of one copy, or of one copy of each
        input of a set, times the weight of the graph."""
        prices = {(g, s): self._price_of_input(g, s) for g, weight in enumerate(self.weights) if weight
                  for s, stages in self._shared_values[g].stages.items() if stages > 1 and s not in self._held[g]}
        self.copied = tuple(sorted(prices, key=lambda of: (-prices[of].max(), of))[:_MAX_COPIED])
        self._prices = np.concatenate([self._inputs, *(prices[of][None] for of in self.copied)]).reshape(-1)

    def _price_of_input(self, g: int, s: int) -> NDArray[np.float64]:
        """Seconds to copy an input of graph g to each device, times the weight of the graph [devices]."""
        found: NDArray[np.float64] = self.weights[g] * (
            self.links.latency[self._host] + self.links.per_byte[self._host] * int(self._wirings[g].nbytes[s]))
        return found

    def _class(self, m: int, k: int, made: Outline, atoms: Atoms, rules: list[Sites], held: Sequence[set[int]],
               stream: Sequence[bool]) -> _Class:
        model, stage = self.models[m], self._of_stage[k][1]
        found = patterns(atoms.free, len(self.devices), self._host)
        pinned = [pin for pin in atoms.pins if pin >= 0]
        devices = np.concatenate([found, np.tile(np.array(pinned, np.int8), (len(found), 1))], axis=1)
        ins = (self._host,) if made.first else tuple(range(len(self.devices)))
        active = tuple(n for n, g in enumerate(model.graphs) if self.weights[g])
        made_costs = []
        back = np.zeros_like(self._inputs)
        for n in active:
            g = model.graphs[n]
            shared = self._shared_values[g].stages
            parts = {s: 0.0 if s in held[g] else 1 / stages for s, stages in shared.items()}
            seconds = self._seconds[g][model.stages[stage].nodes[n]]
            copied = [s for of, s in self.copied if of == g]
            made_costs.append(costs(made.graphs[n], [rule[n] for rule in rules], made, atoms, found, ins, seconds,
                                    self._machine, parts, self._stream_to if stream[g] else (), copied))
            for s in {value.number for value in made.graphs[n].values if value.origin == GLOBAL} & held[g]:
                back[self._set_of[g, s]] += self._price_of_input(g, s) / shared[s]
        if made_costs:
            # Graphs of weight 0 follow the rule of the first active graph, whose variants need the arenas of all these.
            shape = (len(found), len(ins))
            at = where(found, atoms, ins, self._host)
            for n in range(len(model.graphs)):
                if n not in active:
                    for r, rule in enumerate(rules):
                        need = needs(made.graphs[n], rule[n], at, shape, len(self.devices),
                                     native=at if stream[model.graphs[n]] else None)
                        for v in np.flatnonzero(np.array(made_costs[0].rule) == r):
                            np.maximum(made_costs[0].needs[v], need, out=made_costs[0].needs[v])
        least: NDArray[np.int64] = np.zeros((len(found), len(self.devices)), np.int64)
        for cost in made_costs:
            np.maximum(least, cost.needs.min(axis=(0, 2)), out=least)
        return _Class(m, made, atoms, tuple(rules), found, devices, self._memory(made, devices, atoms), ins, active,
                      tuple(made_costs), back, least)

    def _memory(self, made: Outline, devices: NDArray[np.int8], atoms: Atoms) -> NDArray[np.int64]:
        """Bytes of the residents that this class counts, aligned [patterns, devices]."""
        total = np.zeros((len(devices), len(self.devices)), np.int64)
        for d in range(len(self.devices)):
            for a, members in enumerate(atoms.members):
                nbytes = sum(self._aligned(made.names[r], d) for r in members if made.residents[r].counted)
                total[:, d] += np.where(devices[:, a] == d, nbytes, 0)
        return total

    def _aligned(self, name: str, d: int) -> int:
        """Bytes that a resident takes on device `d`, aligned."""
        found = self._sizes.get((name, d))
        if found is None:
            w, i = next((w, w.by_name[name]) for w in self._wirings if name in w.by_name)
            backend = self.devices[d].backend
            nbytes = backend.alloc_size(w.facts.graph.tensors[i])
            found = self._sizes[name, d] = -(-nbytes // backend.alignment) * backend.alignment
        return found

    # -- chains ---------------------------------------------------------------------------

    @property
    def needs(self) -> tuple[NDArray[np.int64], ...]:
        """For each class the bytes that arenas have to hold at least [patterns, devices], whichever the variant."""
        return tuple(each.needs for each in self._classes)

    @cached_property
    def levels(self) -> tuple[NDArray[np.int64], ...]:
        """For each device all numbers of bytes that some variant of a pattern needs of its arena, each once, rising."""
        found = [cost.needs.reshape(-1, len(self.devices)) for each in self._classes for cost in each.costs]
        return tuple(np.unique(np.concatenate([needs[:, d] for needs in found])) for d in range(len(self.devices)))

    @cached_property
    def cached(self) -> tuple[int, ...]:
        """For each device the bytes that its arena has to hold at least if three or more stages have caches there.

        Copies of the inputs that all stages with caches read are alive from the first of the stages with caches there
        to the last, so also while a stage between them runs.  0 for the host, and if the model has fewer such stages.
        """
        found = []
        for m, model in enumerate(self.models):
            classes = [each for each in self._classes if each.model == m and self._caches(each).any()]
            count = sum(self._caches(self._classes[c]).any() for (of, _), c in zip(self._of_stage, self.classes,
                                                                                  strict=True) if of == m)
            for n, g in enumerate(model.graphs):
                lasting = frozenset(s for s in self._held[g] if self._shared_values[g].stages[s] == count)
                least = np.full(len(self.devices), np.inf)
                for each in classes if count >= 3 else ():
                    shape, there = (len(each.patterns), len(each.ins)), self._caches(each)
                    at = where(each.patterns, each.atoms, each.ins, self._host)
                    for rule in each.rules:
                        need = needs(each.outline.graphs[n], rule[n], at, shape, len(self.devices), lasting,
                                     at if self._stream[g] else None).min(1)
                        least = np.minimum(least, np.where(there, need, np.inf).min(0))
                found.append(np.where(np.isfinite(least), least, 0))
        most = np.max(found, axis=0).astype(np.int64)
        most[self._host] = 0
        return tuple(most.tolist())

    @cached_property
    def lasting(self) -> tuple[Lasting, ...]:
        """The sets of inputs whose copies last through several stages, those that the most stages read first."""
        found: dict[tuple[int, frozenset[int]], None] = {}
        for m, model in enumerate(self.models):
            for g in model.graphs:
                for s in self._held[g]:
                    stages = self._shared_values[g].readers[s]
                    if len(stages) > 1 and self._wirings[g].nbytes[s]:
                        found[m, stages] = None
        made = []
        for m, stages in sorted(found, key=lambda key: (key[0], -len(key[1]), sorted(key[1]))):
            inputs = [frozenset(s for s in held if g in self.models[m].graphs
                                and stages <= self._shared_values[g].readers[s]) for g, held in enumerate(self._held)]
            classes = {c for (of, k), c in zip(self._of_stage, self.classes, strict=True) if of == m and k in stages}
            made.append(Lasting(m, stages, tuple(inputs), tuple(c in classes for c in range(len(self._classes)))))
        return tuple(made)

    def _needs_within(self, number: int) -> tuple[tuple[NDArray[np.int64], ...], ...]:
        """For each class, for each graph that counts in the goal, the bytes that arenas have to hold in a stage while
        copies of the inputs `lasting[number]` are alive before and after it [variants, patterns, in, devices]."""
        found = self._within.get(number)
        if found is None:
            found = self._within[number] = tuple(self._class_within(each, self.lasting[number])
                                                 for each in self._classes)
        return found

    def _class_within(self, each: _Class, lasting: Lasting) -> tuple[NDArray[np.int64], ...]:
        """`_needs_within` of one class."""
        if each.model != lasting.model or not each.costs:
            return tuple(cost.needs for cost in each.costs)
        there = self._caches(each)
        shape, graphs = (len(each.patterns), len(each.ins)), self.models[each.model].graphs
        at, others = where(each.patterns, each.atoms, each.ins, self._host), np.arange(len(self.devices)) != self._host
        found = [cost.needs.copy() for cost in each.costs]
        for n, g in enumerate(graphs):
            read = {value.number for value in each.outline.graphs[n].values if value.origin == GLOBAL}
            nbytes = {s: int(self._wirings[g].nbytes[s]) for s in lasting.inputs[g]}
            # A device without caches of the stage has copies of all these inputs; one with caches has them, too, and
            # `needs` counts those that the stage reads.
            more = np.where(there, sum(size for s, size in nbytes.items() if s not in read), sum(nbytes.values()))
            more = (more * others)[:, None, :]
            is_active = n in each.active
            own = each.active.index(n) if is_active else 0
            cost = each.costs[own]
            if is_active:
                found[own] += np.where(there, 0, more[:, 0])[:, None, :]
                if not there.any():
                    continue
            for r, rule in enumerate(each.rules):
                native = at if self._stream[g] and not is_active else None
                need = needs(each.outline.graphs[n], rule[n], at, shape, len(self.devices), lasting.inputs[g], native)
                need = np.where(others, need + more, 0)
                for v in range(len(cost.rule)):
                    if cost.rule[v] == r and (not is_active or cost.streams_to[v] < 0):
                        np.maximum(found[own][v], need, out=found[own][v])
        return tuple(found)

    @property
    def holds_caches(self) -> tuple[NDArray[np.bool_], ...]:
        """For each class whether a pattern has caches on a device [patterns, devices]."""
        return tuple(self._caches(each) for each in self._classes)

    def _caches(self, each: _Class) -> NDArray[np.bool_]:
        found = np.zeros((len(each.patterns), len(self.devices)), bool)
        for a, members in enumerate(each.atoms.members):
            if any(each.outline.residents[r].cache for r in members):
                found |= each.devices[:, a, None] == np.arange(len(self.devices))
        return found

    @property
    def reading(self) -> tuple[NDArray[np.bool_], ...]:
        """For each class whether a pattern has caches on a device while the class is in a set of `readers` [patterns,
        sets * devices], in the order of `Case.caches`."""
        return tuple(np.concatenate([there & of[c] for of in self.readers], 1)
                     for c, there in enumerate(self.holds_caches))

    @cached_property
    def implied(self) -> tuple[tuple[int, ...], ...]:
        """For each entry of `Case.caches` the others that are True if it is: those of sets of `readers` with all of its
        stages."""
        n = len(self.devices)
        wider = [[j for j, other in enumerate(self.readers) if j != i and all(there or not here for here, there in zip(
            of, other, strict=True))] for i, of in enumerate(self.readers)]
        return (*(tuple(j * n + d for j in of) for of in wider for d in range(n)), *((),) * (len(self.copied) * n))

    @property
    def n_sets(self) -> int:
        """The sets of entries of `Case.caches`, each with one for every device: those of `readers`, then `copied`."""
        return len(self.readers) + len(self.copied)

    @cached_property
    def _least_with_caches(self) -> NDArray[np.int64]:
        """For each entry of `Case.caches` of a set of `readers`, if it is True, the bytes that the arena of its device
        has to hold at least."""
        found = np.zeros((len(self.readers), len(self.devices)), np.int64)
        for i, of in enumerate(self.readers):
            least = np.full(len(self.devices), np.inf)
            for is_in, each, there in zip(of, self._classes, self.holds_caches, strict=True):
                if is_in:
                    np.minimum(least, np.where(there, each.needs, np.inf).min(0), out=least)
            found[i] = np.where(np.isfinite(least), least, 0)
        return found.reshape(-1)

    def floors(self, caches: Sequence[bool | None]) -> list[int]:
        """The bytes that the arena of each device has to hold at least where it has caches; `caches`: `Case.caches`."""
        least = np.where([held is True for held in caches[:len(self._least_with_caches)]], self._least_with_caches, 0)
        found: list[int] = least.reshape(len(self.readers), len(self.devices)).max(0).tolist()
        return found

    def caches_of(self, residents: Mapping[str, int],
                  nodes: Sequence[Mapping[Tensor, int]] | None = None) -> tuple[bool | None, ...]:
        """The entries of `Case.caches` for a placement; without `nodes`, which has the device of each node of each
        graph, None for `copied`."""
        n = len(self.devices)
        found = [False] * (n * len(self.readers))
        for c, made in zip(self.classes, self._outlines, strict=True):
            for name, resident in zip(made.names, made.residents, strict=True):
                for i, of in enumerate(self.readers):
                    found[i * n + residents[name]] |= of[c] and resident.cache
        if nodes is None:
            return (*found, *(None,) * (n * len(self.copied)))
        for g, s in self.copied:
            w = self._wirings[g]
            at = {nodes[g].get(w.facts.nodes[i]) for i, sources in enumerate(w.sources) if s in sources}
            found += [d in at for d in range(n)]
        return tuple(found)

    def chain(self, caches: Sequence[bool | None] | None = None, shared: Mapping[str, int] | None = None,
              limits: Sequence[float] | None = None, within: Sequence[tuple[int, int]] = ()) -> TableChain:
        """The chain of all placements that have no caches, or read no input, where `caches`, which is `Case.caches`, is
        False, have residents that several stages read on the devices of `shared` ({name: device}, one name for each
        group), and need arenas of at most `limits` bytes on each device.  `within`: inputs, as indices of `lasting`,
        and a device where their copies are alive before and after each stage.  Entries of `copied` may be left out of
        `caches`: they are None.

        These copies have a price: for each entry of `caches` that is True the start of the chain costs one copy; where
        it is None, or if `caches` is None, each stage of the set with caches on the device, or each stage that reads
        the input there, costs a part of the copy.
        A group that `shared` does not name may be on a different device in every stage, and its bytes count in the
        first stage alone: such a chain gives lower bounds only.

        A class without an allowed pattern has a single row of infinite cost.
        """
        n, entries = len(self.devices), self.n_sets * len(self.devices)
        if caches is not None and len(caches) == entries - n * len(self.copied):
            caches = (*caches, *(None,) * (n * len(self.copied)))
        if caches is not None and len(caches) != entries:
            raise ValueError(f"{len(caches)} entries of `caches` for {len(self.readers)} sets of stages, "
                             f"{len(self.copied)} inputs and {len(self.devices)} devices")
        if limits is not None and len(limits) != len(self.devices):
            raise ValueError(f"{len(limits)} limits for {len(self.devices)} devices")
        fixed = self._fixed(shared or {})
        rows, cost, memory, variants = [], [], [], []
        where_caches = (None,) * entries if caches is None else tuple(
            None if held is None else bool(held) for held in caches)
        for c, each in enumerate(self._classes):
            kept, table, taken, chosen = self._table(c, each, where_caches, fixed,
                                                     None if limits is None else tuple(limits), tuple(within))
            rows.append(kept)
            cost.append(table)
            memory.append(taken)
            variants.append(chosen)
        start = np.full(len(self.states), np.inf)
        start[0] = self._prices[[held is True for held in where_caches]].sum()
        return TableChain(self.classes, tuple(cost), tuple(memory), start, self.states, self._known, tuple(rows),
                          tuple(variants), where_caches)

    def _fixed(self, shared: Mapping[str, int]) -> dict[int, int]:
        """{index of a group in `self.shared`: its device}, from {name of a resident of the group: device}."""
        fixed: dict[int, int] = {}
        for name, device in shared.items():
            group = next((i for i, names in enumerate(self.shared) if name in names), None)
            if group is None:
                raise ValueError(f"{name!r} is not read in several stages")
            if not 0 <= device < len(self.devices):
                raise ValueError(f"{name!r} on device {device}; there are {len(self.devices)}")
            if fixed.setdefault(group, device) != device:
                raise ValueError(f"{name!r} and {self.shared[group][0]!r} are on one device, not on {device} and "
                                 f"{fixed[group]}")
        return fixed

    def _table(self, c: int, each: _Class, caches: tuple[bool | None, ...], fixed: Mapping[int, int],
               limits: tuple[float, ...] | None, within: Sequence[tuple[int, int]]) -> _Kept:
        """(The patterns of class `c` that no other beats; their seconds [patterns, states, states]; their bytes
        [patterns, devices]; for each graph that counts in the goal the variant of fewest seconds [all patterns, device
        of the incoming activation, device of the activation passed on]).  The other arguments are those of `chain`."""
        usable = np.ones(len(each.patterns), bool)
        n = len(self.devices)
        of = [i for i, readers in enumerate(self.readers) if readers[c]]    # other sets say nothing of this class
        closed = [any(caches[i * n + d] is False for i in of) for d in range(n)]
        usable &= ~self._caches(each)[:, closed].any(1)
        for r, resident in enumerate(each.outline.residents):
            if resident.shared in fixed:
                usable &= each.devices[:, each.atoms.of[r]] == fixed[resident.shared]
        most = np.inf if limits is None else np.array(limits)
        allowed = [np.asarray((cost.needs <= most).all(3)) for cost in each.costs]
        if limits is not None:
            for number, d in within:
                allowed = [mask & (needs[..., d] <= limits[d])
                           for mask, needs in zip(allowed, self._needs_within(number)[c], strict=True)]
        parts = tuple(held is None and i in of for i in range(len(self.readers)) for held in caches[i * n:(i + 1) * n])
        charged = [self._charged(each, j, caches) for j in range(len(each.costs))]
        for j, cost in enumerate(each.costs):
            for s, there in cost.reads.items():
                banned = [held is False for held in self._entries_of(each, j, s, caches)]
                if any(banned):
                    allowed[j] = allowed[j] & ~there[..., banned].any(3)
        key = (c, parts, *map(tuple, charged), usable.tobytes(), *(mask.tobytes() for mask in allowed))
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) > 256:
                self._kept.clear()
            found = self._kept[key] = self._make_table(each, parts, charged, usable, allowed)
        return found

    def _entries_of(self, each: _Class, j: int, s: int, caches: Sequence[bool | None]) -> Sequence[bool | None]:
        """For each device the entry of `caches` of an input of graph j of `_Class.active`, by id."""
        n = len(self.devices)
        at = len(self.readers) + self.copied.index((self.models[each.model].graphs[each.active[j]], s))
        return caches[at * n:(at + 1) * n]

    def _charged(self, each: _Class, j: int, caches: Sequence[bool | None]) -> list[tuple[int, int, float]]:
        """(Id of an input, device, seconds) for each input of graph j of `_Class.active` whose copy to the device is
        not decided: what each stage that reads it there costs more.  Of the host it is nothing."""
        g = self.models[each.model].graphs[each.active[j]]
        return [(s, d, float(self._price_of_input(g, s)[d]) / self.weights[g] / self._shared_values[g].stages[s])
                for s in each.costs[j].reads for d, held in enumerate(self._entries_of(each, j, s, caches))
                if held is None and d != self._host]

    def _make_table(self, each: _Class, parts: Sequence[bool], charged: Sequence[Sequence[tuple[int, int, float]]],
                    usable: NDArray[np.bool_], allowed: Sequence[NDArray[np.bool_]]) -> _Kept:
        """Make the result of `_table`.  `parts`: for each entry of `Case.caches` of a set of `readers` whether a stage
        of the set with caches on the device pays its part of copying the inputs; `charged`: for each graph those of
        `_charged`; `usable`: the patterns that may be used; `allowed`: for each graph the variants within the limits.
        """
        best, variants = [], []
        for cost, more, mask in zip(each.costs, charged, allowed, strict=True):
            taken = cost.seconds
            for s, d, part in more:
                taken = taken + part * cost.reads[s][..., d]
            seconds, chosen = self._best_variant(cost, taken, mask & usable[None, :, None])
            best.append(seconds)
            variants.append(chosen)
        n, s = len(each.patterns), len(self.states)
        model = self.models[each.model]
        ins = {d: i for i, d in enumerate(each.ins)}
        # No stage reads the last activation, so its device does not matter: a model ends in state 0.
        leave = [seconds.min(2, keepdims=True) for seconds in best] if each.outline.last else best
        total = np.full((n, s, s), np.inf)
        width = len(each.active)
        enter = [a for a, state in enumerate(self.states) if (a == 0 or not each.outline.first)
                 and all(d == self._host for d in state[width:])]
        exits = [b for b, state in enumerate(self.states) if (b == 0 or not each.outline.last)
                 and all(d == self._host for d in state[width:])]
        if width:
            grid = np.ix_(range(n), enter, exits)
            sums: NDArray[np.float64] = np.zeros((n, len(enter), len(exits)))
            for j, seconds in enumerate(leave):
                a = [ins[self.states[e][j]] for e in enter]
                b = [0 if each.outline.last else self.states[e][j] for e in exits]
                sums += self.weights[model.graphs[each.active[j]]] * seconds[np.ix_(range(n), a, b)]
            total[grid] = sums
        else:
            total[:, 0, 0] = np.where(usable, 0.0, np.inf)      # only the memory of this model counts
        if each.atoms.cache >= 0:
            paid = (each.held_back * np.reshape(parts, each.held_back.shape)).sum(0)
            total += paid[each.devices[:, each.atoms.cache]][:, None, None]
        kept = undominated(total, each.memory)
        return kept, np.ascontiguousarray(total[kept]), each.memory[kept], tuple(variants)

    def _best_variant(self, cost: Costs, taken: NDArray[np.float64],
                      mask: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.int16]]:
        """(The least seconds; the variant that has them, -1: none) [patterns, device of the incoming activation, device
        of the activation passed on].  `taken`: the seconds of the variants; `mask`: those that are allowed."""
        n, i = cost.seconds.shape[1:]
        every = np.ogrid[:n, :i]
        best = np.full((n, i, len(self.devices)), np.inf)
        chosen = np.full((n, i, len(self.devices)), -1, np.int16)
        for v in range(len(cost.rule)):
            seconds = np.where(mask[v], taken[v], np.inf)
            better = np.nonzero(seconds < best[(*every, cost.out[v])])
            to = (*better, cost.out[v][better])
            best[to], chosen[to] = seconds[better], v
        return best, chosen

    def needed(self, chain: TableChain, path: Sequence[Choice], within: Within = None) -> list[int]:
        """Bytes that the arena of each device has to hold at least for a path: the most that a stage needs in its
        variant.  `within`: inputs, and a device where their copies are alive between the first and the last stage that
        reads them there."""
        most: NDArray[np.int64] = np.zeros(len(self.devices), np.int64)
        for choice, c in set(zip(path, self.classes, strict=True)):
            each, row = self._classes[c], int(chain.rows[c][choice.pattern])
            for j, cost in enumerate(each.costs):
                variant, enters = self._variant(chain, each, c, row, choice, j)
                np.maximum(most, cost.needs[variant, row, enters], out=most)
        if within is not None:
            number, d = within
            reads = self.reads(number, d)
            at = [k for k, (choice, c) in enumerate(zip(path, self.classes, strict=True))
                  if reads[c][chain.rows[c][choice.pattern]]]
            inside = slice(at[0] + 1, at[-1]) if at else slice(0)
            for choice, c in set(zip(path[inside], self.classes[inside], strict=True)):
                each, row = self._classes[c], int(chain.rows[c][choice.pattern])
                for j, needs in enumerate(self._needs_within(number)[c]):
                    variant, enters = self._variant(chain, each, c, row, choice, j)
                    most[d] = max(most[d], needs[variant, row, enters, d])
        return [int(nbytes) for nbytes in most]

    def reads(self, number: int, d: int) -> tuple[NDArray[np.bool_], ...]:
        """For each class which of its patterns read the inputs `lasting[number]` on device d [all patterns]."""
        return tuple(there[:, d] & reads
                     for there, reads in zip(self.holds_caches, self.lasting[number].classes, strict=True))

    def unpaid(self, chain: TableChain, path: Sequence[Choice]) -> list[float]:
        """For each entry of `Case.caches` the seconds of one copy of the set's inputs to the device, less what the
        path's cost includes of them; 0 where the path has no caches of the set there, or does not read the input there.
        Valid for entries that are None in the chain's `caches`."""
        n = len(self.devices)
        paid: list[list[float]] = [[] for _ in self._prices]
        for choice, c in zip(path, self.classes, strict=True):
            each = self._classes[c]
            if each.atoms.cache >= 0:
                d = int(each.devices[chain.rows[c][choice.pattern], each.atoms.cache])
                for i, of in enumerate(self.readers):
                    if of[c]:
                        paid[i * n + d].append(float(each.held_back[i, d]))
            for j, cost in enumerate(each.costs):
                g = self.models[each.model].graphs[each.active[j]]
                variant, enters = self._variant(chain, each, c, int(chain.rows[c][choice.pattern]), choice, j)
                for s, there in cost.reads.items():
                    at = (len(self.readers) + self.copied.index((g, s))) * n
                    for d in np.flatnonzero(there[variant, chain.rows[c][choice.pattern], enters]).tolist():
                        paid[at + d].append(float(self._prices[at + d]) / self._shared_values[g].stages[s])
        return [max(0.0, price - sum(parts)) if parts else 0.0
                for price, parts in zip(self._prices.tolist(), paid, strict=True)]

    def _variant(self, chain: TableChain, each: _Class, c: int, row: int, choice: Choice, j: int) -> tuple[int, int]:
        """(The variant of a graph under a choice, the index in `_Class.ins` of the device of the incoming activation).
        `row`: the pattern of the choice; `j`: the index of the graph in `_Class.active`."""
        enters = each.ins.index(self.states[choice.state_in][j])
        chosen = chain.variants[c][j][row, enters]
        if each.outline.last:       # no stage reads the result: it may be on any device
            cost = each.costs[j]
            seconds = np.where(chosen >= 0, cost.seconds[chosen, row, enters], np.inf)
            for s, d, part in self._charged(each, j, chain.caches):
                seconds = seconds + part * cost.reads[s][chosen, row, enters, d]
            return int(chosen[int(seconds.argmin())]), enters
        return int(chosen[self.states[choice.state_out][j]]), enters

    # -- back to tensors --------------------------------------------------------------------

    def assignment(self, chain: TableChain, solution: Solution) -> Assignment:
        """Where a solution of `chain` has residents and nodes; PlacementError for a solution without a path."""
        if solution.path is None:
            raise PlacementError("this solution has no path: nothing fits")
        residents: dict[str, int] = {}
        nodes: list[dict[Tensor, int]] = [{} for _ in self.graphs]
        streamed: list[dict[str, None]] = [{} for _ in self.graphs]
        for k, choice in enumerate(solution.path):
            each = self._classes[self.classes[k]]
            m, stage = self._of_stage[k]
            row = int(chain.rows[self.classes[k]][choice.pattern])
            for r, name in enumerate(self._outlines[k].names):
                residents.setdefault(name, int(each.devices[row, each.atoms.of[r]]))
            for n, g in enumerate(self.models[m].graphs):
                self._assign(nodes[g], streamed[g], chain, each, k, stage, row, choice, m, n)
        return Assignment(residents, tuple(nodes), tuple(tuple(names) for names in streamed))

    def _assign(self, nodes: dict[Tensor, int], streamed: dict[str, None], chain: TableChain, each: _Class, k: int,
                stage: int, row: int, choice: Choice, m: int, n: int) -> None:
        """Add the nodes of graph n of model m in stage k of the chain to `nodes`, with their devices, and the names of
        the weights that they read from another device to `streamed`."""
        follows = each.active.index(n) if n in each.active else 0
        rule, came, streams_to = 0, self._host, -1
        if each.active:
            came = self.states[choice.state_in][follows]
            v, _ = self._variant(chain, each, self.classes[k], row, choice, follows)
            rule = each.costs[follows].rule[v]
            streams_to = each.costs[follows].streams_to[v] if n in each.active else -1
        device = [*each.devices[row].tolist(), came, self._host]
        if streams_to >= 0:
            for a, members in enumerate(each.atoms.members):
                if device[a] == self._host and not any(each.outline.residents[r].cache for r in members):
                    device[a] = streams_to
        g = self.models[m].graphs[n]
        made = self._outlines[k]
        for i, node in enumerate(self.models[m].stages[stage].nodes[n]):
            at = device[each.rules[rule][n][i]]
            nodes[self.graphs[g].nodes[node]] = at
            for r in made.graphs[n].residents[i]:
                if not made.residents[r].cache and int(each.devices[row, each.atoms.of[r]]) != at:
                    streamed[made.names[r]] = None
