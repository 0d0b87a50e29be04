"""Turns nodes into lists of calls of compiled kernels, and runs them on a pool of threads.

Owns the thread pool and the lists; the kernels are in kernels/*.c and *.h.  A list is made once, when a graph plan is
created; only then are `Tensor` objects read.  Running calls of a list runs no Python and holds no GIL.  Corresponds to
ggml_cplan and ggml_threadpool.
"""

cimport cython

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from ggml_sched._c cimport (
    GS_NO_HOST_MEMORY, GS_OK, GS_OP_FLASH_ATTN_EXT, GS_OP_MUL_MAT, GS_OP_MUL_MAT_ID, GS_UNSUPPORTED_OP, gs_checked_add,
    gs_checked_mul, gs_node, gs_op_family,
)
from ggml_sched._graph cimport BufferBase, NodeTable, Tensor, label

from ggml_sched.backend import dense_bytes
from ggml_sched.errors import BackendError, Error, OutOfMemory
from ggml_sched.graph.hostdata import MAX_SHARED, endless

cdef int64_t SHARED = MAX_SHARED
cdef int64_t MOST_WORK = 1 << 62        # bytes: a larger bound is not told from this one


# What CallList knows of a tensor, as bits: whether it was checked, and what kernels may do with its memory.
cdef enum:
    LOOKED_AT = 1
    READABLE = 2
    WRITABLE = 4


def isa():
    """The instruction set of the kernels that a list made now would call: "portable", "avx2", "avxvnni", "avx512",
    "neon" or "dotprod"."""
    return ("portable", "avx2", "avxvnni", "avx512", "neon", "dotprod")[gs_isa()]


def fits(Tensor node not None):
    """Whether the oracle computes a node, by its types, extents and parameters (op_rules.h)."""
    cdef NodeTable table = NodeTable((node,))
    cdef const gs_node *found = table.node(0)
    return gs_extents_fit(found) and gs_types_fit(found, 0)


def inplace_sources(int op):
    """Bit i is set if source i of a node of the op may have the result's memory, provided that it has the result's
    layout (op_rules.h)."""
    cdef const gs_op_rule *rule = gs_rule_of(gs_op_family(op))
    return 0 if rule == NULL else rule.inplace


BAND = GS_BAND
"""Rows that are interleaved together."""


def interleaves(int kind):
    """Whether there are kernels here for interleaved rows of this type."""
    return gs_interleaves(kind)


def interleave(int kind, uintptr_t source, int64_t rows, int64_t row_bytes, uintptr_t target):
    """Interleave rows of a type that `interleaves` at address `source`, to `target` (interleave.h)."""
    with nogil:
        gs_interleave(kind, <const char *>source, rows, row_bytes, <char *>target)


cdef enum:
    LEAST_WORK = 64     # bytes of work memory of any run
    NUMPY_WORK = 12     # bytes that the oracle takes for each byte of a node and its sources: arrays of f64 and f32


def work_of(nodes, int32_t n_threads, bint compiled):
    """An upper bound, in bytes, of the memory that computing these nodes takes, in one run or several: the work memory
    of the compiled calls or, for a node without compiled kernel and without `compiled` for all, the oracle's arrays;
    and the copies of sources that overlap the result, which a plan keeps.  The nodes need no addresses."""
    cdef NodeTable table = NodeTable(nodes)
    cdef gs_node *made = <gs_node *>calloc(max(len(table.tensors), 1), sizeof(gs_node))
    cdef gs_node *node
    cdef gs_calls calls
    cdef gs_tables tables
    cdef uintptr_t address = 64
    cdef dict start = {}        # {root: its address}
    cdef Tensor tensor
    cdef int64_t most = 0, size
    cdef Py_ssize_t i
    cdef int k
    cdef object arrays          # bytes; an int of any size
    if made == NULL:
        raise OutOfMemory("no host memory to count work memory", "", 0)
    memset(&calls, 0, sizeof(calls))
    memset(&tables, 0, sizeof(tables))
    for i in range(len(table.tensors)):
        made[i] = table.nodes[i]
        # Addresses that are never used: only views overlap other tensors.
        tensor = table.tensors[i]
        if tensor.root not in start:
            start[tensor.root] = address
            address += (<uintptr_t>tensor.root.nbytes + 127) & ~<uintptr_t>63
        made[i].data = <void *>(<uintptr_t>start[tensor.root] + <uintptr_t>tensor.view_offs)
        for k in range(made[i].n_src):
            if made[i].src[k] != NULL:
                made[i].src[k] = made + (made[i].src[k] - table.nodes)
    for i in range(table.n):
        node = &made[i]
        if compiled and gs_build_node(node, <int32_t>i, &calls, &tables) == GS_OK:
            most = max(most, LEAST_WORK)
            gs_forget_tables(&tables, node)
            continue
        memset(&tables, 0, sizeof(tables))      # the calls after this node are another stretch
        arrays = node.layout.nbytes
        for source in table.tensors[i].src:     # copied densely: more than nbytes where elements of a view share memory
            if source is not None:
                arrays += max(dense_bytes(source), source.nbytes)
        if node.op == GS_OP_FLASH_ATTN_EXT:     # scores, of which no source's bytes are a measure
            arrays += node.src[0].layout.ne[1] * node.src[0].layout.ne[2] * node.src[0].layout.ne[3] * (
                node.src[1].layout.ne[1])
        most = max(most, min(arrays * NUMPY_WORK, MOST_WORK))
    size = calls.tables + calls.shared + calls.scratch * n_threads
    most = max(most, size) + calls.copied
    gs_free_calls(&calls)
    free(made)
    return most


cdef class Pool:
    """`Pool(n_threads)`: threads that share the parts of calls; n_threads counts the caller's thread.

    The threads start at the first call with several parts; if the host refuses to start one, there are fewer.
    """

    def __cinit__(self, int32_t n_threads):
        self.pool = gs_pool_new()
        if self.pool == NULL:
            raise OutOfMemory("no host memory for a pool of threads", "", 0)
        self.n_threads = n_threads
        gs_pool_resize(self.pool, n_threads)

    def __dealloc__(self):
        if self.pool != NULL:
            with nogil:
                gs_pool_free(self.pool)

    def set_n_threads(self, int32_t n_threads):
        """Use n threads from now on."""
        with nogil:
            gs_pool_resize(self.pool, n_threads)
        self.n_threads = n_threads

    @property
    def alive(self):
        """The number of running threads, without the caller's."""
        return gs_pool_alive(self.pool)

    def close(self):
        """End the threads; a later run starts new ones."""
        with nogil:
            gs_pool_stop(self.pool)


cdef class WorkMemory:
    """`WorkMemory(name)`: the work memory of the backend `name`, in blocks that runs borrow; all plans share them.

    Invariant: there are at most as many blocks as runs have been under way at the same time, and none is larger than
    the largest that a run has needed.  `held`: bytes of all blocks, and of the copies that lists of calls keep.
    """

    def __cinit__(self, str name not None):
        self.name = name

    def __dealloc__(self):
        self.clear()

    cdef char *take(self, int64_t size) except NULL:
        """A block of `size` bytes or more, at a multiple of 64, for one run; OutOfMemory.

        The interpreter's lock (GIL) is held, so no other thread is in this method at the same time.
        """
        cdef gs_work_block *block = self.free_blocks
        if block != NULL:
            self.free_blocks = block.next
            if block.size < size:
                self.held -= block.size         # freed before a larger one is allocated
                free(block.memory)
                block = NULL
        if block == NULL:
            block = work_block(size)
            if block == NULL:
                raise OutOfMemory(f"backend {self.name!r}: the host gives no {size} bytes of work memory", self.name,
                                  size)
            self.held += size
        return <char *>block + WORK_HEAD

    cdef void give(self, char *memory) noexcept:
        """Take back a block that `take` gave to a run."""
        cdef gs_work_block *block = <gs_work_block *>(memory - WORK_HEAD)
        block.next, self.free_blocks = self.free_blocks, block

    cpdef clear(self):
        """Free the blocks that no run uses."""
        cdef gs_work_block *block
        while self.free_blocks != NULL:
            block = self.free_blocks
            self.free_blocks = block.next
            self.held -= block.size
            free(block.memory)


cdef gs_work_block *work_block(int64_t size) noexcept nogil:
    """A new block, whose header lies directly before its bytes; NULL without memory."""
    cdef void *memory = malloc(<size_t>size + 2 * WORK_HEAD)
    cdef gs_work_block *block
    if memory == NULL:
        return NULL
    block = <gs_work_block *>((<uintptr_t>memory + WORK_HEAD - 1) & ~<uintptr_t>(WORK_HEAD - 1))
    block.memory, block.size, block.next = memory, size, NULL
    return block


# no_gc_clear: `__dealloc__` needs `memory`.
@cython.no_gc_clear
cdef class CallList:
    """`CallList(name, nodes, memory_of, memory)`: the compiled calls of some nodes of the backend `name`.

    `memory_of(buffer)` returns a uint8 array over a buffer's bytes; each run borrows work memory from `memory`.
    """

    def __cinit__(self, str name not None, nodes, memory_of, WorkMemory memory not None):
        self.name = name
        self.table = NodeTable(nodes)
        self.known = {}
        self.memory_of = memory_of
        self.memory = memory
        self.forms = []
        memset(&self.calls, 0, sizeof(self.calls))
        self.state = <unsigned char *>calloc(max(len(self.table.tensors), 1), 1)
        if self.state == NULL:
            raise OutOfMemory(f"backend {name!r}: no host memory for a list of calls", name, 0)

    def __dealloc__(self):
        if self.memory is not None:
            self.memory.held -= self.calls.copied
        gs_free_calls(&self.calls)
        free(self.state)

    @property
    def n_calls(self):
        return self.calls.n

    def node_of(self, int32_t i):
        """The node that call i computes, or a part of it; the first one if it computes several.  IndexError."""
        if not 0 <= i < self.calls.n:
            raise IndexError(f"call {i} of {self.calls.n}")
        return self.table.tensors[self.calls.call[i].position]

    def n_parts(self, int32_t i):
        """How many parts call i is cut into, which threads share; IndexError."""
        if not 0 <= i < self.calls.n:
            raise IndexError(f"call {i} of {self.calls.n}")
        return self.calls.call[i].n_parts

    cpdef int64_t work_size(self, int32_t n_threads) except -1:
        """The bytes of work memory that a run on n_threads threads takes; OutOfMemory if 64 bits cannot count them."""
        cdef int64_t size = 0
        if (gs_checked_mul(self.calls.scratch, n_threads, &size) != GS_OK
                or gs_checked_add(size, self.calls.shared, &size) != GS_OK
                or gs_checked_add(size, self.calls.tables, &size) != GS_OK):
            raise OutOfMemory(f"backend {self.name!r}: work memory of more than 64 bits can count", self.name, 0)
        return max(size, LEAST_WORK)

    @property
    def buffers(self):
        """The buffers of all tensors that `add` has checked so far."""
        return tuple(self.known)

    def held(self):
        """Arrays over all memory that the calls read and write.  The caller of `run` keeps these arrays during the run:
        they keep the memory alive even if another thread closes a buffer.  BackendError if a buffer is closed already.
        """
        return [buffer.memory for buffer, entry in self.known.items() if entry is not None]

    cdef int know(self, BufferBase buffer) except -1:
        """Look up a buffer's address, size and writability in `known`, adding it if it is new, and set `last`,
        `last_size` and `last_writable` to what was found.  `last_size` becomes -1 if kernels cannot use the buffer."""
        entry = self.known.get(buffer, self)
        if entry is self:
            try:
                array = self.memory_of(buffer)
            except Error:
                entry = None
            else:
                entry = array.__array_interface__["data"][0], array.nbytes, array.flags.writeable
            self.known[buffer] = entry
        self.last = buffer
        self.last_size = -1
        if entry is not None and buffer.base == entry[0]:
            self.last_size, self.last_writable = entry[1], entry[2]
        return 0

    cdef unsigned char look_at(self, Py_ssize_t t) except? 255:
        """Check tensor t of the table.  Returns LOOKED_AT and, if its memory lies in an open buffer and its extents and
        strides are sound, READABLE, and WRITABLE if kernels may write there."""
        cdef Tensor tensor = <Tensor>PyTuple_GET_ITEM(self.table.tensors, t)
        cdef BufferBase buffer = tensor.c_buffer()
        cdef const gs_node *node = &self.table.nodes[t]
        cdef int64_t count = 1, offset, end
        cdef int d
        if buffer is None or buffer.closed:
            return LOOKED_AT
        if buffer is not self.last:
            self.know(buffer)
        if self.last_size < 0:
            return LOOKED_AT
        offset = tensor.c_offset()
        if offset < 0 or gs_checked_add(offset, node.layout.nbytes, &end) != GS_OK or end > self.last_size:
            return LOOKED_AT
        if node.data == NULL and node.layout.nbytes:
            return LOOKED_AT
        for d in range(4):
            if node.layout.nb[d] < 0 or gs_checked_mul(count, node.layout.ne[d], &count) != GS_OK:
                return LOOKED_AT
        if count > SHARED and endless(tensor) is not None:
            return LOOKED_AT
        return LOOKED_AT | READABLE | (WRITABLE if self.last_writable else 0)

    cdef bint used(self, Py_ssize_t t, bint writes) except -1:
        """Whether kernels may write (`writes`) or read tensor t of the table; checks it the first time."""
        if not self.state[t]:
            self.state[t] = self.look_at(t)
        return self.state[t] & (WRITABLE if writes else READABLE) != 0

    def add(self, Py_ssize_t first, Py_ssize_t stop):
        """Append the calls of the nodes first .. stop - 1, up to the first node that has no compiled kernel or is
        invalid; returns the index of this node, or `stop`.

        These calls are run together, by one call of `run`: they share tables and converted columns (`gs_tables` in
        build.h).  IndexError, OutOfMemory.
        """
        cdef const gs_node *node
        cdef gs_tables tables
        cdef Py_ssize_t i
        cdef int64_t copied
        cdef int status
        if not 0 <= first <= stop <= self.table.n:
            raise IndexError(f"nodes {first} .. {stop} of {self.table.n}")
        memset(&tables, 0, sizeof(tables))
        for i in range(first, stop):
            node = &self.table.nodes[i]
            status = GS_UNSUPPORTED_OP
            if self.is_good(node):
                copied = self.calls.copied
                tables.interleaved = NULL
                if node.op == GS_OP_MUL_MAT or node.op == GS_OP_MUL_MAT_ID:
                    tables.interleaved = self.interleaved_of(node.src[0] - self.table.nodes)
                status = gs_build_node(node, <int32_t>i, &self.calls, &tables)
                self.memory.held += self.calls.copied - copied
            if status == GS_NO_HOST_MEMORY:
                tensor = self.table.tensors[i]
                raise OutOfMemory(f"backend {self.name!r}: no host memory to plan node {label(tensor)} ({tensor.op})",
                                  self.name, 0)
            if status != GS_OK:
                return i
            gs_forget_tables(&tables, node)     # a node may write to the positions or factors of a rope's table
        return stop

    cdef const char *interleaved_of(self, Py_ssize_t t) except? NULL:
        """The interleaved form of tensor t of the table, which then stays in memory; NULL if it has none."""
        cdef Tensor tensor = <Tensor>PyTuple_GET_ITEM(self.table.tensors, t)
        forms = getattr(tensor.c_buffer(), "interleaved", None)
        form = None if forms is None else forms.find(tensor)
        if form is None:
            return NULL
        self.forms.append(form)
        return <const char *><uintptr_t>form.__array_interface__["data"][0]

    cdef bint is_good(self, const gs_node *node) except -1:
        """Whether kernels may read all sources of a node and write its result."""
        cdef Py_ssize_t k
        if not self.used(node - self.table.nodes, True):
            return False
        for k in range(node.n_src):
            if node.src[k] != NULL and not self.used(node.src[k] - self.table.nodes, False):
                return False
        return True

    def run(self, Pool pool not None, int32_t first, int32_t last):
        """Run calls first .. last - 1; BackendError if a kernel finds an id out of range, OutOfMemory."""
        cdef gs_fault fault
        cdef gs_work work           # one for each run: two threads may run the calls at the same time
        cdef gs_time *times = NULL
        cdef bytearray taken = None
        cdef char *memory
        cdef int32_t failed
        if not 0 <= first <= last <= self.calls.n:
            raise IndexError(f"calls {first} .. {last} of {self.calls.n}")
        work.n_threads, work.shared, work.scratch = pool.n_threads, self.calls.shared, self.calls.scratch
        measured = pool.times
        if measured is not None:
            taken = bytearray((last - first) * sizeof(gs_time))
            times = <gs_time *>PyByteArray_AS_STRING(taken)
        memory = self.memory.take(self.work_size(work.n_threads))
        work.memory = memory + self.calls.tables
        with nogil:
            failed = gs_pool_run(pool.pool, self.calls.call + first, last - first, &work, times, &fault)
        self.memory.give(memory)
        if measured is not None:
            if failed >= 0:
                del taken[(failed + 1) * <Py_ssize_t>sizeof(gs_time):]
            measured.add(self, first, taken)
        if failed >= 0:
            node = self.table.tensors[self.calls.call[first + failed].position]
            raise BackendError(f"backend {self.name!r}: node {label(node)} ({node.op}): id {fault.value} does not name "
                               f"one of {fault.limit} rows")


# no_gc: the object refers to no Python object, as the caller of `add` keeps the nodes alive, so it is in no cycle.
@cython.no_gc
cdef class Products:
    """Matrix products that run on the threads of another library's thread pool, such as ggml's (shared_calls.h).

    First nodes are added; then `shared_calls` returns their calls, in the same order.  Before each run the caller calls
    `begin`, with work memory of `work_size` bytes at a multiple of 64.
    """

    def __cinit__(self):
        memset(&self.calls, 0, sizeof(self.calls))
        memset(&self.work, 0, sizeof(self.work))
        self.shared = NULL

    def __dealloc__(self):
        gs_free_calls(&self.calls)
        free(self.shared)

    cdef int add(self, const gs_node *node) except -1:
        """Append the calls of a MUL_MAT, whose memory the caller has checked, and return their number: 0 if no compiled
        kernel computes it.  OutOfMemory."""
        cdef gs_tables tables
        cdef int32_t before = self.calls.n
        cdef int status
        memset(&tables, 0, sizeof(tables))
        status = gs_build_node(node, 0, &self.calls, &tables)
        if status == GS_NO_HOST_MEMORY:
            raise OutOfMemory("no host memory for the calls of a matrix product", "", 0)
        return self.calls.n - before

    cdef gs_shared_call *shared_calls(self) except NULL:
        """All calls, at a fixed address; no node may be added afterwards.  OutOfMemory."""
        cdef int32_t i
        if self.shared == NULL:
            self.shared = <gs_shared_call *>calloc(max(self.calls.n, 1), sizeof(gs_shared_call))
            if self.shared == NULL:
                raise OutOfMemory("no host memory for the calls of matrix products", "", 0)
            for i in range(self.calls.n):
                self.shared[i].call, self.shared[i].work = &self.calls.call[i], &self.work
            self.work.shared, self.work.scratch = self.calls.shared, self.calls.scratch
        return self.shared

    cdef int64_t work_size(self, int32_t n_threads) except -1:
        """Bytes of work memory for n_threads threads; OutOfMemory if the number overflows 64 bits."""
        cdef int64_t size = 0
        if (gs_checked_mul(self.calls.scratch, n_threads, &size) != GS_OK
                or gs_checked_add(size, self.calls.shared, &size) != GS_OK):
            raise OutOfMemory("work memory of more than 64 bits can count", "", 0)
        return size

    cdef void begin(self, char *memory, int32_t n_threads) noexcept nogil:
        """Begin a run on at most n_threads threads: makes all parts of all calls unclaimed, and sets the work memory
        that they use."""
        cdef int32_t i
        self.work.memory, self.work.n_threads = memory, n_threads
        for i in range(self.calls.n):
            self.shared[i].next = 0
