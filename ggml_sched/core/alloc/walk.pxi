# Walk: what an allocation pass walks over: a graph's nodes, with input copies among them.
#
# Ids 0 .. n_tensors-1 are the graph's tensors; copies that a scheduler adds follow, then the further places of
# those copies that have several.
# Each id has a home (the arena it is allocated in, OUTSIDE for residents) and a
# size already rounded up there.  Owns two blocks of memory: what the walk needs, which goes once
# a plan is made, and the rest, which stays; `layout`, `slot`, `alike` and `dep` point into the graph.

cdef enum:
    OUTSIDE = -1            # home of a tensor that lives in a buffer of its own


ctypedef struct gs_walk:
    int32_t n               # ids
    int32_t n_seq
    const gs_layout *layout
    const unsigned char *slot   # of a graph tensor's sources
    const uint32_t *alike       # as in gs_graph
    const int32_t *dep_begin    # as in gs_graph: what nodes keep until they are done, or NULL
    const int32_t *dep
    const gs_groups *groups     # nodes that are computed as one, or NULL
    int32_t *like           # the graph tensor whose layout, op and flags an id has
    int32_t *home
    int32_t *root           # whose memory it shares: view root or taken-over source; -1
    int32_t *src_begin
    int32_t *src
    int32_t *seq            # ids in execution order
    int64_t *size           # bytes, aligned
    int64_t *view_offs      # from the start of the root's memory
    int64_t *rest           # result: bytes that stay taken once the tail has been given back
    int64_t *offset         # result: from the start of the home's arena; -1
    int32_t *birth          # result: position in seq at which the memory is taken
    int32_t *death          # result: position after which it is free; n_seq if it stays
    int32_t *trimmed        # result: position at which the tail was given back, where rest < size
    unsigned char *op
    unsigned char *flags
    unsigned char *state
    char *memory
    # The walk's: children and views still to come, and the owners of memory in order of birth, with the sections
    # of their arena (core/pack/prepare.pxi) that they live in.
    int32_t *n_children
    int32_t *n_views
    int32_t n_owners
    int32_t *owner
    int32_t *start
    int32_t *stop
    char *scratch


cdef int walk_alloc(gs_walk *f, int32_t n, int32_t n_seq, int32_t n_src) noexcept nogil:
    """Lay the arrays out in two blocks, with sizes, offsets and states zero."""
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
    memset(f.size, 0, 4 * m * sizeof(int64_t))      # and what follows it, up to `like`
    memset(f.trimmed, 0, m * sizeof(int32_t))
    memset(f.state, 0, m)
    return GS_OK


cdef inline int32_t walk_owner(const gs_walk *f, int32_t id) noexcept nogil:
    """The id under whose name the memory of id was taken: along views and in-place chains to their first."""
    while f.root[id] >= 0:
        id = f.root[id]
    return id


cdef void walk_free(gs_walk *f) noexcept nogil:
    free(f.memory)
    free(f.scratch)
    memset(f, 0, sizeof(gs_walk))


cdef void walk_from_graph(gs_walk *f, const gs_graph *g) noexcept nogil:
    """Ids, wiring and views of a graph without copies; homes and sizes are the caller's."""
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
    """A hash of everything but shapes and sizes: graphs of the same wiring agree in it."""
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


cdef int walk_from_splits(gs_walk *f, const gs_request *r, const int32_t *assign, const gs_splits *w,
                          int32_t *failed) noexcept nogil:
    """The walk of a graph in splits: each split's copies stand before its nodes, and nodes read the copies.

    A copy counts its further places among its sources, so that an allocation pass places them with it.
    GS_OVERFLOW with *failed when an aligned size leaves the 64-bit range.
    """
    cdef const gs_graph *g = r.g
    cdef int32_t n_copies = w.copy_like.n, n_places = w.place_copy.n, n = g.n_tensors
    cdef int32_t n_src = g.src_begin[n]
    cdef int32_t i, c, k, at, home
    cdef int status = walk_alloc(f, n + n_copies + n_places, g.n_nodes + w.inputs.n, n_src + n_copies + n_places)
    if status != GS_OK:
        return status
    walk_from_graph(f, g)
    memcpy(f.src, w.src, n_src * sizeof(int32_t))
    memset(f.n_children + n, 0, (n_copies + n_places) * sizeof(int32_t))
    memset(f.n_views + n, 0, (n_copies + n_places) * sizeof(int32_t))
    if n_copies:
        for k in range(n_src):
            if f.src[k] != g.src[k]:
                f.n_children[g.src[k]] -= 1
                f.n_children[f.src[k]] += 1
    at = n_src
    k = 0
    for c in range(n_copies):
        i = n + c
        f.like[i] = w.copy_like.at[c]
        f.home[i] = w.copy_backend.at[c]
        f.root[i] = -1
        f.op[i] = GS_OP_NONE
        f.flags[i] = GS_FLAG_OUTPUT if w.copy_kept.at[c] else 0
        f.src[at] = w.copy_from.at[c]
        at += 1
        while k < n_places and w.place_copy.at[k] == c:
            f.flags[i] = GS_FLAG_OUTPUT
            f.src[at] = n + n_copies + k
            at += 1
            k += 1
        f.src_begin[i + 1] = at
    for k in range(n_places):
        i = n + n_copies + k
        c = n + w.place_copy.at[k]
        f.like[i] = f.like[c]
        f.home[i] = f.home[c]
        f.root[i] = -1
        f.op[i] = GS_OP_NONE
        f.flags[i] = GS_FLAG_OUTPUT
        f.src_begin[i + 1] = at
    at = k = 0
    for i in range(w.split_start.n):
        while k < w.split_inputs.at[i]:
            c = n + w.inputs.at[k]
            f.seq[at] = c
            for home in range(f.src_begin[c], f.src_begin[c + 1]):
                f.n_children[f.src[home]] += 1
            at += 1
            k += 1
        c = w.split_stop.at[i] - w.split_start.at[i]
        memcpy(f.seq + at, g.node + w.split_start.at[i], c * sizeof(int32_t))
        at += c
    f.n_seq = at
    for i in range(n):
        k = g.memory[i]
        # Also what nothing uses: it is not to be placed, though a view may name it.
        f.home[i] = assign[k] if r.resident[k] < 0 and assign[k] >= 0 else OUTSIDE
        if f.home[i] == OUTSIDE:
            f.state[i] |= GS_STATE_ADDRESSED
    for i in range(f.n):
        home = f.home[i]
        if home == OUTSIDE or f.root[i] >= 0:
            continue
        if gs_checked_align(request_size(r, home, f.like[i]), r.alignment[home], &f.size[i]) != GS_OK:
            failed[0] = f.like[i]
            return GS_OVERFLOW
    return GS_OK
