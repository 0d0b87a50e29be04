# Joining buffers to larger blocks, which gives a smaller problem.
#
# A packing of the smaller problem (gs_join) is also a packing of the original one.  There are two ways to join, neither
# of which wastes a byte:
#   chain   a buffer dies when another of its size is born: the second gets the offset of the first;
#   stack   two buffers have the same lifetime: one is directly above the other.
# All chains are made before any stack, and long-lived stacks before short-lived ones: equal sizes are stronger evidence
# of belonging together than equal lifetimes, and long equal lifetimes are stronger evidence than short ones.
# Buffers may match by chance, and after one wrong join there may be no packing.  So a seed selects one of many ways to
# join: seed 0 joins all that match.  Any other seed leaves out some joins at random, doubtful ones more often, and
# takes a random one of several that match; odd seeds also reverse the time of the joined problem.
# Invariants: no section's live bytes change, so neither does the bound; if the joined problem has no packing, the
# original may still have one.  Time is n log n: no look-up passes more than 2 PACK_LOOK buffers.

cdef enum:
    PACK_LOOK = 64              # the most buffers that a look-up examines; in join_equal, on each side of a block
    # The probability that a join is left out, in 256ths: JOIN_RARE + JOIN_RARER * (seed // 4 % 4), plus up to
    # JOIN_DOUBT where many pairs match, probably by chance.
    JOIN_RARE = 16
    JOIN_RARER = 24
    JOIN_DOUBT = 128

ctypedef struct gs_join:
    gs_pack *p                  # the original problem
    gs_pack m                   # the joined problem; its buffers are blocks; m.id: the buffer of p that represents each
    uint64_t seed               # 0, or the state of a pseudo-random sequence
    int rare                    # least probability, in 256ths, that a join is left out; see JOIN_RARE
    int32_t n_gone              # how many buffers were joined to another
    int32_t *gone               # [n_gone] these buffers, in order of joining
    int32_t *into               # [n] the buffer that buffer i was joined to; -1: i represents its block
    int64_t *above              # [n] bytes from the offset of into[i] to that of i
    int32_t *stop               # [n] one past the last section of the block that i represents
    int64_t *size               # [n] bytes of the block that i represents; 0 when i was joined to another buffer
    int32_t *ends               # [n_sections + 1] a list of the blocks with stop == k: the first of them; -1: none
    int32_t *next               # [n] the block after i in the list that has i; or -1
    int32_t *prior              # [n] the block before i in the list that has i; or -1
    int32_t *n_ends             # [n_sections + 1] how many blocks have stop == k
    int32_t *n_starts           # [n_sections + 1] how many blocks begin at section k
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
    g.n_ends[g.stop[b]] += 1


cdef inline void join_unlink(gs_join *g, int32_t b) noexcept nogil:
    if g.prior[b] >= 0:
        g.next[g.prior[b]] = g.next[b]
    else:
        g.ends[g.stop[b]] = g.next[b]
    if g.next[b] >= 0:
        g.prior[g.next[b]] = g.prior[b]
    g.n_ends[g.stop[b]] -= 1


cdef inline uint64_t join_random(gs_join *g, uint64_t n) noexcept nogil:
    """The next pseudo-random number, below n; n is less than 2**32."""
    g.seed = g.seed * <uint64_t>6364136223846793005 + <uint64_t>1442695040888963407
    return ((g.seed >> 32) * n) >> 32


cdef inline bint join_leaves_out(gs_join *g, int64_t pairs, int64_t extent) noexcept nogil:
    """Whether to leave out a join, at random by the seed.

    `pairs`: how many pairs of blocks could match here; `extent`: bytes or sections in which this pair agrees.  Many
    pairs, or a small extent, mean that the pair probably matches by chance, and make leaving it out more likely.
    """
    return g.seed != 0 and <int64_t>join_random(g, 256) < g.rare + min(pairs * 256 // extent, JOIN_DOUBT)


cdef void join_pair(gs_join *g, int32_t a, int32_t b, int64_t above) noexcept nogil:
    """Make block b a part of block a, which begins no later: `above` bytes above a, or, for 0, after a in time."""
    join_unlink(g, a)
    join_unlink(g, b)
    if above > 0:
        g.size[a] += g.size[b]
    g.stop[a] = g.stop[b]
    join_link(g, a)
    g.n_starts[g.p.start[b]] -= 1
    g.into[b] = a
    g.above[b] = above
    g.size[b] = 0
    g.gone[g.n_gone] = b
    g.n_gone += 1


cdef inline bint join_chains_rather(gs_join *g, int32_t t, int64_t size) noexcept nogil:
    """Whether to chain a block that ends at section t and one that begins there, both of `size` bytes."""
    # If no other block ends or begins there, the second block can take the offset of the first.
    return g.n_ends[t] + g.n_starts[t] == 2 or not join_leaves_out(g, <int64_t>g.n_ends[t] * g.n_starts[t], size)


cdef int32_t join_chain(gs_join *g, int32_t a) noexcept nogil:
    """Chain block a with blocks of its size that follow it, then with those that precede it; returns the first one."""
    cdef gs_pack *p = g.p
    cdef int32_t b, found, last
    cdef int looks, fitting
    while g.stop[a] < p.n_sections:
        found = -1
        fitting = 0
        last = min(p.born[g.stop[a] + 1], p.born[g.stop[a]] + PACK_LOOK)
        for b in range(p.born[g.stop[a]], last):
            if g.size[b] == g.size[a]:
                fitting += 1
                if g.seed == 0 or join_random(g, fitting) == 0:
                    found = b
                if g.seed == 0:
                    break
        if found < 0 or not join_chains_rather(g, g.stop[a], g.size[a]):
            break
        join_pair(g, a, found, 0)
    while True:
        found = -1
        fitting = looks = 0
        b = g.ends[p.start[a]]
        while b >= 0 and looks < PACK_LOOK:
            if g.size[b] == g.size[a]:
                fitting += 1
                if g.seed == 0 or join_random(g, fitting) == 0:
                    found = b
                if g.seed == 0:
                    break
            b = g.next[b]
            looks += 1
        if found < 0 or not join_chains_rather(g, p.start[a], g.size[a]):
            return a
        join_pair(g, found, a, 0)
        a = found


cdef inline bint join_stacks_rather(gs_join *g, int32_t a) noexcept nogil:
    """Whether to stack another block, of equal lifetime, on block a."""
    cdef gs_pack *p = g.p
    cdef int32_t starts = g.n_starts[p.start[a]]
    cdef int32_t ends = g.n_ends[g.stop[a]]
    # If no other blocks begin with these two, and at most one block ends then, the two most likely divide the memory of
    # that block, side by side; likewise if no other blocks end with these two, and at most one begins then.
    if starts == 2 and g.n_ends[p.start[a]] <= 1 or ends == 2 and g.n_starts[g.stop[a]] <= 1:
        return True
    return not join_leaves_out(g, <int64_t>starts * ends, 8 * <int64_t>(g.stop[a] - p.start[a]))


cdef int32_t join_equal(gs_join *g, int32_t a) noexcept nogil:
    """Another block with the lifetime of block a, or -1 when none was found or the seed leaves this join out."""
    cdef gs_pack *p = g.p
    cdef int32_t first = max(p.born[p.start[a]], a - PACK_LOOK)
    cdef int32_t last = min(p.born[p.start[a] + 1], a + PACK_LOOK)
    cdef int32_t b, found = -1
    cdef int fitting = 0
    for b in range(first, last):
        if g.size[b] > 0 and g.stop[b] == g.stop[a] and b != a:
            fitting += 1
            if g.seed == 0:
                return b
            if join_random(g, fitting) == 0:
                found = b
    return found if found >= 0 and join_stacks_rather(g, a) else -1


cdef void join_stacks(gs_join *g, int32_t shortest) noexcept nogil:
    """Stack blocks that live for at least `shortest` sections; the resulting blocks are chained and stacked again."""
    cdef int32_t i, a, b
    for i in range(g.p.n):
        if g.size[i] > 0 and g.stop[i] - g.p.start[i] >= shortest:
            a = i
            b = join_equal(g, a)
            while b >= 0:
                join_pair(g, a, b, g.size[a])
                a = join_chain(g, a)
                b = join_equal(g, a)


cdef int join_prepare(gs_join *g, gs_pack *p, uint64_t seed) noexcept nogil:
    """Join the buffers of p, which must outlive g, as `seed` selects, and prepare g.m to be packed.

    GS_NO_HOST_MEMORY is the only error.
    """
    cdef int64_t n = p.n
    cdef int64_t s = p.n_sections
    cdef char *cursor
    cdef int32_t *order = <int32_t *>p.keys         # scratch
    cdef int32_t shortest = p.n_sections
    cdef int32_t i, j
    cdef int status
    memset(g, 0, sizeof(gs_join))
    g.p = p
    g.seed = seed
    g.rare = JOIN_RARE + JOIN_RARER * (seed // 4 % 4)
    g.memory = malloc(n * (5 * 4 + 2 * 8) + (s + 1) * 3 * 4 + 10 * 8)
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
    g.ends = <int32_t *>pack_take(&cursor, s + 1, 4)
    g.n_ends = <int32_t *>pack_take(&cursor, s + 1, 4)
    g.n_starts = <int32_t *>pack_take(&cursor, s + 1, 4)
    memcpy(g.size, p.size, n * sizeof(int64_t))
    memcpy(g.stop, p.stop, n * sizeof(int32_t))
    memset(g.ends, 0xff, (s + 1) * sizeof(int32_t))
    memset(g.into, 0xff, n * sizeof(int32_t))
    memset(g.n_ends, 0, (s + 1) * sizeof(int32_t))
    for i in range(p.n_sections):
        g.n_starts[i] = p.born[i + 1] - p.born[i]
    g.n_starts[p.n_sections] = 0
    for i in range(p.n):
        join_link(g, i)
        order[i] = i
    if seed:
        for i in range(p.n - 1, 0, -1):
            j = <int32_t>join_random(g, i + 1)
            order[i], order[j] = order[j], order[i]
    for i in range(p.n):
        if g.size[order[i]] > 0:
            join_chain(g, order[i])
    while shortest > 0:
        join_stacks(g, shortest)
        shortest >>= 1
    if seed & 1:
        status = join_mirror(g)
    else:
        status = pack_prepare(&g.m, p.n, p.n_sections, p.start, g.stop, g.size)
    if status == GS_OK:
        pack_find_peaks(&g.m)
        status = pack_fill_carry(&g.m, INT64_MAX)        # no limit: the lists are hardly longer than those of p
    return status


cdef int join_mirror(gs_join *g) noexcept nogil:
    """Prepare g.m with time reversed: packings stay valid, and a search meets the buffers in another order."""
    cdef gs_pack *p = g.p
    cdef int32_t *start = <int32_t *>p.keys         # scratch
    cdef int32_t *stop = start + p.n
    cdef int32_t i
    for i in range(p.n):
        start[i] = p.n_sections - g.stop[i]
        stop[i] = p.n_sections - p.start[i]
    return pack_prepare(&g.m, p.n, p.n_sections, start, stop, g.size)


cdef void join_expand(gs_join *g) noexcept nogil:
    """Convert the packing in m.offset to p.offset."""
    cdef gs_pack *p = g.p
    cdef int32_t i, b
    for i in range(g.m.n):
        p.offset[g.m.id[i]] = g.m.offset[i]
    # into[b] may itself have been joined, later than b: in reverse order of joining, its offset is known before b's.
    for i in range(g.n_gone - 1, -1, -1):
        b = g.gone[i]
        p.offset[b] = p.offset[g.into[b]] + g.above[b]
