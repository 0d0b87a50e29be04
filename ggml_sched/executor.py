"""Runs a plan: binds a graph to memory, then for each split makes the copies and computes.

An `Allocation` is a plan with addresses.  Its steps (steps.py) are made once and replayed by
every compute.  The graph is never changed: nodes that read copies are rewired twins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ggml_sched._core import Lease, Tensor, bind_plan, new_lease, rewired, stand_in
from ggml_sched.backend import Buffer
from ggml_sched.plan import Plan
from ggml_sched.steps import CopyStep, ExpertsStep, LoadStep, RunStep, Step

__all__ = ["Allocation", "Callback"]

Callback = Callable[[Tensor], object]
"""Called with each node after it was computed; False stops the compute."""

_VIEW_OPS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})


class Allocation:
    """A plan whose tensors have addresses in `buffers`: for each backend a tuple, one for each chunk."""

    def __init__(self, plan: Plan, buffers: tuple[tuple[Buffer, ...], ...]) -> None:
        self.plan = plan
        self.buffers = buffers
        self.lease: Lease = new_lease()
        self._steps: list[Step] | None = None
        self._written: list[Tensor] = []
        bind_plan(plan.graph, plan.data, buffers, self.lease)

    def release(self) -> None:
        """End the lease: the tensors have no address any more."""
        for step in self._steps or ():
            step.free()
        self._steps = None
        self.lease.end()

    @property
    def steps(self) -> list[Step]:
        """What a compute does, in order."""
        if self._steps is None:
            self._steps = list(self._make_steps())
            roots = (node.view_src for node in self.plan.graph.nodes if node.op not in _VIEW_OPS)
            self._written = list({root: None for root in roots if root is not None and root.op == "NONE"})
        return self._steps

    def run(self, callback: Callback | None = None) -> bool:
        """Compute the graph; on return every backend is done.  False if the callback stopped it."""
        finished = True
        try:
            for step in self.steps:
                if callback is not None and isinstance(step, RunStep):
                    finished = step.observe(callback)
                    if not finished:
                        break
                else:
                    step.run()
        finally:
            for root in self._written:
                if root.is_resident:
                    root.touch()
                else:
                    root.overwritten = True
            for backend in self.plan.backends:
                backend.synchronize()
        return finished

    # -- from plan to steps -----------------------------------------------------

    def _make_steps(self) -> Iterator[Step]:
        data, graph = self.plan.data, self.plan.graph
        stand_ins = self._stand_ins()
        backs = dict(data.write_backs)
        births, early = self._leafs()
        yield from early
        position = 0
        for index, start, stop, inputs in data.splits:
            made = set()
            for c in inputs:
                yield from births.get(position, ())
                if c not in made:
                    made.add(c)
                    yield self._copy_step(c, stand_ins[c], start, stop)
                position += 1
            run = RunStep(self.plan.backends[index])
            for node in graph.nodes[start:stop]:
                if position in births:
                    if run.nodes:
                        yield run
                        run = RunStep(self.plan.backends[index])
                    yield from births[position]
                if node.op not in _VIEW_OPS:
                    i = graph.id_of(node)
                    run.add(node, self._twin(node, data.sources(i), stand_ins, backs.get(i)))
                    if i in backs:
                        yield run
                        yield CopyStep(stand_ins[backs[i]], node)
                        run = RunStep(self.plan.backends[index])
                position += 1
            if run.nodes:
                yield run

    def _leafs(self) -> tuple[dict[int, list[Step]], list[Step]]:
        """Loads of leafs: those born later, by position, and those loaded at the start."""
        data = self.plan.data
        births: dict[int, list[Step]] = {}
        early: list[Step] = []
        for i, leaf in enumerate(self.plan.graph.tensors):
            if leaf.op != "NONE" or leaf.view_src is not None or data.lifetime(i) is None:
                continue
            step = LoadStep(leaf, keeps=data.is_exclusive(i))
            if data.is_late(i):
                births.setdefault(data.lifetime(i)[0], []).append(step)
            else:
                early.append(step)
        return births, early

    def _stand_ins(self) -> list[Tensor]:
        """A tensor at its address for each distinct copy."""
        data, graph = self.plan.data, self.plan.graph
        made = []
        for c, (like, backend) in enumerate(data.copies):
            tensor = graph.tensors[like]
            name = f"{self.plan.backends[backend].name}#{tensor.name}"
            i = data.n_tensors + c
            buffer = self.buffers[backend][data.chunk(i)]
            made.append(stand_in(tensor, name, buffer, data.offset(i), self.lease))
        return made

    def _copy_step(self, c: int, dst: Tensor, start: int, stop: int) -> Step:
        """How copy c is made: once while its source is unchanged, only the used experts, or plainly."""
        data, graph = self.plan.data, self.plan.graph
        src = graph.tensors[data.copies[c][0]]
        root = src if src.view_src is None else src.view_src
        keeps = root.op == "NONE" and (data.kept[c] or data.is_exclusive(data.n_tensors + c))
        if not keeps and src.is_resident:
            ids = self._experts_ids(src, start, stop)
            if ids is not None:
                return ExpertsStep(src, dst, ids)
        return CopyStep(src, dst, keeps)

    def _experts_ids(self, weight: Tensor, start: int, stop: int) -> Tensor | None:
        """The ids that name the used experts, if one mixture alone reads `weight`, made before this split."""
        nodes = self.plan.graph.nodes
        readers = [node for node in nodes if any(s is weight for s in node.src)]
        if len(readers) != 1 or readers[0].op != "MUL_MAT_ID" or readers[0].src[0] is not weight:
            return None
        ids = readers[0].src[2]
        position = self._position(ids if ids.view_src is None else ids.view_src)
        return None if start <= position < stop else ids

    def _position(self, t: Tensor) -> int:
        """Place in the node order, -1 for a leaf."""
        return self.plan.graph.position_of(t)

    def _twin(self, node: Tensor, sources: tuple[int, ...], stand_ins: list[Tensor],
              back: int | None) -> Tensor:
        """The node itself, or one like it that reads (and writes through) copies."""
        n = self.plan.data.n_tensors
        if back is None and all(i < n for i in sources):
            return node
        given = iter(sources)
        src = []
        for s in node.src:
            i = -1 if s is None else next(given)
            src.append(None if s is None else stand_ins[i - n] if i >= n else s)
        return rewired(node, tuple(src), None if back is None else stand_ins[back], self.lease)
