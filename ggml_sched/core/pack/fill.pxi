# Adding buffers where the best packing probably leaves memory empty.
#
# Owns fill_prepare, which makes a problem with more buffers; each of its packings contains one of the original problem.
# The slack of a time is the target, the wanted size of the arena, less the bytes alive.  Where slack grows by some
# bytes at one time and shrinks by as many later, there is probably one hole between, and a buffer of this size and
# lifetime keeps it empty.  A problem without slack is easier to join and to search: a wrong offset fails at once.
# Sizes may match by chance, as in joining, so a seed selects which holes are left out.
# Invariants: no time is filled beyond the target; if the filled problem has no packing, the original may have one.

cdef enum:
    FILL_LOOK = 64              # open holes that are remembered; the oldest is forgotten for a new one
    FILL_EFFORT = 64            # bounds the work: the holes tried span FILL_EFFORT * n steps of time at most
    # The probability that a hole is left out, in 256ths: FILL_RARE + FILL_RARER * (seed // 2 % 4) +
    # min(FILL_DOUBT * open holes // the hole's bytes, JOIN_DOUBT): with many open holes or few bytes, sizes match by
    # chance more often.
    FILL_RARE = 48
    FILL_RARER = 48
    FILL_DOUBT = 64

ctypedef struct gs_hole:        # an open hole: slack that grew by `size` bytes at time `begin`
    int64_t size
    int32_t begin

ctypedef struct gs_fill:
    int64_t *slack              # [n_times + 1] bytes below the target that no buffer takes; 0 at the last time
    # [2 n] each: the problem's n buffers, then the buffers that fill holes.  At most n fill holes, because a hole
    # begins at time 0 or where a buffer ends, and no hole begins where the last buffer ends.
    int32_t *lower
    int32_t *upper
    int64_t *size
    int64_t n
    int64_t effort              # steps of time that further holes may span
    uint64_t seed
    int rare                    # least probability, in 256ths, that a hole is left out; see FILL_RARE
    int32_t n_open              # holes whose end has not been found yet
    gs_hole open[FILL_LOOK]


cdef int fill_prepare(gs_pack *m, const gs_pack *p, int64_t target, uint64_t seed) noexcept nogil:
    """Fill m with the buffers of p, and with buffers that fill holes below `target`: these have an m.id of p.n or more.

    With seed 0, no hole is filled.  GS_NO_HOST_MEMORY is the only error.
    """
    cdef gs_fill g
    cdef int32_t n_times = 0
    cdef char *cursor
    cdef char *memory
    cdef int32_t i
    cdef int status
    memset(m, 0, sizeof(gs_pack))
    memset(&g, 0, sizeof(gs_fill))
    for i in range(p.n):
        n_times = max(n_times, p.birth[i] + p.life[i])
    g.n = p.n
    g.effort = FILL_EFFORT * g.n
    g.seed = seed
    g.rare = <int>(FILL_RARE + FILL_RARER * (seed // 2 % 4))
    memory = <char *>malloc((<int64_t>n_times + 1) * 8 + 2 * g.n * (8 + 4 + 4) + 4 * 8)
    if memory == NULL:
        return GS_NO_HOST_MEMORY
    cursor = memory
    g.slack = <int64_t *>pack_take(&cursor, <int64_t>n_times + 1, 8)
    g.size = <int64_t *>pack_take(&cursor, 2 * g.n, 8)
    g.lower = <int32_t *>pack_take(&cursor, 2 * g.n, 4)
    g.upper = <int32_t *>pack_take(&cursor, 2 * g.n, 4)
    memset(g.slack, 0, (<int64_t>n_times + 1) * sizeof(int64_t))
    for i in range(p.n):
        g.size[i] = p.size[i]
        g.lower[i] = p.birth[i]
        g.upper[i] = p.birth[i] + p.life[i]
        g.slack[g.lower[i]] -= g.size[i]
        g.slack[g.upper[i]] += g.size[i]
    g.slack[0] += target
    for i in range(n_times):
        g.slack[i + 1] += g.slack[i]
    g.slack[n_times] = 0
    if seed:
        fill_holes(&g, n_times)
    status = pack_prepare(m, <int32_t>g.n, n_times, g.lower, g.upper, g.size)
    free(memory)
    return status


cdef void fill_holes(gs_fill *g, int32_t n_times) noexcept nogil:
    """Walk the times; where slack shrinks by the size of an open hole, fill the latest such hole."""
    cdef int64_t step, before = 0
    cdef int32_t k, t
    for t in range(n_times + 1):
        step = g.slack[t] - before
        before = g.slack[t]
        if step > 0:
            if g.n_open == FILL_LOOK:
                fill_close(g, 0)
            g.open[g.n_open].size = step
            g.open[g.n_open].begin = t
            g.n_open += 1
        elif step < 0:
            k = g.n_open - 1
            while k >= 0 and g.open[k].size != -step:
                k -= 1
            if k >= 0:
                fill_hole(g, g.open[k].begin, t, -step)
                fill_close(g, k)


cdef void fill_close(gs_fill *g, int32_t k) noexcept nogil:
    g.n_open -= 1
    memmove(g.open + k, g.open + k + 1, (g.n_open - k) * sizeof(gs_hole))


cdef void fill_hole(gs_fill *g, int32_t lower, int32_t upper, int64_t size) noexcept nogil:
    """Fill the probable hole of `size` bytes over [lower, upper), unless the seed leaves it out."""
    cdef int64_t doubt = min(FILL_DOUBT * g.n_open // size, JOIN_DOUBT)
    cdef int32_t t
    g.effort -= upper - lower
    if <int64_t>(gs_mix(g.seed, <uint64_t>upper) & 255) < g.rare + doubt or g.effort < 0:
        return
    # A hole that was filled before may have taken part of this slack.
    for t in range(lower, upper):
        if g.slack[t] < size:
            return
    for t in range(lower, upper):
        g.slack[t] -= size
    g.lower[g.n] = lower
    g.upper[g.n] = upper
    g.size[g.n] = size
    g.n += 1
