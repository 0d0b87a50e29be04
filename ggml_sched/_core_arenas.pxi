# Arenas: what the routed graph's memory comes to, in each arena as small as it gets.
#
# Runs the walk (gallocr_run) and the placing of its lifetimes (choose_offsets).  Taking over a part of
# another tensor's memory saves the heir's own, but keeps the rest taken longer, or cuts it in pieces: where
# that may cost more than it saves, the arena is laid out without such heirs, too, and the smaller one stays.
# Owns nothing: gs_allocation points to what one planning run works on.

ctypedef struct gs_allocation:
    const gs_request *r
    const int32_t *assign
    const gs_routes *routes
    gs_flow *flow               # the result
    const uint64_t *inplace     # [n_backends][N_OPS_MAX] masks of sources that may be taken over
    const int64_t *alignment    # of each backend, as all below
    gs_arena *arenas
    gs_blocks *blocks
    int32_t *methods            # result: OFFSETS_*
    bint seed
    int32_t failed              # result: the id that an error is about


cdef int64_t fill_chunks(const gs_flow *f, int32_t home, const gs_blocks *blocks, int64_t *sizes) noexcept nogil:
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


cdef int64_t arena_bytes(const gs_flow *f, int32_t home, const gs_blocks *blocks) noexcept nogil:
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


cdef int allocate(gs_allocation *a) noexcept nogil:
    """Lifetimes, in-place decisions and offsets for the routes, with whatever heirs make each arena smallest."""
    cdef int32_t i
    cdef int status
    for i in range(a.r.n_backends):
        a.arenas[i].heirs = HEIRS_FIRST if a.seed else HEIRS_ALL
    status = allocate_once(a)
    if status == GS_OK and not a.seed:
        status = weigh_heirs(a)
    return status


cdef int allocate_once(gs_allocation *a) noexcept nogil:
    """One walk with the heirs that the arenas ask for; what an earlier one has found is dropped."""
    cdef gs_arena *arena
    cdef gs_blocks *blocks
    cdef int32_t i, n = a.r.n_backends
    cdef int status
    flow_free(a.flow)
    status = flow_from_routes(a.flow, a.r, a.assign, a.routes, a.alignment, &a.failed)
    for i in range(n):
        arena = &a.arenas[i]
        blocks = &a.blocks[i]
        arena.live = arena.peak = arena.whole = arena.whole_peak = 0
        arena.n_inner = arena.n_partial = arena.n_owners = arena.section = 0
        arena.waiting = False
        arena.alignment = a.alignment[i]
        arena.blocks = NULL
        blocks.max_size = blocks.n_chunks = 0
        if a.seed or blocks.chunk:
            arena.blocks = blocks
            if status == GS_OK and blocks.chunk:
                status = blocks_reset_chunked(blocks, blocks.chunk, arena.alignment)
            elif status == GS_OK:
                status = blocks_reset(blocks, INT64_MAX)
    if status == GS_OK:
        status = gallocr_run(a.flow, a.arenas, a.inplace, NULL, 0, not a.seed, &a.failed)
    for i in range(n):
        a.arenas[i].live_bytes = a.arenas[i].peak
    if status == GS_OK and not a.seed:
        status = choose_offsets(a.flow, n, a.blocks, a.arenas, a.methods)
    return status


cdef int weigh_heirs(gs_allocation *a) noexcept nogil:
    """Try with fewer heirs where some may cost more than they save, and keep for each arena what makes it smallest.

    Arenas do not depend on each other, so that each try is one for all of them.  On a tie an arena goes without
    heirs inside memory: those that are left move less when a reserved plan is replayed.
    """
    cdef int64_t *best
    cdef int32_t *heirs
    cdef int32_t i, mode, n = a.r.n_backends
    cdef int64_t size
    cdef int status = GS_OK
    cdef bint some_inner = False, some_partial = False, again = False
    for i in range(n):
        some_inner |= a.arenas[i].n_inner > 0
        # At the most bytes alive, tails counted as free, there is nothing to gain.
        some_partial |= a.arenas[i].n_partial > 0 and arena_bytes(a.flow, i, &a.blocks[i]) != a.arenas[i].peak
    if not (some_inner or some_partial):
        return GS_OK
    best = <int64_t *>malloc(n * (sizeof(int64_t) + sizeof(int32_t)))
    if best == NULL:
        return GS_NO_HOST_MEMORY
    heirs = <int32_t *>(best + n)
    for i in range(n):
        heirs[i] = HEIRS_ALL
        best[i] = arena_bytes(a.flow, i, &a.blocks[i])
        if best[i] < 0:
            status = GS_NO_HOST_MEMORY
    for mode in range(HEIRS_FRONT, HEIRS_FIRST, -1):
        if status != GS_OK or not (some_inner if mode == HEIRS_FRONT else some_partial):
            continue
        for i in range(n):
            a.arenas[i].heirs = mode
        status = allocate_once(a)
        for i in range(n):
            size = arena_bytes(a.flow, i, &a.blocks[i]) if status == GS_OK else 0
            if size < 0:
                status = GS_NO_HOST_MEMORY
            elif size < best[i] or size == best[i] and mode == HEIRS_FRONT:
                best[i] = size
                heirs[i] = mode
    for i in range(n):
        again |= a.arenas[i].heirs != heirs[i]
        a.arenas[i].heirs = heirs[i]
    free(best)
    return allocate_once(a) if status == GS_OK and again else status
