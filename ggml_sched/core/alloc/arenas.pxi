# Arenas: what the memory of a graph in splits comes to, in each arena as small as it gets.
#
# Runs the walk (gallocr_run) and the placing of its lifetimes (choose_offsets).  A node that takes over a part of
# another tensor's memory saves its own, but keeps the rest taken longer, or cuts it in pieces: where that may
# cost more than it saves, the arena is laid out without such reuse, too, and the smaller one stays.
# Owns nothing: gs_allocation points to what one planning run works on.

ctypedef struct gs_allocation:
    const gs_request *r
    const int32_t *assign
    const gs_splits *splits
    gs_walk *walk               # the result
    gs_arena *arenas            # of each backend, as all below
    gs_blocks *blocks
    int32_t *methods            # result: GS_METHOD_*
    int32_t failed              # result: the id that an error is about


cdef int64_t fill_chunks(const gs_walk *f, int32_t home, const gs_blocks *blocks, int64_t *sizes) noexcept nogil:
    """What each chunk of an arena must hold, into sizes[n_chunks], which are zero; returns the sum."""
    cdef int64_t total = 0, at
    cdef int32_t i
    for i in range(f.n):
        if f.home[i] == home and f.birth[i] >= 0 and f.size[i]:
            at = f.offset[i] // blocks.stride
            sizes[at] = max(sizes[at], f.offset[i] % blocks.stride + f.size[i])
    for i in range(blocks.n_chunks):
        total += sizes[i]
    return total


cdef int64_t arena_bytes(const gs_walk *f, int32_t home, const gs_blocks *blocks) noexcept nogil:
    """What an arena must hold, all its chunks together; -1 without memory to count."""
    cdef int64_t *sizes
    cdef int64_t total
    if blocks.n_chunks <= 1:
        return blocks.max_size
    sizes = <int64_t *>calloc(blocks.n_chunks, sizeof(int64_t))
    if sizes == NULL:
        return -1
    total = fill_chunks(f, home, blocks, sizes)
    free(sizes)
    return total


cdef int allocation_init(gs_allocation *a, const gs_request *r) noexcept nogil:
    """Empty arenas for each backend."""
    cdef int64_t n = max(r.n_backends, 1)
    cdef int32_t i
    memset(a, 0, sizeof(gs_allocation))
    a.r = r
    a.failed = -1
    a.arenas = <gs_arena *>calloc(n, sizeof(gs_arena))
    a.blocks = <gs_blocks *>calloc(n, sizeof(gs_blocks))
    a.methods = <int32_t *>calloc(n, sizeof(int32_t))
    if a.arenas == NULL or a.blocks == NULL or a.methods == NULL:
        return GS_NO_HOST_MEMORY
    for i in range(r.n_backends):
        a.blocks[i].chunk = r.max_buffer[i]
    return GS_OK


cdef void allocation_free(gs_allocation *a) noexcept nogil:
    cdef int32_t i
    for i in range(a.r.n_backends if a.blocks != NULL else 0):
        blocks_free(&a.blocks[i])
    free(a.blocks)
    free(a.arenas)
    free(a.methods)


cdef int allocate(gs_allocation *a) noexcept nogil:
    """Lifetimes, in-place decisions and offsets, with whatever reuse makes each arena smallest."""
    cdef int32_t i
    cdef int status
    for i in range(a.r.n_backends):
        a.arenas[i].reuse = a.r.policy.reuse
    status = allocate_once(a)
    if status == GS_OK and a.r.policy.reuse > GS_REUSE_WHOLE:
        status = weigh_reuse(a)
    return status


cdef int allocate_once(gs_allocation *a) noexcept nogil:
    """One walk with the reuse that the arenas ask for; what an earlier one has found is dropped."""
    cdef gs_arena *arena
    cdef gs_blocks *blocks
    cdef int32_t i, n = a.r.n_backends
    cdef int status
    cdef bint packed = a.r.policy.offsets == GS_OFFSETS_PACKED
    walk_free(a.walk)
    status = walk_from_splits(a.walk, a.r, a.assign, a.splits, &a.failed)
    for i in range(n):
        arena = &a.arenas[i]
        blocks = &a.blocks[i]
        arena.live = arena.peak = arena.whole = arena.whole_peak = 0
        arena.n_inner = arena.n_partial = arena.n_owners = arena.section = 0
        arena.waiting = False
        arena.alignment = a.r.alignment[i]
        arena.blocks = NULL
        blocks.max_size = blocks.n_chunks = 0
        if not packed or blocks.chunk:
            arena.blocks = blocks
            if status == GS_OK and blocks.chunk:
                status = blocks_reset_chunked(blocks, blocks.chunk, arena.alignment)
            elif status == GS_OK:
                status = blocks_reset(blocks, INT64_MAX)
    if status == GS_OK:
        status = gallocr_run(a.walk, a.arenas, a.r.inplace, NULL, 0, a.r.policy.leafs_first, &a.failed)
    for i in range(n):
        a.arenas[i].live_bytes = a.arenas[i].peak
    if status == GS_OK and packed:
        status = choose_offsets(a.walk, n, a.blocks, a.arenas, a.methods)
    return status


cdef int weigh_reuse(gs_allocation *a) noexcept nogil:
    """Try with less reuse where some may cost more than it saves, and keep for each arena what makes it smallest.

    Arenas do not depend on each other, so that each try is one for all of them.  On a tie an arena goes without
    reuse inside memory: what is left moves less when a reserved plan is replayed.
    """
    cdef int64_t *best
    cdef int32_t *reuse
    cdef int32_t i, mode, n = a.r.n_backends, most = a.r.policy.reuse
    cdef int64_t size
    cdef int status = GS_OK
    cdef bint some_inner = False, some_partial = False, again = False
    for i in range(n):
        some_inner |= a.arenas[i].n_inner > 0
        # At the most bytes alive, tails counted as free, there is nothing to gain.
        some_partial |= a.arenas[i].n_partial > 0 and arena_bytes(a.walk, i, &a.blocks[i]) != a.arenas[i].peak
    if not (some_inner or some_partial):
        return GS_OK
    best = <int64_t *>malloc(n * (sizeof(int64_t) + sizeof(int32_t)))
    if best == NULL:
        return GS_NO_HOST_MEMORY
    reuse = <int32_t *>(best + n)
    for i in range(n):
        reuse[i] = most
        best[i] = arena_bytes(a.walk, i, &a.blocks[i])
        if best[i] < 0:
            status = GS_NO_HOST_MEMORY
    for mode in range(most - 1, GS_REUSE_FIRST, -1):
        if status != GS_OK or not (some_inner if mode == GS_REUSE_FRONT else some_partial):
            continue
        for i in range(n):
            a.arenas[i].reuse = mode
        status = allocate_once(a)
        for i in range(n):
            size = arena_bytes(a.walk, i, &a.blocks[i]) if status == GS_OK else 0
            if size < 0:
                status = GS_NO_HOST_MEMORY
            elif size < best[i] or size == best[i] and mode == GS_REUSE_FRONT:
                best[i] = size
                reuse[i] = mode
    for i in range(n):
        again |= a.arenas[i].reuse != reuse[i]
        a.arenas[i].reuse = reuse[i]
    free(best)
    return allocate_once(a) if status == GS_OK and again else status
