# The sequence of all packing methods.
#
# pack_prepared is called by the planner and by pack_any_times; it does not need the GIL.
# The methods, each tried only if those before it missed the target, the wanted size of the arena:
#   long lifetimes from the bottom, short ones from the top (two_ends.pxi);
#   buffers in the order PACK_BY_TWA (solve.pxd), each at its lowest gap; exact search at the target;
#   the same on a smaller problem of joined buffers (join.pxi); best fit, and all orders;
#   repeated searches, until the budget is spent: at the target, with and without joined buffers and filled slack
#   (fill.pxi), and between the target and the best result.
# Invariant: the result is valid, its arena is at most that of best fit and at least the bound, and `optimal` is set
# only if the arena equals the bound or a search has proved that no smaller one exists.

cdef enum:
    PACK_METHOD_NONE = 0
    PACK_METHOD_TWA = 1
    PACK_METHOD_SIZE = 2
    PACK_METHOD_WAT = 3
    PACK_METHOD_TAW = 4
    PACK_METHOD_BEST_FIT = 5
    PACK_METHOD_SEARCH = 6
    PACK_METHOD_TWO_ENDS = 7
    PACK_METHOD_JOINED = 8
    PACK_PASSES = 5
    PACK_WAYS = 3 * SELECTIONS      # number of pairs of an order of PACK_SEARCH_ORDERS and a SELECT_*
    PACK_VARIED = 12                # the most tries spent on joined problems for each try of the problem itself

cdef int64_t PACK_EASY_TRY = 250           # a try is quick if a buffer overlaps at most this many in time, on average
cdef int64_t PACK_PATIENCE = 2000 * 1000 * 1000     # pairs of buffers that all calls of pack_place_far may compare

cdef int[3] PACK_SEARCH_ORDERS
PACK_SEARCH_ORDERS[:] = [PACK_BY_WAT, PACK_BY_TAW, PACK_BY_TWA]

# For each pass of pack_two_ends: the lifetime in nodes above which a buffer is long-lived, and whether buffers of at
# least a seventh of the bound count as long-lived, too, as recurrent layers need.  Each lifetime suits layers of some
# length, the usual one first: it is above the short lives in a layer, and below that of the residual stream.  A failing
# pass mostly fails within the first layer.
cdef int32_t[PACK_PASSES] PACK_LONG_LIFE
cdef bint[PACK_PASSES] PACK_LARGE
PACK_LONG_LIFE[:] = [14, 28, 7, 28, 3]
PACK_LARGE[:] = [False, True, False, False, False]

ctypedef struct gs_pack_work:
    gs_pack *p
    gs_search q             # a search of p; q.p is NULL while there is none
    gs_pack filled          # p, with more buffers where memory stays empty (fill.pxi), as `seed` selects
    gs_join join            # the buffers of `filled`, joined to blocks (join.pxi), as `seed` selects
    gs_search joined        # a search of join.m; joined.p is NULL while there is none
    int seed                # selects which holes are filled and which buffers are joined
    int64_t target          # an arena of this size ends the work
    int64_t budget          # tries, of all searches together
    int64_t varied          # tries of joined problems, plus the time of joining, expressed in tries
    int64_t patience        # pairs of buffers that pack_place_far may still compare
    bint scales             # the budget is a default one, which is reduced where tries are slow
    bint fitted             # best fit has been tried
    gs_pack_result *out


cdef int pack_prepared(gs_pack *p, int64_t capacity, int64_t budget, gs_pack_result *out) noexcept nogil:
    """Choose offsets for the buffers of p; they are in p.best.

    `capacity`: work ends once the arena has at most this many bytes (GS_PACK_NO_CAPACITY: only once it is smallest).
    `budget`: tries of the exact search, 0 for none, GS_PACK_DEFAULT_BUDGET for a few seconds at most,
    GS_PACK_PLANNER_BUDGET for a fraction of a second.  Every offset is a sum of sizes, so it is aligned if the caller
    rounds sizes up to the alignment.
    """
    cdef gs_pack_work work
    cdef int status = GS_OK
    memset(out, 0, sizeof(gs_pack_result))
    memset(&work, 0, sizeof(gs_pack_work))
    work.p = p
    work.out = out
    work.target = max(p.bound, capacity)
    work.patience = PACK_PATIENCE
    work.scales = budget < 0
    work.budget = 2 * 1000 * 1000 if budget == GS_PACK_DEFAULT_BUDGET else budget
    if budget == GS_PACK_PLANNER_BUDGET:
        work.budget = 100 * 1000
    out.bound = out.proven = p.bound
    if p.n > 0:
        out.arena = INT64_MAX
        status = pack_solve(&work)
        if status == GS_OK and out.arena > out.proven and not work.fitted:
            # The capacity ended the work before best fit was tried, but no result may be larger than that of best fit.
            status = pack_keep(&work, pack_best_fit(p), PACK_METHOD_BEST_FIT)
    out.optimal = out.arena <= out.proven
    search_free(&work.q)
    search_free(&work.joined)
    join_free(&work.join)
    pack_free(&work.filled)
    return status


cdef int pack_keep(gs_pack_work *work, int64_t arena, int method) noexcept nogil:
    """Keep the packing in p.offset if its arena is the smallest so far.  An `arena` below 0 is an error: returns it."""
    if arena < 0:
        return <int>arena
    # The first packing is always kept: its arena may equal the initial value of out.arena, INT64_MAX.
    if arena < work.out.arena or work.out.method == PACK_METHOD_NONE:
        work.out.arena = arena
        work.out.method = method
        memcpy(work.p.best, work.p.offset, work.p.n * sizeof(int64_t))
    return GS_OK


cdef int pack_list(gs_pack_work *work, gs_pack *p, int by, int64_t limit) noexcept nogil:
    """Place the buffers of p in one order, and keep the packing if its arena is at most `limit`.

    Where many buffers overlap, pack_place_far compares each with all before it, and only while work.patience lasts.
    """
    cdef int64_t arena
    cdef bint near = p.carry != NULL and p.n_neighbours <= 48 * <int64_t>p.n
    if not near:
        work.patience -= <int64_t>p.n * p.n // 2
        if work.patience < 0:
            return GS_OK
    pack_sort(p, by, 0)
    arena = pack_place_near(p, limit) if near else pack_place_far(p, limit)
    if arena == GS_OUT_OF_MEMORY:
        return GS_OK
    if p == work.p:
        return pack_keep(work, arena, PACK_METHOD_TWA + by)
    return pack_keep(work, arena if arena < 0 else pack_expand(work), PACK_METHOD_JOINED)


cdef int pack_solve(gs_pack_work *work) noexcept nogil:
    cdef gs_pack *p = work.p
    cdef gs_pack_result *out = work.out
    cdef int64_t target = work.target
    cdef int by, i, status
    for i in range(PACK_PASSES):
        if pack_two_ends(p, PACK_LONG_LIFE[i], (p.bound + 6) // 7 if PACK_LARGE[i] else 0):
            return pack_keep(work, p.bound, PACK_METHOD_TWO_ENDS)
    pack_settle(p)
    pack_find_peaks(p)
    status = pack_fill_carry(p, PACK_CARRY_LIMIT)
    if status == GS_NO_HOST_MEMORY:
        return status
    if work.scales and p.n_neighbours > PACK_EASY_TRY * p.n:
        # A try takes time in proportion to the buffers that one buffer overlaps.
        work.budget = work.budget * PACK_EASY_TRY // (p.n_neighbours // p.n)
    status = pack_list(work, p, PACK_BY_TWA, target)
    if status != GS_OK or out.arena <= target:
        return status
    if work.budget > 0 and p.carry != NULL:
        status = search_prepare(&work.q, p)
        if status == GS_OK:
            # For easy graphs one short search is enough, and takes less time than joining.
            status = pack_attempt(work, &work.q, target, PACK_BY_WAT, SELECT_FIRST, 0, <int64_t>p.n + p.n // 4 + 16)
        if status >= 0 and out.arena > target:
            status = pack_solve_joined(work)
        if status < 0 or out.arena <= target:
            return min(status, GS_OK)
    # The packing of best fit is what the following passes improve on, and the result may not be larger.
    status = pack_keep(work, pack_best_fit(p), PACK_METHOD_BEST_FIT)
    work.fitted = True
    for by in range(PACK_ORDERS):
        if status == GS_OK and out.arena > target:
            status = pack_list(work, p, by, out.arena - 1)
    if status != GS_OK or out.arena <= target or work.q.p == NULL:
        return status
    return pack_improve(work)


cdef int pack_join(gs_pack_work *work, int seed) noexcept nogil:
    """Fill the slack and join buffers in the way that `seed` selects, and prepare to search the resulting problem."""
    cdef int status
    search_free(&work.joined)
    join_free(&work.join)
    pack_free(&work.filled)
    work.seed = seed
    status = fill_prepare(&work.filled, work.p, work.target, seed)
    if status == GS_OK:
        status = join_prepare(&work.join, &work.filled, seed)
    return search_prepare(&work.joined, &work.join.m) if status == GS_OK else status


cdef int64_t pack_expand(gs_pack_work *work) noexcept nogil:
    """Convert the packing in join.m.offset to p.offset; returns the bytes of its arena."""
    cdef gs_pack *p = work.p
    cdef int64_t arena = 0
    cdef int32_t i, b
    join_expand(&work.join)
    for i in range(work.filled.n):
        b = work.filled.id[i]
        if b < p.n:
            p.offset[b] = work.filled.offset[i]
            arena = max(arena, p.offset[b] + p.size[b])
    return arena


cdef int pack_solve_joined(gs_pack_work *work) noexcept nogil:
    """Join all buffers that match; try the joined problem in each of two orders, then with short searches."""
    cdef gs_pack_result *out = work.out
    cdef int64_t target = work.target
    cdef int by, select
    cdef int status = pack_join(work, 0)
    if status != GS_OK or work.join.n_gone == 0:
        return status
    for by in range(2):
        status = pack_list(work, &work.join.m, by, target)
        if status != GS_OK or out.arena <= target:
            return status
    for select in range(SELECTIONS):
        if status >= 0 and out.arena > target:
            status = pack_attempt(work, &work.joined, target, PACK_BY_WAT, select, 0, 8 * <int64_t>work.join.m.n + 64)
    return status


cdef int pack_attempt(gs_pack_work *work, gs_search *q, int64_t capacity, int by, int select, int seed,
                      int64_t limit) noexcept nogil:
    """Search once for a packing of at most `capacity` bytes, and keep it; at most `limit` tries, within the budget.

    Returns SEARCH_* or an error.
    """
    cdef gs_pack *p = q.p
    cdef int64_t before = q.tries
    cdef int64_t arena = 0
    cdef int64_t grain
    cdef int32_t i
    cdef int found
    pack_sort(p, by, seed)
    found = search_run(q, capacity, select, min(limit, work.budget - work.out.tries),
                       2 * <int64_t>p.n if p != work.p else INT64_MAX // 2)
    work.out.tries += q.tries - before
    if p != work.p:
        work.varied += q.tries - before
    if found == SEARCH_FOUND and p != work.p:
        pack_keep(work, pack_expand(work), PACK_METHOD_JOINED if work.join.n_gone else PACK_METHOD_SEARCH)
    elif found == SEARCH_FOUND:
        for i in range(p.n):
            arena = max(arena, p.offset[i] + p.size[i])
        pack_keep(work, arena, PACK_METHOD_SEARCH)
    elif found == SEARCH_IMPOSSIBLE and p == work.p:
        # In a packing in which no buffer can sink, offsets are sums of sizes, so the arena is a multiple of their gcd.
        grain = pack_grain(p)
        work.out.proven = max(work.out.proven, capacity // grain * grain + grain)
    return found


cdef int64_t pack_grain(gs_pack *p) noexcept nogil:
    """The greatest common divisor of all sizes."""
    cdef int64_t a = 0
    cdef int64_t b, c
    cdef int32_t i
    for i in range(p.n):
        b = p.size[i]
        while b:
            c = a % b
            a = b
            b = c
        if a == 1:
            break
    return a


cdef inline bint pack_over(gs_pack_work *work) noexcept nogil:
    """Whether to end: the target is reached, the best packing is proven optimal, or the budget is spent."""
    return work.out.arena <= max(work.out.proven, work.target) or work.out.tries >= work.budget


cdef int pack_vary(gs_pack_work *work) noexcept nogil:
    """Fill and join with the next seed, and search at the target for a few tries per block.

    Most seeds join some buffers wrongly; after one that does not, a packing is found at once.
    """
    cdef int64_t cost = work.p.n // 4       # time of filling and joining, expressed in tries
    cdef int by, found = pack_join(work, work.seed + 1)
    work.varied += cost
    work.out.tries += cost
    if found != GS_OK:
        return found
    by = PACK_BY_LONG_AREA if work.seed & 2 else PACK_BY_WAT
    return pack_attempt(work, &work.joined, max(work.out.proven, work.target), by, SELECT_FIRST, work.seed,
                        8 * <int64_t>work.join.m.n + 32)


cdef int pack_tour(gs_pack_work *work, int seed, int64_t limit) noexcept nogil:
    """Search at the target once with each pair of an order and a SELECT_*; returns the last SEARCH_*, or an error.

    If a search proves the target impossible, the least arena still possible becomes the target, and all begins again.
    """
    cdef int way = 0
    cdef int found = SEARCH_STOPPED
    while found >= 0 and way < PACK_WAYS and not pack_over(work):
        found = pack_attempt(work, &work.q, max(work.out.proven, work.target), PACK_SEARCH_ORDERS[way // SELECTIONS],
                             way % SELECTIONS, seed, limit)
        way = 0 if found == SEARCH_IMPOSSIBLE else way + 1
    return found


cdef int pack_lower(gs_pack_work *work, gs_search *q, int seed, int64_t limit, int nearer) noexcept nogil:
    """Search for an arena that is smaller than the best by 2**-nearer of the distance between the best and the target.

    After a success, `nearer` is 1 from then on: the distance is halved.
    """
    cdef gs_pack_result *out = work.out
    cdef int64_t grain = pack_grain(work.p)
    cdef int64_t room
    cdef int way = 0
    cdef int found = SEARCH_STOPPED
    while found >= 0 and way < SELECTIONS and not pack_over(work):
        room = max(grain, (out.arena - max(out.proven, work.target)) >> nearer)
        found = pack_attempt(work, q, out.arena - room, PACK_BY_WAT, way, seed, limit)
        way += 1
        if found == SEARCH_FOUND:
            way = 0
            nearer = 1
    return found


cdef int pack_improve(gs_pack_work *work) noexcept nogil:
    """Search until the target is reached, the best packing is proven optimal or the budget is spent.

    A search usually finds a packing within a few tries per buffer or not at all.  So each round starts searches anew,
    in randomised orders and with a small limit on tries, which grows by a quarter per round: first of joined problems,
    each with another seed, then of the problem itself.  After each of the two it searches for packings between the
    best and the target: in the first round half-way, in each later round closer to the best.
    """
    cdef int64_t limit = 3 * <int64_t>work.p.n + 32
    # A small problem is mostly searched without joining, because only such a search can prove that no arena is smaller.
    cdef int64_t varied = min(work.p.n // 32, PACK_VARIED) * PACK_WAYS
    cdef int64_t until
    cdef int seed = 0
    cdef int found = SEARCH_STOPPED
    while found >= 0 and not pack_over(work):
        until = work.varied + varied * limit
        while found >= 0 and work.varied < until and not pack_over(work):
            found = pack_vary(work)
        if found >= 0:
            found = pack_lower(work, &work.joined, seed, 4 * <int64_t>work.join.m.n + 32, min(seed + 1, 62))
        if found >= 0:
            found = pack_tour(work, seed, limit)
        if found >= 0:
            found = pack_lower(work, &work.q, seed, limit, min(seed + 1, 62))
        seed += 1
        limit += limit >> 2
    return min(found, GS_OK)
