"""The interface between the planner and a device: subclass `Backend` and `Buffer`.

A backend needs two methods, `alloc_buffer` and `graph_compute`, and a buffer two,
`read` and `write`.  Everything else has a working default.  The slots correspond to
ggml's backend and buffer vtables:

    ggml                     here                         default
    get_name                 Backend.name                 given to __init__
    free                     Backend.close                nothing
    alloc_buffer             Backend.alloc_buffer         (required)
    get_alignment            Backend.alignment            64
    set_tensor_async         Backend.set_tensor_async     Buffer.write
    get_tensor_async         Backend.get_tensor_async     Buffer.read
    synchronize              Backend.synchronize          nothing
    cpy_tensor_from          Backend.cpy_tensor_from      False: not possible
    cpy_tensor_to            Backend.cpy_tensor_to        False: not possible
    cpy_tensor_async         Backend.cpy_tensor_async     False: not possible
    event_new                Backend.event_new            an Event
    event_record             Backend.event_record         synchronize
    event_wait               Backend.event_wait           the event's backend's event_synchronize
    event_synchronize        Backend.event_synchronize    nothing: recording has waited
    graph_plan_create        Backend.graph_plan_create    the graph itself
    graph_plan_free          Backend.graph_plan_free      nothing
    graph_plan_compute       Backend.graph_plan_compute   graph_compute
    graph_compute            Backend.graph_compute        (required)
    supports_op              Backend.supports_op          True
    (none)                   Backend.fusion_groups        none
    free_buffer              Buffer.free                  nothing
    get_base                 Buffer.base                  0
    get_alloc_size           Buffer.alloc_size            Backend.alloc_size: tensor.nbytes
    init_tensor              Buffer.init_tensor           nothing
    free_tensor              Buffer.free_tensor           nothing

A node that reaches `graph_compute` is a `Tensor`: `node.op`, `node.op_params`,
`node.ne`, `node.nb`, and for itself and each of `node.src` a `buffer` of this
backend and an `offset` into it, in bytes.

`supports_op`, `offload_op` and `alloc_size` are called once for each kind of node, not for each node: their results
may depend on op, parameters, type, extents and strides of the node, and on the types, extents and strides of its
sources.  A backend whose results change must increase its `answers_version`.  A backend whose results depend on more
sets `answers_version` to None; then they are called for every node of every plan.

A backend that computes several nodes faster as one kernel returns such groups from `fusion_groups`, which is called
before a graph is planned.  `GraphView.groups` has those groups that the plan uses.  Nodes that are computed one by one,
for a callback, have no groups.

A compiled subclass may override the C methods `c_supports_op`, `c_offload_op` and `c_alloc_size` (_graph.pxd), which
take nodes as C structs from a `NodeTable` (include/ggml_sched/graph.h).

Order: each step of a compute is issued to the queue of one backend.  Before it, `event_wait` is called for each event
that it waits for; after it, where other steps wait for it, an event is recorded.  A backend that goes on working after
its methods have returned overrides the four event methods.  For any other backend `event_record` waits until its work
is done, and waiting for the event then returns at once.

Threads: `Scheduler.compute` calls from the thread of the caller.  So does `compute_async` where all backends are
`asynchronous`; otherwise it has a thread for each backend, and no two threads are in one backend at a time, with
one exception: with a backend of `concurrent_copies` another thread may exchange data (`cpy_tensor_from`,
`cpy_tensor_to`, `cpy_tensor_async`, `set_tensor_async`, `get_tensor_async`, `synchronize`, events) while it computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index

from ggml_sched._graph import (
    ALL_SOURCES,
    BackendBase,
    BufferBase,
    Context,
    Graph,
    Tensor,
    bind_resident,
    checked_alloc_size,
    measure_buffer,
    new_buffer,
    register_tensor_data,
)
from ggml_sched.errors import BackendError, OutOfMemory, PlacementError
from ggml_sched.graph import hostdata

__all__ = ["ALL_SOURCES", "Backend", "Buffer", "Event", "GraphView", "bind_resident", "get_backend", "measure_buffer",
           "tensor_copy"]


class Buffer(BufferBase):
    """A range of one backend's memory.

    `Buffer(backend, size, base=0, usage="any")`: size in bytes; `base` is the address of the first byte, or 0 on a
    backend without addresses.  `file_backed`: the bytes are those of a mapped file, so that the operating system can
    drop the pages and read them again, and a copy of them in another layout would take additional memory.
    """

    file_backed: bool = False

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes into [offset, offset + len(data)); the caller has checked the range."""
        raise BackendError(f"a buffer of backend {self.backend.name!r} has no memory to write to")

    def read(self, offset: int, out: memoryview) -> None:
        """Copy [offset, offset + len(out)) into `out`, a writable view of bytes; the caller has checked the range."""
        raise BackendError(f"a buffer of backend {self.backend.name!r} has no memory to read from")

    def clear(self, value: int = 0) -> None:
        """Fill with one byte value; ValueError unless it is in 0 .. 255."""
        piece = 1 << 20
        block = memoryview(bytes([self.checked_byte(value)]) * min(piece, self.size))
        for offset in range(0, self.size, piece):
            self.write(offset, block[: min(piece, self.size - offset)])

    def checked_byte(self, value: int) -> int:
        """`value` as an int; ValueError unless it is in 0 .. 255."""
        if not 0 <= index(value) <= 255:
            raise ValueError(f"a buffer of backend {self.backend.name!r} is filled with bytes: {value} is no byte")
        return index(value)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class GraphView:
    """Nodes that a backend is to compute, in order: a split or a part of one (ggml_graph_view).

    `groups` are fusion groups that `Backend.fusion_groups` returned, as ascending indices into `nodes`; each may be
    computed as one kernel at the position of its last member.  Where a member reads another member, its source may be
    a different `Tensor` object with the same memory, or a view: compare positions in `nodes`, not objects.
    """

    __slots__ = ("_needed", "groups", "nodes")

    def __init__(self, nodes: Iterable[Tensor], groups: Iterable[tuple[int, ...]] = (),
                 needed: frozenset[int] | None = None) -> None:
        self.nodes = tuple(nodes)
        self.groups = tuple(groups)
        self._needed = needed

    @property
    def needed(self) -> frozenset[int]:
        """Indices of the nodes whose results are read outside of their group (for a member) or outside of the view.

        The result of a member that is not among them need not be written to memory; those of all other nodes must be.
        By default all nodes.
        """
        return frozenset(range(len(self.nodes))) if self._needed is None else self._needed

    def __len__(self) -> int:
        return len(self.nodes)


class Event:
    """A point in the queue of a backend; subclass it to hold a device's event."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend


class Backend(BackendBase):
    """One device.  Subclass it; `super().__init__(name, alignment)`.

    Attributes that a subclass may set:

    * `max_buffer_size`: the most bytes of one buffer (None: no bound).
    * `is_host`: the CPU can read the memory of its buffers directly.
    * `concurrent_copies`: another thread may write and read its memory while it computes.
    * `asynchronous`: computes, copies and `set_tensor_async` return at once, are executed in order, and can be waited
      for by events.
    * `takes_at_once`: the caller may change or free the data given to `set_tensor_async` once that returns.
    * `has_memory`: its addresses are those of real memory; False for backends that serve planning alone.
    * `kv_padding`: attention reads a multiple of this many rows of a KV cache.
    * `work_held`: bytes of work memory that it has allocated (see `work_size`).
    * `failed`: (how many waits have raised an error of queued work, the last message); see `note_failure`.  Where the
      number has grown since a compute was queued, the results of the compute are not valid.
    """

    max_buffer_size: int | None = None
    is_host: bool = False
    concurrent_copies: bool = False
    asynchronous: bool = False
    takes_at_once: bool = False
    has_memory: bool = True
    kv_padding: int = 32
    work_held: int = 0
    failed: tuple[int, str] = (0, "")

    # -- memory ---------------------------------------------------------------

    def alloc_buffer(self, size: int) -> Buffer:
        """Allocate a buffer of `size` bytes; OutOfMemory if that fails."""
        raise NotImplementedError(f"backend {self.name!r} does not allocate buffers")

    def memory_available(self) -> int | None:
        """Bytes that can still be allocated here, None if the backend does not know."""
        return None

    def work_size(self, nodes: Sequence[Tensor]) -> int:
        """An upper bound, in bytes, of the device memory that computing these nodes takes outside a plan's buffers.

        It counts in budgets.  All splits use the same work memory, which stays allocated (`work_held`).
        """
        return 0

    def alloc_tensors(self, ctx: Context, usage: str = "weights") -> Buffer:
        """Give every tensor of a context that has no address memory in one new buffer.

        Views follow their roots.  Raises OutOfMemory, BackendError; then no tensor has changed.
        """
        pending, total = self._layout(ctx)
        if self.max_buffer_size is not None and total > self.max_buffer_size:
            raise OutOfMemory(
                f"the tensors of context {ctx.name!r} need {total} bytes in one buffer; backend "
                f"{self.name!r} allows {self.max_buffer_size}", self.name, total, self.max_buffer_size)
        buffer = new_buffer(self, total)
        try:
            buffer.usage = usage
            for tensor, offset in pending:
                bind_resident(tensor, buffer, offset)
                buffer.init_tensor(tensor)
        except BaseException:
            for tensor, _ in pending:
                bind_resident(tensor, None, 0)
            buffer.close()
            raise
        return buffer

    def alloc_tensors_size(self, ctx: Context) -> int:
        """Bytes that `alloc_tensors(ctx)` would allocate."""
        return self._layout(ctx)[1]

    def _layout(self, ctx: Context) -> tuple[list[tuple[Tensor, int]], int]:
        pending, total = [], 0
        for tensor in ctx.tensors:
            # A temporary address, given by a scheduler, does not count: it ends when the next graph is allocated.
            lent = tensor.lease is not None and tensor.lease.transient
            if tensor.view_src is None and (lent or tensor.buffer is None):
                pending.append((tensor, total))
                size = checked_alloc_size(self, tensor, self.alloc_size(tensor))
                total += -(-size // self.alignment) * self.alignment
        return pending, total

    # -- data -------------------------------------------------------------------

    def set_tensor_async(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        """Queue a copy of bytes into the tensor, `offset` bytes from its start.

        The caller keeps `data` alive and unchanged until `synchronize`.
        """
        tensor.buffer.write(tensor.offset + offset, data)

    def get_tensor_async(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        """Queue a copy of the tensor's bytes from `offset` into `out`."""
        tensor.buffer.read(tensor.offset + offset, out)

    def set_tensor(self, tensor: Tensor, data, offset: int = 0) -> None:
        """Copy bytes into a tensor: range-checked, complete on return.

        PlacementError without an address here, ValueError outside the tensor.
        """
        view = memoryview(data).cast("B")
        self._check_range(tensor, offset, len(view))
        if len(view):
            tensor.touch()
            self.set_tensor_async(tensor, view, offset)
            self.synchronize()

    def get_tensor(self, tensor: Tensor, out, offset: int = 0) -> None:
        """Copy bytes of a tensor into a writable buffer: range-checked, complete on return."""
        view = memoryview(out).cast("B")
        self._check_range(tensor, offset, len(view))
        if len(view):
            self.get_tensor_async(tensor, view, offset)
            self.synchronize()

    def note_failure(self, error: BaseException) -> None:
        """Record in `failed` that a wait is about to raise an error of queued work.

        Other callers with queued work learn from `failed` that their results are not valid.
        """
        self.failed = (self.failed[0] + 1, str(error))

    def _check_range(self, tensor: Tensor, offset: int, size: int) -> None:
        if tensor.buffer is None:
            raise PlacementError(f"tensor {tensor.name!r} has no address")
        if tensor.backend is not self:
            raise PlacementError(f"tensor {tensor.name!r} is on backend {tensor.backend.name!r}, not {self.name!r}")
        if offset < 0 or size > tensor.nbytes or offset > tensor.nbytes - size:
            raise ValueError(f"bytes {offset} .. {offset + size} lie outside tensor {tensor.name!r} of "
                             f"{tensor.nbytes} bytes")
        end = tensor.offset + offset + size
        if end > tensor.buffer.size:
            raise PlacementError(
                f"tensor {tensor.name!r} ends at {end}, outside its buffer of {tensor.buffer.size} bytes")

    def cpy_tensor_from(self, src: Tensor, dst: Tensor) -> bool:
        """Copy `src`, of another backend, into `dst` of this one, in the order of this one's queue.

        False if that is not possible; the caller then copies through host memory.
        """
        return False

    def cpy_tensor_to(self, src: Tensor, dst: Tensor) -> bool:
        """Copy `src`, of this backend, into `dst` of another, in the order of this one's queue.

        False if that is not possible; the caller then copies through host memory.
        """
        return False

    def cpy_tensor_async(self, src: Tensor, dst: Tensor) -> bool:
        """Queue a copy of `src`, of this backend, into `dst` of one with `concurrent_copies`; False if not possible.

        The copy is executed after all work queued here before; an event recorded here afterwards covers it.
        """
        return False

    def synchronize(self) -> None:
        """Wait until all work queued on this backend is done."""

    # -- events -----------------------------------------------------------------

    def event_new(self) -> Event:
        """A new event of this backend."""
        return Event(self)

    def event_record(self, event: Event) -> None:
        """Record the event: it passes when all work queued on this backend so far is done."""
        self.synchronize()

    def event_wait(self, event: Event) -> None:
        """Make work that is queued on this backend from now on wait for the event, which any backend may have
        recorded."""
        event.backend.event_synchronize(event)

    def event_synchronize(self, event: Event) -> None:
        """Wait on the host until an event that this backend recorded has passed."""

    # -- computing ----------------------------------------------------------------

    def graph_compute(self, graph: Graph | GraphView) -> None:
        """Run `graph.nodes` in order; BackendError when that fails."""
        raise NotImplementedError(f"backend {self.name!r} does not compute")

    def graph_plan_create(self, graph: Graph | GraphView):
        """Prepare `graph` for many computes at its present addresses; returns the argument for graph_plan_compute.

        A backend that prepares nothing returns None; then `graph_compute` is called each time.
        """
        return graph

    def graph_plan_free(self, plan) -> None:
        """Release a plan of graph_plan_create."""

    def graph_plan_compute(self, plan) -> None:
        """Run a plan of graph_plan_create."""
        self.graph_compute(plan)

    # -- life -------------------------------------------------------------------

    def close(self) -> None:
        """Release the device; idempotent."""

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def get_backend(tensor: Tensor) -> Backend | None:
    """The backend whose memory holds `tensor` now, or None."""
    return tensor.backend


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Equal type, ne and nb."""
    return a.type == b.type and a.ne == b.ne and a.nb == b.nb


def tensor_copy(src: Tensor, dst: Tensor) -> None:
    """Copy `src` to `dst`, on any two backends; complete on return.

    Tries the destination's `cpy_tensor_from`, then the source's `cpy_tensor_to`, then goes
    through host memory.  Copying a tensor to itself does nothing.  Raises ValueError for
    different layouts, PlacementError without addresses.
    """
    if src is dst:
        return
    if not same_layout(src, dst):
        raise ValueError(f"cannot copy {src!r} with nb {src.nb} to {dst!r} with nb {dst.nb}: layouts differ")
    for tensor in (src, dst):
        if tensor.buffer is None:
            raise PlacementError(f"tensor {tensor.name!r} has no address")
    if src.nbytes == 0:
        return
    there, here = src.backend, dst.backend
    dst.touch()
    if here.cpy_tensor_from(src, dst):
        here.synchronize()
        return
    if there.cpy_tensor_to(src, dst):
        there.synchronize()
        return
    here.set_tensor(dst, staged(src, dst))


def staged(src: Tensor, dst: Tensor) -> bytearray:
    """The bytes that `dst` will have after `src` was copied to it, in host memory; reading waits for both backends."""
    given = bytearray(src.nbytes)
    src.backend.get_tensor(src, given)
    if src.nbytes == _dense_bytes(src):
        return given
    # The bytes between the elements belong to other tensors: keep those of the destination.
    merged = bytearray(dst.nbytes)
    dst.backend.get_tensor(dst, merged)
    hostdata.array_over(dst, merged)[...] = hostdata.array_over(src, given)
    return merged


def _dense_bytes(t: Tensor) -> int:
    """Bytes of the elements alone, without gaps."""
    return t.n_elements // t.type.block_size * t.type.type_size


def as_nodes(graph: Graph | GraphView | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The nodes of an argument of graph_compute."""
    return tuple(graph.nodes if isinstance(graph, (Graph, GraphView)) else graph)


# Functions behind `Tensor.set` and `Tensor.numpy`: the compiled modules import no Python module.
register_tensor_data(hostdata.write, hostdata.read)
