# Kinds of tensors: tensors that every backend must treat alike.
#
# The results of support queries may depend on op, parameters, type, extents and strides of a node, and on types,
# extents and strides of its sources by slot; not on names, flags, addresses, or the rest of the graph.  Invariant:
# tensors have one kind only if kind_equal is true, even if their hashes are equal.

cdef inline uint64_t kind_hash(const gs_graph *g, int32_t id) noexcept nogil:
    cdef uint64_t h = gs_mix(g.layout_hash[id], (<uint64_t>(g.src_begin[id + 1] - g.src_begin[id]) << 32) | g.op[id])
    cdef int32_t k
    for k in range(g.param_begin[id], g.param_begin[id + 1]):
        h = gs_mix(h, <uint64_t><uint32_t>g.param[k])
    for k in range(g.src_begin[id], g.src_begin[id + 1]):
        h = gs_mix(h, g.layout_hash[g.src[k]] ^ g.slot[k])
    return h


cdef bint kind_equal(const gs_graph *g, int32_t a, int32_t b) noexcept nogil:
    cdef int32_t i, at = g.src_begin[a], bt = g.src_begin[b], n = g.src_begin[a + 1] - at
    cdef int32_t p = g.param_begin[a], q = g.param_begin[b], n_params = g.param_begin[a + 1] - p
    if (g.op[a] != g.op[b] or n != g.src_begin[b + 1] - bt or n_params != g.param_begin[b + 1] - q
            or not layout_equal(&g.layout[a], &g.layout[b])):
        return False
    for i in range(n_params):
        if g.param[p + i] != g.param[q + i]:
            return False
    for i in range(n):
        if g.slot[at + i] != g.slot[bt + i] or not layout_equal(&g.layout[g.src[at + i]], &g.layout[g.src[bt + i]]):
            return False
    return True


cdef inline uint64_t *layout_words(uint64_t *out, const gs_layout *layout) noexcept nogil:
    memcpy(out, layout.ne, sizeof(layout.ne))
    memcpy(out + GS_MAX_DIMS, layout.nb, sizeof(layout.nb))
    return out + 2 * GS_MAX_DIMS


cdef int32_t kind_words(const gs_graph *g, int32_t id, uint64_t *out) noexcept nogil:
    """Write the words that define a kind, equal for equal kinds in all graphs; returns their number, at most
    MAX_KIND_WORDS."""
    cdef uint64_t *at = out
    cdef int32_t k, n = g.src_begin[id + 1] - g.src_begin[id], n_params = g.param_begin[id + 1] - g.param_begin[id]
    at[0] = ((<uint64_t>n << 48) | (<uint64_t>n_params << 40) | (<uint64_t>g.op[id] << 32)
             | <uint64_t>g.layout[id].type)
    at = layout_words(at + 1, &g.layout[id])
    for k in range(g.param_begin[id], g.param_begin[id + 1]):
        at[0] = <uint64_t><uint32_t>g.param[k]
        at += 1
    for k in range(g.src_begin[id], g.src_begin[id + 1]):
        at[0] = (<uint64_t>g.slot[k] << 32) | <uint64_t>g.layout[g.src[k]].type
        at = layout_words(at + 1, &g.layout[g.src[k]])
    return <int32_t>(at - out)


cdef int kinds_grow(gs_kinds *kinds) noexcept nogil:
    """Double the room for kinds, and make a hash table of which at least half is empty."""
    cdef int32_t i, room = max(2 * kinds.room, 64), mask = 2 * room - 1
    cdef int32_t *example = <int32_t *>malloc(room * (sizeof(uint64_t) + 3 * sizeof(int32_t)))
    cdef uint64_t *hash
    if example == NULL:
        return GS_NO_HOST_MEMORY
    hash = <uint64_t *>example
    example = <int32_t *>(hash + room)
    if kinds.n:
        memcpy(hash, kinds.hash, kinds.n * sizeof(uint64_t))
        memcpy(example, kinds.example, kinds.n * sizeof(int32_t))
    free(kinds.hash)
    kinds.hash, kinds.example, kinds.slot, kinds.room = hash, example, example + room, room
    memset(kinds.slot, 0xff, 2 * room * sizeof(int32_t))
    for i in range(kinds.n):
        kinds.slot[kinds_place(kinds, hash[i], mask)] = i
    return GS_OK


cdef inline int32_t kinds_place(const gs_kinds *kinds, uint64_t hash, int32_t mask) noexcept nogil:
    """The first free slot of the hash table for a hash."""
    cdef int32_t at = <int32_t>(hash & <uint64_t>mask)
    while kinds.slot[at] >= 0:
        at = (at + 1) & mask
    return at


cdef int kinds_sort(gs_kinds *kinds, const gs_graph *g, const int32_t *ids, int32_t n) noexcept nogil:
    """Find the kinds of the n tensors `ids`, or, if that is NULL, of tensors 0 .. n - 1."""
    cdef int32_t i, id, at, kind, mask
    cdef uint64_t h
    for i in range(n):
        id = i if ids == NULL else ids[i]
        if kinds.of[id] >= 0:
            continue
        if kinds.n == kinds.room and kinds_grow(kinds) != GS_OK:
            return GS_NO_HOST_MEMORY
        h = kind_hash(g, id)
        mask = 2 * kinds.room - 1
        at = <int32_t>(h & <uint64_t>mask)
        kind = kinds.slot[at]
        while kind >= 0 and not kind_equal(g, id, kinds.example[kind]):
            at = (at + 1) & mask
            kind = kinds.slot[at]
        if kind < 0:
            kind = kinds.slot[at] = kinds.n
            kinds.hash[kind], kinds.example[kind] = h, id
            kinds.n += 1
        kinds.of[id] = kind
    return GS_OK


cdef void kinds_free(gs_kinds *kinds) noexcept nogil:
    free(kinds.of)
    free(kinds.hash)
    memset(kinds, 0, sizeof(gs_kinds))


cdef void node_name_op(gs_node *out) noexcept nogil:
    """Set family and sub-op from the op in the layout."""
    out.op = gs_op_family(out.layout.op)
    out.sub_op = out.layout.op - out.op


cdef void node_of_kind(const gs_graph *g, int32_t id, gs_node *out) noexcept nogil:
    """Make the argument of support queries: out[0] is the node, the other entries of out[1 + GS_MAX_SRC] its sources.

    Only what defines the kind is set: no flags, no addresses, and neither op nor parameters of sources.
    """
    cdef gs_node *s
    cdef int32_t k
    memset(out, 0, sizeof(gs_node))
    out.layout = g.layout[id]
    node_name_op(out)
    memcpy(out.params, g.param + g.param_begin[id],
           (g.param_begin[id + 1] - g.param_begin[id]) * sizeof(int32_t))
    for k in range(g.src_begin[id], g.src_begin[id + 1]):
        s = out + 1 + g.slot[k]
        memset(s, 0, sizeof(gs_node))
        s.layout = g.layout[g.src[k]]
        s.layout.op = GS_OP_NONE
        out.src[g.slot[k]] = s
        out.n_src = g.slot[k] + 1
