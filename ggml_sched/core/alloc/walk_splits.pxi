# The walk of a graph in splits: its nodes and the input copies of its splits, in order of execution.

cdef int walk_from_splits(gs_walk *f, const gs_request *r, const gs_plan *p, const int32_t *src,
                          int32_t *failed) noexcept nogil:
    """Make the walk of a graph in splits: the copies of a split come before its nodes, and its nodes read the copies.

    The further copy slots of a copy are among its sources, so that an allocation pass allocates them with the copy.
    GS_OVERFLOW, with *failed set to the id, if an aligned size does not fit in 64 bits.
    """
    cdef const gs_graph *g = r.g
    cdef int32_t n_copies = p.n_copies, n_slots = p.n_slots, n = g.n_tensors
    cdef int32_t n_src = g.src_begin[n]
    cdef int32_t i, c, k, at, b
    cdef int64_t size
    cdef int status = walk_alloc(f, p, n + n_copies + n_slots, g.n_nodes + p.n_inputs, n_src + n_copies + n_slots)
    if status != GS_OK:
        return status
    walk_from_graph(f, g)
    memcpy(f.p.src, src, n_src * sizeof(int32_t))
    memset(f.n_children + n, 0, (n_copies + n_slots) * sizeof(int32_t))
    memset(f.n_views + n, 0, (n_copies + n_slots) * sizeof(int32_t))
    if n_copies:
        for k in range(n_src):
            if f.p.src[k] != g.src[k]:
                f.n_children[g.src[k]] -= 1
                f.n_children[f.p.src[k]] += 1
    at = n_src
    k = 0
    for c in range(n_copies):
        i = n + c
        f.p.like[i] = p.copy_like[c]
        f.p.arena_of[i] = p.copy_backend[c]
        f.p.root[i] = -1
        f.p.op[i] = GS_OP_NONE
        f.p.flags[i] = GS_FLAG_OUTPUT if p.copy_kept[c] else 0
        f.p.src[at] = p.copy_from[c]
        at += 1
        while k < n_slots and p.slot_copy[k] == c:
            f.p.flags[i] = GS_FLAG_OUTPUT
            f.p.src[at] = n + n_copies + k
            at += 1
            k += 1
        f.p.src_begin[i + 1] = at
    for k in range(n_slots):
        i = n + n_copies + k
        c = n + p.slot_copy[k]
        f.p.like[i] = f.p.like[c]
        f.p.arena_of[i] = f.p.arena_of[c]
        f.p.root[i] = -1
        f.p.op[i] = GS_OP_NONE
        f.p.flags[i] = GS_FLAG_OUTPUT
        f.p.src_begin[i + 1] = at
    at = k = 0
    for i in range(p.n_splits):
        while k < p.split_inputs[i]:
            c = n + p.inputs[k]
            f.p.seq[at] = c
            for b in range(f.p.src_begin[c], f.p.src_begin[c + 1]):
                f.n_children[f.p.src[b]] += 1
            at += 1
            k += 1
        c = p.split_stop[i] - p.split_start[i]
        memcpy(f.p.seq + at, g.node + p.split_start[i], c * sizeof(int32_t))
        at += c
    f.p.n_seq = at
    for i in range(n):
        k = g.memory[i]
        # Unused tensors, too, are OUTSIDE: they are not allocated, even as the root of a view.
        f.p.arena_of[i] = p.assign[k] if r.p.resident[k] < 0 and p.assign[k] >= 0 else OUTSIDE
        if f.p.arena_of[i] == OUTSIDE:
            f.p.state[i] |= GS_STATE_ADDRESSED
    for i in range(f.p.n):
        b = f.p.arena_of[i]
        if b == OUTSIDE or f.p.root[i] >= 0:
            continue
        size = request_size(r, b, f.p.like[i])
        if i >= n and is_stored(r, f.p.like[i]):
            status = gs_checked_add(size, r.margin[r.p.resident[f.p.like[i]]], &size)
        if status != GS_OK or gs_checked_align(size, r.p.backends[b].alignment, &f.p.size[i]) != GS_OK:
            failed[0] = f.p.like[i]
            return GS_OVERFLOW
    return GS_OK
