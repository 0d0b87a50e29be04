"""The outline of a stage: what its nodes read and write, by number within the stage, apart from names and positions.

Stages with equal keys are of one class and have equal prices for every pattern, so that prices are found once a class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ggml_sched._graph import Tensor
from ggml_sched.placement.stages import Model
from ggml_sched.placement.wiring import Wiring

__all__ = ["COMES_IN", "FROM_EARLIER", "FROM_LATER", "FROM_NOTHING", "GLOBAL", "INPUT", "NODE", "RESIDENT", "Nodes",
           "Outline", "Resident", "Shared", "Value", "outline", "places_of", "shared_values"]

NODE, COMES_IN, INPUT, GLOBAL, RESIDENT = range(5)
"""Where a value comes from, in this order: a node of the stage; an earlier stage; an input that only this stage reads;
an input, or a result of inputs alone, that several stages read; a resident."""

FROM_EARLIER, FROM_LATER, FROM_NOTHING = -1, -2, -3
"""What runs right before a node, if that is no node of its stage: an earlier stage, a later stage, nothing."""

_STEPS = 16     # nodes between a router and its experts, at most


class Resident(NamedTuple):
    """A resident that the stage reads or writes."""

    nbytes: int
    cache: bool
    pin: int
    """The device that the caller chose; -1: none."""
    shared: int
    """The index in `Tables.shared` of its group of residents, if several stages read it; -1: one stage does."""
    counted: bool
    """Whether this stage counts its bytes: the first stage that reads it does."""
    router: bool
    """Whether it is the matrix that the ids of experts are computed with."""


class Value(NamedTuple):
    """A tensor as some nodes of the stage read it, between two writes to its memory."""

    origin: int
    number: int
    """NODE: the node; RESIDENT: the resident; GLOBAL: the id of the tensor in its graph; COMES_IN: 0 for what passes
    from the stage before, 1 for anything else that earlier stages computed."""
    nbytes: int


class Shared(NamedTuple):
    """What several stages of one graph read, beside residents and the activations that pass from stage to stage."""

    stages: dict[int, int]
    """{id of such a tensor: number of stages that read it}."""
    nodes: frozenset[int]
    """The nodes that compute such tensors from inputs alone."""
    readers: dict[int, frozenset[int]]
    """{id of such a tensor: the stages that read it}."""


class Nodes(NamedTuple):
    """The nodes of one graph in a stage; each list has an entry for each node."""

    kinds: tuple[int, ...]
    """For each node its kind, as in `Wiring.kinds`: equal for nodes of equal op, parameters and layouts."""
    amounts: tuple[bytes, bytes]
    """Bytes and FLOPs of all nodes, as float64."""
    reads: tuple[tuple[int, ...], ...]
    """The values that the node reads, as indices into `values`."""
    residents: tuple[tuple[int, ...], ...]
    """Residents that the node reads or writes, each once."""
    memory: tuple[int, ...]
    """Bytes of the node's result; 0 if the node writes it to the memory of another tensor."""
    writes: tuple[int, ...]
    """The node of the stage whose memory this one writes to; -1: none."""
    previous: tuple[int, ...]
    """The node of this stage that runs right before the node, or FROM_...  Where a node of another stage runs before
    it, the node at the same place in this stage stands for that one if it is of equal kind: neighbouring stages are
    taken to have the same pattern."""
    on_host: tuple[bool, ...]
    """Whether the node is computed on the host, where the inputs are."""
    reuses: tuple[bool, ...]
    """Whether the node's result may take the memory of a source of which the node is the last reader."""
    values: tuple[Value, ...]
    out: int
    """The node whose result the next stage reads; -1: it reads none; -2: it reads the activation that came in here."""


@dataclass(frozen=True)
class Outline:
    """One stage of all graphs of its model."""

    residents: tuple[Resident, ...]
    names: tuple[str, ...]
    """Names of the residents; not a part of the key."""
    graphs: tuple[Nodes, ...]
    first: bool
    last: bool

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for stages of one class in the same model."""
        return self.residents, self.graphs, self.first, self.last


def shared_values(w: Wiring, stage_of: Sequence[int], passed: Collection[int]) -> Shared:
    """The inputs that several stages of a graph read, and the results of inputs alone that another stage reads, too.

    `passed`: the ids of the roots that pass from each stage to the next; results among them are left out.
    """
    passed = frozenset(passed)
    readers: dict[int, set[int]] = {}
    for i, sources in enumerate(w.sources):
        for s in sources:
            if w.root[s] not in w.residents:
                readers.setdefault(s, set()).add(stage_of[i])
    free: list[bool] = []       # for each node whether it depends on inputs alone
    for i, before in enumerate(w.before):
        free.append(not w.writes[i] and all(free[p] for p in before)
                    and not any(w.root[s] in w.residents for s in w.sources[i]))
    found, nodes = {}, set()
    for s, stages in readers.items():
        root = w.root[s]
        p = w.producer[root]
        if p < 0 and len(stages) > 1:
            found[s] = frozenset(stages)
        elif p >= 0 and root not in passed and free[p] and stages != {stage_of[p]}:
            found[s] = frozenset(stages)
            nodes.add(p)
    return Shared({s: len(stages) for s, stages in found.items()}, frozenset(nodes), found)


def places_of(model: Model, graph: int) -> list[int]:
    """For each node of a graph its number within its stage."""
    found = [0] * len(model.stage_of[graph])
    for stage in model.stages:
        for n, i in enumerate(stage.nodes[graph]):
            found[i] = n
    return found


def outline(wirings: Sequence[Wiring], model: Model, k: int, shared: Sequence[Shared],
            places: Sequence[Sequence[int]], groups: Mapping[str, int], counted: set[str], pins: Mapping[str, int],
            reuses: Callable[[Tensor], bool]) -> Outline:
    """The outline of stage k.

    `places`: for each graph `places_of(model, graph)`, the number of each node within its stage.
    `groups`: {resident that several stages read: index of its group in `Tables.shared`}; `counted`: the residents whose
    bytes an earlier stage counts; this call adds those of the stage; `reuses`: whether some device may compute a
    node in place.
    """
    stage = model.stages[k]
    local: dict[str, int] = {}
    found: list[Resident] = []
    graphs = []
    for g, w in enumerate(wirings):
        graphs.append(_nodes(w, stage.nodes[g], stage.incoming[g], stage.outgoing[g], k, model.stage_of[g], shared[g],
                             places[g], local, reuses))
    routers = _routers(wirings, [stage.nodes[g] for g in range(len(wirings))])
    for name in local:
        held = [(w, w.by_name[name]) for w in wirings if name in w.by_name]
        nbytes, cache = int(held[0][0].nbytes[held[0][1]]), any(i in w.caches for w, i in held)
        found.append(Resident(nbytes, cache, pins.get(name, -1), groups.get(name, -1), name not in counted,
                              name in routers))
    counted.update(local)
    return Outline(tuple(found), tuple(local), tuple(graphs), k == 0, k == len(model.stages) - 1)


def _foreign(w: Wiring, nodes: Sequence[int], i: int, k: int, stage_of: Sequence[int], places: Sequence[int],
             came: int) -> int:
    """The value of `Nodes.previous` for node i of the graph, which does not follow a node of its own stage; `came`: the
    root of the activation that comes in, -1: none."""
    if i == 0:
        return FROM_NOTHING
    p = i - 1
    if came < 0 or w.producer[came] != p:
        n = places[p]
        if n < len(nodes) and w.kinds[nodes[n]] == w.kinds[p]:
            return n
    return FROM_EARLIER if stage_of[p] < k else FROM_LATER


def _routers(wirings: Sequence[Wiring], nodes: Sequence[Sequence[int]]) -> set[str]:
    """The names of the matrices that the ids of experts are computed with; `nodes`: for each graph those to search."""
    found = set()
    for w, part in zip(wirings, nodes, strict=True):
        for i in part:
            if w.facts.nodes[i].op != "MUL_MAT_ID":
                continue
            at, seen = w.producer[w.root[w.sources[i][2]]], 0
            while at >= 0 and seen < _STEPS:
                seen += 1
                name = w.residents.get(w.root[w.sources[at][0]]) if w.facts.nodes[at].op == "MUL_MAT" else None
                if name is not None:
                    found.add(name)
                    break
                at = w.before[at][0] if w.before[at] else -1
    return found


def _nodes(w: Wiring, nodes: Sequence[int], incoming: int, outgoing: int, k: int, stage_of: Sequence[int],
           shared: Shared, places: Sequence[int], residents: dict[str, int], reuses: Callable[[Tensor], bool]) -> Nodes:
    """The nodes of one graph; adds the residents that they read to `residents`."""
    at = {i: n for n, i in enumerate(nodes)}
    came = w.root[incoming] if incoming >= 0 else -1
    values: list[Value] = []
    number: dict[tuple[int, int], int] = {}
    version: dict[int, int] = {}
    reads, touched, memory, writes, previous = [], [], [], [], []
    for n, i in enumerate(nodes):
        mine, own = [], dict[int, None]()
        for s in w.sources[i]:
            root = w.root[s]
            name = w.residents.get(root)
            if name is not None:
                own[residents.setdefault(name, len(residents))] = None
            v = number.get((s, version.get(root, 0)))
            if v is None:
                v = number[s, version.get(root, 0)] = len(values)
                producer = w.producer[root]
                if name is not None:
                    origin, of = RESIDENT, residents[name]
                elif s in shared.stages:
                    origin, of = GLOBAL, s
                elif producer < 0 or producer >= i:
                    origin, of = INPUT, 0       # also where this node or a later one writes to it
                elif producer in at:
                    origin, of = NODE, at[producer]
                else:
                    # The activation that came in, or another result of an earlier stage: taken to be on its device.
                    origin, of = COMES_IN, int(root != came)
                values.append(Value(origin, of, int(w.nbytes[s])))
            mine.append(v)
        root = w.root[w.ids[i]]
        name = w.residents.get(root)
        if name is not None:
            own[residents.setdefault(name, len(residents))] = None
        first = w.producer[root]
        fresh = name is None and first == i
        memory.append(int(w.nbytes[root]) if fresh else 0)
        writes.append(-1 if fresh or name is not None else at.get(first, -1))
        if not fresh and name is None:
            version[root] = version.get(root, 0) + 1
        reads.append(tuple(mine))
        touched.append(tuple(own))
        if n and nodes[n - 1] == i - 1:
            previous.append(n - 1)
        else:
            previous.append(_foreign(w, nodes, i, k, stage_of, places, came))
    out = -1
    if outgoing >= 0:
        out = at.get(w.producer[w.root[outgoing]], -2)
    index_of = list(nodes)
    return Nodes(tuple(w.kinds[i] for i in nodes),
                 (w.facts.nbytes[index_of].tobytes(), w.facts.flops[index_of].tobytes()), tuple(reads), tuple(touched),
                 tuple(memory), tuple(writes), tuple(previous), tuple(i in shared.nodes for i in nodes),
                 tuple(reuses(w.facts.nodes[i]) for i in nodes), tuple(values), out)
