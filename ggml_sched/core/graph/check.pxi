# Checking graphs whose arrays were written by a caller of the C API.
#
# Graphs made from Tensors need no check, because a Context makes only valid tensors.  The check is a few linear passes
# that allocate no memory: the array `position` serves as scratch until it is filled.  Invariant: with a graph that
# passes the check no pass of the planner reads or writes outside its arrays, and every plan is sound.
# The strides of a node that writes to another tensor's memory are not checked: planning does not depend on them.

cdef int graph_refuse(gs_error *error, const gs_graph *g, int32_t tensor, const char *array, int32_t index,
                      int64_t value, int64_t limit, const char *why, int status=GS_BAD_ARGUMENT) noexcept nogil:
    """Describe in `error` which entry of which array is wrong, and why; returns the status."""
    cdef const char *op = NULL
    cdef char called[48]
    if error == NULL:
        return status
    error.status, error.tensor, error.backend, error.index = status, tensor if 0 <= tensor < g.n_tensors else -1, -1, index
    error.value, error.limit = value, limit
    called[0] = 0
    if 0 <= tensor < g.n_tensors:
        op = gs_op_name(g.layout[tensor].op)
        if op == NULL:
            op = b"no op"
        snprintf(called, sizeof(called), b"tensor %d (%s): ", <int>tensor, op)
    snprintf(error.message, sizeof(error.message), b"%s%s[%d] = %lld %s", called, array, <int>index, <long long>value, why)
    return status


cdef int flat_check(gs_graph *g, const gs_graph_size *size, gs_error *error) noexcept nogil:
    """Check a graph whose arrays the caller has filled, and compute `nbytes` of its layouts, and `position`.

    Errors: GS_BAD_ARGUMENT and GS_OVERFLOW, with the wrong entry in `error` if that is not NULL.
    """
    cdef int32_t i
    cdef int status
    status = check_begins(g, g.src_begin, size.n_src, b"src_begin", error)
    if status == GS_OK:
        status = check_begins(g, g.param_begin, size.n_params, b"param_begin", error)
    if status == GS_OK and g.dep_begin != NULL:
        status = check_begins(g, g.dep_begin, size.n_deps, b"dep_begin", error)
    if status != GS_OK:
        return status
    for i in range(g.n_tensors):
        g.position[i] = -1
        status = check_tensor(g, i, error)
        if status != GS_OK:
            return status
    for i in range(g.n_tensors):
        if g.view_src[i] != -1 or g.view_offs[i]:
            status = check_root(g, i, error)
            if status != GS_OK:
                return status
    return check_order(g, error)


cdef int check_begins(const gs_graph *g, const int32_t *begin, int64_t total, const char *array,
                      gs_error *error) noexcept nogil:
    """Check that `begin`, which has where each tensor's entries of another array begin, ascends from 0 to `total`."""
    cdef int32_t i
    if begin[0] != 0:
        return graph_refuse(error, g, -1, array, 0, begin[0], 0, b"is not 0")
    for i in range(g.n_tensors):
        if begin[i + 1] < begin[i] or begin[i + 1] > total:
            return graph_refuse(error, g, i, array, i + 1, begin[i + 1], total,
                                b"is less than the entry before, or past the end")
    if begin[g.n_tensors] != total:
        return graph_refuse(error, g, -1, array, g.n_tensors, begin[g.n_tensors], total,
                            b"is not the number of entries")
    return GS_OK


cdef int check_tensor(gs_graph *g, int32_t i, gs_error *error) noexcept nogil:
    """Check one tensor: op, flags, extents, strides, sources and slots."""
    cdef gs_layout *layout = &g.layout[i]
    cdef int32_t k, slot = -1
    cdef int status
    if not 0 <= layout.op < GS_N_OPS or gs_op_name(layout.op) == NULL:
        return graph_refuse(error, g, i, b"layout.op", i, layout.op, GS_N_OPS - 1, b"is the number of no op")
    if g.flags[i] & ~<int>(GS_FLAG_INPUT | GS_FLAG_OUTPUT):
        return graph_refuse(error, g, i, b"flags", i, g.flags[i], GS_FLAG_INPUT | GS_FLAG_OUTPUT,
                            b"has bits that are no flags")
    status = check_extents(g, i, error)
    if status != GS_OK:
        return status
    if layout.op == GS_OP_NONE and g.src_begin[i] < g.src_begin[i + 1]:
        return graph_refuse(error, g, i, b"src", g.src_begin[i], g.src[g.src_begin[i]], -1,
                            b"is the source of a tensor that is not computed")
    for k in range(g.src_begin[i], g.src_begin[i + 1]):
        if not 0 <= g.src[k] < g.n_tensors:
            return graph_refuse(error, g, i, b"src", k, g.src[k], g.n_tensors - 1, b"is no tensor")
        if g.src[k] == i:
            return graph_refuse(error, g, i, b"src", k, i, -1, b"is the tensor itself")
        if g.slot[k] >= GS_MAX_SRC or g.slot[k] <= slot:
            return graph_refuse(error, g, i, b"slot", k, g.slot[k], GS_MAX_SRC - 1,
                                b"is not above the one before, or too large")
        slot = g.slot[k]
    return GS_OK


cdef int check_extents(gs_graph *g, int32_t i, gs_error *error) noexcept nogil:
    """Check type, extents and strides; compute nbytes."""
    cdef gs_layout *layout = &g.layout[i]
    cdef int64_t signs = 0
    cdef int32_t k, block = 0
    if layout.type < 0:
        return graph_refuse(error, g, i, b"layout.type", i, layout.type, -1, b"is negative")
    for k in range(GS_MAX_DIMS):
        signs |= layout.ne[k] | layout.nb[k]
    if signs < 0:
        for k in range(GS_MAX_DIMS):
            if layout.ne[k] < 0:
                return graph_refuse(error, g, i, b"layout.ne", k, layout.ne[k], -1, b"is negative")
            if layout.nb[k] < 0:
                return graph_refuse(error, g, i, b"layout.nb", k, layout.nb[k], -1, b"is negative")
    if layout.type < GS_N_TYPES:
        block = traits[layout.type].block_size
    if block == 0:
        # A type that is not in types.h: the caller has written nbytes.
        if layout.nbytes < 0:
            return graph_refuse(error, g, i, b"layout.nbytes", i, layout.nbytes, -1, b"is negative")
        return GS_OK
    if block > 1 and layout.ne[0] % block:
        return graph_refuse(error, g, i, b"layout.ne", 0, layout.ne[0], block, b"is no whole number of blocks")
    if layout_set_nbytes(layout) != GS_OK:
        return graph_refuse(error, g, i, b"layout.ne", 0, layout.ne[0], INT64_MAX,
                            b"makes, with the other extents and the strides, more bytes than 63 bits hold", GS_OVERFLOW)
    return GS_OK


cdef int check_root(const gs_graph *g, int32_t i, gs_error *error) noexcept nogil:
    """Check that the root of a view is no view and contains the view, and that other tensors have no view offset."""
    cdef int32_t root = g.view_src[i]
    if root == -1:
        return graph_refuse(error, g, i, b"view_offs", i, g.view_offs[i], 0, b"is the offset of what is no view")
    if not 0 <= root < g.n_tensors or g.view_src[root] != -1:
        return graph_refuse(error, g, i, b"view_src", i, root, g.n_tensors - 1, b"is no tensor, or a view")
    if not gs_range_fits(g.view_offs[i], g.layout[i].nbytes, g.layout[root].nbytes):
        return graph_refuse(error, g, i, b"view_offs", i, g.view_offs[i],
                            g.layout[root].nbytes - g.layout[i].nbytes, b"puts the view outside of its root")
    if g.layout[i].op == GS_OP_NONE and g.layout[root].op != GS_OP_NONE:
        return graph_refuse(error, g, i, b"view_src", i, root, -1, b"is computed, and the root of a tensor that is not")
    return GS_OK


cdef int check_order(gs_graph *g, gs_error *error) noexcept nogil:
    """Check the order: each tensor at most once among leafs and nodes, and each node after the tensors it needs."""
    cdef int32_t i, id
    cdef int status
    for i in range(g.n_leafs):
        id = g.leaf[i]
        if not 0 <= id < g.n_tensors or g.position[id] != -1 or g.layout[id].op != GS_OP_NONE:
            return graph_refuse(error, g, id, b"leaf", i, id, g.n_tensors - 1,
                                b"is no tensor, computed, or a leaf twice")
        g.position[id] = -2
    for i in range(g.n_nodes):
        id = g.node[i]
        if not 0 <= id < g.n_tensors or g.position[id] != -1 or g.layout[id].op == GS_OP_NONE:
            return graph_refuse(error, g, id, b"node", i, id, g.n_tensors - 1,
                                b"is no tensor, not computed, or a node twice")
        status = check_node(g, id, error)
        if status != GS_OK:
            return status
        g.position[id] = i
    for i in range(g.n_leafs):
        g.position[g.leaf[i]] = -1
    for i in range(g.n_tensors):
        if g.position[i] >= 0:
            continue
        if g.layout[i].op > GS_OP_TRANSPOSE:
            return graph_refuse(error, g, i, b"layout.op", i, g.layout[i].op, -1,
                                b"is computed, but the tensor is not among the nodes")
        if g.dep_begin != NULL and g.dep_begin[i] < g.dep_begin[i + 1]:
            return graph_refuse(error, g, i, b"dep", g.dep_begin[i], g.dep[g.dep_begin[i]], -1,
                                b"is kept by what is no node")
    return GS_OK


cdef int check_node(const gs_graph *g, int32_t id, gs_error *error) noexcept nogil:
    """Check that sources, alloc dependencies and root of a node come before the node."""
    cdef int32_t k, s, root = g.view_src[id]
    cdef bint is_view = op_is_view(g.layout[id].op), reads_root = False
    if root >= 0 and g.position[root] == -1 and g.layout[root].op != GS_OP_NONE:
        return graph_refuse(error, g, id, b"view_src", id, root, -1, b"is not computed before its view")
    for k in range(g.src_begin[id], g.src_begin[id + 1]):
        s = g.src[k]
        if g.position[s] == -1:
            return graph_refuse(error, g, id, b"src", k, s, -1, b"is neither a leaf nor an earlier node")
        if root >= 0 and (s == root or g.view_src[s] == root) and (not is_view or g.slot[k] == 0):
            reads_root = True
    if is_view and root < 0:
        return graph_refuse(error, g, id, b"view_src", id, root, -1, b"is no root, and the op makes a view")
    if root >= 0 and not reads_root:
        return graph_refuse(error, g, id, b"view_src", id, root, -1,
                            b"is not the memory of a view's first source, or of any that a node which writes there reads")
    if g.dep_begin != NULL:
        for k in range(g.dep_begin[id], g.dep_begin[id + 1]):
            s = g.dep[k]
            if not 0 <= s < g.n_tensors or g.position[s] == -1:
                return graph_refuse(error, g, id, b"dep", k, s, g.n_tensors - 1,
                                    b"is neither a leaf nor an earlier node")
    return GS_OK
