# The C view of _graph: `from ggml_sched._graph cimport Tensor`.
#
# Each reference below says what it keeps alive.

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport GS_OP_TRANSPOSE, GS_OP_VIEW, gs_error, gs_graph, gs_layout, gs_node


cdef inline bint layout_same_ne(const gs_layout *a, const gs_layout *b) noexcept nogil:
    return a.ne[0] == b.ne[0] and a.ne[1] == b.ne[1] and a.ne[2] == b.ne[2] and a.ne[3] == b.ne[3]


cdef inline bint layout_equal(const gs_layout *a, const gs_layout *b) noexcept nogil:
    """ggml_are_same_layout: same type, ne and nb."""
    return (a.type == b.type and layout_same_ne(a, b) and a.nb[0] == b.nb[0] and a.nb[1] == b.nb[1]
            and a.nb[2] == b.nb[2] and a.nb[3] == b.nb[3])


cdef inline bint op_is_view(int op) noexcept nogil:
    """VIEW, RESHAPE, PERMUTE, TRANSPOSE: nodes that compute nothing."""
    return GS_OP_VIEW <= op <= GS_OP_TRANSPOSE


cpdef int64_t checked_alloc_size(BackendBase backend, Tensor t, object size) except -1
cdef str describe(Tensor t)             # how messages call a tensor
cdef frozenset flag_names(int flags)
cdef tuple bytes_tuple(const unsigned char *at, Py_ssize_t n)
cdef tuple ints_tuple(const int32_t *at, Py_ssize_t n)
cdef tuple longs_tuple(const int64_t *at, Py_ssize_t n)


cdef class Lease:
    cdef readonly bint alive
    cdef readonly bint displaced        # somebody else has re-addressed one of its tensors
    cdef readonly bint transient        # of a scheduler: other planners treat its tensors as unplaced
    cdef readonly bint stages           # leafs keep what was set in `Tensor.stash`, to be loaded when their life begins
    cdef readonly bint through          # ... and it goes to their memory at once: nothing lives there before them
    cdef public object guard            # call before reading a tensor: raises if its data is gone; None: no such check
    cdef readonly object drain          # call before touching the data: waits for queued computes; None: none queued
    cdef object __weakref__
    cpdef void end(self) noexcept
    cpdef bint revive(self) noexcept


# What backends are asked about a node: bits.
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
    cdef bint given                     # by new_buffer, to the only one who may put tensors into it
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


cdef class ContextBase:
    cdef Home home                      # shared with the tensors, so that no reference cycle arises
    cdef list _tensors                  # keeps its tensors alive until close()
    cdef object __weakref__
    cdef Tensor add_tensor(self, int op, gs_layout *layout, tuple src, Tensor view, int64_t view_offs)
    cdef Tensor add_named(self, int op, gs_layout *layout, tuple src, Tensor view, int64_t view_offs, Tensor like,
                          int ending)
    cdef Tensor add_like(self, int op, Tensor a, tuple src, bint inplace=*)
    cdef Tensor add_dense(self, int op, int type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3, tuple src)


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
    cdef readonly int64_t version       # of a root's data: how often it was set or written, as far as we know
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


# Tensors sorted by what backends may look at.  Arrays of `room` entries in one block, which begins at `hash`.
ctypedef struct gs_kinds:
    int32_t n
    int32_t room
    int32_t *of                 # owned; [n_tensors] the kind of each tensor, -1: not looked at yet
    uint64_t *hash
    int32_t *example            # a tensor of each kind
    int32_t *slot               # [2 * room] a hash table of kinds


cdef enum:
    MAX_KIND_WORDS = 1 + 8 + 16 + 10 * 9

cdef int32_t kind_words(const gs_graph *g, int32_t id, uint64_t *out) noexcept nogil
cdef void node_of_kind(const gs_graph *g, int32_t id, gs_node *out) noexcept nogil


# A flat graph without Tensors, for the C API: laid out in a block of flat_bytes, checked once its arrays are filled.
cdef int64_t flat_bytes(int64_t n_tensors, int64_t n_nodes, int64_t n_leafs, int64_t n_src, int64_t n_params) noexcept nogil
cdef void flat_lay_out(gs_graph *g, void *block, int32_t n_tensors, int32_t n_nodes, int32_t n_leafs, int64_t n_src,
                       int64_t n_params) noexcept nogil
cdef int flat_check(gs_graph *g, int64_t n_src, int64_t n_params, int64_t n_deps, gs_error *error) noexcept nogil
cdef void flat_classify(gs_graph *g) noexcept nogil
cdef bint flat_equal(const gs_graph *a, const gs_graph *b) noexcept nogil
cdef bint flat_same_wiring(const gs_graph *a, const gs_graph *b) noexcept nogil
cdef void flat_fingerprint(const gs_graph *g, uint64_t *form, uint64_t *found, uint64_t *wiring) noexcept nogil


# Which place each tensor of a table has: open addressing over a power of two of seats, at least half of them free.
ctypedef struct gs_seat:
    void *of                    # NULL: free
    int32_t at

ctypedef struct gs_seats:
    gs_seat *seat
    int shift                   # 64 - log2 of the number of seats

cdef int seats_init(gs_seats *seats, int64_t n) noexcept nogil


cdef inline gs_seat *seats_find(const gs_seats *seats, const void *t) noexcept nogil:
    """The seat of a tensor, or the free one where it would sit."""
    cdef uint64_t mask = (<uint64_t>1 << (64 - seats.shift)) - 1
    cdef uint64_t h = <uint64_t><size_t>t * <uint64_t>0x9e3779b97f4a7c15 >> seats.shift
    while seats.seat[h].of != NULL and seats.seat[h].of != t:
        h = (h + 1) & mask
    return &seats.seat[h]


cdef class NodeTable:
    cdef readonly tuple tensors         # keeps them alive: those given, then their other sources
    cdef Py_ssize_t n                   # how many were given
    cdef gs_node *nodes                 # owned; one for each of `tensors`
    cdef int seat(self, tuple given, gs_seats *seats, int32_t *src) except -1
    cdef int connect(self, tuple given, const int32_t *src) except -1
    cdef void fill(self, gs_node *out, Tensor t)
    cdef const gs_node *node(self, Py_ssize_t i) except NULL


cdef class TensorSet:
    cdef tuple tensors                  # keeps its members alive
    cdef int32_t *slots                 # owned
    cdef int64_t capacity
    cdef int64_t probe(self, object t)
    cdef int32_t find(self, object t)


cdef class Graph:
    cdef gs_graph flat                  # owned
    cdef readonly tuple nodes           # keep their tensors alive
    cdef readonly tuple leafs
    cdef readonly tuple tensors
    cdef public dict meta
    cdef tuple homes                    # of the contexts that its tensors come from
    cdef gs_kinds _kinds                # owned; found when first asked for
    cdef bint sorted_work               # the nodes that compute have kinds
    cdef bint sorted_all                # every tensor has
    cdef TensorSet _index               # made when a mark was overwritten by another graph
    cdef readonly object fingerprint    # a 128-bit int over the structure: equal for an equal graph built anew
    cdef bint names_residents           # one of its tensors is marked as a weight or cache
    cdef readonly uint64_t wiring       # a hash of everything but parameters, shapes, strides and view offsets
    cdef object __weakref__
    cdef int fill(self, tuple tensors, tuple nodes, tuple leafs, Graph like=*) except -1
    cdef int find_kinds(self, bint all) except -1
    cdef int number(self, dict given, int64_t *n_src, int64_t *n_params, int64_t *n_deps) except -1
    cdef int fill_tensors(self, Graph like) except -1
    cdef int fill_order(self, dict deps) except -1
    cdef int fill_deps(self, int64_t n_deps, dict given) except -1
    cpdef int32_t id_of(self, Tensor t)
    cpdef int64_t residence_epoch(self) noexcept
    cdef int32_t known(self, Tensor t) except -1
    cdef int32_t require(self, void *t, void *user) except -1
    cdef int32_t require_tensor(self, void *t) except -1
