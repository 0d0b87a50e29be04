"""The scheduler: plans graphs over backends, owns their arenas, and computes.

`plan` makes values, `alloc` gives them memory, `compute` runs them, `compute_async` queues them.  Whatever
raises leaves the scheduler, its old plan and its memory as they were; whatever changes addresses first waits
for what is queued.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from operator import index as _index

from ggml_sched._core import Devices, PlanData, Policy, Request, make_plan, replay_plan
from ggml_sched._graph import Graph, Tensor
from ggml_sched.backend import Backend, Buffer
from ggml_sched.errors import Error, OutOfMemory, PlacementError
from ggml_sched.executor import Allocation, Ask, Callback, each
from ggml_sched.pipeline import MAX_IN_FLIGHT, Pipeline
from ggml_sched.plan import Plan
from ggml_sched.reorder import reorder

__all__ = ["Scheduler"]

POLICIES = {
    "default": Policy(),
    "seed": Policy(placement="seed", offsets="best fit", reuse="first", leafs_first=False),
}
"""What the names mean."""


class _Turn:
    """One call at a time: a second thread, or a callback, gets an error instead of corruption."""

    __slots__ = ("closed", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.closed = False

    def __enter__(self) -> None:
        if not self.lock.acquire(False):
            raise Error("this scheduler is at work: use one scheduler for each thread, and none inside its callbacks")
        if self.closed:
            self.lock.release()
            raise Error("this scheduler is closed")

    def __exit__(self, *exc) -> None:
        self.lock.release()


class Scheduler:
    """Runs graphs over several backends, given in order of preference (the best first, the host last).

    `policy="seed"` places as the first generation of ggml did.  `plan_cache` plans are kept, so that an
    equal graph built anew is not planned again (0: plan afresh on every call).  `budgets` maps backends to the
    bytes that their arena may take; without one, what the backend says is left counts.  `copies` is the
    number of places (at most 64) that each copy between backends has, used in turn by queued computes (policy
    "default"); they are part of `plan.buffer_sizes`.  `reorder` also plans the nodes in another order (reorder.py)
    and keeps it when its arenas are smaller; positions in the plan then count in `plan.graph.nodes`.  A context
    manager.

    Raises ValueError for no backends, one twice, or an unknown policy.  Used from a second thread while
    it works, it raises Error.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        policy: str = "default",
        copies: int = 1,
        plan_cache: int = 8,
        budgets: Mapping[Backend, int] | None = None,
        reorder: bool = False,
    ) -> None:
        backends = tuple(backends)
        if not backends:
            raise ValueError("a scheduler needs at least one backend")
        for backend in backends:
            if not isinstance(backend, Backend):
                raise TypeError(f"not a Backend: {backend!r}")
        if len({id(backend) for backend in backends}) != len(backends):
            raise ValueError("a backend is given twice")
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
        copies, plan_cache = _index(copies), _index(plan_cache)
        if not 1 <= copies <= MAX_IN_FLIGHT:
            raise ValueError(f"copies = {copies} is not in 1 .. {MAX_IN_FLIGHT}, the computes that are queued at once")
        if plan_cache < 0:
            raise ValueError(f"plan_cache = {plan_cache} must be at least 0")
        self.backends = backends
        self.policy = policy
        self._policy = POLICIES[policy]
        if policy != "seed":
            self._policy = self._policy.replace(places=copies)
        self.copies = copies
        self.reorder = reorder
        self.closed = False
        self._cache_size = plan_cache
        self._devices = Devices(backends)
        self._cache: OrderedDict[tuple, PlanData] = OrderedDict()
        # What was reserved, by wiring and residency: serves smaller graphs without planning.
        self._reserved: dict[tuple[int, int], PlanData] = {}
        self._assigned: weakref.WeakKeyDictionary[Tensor, Backend] = weakref.WeakKeyDictionary()
        self._budgets = {self._index(backend): _index(nbytes) for backend, nbytes in (budgets or {}).items()}
        for i, nbytes in self._budgets.items():
            if nbytes < 0:
                raise ValueError(f"backend {backends[i].name!r}: a budget of {nbytes} bytes")
        # For each backend the buffers of its arena: one, or one for each chunk.
        self._buffers: list[tuple[Buffer, ...]] = [()] * len(backends)
        self._orders: weakref.WeakKeyDictionary[Graph, Graph] = weakref.WeakKeyDictionary()
        self._current: Allocation | None = None
        self._epoch = self._answers = -1
        self._residents: list[Buffer] = []
        self._turn = _Turn()
        self._pipeline = Pipeline(backends)

    # -- planning -------------------------------------------------------------

    def plan(self, graph: Graph) -> Plan:
        """Decide placement, splits, copies and offsets; no device memory is allocated.

        Raises UnsupportedOp, PlacementError, GraphError or OutOfMemory, naming the tensor.
        """
        with self._turn:
            return self._plan(graph)[0]

    def reserve(self, *graphs: Graph) -> None:
        """Allocate buffers large enough for each of the graphs, which share them, one at a time.

        Graphs of the same wiring as one of these whose tensors are no larger always fit, and are not planned
        again: they use its plan (unless `plan_cache` is 0).  A graph in which less can run in place is planned
        for itself: one that broadcasts where the reserved one did not, or whose view hands its memory over there
        but is not aligned here.  Raises OutOfMemory.
        """
        with self._turn:
            sizes: list[tuple[int, ...]] = [()] * len(self.backends)
            plans = [self._plan(graph) for graph in graphs]
            for plan, _ in plans:
                wanted = plan.chunk_sizes
                sizes = [
                    tuple(max(pair) for pair in zip_longest(*pairs, fillvalue=0))
                    for pairs in zip(sizes, wanted, strict=True)
                ]
            self._grow(sizes)
            for plan, request in plans:
                self._reserved[plan.graph.wiring, request.key] = plan.data

    def _plan(self, graph: Graph) -> tuple[Plan, Request]:
        if not isinstance(graph, Graph):
            raise TypeError(f"not a Graph: {graph!r}")
        if not self.reorder:
            return self._plan_order(graph)
        if graph not in self._orders:
            self._orders[graph] = reorder(graph)
        given: tuple[Plan, Request] | None = None
        try:
            given = self._plan_order(graph)
        except OutOfMemory:
            # Perhaps the other order fits.
            return self._plan_order(self._orders[graph])
        try:
            other = self._plan_order(self._orders[graph])
        except OutOfMemory:
            return given
        return min(given, other, key=lambda found: sum(found[0].buffer_sizes))

    def _plan_order(self, graph: Graph) -> tuple[Plan, Request]:
        request = Request(graph, self._devices, self._assigned)
        plan = self._cached_plan(graph, request, False)
        excess = self._excess(plan)
        if excess is not None and any(plan.data.kept):
            # Weights kept beside the arena may be what is too much: let them take turns instead.
            leaner = self._cached_plan(graph, request, True)
            if self._excess(leaner) is None:
                return leaner, request
        if excess is not None:
            raise excess
        return plan, request

    def _cached_plan(self, graph: Graph, request: Request, stream: bool) -> Plan:
        limits = tuple([backend.max_buffer_size for backend in self.backends])
        key = (graph.fingerprint, request.key, stream, limits, self._devices.epoch())
        data = self._cache.get(key)
        if data is None:
            reserved = self._reserved.get((graph.wiring, request.key)) if self._cache_size and not stream else None
            if reserved is not None:
                data = replay_plan(request, reserved, self._policy)
            if data is None:
                data = make_plan(request, self._policy.replace(stream=stream) if stream else self._policy)
            if self._cache_size:
                self._cache[key] = data
                while len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        return Plan(graph, data, self.backends, self.policy)

    def _excess(self, plan: Plan) -> OutOfMemory | None:
        """The error to raise if a plan exceeds a backend's budget: shortfall, and what is alive at the peak."""
        sizes = plan.data.buffer_sizes
        for i, backend in enumerate(self.backends):
            needed = sizes[i]
            limit = self._budgets.get(i)
            if limit is None:
                free = backend.memory_available()
                if free is None:
                    continue
                limit = free + sum(buffer.size for buffer in self._buffers[i] if not buffer.closed)
            if needed > limit:
                alive = plan.data.live_at_peak(i)
                shown = ", ".join(f"{plan.name_of(k) or 'unnamed'!r} {plan.data.size(k)}" for k in alive[:8])
                more = f" and {len(alive) - 8} more" if len(alive) > 8 else ""
                return OutOfMemory(
                    f"backend {backend.name!r}: the arena needs {needed} bytes, {limit} are available, "
                    f"{needed - limit} are missing; alive at the peak: {shown}{more}",
                    backend.name, needed, limit)
        return None

    # -- memory -----------------------------------------------------------------

    def alloc(self, graph: Graph) -> Plan:
        """Plan a graph and give its tensors addresses; then set its inputs and `compute`.

        The tensors of the graph allocated before lose theirs.  Raises what `plan` raises, and OutOfMemory.
        """
        with self._turn:
            return self._alloc(graph).plan

    def _alloc(self, graph: Graph) -> Allocation:
        current = self._current
        if current is not None and current.asked is graph and self._is_fresh(current):
            if current.lease.displaced:
                self._renew(current)
            return self._current
        answers = self._devices.epoch()
        plan, request = self._plan(graph)
        self._grow(plan.chunk_sizes)
        self._replace(plan, request, graph)
        self._answers = answers
        return self._current

    def _is_fresh(self, current: Allocation) -> bool:
        """Whether nothing has changed since: weights where they were, assignments, what backends answer."""
        return (self._cache_size > 0 and current.lease.alive
                and self._devices.unchanged(current.plan.graph, self._residents, self._epoch, self._answers))

    def _renew(self, current: Allocation) -> None:
        """Another scheduler has addressed some of the tensors since: address them here again."""
        self._release_current()
        self._current = Allocation(current.plan, tuple(self._buffers), current.asked)

    def _replace(self, plan: Plan, request: Request, asked: Graph) -> None:
        self._release_current()
        self._current = Allocation(plan, tuple(self._buffers), asked)
        self._epoch = plan.graph.residence_epoch()
        self._residents = request.buffers

    def _grow(self, sizes: Sequence[Sequence[int]]) -> None:
        """Buffers of at least these sizes, for each backend and chunk.

        When one cannot be had, all stay as they are; when old ones had to go first, they come back, and the
        allocation with them: its inputs are loaded again, its results are gone.
        """
        short = {}
        for i, wanted in enumerate(sizes):
            held = self._buffers[i]
            for chunk, size in enumerate(wanted):
                if chunk >= len(held) or held[chunk].closed or held[chunk].size < size:
                    short[i, chunk] = size
        if not short:
            return
        crowded = {(i, c): self._buffers[i][c].size for i, c in short if self._is_crowded(i, short)
                   and c < len(self._buffers[i]) and not self._buffers[i][c].closed}
        if not crowded:
            self._exchange(short)
            return
        # Old and new do not fit side by side: the old ones go first, and come back (empty) if the new ones fail.
        current = self._current
        self._release_current()
        each(self._buffers[i][c].close for i, c in crowded)
        try:
            self._exchange(short)
        except BaseException:
            self._exchange(crowded)
            if current is not None:
                self._current = Allocation(current.plan, tuple(self._buffers), current.asked)
            raise

    def _is_crowded(self, i: int, short: dict[tuple[int, int], int]) -> bool:
        """Whether a backend says that it cannot hold its new buffers beside the old ones."""
        free = self.backends[i].memory_available()
        return free is not None and free < sum(size for (k, _), size in short.items() if k == i)

    def _exchange(self, sizes: dict[tuple[int, int], int]) -> None:
        """Put new buffers in the place of old ones, all or none."""
        fresh: dict[tuple[int, int], Buffer] = {}
        try:
            for (i, chunk), size in sizes.items():
                fresh[i, chunk] = self._new_buffer(self.backends[i], size)
            self._release_current()
        except BaseException:
            each(buffer.close for buffer in fresh.values())
            raise
        replaced = []
        for i, held in enumerate(self._buffers):
            chunks = dict(enumerate(held)) | {c: buffer for (k, c), buffer in fresh.items() if k == i}
            self._buffers[i] = tuple(chunks[c] for c in sorted(chunks))
            replaced += [buffer for buffer in held if buffer not in self._buffers[i]]
        each(buffer.close for buffer in replaced)

    def _new_buffer(self, backend: Backend, size: int) -> Buffer:
        buffer = backend.alloc_buffer(size)
        buffer.usage = "compute"
        return buffer

    def _release_current(self) -> None:
        current = self._current
        if current is not None:
            self._drain()
            self._current = None
            current.release()

    def _drain(self) -> None:
        """Wait for queued computes; what they raised stays for `synchronize`."""
        self._pipeline.drain()
        if self._pipeline.failed and self._current is not None:
            self._current.forget()

    def buffer_size(self, backend: Backend) -> int:
        """Bytes of the arena held on a backend at the moment."""
        return sum(buffer.size for buffer in self._buffers[self._index(backend)] if not buffer.closed)

    # -- computing ----------------------------------------------------------------

    def compute(self, graph: Graph, callback: Callback | None = None, ask: Ask | None = None) -> bool:
        """Run a graph, allocating it first if it is not the one allocated last; all results are there on return.

        Inputs must have been set since the graph was allocated for the first time; they keep their data.
        `callback(node)` is called after each computed node, whose data it may read; when it returns False, nothing
        more runs on any backend, and `compute` returns False instead of True.

        `ask(node)` is called before a node is computed, in the same order.  Where it returns False, the callback
        does not see the node, which then runs together with those after it, up to the next that is asked for;
        without `ask`, every node runs singly.  Its data is not there yet: it may look at name, op and shape.

        Exceptions of backends, of the callback and of `ask` reach the caller; the scheduler works afterwards.
        Computes that are queued end first; what they raised is raised here.  Raises what `alloc` raises, and
        ValueError for `ask` without `callback`.
        """
        if ask is not None and callback is None:
            raise ValueError("ask says which nodes the callback sees, and there is no callback")
        with self._turn:
            self._synchronize()
            return self._alloc(graph).run(callback, ask)

    def compute_async(self, graph: Graph) -> None:
        """Queue a compute and return; the results are there after `synchronize`.

        Inputs may be set anew at once: a compute uses what was set when it was queued.  Computes that follow
        each other overlap where they are on different backends.  Reading a tensor of the graph waits for what
        is queued; weights and caches, which live outside the graph's plan, must not be set or read before
        `synchronize`.
        When something fails, the rest of what is queued is skipped.  Raises what `alloc` raises.
        """
        with self._turn:
            self._alloc(graph).submit(self._pipeline)

    def synchronize(self) -> None:
        """Wait until everything queued has ended; raises the first exception of a step since the last call.

        Results then hold until the next compute.  The scheduler works after an exception.
        """
        with self._turn:
            self._synchronize()

    def _synchronize(self) -> None:
        self._drain()
        error = self._pipeline.take_error()
        if error is not None:
            raise error

    # -- assignments ----------------------------------------------------------------

    def set_tensor_backend(self, t: Tensor, backend: Backend | None) -> None:
        """Ask for a tensor to be computed (or, a leaf, to be placed) on a backend; None takes it back.

        Works before and after planning, and survives `reset`.
        """
        if not isinstance(t, Tensor):
            raise TypeError(f"not a Tensor: {t!r}")
        with self._turn:
            if backend is not None:
                self._index(backend)
            self._drain()
            if backend is None:
                self._assigned.pop(t, None)
            else:
                self._assigned[t] = backend
            self._epoch = -1

    def get_tensor_backend(self, t: Tensor) -> Backend | None:
        """The backend assigned by the caller, else by the current plan, else where the tensor lives; or None."""
        if not isinstance(t, Tensor):
            raise TypeError(f"not a Tensor: {t!r}")
        if t in self._assigned:
            return self._assigned[t]
        if self._current is not None and t in self._current.plan.graph:
            return self._current.plan.backend_of(t)
        return t.backend

    def _index(self, backend: Backend) -> int:
        for i, known in enumerate(self.backends):
            if known is backend:
                return i
        names = ", ".join(b.name for b in self.backends)
        raise PlacementError(f"{backend!r} is not one of the scheduler's backends ({names})")

    # -- life -------------------------------------------------------------------

    def reset(self) -> None:
        """Forget the current allocation, the cached plans and what backends answered.  Buffers and assignments stay."""
        with self._turn:
            self._release_current()
            self._cache.clear()
            self._reserved.clear()
            self._devices.forget()

    def close(self) -> None:
        """Give the arenas back; idempotent.  Tensors addressed here lose their addresses."""
        if self.closed:
            return
        with self._turn:
            self._pipeline.drain()
            self.closed = self._turn.closed = True
            self._cache.clear()
            held, self._buffers = [b for buffers in self._buffers for b in buffers], [()] * len(self.backends)
            each([self._release_current, *(buffer.close for buffer in held), self._pipeline.close])

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(b.name for b in self.backends)
        return f"<Scheduler policy={self.policy!r} over {names}{', closed' if self.closed else ''}>"
