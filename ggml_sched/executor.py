"""Runs a plan: binds a graph to memory, then for each split makes the copies and computes.

An `Allocation` is a plan with addresses.  Its steps (steps.py) are made once and replayed by
every compute.  The graph is never changed: nodes that read copies are rewired twins.

With a ring of copies, compute k uses slot k % n of it: there is a list of steps for each slot, and steps that
know no slots (loads, kept weights, nodes that read no copy) are shared by the lists.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cached_property

from ggml_sched._core import bind_plan, new_lease, rewired, stand_in
from ggml_sched._graph import Graph, Lease, Tensor
from ggml_sched.backend import Buffer
from ggml_sched.errors import HazardError
from ggml_sched.pipeline import Pipeline
from ggml_sched.plan import Plan
from ggml_sched.steps import CopyStep, ExpertsStep, LoadStep, RunStep, Step

__all__ = ["Allocation", "Ask", "Callback", "each"]

Callback = Callable[[Tensor], object]
"""Called with each node after it was computed; False stops the compute."""
Ask = Callable[[Tensor], object]
"""Called with each node before it is computed; False keeps it from the callback."""

_VIEW_OPS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})


class _Guard:
    """Refuses to read results whose memory has served other nodes since: ggml would return garbage."""

    __slots__ = ("_allocation",)

    def __init__(self, allocation: Allocation) -> None:
        self._allocation = weakref.ref(allocation)

    def __call__(self, tensor: Tensor) -> None:
        allocation = self._allocation()
        if allocation is None or allocation.is_running:
            return
        graph, data = allocation.plan.graph, allocation.plan.data
        node = tensor
        while node.op in _VIEW_OPS and node.src:
            node = node.src[0]
        i = graph.id_of(node)
        if i >= 0 and node.op != "NONE" and data.is_overwritten(i):
            raise HazardError(
                f"the data of {node.name or 'unnamed'!r} ({node.op}) is gone: its memory has served other nodes "
                "since; flag it with ctx.set_output before planning")


class Allocation:
    """A plan whose tensors have addresses in `buffers`: for each backend a tuple, one for each chunk.

    `asked` is the graph that the caller gave; the plan's may be another order of it.
    """

    def __init__(self, plan: Plan, buffers: tuple[tuple[Buffer, ...], ...], asked: Graph) -> None:
        self.plan = plan
        self.asked = asked
        self.buffers = buffers
        self.lease: Lease = new_lease()
        self.is_running = False
        self._turn = 0
        self._lists: dict[int, list[Step]] = {}
        self._made: dict[Hashable, Step | Tensor] = {}
        self._written: dict[Tensor, None] = {}
        self._deps = plan.graph.deps
        bind_plan(plan.graph, plan.data, buffers, self.lease)
        self.lease.guard = _Guard(self)

    # What only a compute needs is made by the first: a runner allocates each graph anew.

    @cached_property
    def _copies(self) -> tuple[tuple[int, int], ...]:
        return self.plan.data.copies

    @cached_property
    def _kept(self) -> tuple[bool, ...]:
        return self.plan.data.kept

    @cached_property
    def _slots(self) -> list[list[int]]:
        """For each copy the ids of its places: one, or those of its ring."""
        data = self.plan.data
        slots = [[data.n_tensors + c] for c in range(data.n_copies)]
        for k, c in enumerate(data.ring):
            slots[c].append(data.n_tensors + data.n_copies + k)
        return slots

    @cached_property
    def _n_lists(self) -> int:
        return max(map(len, self._slots), default=1)

    def release(self) -> None:
        """End the lease: the tensors have no address any more.  Everything is released, whatever raises."""
        made, self._made = self._made, {}
        self._lists = {}
        self.lease.end()
        self.lease.drain = None
        if made:
            each(step.free for step in made.values() if isinstance(step, Step))

    def steps(self, turn: int = 0) -> list[Step]:
        """What compute number `turn` does, in order."""
        turn %= self._n_lists
        if turn not in self._lists:
            roots = (node.view_src for node in self.plan.graph.nodes if node.op not in _VIEW_OPS)
            self._written = {root: None for root in roots if root is not None and root.op == "NONE"}
            self._lists[turn] = list(self._make_steps(turn))
        return self._lists[turn]

    def run(self, callback: Callback | None = None, ask: Ask | None = None) -> bool:
        """Compute the graph; on return every backend is done.  False if the callback stopped it.

        `ask` says which nodes the callback sees.
        """
        finished = True
        steps = self._next_steps()
        self.is_running = True
        try:
            for step in steps:
                if callback is not None and isinstance(step, RunStep):
                    finished = step.observe(callback, ask)
                    if not finished:
                        break
                else:
                    step.run()
        except BaseException:
            self.forget()
            self._wait(quietly=True)
            raise
        finally:
            self.is_running = False
            self._touch_written()
        self._wait()
        return finished

    def submit(self, pipeline: Pipeline) -> None:
        """Queue a compute; the inputs are those set now."""
        steps = self._next_steps()
        try:
            jobs = [(step.backend, step.places, job) for step in steps if (job := step.due()) is not None]
            self.lease.drain = pipeline.drain_weakly
            pipeline.submit(jobs)
        except BaseException:
            self.forget()
            raise
        finally:
            self._touch_written()

    def forget(self) -> None:
        """A compute has failed: move all data again."""
        for step in self._made.values():
            if isinstance(step, Step):
                step.forget()

    def _next_steps(self) -> list[Step]:
        steps = self.steps(self._turn)
        self._turn = (self._turn + 1) % self._n_lists
        return steps

    def _touch_written(self) -> None:
        """What the graph writes to has changed."""
        for root in self._written:
            if root.is_resident:
                root.touch()
            else:
                root.overwritten = True

    def _wait(self, quietly: bool = False) -> None:
        """Wait for every backend, then raise the first error (`quietly`: another one is on its way)."""
        try:
            each(backend.synchronize for backend in self.plan.backends)
        except Exception:
            if not quietly:
                raise

    # -- from plan to steps -----------------------------------------------------

    def _make_steps(self, turn: int) -> Iterator[Step]:
        data, graph = self.plan.data, self.plan.graph
        places = [slots[turn % len(slots)] for slots in self._slots]
        stand_ins = [self._stand_in(i) for i in places]
        in_ring = {t for t, slots in zip(stand_ins, self._slots, strict=True) if len(slots) > 1}
        backs = dict(data.write_backs)
        births, early = self._leafs()
        yield from early
        # Slots are free when a compute begins, and leafs have their data: nothing waits for these copies.
        every = dict.fromkeys(c for _, _, _, inputs in data.splits for c in inputs)
        ahead = [c for c in every if stand_ins[c] in in_ring and self._is_input(c)]
        for c in ahead:
            yield self._copy_step(c, stand_ins[c], places[c], 0, 0)
        position = 0
        for index, start, stop, inputs in data.splits:
            made = set(ahead)
            for c in inputs:
                yield from births.get(position, ())
                if c not in made:
                    made.add(c)
                    yield self._copy_step(c, stand_ins[c], places[c], start, stop)
                position += 1
            nodes: list[Tensor] = []
            twins: list[Tensor] = []
            for node in graph.nodes[start:stop]:
                if position in births:
                    yield from self._run_step(index, nodes, twins, in_ring)
                    nodes, twins = [], []
                    yield from births[position]
                if node.op not in _VIEW_OPS:
                    i = graph.id_of(node)
                    back = None if i not in backs else stand_ins[backs[i]]
                    nodes.append(node)
                    twins.append(self._twin(node, data.sources(i), stand_ins, back))
                    if back is not None:
                        yield from self._run_step(index, nodes, twins, in_ring, back)
                        nodes, twins = [], []
                position += 1
            yield from self._run_step(index, nodes, twins, in_ring)

    def _shared(self, key: Hashable, make: Callable):
        """One object for all the lists of steps that need it."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _leafs(self) -> tuple[dict[int, list[Step]], list[Step]]:
        """Loads of leafs: those born later, by position, and those loaded at the start."""
        data = self.plan.data
        births: dict[int, list[Step]] = {}
        early: list[Step] = []
        for i, leaf in enumerate(self.plan.graph.tensors):
            if leaf.op != "NONE" or leaf.view_src is not None or data.lifetime(i) is None:
                continue
            keeps = data.is_exclusive(i)
            step = self._shared(("load", i), lambda leaf=leaf, keeps=keeps: LoadStep(leaf, keeps))
            if data.is_late(i):
                births.setdefault(data.lifetime(i)[0], []).append(step)
            else:
                early.append(step)
        return births, early

    def _run_step(self, index: int, nodes: list[Tensor], twins: list[Tensor], in_ring: set[Tensor],
                  back: Tensor | None = None) -> Iterator[Step]:
        """Nothing for no nodes."""
        if nodes:
            backend, filled = self.plan.backends[index], tuple(twins)
            slots = in_ring if backend.concurrent_copies else ()
            deps = [t for node in nodes for t in self._deps.get(node, ())] if self._deps else ()
            key = ("run", filled)
            yield self._shared(key, lambda: RunStep(backend, tuple(nodes), filled, back, slots, deps))

    def _stand_in(self, i: int) -> Tensor:
        """A tensor at the address of id i, a copy."""
        data = self.plan.data
        like, backend = self._copies[data.copy_of(i)]
        tensor, buffer = self.plan.graph.tensors[like], self.buffers[backend][data.chunk(i)]
        name = f"{self.plan.backends[backend].name}#{tensor.name}"
        make = lambda: stand_in(tensor, name, buffer, data.offset(i), self.lease)   # noqa: E731
        return self._shared(("stand-in", i), make)

    def _is_input(self, c: int) -> bool:
        """Whether copy c is of a leaf that is loaded at the start and never written to."""
        src = self.plan.graph.tensors[self._copies[c][0]]
        root = src if src.view_src is None else src.view_src
        if root.op != "NONE" or root in self._written:
            return False
        return root.is_resident or not self.plan.data.is_late(self.plan.graph.id_of(root))

    def _copy_step(self, c: int, dst: Tensor, place: int, start: int, stop: int) -> Step:
        """How copy c is made: once while its source is unchanged, only the used experts, or plainly."""
        return self._shared(("copy", place), lambda: self._new_copy_step(c, dst, place, start, stop))

    def _new_copy_step(self, c: int, dst: Tensor, place: int, start: int, stop: int) -> Step:
        data, graph = self.plan.data, self.plan.graph
        src = graph.tensors[self._copies[c][0]]
        root = src if src.view_src is None else src.view_src
        keeps = root.op == "NONE" and (self._kept[c] or data.is_exclusive(place))
        if not keeps and src.is_resident:
            ids = self._experts_ids(src, start, stop)
            if ids is not None:
                return ExpertsStep(src, dst, ids)
        here, there = dst.backend, src.backend
        pushes = len(self._slots[c]) > 1 and here.concurrent_copies and there in self.plan.backends
        return CopyStep(src, dst, keeps, pushes)

    def _experts_ids(self, weight: Tensor, start: int, stop: int) -> Tensor | None:
        """The ids that name the used experts, if only one mixture reads `weight` and its ids are there by then."""
        ids = self._mixtures.get(weight)
        if ids is None:
            return None
        root = ids if ids.view_src is None else ids.view_src
        if root.op == "NONE":
            return ids if root.is_resident or not self.plan.data.is_late(self.plan.graph.id_of(root)) else None
        return None if start <= self.plan.graph.position_of(root) < stop else ids

    @cached_property
    def _mixtures(self) -> dict[Tensor, Tensor]:
        """{expert weights that one mixture reads, and nothing else: its ids, unless a node writes into them}."""
        nodes = self.plan.graph.nodes
        found = {node.src[0]: node.src[2] for node in nodes if node.op == "MUL_MAT_ID"}
        if not found:
            return {}
        read = Counter(s for node in nodes for s in node.src if s in found)
        written = {node.view_src for node in nodes if node.op not in _VIEW_OPS}
        return {weight: ids for weight, ids in found.items()
                if read[weight] == 1 and (ids if ids.view_src is None else ids.view_src) not in written}

    def _twin(self, node: Tensor, sources: tuple[int, ...], stand_ins: list[Tensor],
              back: Tensor | None) -> Tensor:
        """The node itself, or one like it that reads (and writes through) copies."""
        n = self.plan.data.n_tensors
        if back is None and all(i < n for i in sources):
            return node
        given = iter(sources)
        src = []
        for s in node.src:
            i = -1 if s is None else next(given)
            src.append(None if s is None else stand_ins[i - n] if i >= n else s)
        key = ("twin", node, tuple(src))
        return self._shared(key, lambda: rewired(node, tuple(src), back, self.lease))


def each(calls: Iterable[Callable[[], object]]) -> None:
    """Make every call; then raise the first error."""
    first = None
    for call in calls:
        try:
            call()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first
