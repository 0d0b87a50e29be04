# The C view of core/graph/types: arithmetic on layouts, and conversions between C arrays and tuples.

from libc.stdint cimport int32_t, int64_t

from ggml_sched._c cimport GS_MAX_DIMS, GS_N_TYPES, GS_OP_TRANSPOSE, GS_OP_VIEW, gs_layout, gs_type_traits

# `traits`, TYPE_OBJECTS (members of Type) and OP_NAMES are indexed by number; OP_NAMES has None for a number that no op
# has.  OP_IDS is {name: number} of the ops, TYPE_NAMES {number: name} of the types.
cdef gs_type_traits traits[GS_N_TYPES]
cdef list OP_NAMES
cdef dict OP_IDS
cdef dict TYPE_NAMES
cdef list TYPE_OBJECTS

ctypedef fused an_integer:
    unsigned char
    int32_t
    int64_t

cdef tuple ints_tuple(const an_integer *at, Py_ssize_t n)

cdef int type_id(object type) except -1
cdef str numbers_of(const int64_t *n)
cdef int layout_set_nbytes(gs_layout *a) noexcept nogil
cdef int layout_set_dense(gs_layout *a) noexcept nogil
cdef bint layout_may_overlap(const gs_layout *a) noexcept nogil
cdef bint layout_permutes(const gs_layout *a, const gs_layout *b) noexcept nogil


cdef inline bint op_is_view(int op) noexcept nogil:
    """Whether an op is VIEW, RESHAPE, PERMUTE or TRANSPOSE, which compute nothing."""
    return GS_OP_VIEW <= op <= GS_OP_TRANSPOSE


cdef inline bint layout_is_empty(const gs_layout *a) noexcept nogil:
    return a.ne[0] == 0 or a.ne[1] == 0 or a.ne[2] == 0 or a.ne[3] == 0


cdef inline int64_t layout_n_elements(const gs_layout *a) noexcept nogil:
    return a.ne[0] * a.ne[1] * a.ne[2] * a.ne[3]


cdef inline bint layout_same_ne(const gs_layout *a, const gs_layout *b) noexcept nogil:
    return a.ne[0] == b.ne[0] and a.ne[1] == b.ne[1] and a.ne[2] == b.ne[2] and a.ne[3] == b.ne[3]


cdef inline bint layout_equal(const gs_layout *a, const gs_layout *b) noexcept nogil:
    """ggml_are_same_layout: same type, ne and nb."""
    return (a.type == b.type and layout_same_ne(a, b) and a.nb[0] == b.nb[0] and a.nb[1] == b.nb[1]
            and a.nb[2] == b.nb[2] and a.nb[3] == b.nb[3])


cdef inline bint layout_contiguous(const gs_layout *a) noexcept nogil:
    """ggml_is_contiguous: elements follow one another in order; dimensions of one element may have any stride."""
    cdef int64_t expected = traits[a.type].type_size
    cdef int i
    if a.ne[0] != traits[a.type].block_size and a.nb[0] != expected:
        return False
    expected *= a.ne[0] // traits[a.type].block_size
    for i in range(1, GS_MAX_DIMS):
        if a.ne[i] != 1:
            if a.nb[i] != expected:
                return False
            expected *= a.ne[i]
    return True


cdef inline bint layout_can_repeat(const gs_layout *small, const gs_layout *big) noexcept nogil:
    """ggml_can_repeat: every extent of `big` is a multiple of `small`'s."""
    cdef int i
    if layout_is_empty(small):
        return layout_is_empty(big)
    for i in range(GS_MAX_DIMS):
        if big.ne[i] % small.ne[i]:
            return False
    return True
