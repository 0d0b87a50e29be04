# Leases, and the base classes of backends and buffers: the part of their interface that planner and allocators use.
#
# The functions that move data or compute are in ggml_sched/backend.py, whose Backend and Buffer are the classes to
# subclass.  Corresponds to the queries in ggml_backend_i and ggml_backend_buffer_i.

_INPLACE_OPS = inplace_ops()
ALL_SOURCES = -1        # an in-place mask with all bits: every source may be the destination


cdef enum:
    # 32-bit words in a ContextState's first block of parameters; each later block has twice as many, up to the largest.
    FIRST_BLOCK_WORDS = 32
    LARGEST_BLOCK_WORDS = 4096


cdef class ContextState:
    """The state that a context shares with its tensors: its name, whether it is open, and memory for parameters of
    ops."""

    def __dealloc__(self):
        cdef void *block = self.blocks
        while block != NULL:
            self.blocks = (<void **>block)[0]
            free(block)
            block = self.blocks

    cdef int32_t *keep(self, const int32_t *words, int n) except? NULL:
        """Copy n parameter words to memory that lives as long as the ContextState; returns NULL when n is 0."""
        cdef int32_t *at
        cdef void *block
        if n == 0:
            return NULL
        if n > self.room:
            self.n_words = min(max(2 * self.n_words, <int>FIRST_BLOCK_WORDS), <int>LARGEST_BLOCK_WORDS)
            block = malloc(sizeof(void *) + self.n_words * sizeof(int32_t))
            if block == NULL:
                raise no_host_memory(f"the parameters of tensors in context {self.name!r}")
            (<void **>block)[0] = self.blocks
            self.blocks = block
            self.free_words = <int32_t *>(<void **>block + 1)
            self.room = self.n_words
        at = self.free_words
        memcpy(at, words, n * sizeof(int32_t))
        self.free_words += n
        self.room -= n
        return at


cdef class Lease:
    """The period in which the addresses that one allocation handed out are valid.

    While computes are queued under the lease, `drain` is a function that waits for them; it is called before memory
    that they use is freed or gets another use (BufferBase.settle).
    """

    def __cinit__(self):
        self.alive = True

    @property
    def displaced(self):
        """The former name of `rebound`, for one more release."""
        PyErr_WarnEx(DeprecationWarning, b"Lease.displaced: use rebound", 1)
        return self.rebound

    cpdef void end(self) noexcept:
        """Make every address under this lease invalid until `revive`.  No compute may still be queued under it."""
        self.alive = False
        self.drain = None

    cpdef bint revive(self) noexcept:
        """Make the addresses valid again; the caller ensures that the memory is still allocated.

        Returns whether some tensors have got other addresses since, so that the caller must bind all tensors again.
        """
        cdef bint was_rebound = self.rebound
        self.alive = True
        self.rebound = False
        return was_rebound

    def queue(self, graph, wait not None):
        """Note that computes of a graph are about to be queued under this lease; `wait` is a function that waits for
        them."""
        if wait is not self.drain:
            watch_buffers(graph.tensors, self)
            self.drain = wait


cdef class BackendBase:
    """The C view of a backend; `ggml_sched.Backend` is the class to subclass.

    `name` is unique within a scheduler, `alignment` in bytes.

    A scheduler calls `supports_op`, `offload_op` and `alloc_size` once for each kind of node (see `Graph.kinds`) and
    remembers the answers as long as `answers_version` stays as it is: an int that the backend raises when answers
    change.  With `answers_version` None every node is queried for every plan, and answers may depend on anything.
    """

    def __cinit__(self):
        self.answers_version = 0

    def __init__(self, name, alignment=64):
        alignment = _index(alignment)
        if not 1 <= alignment <= 1 << 30:
            raise ValueError(f"backend {name!r}: alignment {alignment} is not in 1 .. 2**30")
        if alignment & alignment - 1:
            raise ValueError(f"backend {name!r}: alignment {alignment} is not a power of two")
        name = str(name)
        if found := lone_surrogate(name):
            raise ValueError(f"backend {name!r}: the name has the lone surrogate {found}")
        self.name = name
        self.alignment = alignment

    def expect_queries(self, nodes):
        """Called before the support queries about these nodes: a backend in another process may get all answers by one
        message.  By default does nothing."""

    def expect_graph(self, graph, nodes):
        """Called before a compute, with a graph that will probably be planned later, and those of its tensors about
        which support queries are still to be made: a backend in another process may get the answers, and the fusion
        groups of the graph, with the messages of the compute.  By default does nothing."""

    def supports_op(self, node):
        """Whether `graph_compute` can run this node; depends on its kind only: op, parameters, types and shapes."""
        cdef NodeTable table
        if self.answers_in_c() & ASKS_SUPPORTS:
            table = NodeTable((node,))
            return self.c_supports_op(table.node(0)) != 0
        return True

    def supports_buffer(self, buffer):
        """Whether nodes on this backend can read a tensor in `buffer` without a copy."""
        return buffer.backend is self

    def offload_op(self, node):
        """Whether this backend offers to compute a node whose weights are on the host; depends on its kind only."""
        cdef NodeTable table
        if self.answers_in_c() & ASKS_OFFLOAD:
            table = NodeTable((node,))
            return self.c_offload_op(table.node(0)) > 0
        return False

    def inplace_sources(self, op):
        """Which sources of `op` may be its destination, a bit mask (bit i: source i).

        The kernel promises to compute the same bits when the destination is exactly one such source,
        of equal layout.  Default: every source of the ops that ggml computes in place, none of others.
        """
        return ALL_SOURCES if op in _INPLACE_OPS else 0

    def alloc_size(self, tensor):
        """Bytes that a tensor takes in a buffer of this backend, at least tensor.nbytes; depends on its kind only.

        The caller raises TypeError for a result that is no integer, PlacementError for one out of range.
        """
        cdef NodeTable table
        cdef int64_t size
        if self.answers_in_c() & ASKS_SIZE:
            table = NodeTable((tensor,))
            size = self.c_alloc_size(table.node(0))
            if size != -1:
                return size
        return tensor.nbytes

    def fusion_groups(self, graph):
        """The fusion groups of `graph`: nodes that this backend computes as one kernel if all are in one of its splits.

        Returns tuples of positions in `graph.nodes`, ascending, of two or more nodes that compute (views do not); no
        node is in two groups.  Called once for each new plan; the result depends on the graph only, and may change only
        with `answers_version`.  Default: none.

        A plan keeps a group if its nodes are in one split and the nodes between them do not depend on the order.  The
        group is computed at the position of its last node.  Until then all sources of all members stay allocated, and
        each member has memory of its own; only a later member may reuse this in place, and no member reuses the memory
        of sources outside the group.  So the backend may also compute the members one after the other.
        """
        return ()

    # A compiled subclass overrides these to answer support queries in C, without the GIL.  Answers must not depend on
    # flags or addresses, nor on anything of the sources but their layouts.  -1: call the Python method above instead.

    cdef int c_supports_op(self, const gs_node *node) noexcept nogil:
        return -1

    cdef int c_offload_op(self, const gs_node *node) noexcept nogil:
        return -1

    cdef int64_t c_alloc_size(self, const gs_node *tensor) noexcept nogil:
        return -1

    # A compiled subclass overrides these to compute and to copy without Python; docs/cython-api.md has an example.  A
    # backend with a queue may only queue the work and return; the structs stay valid until the work is done.

    cdef int c_compute(self, const gs_run_nodes *run, gs_error *error) noexcept nogil:
        """Compute the nodes of a run, in order, at their addresses; instead of `graph_plan_compute`."""
        return GS_NOT_DONE

    cdef int c_copy(self, const gs_node *src, const gs_node *dst, BackendBase other, gs_error *error) noexcept nogil:
        """Copy src to dst, of equal layout, one of which is in this backend's memory, the other in that of `other`.

        Called in place of `cpy_tensor_from` and `cpy_tensor_to`: for the destination's backend, then for the source's.
        A copy that is work of the source's queue is tried with the source's backend first, in place of
        `cpy_tensor_async`.  Bytes between the elements of dst must stay as they are.
        """
        return GS_NOT_DONE

    cdef int answers_in_c(self) noexcept:
        """The work that a compiled subclass does in C, as bits: ASKS_*, COMPUTES and COPIES."""
        return ((ASKS_SUPPORTS if <void *>self.c_supports_op != <void *>BackendBase.c_supports_op else 0)
                | (ASKS_OFFLOAD if <void *>self.c_offload_op != <void *>BackendBase.c_offload_op else 0)
                | (ASKS_SIZE if <void *>self.c_alloc_size != <void *>BackendBase.c_alloc_size else 0)
                | (COMPUTES if <void *>self.c_compute != <void *>BackendBase.c_compute else 0)
                | (COPIES if <void *>self.c_copy != <void *>BackendBase.c_copy else 0))


cdef int watch_buffers(tuple tensors, Lease lease) except -1:
    """Add the lease, under which computes are queued, to the leases of every buffer of `tensors`.

    Closing or reusing such a buffer then waits for the computes (BufferBase.settle).
    """
    cdef BufferBase buffer, last = None
    cdef Tensor t
    for t in tensors:
        buffer = t._buffer
        if buffer is not None and buffer is not last:
            last = buffer
            if buffer.leases is None:
                buffer.leases = WeakSet()
            buffer.leases.add(lease)
    return 0


cdef class BufferBase:
    """The C view of a buffer; `ggml_sched.Buffer` is the class to subclass.

    `backend` owns the memory, `size` is in bytes, `base` is the address that offsets
    count from (0 where addresses mean nothing), `usage` is "weights", "compute" or "any".  `plain` promises that
    all functions that write or read its data, such as `Backend.set_tensor_async`, only copy bytes to or from `base`;
    the copy is then made without calling them.
    """

    def __init__(self, BackendBase backend not None, size, base=0, usage="any"):
        size = _index(size)
        if not 0 <= size <= 0x7fffffffffffffff:
            raise ValueError(f"buffer of backend {backend.name!r}: size {size} is not in 0 .. 2**63 - 1")
        self.backend = backend
        self.size = size
        self.base = _index(base)
        self.usage = str(usage)

    def close(self):
        """Wait for queued computes, then free the memory; idempotent.  Tensors in it have no address afterwards."""
        if not self.closed:
            self.settle()
        if not self.closed:
            self.closed = True
            self.free()

    cdef int settle(self) except -1:
        """Wait for queued computes that use this memory, because it is about to be overwritten, freed or given away."""
        cdef Lease lease
        if self.leases is None:
            return 0
        for lease in tuple(self.leases):
            if lease.alive and lease.drain is not None:
                lease.drain()
            else:
                self.leases.discard(lease)
        return 0

    def free(self):
        """To override: give the memory back.  Called once, by close()."""

    def alloc_size(self, tensor):
        """Bytes that `tensor` takes here, at least tensor.nbytes."""
        return self.backend.alloc_size(tensor)

    def init_tensor(self, tensor):
        """To override: `tensor` has just been given an address here (never called while measuring)."""

    def free_tensor(self, tensor):
        """To override: `tensor` is about to lose its address here (never called while measuring)."""


def measure_buffer(BackendBase backend=None, alignment=64):
    """A buffer of 2**63 - 1 bytes without memory, with which an allocator measures how much memory it will need."""
    if backend is None:
        backend = BackendBase("measure", alignment)
    return BufferBase(backend, 0x7fffffffffffffff)


def new_buffer(BackendBase backend not None, size):
    """A buffer of at least `size` bytes from a backend's alloc_buffer.

    Raises what alloc_buffer raises; BackendError unless it returns an open buffer of that backend, at least as large,
    and not returned before.
    """
    size = _index(size)
    found = backend.alloc_buffer(size)
    returned = f"backend {backend.name!r}: alloc_buffer({size}) returned"
    if not isinstance(found, BufferBase):
        raise BackendError(f"{returned} {found!r}, not a Buffer")
    cdef BufferBase buffer = found
    if buffer.backend is not backend:
        raise BackendError(f"{returned} a buffer of backend {buffer.backend.name!r}")
    if buffer.closed:
        raise BackendError(f"{returned} a closed buffer")
    if buffer.given:
        raise BackendError(f"{returned} a buffer that it has returned before")
    if buffer.size < size:
        buffer.close()
        raise BackendError(f"{returned} a buffer of {buffer.size} bytes")
    buffer.given = True
    return buffer


cpdef int64_t checked_alloc_size(BackendBase backend, Tensor t, object size) except -1:
    """Check the result of a call of alloc_size for tensor t, and return it as an integer, in bytes.

    TypeError unless it is an integer, PlacementError for less than the tensor's bytes or more than an int64 holds.
    """
    try:
        found = _index(size)
    except TypeError:
        raise TypeError(f"backend {backend.name!r} says that {describe(t)} takes {size!r} bytes, "
                        "which is not an integer") from None
    if not t.layout.nbytes <= found <= 0x7fffffffffffffff:
        raise PlacementError(f"backend {backend.name!r} says that {describe(t)} of {t.layout.nbytes} bytes "
                             f"takes {found}")
    return found


cdef int fill_inplace_masks(uint64_t *mask, BackendBase backend, bint first_only) except -1:
    """Set mask[op] to the sources that op may reuse in place on this backend.

    With `first_only`, 0 for the ops that ggml's first generation did not compute in place.
    """
    cdef int op
    cdef object declared
    memset(mask, 0, GS_N_OPS * sizeof(uint64_t))
    for name, number in op_numbers().items():
        op = number
        if not first_only or gs_op_inplace(op) & GS_INPLACE_FIRST:
            declared = backend.inplace_sources(name)
            try:
                mask[op] = <uint64_t>(_index(declared) & 0xffffffffffffffff)
            except TypeError:
                raise TypeError(f"backend {backend.name!r} says that {name} may overwrite the sources {declared!r}, "
                                "which is not a bit mask") from None
    return 0
