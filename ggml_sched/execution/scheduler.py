"""The scheduler: plans graphs over backends, gives them memory, and computes.

It joins planner.py (plans), arenas.py (buffers), allocation_cache.py (which graph has addresses) and pipeline.py
(queued computes).  A call that raises leaves the scheduler, its old plan and its memory as they were; a call that
changes addresses first waits for queued computes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from operator import index as _index

from ggml_sched._core import Request
from ggml_sched._graph import Graph, Tensor
from ggml_sched.backend import Backend, checked_backends
from ggml_sched.errors import BackendError, Error, PlacementError, each
from ggml_sched.execution.allocation_cache import Allocations, Tracked
from ggml_sched.execution.arenas import SchedulerArenas
from ggml_sched.execution.observer import Ask, Callback
from ggml_sched.execution.pipeline import MAX_IN_FLIGHT, Pipeline
from ggml_sched.execution.shared_arenas import Arenas, Leased, LockAndLease
from ggml_sched.execution.tracing import Trace
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.planner import POLICIES, Planner
from ggml_sched.threads.locks import OneAtATime

__all__ = ["Scheduler"]

NO_LEASE: AbstractContextManager[object] = nullcontext()


class Scheduler:
    """Runs graphs over several backends, given in order of preference (the best first, the host last).

    `policy="seed"` places nodes as the first version of ggml's scheduler did.  Up to `plan_cache` plans are kept, so
    that an equal graph built anew is not planned again, and as many graphs keep what backends have prepared for them,
    so that switching between them prepares nothing (0: plan on every call).  `budgets` maps backends to the bytes that
    their arena and the work memory of their kernels may take; for a backend without a budget, or with None,
    `memory_available` is the limit.  `copies` is the number of slots (at most 64) of each copy between backends, used
    in turn by queued computes (policy "default"); the slots are part of `plan.buffer_sizes`.  `reorder` also plans the
    nodes in another order (reorder.py) and uses that plan when its arenas are smaller; positions in the plan are then
    indices into `plan.graph.nodes`.  `zero`: inputs that were never set are zeros; otherwise computing with one raises
    HazardError.  Weights of a store (`Backend.is_store`) are fetched in each compute while earlier nodes are computed;
    `windows` maps backends to the bytes that such weights may take from the begin of their fetch to their last reader.
    A backend that is not in `windows` gets a window as large as its budget allows, or twice the largest weight if it
    has no limit.  `host_work` maps backends to the bytes of the host's memory that their kernels may take besides
    buffers (`Backend.host_work`).  In each of these three, None is the same as a backend that is not there.  `arenas`:
    the buffers are shared with the other schedulers that are given the same `Arenas`.
    A scheduler is a context manager.

    Raises ValueError for no backends, for a backend given twice, if the host is not last or a store is, or for an
    unknown policy.  A call from a second thread during another call raises Error.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        policy: str = "default",
        copies: int = 1,
        plan_cache: int = 8,
        budgets: Mapping[Backend, int | None] | None = None,
        reorder: bool = False,
        zero: bool = False,
        windows: Mapping[Backend, int | None] | None = None,
        host_work: Mapping[Backend, int | None] | None = None,
        arenas: Arenas | None = None,
    ) -> None:
        backends = checked_backends(backends, "a scheduler takes a sequence of backends: Scheduler([backend])")
        if not backends:
            raise ValueError("a scheduler needs at least one backend")
        if len({id(backend) for backend in backends}) != len(backends):
            raise ValueError("a backend is given twice")
        host = next((backend for backend in backends if backend.is_host), None)
        if host is not None and not backends[-1].is_host:
            raise ValueError(f"backend {host.name!r} has the host's memory and comes before {backends[-1].name!r}: the "
                             "host is last, because data that the caller sets starts there")
        if backends[-1].is_store:
            raise ValueError(f"backend {backends[-1].name!r} is a store, which computes nothing: the last one computes "
                             "what no other does")
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
        copies, plan_cache = _index(copies), _index(plan_cache)
        if not 1 <= copies <= MAX_IN_FLIGHT:
            raise ValueError(f"copies = {copies} is not in 1 .. {MAX_IN_FLIGHT}, the computes that are queued at once")
        if plan_cache < 0:
            raise ValueError(f"plan_cache = {plan_cache} must be at least 0")
        self.backends: tuple[Backend, ...] = backends
        self.policy = policy
        self.copies = copies
        self.reorder = reorder
        self.zero = zero
        self.closed: bool = False
        self._trace: Trace | None = None
        self._computes = any(b.has_memory and not b.is_store or getattr(b, "accepts_computes", False)
                             for b in backends)
        limits, ahead = self._bytes_of("budget", budgets), self._bytes_of("window", windows)
        self._planner = Planner(backends, policy, replace(POLICIES[policy], n_copies=copies), plan_cache, limits,
                                reorder, ahead, self._bytes_of("bound of work", host_work))
        if not isinstance(arenas, Arenas | None):
            raise TypeError(f"arenas are gs.Arenas(), not {arenas!r}")
        self._leased = None if arenas is None else Leased(arenas, backends, limits)
        self._arenas = self._leased or SchedulerArenas(backends, limits)
        self._pipeline = Pipeline(backends)
        self._allocations = Allocations(self._arenas, self._pipeline, self._planner.devices, plan_cache)
        self._assigned: weakref.WeakKeyDictionary[Tensor, Backend] = weakref.WeakKeyDictionary()
        self._one = OneAtATime(
            partial(Error, "this scheduler is at work: use one scheduler for each thread, and none inside its "
                           "callbacks"),
            partial(Error, "this scheduler is closed"))
        self._lock: OneAtATime | LockAndLease = self._one
        if self._leased is not None:
            self._leased.serve(self._allocations, self._pipeline)
            self._lock = LockAndLease(self._one, self._leased)

    def _bytes_of(self, what: str, given: Mapping[Backend, int | None] | None) -> dict[int, int]:
        """{position of a backend: bytes} from `given`, {backend: bytes or None}; those with None are left out.  Raises
        TypeError or ValueError for anything else; `what` names the bytes in the message."""
        if not isinstance(given, Mapping | None):
            raise TypeError(f"{what}s are {{backend: bytes}}, not {given!r}")
        positions = {self._index(backend): nbytes for backend, nbytes in (given or {}).items()}
        found = {i: _index(nbytes) for i, nbytes in positions.items() if nbytes is not None}
        for i, nbytes in found.items():
            if nbytes < 0:
                raise ValueError(f"backend {self.backends[i].name!r}: a {what} of {nbytes} bytes")
        return found

    def without(self, *lost: Backend) -> Scheduler:
        """A scheduler over the other backends, with the same policy, budgets and assignments: for when a backend is
        lost.

        Tensors that had memory on a lost backend have to be loaded again on another.  This scheduler stays open.
        PlacementError for a backend that it does not have, ValueError if none would be left.
        """
        gone = {self._index(backend) for backend in lost}
        rest = [backend for i, backend in enumerate(self.backends) if i not in gone]
        if not rest:
            raise ValueError("no backend would be left")
        budgets = {self.backends[i]: n for i, n in self._planner.budgets.items() if i not in gone}
        windows = {self.backends[i]: n for i, n in self._planner.windows.items() if i not in gone}
        other = Scheduler(rest, self.policy, self.copies, self._planner.cache_size, budgets, self.reorder, self.zero,
                          windows, {self.backends[i]: n for i, n in self._planner.host_work.items() if i not in gone},
                          None if self._leased is None else self._leased.shared)
        for t, backend in self._assigned.items():
            if backend in rest:
                other.set_tensor_backend(t, backend)
        return other

    # -- planning -------------------------------------------------------------

    def plan(self, graph: Graph) -> Plan:
        """Decide placement, splits, copies and offsets; no device memory is allocated.

        Raises UnsupportedOp, PlacementError, GraphError or OutOfMemory, naming the tensor.
        """
        with self._lock:
            return self._plan(graph)[0]

    def reserve(self, *graphs: Graph) -> None:
        """Allocate buffers large enough for each of the graphs, which share them, one at a time.

        A graph with the wiring of a reserved graph and no larger tensors always fits, and is not planned again: it
        uses the plan of the reserved graph (unless `plan_cache` is 0).  The exception is a graph in which fewer nodes
        can run in place: because it broadcasts where the reserved graph does not, or because a view that is aligned in
        the reserved graph is not aligned in it.  Such a graph is planned separately.  Raises OutOfMemory.
        """
        with self._lock:
            sizes: list[tuple[int, ...]] = [()] * len(self.backends)
            plans = [self._plan(graph) for graph in graphs]
            for plan, _ in plans:
                sizes = [tuple(max(pair) for pair in zip_longest(*pairs, fillvalue=0))
                         for pairs in zip(sizes, plan.chunk_sizes, strict=True)]
            self._grow(sizes)
            for plan, request in plans:
                self._planner.reserve(plan, request)

    def expect(self, graph: Graph) -> None:
        """Announce a graph that will probably be allocated later.

        Backends of other processes then get what planning it takes (which nodes they support, their fusion groups)
        with the messages of the next compute; without this, planning the graph takes messages of its own.
        """
        with self._lock:
            self._planner.devices.expect(graph)

    def adopt(self, plan: Plan) -> None:
        """Use a plan made elsewhere (`gs.load_plan`) whenever its graph, or an equal one, is allocated or planned.

        With `reorder`, too, no other plan is used for that graph.  If the plan exceeds a budget later, allocating or
        planning its graph raises OutOfMemory.  Raises PlacementError for a plan of other backends or another policy,
        HazardError for an unsound plan.
        """
        if not isinstance(plan, Plan):
            raise TypeError(f"not a Plan, as gs.load_plan(path, graph, backends) returns: {plan!r}")
        with self._lock:
            if plan.backends != self.backends or plan.policy != self.policy:
                raise PlacementError(f"{plan!r} was made for other backends, or by policy {plan.policy!r}")
            plan.verify()
            self._planner.adopt(plan, self._assigned)
            self._allocations.forget_assignments()

    def _plan(self, graph: Graph) -> tuple[Plan, Request]:
        if not isinstance(graph, Graph):
            raise TypeError(f"not a Graph: {graph!r}")
        return self._planner.plan(graph, self._assigned, self._arenas.held)

    # -- memory -----------------------------------------------------------------

    def alloc(self, graph: Graph) -> Plan:
        """Plan a graph and give its tensors addresses; then set its inputs and `compute`.

        The tensors of the graph allocated before lose their addresses, until that graph is allocated again.  Raises
        the exceptions of `plan`, and OutOfMemory.
        """
        with self._lock:
            return self._alloc(graph).plan

    def _alloc(self, graph: Graph) -> Tracked:
        if self._leased is not None:
            self._leased.occupy()
        return self._allocations.find(graph) or self._alloc_anew(graph)

    def _alloc_anew(self, graph: Graph) -> Tracked:
        support_epoch = self._planner.devices.epoch()
        plan, request = self._plan(graph)
        self._grow(plan.chunk_sizes)
        return self._allocations.put(plan, request.buffers, support_epoch, graph)

    def _grow(self, sizes: Sequence[Sequence[int]]) -> None:
        """Allocate buffers of at least these sizes; if buffers are replaced, every allocation is released.

        When they cannot be allocated, the current graph is allocated in the old buffers again: its inputs are loaded
        again, its results may be lost.
        """
        if self._arenas.hold(sizes):
            return
        before = self._allocations.snapshot()
        try:
            self._arenas.grow(sizes, self._allocations.invalidate)
        except BaseException:
            if before is not None and self._allocations.current is None and self._arenas.are_open():
                self._allocations.put(*before)
            raise

    def lease(self) -> AbstractContextManager[object]:
        """In the block of `with scheduler.lease():` no other scheduler gets the memory of shared arenas, so that
        results can be read although other threads use them, too; without shared arenas it does nothing.

        It waits for the memory as the calls of a scheduler do.  Raises Error if the wait would never end (see
        `Arenas`).
        """
        return self._leased or NO_LEASE

    def buffer_size(self, backend: Backend) -> int:
        """Bytes of the arena that the scheduler has on a backend now."""
        return self._arenas.held()[self._index(backend)]

    # -- computing ----------------------------------------------------------------

    def compute(self, graph: Graph, callback: Callback | None = None, ask: Ask | None = None,
                zero: bool | None = None, wait: bool = True) -> bool:
        """Run a graph, allocating it first if it is not the one allocated last; all results can be read on return.

        Inputs keep the data that the caller has set.  An input that was never set raises HazardError, unless `zero`
        (default: `zero` of the scheduler) is True: then it is zeros.
        `callback(node)` is called after each computed node, whose data it may read; when it returns False, nothing
        more runs on any backend, and `compute` returns False instead of True.

        `ask(node)` is called before a node is computed, in the order of the nodes; it may read the node's name, op and
        shape, not its data.  Where it returns False, the callback is not called for the node, and the node runs
        together with the nodes after it, up to the next one for which `ask` returns True; without `ask`, every node
        runs alone.

        `wait=False` returns when everything is queued on the backends that are `asynchronous`, and done on the others;
        reading a result then waits for it.  An error of queued work is raised once, by the first call that waits:
        reading a result (`numpy`, `backend.get_tensor`), `synchronize`, or the next compute.  After that, reading
        results raises HazardError.

        Exceptions of backends, of the callback and of `ask` reach the caller; the scheduler can be used afterwards.
        What the nodes write is undefined after an exception of a backend, which may have computed later nodes, too.
        Computes queued before are waited for first, and their errors are raised here.  Raises the exceptions of
        `alloc`, BackendError if no backend has memory, and ValueError for `ask` without `callback`.
        """
        if ask is not None and callback is None:
            raise ValueError("ask says which nodes the callback sees, and there is no callback")
        with self._lock:
            if not self._pipeline.is_idle and (callback is not None or not self._pipeline.is_in_order):
                self._synchronize()
            allocation = self._alloc(graph)
            self._check_computes()
            if self._pipeline.failed:
                self._synchronize()         # `find` may have waited for queued computes, and one has failed
            trace = self._trace
            return allocation.run(
                self._pipeline, callback, ask, self.zero if zero is None else zero,
                wait or callback is not None or trace is not None and trace.waits_after_steps, trace)

    def compute_async(self, graph: Graph, zero: bool | None = None) -> None:
        """Queue a compute and return; the results can be read after `synchronize`.

        Inputs may be set anew at once: a compute uses the data that they had when it was queued.  Consecutive computes
        overlap where they use different backends.  Reading a tensor of the graph waits for the queued computes, and so
        does setting or reading weights and caches.  After a failure the remaining queued steps are skipped.  `zero` as
        in `compute`.  Raises the exceptions of `alloc`, and BackendError if no backend has memory.
        """
        with self._lock:
            allocation = self._alloc(graph)
            self._check_computes()
            trace, zero = self._trace, self.zero if zero is None else zero
            if trace is None or not trace.waits_after_steps:
                allocation.submit(self._pipeline, zero, trace)
            else:
                self._synchronize()
                allocation.run(self._pipeline, zero=zero, trace=trace)

    def _check_computes(self) -> None:
        """Raise BackendError if no backend has memory, so that nothing would be computed."""
        if not self._computes:
            names = ", ".join(repr(backend.name) for backend in self.backends)
            raise BackendError(f"the backends {names} are dry: they have no memory, and compute nothing; `plan` and "
                               "`alloc` are for them")

    def synchronize(self) -> None:
        """Wait until every queued compute has ended; raises the first exception of a step since the last call.

        Results are then valid until the next compute.  The scheduler can be used after an exception.
        """
        with self._lock:
            self._synchronize()

    def _synchronize(self) -> None:
        self._allocations.drain()
        error = self._pipeline.take_error()
        if error is not None:
            raise error

    @contextmanager
    def trace(self, nodes: bool = False, exact: bool = False) -> Iterator[Trace]:
        """Record when each step of the computes in a `with` block begins and ends: `with scheduler.trace() as trace`.

        `trace.save("t.json")` writes a timeline for Perfetto, `print(trace)` a table.  Outside such a block nothing is
        recorded, and nothing costs time.

        `exact`: the host waits for all backends after each step.  Without it a step of an `asynchronous` backend ends
        when it is issued.  `nodes`: nodes are recorded, too; each runs alone, without fusion, and the host waits for
        it.  With either, steps of different backends do not overlap, and `compute_async` computes at once.

        Queued computes are waited for at both ends of the block, and errors of theirs raised there.  Raises Error if
        the scheduler is traced already.
        """
        with self._lock:
            if self._trace is not None:
                raise Error("this scheduler is traced already: one trace at a time")
            self._synchronize()
            self._trace = trace = Trace(self.backends, nodes, exact)
        try:
            yield trace
        finally:
            self._trace = None
            if not self.closed:
                self.synchronize()

    # -- assignments ----------------------------------------------------------------

    def set_tensor_backend(self, t: Tensor, backend: Backend | None) -> None:
        """Assign a node to a backend that then computes it, or a leaf to one that then holds it; None: no assignment.

        Where the backend does not support the node, the best one that does computes it: `plan.explain` says so,
        `plan.backend_of` has the one that computes, and `get_tensor_backend` the assigned one.
        May be called before and after planning; assignments survive `reset`.
        """
        if not isinstance(t, Tensor):
            raise TypeError(f"not a Tensor: {t!r}")
        with self._lock:
            if backend is not None:
                self._index(backend)
            self._allocations.drain()
            if backend is None:
                self._assigned.pop(t, None)
            else:
                self._assigned[t] = backend
            self._allocations.forget_assignments()

    def get_tensor_backend(self, t: Tensor) -> Backend | None:
        """The backend that the caller assigned, else that of the current plan, else that of the tensor's memory; or
        None."""
        if not isinstance(t, Tensor):
            raise TypeError(f"not a Tensor: {t!r}")
        if t in self._assigned:
            return self._assigned[t]
        current = self._allocations.current
        if current is None or (i := current.id_of(t)) < 0:
            return t.backend
        index = current.data.backend_index(i)
        return None if index < 0 else self.backends[index]

    def _index(self, backend: Backend) -> int:
        for i, known in enumerate(self.backends):
            if known is backend:
                return i
        if not isinstance(backend, Backend):
            raise TypeError(f"a backend of a scheduler is given as the Backend, not as {backend!r}")
        names = ", ".join(b.name for b in self.backends)
        raise PlacementError(f"{backend!r} is not one of the scheduler's backends ({names})")

    # -- life -------------------------------------------------------------------

    def reset(self) -> None:
        """Drop every allocation, the cached plans and the support cache.  Buffers and assignments stay."""
        with self._lock:
            self._planner.clear()
            self._allocations.invalidate("its scheduler was reset")

    def close(self) -> None:
        """Free the arenas; idempotent.  Tensors with addresses in them lose these.

        Shared arenas stay for the other schedulers.  While another thread uses them, it waits for them as the calls of
        a scheduler do.
        """
        if self.closed:
            return
        with self._one if self._leased is not None and self._leased.may_close else self._lock:
            self._pipeline.drain()
            self.closed = self._lock.closed = True
            self._planner.clear()
            each([partial(self._allocations.invalidate, "its scheduler was closed"), self._arenas.close,
                  self._pipeline.close])

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(b.name for b in self.backends)
        return f"<Scheduler policy={self.policy!r} over {names}{', closed' if self.closed else ''}>"
