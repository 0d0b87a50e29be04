# Splits: cutting a graph with assigned backends into splits, and the copies between them.
#
# A gs_splits owns its arrays.  Invariant: splits cover the nodes in order without gaps; once the splits are made, every
# source in `src` can be read by the node's backend: it is a graph tensor, or n_tensors + c for copy c.  Corresponds to
# ggml_backend_sched_split.

cdef int splits_init(gs_splits *w, const gs_graph *g) noexcept nogil:
    memset(w, 0, sizeof(gs_splits))
    w.src = <int32_t *>malloc(max(g.src_begin[g.n_tensors], 1) * sizeof(int32_t))
    w.last_copy = <int32_t *>calloc(max(g.n_tensors, 1), sizeof(int32_t))
    w.version = <int32_t *>calloc(max(g.n_tensors, 1), sizeof(int32_t))
    if w.src == NULL or w.last_copy == NULL or w.version == NULL:
        return GS_NO_HOST_MEMORY
    memcpy(w.src, g.src, g.src_begin[g.n_tensors] * sizeof(int32_t))
    return GS_OK


cdef void splits_free(gs_splits *w) noexcept nogil:
    cdef int32_t i
    for i in range(N_SPLIT_LISTS):
        free(splits_lists(w)[i].at)
    free(w.src)
    free(w.last_copy)
    free(w.version)
    memset(w, 0, sizeof(gs_splits))


cdef int splits_open(gs_splits *w, int32_t backend, int32_t start) noexcept nogil:
    """Begin a split at a node position; the previous split ends there."""
    if (ints_push(&w.split_backend, backend) != GS_OK or ints_push(&w.split_start, start) != GS_OK
            or ints_push(&w.split_stop, start) != GS_OK or ints_push(&w.split_inputs, w.inputs.n) != GS_OK):
        return GS_NO_HOST_MEMORY
    if w.split_stop.n > 1:
        w.split_stop.at[w.split_stop.n - 2] = start
    return GS_OK


cdef int splits_finish(gs_splits *w, const gs_graph *g, const int32_t *assign) noexcept nogil:
    """End the last split at the graph's end.  A graph whose nodes are all views has one split, which gives their roots
    memory."""
    if w.split_stop.n == 0 and g.n_nodes > 0 and splits_open(w, assign[g.node[0]], 0) != GS_OK:
        return GS_NO_HOST_MEMORY
    if w.split_stop.n:
        w.split_stop.at[w.split_stop.n - 1] = g.n_nodes
    return GS_OK


cdef int32_t splits_new_copy(gs_splits *w, int32_t like, int32_t source, int32_t backend,
                             int32_t version) noexcept nogil:
    """Add a copy of `source`, at its present `version`, on `backend`, with the layout of `like`.

    Returns the index of the copy, or -1 if malloc fails.
    """
    if (ints_push(&w.copy_like, like) != GS_OK or ints_push(&w.copy_from, source) != GS_OK
            or ints_push(&w.copy_backend, backend) != GS_OK or ints_push(&w.copy_version, version) != GS_OK
            or ints_push(&w.copy_kept, 0) != GS_OK or ints_push(&w.copy_next, -1) != GS_OK):
        return -1
    return w.copy_like.n - 1


cdef int32_t splits_known(const gs_splits *w, int32_t id, int32_t backend) noexcept nogil:
    """The latest copy of tensor id on a backend among those given to splits_note; -1: there is none."""
    cdef int32_t copy = w.last_copy[id] - 1
    while copy >= 0 and w.copy_backend.at[copy] != backend:
        copy = w.copy_next.at[copy]
    return copy


cdef void splits_note(gs_splits *w, int32_t id, int32_t copy) noexcept nogil:
    """Record a copy of tensor id for splits_known."""
    w.copy_next.at[copy] = w.last_copy[id] - 1
    w.last_copy[id] = copy + 1


cdef int splits_add_input(gs_splits *w, int32_t copy) noexcept nogil:
    """Add a copy to the inputs of the open split."""
    if ints_push(&w.inputs, copy) != GS_OK:
        return GS_NO_HOST_MEMORY
    w.split_inputs.at[w.split_inputs.n - 1] = w.inputs.n
    return GS_OK


cdef void place_deps(const gs_graph *g, int32_t *assign, unsigned char *reason) noexcept nogil:
    """Assign alloc dependencies that no node reads to the backend of the first node that depends on them."""
    cdef int32_t i, k, id, s
    if g.dep_begin == NULL:
        return
    for i in range(g.n_nodes):
        id = g.node[i]
        for k in range(g.dep_begin[id], g.dep_begin[id + 1]):
            s = g.memory[g.dep[k]]
            if assign[s] < 0:
                assign[s] = assign[id]
                reason[s] = GS_REASON_CONSUMER


cdef int splits_write_through(gs_splits *w, const gs_graph *g, int32_t id, int32_t backend) noexcept nogil:
    """For a node that writes to memory of another backend, add a copy of the written view, and its write-back.

    Sources of the node with the same layout and offset in that memory are replaced by the copy, so that the node reads
    and writes one memory.
    """
    cdef int32_t root = g.view_src[id], k, s
    cdef int32_t copy = splits_new_copy(w, id, root, backend, w.version[root])
    if copy < 0 or splits_add_input(w, copy) != GS_OK:
        return GS_NO_HOST_MEMORY
    for k in range(g.src_begin[id], g.src_begin[id + 1]):
        s = g.src[k]
        if g.memory[s] == root and g.view_offs[s] == g.view_offs[id] and layout_equal(&g.layout[s], &g.layout[id]):
            w.src[k] = g.n_tensors + copy
    if ints_push(&w.back_node, id) != GS_OK or ints_push(&w.back_copy, copy) != GS_OK:
        return GS_NO_HOST_MEMORY
    return GS_OK


cdef inline bint is_foreign_weight(const gs_request *r, int32_t id) noexcept nogil:
    """Whether a tensor is a resident weight: copies of it are kept, streamed or fetched, and have one copy slot."""
    return r.p.resident[id] >= 0 and (r.p.usage[id] == GS_USAGE_WEIGHTS or is_stored(r, id))


cdef inline bint has_slots(const gs_splits *w, const gs_request *r, int32_t c) noexcept nogil:
    """Whether a copy is made by each compute, and so has several copy slots.

    A copy with a write-back is written back at once, so that one copy slot is enough.
    """
    return w.copy_like.at[c] == w.copy_from.at[c] and not is_foreign_weight(r, w.copy_like.at[c])


cdef int splits_add_slots(gs_splits *w, const gs_request *r) noexcept nogil:
    """Add further copy slots to every copy that is made by each compute; consecutive computes use them in turn.

    GS_NO_HOST_MEMORY is also the error for more slots than ids can number: their arrays would take about 100 GiB.
    """
    cdef int64_t ids = <int64_t>r.g.n_tensors + w.copy_like.n
    cdef int32_t c, k
    for c in range(w.copy_like.n):
        ids += r.p.policy.n_copies - 1 if has_slots(w, r, c) else 0
    if ids > GS_MAX_TENSORS:
        return GS_NO_HOST_MEMORY
    for c in range(w.copy_like.n):
        for k in range(r.p.policy.n_copies - 1 if has_slots(w, r, c) else 0):
            if ints_push(&w.slot_copy, c) != GS_OK:
                return GS_NO_HOST_MEMORY
    return GS_OK


cdef void splits_inputs_first(gs_splits *w, const gs_graph *g) noexcept nogil:
    """In each split, move copies of leafs before copies of computed tensors; otherwise keep the order."""
    cdef int32_t split, first = 0, i, k, c
    for split in range(w.split_inputs.n):
        for i in range(first, w.split_inputs.at[split]):
            c = w.inputs.at[i]
            if g.op[g.memory[w.copy_like.at[c]]] != GS_OP_NONE:
                continue
            k = i
            while k > first and g.op[g.memory[w.copy_like.at[w.inputs.at[k - 1]]]] != GS_OP_NONE:
                w.inputs.at[k] = w.inputs.at[k - 1]
                k -= 1
            w.inputs.at[k] = c
        first = w.split_inputs.at[split]
