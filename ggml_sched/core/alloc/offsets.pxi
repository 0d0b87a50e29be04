# Offsets of each arena, chosen once all its lifetimes are known.
#
# The walk of gallocr_run gives lifetimes and in-place reuse.  Packing then chooses all offsets of an arena together.
# Packing treats each memory as a rectangle (size by lifetime) and does not use freed tails: if the packed arena exceeds
# the live bytes, best fit, which uses them, is tried too, and the smaller arena is used.  An arena in chunks has
# offsets from the walk already; it is packed into one buffer if that is possible.

cdef int pack_arena(gs_walk *f, const int32_t *owner, gs_blocks *blocks, gs_arena *arena,
                    int32_t *method) noexcept nogil:
    """Choose the offsets of one backend's arena; `owner` lists the ids that own memory in it, in order of birth."""
    cdef gs_pack p
    cdef gs_pack_result packing
    cdef char *unused
    cdef int32_t i, id
    cdef bint taken = False
    cdef int status = pack_expect(&p, arena.n_owners, arena.section + arena.waiting, 0, &unused)
    if status == GS_OK:
        p.n_sections = arena.section + arena.waiting
        for i in range(p.n):
            id = p.id[i] = owner[i]
            p.size[i] = f.p.size[id]
            p.start[i] = f.start[id]
            p.stop[i] = f.stop[id]
            p.birth[i] = f.p.birth[id]
            p.life[i] = f.p.death[id] + 1 - f.p.birth[id]
        status = pack_measure(&p)
    if status == GS_OK:
        status = pack_prepared(&p, GS_PACK_NO_CAPACITY, GS_PACK_PLANNER_BUDGET, &packing)
    if blocks.chunk:
        # Chunks of an arena have gaps at their ends; one buffer is better whenever the packing fits in a chunk.
        taken = status == GS_OK and packing.arena <= blocks.chunk
    elif status == GS_OK and packing.arena <= arena.peak:
        taken = True
    elif status != GS_NO_HOST_MEMORY:
        # Best fit may reuse freed tails; it also works beyond the limits of packing (GS_OVERFLOW, GS_BAD_ARGUMENT).
        taken = status == GS_OK
        status = fit_arena(f, owner, arena.n_owners, blocks)
        taken = taken and packing.arena < blocks.max_size
    if status == GS_OK and taken:
        for i in range(p.n):
            id = p.id[i]
            f.p.offset[id] = p.best[i]
            f.p.rest[id] = f.p.size[id]         # no tail is freed
            f.p.trimmed[id] = 0
            plan_mark_late(&f.p, id)
        arena.live_bytes = arena.whole_peak
        blocks.max_size = packing.arena
        blocks.n_chunks = 1
        method[0] = GS_METHOD_PACKED + packing.method
    pack_free(&p)
    return status


cdef int fit_arena(gs_walk *f, const int32_t *owner, int32_t n, gs_blocks *blocks) noexcept nogil:
    """Choose the offsets of n owners by best fit, as the walk does: at each position births, freed tails, deaths."""
    cdef int32_t *dies = <int32_t *>malloc((2 * <int64_t>f.p.n_seq + 2 + 2 * <int64_t>f.p.n) * sizeof(int32_t))
    cdef int32_t *trims = dies + f.p.n_seq + 1
    cdef int32_t *next_death = trims + f.p.n_seq + 1
    cdef int32_t *next_trim = next_death + f.p.n
    cdef int32_t i, k = 0, now, id
    cdef int status
    if dies == NULL:
        return GS_NO_HOST_MEMORY
    # Two linked lists for each position, of ids that die there and of ids whose tails are freed there; -1 ends a list.
    memset(dies, 0xff, (2 * <int64_t>f.p.n_seq + 2) * sizeof(int32_t))
    for i in range(n - 1, -1, -1):
        id = owner[i]
        next_death[id] = dies[f.p.death[id]]
        dies[f.p.death[id]] = id
        if f.p.rest[id] < f.p.size[id]:
            next_trim[id] = trims[f.p.trimmed[id]]
            trims[f.p.trimmed[id]] = id
    blocks.max_size = 0
    status = blocks_reset(blocks, INT64_MAX)
    for now in range(f.p.n_seq):
        while status == GS_OK and k < n and f.p.birth[owner[k]] == now:
            status = blocks_take(blocks, f.p.size[owner[k]], &f.p.offset[owner[k]])
            k += 1
        id = trims[now]
        while status == GS_OK and id >= 0:
            status = blocks_give(blocks, f.p.offset[id] + f.p.rest[id], f.p.size[id] - f.p.rest[id])
            id = next_trim[id]
        id = dies[now]
        while status == GS_OK and id >= 0:
            status = blocks_give(blocks, f.p.offset[id], f.p.rest[id])
            id = next_death[id]
    free(dies)
    return status


cdef int choose_offsets(gs_walk *f, int32_t n_backends, gs_blocks *blocks, gs_arena *arenas,
                        int32_t *methods) noexcept nogil:
    """Choose the offsets of all arenas."""
    cdef int32_t *owner
    cdef int32_t *end
    cdef int32_t b, i, n = 0
    cdef int status = GS_OK
    # `owner` gets the owners of memory, one arena after the other; end[b]: where the next owner in arena b goes.
    owner = <int32_t *>malloc((f.n_owners + n_backends) * sizeof(int32_t))
    if owner == NULL:
        return GS_NO_HOST_MEMORY
    end = owner + f.n_owners
    for b in range(n_backends):
        methods[b] = GS_METHOD_BEST_FIT
        end[b] = n
        n += arenas[b].n_owners
    for i in range(f.n_owners):
        if f.p.size[f.owner[i]]:
            b = f.p.arena_of[f.owner[i]]
            owner[end[b]] = f.owner[i]
            end[b] += 1
    for b in range(n_backends):
        # An arena in chunks that is as small as its lower bound keeps the walk's offsets.
        if status == GS_OK and (not blocks[b].chunk or blocks[b].max_size > arenas[b].peak):
            status = pack_arena(f, owner + end[b] - arenas[b].n_owners, &blocks[b], &arenas[b], &methods[b])
    for i in range(f.n_owners):
        b = f.p.arena_of[f.owner[i]]
        if f.p.size[f.owner[i]] == 0 and blocks[b].n_chunks <= 1:
            f.p.offset[f.owner[i]] = 0        # an arena in several chunks keeps the walk's offset, inside a chunk
    free(owner)
    plan_follow_owners(&f.p)
    return status
