# Walk: the sequence of nodes and input copies that an allocation pass visits, and the results of the pass.
#
# Ids 0 .. n_tensors-1 are the graph's tensors; then come the copies that a scheduler adds, then the further copy slots
# of copies that have several.  Each id has an arena (of a backend; OUTSIDE for residents) and a size, rounded up to the
# arena's alignment.  A gs_walk owns two blocks of memory: `scratch`, freed once a plan is made, and the arrays of `p`
# that plan_alloc_ids makes, which the plan takes over.  `layout`, `slot`, `alike` and `dep` point into the graph.

cdef int plan_alloc_ids(gs_plan *p, int32_t n, int32_t n_seq, int32_t n_src) noexcept nogil:
    """Allocate the arrays of a plan that have an entry for each id; sizes, offsets and states are zero."""
    cdef int64_t m = n
    p.size = <int64_t *>malloc(m * (4 * sizeof(int64_t) + 7 * sizeof(int32_t) + 3)
                               + (1 + <int64_t>n_src + n_seq) * sizeof(int32_t))
    if p.size == NULL:
        return GS_NO_HOST_MEMORY
    p.n = n
    p.n_seq = n_seq
    p.view_offs = p.size + m
    p.offset = p.view_offs + m
    p.rest = p.offset + m
    p.like = <int32_t *>(p.rest + m)
    p.arena_of = p.like + m
    p.root = p.arena_of + m
    p.birth = p.root + m
    p.death = p.birth + m
    p.trimmed = p.death + m
    p.src_begin = p.trimmed + m
    p.src = p.src_begin + m + 1
    p.seq = p.src + n_src
    p.op = <unsigned char *>(p.seq + n_seq)
    p.flags = p.op + m
    p.state = p.flags + m
    memset(p.size, 0, 4 * m * sizeof(int64_t))      # size, view_offs, offset, rest
    memset(p.trimmed, 0, m * sizeof(int32_t))
    memset(p.state, 0, m)
    return GS_OK


cdef int walk_alloc(gs_walk *f, const gs_plan *p, int32_t n, int32_t n_seq, int32_t n_src) noexcept nogil:
    """Begin a walk of n ids with the placement of `p`, or without one if that is NULL."""
    cdef int64_t m = max(n, 1)
    memset(f, 0, sizeof(gs_walk))
    if p != NULL:
        f.p = p[0]
        f.p.size = NULL
    f.scratch = <char *>malloc(5 * m * sizeof(int32_t))
    if f.scratch == NULL or plan_alloc_ids(&f.p, n, n_seq, n_src) != GS_OK:
        walk_free(f)
        return GS_NO_HOST_MEMORY
    f.n_children = <int32_t *>f.scratch
    f.n_views = f.n_children + m
    f.owner = f.n_views + m
    f.start = f.owner + m
    f.stop = f.start + m
    return GS_OK


cdef void walk_free(gs_walk *f) noexcept nogil:
    free(f.p.size)
    free(f.scratch)
    memset(f, 0, sizeof(gs_walk))


cdef void walk_from_graph(gs_walk *f, const gs_graph *g) noexcept nogil:
    """Copy the wiring and views of a graph; the caller sets arenas and sizes, and adds copies."""
    cdef int32_t i
    f.layout = g.layout
    f.slot = g.slot
    f.alike = g.alike
    f.dep_begin = g.dep_begin
    f.dep = g.dep
    memcpy(f.p.src_begin, g.src_begin, (g.n_tensors + 1) * sizeof(int32_t))
    memcpy(f.p.src, g.src, g.src_begin[g.n_tensors] * sizeof(int32_t))
    memcpy(f.p.seq, g.node, g.n_nodes * sizeof(int32_t))
    memcpy(f.p.root, g.view_src, g.n_tensors * sizeof(int32_t))
    memcpy(f.p.view_offs, g.view_offs, g.n_tensors * sizeof(int64_t))
    memcpy(f.p.op, g.op, g.n_tensors)
    memcpy(f.p.flags, g.flags, g.n_tensors)
    memcpy(f.n_children, g.n_readers, g.n_tensors * sizeof(int32_t))
    memcpy(f.n_views, g.n_viewers, g.n_tensors * sizeof(int32_t))
    # Every byte is 0xff, so every number is -1: none yet.
    memset(f.p.offset, 0xff, f.p.n * sizeof(int64_t))
    memset(f.p.birth, 0xff, f.p.n * sizeof(int32_t))
    memset(f.p.death, 0xff, f.p.n * sizeof(int32_t))
    for i in range(g.n_tensors):
        f.p.like[i] = i
    if g.dep_begin != NULL:
        for i in range(g.n_tensors):
            if g.dep_begin[i] < g.dep_begin[i + 1]:
                f.p.state[i] |= GS_STATE_DEPENDS


cdef uint64_t walk_wiring(const gs_walk *f) noexcept nogil:
    """A hash of a walk without shapes, sizes and offsets: ops, flags, arenas, sources, roots, dependencies, order."""
    cdef uint64_t h = gs_mix(<uint64_t>f.p.n, <uint64_t>f.p.n_seq)
    cdef int32_t i, k
    for i in range(f.p.n):
        h = gs_mix(h, (<uint64_t>f.p.op[i] << 40) ^ (<uint64_t>f.p.flags[i] << 34) ^ <uint64_t><uint32_t>f.p.root[i])
        h = gs_mix(h, (<uint64_t><uint32_t>f.p.arena_of[i] << 32) ^ <uint64_t>f.p.like[i])
        for k in range(f.p.src_begin[i], f.p.src_begin[i + 1]):
            h = gs_mix(h, <uint64_t>f.p.src[k] + 1)
        if f.p.state[i] & GS_STATE_DEPENDS:
            for k in range(f.dep_begin[i], f.dep_begin[i + 1]):
                h = gs_mix(h, ~<uint64_t>f.dep[k])
    for i in range(f.p.n_seq):
        h = gs_mix(h, <uint64_t>f.p.seq[i])
    return h


cdef void plan_follow_owners(gs_plan *p) noexcept nogil:
    """Compute the offsets of views, and of nodes that reuse memory in place, from those of the memory's owners."""
    cdef int32_t i, r
    cdef int64_t extra
    for i in range(p.n):
        if p.root[i] < 0 or p.offset[i] < 0:
            continue
        r = i
        extra = 0
        while p.root[r] >= 0:
            extra += p.view_offs[r]
            r = p.root[r]
        p.offset[i] = p.offset[r] + extra


cdef void groups_find_positions(gs_groups *w, const int32_t *seq, int32_t n_seq) noexcept nogil:
    """Set the positions of each group's first and last member in a walk."""
    cdef int32_t i, group
    memset(w.starts, 0xff, w.n * sizeof(int32_t))
    for i in range(n_seq):
        group = group_of(w, seq[i])
        if group >= 0:
            if w.starts[group] < 0:
                w.starts[group] = i
            w.ends[group] = i
