"""The CPU backend: memory, copies, and graphs run by the kernels of this package.

A split becomes a list of backend steps: stretches of compiled calls and, for each node without a compiled kernel, a
call of a NumPy kernel (the oracle, which also raises the errors of invalid nodes).
A graph plan (CpuPlan) keeps its steps; `graph_compute` makes steps, runs and drops them.  Both run the same calls, so
their results are equal to the bit.  All plans share the backend's work memory.
Corresponds to ggml's CPU backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from ggml_sched._graph import BufferBase, Graph, Tensor, apply_staged, check_graph_plan, computed, label, staged_leafs
from ggml_sched.backend import Backend, GraphView, as_nodes, checked_bytes, overrides
from ggml_sched.backends.cpu._kernels import CallList, Pool, WorkMemory, work_of
from ggml_sched.backends.cpu.buffer import ALIGNMENT, CpuBuffer, HostBackend
from ggml_sched.backends.cpu.interleaved import Interleaved, can_interleave
from ggml_sched.backends.cpu.oracle.operands import MemoryOf, Operands, Resolver
from ggml_sched.backends.cpu.oracle.registry import KERNELS
from ggml_sched.backends.cpu.times import NodeTimes
from ggml_sched.errors import BackendError, Error, OutOfMemory, PlacementError, UnsupportedOp
from ggml_sched.threads.locks import ForkLock
from ggml_sched.threads.workers import thread_count

__all__ = ["KERNELS_OF", "CpuBackend", "CpuPlan", "run_nodes"]

MAX_THREADS = 1024

KERNELS_OF = ("compiled", "numpy")
"""Which kernels a CpuBackend runs: the compiled ones, or those of the oracle."""


Call: TypeAlias = Callable[[], object]


def resolve(node: Tensor, resolver: Resolver) -> list[Call]:
    """A list with the call that computes a node by the oracle; empty for a view.

    Raises UnsupportedOp, PlacementError or BackendError, which name the node.
    """
    if not node.computes:
        return []
    found = KERNELS.get(node.op)
    if found is None or not found.fits(node):
        sources = ", ".join("none" if s is None else f"{s.type} {list(s.ne)}" for s in node.src)
        raise UnsupportedOp(f"backend {resolver.name!r}: no kernel for node {label(node)}: {node.op} of "
                            f"{sources} to {node.type} {list(node.ne)}")
    return [partial(found.run, Operands(node, resolver))]


@contextmanager
def _named(backend_name: str, node: Tensor) -> Iterator[None]:
    """Turn exceptions of other libraries into errors of this package that name the backend and the node."""
    try:
        yield
    except Error:
        raise
    except MemoryError as error:
        raise OutOfMemory(f"backend {backend_name!r}: no memory to compute node {label(node)} ({node.op})",
                          backend_name) from error
    except Exception as error:
        message = f"backend {backend_name!r}: node {label(node)} ({node.op}) failed: {error}"
        raise BackendError(message) from error


class Stretch:
    """A backend step: calls of a list, from number `first` to the list's present end, run one after the other."""

    __slots__ = ("_calls", "_pool", "first", "last")

    def __init__(self, calls: CallList, pool: Pool, first: int) -> None:
        self._calls, self._pool = calls, pool
        self.first: int = first
        self.last: int = calls.n_calls

    def __call__(self) -> None:
        self._calls.run(self._pool, self.first, self.last)


Step: TypeAlias = tuple[Call, Tensor]
"""A function to call, and the node that errors name."""


def steps_of(nodes: tuple[Tensor, ...], resolver: Resolver, pool: Pool | None,
             work: WorkMemory) -> tuple[list[Step], CallList | None, int]:
    """(steps that compute the nodes, the list of compiled calls, the number of nodes that compiled calls compute).

    Without a pool the oracle computes all nodes.  `work`: the work memory of the compiled calls.
    """
    staged = staged_leafs(nodes)
    steps: list[Step] = []
    if pool is None:
        for i, node in enumerate(nodes):
            steps += [(call, node) for call in loads_of(staged.get(i, ())) + resolve(node, resolver)]
        return steps, None, 0
    working = computed(nodes)
    compiled = CallList(resolver.name, working, resolver.memory_of, work)
    loads: dict[int, list[Step]] = {}       # {how many nodes are computed before: steps to run at that point}
    for i, pairs in staged.items():
        before = sum(node.computes for node in nodes[:i])
        loads.setdefault(before, []).extend((call, nodes[i]) for call in loads_of(pairs))
    number = n_compiled = 0
    for stop in sorted({*loads, len(working)}):
        while number < stop:
            began, n_calls = number, compiled.n_calls
            number = compiled.add(began, stop)
            n_compiled += number - began
            if compiled.n_calls > n_calls:
                steps.append((Stretch(compiled, pool, n_calls), compiled.node_of(n_calls)))
            if number < stop:
                node = working[number]
                steps += [(call, node) for call in resolve(node, resolver)]
                number += 1
        steps += loads.get(stop, ())
    return steps, compiled, n_compiled


def loads_of(pairs: Iterable[tuple[Tensor, bool]]) -> list[Call]:
    """The calls that load leafs, from pairs of `staged_leafs`."""
    return [partial(apply_staged, leaf, written) for leaf, written in pairs]


def run_steps(steps: list[Step], name: str) -> None:
    node = None
    try:
        with np.errstate(all="ignore"):
            for call, node in steps:  # noqa: B007 - the node names the call that failed
                call()
    except Exception:
        if node is None:
            raise
        with _named(name, node):
            raise


class CpuPlan:
    """A graph plan: the steps of a graph at its present addresses (ggml_graph_plan); `work`: the work memory that the
    steps borrow from."""

    def __init__(self, resolver: Resolver, nodes: tuple[Tensor, ...], pool: Pool | None, work: WorkMemory) -> None:
        self.resolver = resolver
        self.lock: ForkLock = ForkLock()
        self._freed = False
        self.n_compiled: int
        with np.errstate(all="ignore"):
            self._steps, self._compiled, self.n_compiled = steps_of(nodes, resolver, pool, work)
        self._pool = pool
        # The common case of a single stretch is run without the error handling that only NumPy kernels need.
        self._flat = self._steps[0][0] if len(self._steps) == 1 and isinstance(self._steps[0][0], Stretch) else None
        self._buffers = tuple({*resolver.buffers, *(() if self._compiled is None else self._compiled.buffers)})

    @property
    def work_size(self) -> int:
        """Bytes of work memory that a run of the compiled calls borrows."""
        if self._compiled is None or self._pool is None:
            return 0
        return self._compiled.work_size(self._pool.n_threads)

    @property
    def freed(self) -> bool:
        return self._freed

    def free(self) -> None:
        """Drop the references to buffers; idempotent."""
        self._freed = True
        self._steps, self._flat, self._compiled, self._buffers = [], None, None, ()
        self.resolver.buffers.clear()

    def run(self) -> None:
        check_graph_plan(self.resolver.name, self._freed, self._buffers)
        # Keep the memory of all buffers alive: another thread may close one while calls run over its addresses.
        held = None if self._compiled is None else self._compiled.held()  # noqa: F841
        if self._flat is not None:
            self._flat()
        else:
            run_steps(self._steps, self.resolver.name)


class CpuBackend(HostBackend):
    """Real memory and real compute on the host.

    `n_threads` counts the calling thread (None: as many as CPUs that this process may use).  `memory`: the most bytes
    of all buffers together.  `kernels`: "compiled", or "numpy" for the slow oracle, with which tests compare the
    compiled ones and which computes on the calling thread alone.
    """

    is_host = True
    is_cpu = True

    def __init__(self, n_threads: int | None = None, name: str = "CPU", memory: int | None = None,
                 kernels: str = "compiled") -> None:
        super().__init__(name, ALIGNMENT)
        if kernels not in KERNELS_OF:
            raise ValueError(f"backend {name!r}: kernels={kernels!r} is none of {', '.join(KERNELS_OF)}")
        self.kernels = kernels
        self.memory: int | None = checked_bytes(self.name, "memory", memory)
        self._lock = ForkLock()
        self._work = WorkMemory(self.name)
        self.n_threads: int = thread_count(n_threads, MAX_THREADS)
        self._pool = Pool(self.n_threads) if kernels == "compiled" else None

    if TYPE_CHECKING:
        def alloc_buffer(self, size: int) -> CpuBuffer: ...

    # -- weights ------------------------------------------------------------------

    def interleave(self, tensors: Iterable[Tensor], done: Callable[[Tensor], object] | None = None) -> int:
        """Keep weights in a second form, with interleaved rows, which matrix products of graphs that are planned
        afterwards read faster; returns the bytes of the tensors that have one now.

        Left out are tensors that kernels here do not use in this form: those that are not quantised, whose rows have
        gaps, or whose matrices have no multiple of 16 rows.  The second form takes as many bytes as the first, of
        `memory`, until the buffer of the tensor is closed.  Sums are added in another order, so that results may differ
        in the last bits.  The tensors stay as they are and must not change any more; after a change interleave them
        again.  `done(tensor)` is called after each.

        Raises PlacementError for a tensor without memory on this backend, OutOfMemory, and BackendError if the backend
        is closed.  llama.cpp calls such weights repacked.
        """
        self._require_open()
        by_buffer: dict[CpuBuffer, list[Tensor]] = {}
        if isinstance(tensors, Tensor):
            raise TypeError(f"backend {self.name!r}: several tensors are expected, not {label(tensors)}")
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"backend {self.name!r}: not a Tensor: {tensor!r}")
            buffer = tensor.buffer
            if not isinstance(buffer, CpuBuffer) or buffer.backend is not self:
                raise PlacementError(f"backend {self.name!r}: {label(tensor)} has no memory there")
            buffer.memory   # noqa: B018 - BackendError if it is closed
            if self._pool is not None and can_interleave(tensor):
                by_buffer.setdefault(buffer, []).append(tensor)
        self.synchronize()      # a subclass may have queued writes of these tensors
        total = 0
        with self._lock:
            for buffer, members in by_buffer.items():
                if buffer.interleaved is None:
                    buffer.interleaved = Interleaved()
                total += buffer.interleaved.add(members, buffer, done)
        return total

    # -- computing ----------------------------------------------------------------

    def set_n_threads(self, n: int) -> None:
        """Use n threads from now on; results do not depend on n.  Graphs are planned again, because the memory that
        kernels need (`host_work`) depends on n."""
        before, self.n_threads = self.n_threads, thread_count(n, MAX_THREADS)
        if self.n_threads != before and self.answers_version is not None:
            self.answers_version += 1
        if self._pool is not None:
            self._pool.set_n_threads(self.n_threads)

    def supports_op(self, node: Tensor) -> bool:
        if not node.computes:
            return True
        found = KERNELS.get(node.op)
        return found is not None and found.fits(node)

    @property
    def host_work_held(self) -> int:        # type: ignore[override]
        return self._work.held

    def host_work(self, nodes: Sequence[Tensor]) -> int:
        return work_of(computed(tuple(nodes)), self.n_threads, self._pool is not None)

    def inplace_sources(self, op: str) -> int:
        found = KERNELS.get(op)
        return 0 if found is None else found.inplace

    def graph_compute(self, graph: Graph | GraphView) -> None:
        if overrides(self, "compute_node"):
            Backend.graph_compute(self, graph)
            return
        self._require_open()
        nodes = as_nodes(graph)
        with self._lock:
            with np.errstate(all="ignore"):
                steps, compiled, _ = steps_of(nodes, Resolver(self.name, self._memory_of), self._pool, self._work)
            held = None if compiled is None else compiled.held()  # noqa: F841 - see CpuPlan.run
            run_steps(steps, self.name)

    def graph_plan_create(self, graph: Graph | GraphView) -> CpuPlan:
        self._require_open()
        return CpuPlan(Resolver(self.name, self._memory_of), as_nodes(graph), self._pool, self._work)

    def graph_plan_free(self, plan: CpuPlan) -> None:
        with plan.lock:
            plan.free()

    def graph_plan_compute(self, plan: CpuPlan) -> None:
        if self._closed:
            self._require_open()
        with plan.lock:
            plan.run()

    @contextmanager
    def node_times(self) -> Iterator[NodeTimes]:
        """Measure how long each node takes that is computed while the context is open.

        While the context is open, each part of a node costs two readings of the clock more; otherwise nothing.
        ValueError for the NumPy kernels, Error if another measurement is open.
        """
        if self._pool is None:
            raise ValueError(f"backend {self.name!r}: kernels={self.kernels!r} are not measured")
        if self._pool.times is not None:
            raise Error(f"backend {self.name!r} is being measured")
        self._pool.times = NodeTimes(self.n_threads)
        try:
            yield self._pool.times
        finally:
            self._pool.times = None

    def _memory_of(self, buffer: BufferBase) -> np.ndarray:
        if not self.supports_buffer(buffer):
            raise PlacementError(f"it is on backend {buffer.backend.name!r}")
        return cast("CpuBuffer", buffer).memory

    # -- life -------------------------------------------------------------------

    def close(self) -> None:
        """Stop the threads and drop the work memory; buffers keep their memory until they are closed."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.close()
            self._work.clear()


def run_nodes(nodes: Graph | GraphView | Sequence[Tensor], memory_of: MemoryOf, *, name: str = "CPU") -> None:
    """Compute nodes in order with the NumPy kernels, over memory of any backend.

    A backend written in Python can call it from its `graph_compute`.  `memory_of(buffer)` returns a uint8 array over
    all bytes of a buffer that a node uses, or raises PlacementError.  `name`: the backend's name in errors.
    """
    steps, _, _ = steps_of(as_nodes(nodes), Resolver(name, memory_of), None, WorkMemory(name))
    run_steps(steps, name)
