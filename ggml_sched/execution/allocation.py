"""Runs a plan: binds a graph and its program to memory, and issues the steps.

An `Allocation` is a plan with addresses.  It decides nothing: program.py says what each step is, ordering.py what it
waits for.  Steps are bound once for each place that a ring has for them, and replayed by every compute.  The graph is
never changed: nodes that read copies are rewired twins.

An allocation may rest while another graph uses the arena, and be resumed: what backends have prepared for it
stays, as long as the arena's buffers do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cached_property

from ggml_sched._core import bind_plan, needed_of, new_lease, rewired, stand_in, written_leafs
from ggml_sched._graph import Graph, Lease, Tensor, computed
from ggml_sched.backend import Backend, Buffer, Event, GraphView
from ggml_sched.errors import HazardError, each
from ggml_sched.execution._steps import (
    BoundCopy,
    BoundExperts,
    BoundLoad,
    BoundRun,
    BoundStep,
    BoundWriteBack,
    Seen,
    check_inputs,
    note_written,
    run_in_order,
    says_no,
    synchronize,
)
from ggml_sched.execution.pipeline import Alive, Pipeline, Task
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.program import Copy, CopyExperts, Load, Place, Program, Run, Step, WriteBack

__all__ = ["Allocation", "Ask", "Callback"]

Callback = Callable[[Tensor], object]
"""Called with each node after it was computed; False stops the compute."""
Ask = Callable[[Tensor], object]
"""Called with each node before it is computed; False keeps it from the callback."""


class _Guard:
    """Refuses to read results that are not there, or not any more: ggml would return garbage."""

    __slots__ = ("_allocation",)

    def __init__(self, allocation: Allocation) -> None:
        self._allocation = weakref.ref(allocation)

    def __call__(self, tensor: Tensor) -> None:
        allocation = self._allocation()
        if allocation is None or allocation.is_running:
            return
        allocation.check_queued()
        node = tensor
        while not node.computes and node.src:
            node = node.src[0]
        if not node.computes:
            node = node.root
            if node.op == "NONE" and not node.overwritten:
                return          # what the caller has set is still on the host
        i = allocation.id_of(node) if tensor.nbytes else -1
        if i >= 0 and allocation.data.is_inner(i):
            raise HazardError(
                f"the data of {node.name or 'unnamed'!r} ({node.op}) is nowhere: backend "
                f"{allocation.backends[allocation.data.backend_index(i)].name!r} computes it as one with nodes that "
                "read it; flag it with ctx.set_output before planning")
        if i >= 0 and allocation.data.is_overwritten(i):
            raise HazardError(
                f"the data of {node.name or 'unnamed'!r} ({node.op}) is gone: its memory has served other nodes "
                "since; flag it with ctx.set_output before planning")
        if i >= 0 and node.computes and not node.is_resident and not allocation.has_computed(node):
            why = allocation.why_lost
            raise HazardError(
                f"{node.name or 'unnamed'!r} ({node.op}) has not been computed since its graph was allocated, or a "
                f"compute failed or was stopped before it{why and f': {why}'}")


class Allocation:
    """A plan whose tensors have addresses in `buffers`: for each backend a tuple, one for each chunk.

    `asked` is the graph that the caller gave; the plan's may be another order of it.  Neither is kept alive: an
    allocation whose graph is gone cannot be asked for again.
    """

    def __init__(self, plan: Plan, buffers: tuple[tuple[Buffer, ...], ...], asked: weakref.ref[Graph]) -> None:
        self.data, self.backends, self.buffers = plan.data, plan.backends, buffers
        self.asked = asked
        self.graph = asked if plan.asked is plan.graph else weakref.ref(plan.graph)
        self.tensors, self.nodes = plan.graph.tensors, plan.graph.nodes
        self._policy = plan.policy
        self.lease: Lease = new_lease()
        bind_plan(plan.graph, plan.data, buffers, self.lease)
        self.lease.guard = _Guard(self)

    is_running = False
    _done = 0
    """So many of the nodes have been computed, in the memory that they have now."""
    _pipeline: Pipeline | None = None
    """Where computes were queued."""
    _losses: int | None = None
    """Of the pipeline, when the last compute was queued there."""
    _is_left = False
    """Whether that is left to who reads: no call but that one says what went wrong."""
    why_lost = ""
    """What went wrong in the last compute."""
    _turn = 0
    """Of the ring, for the next compute."""
    _lists: dict[int, list[BoundStep]] | None = None
    """For each turn of the ring its steps."""
    prepared: dict[tuple[int, int], BoundStep] | None = None
    """Steps by number and turn: those that know no ring are the same in all turns.  None before the first compute."""

    def new_plan(self) -> Plan:
        """The plan again, whose graph is still there."""
        return Plan(self.graph(), self.data, self.backends, self._policy, self.asked())

    def id_of(self, t: Tensor) -> int:
        """The id of a tensor of the graph, -1 for another."""
        return self._ids.get(t, -1)

    @cached_property
    def _ids(self) -> dict[Tensor, int]:
        return {t: i for i, t in enumerate(self.tensors)}

    # What only a compute needs is made by the first: a runner may allocate each graph anew.

    @cached_property
    def _seen(self) -> Seen:
        return Seen()

    @cached_property
    def _stand_ins(self) -> dict[int, Tensor]:
        """Tensors that stand for places of copies, by id."""
        return {}

    @cached_property
    def _copies(self) -> tuple[tuple[int, int], ...]:
        """The plan's, made once."""
        return self.data.copies

    @cached_property
    def program(self) -> Program:
        """The plan's."""
        return self.new_plan().program

    @cached_property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """The plan's, made once."""
        return self.data.groups

    @cached_property
    def _written(self) -> list[tuple[Tensor, int]]:
        """Leafs that nodes write to, and the position of the first that does."""
        return [*written_leafs(self.nodes).items()]

    @cached_property
    def _inputs(self) -> list[Tensor]:
        """Leafs that must have been set: those that come to a backend which has memory."""
        loaded = {step.tensor for step in self.program.steps
                  if isinstance(step, Load) and self.backends[step.backend].has_memory}
        return [self.tensors[i] for i in self.program.inputs if i in loaded and self.tensors[i].nbytes]

    # -- life -----------------------------------------------------------------------

    def rest(self) -> None:
        """The tensors have no address any more; what was prepared stays."""
        self.lease.end()

    def resume(self) -> None:
        """The tensors have their addresses again, in memory that others have used since."""
        self._seen.forget()
        self._lose_results()
        if self.lease.revive():
            bind_plan(self.graph(), self.data, self.buffers, self.lease)

    def release(self) -> None:
        """End it: no address, nothing prepared.  Everything is released, whatever raises."""
        self.rest()
        if self.prepared is not None:
            steps, self.prepared, self._lists = self.prepared.values(), None, None
            each(step.free for step in steps)

    # -- computing --------------------------------------------------------------------

    def run(self, callback: Callback | None = None, ask: Ask | None = None, zero: bool = False,
            left_to: Pipeline | None = None) -> bool:
        """Compute the graph; on return every backend is done.  False if the callback stopped it.

        `ask` says which nodes the callback sees.  `left_to`: nobody waits here, that pipeline's `drain` does.
        """
        check_inputs(self._inputs, zero)
        steps = self._next_steps()
        self._losses = None if left_to is None else left_to.losses()
        stopped_at = None
        alive: Alive = []           # as all that it holds, until every backend was waited for
        self.is_running = True
        try:
            if callback is None and not self.program.awaited:
                run_in_order(steps, alive)
            else:
                compute = _Compute(self.program)
                alive.append(compute)
                if callback is None:
                    compute.run(steps)
                else:
                    stopped_at = compute.run_observed(steps, callback, ask)
        except BaseException as error:
            self.forget(str(error))
            self._wait(quietly=True)
            raise
        finally:
            self.is_running = False
        self._end(len(self.nodes) if stopped_at is None else self._positions[stopped_at] + 1)
        if left_to is None:
            try:
                self._wait()
            except BaseException as error:
                self.forget(str(error))
                raise
        else:
            self.lease.queue(self.graph(), left_to.drain_weakly)
            self._pipeline, self._is_left = left_to, True
            left_to.leave(alive)
        return stopped_at is None

    def submit(self, pipeline: Pipeline, zero: bool = False) -> None:
        """Queue a compute; the inputs are those set now."""
        program = self.program
        check_inputs(self._inputs, zero)
        steps = self._next_steps()
        self._losses, self._is_left = pipeline.losses(), False
        try:
            tasks = [Task(bound.backend, bound.due(), step.waits, k in program.awaited)
                     for k, (step, bound) in enumerate(zip(program.steps, steps, strict=True))]
            self.lease.queue(self.graph(), pipeline.drain_weakly)
            self._pipeline = pipeline
            pipeline.submit(tasks)
        except BaseException as error:
            self.forget(str(error))
            raise
        self._end(len(self.nodes))

    def forget(self, why: str) -> None:
        """A compute has failed: there are no results, leafs are as the caller has set them, all data moves again."""
        self._seen.forget()
        self._end(0)
        self._losses, self.why_lost = None, why

    def _lose_results(self) -> None:
        """The memory has served others: leafs are as the caller has set them."""
        self._done = 0
        for root, _ in self._written:
            root.overwritten = False

    def check_queued(self) -> None:
        """What went wrong in a compute that was left to who reads, if nobody was told yet.

        HazardError after a queued compute that failed, until its error was raised.
        """
        pipeline = self._pipeline
        if pipeline is None:
            return
        error = None
        if pipeline.failed:
            if not self._is_left:
                raise HazardError("a queued compute has failed and left no results: scheduler.synchronize() raises why")
            error = pipeline.take_error()
        if error is not None or self._losses is not None and pipeline.losses_of_queued != self._losses:
            self.forget(pipeline.why if error is None else str(error))
        if error is not None:
            raise error

    def has_computed(self, node: Tensor) -> bool:
        """Whether the result of a node is there, or queued."""
        return self._done == len(self.nodes) or self._positions[node] < self._done

    @cached_property
    def _positions(self) -> dict[Tensor, int]:
        return {node: k for k, node in enumerate(self.nodes)}

    def _next_steps(self) -> list[BoundStep]:
        turn = self._turn
        if self._lists is None:
            self._lists, self.prepared = {}, {}
        if turn not in self._lists:
            self._lists[turn] = [self._bind(k, step, turn) for k, step in enumerate(self.program.steps)]
        self._turn = (turn + 1) % self.program.turns
        return self._lists[turn]

    def _end(self, n_done: int) -> None:
        """The first `n_done` nodes have been computed, or will be; what they write to has changed."""
        self._done, self.why_lost = n_done, ""
        note_written(self._written, n_done)

    def _wait(self, quietly: bool = False) -> None:
        """Wait for every backend, then raise the first error (`quietly`: another one is on its way)."""
        try:
            synchronize(self.backends)
        except Exception:
            if not quietly:
                raise

    # -- from steps to bound steps --------------------------------------------------------

    def _bind(self, k: int, step: Step, turn: int) -> BoundStep:
        """Step k of the program, with the places of one turn; those that know no ring are the same in all turns."""
        n_places = max(map(len, _places_of(step)), default=1)
        key = (k, turn % n_places)
        if key not in self.prepared:
            self.prepared[key] = self._new_bound(step, turn)
        return self.prepared[key]

    def _new_bound(self, step: Step, turn: int) -> BoundStep:
        backend, seen = self.backends[step.backend], self._seen if step.keeps else None
        match step:
            case Load():
                place = step.places[turn % len(step.places)]
                return BoundLoad(backend, self.tensors[step.tensor], self._tensor(place), step.start, place.id, seen)
            case Copy():
                place = step.places[turn % len(step.places)]
                return BoundCopy(backend, self.tensors[step.tensor], self._tensor(place), place.id, seen)
            case CopyExperts():
                place, ids = step.places[turn % len(step.places)], self.tensors[step.ids]
                staged = ids.root.op == "NONE" and not ids.is_resident
                return BoundExperts(backend, self.tensors[step.tensor], self._tensor(place), ids, staged)
            case Run():
                return self._new_run(step, turn)
            case WriteBack():
                place = step.places[turn % len(step.places)]
                return BoundWriteBack(backend, self._tensor(place), self.tensors[step.tensor])
        raise TypeError(f"no step: {step!r}")

    def _new_run(self, step: Run, turn: int) -> BoundRun:
        nodes = computed(self.nodes[step.first : step.last + 1])
        groups, needed = self._groups_of(step)
        if not step.reads and not step.into:
            return BoundRun(self.backends[step.backend], nodes, nodes, groups, needed)
        reads: dict[int, dict[int, Tensor]] = {}
        for position, slot, places in step.reads:
            reads.setdefault(position, {})[slot] = self._tensor(places[turn % len(places)])
        into = self._tensor(step.into[turn % len(step.into)]) if step.into else None
        twins = []
        # Backends know a group's nodes by who reads whom: a member that reads a twinned one gets the twin.
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
                if node in grouped:
                    twin_of[node] = twin
                node = twin
            twins.append(node)
        return BoundRun(self.backends[step.backend], nodes, tuple(twins), groups, needed)

    def _groups_of(self, step: Run) -> tuple[tuple[tuple[int, ...], ...], frozenset[int] | None]:
        """What of a run is computed as one, by index among the nodes that compute, and whose data is needed."""
        groups = [group for group in self._groups if step.first <= group[0] and group[-1] <= step.last]
        if not groups:
            return (), None
        index = {position: k for k, position in enumerate(
            position for position in range(step.first, step.last + 1) if self.nodes[position].computes)}
        needed = needed_of(self.graph(), self.data, step.first, step.last)
        return tuple(tuple(map(index.__getitem__, group)) for group in groups), needed

    def _tensor(self, place: Place) -> Tensor:
        """The tensor at a place: the graph's, or one that stands for a copy."""
        n = self.data.n_tensors
        if place.id < n:
            return self.tensors[place.id]
        if place.id not in self._stand_ins:
            like = self.tensors[self._copies[self.data.copy_of(place.id)][0]]
            self._stand_ins[place.id] = stand_in(like, f"{self.backends[place.backend].name}#{like.name}",
                                                 self.buffers[place.backend][place.chunk], place.offset, self.lease)
        return self._stand_ins[place.id]


def _places_of(step: Step) -> Iterable[tuple[Place, ...]]:
    if isinstance(step, Run):
        return [places for _, _, places in step.reads] + ([step.into] if step.into else [])
    return [step.places]


class _Compute:
    """A compute on the caller's thread; whoever makes it keeps it until the backends are done."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.alive: Alive = []
        self._ends: dict[int, Event] = {}
        self._last: dict[Backend, Event] = {}

    def run(self, steps: list[BoundStep]) -> None:
        for k, bound in enumerate(steps):
            self._do(k, bound)

    def _do(self, k: int, bound: BoundStep) -> None:
        action = bound.due()
        if action is not None:
            self._ended(k, bound, action(self._events(k), self.alive))
        elif bound.backend in self._last:
            # Left out: who waits for it waits for the one before it in its queue.
            self._ends[k] = self._last[bound.backend]

    def _events(self, k: int) -> list[Event]:
        """What step k waits for; earlier computes are done."""
        return [self._ends[w.step] for w in self.program.steps[k].waits if not w.back and w.step in self._ends]

    def _ended(self, k: int, bound: BoundStep, end: Event | None) -> None:
        if k in self.program.awaited:
            if end is None:
                end = bound.backend.event_new()
                bound.backend.event_record(end)
            self._ends[k] = self._last[bound.backend] = end

    def run_observed(self, steps: list[BoundStep], callback: Callback, ask: Ask | None) -> Tensor | None:
        """Let the callback see each node that `ask` wants when its data is there, also what goes back to its memory;
        the one at which it said stop."""
        waiting: Tensor | None = None
        for k, bound in enumerate(steps):
            if isinstance(bound, BoundRun):
                for event in self._events(k):
                    bound.backend.event_wait(event)
                into = self.program.steps[k].into
                for twins, node in bound.parts(ask):
                    bound.backend.graph_compute(GraphView(twins))
                    if into and node is bound.nodes[-1]:
                        waiting = node          # its data is elsewhere until the next step
                    elif node is not None:
                        bound.backend.synchronize()
                        if says_no(callback(node)):
                            return node
                self._ended(k, bound, None)
                continue
            self._do(k, bound)
            if waiting is not None:
                node, waiting = waiting, None
                bound.backend.synchronize()
                bound.node.backend.synchronize()
                if says_no(callback(node)):
                    return node
        return None
