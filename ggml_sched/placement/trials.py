"""Plans of several graphs for one placement, made as the scheduler makes them: with real arenas and prices, no memory.

Owns copies of the graphs, and moves the residents of these copies between devices; the caller's graphs do not change.
Invariant: the plans of a trial are valid until the next trial moves the residents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ggml_sched._core import Devices, Policy, Request, make_plan
from ggml_sched._graph import Context, Graph, Tensor, bind_resident, checked_alloc_size, label
from ggml_sched.backend import Backend, Buffer
from ggml_sched.backends.dry import DryBackend
from ggml_sched.errors import GraphError, PlacementError, UnsupportedOp
from ggml_sched.placement.devices import Device, Links
from ggml_sched.placement.facts import Facts, facts
from ggml_sched.placement.plan_bytes import arena_bytes
from ggml_sched.placement.pricing import Price, Pricer
from ggml_sched.planning.plan import Plan

__all__ = ["Trial", "Trials"]

_POLICY = Policy()
_LEAN = dataclasses.replace(_POLICY, stream=True)


@dataclass(frozen=True)
class Trial:
    """What one placement takes: bytes for each device, and seconds."""

    residents: tuple[int, ...]
    """Bytes of weights and caches on each device, aligned."""
    arenas: tuple[int, ...]
    """Bytes of each device's arena and of the work memory of its kernels: the largest sum of any graph."""
    missing: tuple[int, ...]
    """Bytes by which residents and arena exceed the budget of each device."""
    prices: tuple[Price, ...]
    seconds: float
    """The prices of the graphs, each times its weight in the goal."""
    splits: int
    """Splits of the graphs that count in the goal."""
    assigned: bool
    """Whether nodes were assigned; False: the scheduler's own rules placed all of them."""
    plans: tuple[Plan, ...]
    n_slots: int = 0
    """Slots for experts on the host, whose bytes `residents` counts; 0 where no weight is read expert by expert."""

    @property
    def fits(self) -> bool:
        """Whether every device keeps its budget."""
        return not any(self.missing)


class Trials:
    """Some graphs with the same residents, on some devices; `weights`: the weight of each graph in the goal.

    `graphs`, `facts`: of the copies of the graphs.  `sizes`: {name of a resident: bytes}.  `unread`: {name of a
    resident that no node reads: its device}, the host if it is not pinned.  Raises GraphError for residents without a
    name, or of one name and different sizes.
    """

    def __init__(self, graphs: Sequence[Graph], devices: Sequence[Device], links: Links, weights: Sequence[float],
                 fill: float) -> None:
        self.devices: tuple[Device, ...] = tuple(devices)
        self.backends: tuple[Backend, ...] = tuple(device.backend for device in devices)
        self.weights: tuple[float, ...] = tuple(weights)
        self.graphs: tuple[Graph, ...] = tuple(_copied(graph) for graph in graphs)
        self.tensors: tuple[dict[str, Tensor], ...] = tuple(_residents(graph) for graph in self.graphs)
        self.sizes: dict[str, int] = {}
        self.kinds: dict[str, str] = {}
        for named in self.tensors:
            for name, t in named.items():
                if self.sizes.setdefault(name, t.nbytes) != t.nbytes:
                    raise GraphError(f"two graphs have a resident {name!r}, of {self.sizes[name]} and {t.nbytes} "
                                     "bytes: graphs that are placed together share weights and caches by name")
                self.kinds.setdefault(name, t.resident)
        self.facts: tuple[Facts, ...] = tuple(facts(graph, fill) for graph in self.graphs)
        read = {t.name for found in self.facts for roots in found.residents for t in roots}
        self.unread: dict[str, int] = dict.fromkeys((name for name in self.sizes if name not in read),
                                                    len(self.devices) - 1)
        self.pricers: tuple[Pricer, ...] = tuple(Pricer(found, self.devices, links) for found in self.facts)
        self._core = Devices(self.backends)
        self._taken = [{name: self._aligned(d, t) for named in self.tensors for name, t in named.items()}
                       for d in range(len(self.devices))]

    def bytes_on(self, device: int, name: str) -> int:
        """The bytes that a resident takes on a device: aligned as `alloc_tensors` aligns."""
        return self._taken[device][name]

    def run(self, residents: Mapping[str, int], nodes: Sequence[Mapping[Tensor, int]] | None = None) -> Trial:
        """Plan all graphs with each resident on its device; `nodes`: for each graph the devices of assigned nodes.

        Raises UnsupportedOp for a node that no backend computes, or that its assigned backend does not compute.
        """
        n = len(self.devices)
        held = [0] * n
        residents = {**self.unread, **residents}
        for name, d in residents.items():
            held[d] += self._taken[d][name]
        room = [device.budget - taken for device, taken in zip(self.devices, held, strict=True)]
        plans = [self._plan(g, residents, None if nodes is None else nodes[g], room) for g in range(len(self.graphs))]
        arenas = [arena_bytes(plans, d) for d in range(n)]
        missing = tuple(max(0, arena - left) for arena, left in zip(arenas, room, strict=True))
        prices = tuple(pricer.price(plan) for pricer, plan in zip(self.pricers, plans, strict=True))
        seconds = sum(weight * price.seconds for weight, price in zip(self.weights, prices, strict=True) if weight)
        splits = sum(plan.data.n_splits for weight, plan in zip(self.weights, plans, strict=True) if weight)
        return Trial(tuple(held), tuple(arenas), missing, prices, seconds, splits, nodes is not None, tuple(plans))

    def cheapest(self, residents: Mapping[str, int], nodes: Sequence[Mapping[Tensor, int]]) -> Trial:
        """The better of two trials, one with the nodes assigned and one without: the cheaper one if both fit, else the
        one with fewer missing bytes."""
        own = self.run(residents)
        try:
            assigned = self.run(residents, nodes)
        except (UnsupportedOp, PlacementError):
            return own
        return min(assigned, own, key=lambda trial: (sum(trial.missing), trial.seconds, trial.splits))

    def _plan(self, g: int, residents: Mapping[str, int], nodes: Mapping[Tensor, int] | None,
              room: Sequence[int]) -> Plan:
        """The plan of graph number g; `nodes`: the devices of assigned nodes; `room`: for each device the bytes that
        its arena may take.  If a plan takes more, it is made again without copies of weights that stay."""
        graph = self.graphs[g]
        self._move(self.tensors[g], residents, self.backends)
        assigned = {t: self.backends[d] for t, d in (nodes or {}).items()}
        request = Request(graph, self._core, assigned)
        plan = Plan(graph, make_plan(request, _POLICY), self.backends, "default", assigned_by="the placement")
        if any(plan.data.kept) and any(size > left for size, left in zip(plan.buffer_sizes, room, strict=True)):
            # As the planner does under budgets: copies of weights that stay between computes may be what exceeds them.
            plan = Plan(graph, make_plan(request, _LEAN), self.backends, "default", assigned_by="the placement")
        return plan

    def by_rules(self, residents: Mapping[str, int], backends: Sequence[Backend],
                 policy: Policy) -> tuple[tuple[Plan, ...], tuple[Price, ...]]:
        """(Plans of all graphs by the rules of `policy`, their prices), to compare with another scheduler; `backends`:
        for each device the backend to plan for in place of the device's own."""
        devices, residents = Devices(tuple(backends)), {**self.unread, **residents}
        plans = []
        for graph, tensors in zip(self.graphs, self.tensors, strict=True):
            self._move(tensors, residents, backends)
            plans.append(Plan(graph, make_plan(Request(graph, devices, {}), policy), tuple(backends), policy.placement,
                              assigned_by="ggml's rules"))
        return tuple(plans), tuple(pricer.price(plan) for pricer, plan in zip(self.pricers, plans, strict=True))

    def _move(self, tensors: Mapping[str, Tensor], residents: Mapping[str, int], backends: Sequence[Backend]) -> None:
        """Give the residents of a graph addresses on their devices, one after another, in buffers without memory."""
        groups: dict[tuple[int, bool], list[Tensor]] = {}
        for name, t in tensors.items():
            groups.setdefault((residents[name], t.resident == "weight"), []).append(t)
        for (d, is_weight), members in groups.items():
            total = sum(self._taken[d][t.name] for t in members)
            buffer = Buffer(backends[d], total, usage="weights" if is_weight else "any")
            offset = 0
            for t in members:
                bind_resident(t, buffer, offset)
                offset += self._taken[d][t.name]

    def _aligned(self, d: int, t: Tensor) -> int:
        backend, alignment = self.backends[d], self.devices[d].alignment
        size = t.nbytes if type(backend) is DryBackend else checked_alloc_size(backend, t, backend.alloc_size(t))
        return -(-size // alignment) * alignment


def _copied(graph: Graph) -> Graph:
    """A graph of the same tensors, made anew; roots that have memory are marked as residents."""
    if not isinstance(graph, Graph):
        raise TypeError(f"not a Graph: {graph!r}")
    context, made = Context("placement"), dict[Tensor, Tensor]()
    left = list(reversed(graph.tensors))
    while left:
        t = left.pop()
        before = [s for s in (*t.src, t.view_src) if s is not None and s not in made]
        if before:
            left += [t, *before]
        elif t not in made:
            resident = t.resident or ("weight" if t.view_src is None and t.is_resident else "")
            made[t] = context.restore(t.op, t.type, t.ne, t.nb, [None if s is None else made[s] for s in t.src],
                                      None if t.view_src is None else made[t.view_src], t.view_offs, t.op_params,
                                      graph.flags_of(t), t.name, resident)
    for node, kept in graph.deps.items():
        for t in kept:
            context.keep_until(made[t], made[node])
    tensors, nodes, leafs = ([made[t] for t in of] for of in (graph.tensors, graph.nodes, graph.leafs))
    return Graph.from_order(tensors, nodes, leafs, graph.meta)


def _residents(graph: Graph) -> dict[str, Tensor]:
    """The residents of a graph by name; GraphError for one without a name, or two of one name."""
    found: dict[str, Tensor] = {}
    for t in _roots(graph):
        if not t.name:
            raise GraphError(f"{label(t)}, a {t.resident} of {t.nbytes} bytes, has no name: residents are placed by "
                             "name")
        if t.name in found:
            raise GraphError(f"two residents of a graph have the name {t.name!r}: residents are placed by name")
        found[t.name] = t
    return found


def _roots(graph: Graph) -> Iterable[Tensor]:
    return (t for t in graph.tensors if t.view_src is None and t.resident)
