# Compaction: moving the offsets of a replayed, smaller walk to the low end of each arena.
#
# A reservation chooses offsets for the tensors of a large batch.  The smaller tensors of a small batch at the same
# offsets touch pages scattered over the whole arena.  So each arena is packed anew for the smaller sizes, by the
# methods of packing that take about linear time.  Where the result is larger than the lower bound of the arena, and
# where an arena has several chunks, owners of memory sink instead: they move down, the lowest first, each to the end of
# the highest memory below it that is alive at the same time.  An arena keeps the smaller result of both.
# Invariant: owners that are alive at the same time do not overlap, and no arena is larger than it was.  Sinking keeps
# their order: of two such owners the lower one stays the lower one, and no offset rises if no size has grown.
# Time is linear in owners, plus radix sorts; long lifetimes are processed in blocks of positions.

cdef enum:
    SKYLINE_BITS = 6
    SKYLINE_BLOCK = 64          # positions of the walk in one block
    COMPACT_MAX_CARRIED = 48    # packing is quick if at most this many owners are alive when one is born, on average


ctypedef struct gs_skyline:     # of one arena: the end of the allocated memory at each position of the walk
    int64_t *height             # [n_positions] bytes
    int64_t *cover              # [n_blocks] all heights of the block are at least this; raised instead of each height
    int64_t *most               # [n_blocks] the largest height in a block


cdef int64_t skyline_over(const gs_skyline *s, int32_t first, int32_t last) noexcept nogil:
    """The largest height at positions first .. last."""
    cdef int64_t found = 0
    cdef int32_t k = first
    while k <= last:
        if k % SKYLINE_BLOCK == 0 and last - k >= SKYLINE_BLOCK - 1:
            found = max(found, s.most[k >> SKYLINE_BITS])
            k += SKYLINE_BLOCK
        else:
            found = max(found, max(s.height[k], s.cover[k >> SKYLINE_BITS]))
            k += 1
    return found


cdef void skyline_raise(gs_skyline *s, int32_t first, int32_t last, int64_t top) noexcept nogil:
    """Set the heights at positions first .. last, all at most `top`, to `top`."""
    cdef int32_t k = first
    while k <= last:
        s.most[k >> SKYLINE_BITS] = max(s.most[k >> SKYLINE_BITS], top)
        if k % SKYLINE_BLOCK == 0 and last - k >= SKYLINE_BLOCK - 1:
            s.cover[k >> SKYLINE_BITS] = top
            k += SKYLINE_BLOCK
        else:
            s.height[k] = top
            k += 1


ctypedef struct gs_owners:      # the owners of memory in one arena
    int32_t n
    bint some_trimmed           # some owner has a freed tail
    int32_t *id
    int32_t *birth
    int32_t *stop               # the position after its death
    int64_t *size
    uint64_t *keys              # [2 n + 1] scratch of sorting


cdef void list_owners(const gs_plan *p, int32_t arena, gs_owners *o) noexcept nogil:
    """List the owners of memory in an arena."""
    cdef int32_t i
    o.n = 0
    o.some_trimmed = False
    for i in range(p.n):
        if p.root[i] < 0 and p.arena_of[i] == arena and p.birth[i] >= 0 and p.size[i]:
            o.id[o.n] = i
            o.birth[o.n] = p.birth[i]
            o.stop[o.n] = p.death[i] + 1
            o.size[o.n] = p.size[i]
            o.some_trimmed |= p.rest[i] < p.size[i]
            o.n += 1


cdef bint sort_by_offset(const gs_plan *p, gs_owners *o) noexcept nogil:
    """Fill o.keys, sorted by offset, with the owner's id in the low bits; False if an offset is too large for a key."""
    cdef int32_t i
    cdef int shift = 0, n_bytes = 0
    cdef int64_t bits = 0
    for i in range(o.n):
        bits |= p.offset[o.id[i]]
    while bits and not (bits >> shift) & 1:
        shift += 1
    bits >>= shift
    while n_bytes < 8 and bits >> (8 * n_bytes):
        n_bytes += 1
    if p.n > PACK_INDEX_MASK or n_bytes > 5:
        return False
    for i in range(o.n):
        o.keys[i] = <uint64_t>o.id[i] | <uint64_t>(p.offset[o.id[i]] >> shift) << PACK_INDEX_BITS
    pack_sort_keys(o.keys, o.n, PACK_INDEX_BITS, n_bytes)
    return True


cdef int64_t sink_owners(gs_plan *p, gs_owners *o, int64_t stride, gs_skyline *s) noexcept nogil:
    """Move the offsets of owners down, each in its chunk (`stride` 0: there is one).  Returns the highest owner's end.

    No owner moves if offsets are too large to be sorted; the result is then INT64_MAX.
    """
    cdef int64_t at, end = 0
    cdef int32_t k, id, last
    if not sort_by_offset(p, o):
        return INT64_MAX
    for k in range(o.n):
        id = <int32_t>(o.keys[k] & PACK_INDEX_MASK)
        at = p.offset[id] - p.offset[id] % stride if stride else 0
        at = max(at, skyline_over(s, p.birth[id], p.death[id]))
        p.offset[id] = at
        end = max(end, at + p.size[id])
        last = p.trimmed[id] if p.rest[id] < p.size[id] else p.death[id]
        skyline_raise(s, p.birth[id], last, at + p.size[id])
        skyline_raise(s, last + 1, p.death[id], at + p.rest[id])
    return end


cdef int repack(const gs_plan *p, const gs_owners *o, gs_pack *pack, gs_pack_result *result) noexcept nogil:
    """Pack an arena in about linear time; the offsets are in pack.best, and the caller frees `pack`.

    If packing would take long, or sums of sizes overflow, nothing is packed and result.arena is INT64_MAX.
    The only error is GS_NO_HOST_MEMORY.
    """
    cdef int status = pack_prepare(pack, o.n, p.n_seq + 1, o.birth, o.stop, o.size)
    memset(result, 0, sizeof(gs_pack_result))
    if status == GS_OK and pack.n_carried <= COMPACT_MAX_CARRIED * <int64_t>pack.n:
        # With this capacity the work ends with the first packing, without a search.
        status = pack_prepared(pack, INT64_MAX, 0, result)
    else:
        result.arena = INT64_MAX
    return GS_NO_HOST_MEMORY if status == GS_NO_HOST_MEMORY else GS_OK


cdef int compact_arena(gs_plan *p, gs_owners *o, gs_skyline *s) noexcept nogil:
    """Choose new offsets for the owners of one arena of one chunk.  The only error is GS_NO_HOST_MEMORY."""
    cdef gs_pack pack
    cdef gs_pack_result result
    cdef int64_t end = INT64_MAX
    cdef int32_t i
    cdef int status = repack(p, o, &pack, &result)
    # Packing does not use freed tails, so that an arena which has some may become smaller by sinking.
    if status == GS_OK and (o.some_trimmed or not result.optimal):
        end = sink_owners(p, o, 0, s)
    if status == GS_OK and result.arena < end:
        for i in range(pack.n):
            p.offset[o.id[pack.id[i]]] = pack.best[i]
    pack_free(&pack)
    return status


cdef int compact_offsets(gs_plan *p, int32_t n_arenas, const gs_arena_result *arenas, bint in_order) noexcept nogil:
    """Move the offsets of all owners to the low end of their arenas, by the plan's sizes; each stays in its chunk.

    Lifetimes, freed tails and in-place reuse do not change.  `in_order`: no arena is packed anew, owners only sink.
    The only error is GS_NO_HOST_MEMORY.
    """
    cdef int64_t n_blocks = (p.n_seq >> SKYLINE_BITS) + 1
    cdef int64_t n_heights = n_blocks * (SKYLINE_BLOCK + 2)
    cdef int64_t n = p.n
    cdef gs_owners o
    cdef gs_skyline s
    cdef int32_t i
    cdef int status = GS_OK
    s.height = <int64_t *>malloc(n_heights * sizeof(int64_t) + (2 * n + 1) * sizeof(uint64_t)
                                 + n * (sizeof(int64_t) + 3 * sizeof(int32_t)))
    if s.height == NULL:
        return GS_NO_HOST_MEMORY
    s.cover = s.height + n_blocks * SKYLINE_BLOCK
    s.most = s.cover + n_blocks
    o.keys = <uint64_t *>(s.most + n_blocks)
    o.size = <int64_t *>(o.keys + 2 * n + 1)
    o.id = <int32_t *>(o.size + n)
    o.birth = o.id + n
    o.stop = o.birth + n
    for i in range(n_arenas):
        list_owners(p, i, &o)
        if status == GS_OK and o.n:
            memset(s.height, 0, n_heights * sizeof(int64_t))
            if in_order or arenas[i].stride:
                sink_owners(p, &o, arenas[i].stride, &s)
            else:
                status = compact_arena(p, &o, &s)
    free(s.height)
    plan_follow_owners(p)
    return status
