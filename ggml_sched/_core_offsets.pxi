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


cdef int pack_arena(gs_flow *f, const int32_t *owner, gs_blocks *blocks, gs_arena *arena, int32_t *method) noexcept nogil:
    """Pack one backend's arena; `owner` lists the ids with memory in it, in order of birth."""
    cdef gs_pack p
    cdef gs_packing packing
    cdef char *unused
    cdef int32_t i, id
    cdef int status = pack_expect(&p, arena.n_owners, arena.section + arena.waiting, 0, &unused)
    if status == GS_OK:
        p.n_sections = arena.section + arena.waiting
        for i in range(p.n):
            id = p.id[i] = owner[i]
            p.size[i] = f.size[id]
            p.start[i] = f.start[id]
            p.stop[i] = f.stop[id]
            p.life[i] = f.death[id] + 1 - f.birth[id]
        status = pack_measure(&p)
    if status == GS_OK:
        status = pack_prepared(&p, PACK_NO_CAPACITY, OFFSETS_SEARCH_STEPS, &packing)
    # In chunks, best fit counts address ranges that no buffer backs: one buffer is better whenever it fits.
    if status == GS_OK and (packing.arena <= blocks.chunk if blocks.chunk else packing.arena < blocks.max_size):
        for i in range(p.n):
            id = p.id[i]
            f.offset[id] = p.best[i]
            # Packing knows rectangles only: memory is whole until its last heir dies.
            f.rest[id] = f.size[id]
            f.trimmed[id] = 0
        arena.peak = arena.whole_peak
        blocks.max_size = packing.arena
        blocks.n_chunks = 1
        method[0] = OFFSETS_PACKED + packing.method
    pack_free(&p)
    return status


cdef int choose_offsets(gs_flow *f, int32_t n_backends, gs_blocks *blocks, gs_arena *arenas, int32_t *methods) noexcept nogil:
    """Pack every arena that best fit left above its bound."""
    cdef int32_t *owner
    cdef int32_t *end
    cdef int32_t b, i, n = 0
    cdef int status = GS_OK
    cdef bint packed = False
    for b in range(n_backends):
        methods[b] = OFFSETS_BEST_FIT
        packed |= blocks[b].max_size > arenas[b].peak
    if not packed:
        return GS_OK
    # The owners of each arena, one arena after the other.
    owner = <int32_t *>malloc((f.n_owners + n_backends) * sizeof(int32_t))
    if owner == NULL:
        return GS_NO_HOST_MEMORY
    end = owner + f.n_owners
    for b in range(n_backends):
        end[b] = n
        n += arenas[b].n_owners
    for i in range(f.n_owners):
        if f.size[f.owner[i]]:
            b = f.home[f.owner[i]]
            owner[end[b]] = f.owner[i]
            end[b] += 1
    for b in range(n_backends):
        if status == GS_OK and blocks[b].max_size > arenas[b].peak:
            status = pack_arena(f, owner + end[b] - arenas[b].n_owners, &blocks[b], &arenas[b], &methods[b])
    for i in range(f.n_owners):
        if f.size[f.owner[i]] == 0 and methods[f.home[f.owner[i]]] != OFFSETS_BEST_FIT:
            f.offset[f.owner[i]] = 0        # where it was may be outside the arena now
    free(owner)
    flow_follow_owners(f)
    return status
