"""Runs a plan: binds a graph to memory, then for each split makes the copies and computes.

An `Allocation` is a plan with addresses.  Its steps are made once and replayed by every
compute: load an input whose life begins, copy a tensor between backends, run nodes.  The
graph is never changed: nodes that read copies are rewired twins.
"""

from __future__ import annotations

from ggml_sched._core import Lease, Tensor, bind_plan, new_lease, release_graph, rewired, stand_in
from ggml_sched.backend import Backend, Buffer, GraphView, tensor_copy
from ggml_sched.plan import Plan

__all__ = ["Allocation"]

_VIEW_OPS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})


class LoadStep:
    """Copy what the caller set into an input's place in the arena."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def run(self) -> None:
        if self.tensor.stash is not None:
            self.tensor.backend.set_tensor(self.tensor, self.tensor.stash)


class CopyStep:
    """Copy a tensor to its stand-in on another backend, or back."""

    __slots__ = ("dst", "src")

    def __init__(self, src: Tensor, dst: Tensor) -> None:
        self.src, self.dst = src, dst

    def run(self) -> None:
        tensor_copy(self.src, self.dst)


class RunStep:
    """Compute nodes on one backend; prepared by the backend on first use."""

    __slots__ = ("backend", "nodes", "prepared")

    def __init__(self, backend: Backend, nodes: list[Tensor]) -> None:
        self.backend, self.nodes, self.prepared = backend, tuple(nodes), None

    def run(self) -> None:
        if self.prepared is None:
            self.prepared = (self.backend.graph_plan_create(GraphView(self.nodes)),)
        self.backend.graph_plan_compute(self.prepared[0])

    def free(self) -> None:
        if self.prepared is not None:
            prepared, self.prepared = self.prepared[0], None
            self.backend.graph_plan_free(prepared)


class Allocation:
    """A plan whose tensors have addresses in `buffers` (one for each backend, None where nothing is placed)."""

    def __init__(self, plan: Plan, buffers: tuple[Buffer | None, ...]) -> None:
        self.plan = plan
        self.buffers = buffers
        self.lease: Lease = new_lease()
        self._steps: list[LoadStep | CopyStep | RunStep] | None = None
        self.bind()

    def bind(self) -> None:
        """(Re-)address the graph's tensors, which other schedulers may have addressed in between."""
        bind_plan(self.plan.graph, self.plan.data, self.buffers, self.lease)

    def release(self) -> None:
        """End the lease: the tensors have no address any more."""
        for step in self._steps or ():
            if isinstance(step, RunStep):
                step.free()
        self._steps = None
        self.lease.end()
        release_graph(self.plan.graph, self.lease)

    def run(self) -> None:
        """Compute the graph; on return every backend is done."""
        if self._steps is None:
            self._steps = self._make_steps()
        for step in self._steps:
            step.run()
        for backend in self.plan.backends:
            backend.synchronize()

    def _make_steps(self) -> list[LoadStep | CopyStep | RunStep]:
        data, graph = self.plan.data, self.plan.graph
        stand_ins = self._stand_ins()
        backs = dict(data.write_backs)
        births: dict[int, list[Tensor]] = {}
        steps: list[LoadStep | CopyStep | RunStep] = []
        for i, leaf in enumerate(graph.tensors):
            if leaf.op != "NONE" or leaf.view_src is not None or data.lifetime(i) is None:
                continue
            if data.is_late(i):
                births.setdefault(data.lifetime(i)[0], []).append(leaf)
            else:
                steps.append(LoadStep(leaf))
        position = 0
        for index, start, stop, inputs in data.splits:
            made = set()
            for c in inputs:
                steps += [LoadStep(leaf) for leaf in births.get(position, ())]
                if c not in made:
                    made.add(c)
                    steps.append(CopyStep(graph.tensors[data.copies[c][0]], stand_ins[c]))
                position += 1
            run: list[Tensor] = []
            for i in range(start, stop):
                node = graph.nodes[i]
                if position in births:
                    self._flush(steps, index, run)
                    steps += [LoadStep(leaf) for leaf in births[position]]
                if node.op not in _VIEW_OPS:
                    k = graph.id_of(node)
                    run.append(self._twin(node, data.sources(k), stand_ins, backs.get(k)))
                    if k in backs:
                        self._flush(steps, index, run)
                        steps.append(CopyStep(stand_ins[backs[k]], node))
                position += 1
            self._flush(steps, index, run)
        return steps

    def _flush(self, steps: list, backend: int, run: list[Tensor]) -> None:
        if run:
            steps.append(RunStep(self.plan.backends[backend], run))
            run.clear()

    def _stand_ins(self) -> list[Tensor]:
        """A tensor at its address for each distinct copy."""
        data, graph = self.plan.data, self.plan.graph
        made = []
        for c, (like, backend) in enumerate(data.copies):
            tensor = graph.tensors[like]
            name = f"{self.plan.backends[backend].name}#{tensor.name}"
            offset = data.offset(data.n_tensors + c)
            made.append(stand_in(tensor, name, self.buffers[backend], offset, self.lease))
        return made

    def _twin(self, node: Tensor, sources: tuple[int, ...], stand_ins: list[Tensor], back: int | None) -> Tensor:
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
