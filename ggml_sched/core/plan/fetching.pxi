# Fetching ahead: copies of stored weights are made before an earlier split than the one that reads them.
#
# A store fetches in the order of first uses, while backends compute.  A fetch begins as early as its memory allows: the
# copies whose fetch has begun, and whose last reader has not run, take no more bytes together than the window of their
# backend.  A copy that does not fit beside those before it is fetched directly before the split that reads it.  A store
# that computes a split of its own (rows of its weights) does so before it fetches what later splits read.
# The results of such a split are copied out in the store's own queue, before its next fetch.
# Invariant: each store's fetches stay in the order of first uses.  In a split, results of stores come before fetches,
# and fetches before other inputs (input_rank); inputs of equal rank stay in their order.

ctypedef struct gs_fetches:
    int64_t *alive              # [n_backends][n_splits] bytes of fetched copies alive while a split runs
    int32_t *begun              # [n_copies] the split before which the copy is made
    int32_t *last               # [n_copies] the last split that reads the copy
    int32_t *least              # [n_backends] of each store: the earliest split before which it may begin another fetch
    int32_t *inputs             # [n_inputs] the inputs of all splits in their new order, which gs_splits.inputs gets
    int32_t *stop               # [n_splits] one past each split's last fetch in `inputs`
    void *memory


cdef int fetches_init(gs_fetches *f, const gs_splits *w, const gs_request *r) noexcept nogil:
    """Allocate the arrays; set `begun` to the split that has the copy as an input, `last` to its last reader."""
    cdef const gs_graph *g = r.g
    cdef int32_t n = w.copy_like.n, n_splits = w.split_start.n, split, first = 0, i, k, id
    cdef int64_t cells = <int64_t>r.p.n_backends * n_splits
    f.memory = calloc(cells * sizeof(int64_t)
                      + (2 * <int64_t>n + r.p.n_backends + w.inputs.n + n_splits) * sizeof(int32_t), 1)
    if f.memory == NULL:
        return GS_NO_HOST_MEMORY
    f.alive = <int64_t *>f.memory
    f.begun = <int32_t *>(f.alive + cells)
    f.last = f.begun + n
    f.least = f.last + n
    f.inputs = f.least + r.p.n_backends
    f.stop = f.inputs + w.inputs.n
    for split in range(n_splits):
        for i in range(first, w.split_inputs.at[split]):
            f.begun[w.inputs.at[i]] = split
        first = w.split_inputs.at[split]
        for i in range(w.split_start.at[split], w.split_stop.at[split]):
            id = g.node[i]
            for k in range(g.src_begin[id], g.src_begin[id + 1]):
                if w.src[k] >= g.n_tensors:
                    f.last[w.src[k] - g.n_tensors] = split
    return GS_OK


cdef int64_t *alive_on(gs_fetches *f, const gs_splits *w, int32_t c) noexcept nogil:
    """The bytes of fetched copies that are alive during each split on the backend of copy c."""
    return f.alive + <int64_t>w.copy_backend.at[c] * w.split_start.n


cdef int64_t fetched_size(const gs_splits *w, const gs_request *r, int32_t c) noexcept nogil:
    """The bytes that c, a copy of a stored weight, takes; INT64_MAX if they exceed 64 bits: the walk then fails."""
    cdef int32_t b = w.copy_backend.at[c], like = w.copy_like.at[c]
    cdef int64_t size
    if (gs_checked_add(request_size(r, b, like), r.margin[r.p.resident[like]], &size) != GS_OK
            or gs_checked_align(size, r.p.backends[b].alignment, &size) != GS_OK):
        return INT64_MAX
    return size


cdef void count_alive(gs_fetches *f, const gs_splits *w, const gs_request *r) noexcept nogil:
    """Add each fetched copy to the bytes alive from its first to its last reader; a sum stops at INT64_MAX."""
    cdef int64_t *alive
    cdef int64_t size
    cdef int32_t c, split
    for c in range(w.copy_like.n):
        if not is_stored(r, w.copy_like.at[c]):
            continue
        size, alive = fetched_size(w, r, c), alive_on(f, w, c)
        for split in range(f.begun[c], f.last[c] + 1):
            alive[split] = INT64_MAX if alive[split] > INT64_MAX - size else alive[split] + size


cdef void fetch_earlier(gs_fetches *f, const gs_splits *w, const gs_request *r, int32_t c) noexcept nogil:
    """Move the fetch of copy c to the earliest split that the window and the store's order allow."""
    cdef int32_t store = r.p.resident[w.copy_like.at[c]]
    cdef int64_t room = r.window[w.copy_backend.at[c]] - fetched_size(w, r, c)
    cdef int64_t *alive = alive_on(f, w, c)
    while f.begun[c] > f.least[store] and alive[f.begun[c] - 1] <= room:
        f.begun[c] -= 1
        alive[f.begun[c]] += fetched_size(w, r, c)
    f.least[store] = f.begun[c]


cdef int input_rank(const gs_splits *w, const gs_request *r, const int32_t *assign, int32_t c) noexcept nogil:
    """The rank of copy c, by which the inputs of a split are sorted: 0 for results of a store, 1 for fetches, 2 for
    other copies."""
    cdef int32_t like = w.copy_like.at[c]
    if is_stored(r, like):
        return 1
    return 0 if r.p.resident[like] < 0 and is_store(r, assign[r.g.memory[like]]) else 2


cdef void order_inputs(gs_fetches *f, gs_splits *w, const gs_request *r, const int32_t *assign) noexcept nogil:
    """Sort the inputs of each split by rank (input_rank), and fetches of one split by first use."""
    cdef int32_t split, first = 0, i, c, n, at = 0, n_splits = w.split_start.n
    cdef int rank
    for i in range(w.inputs.n):
        if is_stored(r, w.copy_like.at[w.inputs.at[i]]):
            f.stop[f.begun[w.inputs.at[i]]] += 1
    for split in range(n_splits):
        n = f.stop[split]
        for rank in range(3):
            if rank == 1:
                f.stop[split] = at      # where the loop below puts the split's next fetch; then, one past the last
                at += n
                continue
            for i in range(first, w.split_inputs.at[split]):
                c = w.inputs.at[i]
                if input_rank(w, r, assign, c) == rank:
                    f.inputs[at] = c
                    at += 1
        first = w.split_inputs.at[split]
        w.split_inputs.at[split] = at
    for i in range(w.inputs.n):
        c = w.inputs.at[i]
        if is_stored(r, w.copy_like.at[c]):
            f.inputs[f.stop[f.begun[c]]] = c
            f.stop[f.begun[c]] += 1
    memcpy(w.inputs.at, f.inputs, w.inputs.n * sizeof(int32_t))


cdef int fetch_ahead(gs_splits *w, const gs_request *r, const int32_t *assign) noexcept nogil:
    """Move each copy of a stored weight to the inputs of an earlier split, where the window of its backend allows it.

    The only error is GS_NO_HOST_MEMORY.
    """
    cdef gs_fetches f
    cdef int32_t split, first = 0, i
    if r.store == NULL or w.inputs.n == 0:
        return GS_OK
    if fetches_init(&f, w, r) != GS_OK:
        return GS_NO_HOST_MEMORY
    count_alive(&f, w, r)
    for split in range(w.split_start.n):
        for i in range(first, w.split_inputs.at[split]):
            if is_stored(r, w.copy_like.at[w.inputs.at[i]]):
                fetch_earlier(&f, w, r, w.inputs.at[i])
        first = w.split_inputs.at[split]
        if is_store(r, w.split_backend.at[split]):
            f.least[w.split_backend.at[split]] = split + 1
    order_inputs(&f, w, r, assign)
    free(f.memory)
    return GS_OK
