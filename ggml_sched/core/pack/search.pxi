# The exact search: backtracking over the moves place and lift (state.pxi).
#
# Chooses the buffer of the next move, divides the problem into independent pieces, and backtracks on an explicit stack.
# If no unplaced buffer lives on both sides of a boundary between sections, the sides are independent pieces; the one
# with the least slack is searched first.  A finished piece is not searched again; a piece without a packing refutes
# the placement that separated it.
# After a failure the search returns to the last placement that changed a section of the failure's cause (state.pxi),
# because the failure would remain if only later placements were changed.
# Invariant: the budget counts tries, not time, so that equal inputs take the same path on every machine.

cdef enum:
    SEARCH_IMPOSSIBLE = 0
    SEARCH_FOUND = 1
    SEARCH_STOPPED = 2
    # Which buffer is moved next.  A buffer's minimum is the lowest offset that it may still get (state.pxi).
    SELECT_FIRST = 0            # the one with the lowest minimum; of several, the first in p.order
    SELECT_TIGHTEST = 1         # likewise, among the buffers of the section with the most unplaced bytes
    SELECTIONS = 2


cdef int32_t search_first(const gs_search *q, int32_t left, int32_t right, int64_t lowest) noexcept nogil:
    """Of the buffers in sections [left, right) whose minimum is `lowest`, the one of lowest q.rank.

    `lowest` is the lowest floor of these sections.
    """
    cdef const gs_pack *p = q.p
    cdef int32_t best = -1
    cdef int32_t best_rank = 0x7fffffff
    cdef int32_t i, j, k
    cdef bint begun = False
    for k in range(left, right):
        if q.floor[k] != lowest:
            begun = False
            continue
        if not begun:
            for i in range(p.carry_begin[k], p.carry_begin[k + 1]):
                j = p.carry[i]
                if q.minimum[j] == lowest and q.rank[j] < best_rank:
                    best_rank = q.rank[j]
                    best = j
        begun = True
        for j in range(p.born[k], p.born[k + 1]):
            if q.minimum[j] == lowest and q.rank[j] < best_rank:
                best_rank = q.rank[j]
                best = j
    return best


cdef inline int32_t search_select(const gs_search *q, int32_t left, int32_t right, int select) noexcept nogil:
    """The buffer of the next move in sections [left, right), by SELECT_*; -1 when all are placed."""
    cdef int64_t lowest = PACK_FAR
    cdef int64_t fullest = -1
    cdef int32_t first = left
    cdef int32_t last = left
    cdef int32_t k
    for k in range(left, right):
        if q.floor[k] <= lowest:
            if q.floor[k] < lowest:
                lowest = q.floor[k]
                first = k
            last = k
    if lowest == PACK_FAR:
        return -1
    if select == SELECT_FIRST:
        return search_first(q, first, last + 1, lowest)
    for k in range(first, last + 1):
        if q.floor[k] == lowest and q.rest[k] > fullest:
            fullest = q.rest[k]
            left = k
    return search_first(q, left, left + 1, lowest)


cdef void search_add_piece(gs_search *q, int32_t left, int32_t right) noexcept nogil:
    """Add sections [left, right) to the pieces of the top frame, in order of slack, unless all buffers are placed."""
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
    """Push a frame with the pieces of sections [left, right).

    Cut after each section of [start, stop) whose unplaced buffers all end there, so that none crosses the cut.
    """
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


cdef int search_run(gs_search *q, int64_t capacity, int select, int64_t limit, int64_t patience) noexcept nogil:
    """Look for a packing of at most `capacity` bytes (p.bound or more); p.order decides between equal minima.

    SEARCH_FOUND: it is in p.offset.  SEARCH_IMPOSSIBLE: there is none.  SEARCH_STOPPED: after `limit` tries, or after
    `patience` tries in which the placed area has not exceeded its maximum.  Or GS_NO_HOST_MEMORY.
    A try is one placement in a piece of fewer than 256 sections; in longer pieces it counts as more.
    """
    cdef gs_pack *p = q.p
    cdef gs_choice *frame = q.stack
    cdef int32_t left = 0
    cdef int32_t right = 0
    cdef int32_t b, k
    cdef int64_t farthest = 0
    cdef int64_t until = q.tries + patience
    cdef bint alive
    search_reset(q)
    q.capacity = capacity
    limit += q.tries
    search_divide(q, 0, p.n_sections, 0, p.n_sections)
    while True:
        # If the piece has no unplaced buffer, it is done: pop its choices, down to a frame with further pieces.
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
        if q.tries >= min(limit, until):
            return SEARCH_STOPPED
        q.tries += 1 + ((right - left) >> 8)
        frame = &q.stack[q.depth]
        q.depth += 1
        frame.mark, frame.buffer, frame.left, frame.right = q.n_trail, b, left, right
        alive = search_place(q, b)
        frame.changed = q.changed
        if q.area > farthest:
            farthest = q.area
            until = q.tries + patience
        while not alive:
            while q.depth > 0 and q.stack[q.depth - 1].buffer < 0:
                q.depth -= 1
                q.n_pieces = q.stack[q.depth].piece
            if q.depth == 0:
                return GS_NO_HOST_MEMORY if q.no_memory else SEARCH_IMPOSSIBLE
            q.depth -= 1
            frame = &q.stack[q.depth]
            search_undo(q, frame.mark)
            if frame.changed & q.cause == 0:
                continue
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
