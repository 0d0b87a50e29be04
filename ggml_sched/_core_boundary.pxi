# Boundaries: moving the cut between two splits to where the fewest bytes cross.
#
# The rules leave some nodes at the seam of two splits open: neither weights nor the
# caller say where they run.  For each seam between a run of nodes on backend a and
# the next run on b, every cut inside the open stretch is weighed: the bytes of all
# distinct tensors that the backends would have to send each other.  Upstream never did this.

cdef enum:
    BOUNDARY_ROUNDS = 8

ctypedef struct gs_readers:
    int32_t *count          # [n_backends][n_tensors]: how often nodes of each backend read a tensor
    int32_t *first_view     # of each root, -1; then next_view
    int32_t *next_view
    char *memory


cdef int readers_init(gs_readers *c, const gs_request *r, const int32_t *assign) noexcept nogil:
    """Where each tensor is read (pure views left out: they read nothing), and the views of each root."""
    cdef const gs_graph *g = r.g
    cdef int32_t n = g.n_tensors, i
    cdef size_t slim = <size_t>(n + 1) * sizeof(int32_t)
    memset(c, 0, sizeof(gs_readers))
    c.memory = <char *>calloc(slim, r.n_backends + 2)
    if c.memory == NULL:
        return GS_NO_HOST_MEMORY
    c.first_view = <int32_t *>c.memory
    c.next_view = <int32_t *>(c.memory + slim)
    c.count = <int32_t *>(c.memory + 2 * slim)
    memset(c.first_view, 0xff, 2 * slim)     # -1
    for i in range(n - 1, -1, -1):
        if g.view_src[i] >= 0:
            c.next_view[i] = c.first_view[g.view_src[i]]
            c.first_view[g.view_src[i]] = i
    for i in range(g.n_work):
        readers_add(c, g, g.work[i], assign[g.work[i]], 1)
    return GS_OK


cdef inline void readers_add(gs_readers *c, const gs_graph *g, int32_t id, int32_t backend, int32_t by) noexcept nogil:
    """Node id reads its sources on a backend (by = 1), or does so no longer (-1)."""
    cdef int32_t k
    for k in range(g.src_begin[id], g.src_begin[id + 1]):
        c.count[<int64_t>backend * g.n_tensors + g.src[k]] += by


cdef int64_t bytes_sent(const gs_request *r, const int32_t *assign, const gs_readers *c, int32_t id) noexcept nogil:
    """Bytes of tensor id that travel, because nodes read it where its memory is not."""
    cdef int32_t b, n = 0
    for b in range(r.n_backends):
        n += c.count[<int64_t>b * r.g.n_tensors + id] > 0 and not reads_tensor(r, assign, b, id)
    return n * r.g.nbytes[id]


cdef int64_t bytes_around(const gs_request *r, const int32_t *assign, const gs_readers *c, int32_t id) noexcept nogil:
    """bytes_sent over everything that moving node id changes: its sources, itself, and its views.

    A view that a node elsewhere writes to goes there and back.
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
    v = c.first_view[id]
    while v >= 0:
        total += bytes_sent(r, assign, c, v)
        if g.kind[v] & KIND_WRITES and not reads_tensor(r, assign, assign[v], id):
            total += 2 * g.nbytes[v]
        v = c.next_view[v]
    return total


cdef bint is_open(const gs_request *r, const unsigned char *why, int32_t id, int32_t a, int32_t b) noexcept nogil:
    """Whether the rules leave it open on which of two backends node id runs."""
    return ((why[id] == WHY_NEIGHBOUR or why[id] == WHY_BOUNDARY) and r.g.view_src[id] < 0
            and request_supports(r, a, id) and request_supports(r, b, id))


cdef void move_node(const gs_request *r, int32_t *assign, gs_readers *c, int32_t id, int32_t to) noexcept nogil:
    """Assign a node and the pure views of its memory."""
    cdef int32_t v = c.first_view[id]
    readers_add(c, r.g, id, assign[id], -1)
    readers_add(c, r.g, id, to, 1)
    assign[id] = to
    while v >= 0:
        if not r.g.kind[v] & KIND_WRITES:
            assign[v] = to
        v = c.next_view[v]


cdef bint tighten_once(const gs_request *r, int32_t *assign, unsigned char *why, gs_readers *c, const int32_t *work,
                       int32_t n) noexcept nogil:
    """Move every seam of the n computing nodes to its cheapest cut, one after the other; whether any moved."""
    cdef int32_t k, seam, low, high, a, b, best
    cdef int64_t cost, best_cost
    cdef bint moved = False
    for seam in range(1, n):
        a, b = assign[work[seam - 1]], assign[work[seam]]
        if a == b:
            continue
        low = high = seam
        while low > 0 and assign[work[low - 1]] == a and is_open(r, why, work[low - 1], a, b):
            low -= 1
        while high < n and assign[work[high]] == b and is_open(r, why, work[high], a, b):
            high += 1
        if low == high:
            continue
        # Weigh the cuts from the seam to the left, undo, then to the right; costs are relative to the seam's.
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
            why[work[k]] = WHY_BOUNDARY
        for k in range(seam, best):
            move_node(r, assign, c, work[k], a)
            why[work[k]] = WHY_BOUNDARY
        moved |= best != seam
    return moved


cdef bint has_open_seam(const gs_request *r, const int32_t *assign, const unsigned char *why) noexcept nogil:
    """Whether two neighbours on different backends could share one."""
    cdef const int32_t *work = r.g.work
    cdef int32_t i, a, b
    for i in range(1, r.g.n_work):
        a, b = assign[work[i - 1]], assign[work[i]]
        if a != b and (is_open(r, why, work[i - 1], a, b) or is_open(r, why, work[i], a, b)):
            return True
    return False


cdef int tighten_boundaries(const gs_request *r, int32_t *assign, unsigned char *why) noexcept nogil:
    """Move every seam to its cheapest cut; on a tie it stays.

    Seams have tensors in common, so that one may open a better cut for another before it: several rounds.
    """
    cdef gs_readers c
    cdef int32_t i
    if r.n_backends == 1 or not has_open_seam(r, assign, why):
        return GS_OK
    if readers_init(&c, r, assign) != GS_OK:
        return GS_NO_HOST_MEMORY
    for i in range(BOUNDARY_ROUNDS):
        if not tighten_once(r, assign, why, &c, r.g.work, r.g.n_work):
            break
    free(c.memory)
    return GS_OK
