# cython: language_level=3
"""The passes of ggml's first-generation scheduler: assigning backends, then cutting splits.

Each pass is a function.  `assign[id]` is a backend index; -1: none yet.  Cases that the first generation left undefined
(nothing allocated, unsupported ops, views on another backend than their roots) are handled in `seed_complete`.
"""

from libc.stdint cimport INT32_MAX, int32_t, int64_t

from ggml_sched._c cimport *
from ggml_sched.core.plan.placement cimport (
    gs_splits, place_deps, reads_tensor, reason_of_refusal, request_supports, splits_add_input, splits_finish,
    splits_known, splits_new_copy, splits_note, splits_open, splits_write_through,
)


cdef int32_t seed_from_sources(const gs_request *r, const int32_t *at, int32_t id) noexcept nogil:
    """Choose a backend for node id among those of its sources, at[source] (-1: none); returns -1 if none has one.

    A better backend replaces the choice so far if its source is at least as large as the one of that choice.  As in
    ggml, the result depends on the order of the sources.
    """
    cdef const gs_graph *g = r.g
    cdef int32_t best = INT32_MAX, k, s
    cdef int64_t size = 0
    for k in range(g.src_begin[id], g.src_begin[id + 1]):
        s = g.src[k]
        if 0 <= at[s] < best and g.nbytes[s] >= size:
            best = at[s]
            size = g.nbytes[s]
    return -1 if best == INT32_MAX else best


cdef void seed_assign_allocated(const gs_request *r, int32_t *assign, unsigned char *reason) noexcept nogil:
    """Pass 1: assign leafs, then nodes, by the buffer that they, their root or else their sources have."""
    cdef const gs_graph *g = r.g
    cdef int32_t i, id
    for i in range(g.n_leafs + g.n_nodes):
        id = g.leaf[i] if i < g.n_leafs else g.node[i - g.n_leafs]
        if assign[id] >= 0:
            continue
        if r.p.resident[id] >= 0:
            assign[id] = r.p.resident[id]
            reason[id] = GS_REASON_RESIDENT
        else:
            assign[id] = seed_from_sources(r, r.p.resident, id)
            reason[id] = GS_REASON_WEIGHT


cdef void seed_assign_nodes(const gs_request *r, int32_t *assign, unsigned char *reason) noexcept nogil:
    """Pass 2: assign the remaining nodes, in order, by the backends that their sources are assigned to so far."""
    cdef const gs_graph *g = r.g
    cdef int32_t i, id
    for i in range(g.n_nodes):
        id = g.node[i]
        if assign[id] < 0:
            assign[id] = seed_from_sources(r, assign, id)
            reason[id] = GS_REASON_SOURCE


cdef void seed_assign_sources(const gs_request *r, int32_t *assign, unsigned char *reason) noexcept nogil:
    """Pass 3: sources still without a backend take that of their first consumer."""
    cdef const gs_graph *g = r.g
    cdef int32_t i, k, id
    for i in range(g.n_nodes):
        id = g.node[i]
        for k in range(g.src_begin[id], g.src_begin[id + 1]):
            if assign[g.src[k]] < 0 and assign[id] >= 0:
                assign[g.src[k]] = assign[id]
                reason[g.src[k]] = GS_REASON_CONSUMER


cdef int seed_complete(const gs_request *r, int32_t *assign, unsigned char *reason, int32_t *failed) noexcept nogil:
    """Complete the placement.

    Nodes without a backend get the best one.  Nodes whose backend does not support them move to the best backend that
    does.  Views get the backend of their root, and leafs without a backend that of their first reader.
    """
    cdef const gs_graph *g = r.g
    cdef int32_t i, k, id, root, b
    for i in range(g.n_nodes):
        id = g.node[i]
        root = g.memory[id]
        if g.role[id] & GS_ROLE_VIEW and root != id:
            if assign[root] < 0:
                assign[root] = max(assign[id], 0)
                reason[root] = GS_REASON_CONSUMER
            assign[id] = assign[root]
            reason[id] = GS_REASON_ROOT
        if assign[id] < 0:
            assign[id] = 0
            reason[id] = GS_REASON_FIRST
        if not g.role[id] & GS_ROLE_VIEW and not request_supports(r, assign[id], id):
            if r.p.resident[id] >= 0 and root == id:
                failed[0] = id
                return GS_BAD_PLACEMENT
            for b in range(r.p.n_backends):
                if request_supports(r, b, id):
                    break
            else:
                failed[0] = id
                return GS_UNSUPPORTED_OP
            assign[id] = b
            reason[id] = reason_of_refusal(reason[id])
        for k in range(g.src_begin[id], g.src_begin[id + 1]):
            if assign[g.src[k]] < 0:
                assign[g.src[k]] = assign[id]
                reason[g.src[k]] = GS_REASON_CONSUMER
        if assign[root] < 0:
            assign[root] = assign[id]
            reason[root] = GS_REASON_CONSUMER
    for i in range(g.n_views):
        id = g.view[i]
        if g.position[id] < 0:
            # A leaf that is a view: ggml has none.
            root = g.memory[id]
            if assign[root] < 0:
                assign[root] = assign[id]
                reason[root] = GS_REASON_CONSUMER
            assign[id] = assign[root]
            reason[id] = GS_REASON_ROOT
    place_deps(g, assign, reason)
    return GS_OK


cdef int seed_split(const gs_request *r, const int32_t *assign, gs_splits *w) noexcept nogil:
    """Pass 4: end a split where the backend changes; copy each source on another backend before the split reads it.

    Each tensor has one copy on each backend, and every split that reads it makes the copy again; as in the first
    generation, the split's inputs list the copy once for each node that reads it.
    """
    cdef const gs_graph *g = r.g
    cdef int32_t i, k, id, s, copy, here
    cdef bint closed = True             # the next node begins a split: at the start, and after a write-back
    for i in range(g.n_nodes):
        id = g.node[i]
        if g.role[id] & GS_ROLE_VIEW:
            continue
        here = assign[id]
        if closed or w.split_backend.at[w.split_backend.n - 1] != here:
            if splits_open(w, here, i if w.split_backend.n else 0) != GS_OK:
                return GS_NO_HOST_MEMORY
            closed = False
        if g.role[id] & GS_ROLE_WRITES and not reads_tensor(r, assign, here, g.view_src[id]):
            if splits_write_through(w, g, id, here) != GS_OK:
                return GS_NO_HOST_MEMORY
            closed = True
        for k in range(g.src_begin[id], g.src_begin[id + 1]):
            s = w.src[k]
            if s >= g.n_tensors or reads_tensor(r, assign, here, s):
                continue
            copy = splits_known(w, s, here)
            if copy < 0:
                copy = splits_new_copy(w, s, s, here, 0)
                if copy < 0:
                    return GS_NO_HOST_MEMORY
                splits_note(w, s, copy)
            if splits_add_input(w, copy) != GS_OK:
                return GS_NO_HOST_MEMORY
            w.src[k] = g.n_tensors + copy
    return splits_finish(w, g, assign)


cdef int plan_seed(const gs_request *r, int32_t *assign, unsigned char *reason, gs_splits *w, int32_t *failed) noexcept nogil:
    """Choose placement, splits and copies by the rules of ggml's first generation; failed[0]: the node of an error."""
    cdef int32_t i
    cdef int status
    for i in range(r.g.n_tensors):
        assign[i] = -1 if r.p.assigned == NULL else r.p.assigned[i]
        reason[i] = GS_REASON_USER if assign[i] >= 0 else GS_REASON_NOTHING
        if r.p.resident[i] >= 0 and not r.g.role[i] & GS_ROLE_WRITES:
            # A resident tensor, or a view of one, stays on the backend of its memory.
            assign[i] = r.p.resident[i]
            reason[i] = GS_REASON_RESIDENT
    seed_assign_allocated(r, assign, reason)
    seed_assign_nodes(r, assign, reason)
    seed_assign_sources(r, assign, reason)
    status = seed_complete(r, assign, reason, failed)
    if status != GS_OK:
        return status
    return seed_split(r, assign, w)
