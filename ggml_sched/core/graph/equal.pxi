# Comparing two flat graphs entry by entry, without Python objects.
#
# For two graphs in memory this is faster than comparing fingerprints: each array is read once, and nothing is hashed.

cdef bint flat_equal(const gs_graph *a, const gs_graph *b) noexcept nogil:
    """Whether a and b are equal in everything that a plan depends on, and in their parameters.

    a is a checked graph.  b may be unchecked; if they are equal, b is valid, too.
    """
    cdef size_t n = a.n_tensors
    cdef size_t n_params
    n_params = a.param_begin[n]
    if not flat_same_shape(a, b) or a.n_leafs != b.n_leafs or b.param_begin[b.n_tensors] != a.param_begin[n]:
        return False
    return (flat_same_layouts(a, b)
            and memcmp(a.view_offs, b.view_offs, n * sizeof(int64_t)) == 0
            and flat_same_links(a, b)
            and memcmp(a.param_begin, b.param_begin, (n + 1) * sizeof(int32_t)) == 0
            and memcmp(a.param, b.param, n_params * sizeof(int32_t)) == 0
            and memcmp(a.leaf, b.leaf, a.n_leafs * sizeof(int32_t)) == 0)


cdef bint flat_same_layouts(const gs_graph *a, const gs_graph *b) noexcept nogil:
    """Whether the layouts are equal; nbytes, which b may not have yet, is compared only for types not in types.h."""
    cdef const gs_layout *x
    cdef const gs_layout *y
    cdef int32_t i
    for i in range(a.n_tensors):
        x, y = &a.layout[i], &b.layout[i]
        if memcmp(x, y, 2 * GS_MAX_DIMS * sizeof(int64_t)) != 0 or x.type != y.type or x.op != y.op:
            return False
        if x.nbytes != y.nbytes and (x.type >= GS_N_TYPES or traits[x.type].block_size == 0):
            return False
    return True


cdef bint flat_same_wiring(const gs_graph *a, const gs_graph *b) noexcept nogil:
    """Whether a and b are equal except in parameters, extents, strides, sizes and view offsets.

    Either graph may have no arrays but those of its wiring (flat_keep_wiring).
    """
    cdef int32_t i
    if not flat_same_shape(a, b) or not flat_same_links(a, b):
        return False
    for i in range(a.n_tensors):
        if op_of(a, i) != op_of(b, i) or type_of(a, i) != type_of(b, i):
            return False
    return True


cdef inline int32_t op_of(const gs_graph *g, int32_t i) noexcept nogil:
    """The op of tensor i, also if flat_keep_wiring has dropped the graph's layouts."""
    return g.layout[i].op if g.layout != NULL else g.op[i]


cdef inline int32_t type_of(const gs_graph *g, int32_t i) noexcept nogil:
    """The type of tensor i, also if flat_keep_wiring has dropped the graph's layouts."""
    return g.layout[i].type if g.layout != NULL else g.type[i]


cdef inline bint flat_same_shape(const gs_graph *a, const gs_graph *b) noexcept nogil:
    """Whether a and b have equal numbers of tensors, nodes, sources and alloc dependencies (dep_begin NULL: none)."""
    return (a.n_tensors == b.n_tensors and a.n_nodes == b.n_nodes
            and a.src_begin[a.n_tensors] == b.src_begin[a.n_tensors]
            and (a.dep_begin == NULL) == (b.dep_begin == NULL)
            and (a.dep_begin == NULL or a.dep_begin[a.n_tensors] == b.dep_begin[a.n_tensors]))


cdef bint flat_same_links(const gs_graph *a, const gs_graph *b) noexcept nogil:
    """Whether sources, roots, flags, alloc dependencies and order are equal; flat_same_shape must be true."""
    cdef size_t n = a.n_tensors
    cdef size_t n_src = a.src_begin[n]
    return (memcmp(a.src_begin, b.src_begin, (n + 1) * sizeof(int32_t)) == 0
            and memcmp(a.src, b.src, n_src * sizeof(int32_t)) == 0
            and memcmp(a.view_src, b.view_src, n * sizeof(int32_t)) == 0
            and memcmp(a.node, b.node, a.n_nodes * sizeof(int32_t)) == 0
            and memcmp(a.slot, b.slot, n_src) == 0
            and memcmp(a.flags, b.flags, n) == 0
            and (a.dep_begin == NULL
                 or memcmp(a.dep_begin, b.dep_begin, (n + 1) * sizeof(int32_t)) == 0
                 and memcmp(a.dep, b.dep, a.dep_begin[n] * sizeof(int32_t)) == 0))
