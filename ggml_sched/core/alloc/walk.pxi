# Walk: the sequence of nodes and input copies that an allocation pass visits, and the results of the pass.
#
# Ids 0 .. n_tensors-1 are the graph's tensors; then come the copies that a scheduler adds, then the further copy slots
# of copies that have several.  Each id has a home (the backend whose arena holds it, OUTSIDE for residents) and a size,
# rounded up to the home's alignment.  Owns two blocks: `scratch`, freed once a plan is made, and `memory`, which then
# belongs to the plan.  `layout`, `slot`, `alike` and `dep` point into the graph.

cdef int walk_alloc(gs_walk *f, int32_t n, int32_t n_seq, int32_t n_src) noexcept nogil:
    """Allocate the two blocks and set the array pointers; sizes, offsets and states are zero."""
    cdef int64_t m = n
    memset(f, 0, sizeof(gs_walk))
    f.memory = <char *>malloc(m * (4 * sizeof(int64_t) + 7 * sizeof(int32_t) + 3)
                              + (1 + <int64_t>n_src + n_seq) * sizeof(int32_t))
    f.scratch = <char *>malloc(5 * max(m, 1) * sizeof(int32_t))
    if f.memory == NULL or f.scratch == NULL:
        walk_free(f)
        return GS_NO_HOST_MEMORY
    f.n = n
    f.n_seq = n_seq
    f.size = <int64_t *>f.memory
    f.view_offs = f.size + m
    f.offset = f.view_offs + m
    f.rest = f.offset + m
    f.like = <int32_t *>(f.rest + m)
    f.home = f.like + m
    f.root = f.home + m
    f.birth = f.root + m
    f.death = f.birth + m
    f.trimmed = f.death + m
    f.src_begin = f.trimmed + m
    f.src = f.src_begin + m + 1
    f.seq = f.src + n_src
    f.op = <unsigned char *>(f.seq + n_seq)
    f.flags = f.op + m
    f.state = f.flags + m
    f.n_children = <int32_t *>f.scratch
    f.n_views = f.n_children + m
    f.owner = f.n_views + m
    f.start = f.owner + m
    f.stop = f.start + m
    memset(f.size, 0, 4 * m * sizeof(int64_t))      # size, view_offs, offset, rest
    memset(f.trimmed, 0, m * sizeof(int32_t))
    memset(f.state, 0, m)
    return GS_OK


cdef void walk_free(gs_walk *f) noexcept nogil:
    free(f.memory)
    free(f.scratch)
    memset(f, 0, sizeof(gs_walk))


cdef void walk_from_graph(gs_walk *f, const gs_graph *g) noexcept nogil:
    """Copy the wiring and views of a graph; the caller sets homes and sizes, and adds copies."""
    cdef int32_t i
    f.layout = g.layout
    f.slot = g.slot
    f.alike = g.alike
    f.dep_begin = g.dep_begin
    f.dep = g.dep
    memcpy(f.src_begin, g.src_begin, (g.n_tensors + 1) * sizeof(int32_t))
    memcpy(f.src, g.src, g.src_begin[g.n_tensors] * sizeof(int32_t))
    memcpy(f.seq, g.node, g.n_nodes * sizeof(int32_t))
    memcpy(f.root, g.view_src, g.n_tensors * sizeof(int32_t))
    memcpy(f.view_offs, g.view_offs, g.n_tensors * sizeof(int64_t))
    memcpy(f.op, g.op, g.n_tensors)
    memcpy(f.flags, g.flags, g.n_tensors)
    memcpy(f.n_children, g.n_readers, g.n_tensors * sizeof(int32_t))
    memcpy(f.n_views, g.n_viewers, g.n_tensors * sizeof(int32_t))
    # -1 in every word.
    memset(f.offset, 0xff, f.n * sizeof(int64_t))
    memset(f.birth, 0xff, f.n * sizeof(int32_t))
    memset(f.death, 0xff, f.n * sizeof(int32_t))
    for i in range(g.n_tensors):
        f.like[i] = i
    if g.dep_begin != NULL:
        for i in range(g.n_tensors):
            if g.dep_begin[i] < g.dep_begin[i + 1]:
                f.state[i] |= GS_STATE_DEPENDS


cdef uint64_t walk_wiring(const gs_walk *f) noexcept nogil:
    """A hash of the wiring: everything but shapes and sizes."""
    cdef uint64_t h = gs_mix(<uint64_t>f.n, <uint64_t>f.n_seq)
    cdef int32_t i, k
    for i in range(f.n):
        h = gs_mix(h, (<uint64_t>f.op[i] << 40) ^ (<uint64_t>f.flags[i] << 34) ^ <uint64_t><uint32_t>f.root[i])
        h = gs_mix(h, (<uint64_t><uint32_t>f.home[i] << 32) ^ <uint64_t>f.like[i])
        for k in range(f.src_begin[i], f.src_begin[i + 1]):
            h = gs_mix(h, <uint64_t>f.src[k] + 1)
        if f.state[i] & GS_STATE_DEPENDS:
            for k in range(f.dep_begin[i], f.dep_begin[i + 1]):
                h = gs_mix(h, ~<uint64_t>f.dep[k])
    for i in range(f.n_seq):
        h = gs_mix(h, <uint64_t>f.seq[i])
    return h


cdef void walk_follow_owners(gs_walk *f) noexcept nogil:
    """Compute the offsets of views, and of nodes that reuse memory in place, from those of the memory's owners."""
    cdef int32_t i, r
    cdef int64_t extra
    for i in range(f.n):
        if f.root[i] < 0 or f.offset[i] < 0:
            continue
        r = i
        extra = 0
        while f.root[r] >= 0:
            extra += f.view_offs[r]
            r = f.root[r]
        f.offset[i] = f.offset[r] + extra


cdef void groups_find_places(gs_groups *w, const int32_t *seq, int32_t n_seq) noexcept nogil:
    """Set the positions of each group's first and last member in a walk."""
    cdef int32_t i, group
    memset(w.starts, 0xff, w.n * sizeof(int32_t))
    for i in range(n_seq):
        group = group_of(w, seq[i])
        if group >= 0:
            if w.starts[group] < 0:
                w.starts[group] = i
            w.ends[group] = i
