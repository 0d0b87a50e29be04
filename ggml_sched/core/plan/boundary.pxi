# Boundaries: moving the boundary of two splits to the position where the fewest bytes are copied.
#
# Some nodes at a boundary may move to the other backend: neither their weights nor the caller determine their backend.
# For each boundary between nodes on backend a and nodes on backend b, every position among such nodes on both sides is
# evaluated.  The cost of a position is the bytes of all distinct tensors that are then copied between backends.  ggml
# has no such pass.

cdef enum:
    BOUNDARY_ROUNDS = 8

ctypedef struct gs_readers:
    int32_t *count          # [n_backends][n_tensors]: how often nodes of each backend read a tensor
    unsigned char *known    # [n_tensors]: whether a tensor's readers have been counted, which is done on first use


cdef int readers_init(gs_readers *c, const gs_request *r) noexcept nogil:
    """Allocate the counts; no tensor's readers are counted yet."""
    cdef int64_t n = r.g.n_tensors
    c.count = <int32_t *>calloc(max(n, 1) * r.p.n_backends, sizeof(int32_t))
    c.known = <unsigned char *>calloc(max(n, 1), 1)
    return GS_NO_HOST_MEMORY if c.count == NULL or c.known == NULL else GS_OK


cdef void readers_free(gs_readers *c) noexcept nogil:
    free(c.count)
    free(c.known)


cdef void readers_move(gs_readers *c, const gs_graph *g, int32_t id, int32_t a, int32_t b) noexcept nogil:
    """Update the counts after node id has moved from backend a to b, where it now reads its sources."""
    cdef int32_t k
    for k in range(g.src_begin[id], g.src_begin[id + 1]):
        if c.known[g.src[k]]:
            c.count[<int64_t>a * g.n_tensors + g.src[k]] -= 1
            c.count[<int64_t>b * g.n_tensors + g.src[k]] += 1


cdef int64_t bytes_sent(const gs_request *r, const int32_t *assign, gs_readers *c, int32_t id) noexcept nogil:
    """Bytes of all copies of tensor id: one for each backend that computes a reader but cannot read id's memory."""
    cdef const gs_graph *g = r.g
    cdef int32_t b, k, n = 0
    if not c.known[id]:
        c.known[id] = True
        for k in range(g.reader_begin[id], g.reader_begin[id + 1]):
            c.count[<int64_t>assign[g.reader[k]] * g.n_tensors + id] += 1
    for b in range(r.p.n_backends):
        n += c.count[<int64_t>b * g.n_tensors + id] > 0 and not reads_tensor(r, assign, b, id)
    return n * g.nbytes[id]


cdef int64_t bytes_around(const gs_request *r, const int32_t *assign, gs_readers *c, int32_t id) noexcept nogil:
    """The sum of bytes_sent over the tensors that moving node id affects: its sources, itself, and its views.

    A view that a node on another backend writes to counts twice: it is copied there and written back.
    """
    cdef const gs_graph *g = r.g
    cdef int64_t total = bytes_sent(r, assign, c, id)
    cdef int32_t k, q, v
    cdef bint twice
    for k in range(g.src_begin[id], g.src_begin[id + 1]):
        twice = False
        for q in range(g.src_begin[id], k):
            twice |= g.src[q] == g.src[k]
        if not twice:
            total += bytes_sent(r, assign, c, g.src[k])
    v = g.first_view[id]
    while v >= 0:
        total += bytes_sent(r, assign, c, v)
        if g.role[v] & GS_ROLE_WRITES and not reads_tensor(r, assign, assign[v], id):
            total += 2 * g.nbytes[v]
        v = g.next_view[v]
    return total


cdef bint is_open(const gs_request *r, const unsigned char *reason, int32_t id, int32_t a, int32_t b) noexcept nogil:
    """Whether node id may be computed on either of backends a and b: both support it, and no rule determines which."""
    return ((reason[id] == GS_REASON_NEIGHBOUR or reason[id] == GS_REASON_BOUNDARY) and r.g.view_src[id] < 0
            and request_supports(r, a, id) and request_supports(r, b, id))


cdef void move_node(const gs_request *r, int32_t *assign, gs_readers *c, int32_t id, int32_t to) noexcept nogil:
    """Assign a node and the views of its memory to another backend, except views that are nodes writing to it."""
    cdef int32_t v = r.g.first_view[id]
    readers_move(c, r.g, id, assign[id], to)
    assign[id] = to
    while v >= 0:
        if not r.g.role[v] & GS_ROLE_WRITES:
            assign[v] = to
        v = r.g.next_view[v]


cdef bint tighten_once(const gs_request *r, int32_t *assign, unsigned char *reason, gs_readers *c, const int32_t *work,
                       int32_t n) noexcept nogil:
    """Move each boundary among the n computing nodes to its cheapest position; returns whether any moved."""
    cdef int32_t k, seam, low, high, a, b, best
    cdef int64_t cost, best_cost
    cdef bint moved = False
    for seam in range(1, n):
        a, b = assign[work[seam - 1]], assign[work[seam]]
        if a == b:
            continue
        low = high = seam
        while low > 0 and assign[work[low - 1]] == a and is_open(r, reason, work[low - 1], a, b):
            low -= 1
        while high < n and assign[work[high]] == b and is_open(r, reason, work[high], a, b):
            high += 1
        if low == high:
            continue
        # Move the boundary left step by step, then back, then right; costs are relative to the boundary at `seam`.
        best, best_cost = seam, 0
        cost = 0
        for k in range(seam - 1, low - 1, -1):
            cost -= bytes_around(r, assign, c, work[k])
            move_node(r, assign, c, work[k], b)
            cost += bytes_around(r, assign, c, work[k])
            if cost < best_cost:
                best, best_cost = k, cost
        for k in range(low, seam):
            move_node(r, assign, c, work[k], a)
        cost = 0
        for k in range(seam, high):
            cost -= bytes_around(r, assign, c, work[k])
            move_node(r, assign, c, work[k], a)
            cost += bytes_around(r, assign, c, work[k])
            if cost < best_cost:
                best, best_cost = k + 1, cost
        for k in range(seam, high):
            move_node(r, assign, c, work[k], b)
        for k in range(best, seam):
            move_node(r, assign, c, work[k], b)
            reason[work[k]] = GS_REASON_BOUNDARY
        for k in range(seam, best):
            move_node(r, assign, c, work[k], a)
            reason[work[k]] = GS_REASON_BOUNDARY
        moved |= best != seam
    return moved


cdef bint has_open_seam(const gs_request *r, const int32_t *assign, const unsigned char *reason) noexcept nogil:
    """Whether any boundary has a node beside it that may move to the other side."""
    cdef const int32_t *work = r.g.work
    cdef int32_t i, a, b
    for i in range(1, r.g.n_work):
        a, b = assign[work[i - 1]], assign[work[i]]
        if a != b and (is_open(r, reason, work[i - 1], a, b) or is_open(r, reason, work[i], a, b)):
            return True
    return False


cdef int tighten_boundaries(const gs_request *r, int32_t *assign, unsigned char *reason) noexcept nogil:
    """Move each boundary to its cheapest position; on a tie it stays.

    Several rounds, because moving one boundary may change the costs of another before it.
    """
    cdef gs_readers c
    cdef int32_t i
    cdef int status
    if r.p.n_backends == 1 or not has_open_seam(r, assign, reason):
        return GS_OK
    status = readers_init(&c, r)
    for i in range(BOUNDARY_ROUNDS if status == GS_OK else 0):
        if not tighten_once(r, assign, reason, &c, r.g.work, r.g.n_work):
            break
    readers_free(&c)
    return status


cdef int plan_default(const gs_request *r, int32_t *assign, unsigned char *reason, gs_splits *splits,
                      int32_t *failed) noexcept nogil:
    """Choose placement, splits and copies by the default policy."""
    cdef int status = place_default(r, assign, reason, failed)
    if status == GS_OK:
        status = tighten_boundaries(r, assign, reason)
    if status == GS_OK:
        status = split_default(r, assign, reason, splits)
    if status == GS_OK:
        splits_inputs_first(splits, r.g)
        status = fetch_ahead(splits, r, assign)
    if status == GS_OK:
        status = splits_add_slots(splits, r)
    return status
