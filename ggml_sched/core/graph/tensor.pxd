# The C view of core/graph/tensor: tensors, and where they may live.  Each reference says what it keeps alive.

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport gs_layout, gs_node


cpdef int64_t checked_alloc_size(BackendBase backend, Tensor t, object size) except -1
cdef str describe(Tensor t)             # how messages call a tensor
cdef frozenset flag_names(int flags)
cdef int fill_inplace_masks(uint64_t *mask, BackendBase backend, bint first_only) except -1


# Endings of names that ops give: digits of Tensor.endings.
cdef enum:
    ENDS_VIEW = 1
    ENDS_RESHAPED = 2
    ENDS_PERMUTED = 3
    ENDS_TRANSPOSED = 4
    ENDS_CONT = 5
    ENDS_COPY = 6
    N_ENDINGS = 8


cdef class Lease:
    cdef readonly bint alive
    cdef readonly bint displaced        # a tensor of it has got an address under another lease
    cdef readonly bint transient        # of a scheduler: other planners treat its tensors as unplaced
    cdef readonly bint stages           # leafs keep what was set in `Tensor.stash`, to be loaded when their life begins
    cdef readonly bint through          # ... and it goes to their memory at once: nothing lives there before them
    cdef public object guard            # call before reading a tensor: raises if its data is gone; None: no such check
    cdef readonly object drain          # call before touching the data: waits for queued computes; None: none queued
    cdef object __weakref__
    cpdef void end(self) noexcept
    cpdef bint revive(self) noexcept


# Support queries about a node: bits.
cdef enum:
    ASKS_SUPPORTS = 1
    ASKS_OFFLOAD = 2
    ASKS_SIZE = 4


cdef class BackendBase:
    cdef readonly str name
    cdef readonly int64_t alignment     # bytes
    cdef public object answers_version  # an int that grows when answers change; None: ask each time
    cdef object __weakref__
    # For compiled backends to override: answers about a node's kind, -1: ask in Python.
    cdef int c_supports_op(self, const gs_node *node) noexcept nogil
    cdef int c_offload_op(self, const gs_node *node) noexcept nogil
    cdef int64_t c_alloc_size(self, const gs_node *tensor) noexcept nogil
    cdef int answers_in_c(self) noexcept


cdef class BufferBase:
    cdef readonly BackendBase backend   # keeps its backend alive
    cdef readonly int64_t size          # bytes
    cdef readonly int64_t base
    cdef public str usage
    cdef readonly bint closed
    cdef public bint plain              # whose reads and writes are copies at `base`, done at once, on the host
    cdef bint given                     # new_buffer has returned it: alloc_buffer must not return it again
    cdef object leases                  # weakly, those under which computes that use it were queued; or None
    cdef object __weakref__
    cdef int settle(self) except -1


cdef class Home:
    cdef readonly str name
    cdef readonly bint closed
    cdef int64_t epoch                  # counts permanent addresses given or taken
    cdef void *blocks                   # owned; each begins with a pointer to the one before
    cdef int32_t *free_words            # in the last of them
    cdef int room                       # how many
    cdef int n_words                    # that the last block has
    cdef int32_t *keep(self, const int32_t *words, int n) except? NULL


cdef class Tensor:
    # First what passes over all tensors read and write, close together.
    cdef Home home                      # the context's state, kept alive (the context itself is not)
    cdef BufferBase _buffer             # keeps its buffer alive
    cdef Lease _lease                   # None: a permanent address
    cdef int64_t _offset
    cdef public bint overwritten        # a node has computed over it since: its memory holds the latest data
    # Then what a graph is made from.
    cdef int32_t mark                   # scratch index, meaningful only inside Graph building
    cdef int _flags
    cdef int32_t n_params
    cdef readonly tuple src             # keeps its sources alive
    cdef readonly Tensor view_src       # the root of a view, kept alive; None otherwise
    cdef readonly int64_t view_offs     # bytes from the root's start
    cdef tuple _deps                    # tensors kept until this node is done, kept alive; None: none
    cdef gs_layout layout
    cdef int32_t *params                # n_params int32 words as in ggml, without trailing zeros; kept by `home`
    cdef str _name                      # without its endings
    cdef uint64_t endings               # digits to the base N_ENDINGS, the last one lowest: what ops put after it
    cdef str _resident                  # None: ""
    cdef readonly int64_t version       # of a root's data: how often it was set, or written by a compute
    cdef public object stash            # what the caller last set, under a lease that stages: bytes or None
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


# Which place each tensor of a table has: open addressing over a power of two of table, at least half of them free.
ctypedef struct gs_table_slot:
    void *of                    # NULL: free
    int32_t at

ctypedef struct gs_tensor_table:
    gs_table_slot *slot
    int shift                   # 64 - log2 of the number of table

cdef int table_init(gs_tensor_table *table, int64_t n) noexcept nogil


cdef inline gs_table_slot *table_find(const gs_tensor_table *table, const void *t) noexcept nogil:
    """The slot of a tensor, or the free one where it would sit."""
    cdef uint64_t mask = (<uint64_t>1 << (64 - table.shift)) - 1
    cdef uint64_t h = <uint64_t><size_t>t * <uint64_t>0x9e3779b97f4a7c15 >> table.shift
    while table.slot[h].of != NULL and table.slot[h].of != t:
        h = (h + 1) & mask
    return &table.slot[h]


cdef class NodeTable:
    cdef readonly tuple tensors         # keeps them alive: those given, then their other sources
    cdef Py_ssize_t n                   # how many were given
    cdef gs_node *nodes                 # owned; one for each of `tensors`
    cdef int number(self, tuple given, gs_tensor_table *table, int32_t *src) except -1
    cdef int connect(self, tuple given, const int32_t *src) except -1
    cdef void fill(self, gs_node *out, Tensor t)
    cdef const gs_node *node(self, Py_ssize_t i) except NULL


cdef class TensorSet:
    cdef tuple tensors                  # keeps its members alive
    cdef gs_tensor_table table                 # owned
    cdef int32_t find(self, object t)
