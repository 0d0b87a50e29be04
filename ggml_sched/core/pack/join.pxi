# Packing, part 7: buffers joined to solid blocks.
#
# Owns gs_join, a smaller problem whose packings are packings of the first.  Two joins, neither of which wastes
# a byte:
#   chain   one buffer ends where another of its size begins: the second takes over the place of the first;
#   stack   two with the same lifetime: one lies on the other.
# All chains come before any stack, and long stacks before short ones: equal sizes are stronger evidence of
# belonging together than equal lifetimes, and those are the stronger the longer they are.
# Invariants: no section's live bytes change, so neither does the bound; that a joined problem has no packing
# proves nothing about the first.  n log n: no look-up passes more than 2 PACK_LOOK buffers.

cdef enum:
    PACK_LOOK = 64

ctypedef struct gs_join:
    gs_pack *p                  # the first problem
    gs_pack m                   # the joined one; m.id is the buffer of p that stands for the block
    int32_t n_gone
    int32_t *gone               # [n] joined buffers in order
    int32_t *into               # [n] the buffer it was joined to; -1: it stands for itself
    int64_t *above              # [n] by how much it lies higher
    int32_t *stop               # [n] of the block; 0 when gone
    int64_t *size               # [n] of the block; 0 when gone
    int32_t *ends               # [n_sections + 1] the blocks that end there, a doubly linked list
    int32_t *next               # [n]
    int32_t *prior              # [n]
    void *memory


cdef void join_free(gs_join *g) noexcept nogil:
    pack_free(&g.m)
    free(g.memory)
    memset(g, 0, sizeof(gs_join))


cdef inline void join_link(gs_join *g, int32_t b) noexcept nogil:
    cdef int32_t head = g.ends[g.stop[b]]
    g.next[b] = head
    g.prior[b] = -1
    if head >= 0:
        g.prior[head] = b
    g.ends[g.stop[b]] = b


cdef inline void join_unlink(gs_join *g, int32_t b) noexcept nogil:
    if g.prior[b] >= 0:
        g.next[g.prior[b]] = g.next[b]
    else:
        g.ends[g.stop[b]] = g.next[b]
    if g.next[b] >= 0:
        g.prior[g.next[b]] = g.prior[b]


cdef void join_pair(gs_join *g, int32_t a, int32_t b, int64_t above) noexcept nogil:
    """Block b becomes part of block a, which begins no later: above it, or after it."""
    join_unlink(g, a)
    join_unlink(g, b)
    if above > 0:
        g.size[a] += g.size[b]
    g.stop[a] = g.stop[b]
    join_link(g, a)
    g.into[b] = a
    g.above[b] = above
    g.size[b] = 0
    g.gone[g.n_gone] = b
    g.n_gone += 1


cdef int32_t join_chain(gs_join *g, int32_t a) noexcept nogil:
    """Chain block a to what follows and what precedes it; the first of the chain."""
    cdef gs_pack *p = g.p
    cdef int32_t b, last
    cdef int looks
    cdef bint found = True
    while found:
        found = False
        if g.stop[a] < p.n_sections:
            last = min(p.born[g.stop[a] + 1], p.born[g.stop[a]] + PACK_LOOK)
            for b in range(p.born[g.stop[a]], last):
                if g.size[b] == g.size[a]:
                    join_pair(g, a, b, 0)
                    found = True
                    break
    found = True
    while found:
        found = False
        b = g.ends[p.start[a]]
        looks = 0
        while b >= 0 and looks < PACK_LOOK:
            if g.size[b] == g.size[a]:
                join_pair(g, b, a, 0)
                a = b
                found = True
                break
            b = g.next[b]
            looks += 1
    return a


cdef inline int32_t join_equal(gs_join *g, int32_t a) noexcept nogil:
    """A block with the lifetime of block a, -1 when there is none."""
    cdef gs_pack *p = g.p
    cdef int32_t first = max(p.born[p.start[a]], a - PACK_LOOK)
    cdef int32_t last = min(p.born[p.start[a] + 1], a + PACK_LOOK)
    cdef int32_t b
    for b in range(first, last):
        if g.size[b] > 0 and g.stop[b] == g.stop[a] and b != a:
            return b
    return -1


cdef void join_stacks(gs_join *g, int32_t shortest) noexcept nogil:
    """Stack what lives for at least so many sections; what comes of it is chained and stacked in its turn."""
    cdef int32_t i, a, b
    for i in range(g.p.n):
        if g.size[i] > 0 and g.stop[i] - g.p.start[i] >= shortest:
            a = i
            b = join_equal(g, a)
            while b >= 0:
                join_pair(g, a, b, g.size[a])
                a = join_chain(g, a)
                b = join_equal(g, a)


cdef int join_prepare(gs_join *g, gs_pack *p) noexcept nogil:
    """Join what can be joined of p, which must outlive g, and make the smaller problem ready to be searched.

    GS_NO_HOST_MEMORY, or GS_OUT_OF_MEMORY when the result is not worth it: nothing joined, or no carry lists.
    """
    cdef int64_t n = p.n
    cdef char *cursor
    cdef int32_t shortest = p.n_sections
    cdef int32_t i
    cdef int status
    memset(g, 0, sizeof(gs_join))
    g.p = p
    g.memory = malloc(n * (5 * 4 + 2 * 8) + (<int64_t>p.n_sections + 1) * 4 + 8 * 8)
    if g.memory == NULL:
        return GS_NO_HOST_MEMORY
    cursor = <char *>g.memory
    g.size = <int64_t *>pack_take(&cursor, n, 8)
    g.above = <int64_t *>pack_take(&cursor, n, 8)
    g.stop = <int32_t *>pack_take(&cursor, n, 4)
    g.into = <int32_t *>pack_take(&cursor, n, 4)
    g.next = <int32_t *>pack_take(&cursor, n, 4)
    g.prior = <int32_t *>pack_take(&cursor, n, 4)
    g.gone = <int32_t *>pack_take(&cursor, n, 4)
    g.ends = <int32_t *>pack_take(&cursor, p.n_sections + 1, 4)
    memcpy(g.size, p.size, n * sizeof(int64_t))
    memcpy(g.stop, p.stop, n * sizeof(int32_t))
    for i in range(p.n_sections + 1):
        g.ends[i] = -1
    for i in range(p.n):
        g.into[i] = -1
        join_link(g, i)
    for i in range(p.n):
        if g.size[i] > 0:
            join_chain(g, i)
    while shortest > 0:
        join_stacks(g, shortest)
        shortest >>= 1
    if g.n_gone == 0:
        return GS_OUT_OF_MEMORY
    status = pack_prepare(&g.m, p.n, p.n_sections, p.start, g.stop, g.size)
    if status == GS_OK:
        pack_find_peaks(&g.m)
        status = pack_fill_carry(&g.m)
    return status


cdef int64_t join_expand(gs_join *g) noexcept nogil:
    """The packing in m.offset as one in p.offset; its arena."""
    cdef gs_pack *p = g.p
    cdef int64_t arena = 0
    cdef int32_t i, b
    for i in range(g.m.n):
        p.offset[g.m.id[i]] = g.m.offset[i]
        arena = max(arena, g.m.offset[i] + g.m.size[i])
    # What a buffer was joined to was joined, if ever, later.
    for i in range(g.n_gone - 1, -1, -1):
        b = g.gone[i]
        p.offset[b] = p.offset[g.into[b]] + g.above[b]
    return arena
