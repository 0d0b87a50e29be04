# Packing, part 2: long lives from the bottom, short ones from the top.
#
# Owns pack_two_ends, the first attempt at a packing and the only one that most graphs need: one pass in order
# of birth, as an online allocator makes it, but with a ceiling at the bound and knowing who will live long.
# What stays for half a layer collects at the bottom, what comes and goes fills the rest from above, and the two
# do not cut each other's free memory to pieces.  No lists of neighbours, no sorting: linear.
# Invariant: gaps lie in order of offset and do not touch; what fits is valid, and at the bound.

cdef enum:
    PACK_MAX_GAPS = 256         # more of them make a pass slow, and success unlikely

ctypedef struct gs_gaps:
    gs_block at[PACK_MAX_GAPS]
    int32_t n


cdef int64_t gaps_take_low(gs_gaps *g, int64_t size) noexcept nogil:
    """The low end of the lowest gap that `size` bytes fit; -1 where none does."""
    cdef int32_t i
    cdef int64_t offset
    for i in range(g.n):
        if g.at[i].size >= size:
            offset = g.at[i].offset
            g.at[i].offset += size
            g.at[i].size -= size
            if g.at[i].size == 0:
                g.n -= 1
                memmove(g.at + i, g.at + i + 1, (g.n - i) * sizeof(gs_block))
            return offset
    return -1


cdef int64_t gaps_take_high(gs_gaps *g, int64_t size) noexcept nogil:
    """The high end of the highest gap that `size` bytes fit; -1 where none does."""
    cdef int32_t i
    cdef int64_t offset
    for i in range(g.n - 1, -1, -1):
        if g.at[i].size >= size:
            g.at[i].size -= size
            offset = g.at[i].offset + g.at[i].size
            if g.at[i].size == 0:
                g.n -= 1
                memmove(g.at + i, g.at + i + 1, (g.n - i) * sizeof(gs_block))
            return offset
    return -1


cdef bint gaps_give(gs_gaps *g, int64_t offset, int64_t size) noexcept nogil:
    """Return a range, joined with the gaps that it touches; False when there is no room for another gap."""
    cdef int32_t i = 0
    while i < g.n and g.at[i].offset < offset:
        i += 1
    if i > 0 and g.at[i - 1].offset + g.at[i - 1].size == offset:
        g.at[i - 1].size += size
        if i < g.n and g.at[i].offset == offset + size:
            g.at[i - 1].size += g.at[i].size
            g.n -= 1
            memmove(g.at + i, g.at + i + 1, (g.n - i) * sizeof(gs_block))
        return True
    if i < g.n and g.at[i].offset == offset + size:
        g.at[i].offset = offset
        g.at[i].size += size
        return True
    if g.n == PACK_MAX_GAPS:
        return False
    memmove(g.at + i + 1, g.at + i, (g.n - i) * sizeof(gs_block))
    g.at[i].offset = offset
    g.at[i].size = size
    g.n += 1
    return True


cdef bint pack_two_ends(gs_pack *p, int32_t long_life) noexcept nogil:
    """Pack into exactly the bound; lives of more than long_life times are long.  False where that fails."""
    cdef gs_gaps gaps
    # Who dies as each section begins: lists through `next`, in scratch that is not in use yet.
    cdef int32_t *dies = <int32_t *>p.keys
    cdef int32_t *next = dies + p.n_sections + 1
    cdef int64_t *offset = p.offset
    cdef int32_t b, d, k = 0
    memset(dies, 0xff, (p.n_sections + 1) * sizeof(int32_t))
    gaps.n = 1
    gaps.at[0].offset = 0
    gaps.at[0].size = p.bound
    for b in range(p.n):
        while k < p.start[b]:
            k += 1
            d = dies[k]
            while d >= 0:
                if not gaps_give(&gaps, offset[d], p.size[d]):
                    return False
                d = next[d]
        offset[b] = gaps_take_low(&gaps, p.size[b]) if p.life[b] > long_life else gaps_take_high(&gaps, p.size[b])
        if offset[b] < 0:
            return False
        next[b] = dies[p.stop[b]]
        dies[p.stop[b]] = b
    return True
