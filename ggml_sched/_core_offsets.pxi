# Offsets: the arena of each backend packed offline, once all lifetimes are known.
#
# The walk of gallocr_run gives lifetimes, in-place decisions and offsets by best fit.
# Where best fit left an arena above the largest sum of live bytes, everything in it is
# placed anew, all lifetimes seen together.  Invariant: no arena gets larger.

cdef enum:
    OFFSETS_BEST_FIT = 0        # best fit was at the bound already, or nothing better was found
    OFFSETS_PACKED = 1          # plus the method of the packing
    OFFSETS_SEARCH_STEPS = 100_000


cdef void flow_follow_owners(gs_flow *f) noexcept nogil:
    """Offsets of views and heirs from those of the memory that they share."""
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


cdef int pack_arena(gs_flow *f, int32_t home, gs_blocks *blocks, gs_arena *arena, int32_t *ids, int32_t *lower,
                    int32_t *upper, int64_t *size, int64_t *offset, int32_t *method) noexcept nogil:
    """Pack one backend's arena; the arrays have room for every id."""
    cdef gs_packing packing
    cdef int32_t i, n = 0
    cdef int status
    for i in range(f.n):
        if f.home[i] == home and f.birth[i] >= 0:
            ids[n] = i
            lower[n] = f.birth[i]
            upper[n] = f.death[i] + 1
            size[n] = f.size[i]
            n += 1
    status = pack_run(n, f.n_seq + 1, lower, upper, size, PACK_NO_CAPACITY, OFFSETS_SEARCH_STEPS, offset, &packing)
    if status != GS_OK:
        return status
    # In chunks, best fit counts address ranges that no buffer backs: one buffer is better whenever it fits.
    if (packing.arena > blocks.chunk) if blocks.chunk else (packing.arena >= blocks.max_size):
        return GS_OK
    for i in range(n):
        f.offset[ids[i]] = offset[i]
        # Packing knows rectangles only: memory is whole until its last heir dies.
        f.rest[ids[i]] = f.size[ids[i]]
        f.trimmed[ids[i]] = 0
    arena.peak = arena.whole_peak
    blocks.max_size = packing.arena
    blocks.n_chunks = 1
    method[0] = OFFSETS_PACKED + packing.method
    return GS_OK


cdef int choose_offsets(gs_flow *f, int32_t n_backends, gs_blocks *blocks, gs_arena *arenas, int32_t *methods) noexcept nogil:
    """Pack every arena that best fit left above its bound."""
    cdef int64_t *size
    cdef int32_t *slim
    cdef int32_t b
    cdef int status = GS_OK
    cdef bint packed = False
    for b in range(n_backends):
        methods[b] = OFFSETS_BEST_FIT
        packed |= blocks[b].max_size > arenas[b].peak
    if not packed:
        return GS_OK
    size = <int64_t *>malloc(max(f.n, 1) * (2 * sizeof(int64_t) + 3 * sizeof(int32_t)))
    if size == NULL:
        return GS_NO_HOST_MEMORY
    slim = <int32_t *>(size + 2 * f.n)
    for b in range(n_backends):
        if status == GS_OK and blocks[b].max_size > arenas[b].peak:
            status = pack_arena(f, b, &blocks[b], &arenas[b], slim, slim + f.n, slim + 2 * f.n, size, size + f.n,
                                &methods[b])
    free(size)
    flow_follow_owners(f)
    return status
