"""The interface between the planner and a device: subclass `Backend` and `Buffer`.

A backend needs two methods, `alloc_buffer` and `compute_node` (or `graph_compute`), and a
buffer two, `read` and `write`.  Everything else has a working default.  docs/backends.md leads
through writing one.  The methods correspond to the function pointers of ggml's backend and
buffer interfaces:

    ggml                     here                         default
    get_name                 Backend.name                 given to __init__
    free                     Backend.close                nothing
    alloc_buffer             Backend.alloc_buffer         (required)
    get_alignment            Backend.alignment            64
    set_tensor_async         Backend.set_tensor_async     Buffer.write
    get_tensor_async         Backend.get_tensor_async     Buffer.read
    synchronize              Backend.synchronize          nothing
    (none)                   Backend.flush                nothing
    (none)                   Backend.fetch, shift         (required of a store)
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
    graph_compute            Backend.graph_compute        compute_node for each node
    (none)                   Backend.compute_node         (required, unless graph_compute is overridden)
    supports_op              Backend.supports_op          True
    (none)                   Backend.fusion_groups        none
    free_buffer              Buffer.free                  nothing
    get_base                 Buffer.base                  0
    get_alloc_size           Buffer.alloc_size            Backend.alloc_size: tensor.nbytes
    init_tensor              Buffer.init_tensor           nothing
    free_tensor              Buffer.free_tensor           nothing

A node that `graph_compute` or `compute_node` receives is a `Tensor`: it has `op`, `op_params`, `ne` and `nb`, and the
node itself and each of `node.src` have a `buffer` of this backend and an `offset` into it, in bytes.

`supports_op`, `offload_op` and `alloc_size` are not called for each node: their results are cached (support cache) for
all nodes with the same op, parameters, type, extents and strides, and the same types, extents and strides of sources.
Their results may depend on nothing else.  Before such calls, `expect_queries` is called with the nodes of all of them:
a backend that gets its results from another process can fetch them at once.  For a graph that `Scheduler.expect`
announces, it can fetch them before they are needed: see `expect_graph`.  A backend whose results change later must
increase its `answers_version`.  If its results depend on more, it sets `answers_version` to None; then these methods
are called for every node of every plan.

A backend that computes several nodes faster as one kernel returns such fusion groups from `fusion_groups`, which is
called before a graph is planned.  `GraphView.groups` has those that the plan uses; it is empty where nodes are computed
one by one, because a callback looks at each result.

A compiled subclass may override the C methods `c_supports_op`, `c_offload_op` and `c_alloc_size` (_graph.pxd), which
take nodes as C structs from a `NodeTable` (include/ggml_sched/graph.h).

Order: the scheduler issues each step of a compute to the queue of one backend.  Before a step it calls `event_wait` for
each event that the step waits for; after a step for which others wait, it records an event.  A backend whose methods
return before their work is done overrides the four event methods.  For any other backend, the default `event_record`
waits until its work is done, and waiting for the event then returns at once.

Threads: `Scheduler.compute` calls a backend's methods from the thread of the caller.  So does `compute_async` where all
backends are `asynchronous`; otherwise it has a thread for each backend.  No two threads of one scheduler are in one
backend's methods at a time, with one exception: while a backend of `concurrent_copies` computes, another thread may
call `cpy_tensor_from`, `cpy_tensor_to`, `cpy_tensor_async`, `set_tensor_async`, `get_tensor_async`, `synchronize` and
the event methods.  A backend that several schedulers use at once has to protect what they share.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from operator import index, itemgetter
from typing import TYPE_CHECKING, Any, Self, cast

from ggml_sched._graph import (
    ALL_SOURCES,
    BackendBase,
    BufferBase,
    Context,
    Graph,
    Tensor,
    bind_resident,
    checked_alloc_size,
    label,
    measure_buffer,
    new_buffer,
    no_address,
    register_tensor_data,
)
from ggml_sched.errors import BackendError, BackendLost, OutOfMemory, PlacementError, shown
from ggml_sched.graph import hostdata, hostviews

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy as np
    from typing_extensions import Buffer as _BufferProtocol

    Bytes: TypeAlias = _BufferProtocol | np.ndarray
    """An object with the buffer protocol.

    Before Python 3.12 type checkers do not see that arrays have this protocol: calls of memoryview cast them to Any.
    """

__all__ = ["ALL_SOURCES", "Backend", "Buffer", "Event", "GraphView", "bind_resident", "get_backend", "measure_buffer",
           "tensor_copy"]


class Buffer(BufferBase):
    """A range of one backend's memory.

    `Buffer(backend, size, base=0, usage="any")`: size in bytes; `base` is the address of the first byte, or 0 on a
    backend without addresses.  `file_backed`: the memory is a mapped file.  The operating system can drop its pages and
    read them again, so they cost no memory of the process, unlike a copy of them in another layout.  `moved`: bytes of
    such a file that are in private memory by now, at the same addresses, which the system cannot read again.
    """

    file_backed: bool = False
    moved: int = 0
    experts: Any = None
    """The bank (backends/store/slots.py) whose experts a store reads into this buffer when a node has chosen them, or
    None."""

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

    def is_read(self, offset: int) -> bool:
        """Whether kernels read the weight at this offset where it is, and not a copy of it in another layout."""
        return True

    def checked_byte(self, value: int) -> int:
        """`value` as an int; ValueError unless it is in 0 .. 255."""
        if not 0 <= index(value) <= 255:
            raise ValueError(f"a buffer of backend {self.backend.name!r} is filled with bytes: {value} is no byte")
        return index(value)

    def _check_range(self, offset: int, size: int) -> None:
        """Raise BackendError if the bytes lie outside the buffer, or if the buffer is closed."""
        if self.closed:
            raise BackendError(f"a buffer of {self.size} bytes of backend {self.backend.name!r} is closed")
        if offset < 0 or offset > self.size - size:
            raise BackendError(f"bytes {offset} .. {offset + size} lie outside a buffer of {self.size} bytes "
                               f"of backend {self.backend.name!r}")

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class BufferSizes:
    """The bytes of a backend's buffers, each counted from `add` until `drop`, or until it is collected without having
    been closed."""

    def __init__(self) -> None:
        self._counted: dict[int, tuple[int, weakref.ref[Buffer]]] = {}
        """{id: (bytes, reference)}: a class of buffers may define what is equal."""

    @property
    def total(self) -> int:
        # No Python code runs while the dictionary is read: a thread, or a collected buffer, would change it.
        return sum(map(itemgetter(0), self._counted.values()))

    def __len__(self) -> int:
        return len(self._counted)

    def add(self, buffer: Buffer) -> None:
        """Count a new buffer."""
        key = id(buffer)
        self._counted[key] = buffer.size, weakref.ref(buffer, partial(self._counted.pop, key))

    def drop(self, buffer: Buffer) -> None:
        """Count a buffer no longer, if it was counted: it is being closed."""
        self._counted.pop(id(buffer), None)


class GraphView:
    """Nodes that a backend is to compute, in order: a split or a part of one (ggml_graph_view).

    `groups`: fusion groups that `Backend.fusion_groups` returned, as ascending indices into `nodes`; the backend may
    compute each as one kernel, at the position of its last member.  The source of a member may be a view of another
    member, or a different `Tensor` object with the same memory; so a backend finds members by their indices, not by
    comparing objects.
    """

    __slots__ = ("_needed", "groups", "nodes")

    def __init__(self, nodes: Iterable[Tensor], groups: Iterable[tuple[int, ...]] = (),
                 needed: frozenset[int] | None = None) -> None:
        self.nodes: tuple[Tensor, ...] = tuple(nodes)
        self.groups: tuple[tuple[int, ...], ...] = tuple(groups)
        self._needed = needed

    @property
    def needed(self) -> frozenset[int]:
        """Indices of the nodes whose results must be in memory, because nodes outside this view read them or, for a
        member of a fusion group, nodes outside its group.

        A member of a fusion group whose index is missing here need not be written to memory; all other results must be
        written.  By default all nodes are needed.
        """
        return frozenset(range(len(self.nodes))) if self._needed is None else self._needed

    def __len__(self) -> int:
        return len(self.nodes)


class Event:
    """A point in the queue of a backend; subclass it to hold a device's event."""

    def __init__(self, backend: Backend) -> None:
        self.backend: Backend = backend


class Backend(BackendBase):
    """One device.  Subclass it, and call `super().__init__(name, alignment)`.

    Errors and reports name the backend by its `name`.  Backends of one scheduler may share a name, but nothing there
    tells them apart then, and `llama.load(place=)` finds backends by name.  Every address on the backend is a multiple
    of `alignment` bytes, a power of two (default 64).  docs/backends.md leads through writing a backend, and `pytest
    --pyargs ggml_sched.testing --backend MODULE:CLASS` checks one.

    Attributes that a subclass may set; the defaults are those of a synchronous device without a bound on memory:

    * `max_buffer_size`: no buffer has more bytes; a larger arena becomes several buffers.  None: no bound.
    * `is_host`: the CPU can read and write the memory of its buffers directly.  Where a buffer's `memory` is a NumPy
      array of its bytes, tensors in it are viewed without a copy (`numpy.asarray(t)`, DLPack).
    * `asynchronous`: computes, copies and `set_tensor_async` return before they are done.  They are executed in the
      order of the calls, and events can be recorded between them.  Such a backend overrides `synchronize` and the four
      event methods.
    * `concurrent_copies`: while it computes, another thread may write, read and copy its memory and call its event
      methods.  Without it only one thread at a time is in the backend's methods.
    * `takes_at_once`: `set_tensor_async` copies its data before it returns; the caller may then change or free them.
    * `is_store`: the backend is a store.  It holds weights where no kernel reads them, such as in a file, and `fetch`,
      in the store's queue, brings them to other backends anew in each compute.  It is `asynchronous`, not `is_host`.
    * `margin`: of a store, the bytes that a copy made by `fetch` takes beyond the bytes of the weight.
    * `has_memory`: its addresses are those of real memory; False for dry backends, whose data can not be read.
    * `kv_padding`: the number of rows of a KV cache that attention reads is rounded up to a multiple of this.
    * `worker`: the name of the other process that computes for it; None: this process computes.  Going on from a
      backend of one worker to a backend of another costs a message.
    * `work_held`: bytes of work memory that it has allocated so far (see `work_size`); budgets count it.
    * `host_work_held`: bytes of host memory that it has allocated to compute (see `host_work`); no budget counts it.
    * `failed`: (how many waits for queued work raised an error, the last error's message); see `note_failure`.  If the
      number has grown since a compute was queued, the results of that compute are not valid.
    * `lost`: why the backend and what it held are gone; None while it can be used.
    * `has_graph_plans`: computes go through `graph_plan_create` and `graph_plan_compute`.  It is set for each class:
      False for one that overrides `graph_compute` or `compute_node`, and not the graph plans that it inherits.
    * `answers_version`: an integer to increase when results of `supports_op`, `offload_op`, `alloc_size` or
      `fusion_groups` change, because they are cached; None: they are not cached.
    """

    max_buffer_size: int | None = None
    is_host: bool = False
    concurrent_copies: bool = False
    asynchronous: bool = False
    takes_at_once: bool = False
    is_store: bool = False
    margin: int = 0
    has_memory: bool = True
    kv_padding: int = 64
    worker: str | None = None
    work_held: int = 0
    host_work_held: int = 0
    failed: tuple[int, str] = (0, "")
    lost: BackendLost | None = None
    has_graph_plans: bool = True

    def __init_subclass__(cls, **options: object) -> None:
        """Graph plans of a base class do not call what a class overrides to compute: then they are not used."""
        super().__init_subclass__(**options)
        if (cls.graph_plan_create, cls.graph_plan_compute) == (Backend.graph_plan_create, Backend.graph_plan_compute):
            return
        for base in cls.__mro__:
            if base is not cls and issubclass(base, Backend):
                return
            if vars(base).keys() & {"graph_plan_create", "graph_plan_compute"}:
                cls.has_graph_plans = True
                return
            if vars(base).keys() & {"graph_compute", "compute_node"}:
                cls.has_graph_plans = False
                return

    # -- memory ---------------------------------------------------------------

    def alloc_buffer(self, size: int) -> Buffer:
        """Allocate a buffer of `size` bytes; OutOfMemory if that fails."""
        raise NotImplementedError(f"backend {self.name!r} does not allocate buffers")

    def memory_available(self) -> int | None:
        """Bytes that can still be allocated here, None if the backend does not know."""
        return None

    def system_memory(self) -> int | None:
        """For a backend on another machine that has no bound of its own: the bytes that its system can still give it.
        None where that is unknown, and for a backend of this process."""
        return None

    def round_trip(self) -> float:
        """Seconds in which an order reaches the device and its answer comes back; 0 where calling a method is
        enough."""
        return 0.0

    def link_to(self, name: str) -> tuple[float, float] | None:
        """Bandwidth in bytes a second and latency in seconds of the link from this backend to the backend of this name,
        or to this process ("driver"); None where the backend does not state them."""
        return None

    def link_from(self, name: str) -> tuple[float, float] | None:
        """Bandwidth and latency, as `link_to` returns them, of the link to this backend from the backend of this name,
        or from this process ("driver")."""
        return None

    def work_size(self, nodes: Sequence[Tensor]) -> int:
        """An upper bound, in bytes, of the work memory that these nodes take on the device, besides the arena.

        Budgets count the largest `work_size` of all splits: splits use the same work memory, one after another, and it
        stays allocated (`work_held`).
        """
        return 0

    def host_work(self, nodes: Sequence[Tensor]) -> int:
        """An upper bound, in bytes, of the host memory that computing these nodes takes besides buffers.

        Schedulers made with the argument `host_work` keep it below a bound; `llama.load(memory=)` makes such
        schedulers.
        """
        return 0

    def alloc_tensors(self, ctx: Context, usage: str = "weights") -> Buffer:
        """Allocate one new buffer for all tensors of a context that have no address, and place them in it.

        Views follow their roots.  Raises OutOfMemory, BackendError; then no tensor has changed.
        """
        pending, total = tensor_layout(self, ctx)
        if self.max_buffer_size is not None and total > self.max_buffer_size:
            raise OutOfMemory(
                f"the tensors of context {ctx.name!r} need {total} bytes in one buffer; backend "
                f"{self.name!r} allows {self.max_buffer_size}", self.name, total, self.max_buffer_size)
        try:
            buffer = new_buffer(self, total)
        except OutOfMemory as error:
            error.add_note(f"for the tensors of context {ctx.name!r}: {total} bytes in one buffer")
            raise
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
        return tensor_layout(self, ctx)[1]

    # -- data -------------------------------------------------------------------

    def set_tensor_async(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        """Queue a copy of bytes into the tensor, `offset` bytes from its start.

        The caller keeps `data` alive and unchanged until `synchronize`, unless the backend `takes_at_once`.
        """
        tensor.buffer.write(tensor.offset + offset, data)

    def get_tensor_async(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        """Queue a copy of the tensor's bytes, from byte `offset` on, into `out`."""
        tensor.buffer.read(tensor.offset + offset, out)

    def set_tensor(self, tensor: Tensor, data: Bytes, offset: int = 0) -> None:
        """Copy bytes into a tensor, starting `offset` bytes from its start; complete on return.

        PlacementError if the tensor has no address on this backend, ValueError for bytes outside the tensor.
        """
        view = memoryview(cast("Any", data)).cast("B")
        self._check_range(tensor, offset, len(view))
        if len(view):
            failures = self.failed[0]
            tensor.touch()
            self.set_tensor_async(tensor, view, offset)
            wait_since(self, failures)

    def get_tensor(self, tensor: Tensor, out: Bytes, offset: int = 0) -> None:
        """Fill `out`, a writable buffer, with bytes of a tensor from `offset` on; complete on return.  PlacementError
        if the tensor has no address on this backend, ValueError for bytes outside the tensor."""
        view = memoryview(cast("Any", out)).cast("B")
        self._check_range(tensor, offset, len(view))
        if len(view):
            failures = self.failed[0]
            self.get_tensor_async(tensor, view, offset)
            wait_since(self, failures)

    def note_failure(self, error: BaseException) -> None:
        """Record in `failed` that a wait for queued work is about to raise the work's error.

        Only one caller gets that exception; others with queued work see from `failed` that their results are not valid.
        `synchronize` takes the error and calls this under one lock: a wait that finds the error gone finds it counted.
        """
        self.failed = (self.failed[0] + 1, str(error))

    def _check_range(self, tensor: Tensor, offset: int, size: int) -> None:
        if tensor.buffer is None:
            raise PlacementError(no_address(tensor))
        if tensor.backend is not self:
            raise PlacementError(f"{label(tensor)} is on backend {tensor.backend.name!r}, not {self.name!r}")
        if offset < 0 or size > tensor.nbytes or offset > tensor.nbytes - size:
            raise ValueError(f"bytes {offset} .. {offset + size} lie outside {label(tensor)} of "
                             f"{tensor.nbytes} bytes")
        end = tensor.offset + offset + size
        if end > tensor.buffer.size:
            raise PlacementError(
                f"{label(tensor)} ends at {end}, outside its buffer of {tensor.buffer.size} bytes")

    def cpy_tensor_from(self, src: Tensor, dst: Tensor) -> bool:
        """Copy `src`, of another backend, into `dst` of this backend, after all work in this backend's queue.

        False if this backend cannot do that; the caller then copies through host memory.
        """
        return False

    def cpy_tensor_to(self, src: Tensor, dst: Tensor) -> bool:
        """Copy `src`, of this backend, into `dst` of another, after all work in this backend's queue.

        False if this backend cannot do that; the caller then copies through host memory.
        """
        return False

    def cpy_tensor_async(self, src: Tensor, dst: Tensor) -> bool:
        """Queue a copy of `src`, of this backend, into `dst` of a backend with `concurrent_copies`; False if this
        backend cannot do that.

        The copy is executed after all work queued here before; an event that is recorded here afterwards passes only
        once the copy is done.
        """
        return False

    def shift(self, weight: Tensor, address: int) -> int:
        """For stores: how many bytes after `address`, 0 .. `margin`, the fetched copy of a weight begins.  The memory
        from `address` on is `margin` bytes larger than the weight."""
        return 0

    def fetch(self, weight: Tensor, start: int, nbytes: int, copy: Tensor, room: tuple[int, int]) -> None:
        """For stores: queue a read of `nbytes` bytes of a weight, from byte `start` of its root on, to a copy on
        another backend.

        The fetch may write all bytes `room[0]` .. `room[1]` of the copy's buffer.  It is executed after all work queued
        here before; an event that is recorded here afterwards passes once the copy has its bytes.
        """
        raise NotImplementedError(f"backend {self.name!r} is no store")

    def flush(self) -> None:
        """Called when all steps of a queued compute were issued: a backend that gathers commands sends them now."""

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

    def compute_node(self, node: Tensor) -> None:
        """Compute one node, which is not a view; called by the default `graph_compute`, and by that of CpuBackend,
        GgmlBackend and CupyBackend for a subclass that overrides this method.

        The node and its sources have addresses on this backend.  Raise an exception, such as UnsupportedOp, for a node
        that this backend does not compute: a node that is skipped leaves old bytes in its memory.
        """
        raise NotImplementedError(f"backend {self.name!r} does not compute")

    def graph_compute(self, graph: Graph | GraphView) -> None:
        """Compute `graph.nodes` in order; views among them (`not node.computes`) need no work.

        By default calls `compute_node` for each node that is not a view; an exception of `compute_node` gets a note
        that names the backend and the node.  An asynchronous backend may return before the nodes are computed.  After
        an exception the memory of all nodes is undefined: CpuBackend computes products of the same activations at once,
        some of them before nodes that precede them.
        """
        if not overrides(self, "compute_node"):
            raise NotImplementedError(f"backend {self.name!r} does not compute")
        for node in graph.nodes:
            if node.computes:
                try:
                    self.compute_node(node)
                except BaseException as error:
                    note_nodes(error, self, (node,))
                    raise

    def graph_plan_create(self, graph: Graph | GraphView) -> Any:
        """Prepare `graph` for many computes at its present addresses; returns the graph plan for graph_plan_compute.

        A backend that prepares nothing returns None; then `graph_compute` is called each time.
        """
        return graph

    def graph_plan_free(self, plan: Any) -> None:
        """Release a graph plan of graph_plan_create."""

    def graph_plan_compute(self, plan: Any) -> None:
        """Run a graph plan of graph_plan_create."""
        self.graph_compute(plan)

    # -- life -------------------------------------------------------------------

    def close(self) -> None:
        """Release the device; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def tensor_layout(backend: Backend, ctx: Context) -> tuple[list[tuple[Tensor, int]], int]:
    """([(tensor, offset)], bytes of the buffer) of those tensors of a context that `alloc_tensors` places."""
    pending, total = [], 0
    for tensor in ctx.tensors:
        # An address in a scheduler's arena does not count: it is valid only until the next graph is allocated.
        is_temporary = tensor.lease is not None and tensor.lease.transient
        if tensor.view_src is None and (is_temporary or tensor.buffer is None):
            pending.append((tensor, total))
            size = checked_alloc_size(backend, tensor, backend.alloc_size(tensor))
            total += -(-size // backend.alignment) * backend.alignment
    return pending, total


def checked_backends(backends: object, call: str) -> tuple[Backend, ...]:
    """Backends as a tuple; TypeError, with the `call` that takes them, for one alone, a text, and what is none."""
    if isinstance(backends, (Backend, str)) or not isinstance(backends, Iterable):
        raise TypeError(f"{call}, not {shown(backends)}")
    backends = tuple(backends)
    for backend in backends:
        if not isinstance(backend, Backend):
            raise TypeError(f"not a Backend: {shown(backend)}; {call}")
    return backends


def get_backend(tensor: Tensor) -> Backend | None:
    """The backend whose memory holds `tensor` now, or None."""
    return tensor.backend


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have equal types, extents and strides."""
    return a.type == b.type and a.ne == b.ne and a.nb == b.nb


def tensor_copy(src: Tensor, dst: Tensor) -> None:
    """Copy `src` to `dst`, on any two backends; complete on return.

    Tries the destination's `cpy_tensor_from`, then the source's `cpy_tensor_to`, and otherwise copies through host
    memory.  Copying a tensor to itself does nothing.  Raises ValueError for different layouts, PlacementError if a
    tensor has no address.
    """
    if src is dst:
        return
    if not same_layout(src, dst):
        raise ValueError(f"cannot copy {src!r} with nb {src.nb} to {dst!r} with nb {dst.nb}: layouts differ")
    for tensor in (src, dst):
        if tensor.buffer is None:
            raise PlacementError(no_address(tensor))
    if src.nbytes == 0:
        return
    there, here = src.backend, dst.backend
    failures = here.failed[0], there.failed[0]
    dst.touch()
    try:
        if here.cpy_tensor_from(src, dst):
            wait_since(here, failures[0])
        elif there.cpy_tensor_to(src, dst):
            wait_since(there, failures[1])
        else:
            here.set_tensor(dst, staged(src, dst))
    except BaseException as error:
        note_copy(error, src, there, here)
        raise


def staged(src: Tensor, dst: Tensor) -> bytearray:
    """The bytes to write to `dst` so that its elements equal those of `src`, in host memory.  Waits for the backends of
    both, because it reads the tensors."""
    given = bytearray(src.nbytes)
    src.backend.get_tensor(src, given)
    if src.nbytes == dense_bytes(src):
        return given
    # The bytes in the gaps between the elements of dst belong to other tensors: they must stay as they are.
    merged = bytearray(dst.nbytes)
    dst.backend.get_tensor(dst, merged)
    hostdata.array_over(dst, merged)[...] = hostdata.array_over(src, given)
    return merged


def dense_bytes(t: Tensor) -> int:
    """Bytes of a tensor's elements alone, without the gaps between them."""
    return t.n_elements // t.type.block_size * t.type.type_size


class CountingBackend(Backend):
    """A backend that counts the bytes of its buffers: `alloc_buffer` adds each to `buffer_sizes`, and the `free` of a
    buffer drops it from there.

    `memory`: the most bytes of all its buffers together (None: no bound); `used`: how many of them are allocated now.
    """

    memory: int | None = None

    def __init__(self, name: str, alignment: int = 64) -> None:
        super().__init__(name, alignment)
        self.buffer_sizes: BufferSizes = BufferSizes()

    @property
    def used(self) -> int:
        """Bytes of the buffers that are open."""
        return self.buffer_sizes.total

    def memory_available(self) -> int | None:
        """Bytes that can still be allocated here; None if `memory` sets no bound."""
        return None if self.memory is None else self.memory - self.used

    def _check_room(self, size: int) -> None:
        """OutOfMemory if a buffer of `size` bytes would exceed `memory`."""
        if self.memory is not None and size > self.memory - self.used:
            left = self.memory - self.used
            raise OutOfMemory(f"backend {self.name!r}: {size} bytes needed, {left} of {self.memory} left", self.name,
                              size, left)


def overrides(backend: Backend, *methods: str) -> bool:
    """Whether the class of a backend overrides one of these methods of `Backend`."""
    return any(getattr(type(backend), method) is not getattr(Backend, method) for method in methods)


def new_graph_plan(backend: Backend, graph: Graph | GraphView) -> Any:
    """The graph plan of a backend for `graph`; None where its `graph_compute` is to be called instead: it prepares
    nothing, or has inherited graph plans that do not call what its class overrides to compute."""
    return backend.graph_plan_create(graph) if backend.has_graph_plans else None


def note_nodes(error: BaseException, backend: Backend, nodes: Sequence[Tensor]) -> None:
    """Add a note to an exception that a backend raised while it computed nodes: the names of the backend and the nodes.

    An exception that has such a note of this backend already gets no second one: the first names fewer nodes.
    """
    said = f"backend {backend.name!r} was computing "
    if nodes and not any(note.startswith(said) for note in getattr(error, "__notes__", ())):
        names = [f"{label(node)} ({node.op})" for node in (nodes[0], nodes[-1])]
        which = names[0] if len(nodes) == 1 else f"the {len(nodes)} nodes {names[0]} .. {names[1]}"
        error.add_note(said + which)


def note_copy(error: BaseException, tensor: Tensor, there: Backend | None, here: Backend) -> None:
    """Add a note to an exception that was raised while a tensor was copied from backend `there` to backend `here`; the
    note names the tensor and both backends.  `there` is None for a load of data that the caller set."""
    how = "loaded from the host" if there is None else f"copied from backend {there.name!r}"
    error.add_note(f"{label(tensor)} was being {how} to backend {here.name!r}")


def wait_for(backend: Backend) -> None:
    """`backend.synchronize()`; adds a note with the backend's name to an exception that has no note."""
    try:
        backend.synchronize()
    except BaseException as error:
        if not getattr(error, "__notes__", None):
            error.add_note(f"backend {backend.name!r} raised this for work that was queued before")
        raise


def wait_since(backend: Backend, failures: int) -> None:
    """`backend.synchronize()` after work was queued; raises as `check_failures`."""
    backend.synchronize()
    check_failures(backend, failures)


def check_failures(backend: Backend, failures: int) -> None:
    """BackendError if `backend.failed[0]` is no longer `failures`, its value before work was queued: the work may have
    been dropped after a failure whose exception another thread got."""
    n, why = backend.failed
    if n != failures:
        raise BackendError(f"backend {backend.name!r}: queued work of another thread failed, and what was queued after "
                           f"it may have been dropped: {why}")


def checked_bytes(backend: str, what: str, value: int | None) -> int | None:
    """A bound in bytes of the backend of this name, or None for no bound; `what` names the argument in errors.

    TypeError if it is no integer, ValueError if it is negative.
    """
    return None if value is None else number_of_bytes(value, f"backend {backend!r}: {what}")


def number_of_bytes(value: Any, what: str, other: str = "") -> int:
    """`value` as an int.  TypeError if it is no integer, ValueError if it is negative.  In their messages `what` names
    the value, and `other` the other forms in which it could be given."""
    try:
        nbytes = index(value)
    except TypeError:
        raise TypeError(f"{what} is a number of bytes{other}, not {value!r}") from None
    if nbytes < 0:
        raise ValueError(f"{what} of {nbytes} bytes is negative")
    return nbytes


def as_nodes(graph: Graph | GraphView | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The nodes of what `graph_compute` accepts: a Graph, a GraphView or a sequence of nodes."""
    return tuple(graph.nodes if isinstance(graph, (Graph, GraphView)) else graph)


# `Tensor.set` and `Tensor.numpy` use these.  They are registered here because the compiled module of `Tensor` imports
# no Python module.
register_tensor_data(hostdata.write, hostdata.read, hostviews)
