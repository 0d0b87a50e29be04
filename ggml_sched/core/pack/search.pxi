# Packing, part 6: place or lift, the search itself.
#
# Owns the order in which moves are tried: which buffer next, independent pieces, and backtracking on an
# explicit stack.  Where no unplaced buffer crosses from one section to the next, the two sides are
# independent pieces, the tightest first: a piece that is done never comes back, a piece that fails kills the
# placement that made it.
# Invariant: tries, not time, are the budget, so the same input takes the same path on every machine.

cdef enum:
    SEARCH_IMPOSSIBLE = 0
    SEARCH_FOUND = 1
    SEARCH_STOPPED = 2
    SELECT_FIRST = 0            # of the lowest, the first in rank
    SELECT_TIGHTEST = 1         # of the lowest, one in the section with the most bytes to come
    SELECT_VALLEY = 2           # where few may sit and many branches died, at any height
    SELECTIONS = 3


cdef int32_t search_lowest(gs_search *q, int32_t left, int32_t right, bint tightest) noexcept nogil:
    """One of the buffers with the lowest minimum of the piece; -1 when all are placed."""
    cdef gs_pack *p = q.p
    cdef int64_t lowest = PACK_FAR
    cdef int64_t fullest = -1
    cdef int32_t best = -1
    cdef int32_t best_rank = 0x7fffffff
    cdef int32_t i, j, k
    cdef int32_t section = left
    for k in range(left, right):
        if q.floor[k] < lowest:
            lowest = q.floor[k]
    if lowest == PACK_FAR:
        return -1
    if not tightest:
        if p.born[right] - p.born[left] > 64:
            # Of many, the first in rank is found soon.
            for i in range(p.n):
                j = p.order[i]
                if q.minimum[j] == lowest and left <= p.start[j] < right:
                    return j
        for j in range(p.born[left], p.born[right]):
            if q.minimum[j] == lowest and q.rank[j] < best_rank:
                best_rank = q.rank[j]
                best = j
        return best
    for k in range(left, right):
        if q.floor[k] == lowest and q.rest[k] > fullest:
            fullest = q.rest[k]
            section = k
    for j in range(p.born[section], p.born[section + 1]):
        if q.minimum[j] == lowest and q.rank[j] < best_rank:
            best_rank = q.rank[j]
            best = j
    for i in range(p.carry_begin[section], p.carry_begin[section + 1]):
        j = p.carry[i]
        if q.minimum[j] == lowest and q.rank[j] < best_rank:
            best_rank = q.rank[j]
            best = j
    return best


cdef int32_t search_valley(gs_search *q, int32_t left, int32_t right) noexcept nogil:
    """A buffer that nothing it overlaps is below, from the section with the most deaths per such buffer.

    Wherever it is in the piece: what failed is tried again first, instead of after everything below it.
    """
    cdef gs_pack *p = q.p
    cdef int64_t score, slack, best_slack
    cdef int64_t best_score = -1
    cdef int32_t best = -1
    cdef int32_t best_rank = 0x7fffffff
    cdef int32_t section = -1
    cdef int32_t n_here = 0
    cdef int32_t end = right
    cdef int32_t j, k
    best_slack = 0
    # It lies within a run of sections of one floor, its own minimum.
    for k in range(right - 1, left - 1, -1):
        if k + 1 < right and q.floor[k] != q.floor[k + 1]:
            end = k + 1
        q.run_end[k] = end
        q.cover[k] = 0
    q.cover[right] = 0
    for j in range(p.born[left], p.born[right]):
        k = p.start[j]
        if q.minimum[j] == q.floor[k] and q.minimum[j] != PACK_FAR and p.stop[j] <= q.run_end[k]:
            q.cover[k] += 1
            q.cover[p.stop[j]] -= 1
    for k in range(left, right):
        n_here += q.cover[k]
        if n_here > 0:
            score = (q.deaths[k] << 20) // n_here
            slack = q.capacity - q.floor[k] - q.rest[k]
            if score > best_score or (score == best_score and slack < best_slack):
                best_score, best_slack = score, slack
                section = k
    if section < 0:
        return -1
    for j in range(p.born[left], p.born[section + 1]):
        if (q.minimum[j] == q.floor[section] and q.rank[j] < best_rank
                and section < p.stop[j] <= q.run_end[section] == q.run_end[p.start[j]]):
            best_rank = q.rank[j]
            best = j
    return best


cdef inline int32_t search_select(gs_search *q, int32_t left, int32_t right, int select) noexcept nogil:
    """The buffer of the piece to branch on, -1 when all are placed."""
    if left >= right:
        return -1
    if select == SELECT_VALLEY:
        return search_valley(q, left, right)
    return search_lowest(q, left, right, select == SELECT_TIGHTEST)


cdef void search_add_piece(gs_search *q, int32_t left, int32_t right) noexcept nogil:
    """Add sections [left, right) to the pieces of the top frame, if anything in them is unplaced."""
    cdef gs_piece piece
    cdef int32_t k
    cdef int32_t at = q.n_pieces
    piece.left, piece.right, piece.slack = left, right, PACK_FAR
    for k in range(left, right):
        if q.floor[k] != PACK_FAR:
            piece.slack = min(piece.slack, q.capacity - q.floor[k] - q.rest[k])
    if piece.slack == PACK_FAR:
        return
    while at > q.stack[q.depth - 1].piece and q.pieces[at - 1].slack > piece.slack:
        q.pieces[at] = q.pieces[at - 1]
        at -= 1
    q.pieces[at] = piece
    q.n_pieces += 1


cdef void search_divide(gs_search *q, int32_t left, int32_t right, int32_t start,
                       int32_t stop) noexcept nogil:
    """Push a frame with the pieces of [left, right), cut at the boundaries in [start, stop) none crosses."""
    cdef int32_t begin = left
    cdef int32_t k
    cdef gs_choice *frame = &q.stack[q.depth]
    q.depth += 1
    frame.buffer = -1
    frame.piece = frame.next_piece = q.n_pieces
    for k in range(start, stop):
        if k + 1 < right and q.crossing[k] == 0:
            search_add_piece(q, begin, k + 1)
            begin = k + 1
    search_add_piece(q, begin, right)


cdef int search_run(gs_search *q, int64_t capacity, int select, int64_t limit) noexcept nogil:
    """Look for a packing within capacity (at least p.bound), preferring p.order, in at most `limit` tries.

    SEARCH_FOUND: it is in p.offset.  SEARCH_IMPOSSIBLE: there is none.  SEARCH_STOPPED, or GS_NO_HOST_MEMORY.
    A try is one look at a piece of up to 256 sections.
    """
    cdef gs_pack *p = q.p
    cdef gs_choice *frame = q.stack
    cdef int32_t left = 0
    cdef int32_t right = 0
    cdef int32_t b, k
    cdef bint alive
    search_reset(q)
    q.capacity = capacity
    limit += q.tries
    search_divide(q, 0, p.n_sections, 0, p.n_sections)
    while True:
        # Here the top frame decides: an empty piece is done, and so are the choices made inside it.
        b = search_select(q, left, right, select)
        if b < 0:
            while q.depth > 0:
                frame = &q.stack[q.depth - 1]
                if frame.buffer < 0:
                    if frame.next_piece < q.n_pieces:
                        break
                    q.n_pieces = frame.piece
                q.depth -= 1
            if q.depth == 0:
                return SEARCH_FOUND
            left = q.pieces[frame.next_piece].left
            right = q.pieces[frame.next_piece].right
            frame.next_piece += 1
            continue
        if q.tries >= limit:
            return SEARCH_STOPPED
        q.tries += 1 + ((right - left) >> 8)
        frame = &q.stack[q.depth]
        q.depth += 1
        frame.mark, frame.buffer, frame.left, frame.right = q.n_trail, b, left, right
        alive = search_place(q, b)
        while not alive:
            while q.depth > 0 and q.stack[q.depth - 1].buffer < 0:
                q.depth -= 1
                q.n_pieces = q.stack[q.depth].piece
            if q.depth == 0:
                return GS_NO_HOST_MEMORY if q.no_memory else SEARCH_IMPOSSIBLE
            q.depth -= 1
            frame = &q.stack[q.depth]
            search_undo(q, frame.mark)
            b, left, right = frame.buffer, frame.left, frame.right
            alive = search_lift(q, b)
            b = -1
        if q.no_memory:
            return GS_NO_HOST_MEMORY
        if b >= 0:
            for k in range(p.start[b], p.stop[b] - 1):
                if q.crossing[k] == 0:
                    search_divide(q, left, right, p.start[b], p.stop[b] - 1)
                    left = right = 0
                    break
