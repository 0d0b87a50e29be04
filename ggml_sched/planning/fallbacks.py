"""Nodes that a backend refused, so that a later one computes them: which, why, and what that costs.

A node fell back if a better backend does not support it and would otherwise compute it, because a weight, a source or a
reader of the node is on that backend, directly or through other nodes that fell back.  Nothing falls back from a store,
which computes nothing.  The reason is found by support queries for the same node with other strides and types, or was
recorded by such queries; the cost by planning the graph as if the backend supported the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from ggml_sched._core import Devices, Request, make_plan
from ggml_sched._graph import BufferBase, Context, Graph, Tensor, Type, measure_buffer
from ggml_sched.backend import Backend
from ggml_sched.backends.dry import DryBackend
from ggml_sched.errors import Error
from ggml_sched.placement.devices import Device, LinkLike
from ggml_sched.placement.pricing import price
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.planner import POLICIES
from ggml_sched.planning.recorded import RecordedBackend
from ggml_sched.planning.windows import fetched_sizes, widest, windows_of

__all__ = ["Fallback", "fallbacks_of", "fallbacks_with_ids", "refusals_of"]

_SHOWN = 3


@dataclass(frozen=True)
class Fallback:
    """Nodes of one op that a backend refused for one reason."""

    op: str
    nodes: tuple[str, ...]
    """The names of the nodes, in the order of execution; `tensor ID` for a node without a name."""
    backend: str
    """The backend that computes them."""
    refused_by: str
    """The better backend, which would compute them if it supported them."""
    why: str
    """The property of the nodes that `refused_by` does not support, in words."""
    seconds: float | None
    """Seconds that a compute would save if `refused_by` supported the nodes, by the prices of the devices; None if no
    devices were given."""

    def __str__(self) -> str:
        more = f" and {len(self.nodes) - _SHOWN} more" if len(self.nodes) > _SHOWN else ""
        cost = "" if self.seconds is None else f"; this costs {self.seconds * 1e3:.3f} ms"
        return (f"{self.op} on {self.backend}: {', '.join(self.nodes[:_SHOWN])}{more}, as {self.refused_by} does not "
                f"support {self.why}{cost}")


def fallbacks_of(plan: Plan, devices: Sequence[Device] | None = None, link: LinkLike = None) -> tuple[Fallback, ...]:
    """The nodes of a plan that fell back, the most expensive first; see `Plan.fallbacks`."""
    return tuple(fallback for fallback, _ in fallbacks_with_ids(plan, devices, link))


def fallbacks_with_ids(plan: Plan, devices: Sequence[Device] | None = None,
                       link: LinkLike = None) -> list[tuple[Fallback, tuple[int, ...]]]:
    """Each entry of `fallbacks_of` with the ids of its nodes: names of nodes and of backends may be equal."""
    fell = _fallen(plan)
    reasons = _reasons(plan, fell)
    groups: dict[tuple[str, int, int, str], list[Tensor]] = {}
    for node, refused_by in fell.items():
        here = plan.data.backend_index(plan.index_of(node))
        groups.setdefault((node.op, here, refused_by, reasons[node]), []).append(node)
    paid = None if devices is None else price(plan, devices, link).seconds
    found = []
    for (op, here, refused_by, why), nodes in groups.items():
        cost = None
        if devices is not None and paid is not None:
            other = _as_if_supported(plan, refused_by, nodes)
            cost = paid - price(other, devices, link).seconds
        ids = tuple(plan.index_of(node) for node in nodes)
        found.append((Fallback(op, tuple(plan.label_of(i) for i in ids), plan.backends[here].name,
                               plan.backends[refused_by].name, why, cost), ids))
    return sorted(found, key=lambda pair: (-(pair[0].seconds or 0.0), -len(pair[1])))


def refusals_of(plan: Plan) -> list[dict[int, str | None]]:
    """For each backend, {id of a node that it does not support: what it refuses in it, None if the node did not fall
    back from it}."""
    fell = _fallen(plan)
    reasons = _reasons(plan, fell)
    nodes = [(plan.index_of(node), node) for node in plan.graph.nodes if node.computes]
    return [{i: reasons[node] if fell.get(node) == b else None for i, node in nodes if not backend.supports_op(node)}
            for b, backend in enumerate(plan.backends)]


# -- which -----------------------------------------------------------------------------------------


def _fallen(plan: Plan) -> dict[Tensor, int]:
    """{node that fell back: the first backend that refused it and would otherwise compute it}, in the order of
    execution."""
    graph, data = plan.graph, plan.data
    near = _neighbours(graph)
    refused: dict[Tensor, list[int]] = {}
    for node in graph.nodes:
        here = data.backend_index(graph.id_of(node)) if node.computes else 0
        if here > 0 and data.rule(graph.id_of(node)) != "user":
            against = [b for b in range(here) if not plan.backends[b].is_store
                       and not plan.backends[b].supports_op(node) and not _is_held_back(plan, node, here, b)]
            if against:
                refused[node] = against
    # Passes over the refused nodes in their order, until none falls.  After the first pass only nodes are tested again
    # that have a neighbour which has fallen since.
    order = {node: i for i, node in enumerate(refused)}
    nodes = [*refused]
    touched = {node: {_backend_of(plan, t) for t in near[node]} for node in nodes}
    fell: dict[Tensor, int] = {}
    queue = [(0, i) for i in range(len(nodes))]     # (pass, position), a heap
    while queue:
        number, i = heappop(queue)
        node = nodes[i]
        wanted = next((b for b in refused[node] if b in touched[node]), None)
        if node in fell or wanted is None:
            continue
        fell[node] = wanted
        for other in near[node]:
            if other in order and wanted not in touched[other]:
                touched[other].add(wanted)
                heappush(queue, (number + (order[other] < i), order[other]))
    return {node: fell[node] for node in nodes if node in fell}


def _neighbours(graph: Graph) -> dict[Tensor, list[Tensor]]:
    """For each node that computes: what it reads (the node that wrote a source's memory last, or a leaf), and the nodes
    that read what it writes."""
    made: dict[Tensor, Tensor] = {}
    near: dict[Tensor, list[Tensor]] = {}
    for node in graph.nodes:
        if not node.computes:
            continue
        near[node] = []
        for source in node.src:
            if source is None:
                continue
            writer = made.get(source.root, source.root)
            near[node].append(writer)
            if writer in near:
                near[writer].append(node)
        made[node.root] = node
    return near


def _backend_of(plan: Plan, t: Tensor) -> int:
    """The backend that computes a node or holds a leaf; -1 for an input, which is copied to where it is read."""
    if t.op == "NONE" and not (t.resident or t.is_resident):
        return -1
    return plan.data.backend_index(plan.graph.id_of(t))


def _is_held_back(plan: Plan, node: Tensor, here: int, better: int) -> bool:
    """Whether the node reads a weight or cache on backend `here`, which computes the node, that backend `better` cannot
    read there."""
    for source in node.src:
        root = None if source is None else source.root
        if root is not None and (root.resident or root.is_resident) and _backend_of(plan, root) == here:
            buffer = root.buffer if root.buffer is not None else measure_buffer(plan.backends[here])
            if not plan.backends[better].supports_buffer(buffer):
                return True
    return False


# -- why -------------------------------------------------------------------------------------------


def _reasons(plan: Plan, fell: Mapping[Tensor, int]) -> dict[Tensor, str]:
    """For each node that fell back what its backend refuses in it; `fell` is the result of `_fallen`."""
    of_kind: dict[tuple[bytes, int], str] = {}
    found = {}
    for node, refused_by in fell.items():
        key = (plan.graph.kind_of(node), refused_by)
        if key not in of_kind:
            of_kind[key] = _why(plan, node, plan.backends[refused_by])
        found[node] = of_kind[key]
    return found


def _why(plan: Plan, node: Tensor, backend: Backend) -> str:
    """What a backend refuses in a node: the strides or the type of one source, the types of all sources together, the
    extents or parameters, or the op."""
    if isinstance(backend, RecordedBackend):
        return backend.refused[node] or "its op, types, extents or parameters"
    sources = [(k, s) for k, s in enumerate(node.src) if s is not None]
    for k, source in sources:
        if not source.is_contiguous and _supports(backend, node, {k: source.type}):
            return f"the strides {source.nb} of source {k}"
    for k, source in sources:
        if source.type != Type.F32 and _supports(backend, node, {k: Type.F32}):
            return f"the type {source.type} of source {k}"
    if any(s.type != Type.F32 or not s.is_contiguous for _, s in sources) and _supports(
            backend, node, {k: Type.F32 for k, _ in sources}):
        return f"the types {', '.join(str(s.type) for _, s in sources)} together"
    like = [other for other in plan.graph.nodes if other.op == node.op]
    if any(backend.supports_op(other) for other in like):
        return f"its extents or parameters, with sources of {', '.join('x'.join(map(str, s.ne)) for _, s in sources)}"
    return f"the op {node.op}"


def _supports(backend: Backend, node: Tensor, dense: Mapping[int, Type]) -> bool:
    """Whether a backend would support the node if some sources were contiguous and had other types; `dense`: {slot of
    such a source: its type}."""
    with Context("what if") as ctx:
        given: list[Tensor | None] = []
        for k, source in enumerate(node.src):
            if source is None:
                given.append(None)
            elif k in dense:
                given.append(ctx.tensor(dense[k], source.ne))
            else:
                given.append(ctx.restore("NONE", source.type, source.ne, source.nb))
        try:
            over = next((given[k] for k, s in enumerate(node.src) if s is not None and s.root is node.root), None)
            twin = ctx.restore(node.op, node.type if over is None else over.type, node.ne,
                               node.nb if over is None else over.nb, given, over, 0, node.op_params)
            return bool(backend.supports_op(twin))
        except (Error, ValueError, TypeError):
            return False    # no such node can be made


# -- what it costs ---------------------------------------------------------------------------------


class _Permissive(DryBackend):
    """A dry backend with the answers of `backend`, except that it supports the nodes `accepted`, too."""

    def __init__(self, backend: Backend, accepted: Iterable[Tensor]) -> None:
        super().__init__(backend.name, backend.alignment, backend.max_buffer_size)
        self.answers_version = None
        self.concurrent_copies = backend.concurrent_copies
        self.of = backend
        self.accepted = set(accepted)

    def supports_op(self, node: Tensor) -> bool:
        return node in self.accepted or self.of.supports_op(node)

    def supports_buffer(self, buffer: BufferBase) -> bool:
        owner = buffer.backend
        if isinstance(owner, _Permissive):
            return owner is self or self.of.supports_buffer(measure_buffer(owner.of))
        return owner is self.of or self.of.supports_buffer(buffer)

    def offload_op(self, node: Tensor) -> bool:
        return self.of.offload_op(node)

    def inplace_sources(self, op: str) -> int:
        return self.of.inplace_sources(op)

    def alloc_size(self, tensor: Tensor) -> int:
        return self.of.alloc_size(tensor)

    def fusion_groups(self, graph: Graph) -> Iterable[Sequence[int]]:
        return self.of.fusion_groups(graph)


def _as_if_supported(plan: Plan, backend: int, nodes: Sequence[Tensor]) -> Plan:
    """The plan of the same graph if a backend supported `nodes`; nodes stay where the caller assigned them.  Backends
    to which stores fetch keep their windows; other backends get those of a scheduler without budgets."""
    backends = tuple(b if b.is_store else _Permissive(b, nodes if k == backend else ())
                     for k, b in enumerate(plan.backends))
    data, graph = plan.data, plan.graph
    ids = [(node, graph.id_of(node)) for node in graph.nodes if node.computes]
    assigned = {node: backends[data.backend_index(i)] for node, i in ids if data.rule(i) == "user"}
    request = Request(graph, Devices(backends), assigned)
    policy = POLICIES.get(plan.policy, POLICIES["default"])

    def made(windows: Sequence[int]) -> Plan:
        return Plan(graph, make_plan(request, replace(policy, windows=tuple(windows))), backends, plan.policy)

    fetched = fetched_sizes(plan)
    if not any(fetched):
        return made(())
    given = {b: window for b, window in enumerate(windows_of(plan)) if fetched[b]}
    return widest(made, backends, given, [None] * len(backends))
