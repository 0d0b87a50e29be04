# Packing long lifetimes from the bottom of the arena, and short ones from its top.
#
# pack_two_ends is tried first, and is enough for most graphs: one pass in order of birth, as an online allocator makes
# it, but in an arena of exactly the lower bound, and with known lifetimes.  Long-lived buffers are placed from the
# bottom, short-lived ones from the top, so that neither kind fragments the memory of the other.  For graphs with many
# large short-lived buffers, such as the states of recurrent layers, another rule works: each buffer goes into the
# smallest gap, long-lived and large ones beside the neighbour that lives longer: the gap grows when the other neighbour
# dies.
# Time is linear: no lists of overlaps, no sorting.
# Invariant: gaps are in order of offset and do not touch; a packing that succeeds is valid and has the bound's size.

cdef enum:
    PACK_MAX_GAPS = 256         # with more gaps a pass is slow, and unlikely to succeed

ctypedef struct gs_gap:
    int64_t offset
    int64_t size
    int32_t below               # the buffer that ends where the gap begins; -1: the arena begins there
    int32_t above               # the buffer that begins where the gap ends; -1: the arena ends there

ctypedef struct gs_gaps:
    gs_gap at[PACK_MAX_GAPS]
    int32_t n
    int32_t *below              # [n] for each placed buffer, the one with the next lower offset, or -1
    int32_t *above              # [n] for each placed buffer, the one with the next higher offset, or -1


cdef inline int64_t gaps_take(gs_gaps *g, int32_t i, int32_t b, int64_t size, bint low) noexcept nogil:
    """Place buffer b at the low or the high end of gap i, which is large enough; returns b's offset."""
    cdef gs_gap *gap = &g.at[i]
    cdef int64_t offset = gap.offset
    g.below[b] = gap.below
    g.above[b] = gap.above
    if gap.below >= 0:
        g.above[gap.below] = b
    if gap.above >= 0:
        g.below[gap.above] = b
    gap.size -= size
    if low:
        gap.offset += size
        gap.below = b
    else:
        offset += gap.size
        gap.above = b
    if gap.size == 0:
        g.n -= 1
        memmove(gap, gap + 1, (g.n - i) * sizeof(gs_gap))
    return offset


cdef bint gaps_give(gs_gaps *g, int32_t b, int64_t offset, int64_t size) noexcept nogil:
    """Remove buffer b, and merge its memory with the gaps beside it; False if more than PACK_MAX_GAPS gaps result."""
    cdef int32_t below = g.below[b]
    cdef int32_t above = g.above[b]
    cdef int32_t i = 0
    if below >= 0:
        g.above[below] = above
    if above >= 0:
        g.below[above] = below
    while i < g.n and g.at[i].offset < offset:
        i += 1
    if i > 0 and g.at[i - 1].above == b:
        g.at[i - 1].size += size
        g.at[i - 1].above = above
        if i < g.n and g.at[i].below == b:
            g.at[i - 1].size += g.at[i].size
            g.n -= 1
            memmove(g.at + i, g.at + i + 1, (g.n - i) * sizeof(gs_gap))
        return True
    if i < g.n and g.at[i].below == b:
        g.at[i].offset = offset
        g.at[i].size += size
        g.at[i].below = below
        return True
    if g.n == PACK_MAX_GAPS:
        return False
    memmove(g.at + i + 1, g.at + i, (g.n - i) * sizeof(gs_gap))
    g.at[i].offset = offset
    g.at[i].size = size
    g.at[i].below = below
    g.at[i].above = above
    g.n += 1
    return True


cdef inline int32_t gaps_lowest(const gs_gaps *g, int64_t size) noexcept nogil:
    """The lowest gap into which `size` bytes fit; -1 when there is none."""
    cdef int32_t i
    for i in range(g.n):
        if g.at[i].size >= size:
            return i
    return -1


cdef inline int32_t gaps_highest(const gs_gaps *g, int64_t size) noexcept nogil:
    """The highest gap into which `size` bytes fit; -1 when there is none."""
    cdef int32_t i = g.n - 1
    while i >= 0 and g.at[i].size < size:
        i -= 1
    return i


cdef inline int32_t gaps_smallest(const gs_gaps *g, int64_t size, bint low) noexcept nogil:
    """The smallest gap into which `size` bytes fit, on a tie the lowest if `low`, else the highest; -1: none."""
    cdef int32_t i, found = -1
    for i in range(g.n):
        if g.at[i].size >= size and (found < 0 or g.at[i].size < g.at[found].size
                                     or g.at[i].size == g.at[found].size and not low):
            found = i
    return found


cdef inline bint gaps_lower_stays(const gs_gap *gap, const int32_t *stop) noexcept nogil:
    """Whether the neighbour below a gap lives at least as long as the one above; an end of the arena lives for ever."""
    return gap.below < 0 or gap.above >= 0 and stop[gap.below] >= stop[gap.above]


cdef bint pack_two_ends(gs_pack *p, int32_t long_life, int64_t large) noexcept nogil:
    """Pack into an arena of exactly p.bound bytes; False when that fails.

    Buffers with a life of more than long_life times are long-lived.  With `large` > 0, so are those of at least `large`
    bytes; every buffer then goes into the smallest gap, long-lived ones beside the neighbour that lives longer.
    """
    cdef gs_gaps gaps
    # `dies`: the first buffer that dies as each section begins; `next` links the others.  Both are in p.keys.
    cdef int32_t *dies = <int32_t *>p.keys
    cdef int32_t *next = dies + p.n_sections + 1
    cdef int64_t *offset = p.offset
    cdef int64_t size
    cdef int32_t b, d, i, k = 0
    cdef bint low
    gaps.below = next + p.n
    gaps.above = gaps.below + p.n
    memset(dies, 0xff, (p.n_sections + 1) * sizeof(int32_t))
    gaps.n = 1
    gaps.at[0].offset = 0
    gaps.at[0].size = p.bound
    gaps.at[0].below = gaps.at[0].above = -1
    for b in range(p.n):
        while k < p.start[b]:
            k += 1
            d = dies[k]
            while d >= 0:
                if not gaps_give(&gaps, d, offset[d], p.size[d]):
                    return False
                d = next[d]
        size = p.size[b]
        low = p.life[b] > long_life
        if large:
            low = low or size >= large
            i = gaps_smallest(&gaps, size, low)
            low = low and i >= 0 and gaps_lower_stays(&gaps.at[i], p.stop)
        elif low:
            i = gaps_lowest(&gaps, size)
        else:
            i = gaps_highest(&gaps, size)
        if i < 0:
            return False
        offset[b] = gaps_take(&gaps, i, b, size, low)
        next[b] = dies[p.stop[b]]
        dies[p.stop[b]] = b
    return True
