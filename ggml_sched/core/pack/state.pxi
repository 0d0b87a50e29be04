# The state of the exact search, and its two moves, place and lift.
#
# Owns gs_search: a partial packing within `capacity` bytes on flat arrays, and a trail from which moves are undone.
# Each unplaced buffer has a minimum, the lowest offset that it can still have.  A move is made with a buffer whose
# minimum is no higher than that of any unplaced buffer that overlaps it in time:
#   place   its offset is its minimum; its top (offset + size) becomes the minimum of unplaced buffers that overlap it
#           in time, unless theirs is higher;
#   lift    its offset is above its minimum.  In a packing in which no buffer can sink further, it then rests on a
#           buffer that overlaps it in time and is not placed yet: its minimum rises to the lowest top of such a buffer.
# A branch of the search fails (contains no packing) when in some section floor + unplaced bytes exceed the capacity;
# the floor of a section is the lowest minimum of its unplaced buffers.
# Each failure has a cause: the sections whose state implies the failure, namely all that the move has read.  A cause is
# a mask of 64 bits, each for 2**mask_shift neighbouring sections.  A lift follows from the failure of a placement, and
# has the same cause.
# Invariants: minimum and offset of a buffer are at most capacity - size, so that PACK_FAR is never one of them; undoing
# to a mark (a length of the trail) restores exactly the state at that mark, but for `witness`, a hint that is checked.

cdef int64_t PACK_FAR = 0x7fffffffffffffff      # minimum of a placed buffer; floor of a section where all are placed

cdef enum:
    CHANGE_MINIMUM = 0
    CHANGE_FLOOR = 1
    CHANGE_PLACED = 2
    CHANGE_LIFTED = 3           # a lift was made; `old` is the mask of sections that it changed; nothing is restored
    CHANGE_CAUSE = 4            # always follows CHANGE_LIFTED; `old` is the mask of that lift's cause

ctypedef struct gs_change:      # an entry of the trail: one value, and what it was before
    int64_t old
    int32_t index               # a section for CHANGE_FLOOR, otherwise a buffer
    int32_t kind                # CHANGE_*

ctypedef struct gs_piece:       # sections [left, right), whose unplaced buffers all live within them
    int64_t slack               # the least of capacity - gs_search.floor - gs_search.rest in any of these sections
    int32_t left
    int32_t right

ctypedef struct gs_choice:      # a frame of the search's stack: pieces, or a placement, undone if no packing follows
    int64_t mark                # trail length before the placement
    uint64_t changed            # mask of the sections that the placement changed
    int32_t buffer              # the placed buffer; -1: the frame has pieces
    int32_t left                # the sections [left, right) of the piece that was being searched
    int32_t right
    int32_t piece               # index in gs_search.pieces of the frame's first piece
    int32_t next_piece          # index in gs_search.pieces of the piece to search next

ctypedef struct gs_search:
    gs_pack *p
    int64_t capacity
    int64_t tries               # tries (as search_run counts them) so far, over all runs
    int64_t area                # sum of (size >> area_shift) * sections of the placed buffers: measures progress
    int area_shift
    uint64_t changed            # mask of the sections that the last placement changed
    uint64_t cause              # mask of the sections that made the last branch fail; a lift adds those that it reads
    int64_t *minimum            # [n] lowest offset that buffer i can still have; PACK_FAR once it is placed
    int64_t *floor              # [n_sections] lowest minimum of section k's unplaced buffers; PACK_FAR if it has none
    int32_t *witness            # [n_sections] a buffer whose minimum was section k's floor when that was last computed
    int64_t *rest               # [n_sections] bytes of section k's unplaced buffers
    int32_t *crossing           # [n_sections] how many unplaced buffers live both in section k and in k + 1
    int32_t *rank               # [n] position in p.order; of buffers with equal minimum, the lower rank is tried first
    int32_t *twin               # [n] the next buffer of equal lifetime and size, in a ring
    gs_choice *stack            # [2 n + 2] the first `depth` are in use
    gs_piece *pieces            # [2 n_sections + 2] the pieces of all frames, one frame after another
    int mask_shift              # each bit of a mask stands for 2**mask_shift sections
    int32_t depth               # frames on the stack
    int32_t n_pieces
    gs_change *trail            # changes since the start, oldest first
    int64_t n_trail
    int64_t trail_room
    bint no_memory              # the trail could not grow; the search ends
    void *memory


cdef void search_free(gs_search *q) noexcept nogil:
    free(q.memory)
    free(q.trail)
    memset(q, 0, sizeof(gs_search))


cdef int search_prepare(gs_search *q, gs_pack *p) noexcept nogil:
    """Allocate the arrays of a search of p, and fill q.twin.  p must have its carry lists, and outlive q."""
    cdef int64_t n = p.n
    cdef int64_t s = p.n_sections
    cdef char *cursor
    cdef int32_t i, j
    memset(q, 0, sizeof(gs_search))
    q.p = p
    q.trail_room = 8 * n + 1024
    q.trail = <gs_change *>malloc(q.trail_room * sizeof(gs_change))
    q.memory = malloc(n * 16 + s * 24 + (2 * n + 2) * sizeof(gs_choice) + (2 * s + 2) * sizeof(gs_piece)
                      + 12 * 8)
    if q.trail == NULL or q.memory == NULL:
        search_free(q)
        return GS_NO_HOST_MEMORY
    cursor = <char *>q.memory
    q.minimum = <int64_t *>pack_take(&cursor, n, 8)
    q.floor = <int64_t *>pack_take(&cursor, s, 8)
    q.rest = <int64_t *>pack_take(&cursor, s, 8)
    q.stack = <gs_choice *>pack_take(&cursor, 2 * n + 2, sizeof(gs_choice))
    q.pieces = <gs_piece *>pack_take(&cursor, 2 * s + 2, sizeof(gs_piece))
    q.crossing = <int32_t *>pack_take(&cursor, s, 4)
    q.witness = <int32_t *>pack_take(&cursor, s, 4)
    q.rank = <int32_t *>pack_take(&cursor, n, 4)
    q.twin = <int32_t *>pack_take(&cursor, n, 4)
    q.area_shift = max(0, pack_bits(p.bound) + pack_bits(s) - 62)
    while (p.n_sections - 1) >> q.mask_shift > 63:
        q.mask_shift += 1
    for i in range(p.n):
        q.twin[i] = i
        # Twins are born in the same section; looking back at 32 buffers at most keeps the time linear.
        j = i - 1
        while j >= 0 and j >= i - 32 and p.start[j] == p.start[i]:
            if p.stop[j] == p.stop[i] and p.size[j] == p.size[i]:
                q.twin[i] = q.twin[j]
                q.twin[j] = i
                break
            j -= 1
    return GS_OK


cdef void search_reset(gs_search *q) noexcept nogil:
    """Begin again: no buffer is placed, and every minimum is 0."""
    cdef gs_pack *p = q.p
    cdef int32_t i, k
    memset(q.minimum, 0, p.n * sizeof(int64_t))
    memset(q.floor, 0, p.n_sections * sizeof(int64_t))
    memcpy(q.rest, p.live, p.n_sections * sizeof(int64_t))
    for k in range(p.n_sections - 1):
        q.crossing[k] = p.carry_begin[k + 2] - p.carry_begin[k + 1]
    q.crossing[p.n_sections - 1] = 0
    for k in range(p.n_sections):
        q.witness[k] = p.born[k]        # a buffer of section k: every section begins with a birth
    for i in range(p.n):
        p.offset[i] = -1
        q.rank[p.order[i]] = i
    q.n_trail = q.depth = q.n_pieces = 0
    q.area = 0


cdef inline void search_note(gs_search *q, int kind, int32_t index, int64_t old) noexcept nogil:
    cdef gs_change *more
    if q.n_trail == q.trail_room:
        more = <gs_change *>realloc(q.trail, 2 * q.trail_room * sizeof(gs_change))
        if more == NULL:
            q.no_memory = True
            q.n_trail -= 1          # the new entry takes the place of the last: the search ends anyway
        else:
            q.trail = more
            q.trail_room *= 2
    q.trail[q.n_trail].old = old
    q.trail[q.n_trail].index = index
    q.trail[q.n_trail].kind = kind
    q.n_trail += 1


cdef inline uint64_t search_mask(const gs_search *q, int32_t left, int32_t right) noexcept nogil:
    """The mask of sections [left, right), a range that is not empty."""
    cdef int low = left >> q.mask_shift
    cdef int high = (right - 1) >> q.mask_shift
    return (~<uint64_t>0 >> (63 - high + low)) << low


cdef void search_undo(gs_search *q, int64_t mark) noexcept nogil:
    cdef gs_pack *p = q.p
    cdef gs_change *c
    cdef int32_t k, i
    while q.n_trail > mark:
        q.n_trail -= 1
        c = &q.trail[q.n_trail]
        i = c.index
        if c.kind == CHANGE_MINIMUM:
            q.minimum[i] = c.old
        elif c.kind == CHANGE_FLOOR:
            q.floor[i] = c.old
        elif c.kind == CHANGE_CAUSE:
            # If the failure depends on sections that the lift changed, it depends on those that forced the lift, too.
            if <uint64_t>(c - 1).old & q.cause:
                q.cause |= <uint64_t>c.old
        elif c.kind == CHANGE_PLACED:
            q.minimum[i] = c.old
            p.offset[i] = -1
            q.area -= (p.size[i] >> q.area_shift) * (p.stop[i] - p.start[i])
            q.rest[p.stop[i] - 1] += p.size[i]
            for k in range(p.start[i], p.stop[i] - 1):
                q.rest[k] += p.size[i]
                q.crossing[k] += 1


cdef inline bint search_raise_floor(gs_search *q, int32_t k, int64_t least) noexcept nogil:
    """Recompute the floor of section k, `least` or more; False if the section's unplaced bytes do not fit above it."""
    cdef gs_pack *p = q.p
    cdef int32_t witness = q.witness[k]
    cdef int64_t floor = q.minimum[witness]
    cdef int32_t i
    if floor != least:
        # The witness is not at the floor: its minimum has risen, or an undo made it outdated.  Look for another.
        for i in range(p.born[k], p.born[k + 1]):
            if q.minimum[i] < floor:
                floor = q.minimum[i]
                witness = i
                if floor == least:
                    break
        if floor != least:
            for i in range(p.carry_begin[k], p.carry_begin[k + 1]):
                if q.minimum[p.carry[i]] < floor:
                    witness = p.carry[i]
                    floor = q.minimum[witness]
                    if floor == least:
                        break
        q.witness[k] = witness
    if floor != q.floor[k]:
        search_note(q, CHANGE_FLOOR, k, q.floor[k])
        q.floor[k] = floor
    if floor == PACK_FAR or q.rest[k] <= q.capacity - floor:
        return True
    q.cause |= search_mask(q, k, k + 1)
    return False


cdef bint search_place(gs_search *q, int32_t b) noexcept nogil:
    """Place b at its minimum; no unplaced buffer that overlaps b in time has a lower one.

    False, with the sections that show this in q.cause, if no packing can follow.
    """
    cdef gs_pack *p = q.p
    cdef int64_t *minimum = q.minimum
    cdef int32_t start = p.start[b]
    cdef int32_t stop = p.stop[b]
    cdef int32_t left = start
    cdef int32_t right = stop
    cdef int64_t at = minimum[b]
    cdef int64_t size = p.size[b]
    cdef int64_t top = at + size
    cdef int32_t i, j, k
    q.changed = q.cause = search_mask(q, start, stop)
    # All unplaced buffers of these sections, b among them, lie at `at` or higher.
    for k in range(start, stop):
        if q.rest[k] > q.capacity - at:
            return False
    p.offset[b] = at
    minimum[b] = PACK_FAR
    search_note(q, CHANGE_PLACED, b, at)
    q.area += (size >> q.area_shift) * (stop - start)
    q.rest[stop - 1] -= size
    for k in range(start, stop - 1):
        q.rest[k] -= size
        q.crossing[k] -= 1
    for i in range(p.carry_begin[start], p.carry_begin[start + 1]):
        j = p.carry[i]
        if minimum[j] < top:
            search_note(q, CHANGE_MINIMUM, j, minimum[j])
            minimum[j] = top
            left = min(left, p.start[j])
            right = max(right, p.stop[j])
    for j in range(p.born[start], p.born[stop]):
        if minimum[j] < top:
            search_note(q, CHANGE_MINIMUM, j, minimum[j])
            minimum[j] = top
            right = max(right, p.stop[j])
    q.changed = search_mask(q, left, right)
    for k in range(start, stop):
        if q.floor[k] < top and not search_raise_floor(q, k, top):
            return False
    # In sections outside b's lifetime, a floor can have risen only if the minimum of its witness has.
    for k in range(left, start):
        if minimum[q.witness[k]] != q.floor[k] and not search_raise_floor(q, k, q.floor[k]):
            return False
    for k in range(stop, right):
        if minimum[q.witness[k]] != q.floor[k] and not search_raise_floor(q, k, q.floor[k]):
            return False
    return True


cdef bint search_lift(gs_search *q, int32_t b) noexcept nogil:
    """Raise the minimum of b, because no packing has b at its minimum; q.cause has the sections that show this.

    So b must rest on an unplaced buffer that overlaps b in time: the new minimum of b is the lowest top (minimum +
    size) of such a buffer.  Twins of b (of equal lifetime and size) at the same minimum are interchangeable with b, and
    are raised, too.  False, with more sections in q.cause, if no packing can follow.
    """
    cdef gs_pack *p = q.p
    cdef int64_t old = q.minimum[b]
    cdef int64_t least
    cdef uint64_t changed = search_mask(q, p.start[b], p.stop[b])
    cdef int32_t c = b
    cdef int32_t i, j, k
    q.cause |= changed          # b's sections, which the code below reads
    while True:
        if q.minimum[c] == old:
            least = PACK_FAR
            for i in range(p.carry_begin[p.start[c]], p.carry_begin[p.start[c] + 1]):
                j = p.carry[i]
                if q.minimum[j] != PACK_FAR and q.minimum[j] + p.size[j] < least:
                    least = q.minimum[j] + p.size[j]
            for j in range(p.born[p.start[c]], p.born[p.stop[c]]):
                if q.minimum[j] != PACK_FAR and j != c and q.minimum[j] + p.size[j] < least:
                    least = q.minimum[j] + p.size[j]
            if least > q.capacity - p.size[c]:
                return False
            search_note(q, CHANGE_MINIMUM, c, old)
            q.minimum[c] = least
            for k in range(p.start[c], p.stop[c]):
                if q.floor[k] == old and not search_raise_floor(q, k, old):
                    return False
        c = q.twin[c]
        if c == b:
            search_note(q, CHANGE_LIFTED, b, <int64_t>changed)
            search_note(q, CHANGE_CAUSE, b, <int64_t>q.cause)
            return True
