# The C view of core/graph/tensor: tensors, and where they may live.  Each reference says what it keeps alive.

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport gs_error, gs_layout, gs_node, gs_run_nodes


cpdef int64_t checked_alloc_size(BackendBase backend, Tensor t, object size) except -1
cpdef str label(Tensor t)               # the tensor's name or id, for messages
cdef str describe(Tensor t)             # the tensor's name or id, op, type and shape, for messages
cpdef str lone_surrogate(str text)      # the first one, such as "U+D800"; "" where there is none
cdef str bounded_name(str name)         # a generated name; of a long one without its middle
cdef frozenset flag_names(int flags)
cdef int fill_inplace_masks(uint64_t *mask, BackendBase backend, bint first_only) except -1


# Endings that ops append to the name of their source, such as " (view)": digits of Tensor.endings.
cdef enum:
    ENDS_VIEW = 1
    ENDS_RESHAPED = 2
    ENDS_PERMUTED = 3
    ENDS_TRANSPOSED = 4
    ENDS_CONT = 5
    ENDS_COPY = 6
    N_ENDINGS = 8
    MAX_GENERATED = 256                 # characters of a name that an op generates; ggml's GGML_MAX_NAME is 64


cdef class Lease:
    cdef readonly bint alive
    cdef readonly bint rebound          # a tensor of this lease has got an address under another lease
    cdef readonly bint transient        # the lease of a scheduler: other planners treat its tensors as unplaced
    cdef readonly bint stages           # data that is set in leafs waits in `Tensor.stash` until a compute loads it
    cdef readonly bint through          # with `stages`: the data is also written to the leafs' memory at once
    cdef public str ended_by            # why the addresses ended for good, a clause for messages; None: not known
    cdef public object guard            # a function, called before a read, that raises if the data is gone; or None
    cdef readonly object drain          # a function that waits for computes queued under the lease; None: none queued
    cdef object __weakref__
    cpdef void end(self) noexcept
    cpdef bint revive(self) noexcept


# The support queries, as bits: BackendBase.supports_op, offload_op and alloc_size.
cdef enum:
    ASKS_SUPPORTS = 1
    ASKS_OFFLOAD = 2
    ASKS_SIZE = 4
    COMPUTES = 8                # this and COPIES are no queries: the backend computes without Python
    COPIES = 16                 # the backend copies without Python


cdef class BackendBase:
    cdef readonly str name
    cdef readonly int64_t alignment     # bytes
    cdef public object answers_version  # an int that grows when answers change; None: ask each time
    cdef object __weakref__
    # For compiled backends to override: support queries in C, without the GIL; -1: call the Python method instead.
    cdef int c_supports_op(self, const gs_node *node) noexcept nogil
    cdef int c_offload_op(self, const gs_node *node) noexcept nogil
    cdef int64_t c_alloc_size(self, const gs_node *tensor) noexcept nogil
    # Also to override: computing and copying without Python.  GS_OK, a negative gs_status after a line was written to
    # error->message, or GS_NOT_DONE: call the Python methods instead.
    cdef int c_compute(self, const gs_run_nodes *run, gs_error *error) noexcept nogil
    cdef int c_copy(self, const gs_node *src, const gs_node *dst, BackendBase other, gs_error *error) noexcept nogil
    cdef int answers_in_c(self) noexcept


cdef class BufferBase:
    cdef readonly BackendBase backend   # keeps its backend alive
    cdef readonly int64_t size          # bytes
    cdef readonly int64_t base
    cdef public str usage
    cdef readonly bint closed
    cdef public bint plain              # memory of the host: reads and writes only copy bytes at `base`, at once
    cdef bint given                     # new_buffer has returned this buffer: alloc_buffer must not return it again
    cdef object leases                  # weak set of the leases of queued computes that use this buffer; or None
    cdef object __weakref__
    cdef int settle(self) except -1


cdef class ContextState:
    cdef readonly str name
    cdef readonly bint closed
    cdef int64_t epoch                  # how often its tensors have got or lost a permanent address
    cdef void *blocks                   # owned; the last block of parameters; each points to the previous one
    cdef int32_t *free_words            # the first free word of the last block
    cdef int room                       # free words of the last block
    cdef int n_words                    # words of the last block
    cdef int32_t *keep(self, const int32_t *words, int n) except? NULL


cdef class Tensor:
    # First the fields that loops over all tensors read and write, so that they share cache lines.
    cdef ContextState context_state     # kept alive (the context itself is not)
    cdef BufferBase _buffer             # keeps its buffer alive
    cdef Lease _lease                   # None: a permanent address
    cdef int64_t _offset
    cdef public bint overwritten        # a node has written to it since `set`: memory has the data, `stash` is outdated
    # Then the fields that a graph is made from.
    cdef int32_t mark                   # the tensor's id in the graph made last; other graphs check it (Graph.id_of)
    cdef int _flags
    cdef int32_t n_params
    cdef readonly tuple src             # keeps its sources alive
    cdef readonly Tensor view_src       # the root of a view, kept alive; None otherwise
    cdef readonly int64_t view_offs     # bytes from the root's start
    cdef tuple _deps                    # alloc dependencies, kept alive; None: none
    cdef gs_layout layout
    cdef int32_t *params                # n_params int32 words as in ggml, without trailing zeros; in `context_state`
    cdef str _name                      # the name without its endings
    cdef uint64_t endings               # such as " (view)": ENDS_* as digits to the base N_ENDINGS, the last one lowest
    cdef str _resident                  # "weight" or "kv", as a graph file says; None: neither
    cdef readonly int64_t version       # how often the data of a root was set, or written by a compute
    cdef public object stash            # the data that the caller last set, under a lease that stages: bytes or None
    cdef object __weakref__
    cdef str full_name(self)
    cdef void name_after(self, Tensor t, int ending)
    cpdef bint stage(self, bytes data) except -1
    cpdef bint fetch(self, out) except -1
    cdef BufferBase c_buffer(self)
    cdef int64_t c_offset(self) noexcept
    cdef char *plain(self) noexcept
    cdef BufferBase settled(self)
    cdef void bind(self, BufferBase buffer, int64_t offset, Lease lease) noexcept
    cdef int settle(self) except -1


# A hash table of the position of each tensor: open addressing over 2**n slots, of which at least half are free.
ctypedef struct gs_table_slot:
    void *of                    # the tensor; NULL: the slot is free
    int32_t at                  # the tensor's position

ctypedef struct gs_tensor_table:
    gs_table_slot *slot
    int shift                   # 64 - log2 of the number of slots


cdef inline gs_table_slot *table_find(const gs_tensor_table *table, const void *t) noexcept nogil:
    """The slot of a tensor, or the free slot where it would be added."""
    cdef uint64_t mask = (<uint64_t>1 << (64 - table.shift)) - 1
    cdef uint64_t h = <uint64_t><size_t>t * <uint64_t>0x9e3779b97f4a7c15 >> table.shift
    while table.slot[h].of != NULL and table.slot[h].of != t:
        h = (h + 1) & mask
    return &table.slot[h]


cdef class NodeTable:
    cdef readonly tuple tensors         # kept alive: the tensors that it was called with, then their other sources
    cdef Py_ssize_t n                   # how many tensors it was called with
    cdef gs_node *nodes                 # owned; one for each of `tensors`
    cdef int number(self, tuple given, gs_tensor_table *table, int32_t *src) except -1
    cdef int connect(self, tuple given, const int32_t *src) except -1
    cdef void fill(self, gs_node *out, Tensor t)
    cdef const gs_node *node(self, Py_ssize_t i) except NULL
