"""Classes of stages: what equal stages of some graphs share, with the costs of every pattern.

`StageClasses` finds the stages of every model, their classes, the states between stages, and the inputs whose copies
the cases of a search count apart.  It depends on graphs, devices and the goal alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import or_

import numpy as np
from numpy.typing import NDArray

from ggml_sched._graph import Tensor
from ggml_sched.backend import same_layout
from ggml_sched.errors import PlacementError
from ggml_sched.placement.atoms import FEW_ATOMS, MAX_ATOMS, Atoms, find_atoms
from ggml_sched.placement.costs import Costs, Known, Machine, costs, needs, where
from ggml_sched.placement.devices import Device, Links
from ggml_sched.placement.facts import Facts
from ggml_sched.placement.outline import GLOBAL, Outline, Shared, outline, places_of, shared_values
from ggml_sched.placement.patterns import Sites, patterns, sites
from ggml_sched.placement.stages import Model, find_models, large_bytes
from ggml_sched.placement.wiring import Wiring

__all__ = ["StageClass", "StageClasses"]

_MAX_STATES = 27        # up to so many combinations of devices, as of three graphs on three devices, all are states
_MAX_STREAM_TO = 4      # the most devices that weights may be streamed to
_MAX_READERS = 8        # the most sets of stages that read the same inputs with caches
_MAX_COPIED = 2         # the most other inputs of which a case says to which devices they are copied


@dataclass(frozen=True, eq=False)
class StageClass:
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
    known: tuple[Known, ...]        # of each graph of the model


class StageClasses:
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
        self._classes: tuple[StageClass, ...] = self._find_classes(stream)

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

    def _find_classes(self, stream: Sequence[bool]) -> tuple[StageClass, ...]:
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
               stream: Sequence[bool]) -> StageClass:
        model, stage = self.models[m], self._of_stage[k][1]
        found = patterns(atoms.free, len(self.devices), self._host)
        pinned = [pin for pin in atoms.pins if pin >= 0]
        devices = np.concatenate([found, np.tile(np.array(pinned, np.int8), (len(found), 1))], axis=1)
        ins = (self._host,) if made.first else tuple(range(len(self.devices)))
        active = tuple(n for n, g in enumerate(model.graphs) if self.weights[g])
        made_costs = []
        known: tuple[Known, ...] = tuple({} for _ in model.graphs)
        back = np.zeros_like(self._inputs)
        for n in active:
            g = model.graphs[n]
            shared = self._shared_values[g].stages
            parts = {s: 0.0 if s in held[g] else 1 / stages for s, stages in shared.items()}
            seconds = self._seconds[g][model.stages[stage].nodes[n]]
            copied = [s for of, s in self.copied if of == g]
            made_costs.append(costs(made.graphs[n], [rule[n] for rule in rules], made, atoms, found, ins, seconds,
                                    self._machine, parts, self._stream_to if stream[g] else (), copied, known[n]))
            for s in {value.number for value in made.graphs[n].values if value.origin == GLOBAL} & held[g]:
                back[self._set_of[g, s]] += self._price_of_input(g, s) / shared[s]
        if made_costs:
            # Graphs of weight 0 follow the rule of the first active graph, whose variants need the arenas of all these.
            shape = (len(found), len(ins))
            at = where(found, atoms, ins, self._host)
            for n in range(len(model.graphs)):
                if n not in active:
                    for r, rule in enumerate(rules):
                        need = needs(made.graphs[n], rule[n], at, shape, len(self.devices), known=known[n])
                        for v in np.flatnonzero(np.array(made_costs[0].rule) == r):
                            np.maximum(made_costs[0].needs[v], need, out=made_costs[0].needs[v])
        least: NDArray[np.int64] = np.zeros((len(found), len(self.devices)), np.int64)
        for cost in made_costs:
            np.maximum(least, cost.needs.min(axis=(0, 2)), out=least)
        return StageClass(m, made, atoms, tuple(rules), found, devices, self._memory(made, devices, atoms), ins, active,
                      tuple(made_costs), back, least, known)

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
