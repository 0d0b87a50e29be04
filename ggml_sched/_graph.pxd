# The C view of _graph: `from ggml_sched._graph cimport Tensor`.
#
# Each reference below says what it keeps alive.

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport GS_OP_TRANSPOSE, GS_OP_VIEW, gs_graph, gs_layout


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


cdef class Lease:
    cdef readonly bint alive
    cdef readonly bint displaced        # somebody else has re-addressed one of its tensors
    cdef readonly bint transient        # of a scheduler: other planners treat its tensors as unplaced
    cdef readonly bint stages           # leafs keep what was set in `Tensor.stash`, to be loaded when their life begins
    cdef readonly bint through          # ... and it goes to their memory at once: nothing lives there before them
    cdef public object guard            # call before reading a tensor: raises if its data is gone; None: no such check
    cdef object _drain                  # call before touching the data: waits for queued computes; None: none queued
    cdef object _graph                  # weakly, the graph that was addressed under it; or None
    cdef object __weakref__
    cpdef void end(self) noexcept


cdef class BackendBase:
    cdef readonly str name
    cdef readonly int64_t alignment     # bytes
    cdef object __weakref__


cdef class BufferBase:
    cdef readonly BackendBase backend   # keeps its backend alive
    cdef readonly int64_t size          # bytes
    cdef readonly int64_t base
    cdef public str usage
    cdef readonly bint closed
    cdef bint given                     # by new_buffer, to the only one who may put tensors into it
    cdef object leases                  # weakly, those under which computes that use it were queued; or None
    cdef object __weakref__
    cdef int settle(self) except -1


cdef class Home:
    cdef readonly str name
    cdef readonly bint closed
    cdef int64_t epoch                  # counts permanent addresses given or taken


cdef class ContextBase:
    cdef Home home                      # shared with the tensors, so that no reference cycle arises
    cdef list _tensors                  # keeps its tensors alive until close()
    cdef object __weakref__
    cdef Tensor add_tensor(self, str name, int op, gs_layout *layout, tuple src, Tensor view, int64_t view_offs,
                           tuple params)
    cdef Tensor add_like(self, int op, Tensor a, tuple src, tuple params, bint inplace=*, str name=*)
    cdef Tensor add_dense(self, int op, int type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3, tuple src,
                          tuple params, str name=*)


cdef class Tensor:
    # First what passes over all tensors read and write, close together.
    cdef Home home                      # the context's state, kept alive (the context itself is not)
    cdef BufferBase _buffer             # keeps its buffer alive
    cdef Lease _lease                   # None: a permanent address
    cdef int64_t _offset
    cdef public bint overwritten        # a node has computed over it since: its memory holds the latest data
    cdef readonly str name
    cdef gs_layout layout
    cdef readonly tuple src             # keeps its sources alive
    cdef readonly Tensor view_src       # the root of a view, kept alive; None otherwise
    cdef readonly int64_t view_offs     # bytes from the root's start
    cdef readonly tuple op_params       # int32 words as in ggml, trailing zeros cut
    cdef tuple _deps                    # tensors kept until this node is done, kept alive; None: none
    cdef int _flags
    cdef int32_t mark                   # scratch index, meaningful only inside Graph building
    cdef readonly str resident          # "weight", "kv" or "" (from a graph file)
    cdef readonly int64_t version       # of a root's data: how often it was set or written, as far as we know
    cdef public object stash            # what the caller last set, under a lease that stages: bytes or None
    cdef object __weakref__
    cdef BufferBase c_buffer(self)
    cdef BufferBase settled(self)
    cdef void bind(self, BufferBase buffer, int64_t offset, Lease lease) noexcept
    cdef int settle(self) except -1


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
    cdef TensorSet _index               # made when a mark was overwritten by another graph
    cdef readonly object fingerprint    # a 128-bit int over the structure: equal for an equal graph built anew
    cdef readonly uint64_t wiring       # a hash of everything but shapes, strides and view offsets
    cdef object __weakref__
    cdef int fill(self, tuple tensors, tuple nodes, tuple leafs, Graph like=*) except -1
    cdef int fill_deps(self, int64_t n_deps, dict given) except -1
    cdef void fingerprint_structure(self, uint64_t *found) noexcept nogil
    cpdef int32_t id_of(self, Tensor t)
    cdef int32_t require(self, Tensor t, Tensor user) except -1
