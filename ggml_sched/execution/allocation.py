"""Allocations: an `Allocation` binds a graph and the program of its plan to memory, and computes.

All decisions are made before: planning/compiler.py chooses the steps, planning/waits.py the waits between them.  A step
is bound once for each copy slot that it uses, and every later compute uses the bound step again.  The graph is never
changed: for a node that reads a copy, the backend is given a twin, a tensor like the node whose source is the copy.

An allocation is suspended while another graph uses the arenas, and can be restored.  Its bound steps, and what backends
have prepared for them, are kept until the buffers of the arenas change.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from ggml_sched._core import PlanData, bind_plan, needed_of, new_lease, rewired, stand_in, written_leafs
from ggml_sched._graph import Graph, Lease, Tensor, computed, label
from ggml_sched.backend import Backend, Buffer, check_failures
from ggml_sched.errors import GraphError, HazardError, each
from ggml_sched.execution._steps import (
    BoundCopy,
    BoundExperts,
    BoundFetch,
    BoundLoad,
    BoundRun,
    BoundStep,
    BoundWriteBack,
    LocationVersions,
    Recording,
    check_inputs,
    complete_at_once,
    note_written,
    run_in_order,
    run_in_order_recorded,
    synchronize,
)
from ggml_sched.execution.experts import BoundFetchExperts
from ggml_sched.execution.observer import Ask, Callback, Observer
from ggml_sched.execution.pipeline import KeepAlive, Pipeline, Task
from ggml_sched.execution.tracing import Trace, timed
from ggml_sched.planning.compiler import program_of
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.program import (
    Copy,
    CopyExperts,
    Fetch,
    FetchExperts,
    Load,
    Location,
    Program,
    Run,
    Step,
    WriteBack,
)
from ggml_sched.threads.cached import cached_property

__all__ = ["Allocation"]


class _Guard:
    """Called before a tensor's data is read: HazardError for a result that was not computed or was overwritten, or is
    that of a node of another graph.

    The memory of such a result may hold another tensor by then; ggml would return that tensor's bytes.
    """

    __slots__ = ("_allocation",)

    def __init__(self, allocation: Allocation) -> None:
        self._allocation = weakref.ref(allocation)

    def __call__(self, tensor: Tensor) -> None:
        allocation = self._allocation()
        if allocation is not None:
            if allocation.is_running:
                return
            allocation.check_queued()
        node = tensor
        while not node.computes and node.src:
            node = node.src[0]
        if not node.computes:
            node = node.root
            if node.op == "NONE" and not node.overwritten:
                return          # an input: the host still has the data that the caller set
        if allocation is None:
            if node.buffer is None:
                return          # its memory was taken back, which the caller of this guard raises
            raise HazardError(f"the scheduler that has allocated {label(node)} ({node.op}) was freed, and nothing says "
                              "what its memory holds now; keep the scheduler, or read results before")
        if not tensor.nbytes:
            return
        i = allocation.id_of(node)
        if i < 0:
            if node.buffer is None or allocation.is_twin(node):
                return
            raise HazardError(
                f"the data of {label(node)} ({node.op}) is not kept: the graph that has its memory now does not have "
                "the node; read results before another graph is computed, or compute a graph with the node")
        if allocation.data.is_inner(i):
            raise HazardError(
                f"the data of {label(node)} ({node.op}) is nowhere: backend "
                f"{allocation.backends[allocation.data.backend_index(i)].name!r} computes it as one with nodes that "
                "read it; flag it with ctx.set_output before planning")
        if allocation.data.is_overwritten(i):
            raise HazardError(
                f"the data of {label(node)} ({node.op}) is not kept: its memory serves other nodes "
                "of the graph; flag it with ctx.set_output before planning")
        if node.computes and not node.is_resident and not allocation.has_computed(node):
            why = allocation.failure
            raise HazardError(
                f"{label(node)} ({node.op}) has not been computed since its graph was allocated, or a "
                f"compute failed or was stopped before it{why and f': {why}'}")


class Allocation:
    """A plan whose tensors have addresses in `buffers`: for each backend a tuple with a buffer for each chunk.

    `given_graph` is the graph that the caller gave; `graph` is the planned one, which may have its nodes in another
    order.  Both are weak references: once the graph is freed, the allocation cannot be used.
    """

    def __init__(self, plan: Plan, buffers: tuple[tuple[Buffer, ...], ...], given: weakref.ref[Graph]) -> None:
        self.data: PlanData = plan.data
        self.backends: tuple[Backend, ...] = plan.backends
        self.buffers = buffers
        self.given_graph = given
        self.graph: weakref.ref[Graph] = given if plan.given_graph is plan.graph else weakref.ref(plan.graph)
        self.tensors: tuple[Tensor, ...] = plan.graph.tensors
        self.nodes: tuple[Tensor, ...] = plan.graph.nodes
        self._policy = plan.policy
        self.lease: Lease = new_lease()
        bind_plan(plan.graph, plan.data, buffers, self.lease)
        self.lease.guard = _Guard(self)

    is_running: bool = False
    _n_done = 0
    """How many nodes, from the first on, have been computed since the tensors got their present addresses."""
    _pipeline: Pipeline | None = None
    """The pipeline of the last compute that was queued or deferred (`wait=False`); None before the first."""
    _failure_epoch: int | None = None
    """The failure epoch of the pipeline when the last compute was issued; None if that compute has failed, or if `run`
    waited for it."""
    _is_deferred = False
    """Whether the last compute was `run` with `wait=False`: a read raises its error.  After `submit` only
    `synchronize` raises the error, and a read raises HazardError."""
    failure: str = ""
    """The message of the error of the last compute; empty if there was none."""
    _cur_copy = 0
    """The slot of each copy that the next compute uses, modulo the number of slots of the copy; as in ggml."""
    _steps_of: dict[int, list[BoundStep]] | None = None
    """{value of `_cur_copy`: the bound steps of a compute that uses those slots}."""
    prepared: dict[tuple[int, int], BoundStep] | None = None
    """{(number of the step, copy slot): bound step}; None before the first compute.

    A step whose copies have one slot is bound once, under slot 0.
    """

    def new_plan(self) -> Plan:
        """A Plan equal to the one from which the allocation was made; GraphError if the graph was freed."""
        return Plan(_alive(self.graph), self.data, self.backends, self._policy, _alive(self.given_graph))

    def id_of(self, t: Tensor) -> int:
        """The id of a tensor of the graph; -1 for any other tensor."""
        return self._ids.get(t, -1)

    @cached_property
    def _ids(self) -> dict[Tensor, int]:
        return {t: i for i, t in enumerate(self.tensors)}

    def is_twin(self, t: Tensor) -> bool:
        """Whether a tensor was made for a node that reads copies: backends are given it, and may read it."""
        return t in self._twins

    # Properties that only a compute needs are made by the first compute: many graphs are allocated and never computed.

    @cached_property
    def program(self) -> Program:
        """The plan's program."""
        return program_of(_alive(self.graph), self.data, self.backends)

    @cached_property
    def _versions(self) -> LocationVersions:
        """The versions of the data in the locations of steps that are left out while the data does not change
        (`if_changed`)."""
        return LocationVersions()

    @cached_property
    def _stand_ins(self) -> dict[int, Tensor]:
        """{id of a copy slot: the tensor made for it}, because the graph has no tensors for copies."""
        return {}

    @cached_property
    def _twins(self) -> weakref.WeakSet[Tensor]:
        """The twins of the bound steps."""
        return weakref.WeakSet()

    @cached_property
    def _is_ordered(self) -> bool:
        """Whether issuing the steps in order is enough: no step waits, or every backend is done when a call returns."""
        return not self.program.awaited or complete_at_once(self.backends)

    @cached_property
    def _queueing(self) -> tuple[Backend, ...]:
        """The backends that may not be done when a call returns."""
        return tuple(backend for backend in self.backends if not complete_at_once((backend,)))

    @cached_property
    def _copies(self) -> tuple[tuple[int, int], ...]:
        """`data.copies`, made once: the property makes a new tuple on each access."""
        return self.data.copies

    @cached_property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """`data.groups`, made once: the property makes a new tuple on each access."""
        return self.data.groups

    @cached_property
    def _written(self) -> list[tuple[Tensor, int]]:
        """(leaf that nodes write to, position of the first such node)."""
        return [*written_leafs(self.nodes).items()]

    @cached_property
    def _inputs(self) -> list[Tensor]:
        """Leafs that the caller must have set: the inputs of the program that are loaded to a backend with memory (a
        dry backend never reads their data)."""
        loaded = {step.tensor for step in self.program.steps
                  if isinstance(step, Load) and self.backends[step.backend].has_memory}
        return [self.tensors[i] for i in self.program.inputs if i in loaded and self.tensors[i].nbytes]

    # -- suspending and releasing -----------------------------------------------------------------------

    def suspend(self) -> None:
        """Invalidate the tensors' addresses; keep the bound steps and what backends have prepared for them."""
        self.lease.end()

    def restore(self) -> None:
        """Give the tensors their addresses again; other graphs may have overwritten the memory since."""
        self._versions.forget()
        self._n_done = 0
        for root, _ in self._written:
            root.overwritten = False        # the data that the caller set is loaded again
        if self.lease.revive():
            bind_plan(_alive(self.graph), self.data, self.buffers, self.lease)

    def release(self) -> None:
        """Invalidate the addresses and free every bound step, even if freeing one raises."""
        self.suspend()
        if self.prepared is not None:
            steps, self.prepared, self._steps_of = self.prepared.values(), None, None
            each(step.free for step in steps)

    # -- computing --------------------------------------------------------------------

    def run(self, pipeline: Pipeline, callback: Callback | None = None, ask: Ask | None = None, zero: bool = False,
            wait: bool = True, trace: Trace | None = None) -> bool:
        """Compute the graph on the caller's thread; False if the callback stopped it.

        On return every backend is done, unless `wait` is False: then `pipeline.drain` must be called to wait for them.
        `trace`: records when each step begins and ends.
        """
        steps = self._next_steps(zero)
        recording = None if trace is None else trace.begin(self, len(steps))
        self._failure_epoch = None if wait else pipeline.failure_epoch()
        failures = [backend.failed[0] for backend in self._queueing] if self._queueing else None
        observer = None if callback is None else Observer(callback, ask)
        is_straight = observer is None and self._is_ordered and (trace is None or not trace.waits_after_steps)
        keep_alive: KeepAlive = []
        self.is_running = True
        try:
            if not is_straight:
                pipeline.submit(self._tasks(steps, observer, trace, recording), inline=True)
            elif recording is None:
                run_in_order(steps, keep_alive)
            else:
                run_in_order_recorded(steps, keep_alive, recording)
        except BaseException as error:
            self.forget(str(error))
            self._abandon(None if is_straight else pipeline)
            raise
        finally:
            self.is_running = False
        self._finish(observer)
        if wait:
            self._wait(None if is_straight else pipeline, failures)
        else:
            self._defer(pipeline, keep_alive)
        if recording is not None:
            recording.end()
        return observer is None or observer.stopped_at is None

    def submit(self, pipeline: Pipeline, zero: bool = False, trace: Trace | None = None) -> None:
        """Queue a compute, with the data that inputs have now; `trace` records when each step begins and ends."""
        steps = self._next_steps(zero)
        recording = None if trace is None else trace.begin(self, len(steps))
        self._failure_epoch, self._is_deferred = pipeline.failure_epoch(), False
        try:
            tasks = self._tasks(steps, None, trace, recording)
            self.lease.queue(_alive(self.graph), pipeline.drain_weakly)
            self._pipeline = pipeline
            pipeline.submit(tasks)
        except BaseException as error:
            self.forget(str(error))
            raise
        if recording is not None:
            recording.end()
        self._end(len(self.nodes))

    def forget(self, failure: str) -> None:
        """Mark a compute as failed: no node has a result, and the next compute loads every leaf and makes every copy
        again."""
        self._versions.forget()
        self._end(0)
        self._failure_epoch, self.failure = None, failure

    def check_queued(self) -> None:
        """Raise the error of a deferred compute, once.

        After a failed compute of `submit`, raise HazardError on every call until `synchronize` has raised the error.
        """
        pipeline = self._pipeline
        if pipeline is None:
            return
        if pipeline.failed:
            if not self._is_deferred:
                raise HazardError("a queued compute has failed and left no results: scheduler.synchronize() raises why")
            self.forget(pipeline.last_failure)      # before take_error, where an interrupt would lose the error
            error = pipeline.take_error()
            if error is not None:
                raise error
        if self._failure_epoch is not None and pipeline.failure_epoch_of_queued != self._failure_epoch:
            self.forget(pipeline.last_failure)

    def has_computed(self, node: Tensor) -> bool:
        """Whether a node has been computed since the tensors got their addresses, or a compute of it is queued."""
        return self._n_done == len(self.nodes) or self._positions[node] < self._n_done

    @cached_property
    def _positions(self) -> dict[Tensor, int]:
        return {node: k for k, node in enumerate(self.nodes)}

    def _next_steps(self, zero: bool) -> list[BoundStep]:
        """The bound steps of the next compute, whose copy slots count as used; HazardError for inputs that were not
        set."""
        check_inputs(self._inputs, zero)
        copy = self._cur_copy
        if self._steps_of is None:
            self._steps_of = {}
        if copy not in self._steps_of:
            self._steps_of[copy] = [self._bind(k, step, copy) for k, step in enumerate(self.program.steps)]
        self._cur_copy = (copy + 1) % self.program.copy_slots
        return self._steps_of[copy]

    def _tasks(self, steps: list[BoundStep], observer: Observer | None, trace: Trace | None,
               recording: Recording | None) -> list[Task]:
        """A task for each step, as `Pipeline.submit` takes them."""
        awaited, tasks = self.program.awaited, []
        for k, (step, bound) in enumerate(zip(self.program.steps, steps, strict=True)):
            action = bound.due() if observer is None else observer.action(bound, step)
            tasks.append(Task(bound.backend, action, step.waits, k in awaited))
        if trace is None or recording is None:
            return tasks
        return timed(trace, recording, tasks, steps, observer is not None)

    def _finish(self, observer: Observer | None) -> None:
        """Note how many nodes a compute has run: all, or those up to the node at which the callback stopped it."""
        if observer is None or observer.stopped_at is None:
            self._end(len(self.nodes))
        else:
            # Versions were recorded for all steps when the compute began; the steps after the stop moved no data.
            self._versions.forget()
            self._end(self._positions[observer.stopped_at] + 1)

    def _end(self, n_done: int) -> None:
        """Note that the first `n_done` nodes are computed or queued, and which leafs they have written to."""
        self._n_done, self.failure = n_done, ""
        note_written(self._written, n_done)

    def _wait(self, pipeline: Pipeline | None, failures: list[int] | None) -> None:
        """Wait for every backend and raise the first error; `pipeline` is None if `run_in_order` issued the steps.

        `failures`: how many failures each of `_queueing` had before the steps; None if there are no such backends.
        BackendError if one of them has more, because another thread has got the exception.
        """
        try:
            if pipeline is None:
                synchronize(self.backends)
            else:
                pipeline.drain()
                error = pipeline.take_error()
                if error is not None:
                    raise error
            if failures is not None:
                for backend, before in zip(self._queueing, failures, strict=True):
                    check_failures(backend, before)
        except BaseException as error:
            self.forget(str(error))
            raise

    def _abandon(self, pipeline: Pipeline | None) -> None:
        """Wait for every backend after an exception; drops exceptions of the waiting, so that the first is raised."""
        try:
            if pipeline is None:
                synchronize(self.backends)
            else:
                pipeline.drain()
                pipeline.take_error()
        except Exception:
            return

    def _defer(self, pipeline: Pipeline, keep_alive: KeepAlive) -> None:
        """Let `drain` of the pipeline wait for a compute that was issued on this thread and not waited for.

        `keep_alive`: objects that the backends still use.
        """
        self.lease.queue(_alive(self.graph), pipeline.drain_weakly)
        self._pipeline, self._is_deferred = pipeline, True
        pipeline.defer(keep_alive)

    # -- binding steps --------------------------------------------------------

    def _bind(self, k: int, step: Step, copy: int) -> BoundStep:
        """Step k of the program, bound for slot `copy` (modulo the number of slots) of each copy that it uses.

        It is bound once, and used again by every later compute with that slot.
        """
        n_copies = max(map(len, _locations_of(step)), default=1)
        key = (k, copy % n_copies)
        if self.prepared is None:
            self.prepared = {}
        if key not in self.prepared:
            self.prepared[key] = self._new_bound(step, copy)
        return self.prepared[key]

    def _new_bound(self, step: Step, copy: int) -> BoundStep:
        """A new bound step for a step of the program, with slot `copy` (modulo their number) of each copy."""
        backend, versions = self.backends[step.backend], self._versions if step.if_changed else None
        match step:
            case Load():
                location = step.locations[copy % len(step.locations)]
                leaf = self.tensors[step.tensor]
                return BoundLoad(backend, leaf, self._tensor(location), step.start, location.id, versions)
            case Copy():
                location = step.locations[copy % len(step.locations)]
                return BoundCopy(backend, self.tensors[step.tensor], self._tensor(location), location.id, versions)
            case Fetch():
                location = step.locations[copy % len(step.locations)]
                room = location.offset, location.offset + self.data.size(location.id)
                weight = self.tensors[step.tensor]
                return BoundFetch(backend, weight, self._tensor(location), step.start, step.nbytes, room)
            case CopyExperts():
                location, ids = step.locations[copy % len(step.locations)], self.tensors[step.ids]
                staged = ids.root.op == "NONE" and not ids.is_resident
                return BoundExperts(backend, self.tensors[step.tensor], self._tensor(location), ids, staged)
            case FetchExperts():
                location = step.locations[copy % len(step.locations)]
                return BoundFetchExperts(backend, self.tensors[step.tensor], self._tensor(location))
            case Run():
                return self._new_run(step, copy)
            case WriteBack():
                location = step.locations[copy % len(step.locations)]
                return BoundWriteBack(backend, self._tensor(location), self.tensors[step.tensor])
        raise TypeError(f"no step: {step!r}")

    def _new_run(self, step: Run, copy: int) -> BoundRun:
        """The bound step of a Run, with twins for the nodes that read copies or compute into one.  `copy` as for
        `_bind`."""
        nodes = computed(self.nodes[step.first : step.last + 1])
        groups, needed = self._groups_of(step)
        if not step.reads and not step.into:
            return BoundRun(self.backends[step.backend], nodes, nodes, groups, needed)
        reads: dict[int, dict[int, Tensor]] = {}
        for position, slot, locations in step.reads:
            reads.setdefault(position, {})[slot] = self._tensor(locations[copy % len(locations)])
        into = self._tensor(step.into[copy % len(step.into)]) if step.into else None
        twins = []
        # Backends recognise a fusion group by which member reads which: where a member is replaced by a twin, the
        # members that read it must read the twin, too.
        grouped = {nodes[k] for group in groups for k in group}
        twin_of: dict[Tensor, Tensor] = {}
        for position in range(step.first, step.last + 1):
            node = self.nodes[position]
            if not node.computes:
                continue
            memory = into if position == step.last else None
            reads_twin = node in grouped and not twin_of.keys().isdisjoint(node.src)
            if memory is not None or position in reads or reads_twin:
                given = reads.get(position, {})
                src = tuple(given.get(slot, twin_of.get(s, s) if reads_twin else s) for slot, s in enumerate(node.src))
                twin = rewired(node, src, memory, self.lease)
                self._twins.add(twin)
                if node in grouped:
                    twin_of[node] = twin
                node = twin
            twins.append(node)
        return BoundRun(self.backends[step.backend], nodes, tuple(twins), groups, needed)

    def _groups_of(self, step: Run) -> tuple[tuple[tuple[int, ...], ...], frozenset[int] | None]:
        """The fusion groups of a run, and the nodes whose results are read later, so that they must be written.

        Both are given as indices among the run's nodes that compute.  ((), None) for a run without groups.
        """
        groups = [group for group in self._groups if step.first <= group[0] and group[-1] <= step.last]
        if not groups:
            return (), None
        index = {position: k for k, position in enumerate(
            position for position in range(step.first, step.last + 1) if self.nodes[position].computes)}
        needed = needed_of(_alive(self.graph), self.data, step.first, step.last)
        return tuple(tuple(map(index.__getitem__, group)) for group in groups), needed

    def _tensor(self, location: Location) -> Tensor:
        """The tensor at a location: a tensor of the graph, or the one made for a copy slot."""
        n = self.data.n_tensors
        if location.id < n:
            return self.tensors[location.id]
        if location.id not in self._stand_ins:
            like = self.tensors[self._copies[self.data.copy_of(location.id)][0]]
            buffer, offset = self.buffers[location.backend][location.chunk], location.offset
            owner = like.root.backend
            if owner is not None and owner.is_store:
                offset += owner.shift(like, buffer.base + offset)
            self._stand_ins[location.id] = stand_in(like, f"{self.backends[location.backend].name}#{like.name}", buffer,
                                                    offset, self.lease)
        return self._stand_ins[location.id]


def _alive(graph: weakref.ref[Graph]) -> Graph:
    """The graph of a weak reference; GraphError if it was freed."""
    found = graph()
    if found is None:
        raise GraphError("the graph of this allocation was freed")
    return found


def _locations_of(step: Step) -> Iterable[tuple[Location, ...]]:
    """The locations that a step names: for each copy or leaf a tuple, with one location for each of its slots."""
    if isinstance(step, Run):
        return [locations for _, _, locations in step.reads] + ([step.into] if step.into else [])
    return [step.locations]
