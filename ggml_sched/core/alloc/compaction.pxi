# Compaction: moving the offsets of a replayed, smaller walk to the low end of each arena.
#
# A reservation chooses offsets for the tensors of a large batch.  The smaller tensors of a small batch at the same
# offsets touch pages scattered over the whole arena.  So owners of memory move down, the lowest first, each to the end
# of the highest memory below it that is alive at the same time.  Invariant: of two owners that are alive at the same
# time the lower one stays the lower one, so that they do not overlap; if no size has grown, no offset rises.
# Time is linear in owners, plus a radix sort; long lifetimes are processed in blocks of positions.

cdef enum:
    SKYLINE_BITS = 6
    SKYLINE_BLOCK = 64          # positions of the walk in one block


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


cdef int64_t keys_by_offset(const gs_plan *p, uint64_t *keys) noexcept nogil:
    """Write a key for each owner of memory, sorted by offset, the id in its low bits; returns the number of keys."""
    cdef int64_t n = 0
    cdef int32_t i
    cdef int shift = 0, n_bytes = 0
    cdef int64_t bits = 0
    for i in range(p.n):
        if p.root[i] < 0 and p.arena_of[i] >= 0 and p.birth[i] >= 0 and p.size[i]:
            keys[n] = <uint64_t>i
            bits |= p.offset[i]
            n += 1
    while bits and not (bits >> shift) & 1:
        shift += 1
    bits >>= shift
    while n_bytes < 8 and bits >> (8 * n_bytes):
        n_bytes += 1
    if p.n > PACK_INDEX_MASK or n_bytes > 5:
        return 0            # the offsets do not fit in keys: no owner moves
    for i in range(n):
        keys[i] |= (<uint64_t>p.offset[keys[i]] >> shift) << PACK_INDEX_BITS
    if n:
        pack_sort_keys(keys, n, PACK_INDEX_BITS, n_bytes)
    return n


cdef int compact_offsets(gs_plan *p, int32_t n_arenas, const gs_arena_result *arenas) noexcept nogil:
    """Move the offsets of all owners in the arenas down, by the plan's sizes; each owner stays in its chunk.

    Lifetimes, freed tails and in-place reuse do not change.  GS_NO_HOST_MEMORY.
    """
    cdef int64_t n_blocks = (p.n_seq >> SKYLINE_BITS) + 1
    cdef int64_t n_heights = n_blocks * (SKYLINE_BLOCK + 2)
    cdef uint64_t *keys = <uint64_t *>malloc((2 * <int64_t>p.n + 1) * sizeof(uint64_t))
    cdef int64_t *heights = <int64_t *>calloc(max(n_arenas, 1) * n_heights, sizeof(int64_t))
    cdef gs_skyline s
    cdef int64_t at, n, k
    cdef int32_t id, last
    if keys == NULL or heights == NULL:
        free(keys)
        free(heights)
        return GS_NO_HOST_MEMORY
    n = keys_by_offset(p, keys)
    for k in range(n):
        id = <int32_t>(keys[k] & PACK_INDEX_MASK)
        s.height = heights + p.arena_of[id] * n_heights
        s.cover = s.height + n_blocks * SKYLINE_BLOCK
        s.most = s.cover + n_blocks
        at = arenas[p.arena_of[id]].stride
        at = p.offset[id] - p.offset[id] % at if at else 0
        at = max(at, skyline_over(&s, p.birth[id], p.death[id]))
        p.offset[id] = at
        last = p.trimmed[id] if p.rest[id] < p.size[id] else p.death[id]
        skyline_raise(&s, p.birth[id], last, at + p.size[id])
        skyline_raise(&s, last + 1, p.death[id], at + p.rest[id])
    free(keys)
    free(heights)
    plan_follow_owners(p)
    return GS_OK
