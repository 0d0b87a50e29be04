"""The planner: makes plans of graphs, caches, reserves and adopts them, tries other orders, and checks budgets.

The key of a cached plan has everything that the plan depends on: the graph's structure, the buffers of residents, the
caller's assignments, the policy, the maximum buffer sizes, and the epoch of the support cache, a number that changes
when it is cleared.  Fusion groups follow from these, so that backends are called for them only when a new plan is made.
Where weights are in stores, the windows in which they are fetched are searched: as large as budgets allow (windows.py).
No device memory is accessed here.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ggml_sched._core import Devices, PlanData, Policy, Request, make_plan, replay_plan
from ggml_sched._graph import Graph, Tensor
from ggml_sched.backend import Backend
from ggml_sched.errors import OutOfMemory
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.reorder import reorder
from ggml_sched.planning.windows import widest, windows_of

__all__ = ["POLICIES", "Planner", "planned_by"]

POLICIES: dict[str, Policy] = {
    "default": Policy(),
    "seed": Policy(placement="seed", offsets="best fit", reuse="first", leafs_first=False),
}
"""The policies that can be chosen by name."""


def planned_by(plan: Plan, policy: str) -> Plan:
    """The plan of the same graph on the same backends by another policy; the caller's assignments and the windows of
    fetched weights stay."""
    graph, data = plan.given_graph, plan.data
    ids = [(t, plan.graph.id_of(t)) for t in graph.nodes]
    assigned = {t: plan.backends[data.backend_index(i)] for t, i in ids if data.rule(i) == "user"}
    request = Request(graph, Devices(plan.backends), assigned)
    other = dataclasses.replace(POLICIES[policy], windows=tuple(windows_of(plan)))
    return Plan(graph, make_plan(request, other), plan.backends, policy, assigned_by=plan.assigned_by)


class Adopted(NamedTuple):
    """A plan that the caller gave, instead of one that the planner would make.

    `order` lists the plan's order of execution, as positions of nodes in the caller's graph; None: the graph's own.
    """

    data: PlanData
    order: tuple[int, ...] | None
    epoch: int
    """The planner's `devices.epoch()` when the plan was last verified."""


Key: TypeAlias = tuple[object, ...]
HeldBytes: TypeAlias = Callable[[], list[int]]
"""Returns the bytes of each backend's arena at the moment of the call."""


class Planner:
    """Plans graphs over backends by one policy.

    `cache_size` plans are kept (0: none).  `budgets` maps positions in `backends` to the bytes that their arena and
    work memory may take.  `reorders`: another order of the nodes is planned, too, and used if its arenas are smaller.
    `windows` maps positions in `backends` to the windows of fetched weights (`Policy.windows`) that are not searched.
    `host_work` maps positions in `backends` to the host memory that kernels may take besides (`Backend.host_work`).
    """

    def __init__(self, backends: tuple[Backend, ...], policy_name: str, policy: Policy, cache_size: int,
                 budgets: Mapping[int, int], reorders: bool, windows: Mapping[int, int] | None = None,
                 host_work: Mapping[int, int] | None = None) -> None:
        self.backends = backends
        self.policy_name = policy_name
        self.policy = policy
        self.cache_size = cache_size
        self.budgets: dict[int, int] = dict(budgets)
        self.reorders = reorders
        self.windows: dict[int, int] = dict(windows or {})
        self.host_work: dict[int, int] = dict(host_work or {})
        self._has_stores = any(backend.is_store for backend in backends)
        self.devices: Devices = Devices(backends)
        self._cache: OrderedDict[Key, PlanData] = OrderedDict()
        # {(wiring, request key, fusion groups): reserved plans, those with the smallest arenas first}.  A graph of that
        # key whose tensors are no larger gets one of them by replay, without planning.  Kept until `clear`.
        self._reserved: dict[Key, list[PlanData]] = {}
        # Adopted plans, by `_lasting_key`.  Kept until `clear`.
        self._adopted: dict[Key, Adopted] = {}
        # {graph: the same graph in the order that `reorder` chose}: an order is searched for once.
        self._orders: weakref.WeakKeyDictionary[Graph, Graph] = weakref.WeakKeyDictionary()
        # {graph: the same graph in the order of its adopted plan}.  The entry keeps the reordered graph alive: the
        # caller does not have it, and allocations refer to it weakly.
        self._adopted_orders: weakref.WeakKeyDictionary[Graph, Graph] = weakref.WeakKeyDictionary()

    def plan(self, graph: Graph, assigned: Mapping[Tensor, Backend], held: HeldBytes) -> tuple[Plan, Request]:
        """The plan of a graph, and the request that it answers.

        Raises UnsupportedOp, PlacementError, GraphError or OutOfMemory, naming the tensor.
        """
        if self._adopted:
            found = self._plan_adopted(graph, assigned, held)
            if found is not None:
                return found
        if not self.reorders:
            return self._plan_order(graph, graph, assigned, held)
        if graph not in self._orders:
            self._orders[graph] = reorder(graph)
        try:
            own = self._plan_order(graph, graph, assigned, held)
        except OutOfMemory:
            # A plan with the nodes in the other order may fit into the budget.
            return self._plan_order(graph, self._orders[graph], assigned, held)
        try:
            other = self._plan_order(graph, self._orders[graph], assigned, held)
        except OutOfMemory:
            return own
        return min(own, other, key=lambda found: sum(found[0].buffer_sizes))

    def reserve(self, plan: Plan, request: Request) -> None:
        """Keep a plan, for replay to graphs of the same wiring with no larger tensors.

        The plan is not kept if one that was reserved before serves its request already, nor if it was adopted: a replay
        trusts lifetimes, which the file of an adopted plan states, and `verify` does not check.
        """
        if any(plan.data is adopted.data for adopted in self._adopted.values()):
            return
        plans = self._reserved.setdefault(_reserved_key(plan.graph, request, self.policy), [])
        if _replay_any(request, plans, self.policy) is None:
            plans.append(plan.data)
            plans.sort(key=lambda data: sum(data.buffer_sizes))

    def adopt(self, plan: Plan, assigned: Mapping[Tensor, Backend]) -> None:
        """Use this plan for its graph and for equal graphs from now on."""
        given = plan.given_graph
        order = None if plan.graph is given else tuple(given.position_of(node) for node in plan.graph.nodes)
        request = Request(given, self.devices, assigned)
        self._adopted[self._lasting_key(given, request, self.policy)] = Adopted(plan.data, order, self.devices.epoch())

    def clear(self) -> None:
        """Drop every plan, and the support cache."""
        self._cache.clear()
        self._reserved.clear()
        self._adopted.clear()
        self.devices.clear()

    def _plan_adopted(self, graph: Graph, assigned: Mapping[Tensor, Backend],
                      held: HeldBytes) -> tuple[Plan, Request] | None:
        """The adopted plan of an equal graph, and its request; None without one.  OutOfMemory if it exceeds a budget,
        HazardError if a backend that has changed its answers does not support it any more."""
        request = Request(graph, self.devices, assigned)
        key = self._lasting_key(graph, request, self.policy)
        adopted = self._adopted.get(key)
        if adopted is None:
            return None
        ordered = graph
        if adopted.order is not None:
            found = self._adopted_orders.get(graph)
            if found is None or [graph.position_of(node) for node in found.nodes] != list(adopted.order):
                found = self._adopted_orders[graph] = graph.with_order([graph.nodes[k] for k in adopted.order])
            ordered = found
            request = Request(ordered, self.devices, assigned)
        plan = Plan(ordered, adopted.data, self.backends, self.policy_name, graph)
        if adopted.epoch != self.devices.epoch():
            plan.verify()
            self._adopted[key] = adopted._replace(epoch=self.devices.epoch())
        excess = self._excess(plan, held)
        if excess is not None:
            raise excess
        return plan, request

    def _plan_order(self, given: Graph, graph: Graph, assigned: Mapping[Tensor, Backend],
                    held: HeldBytes) -> tuple[Plan, Request]:
        """A plan of `graph`: the caller's graph `given`, or the same nodes in another order."""
        request = Request(graph, self.devices, assigned)
        plan = self._find_widest(given, graph, request, self.policy, held)
        excess = self._excess(plan, held)
        if excess is None:
            return plan, request
        if any(plan.data.kept):
            # The plan may exceed the budget because copies of weights are kept between computes.  With `stream` each
            # compute makes them anew, and their memory serves other tensors, too.
            policy = dataclasses.replace(self.policy, stream=True)
            leaner = self._find_widest(given, graph, request, policy, held)
            if self._excess(leaner, held) is None:
                return leaner, request
        raise excess

    def _find_widest(self, given: Graph, graph: Graph, request: Request, policy: Policy, held: HeldBytes) -> Plan:
        """The plan by a policy; where weights are fetched, with the widest windows that the budgets allow."""
        if not self._has_stores or not any(buffer.backend.is_store for buffer in request.buffers):
            return self._find_plan(given, graph, request, policy)
        limits = [self._limit(i, held) for i in range(len(self.backends))]
        key: Key = (*self._key(graph, request, policy), *limits)
        data = self._cache.get(key) or self._replayed(graph, request, policy)
        if data is None:
            def made(windows: Sequence[int]) -> Plan:
                return self._find_plan(given, graph, request, dataclasses.replace(policy, windows=tuple(windows)))

            data = widest(made, self.backends, self.windows, limits).data
        self._keep(key, data)
        return Plan(graph, data, self.backends, self.policy_name, given)

    def _key(self, graph: Graph, request: Request, policy: Policy) -> Key:
        """The key of a plan in the cache, which is dropped when backends change their answers."""
        return (*self._lasting_key(graph, request, policy), self.devices.epoch())

    def _lasting_key(self, graph: Graph, request: Request, policy: Policy) -> Key:
        """The key of an adopted plan.  It has `stream` and `windows` of the policy, because a planner changes no other
        field of its policy."""
        limits = tuple([backend.max_buffer_size for backend in self.backends])
        return graph.fingerprint, request.key, policy.stream, policy.windows, limits

    def _find_plan(self, given: Graph, graph: Graph, request: Request, policy: Policy) -> Plan:
        """A plan from the cache, by replay of a reserved plan, or newly made."""
        key = self._key(graph, request, policy)
        data = self._cache.get(key) or self._replayed(graph, request, policy) or make_plan(request, policy)
        if not policy.windows:
            self._keep(key, data)
        return Plan(graph, data, self.backends, self.policy_name, given)

    def _keep(self, key: Key, data: PlanData) -> None:
        """Put a plan into the cache, as the one that was used last."""
        if self.cache_size:
            self._cache[key] = data
            self._cache.move_to_end(key)
            while len(self._cache) > self.cache_size:
                self._cache.popitem(last=False)

    def _replayed(self, graph: Graph, request: Request, policy: Policy) -> PlanData | None:
        """The replay of a reserved plan; None where none fits, and for a policy with `stream` or `windows`."""
        if not self.cache_size or policy.stream or policy.windows:
            return None
        return _replay_any(request, self._reserved.get(_reserved_key(graph, request, policy), ()), policy)

    def _limit(self, i: int, held: HeldBytes) -> int | None:
        """The bytes that arena and work memory of backend i may take; None for no bound."""
        if i in self.budgets:
            return self.budgets[i]
        free = self.backends[i].memory_available()
        return None if free is None else free + held()[i] + self.backends[i].work_held

    def _excess(self, plan: Plan, held: HeldBytes) -> OutOfMemory | None:
        """If a plan exceeds a budget, the OutOfMemory to raise, which names the missing bytes and the tensors alive at
        the peak; else None."""
        for i, backend in enumerate(self.backends):
            if backend.worker is not None and i not in self.budgets and plan.buffer_sizes[i] <= held()[i]:
                continue    # A worker checks its work memory when it gets a split; to query it would take messages.
            limit = self._limit(i, held)
            if limit is None:
                continue
            arena, work = plan.buffer_sizes[i], plan.work_sizes[i]
            needed = arena + work
            if needed > limit:
                alive = plan.data.live_at_peak(i)
                shown = ", ".join(f"{plan.label_of(k)} {plan.data.size(k)}" for k in alive[:8])
                more = f" and {len(alive) - 8} more" if len(alive) > 8 else ""
                what = f"the arena needs {arena} bytes" + (f" and the kernels {work}" if work else "")
                return OutOfMemory(
                    f"backend {backend.name!r}: {what}, {limit} are available, "
                    f"{needed - limit} are missing; alive at the peak: {shown}{more}",
                    backend.name, needed, limit)
        for i, limit in self.host_work.items():
            needed = plan.host_work_sizes[i]
            if needed > limit:
                name = self.backends[i].name
                return OutOfMemory(f"backend {name!r}: its kernels need {needed} bytes of the host's memory, {limit} "
                                   f"are available, {needed - limit} are missing", name, needed, limit)
        return None


def _reserved_key(graph: Graph, request: Request, policy: Policy) -> Key:
    """The key of reserved plans: a graph gets the plan of a reserved graph by replay only if their keys are equal."""
    return graph.wiring, request.key, request.groups(policy)


def _replay_any(request: Request, plans: Iterable[PlanData], policy: Policy) -> PlanData | None:
    """The replay of the first reserved plan that fits the request; None if none fits."""
    for plan in plans:
        data = replay_plan(request, plan, policy)
        if data is not None:
            return data
    return None
