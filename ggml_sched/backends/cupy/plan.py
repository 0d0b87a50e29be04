"""The launches of a split: built once, issued one by one at first, then captured as a CUDA graph and replayed.

Invariant: packed arguments and captured graphs hold valid addresses: when the work memory has moved, arguments are
packed and the graph is captured anew.  Inputs are copied to fixed addresses, so a replay reads the new inputs.
A graph only saves time: if the device has no memory to make or launch it, the launches are issued one by one.
Corresponds to ggml's ggml_cuda_graph.  Callers hold the backend's lock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, cast

from ggml_sched._graph import BufferBase, Tensor, check_graph_plan, staged_leafs
from ggml_sched.backends.cupy.buffer import DeviceBuffer
from ggml_sched.backends.cupy.device import CapturedGraph, DeviceError, Function, KernelArguments, Stream
from ggml_sched.backends.cupy.fault import Numbers
from ggml_sched.backends.cupy.launch import Builder, Launch
from ggml_sched.backends.cupy.ops import build, build_group, rounding
from ggml_sched.backends.cupy.ops.carried import carry
from ggml_sched.backends.cupy.ops.library import PRODUCT
from ggml_sched.backends.cupy.repack import is_packed
from ggml_sched.errors import UnsupportedOp

if TYPE_CHECKING:
    from ggml_sched.backends.cupy.backend import CupyBackend
    from ggml_sched.backends.cupy.device import Blas

__all__ = ["DevicePlan"]


AGAIN = 4
"""After a failed capture or replay in run n of a plan, a capture is tried again in run AGAIN * n."""
READ_PACKED = ("MUL_MAT", "MUL_MAT_ID", "GET_ROWS")
"""Ops whose first source may be rearranged weights."""


class Staged(NamedTuple):
    """A step for an input that a GraphAllocator placed: load its data, or, if `written`, note that a node has
    overwritten it.  Made from a pair of `staged_leafs`."""

    leaf: Tensor
    written: bool

    def issue(self, backend: CupyBackend, stream: Stream) -> None:
        if self.written:
            self.leaf.overwritten = True
        elif self.leaf.stash:
            backend.put_leaf(self.leaf, self.leaf.stash)


class _Product(NamedTuple):
    """A matrix product by the device's own library, which cannot be captured; `numbers`: `Blas.gemm`'s arguments after
    the stream."""

    numbers: tuple[int, ...]

    def issue(self, backend: CupyBackend, stream: Stream) -> None:
        cast("Blas", backend.blas).gemm(stream, *self.numbers)


class _Ready(NamedTuple):
    """A launch whose arguments are packed; `early`: it may begin before the previous launch has ended."""

    function: Function
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    packed: KernelArguments
    shared: int
    early: bool

    def issue(self, backend: CupyBackend, stream: Stream) -> None:
        self.function.launch(self.grid, self.block, self.packed, self.shared, stream, self.early)


def straighten_for(backend: CupyBackend, nodes: Sequence[Tensor]) -> None:
    """Convert rearranged weights to ggml's order if a node cannot read the other order."""
    for node in nodes:
        if not node.computes:
            continue
        for i, t in enumerate((node, *node.src)):
            buffer = None if t is None else t.buffer
            if isinstance(buffer, DeviceBuffer) and buffer.backend is backend:
                for part in buffer.packed.under(t):
                    if i != 1 or node.op not in READ_PACKED or not _is_whole(t):
                        backend.straighten(buffer, part)


def _is_whole(t: Tensor) -> bool:
    """Whether a tensor is a rearranged weight, or whole rows of one."""
    try:
        return is_packed(t)
    except UnsupportedOp:
        return False


class DevicePlan:
    """Launches for `nodes` at the addresses that they have now.

    `groups`, `needed`: as in GraphView.  `work_size`: bytes of work memory; `captures`: the number of captures;
    `graph`: the captured graph, or None.
    """

    def __init__(self, backend: CupyBackend, nodes: Sequence[Tensor], numbers: Numbers,
                 groups: Sequence[Sequence[int]] = (), needed: Collection[int] | None = None) -> None:
        self.numbers = numbers
        self.graph: CapturedGraph | None = None
        self.captures: int = 0
        self.freed: bool = False
        self.work_size: int = 0
        self._nodes, self._groups, self._needed = tuple(nodes), tuple(groups), needed
        self._steps: list[Launch | Staged] = []
        self._ready: list[_Ready | _Product | Staged] = []
        self._buffers: tuple[BufferBase, ...] = tuple({t.buffer for node in nodes if node.computes
                                                       for t in (node, *node.src)
                                                       if t is not None and t.buffer is not None})
        self._build(backend)

    def _build(self, backend: CupyBackend) -> None:
        """Build the launches for the weights as they are stored now; if this is interrupted, the next run repeats
        it."""
        nodes, numbers = self._nodes, self.numbers
        self._straightened = -1
        straighten_for(backend, nodes)
        straightened = backend.n_straightened
        builder = Builder(backend.name, owns=backend.supports_buffer,
                          needed=None if self._needed is None else {nodes[i] for i in self._needed},
                          n_multiprocessors=backend.device.n_multiprocessors, exact=backend.exact,
                          blas=backend.blas is not None, tensor=backend.device.has_tensor_cores,
                          rounded=rounding.results(nodes, backend.exact, backend.blas is not None,
                                                   backend.device.has_tensor_cores))
        group_at = {group[-1]: group for group in self._groups}
        computed_later = {i for group in self._groups for i in group[:-1]}
        staged = staged_leafs(nodes)
        steps: list[Launch | Staged] = []
        for i, node in enumerate(nodes):
            steps += [Staged(*pair) for pair in staged.get(i, ())]
            if not node.computes:
                continue
            if i in group_at:
                group = group_at[i]
                build_group(builder, [numbers.first + k for k in group], [nodes[k] for k in group])
            elif i not in computed_later:
                build(builder, numbers.first + i, node)
            steps += builder.launches
            builder.launches.clear()
        self._steps, self._ready = carry(steps), []
        self._runs, self._generation = 0, -1
        self._capture_at = 1
        self.work_size = builder.work_size
        self._captures = backend.capture and not staged and not any(
            isinstance(step, Launch) and step.kernel == PRODUCT for step in steps)
        self._straightened = straightened

    def refresh(self, backend: CupyBackend) -> None:
        """Build the launches again if rearranged weights were converted to ggml's order since they were built."""
        if self._straightened != backend.n_straightened:
            self._drop_graph()
            self._build(backend)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The launches, in order."""
        return tuple(step for step in self._steps if isinstance(step, Launch))

    def __len__(self) -> int:
        """The number of steps: launches, and loads and overwrites of inputs."""
        return len(self._steps)

    def free(self) -> None:
        """Free the graph, and drop the launches; idempotent."""
        self.freed = True
        self._steps, self._ready, self._buffers, self._nodes = [], [], (), ()
        self._drop_graph()

    def _drop_graph(self) -> None:
        graph, self.graph = self.graph, None
        if graph is not None:
            graph.free()

    def check(self, name: str) -> None:
        """BackendError for a freed plan, PlacementError for one with a closed buffer."""
        check_graph_plan(name, self.freed, self._buffers)

    def run(self, backend: CupyBackend) -> None:
        """Queue the launches: the first run issues them one by one, the second captures a graph, which is then
        replayed."""
        generation = backend.work.generation if self.work_size else 0
        if self._generation != generation:
            self._pack(backend, generation)
        if self.graph is None and self._captures and self._runs >= self._capture_at and self._steps:
            self._capture(backend)
        if self.graph is None or not self._replay(self.graph, backend.stream):
            self._issue(backend, backend.stream)
        self._runs += 1

    def _replay(self, graph: CapturedGraph, stream: Stream) -> bool:
        """Queue the graph; if the device refuses, drop the graph and queue nothing."""
        try:
            graph.launch(stream)
        except DeviceError:
            self._fall_back()
            return False
        return True

    def _fall_back(self) -> None:
        """Drop the graph and do without one for some runs: later there may be memory for a graph."""
        self._capture_at = AGAIN * self._runs
        with suppress(DeviceError):
            self._drop_graph()

    def _pack(self, backend: CupyBackend, generation: int) -> None:
        """Pack arguments with the present addresses of work memory and error word."""
        ready: list[_Ready | _Product | Staged] = []
        backend.load({step.kernel for step in self._steps if isinstance(step, Launch) and step.kernel != PRODUCT})
        for step in self._steps:
            if not isinstance(step, Launch):
                ready.append(step)
                continue
            args = step.bound(backend.work.address, backend.faults.address)
            if step.kernel == PRODUCT:
                ready.append(_Product(tuple(map(int, args))))
            else:
                function = backend.function(step.kernel)
                # The plan's first launch is not early: it waits for all that was queued before the plan.
                early = backend.overlap and bool(ready) and isinstance(ready[-1], _Ready)
                ready.append(_Ready(function, step.grid, step.block, function.pack(args), step.shared, early))
        self._drop_graph()
        self._ready, self._generation = ready, generation

    def _issue(self, backend: CupyBackend, stream: Stream) -> None:
        for step in self._ready:
            step.issue(backend, stream)

    def _capture(self, backend: CupyBackend) -> None:
        """Capture the graph, if the device has memory for it, in a stream made for that: other threads may be waiting
        for the backend's stream, and a wait for a stream that is captured fails and breaks the capture."""
        try:
            stream = backend.device.stream()
            try:
                stream.begin_capture()
                self._issue(backend, stream)
            except BaseException:
                with suppress(DeviceError):     # only to end the capture
                    stream.end_capture().free()
                raise
            self.graph = stream.end_capture()
        except DeviceError:
            self._fall_back()
        else:
            self.captures += 1
