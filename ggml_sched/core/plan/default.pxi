# The placement of the default policy, and its splits.
#
# Each pass is a function over `assign` (the backend of each tensor; -1: none yet) and `reason` (GS_REASON_*, why it has
# this backend).  An open node is one without a backend so far.  The passes in order, as place_default and plan_default
# call them:
#
#   fix          assigns residents, tensors that the caller assigned, inputs, and nodes with weights
#   spread       assigns open nodes to the backend of the nearest assigned node: first to devices, in the order of the
#                nodes (down) and against it (up), then also to the host
#   settle       assigns the other open nodes to the backend of most of their sources; moves nodes to better backends
#   follow       assigns views to the backend of their roots, leafs to that of their first reader
#   tighten      moves split boundaries to the positions where the fewest bytes are copied

cdef int32_t best_reader(const gs_request *r, const int32_t *assign, int32_t id, int32_t memory) noexcept nogil:
    """The best backend that can read the resident tensor `memory` and supports node id; -1 if there is none."""
    cdef int32_t b
    if not r.shares:
        b = r.p.resident[memory]
        return b if request_supports(r, b, id) else -1
    for b in range(r.p.n_backends):
        if reads_tensor(r, assign, b, memory) and request_supports(r, b, id):
            return b
    return -1


cdef void default_fix_memory(const gs_request *r, int32_t *assign, unsigned char *reason) noexcept nogil:
    """Assign the tensors whose backend does not depend on other tensors: residents, assignments, inputs."""
    cdef const gs_graph *g = r.g
    cdef int32_t host = r.p.n_backends - 1, i
    memcpy(assign, r.p.resident, g.n_tensors * sizeof(int32_t))
    for i in range(g.n_tensors):
        reason[i] = GS_REASON_RESIDENT if assign[i] >= 0 else GS_REASON_NOTHING
    for i in range(g.n_tensors):
        if g.role[i] & (GS_ROLE_WRITES | GS_ROLE_INPUT) == 0:
            continue
        if g.role[i] & GS_ROLE_WRITES and assign[i] >= 0:
            assign[i] = best_reader(r, assign, i, i)
        elif g.role[i] & GS_ROLE_INPUT and assign[i] < 0:
            assign[i] = host
            reason[i] = GS_REASON_INPUT
    if r.p.assigned != NULL:
        for i in range(g.n_tensors):
            if r.p.assigned[i] >= 0 and (r.p.resident[i] < 0 or g.role[i] & GS_ROLE_WRITES):
                assign[i] = r.p.assigned[i]
                reason[i] = GS_REASON_USER


cdef int32_t default_fix_weights(const gs_request *r, int32_t *assign, unsigned char *reason) noexcept nogil:
    """Assign nodes with weights to the backend of the weights, or offload them.

    Returns the number of nodes still open, but for those that compute into another tensor's memory.
    """
    cdef const gs_graph *g = r.g
    cdef int32_t host = r.p.n_backends - 1, n_open = 0, i, k, id, s, b
    for i in range(g.n_work):
        id = g.work[i]
        if assign[id] >= 0:
            continue
        if g.role[id] & GS_ROLE_FOLLOWS:
            for k in range(g.src_begin[id], g.src_begin[id + 1]):
                s = g.src[k]
                if r.p.usage[s] != GS_USAGE_WEIGHTS:
                    continue
                assign[id] = best_reader(r, assign, id, s)
                reason[id] = GS_REASON_WEIGHT
                if r.p.offloads != NULL and r.p.resident[s] == host:
                    for b in range(host):
                        if r.p.offloads[<int64_t>b * g.n_tensors + id] and request_supports(r, b, id):
                            assign[id] = b
                            reason[id] = GS_REASON_OFFLOAD
                            break
                if assign[id] >= 0:
                    break
        n_open += assign[id] < 0 and not g.role[id] & GS_ROLE_WRITES
    return n_open


cdef int32_t default_spread(const gs_request *r, int32_t *assign, unsigned char *reason, int32_t n_open, bint down,
                            bint with_host) noexcept nogil:
    """Assign open nodes to the backend of the nearest assigned node before them (down) or after them (not down).

    Nodes of stores are skipped.  Without `with_host`, nodes whose nearest assigned node is on the host stay open.
    Returns how many of the n_open open nodes remain open.
    """
    cdef const gs_graph *g = r.g
    cdef int32_t last = r.p.n_backends - (0 if with_host else 1)
    cdef int32_t i = 0 if down else g.n_work - 1, step = 1 if down else -1, near = -1, id
    if last == 0:
        return n_open
    while n_open and 0 <= i < g.n_work:
        id = g.work[i]
        i += step
        if assign[id] >= 0:
            if not is_store(r, assign[id]):
                near = assign[id] if assign[id] < last else -1
        elif near >= 0 and not g.role[id] & GS_ROLE_WRITES and request_supports(r, near, id):
            assign[id] = near
            reason[id] = GS_REASON_NEIGHBOUR
            n_open -= 1
    return n_open


cdef int32_t most_inputs(const gs_request *r, const int32_t *assign, int32_t id) noexcept nogil:
    """The backend that supports node id and reads most of its sources without a copy; -1 if none supports it.

    Stores do not count: a store computes only nodes that read its own weights.
    """
    cdef const gs_graph *g = r.g
    cdef int32_t b, k, count, best = -1, best_count = -1
    for b in range(r.p.n_backends):
        if is_store(r, b) or not request_supports(r, b, id):
            continue
        count = 0
        for k in range(g.src_begin[id], g.src_begin[id + 1]):
            count += reads_tensor(r, assign, b, g.src[k])
        if count > best_count:
            best = b
            best_count = count
    return best


cdef void default_upgrade(const gs_request *r, int32_t *assign, unsigned char *reason, int32_t id) noexcept nogil:
    """Move a node to a better backend that supports the node and can read all its sources, if that backend and the
    node's present one read each other's memory."""
    cdef const gs_graph *g = r.g
    cdef int32_t b, k, at, here = assign[id]
    for b in range(here):
        if is_store(r, b) or not (request_reads(r, b, here) and request_reads(r, here, b)
                                  and request_supports(r, b, id)):
            continue
        for k in range(g.src_begin[id], g.src_begin[id + 1]):
            at = g.memory[g.src[k]]
            if assign[at] >= 0 and not reads_tensor(r, assign, b, at):
                break
        else:
            assign[id] = b
            reason[id] = GS_REASON_UPGRADE
            return


cdef int default_settle(const gs_request *r, int32_t *assign, unsigned char *reason, int32_t *failed) noexcept nogil:
    """Assign the remaining open nodes, and move nodes whose backend does not support them.

    After an error, failed[0] is the node that could not be placed.
    """
    cdef const gs_graph *g = r.g
    cdef int32_t i, id, root, wanted
    for i in range(g.n_work):
        id = g.work[i]
        wanted = assign[id]
        if wanted < 0 and g.role[id] & GS_ROLE_WRITES:
            root = g.view_src[id]
            if assign[root] >= 0 and request_supports(r, assign[root], id):
                assign[id] = assign[root]
                reason[id] = GS_REASON_ROOT
        if assign[id] < 0 or not request_supports(r, assign[id], id):
            if r.p.resident[id] >= 0 and g.view_src[id] < 0:
                failed[0] = id
                return GS_BAD_PLACEMENT
            assign[id] = most_inputs(r, assign, id)
            reason[id] = GS_REASON_MOST_INPUTS if wanted < 0 else reason_of_refusal(reason[id])
            if assign[id] < 0:
                failed[0] = id
                return GS_UNSUPPORTED_OP
        if r.shares and (r.p.assigned == NULL or r.p.assigned[id] < 0) and r.p.resident[id] < 0:
            default_upgrade(r, assign, reason, id)
    return GS_OK


cdef void default_follow(const gs_request *r, int32_t *assign, unsigned char *reason) noexcept nogil:
    """Assign open roots and leafs to the backend of their first reader, and views to the backend of their root."""
    cdef const gs_graph *g = r.g
    cdef int32_t n_open = 0, i, k, id, s, root
    for i in range(g.n_roots):
        n_open += assign[g.root[i]] < 0
    for i in range(g.n_work if n_open else 0):
        id = g.work[i]
        if assign[g.memory[id]] < 0:
            assign[g.memory[id]] = assign[id]
            reason[g.memory[id]] = GS_REASON_CONSUMER
        for k in range(g.src_begin[id], g.src_begin[id + 1]):
            s = g.memory[g.src[k]]
            if assign[s] < 0:
                assign[s] = assign[id]
                reason[s] = GS_REASON_CONSUMER
    place_deps(g, assign, reason)
    for i in range(g.n_views if n_open else 0):
        id = g.view[i]
        root = g.memory[id]
        if assign[root] < 0 and assign[id] >= 0 and g.position[id] >= 0:
            assign[root] = assign[id]
            reason[root] = GS_REASON_CONSUMER
    for i in range(g.n_views):
        id = g.view[i]
        root = g.memory[id]
        if assign[root] < 0 and g.position[id] >= 0:
            # No node reads the view, but it needs memory: the caller may set the root and read the view.  Such a root
            # is on the host, as inputs are: another backend may have no room for it, or be a store.
            assign[root] = r.p.n_backends - 1
            reason[root] = GS_REASON_INPUT
        assign[id] = assign[root]
        reason[id] = GS_REASON_ROOT


cdef int place_default(const gs_request *r, int32_t *assign, unsigned char *reason, int32_t *failed) noexcept nogil:
    """Run all passes except the last, tighten_boundaries, which plan_default calls."""
    cdef int status
    cdef int32_t n_open
    default_fix_memory(r, assign, reason)
    n_open = default_fix_weights(r, assign, reason)
    n_open = default_spread(r, assign, reason, n_open, True, False)
    n_open = default_spread(r, assign, reason, n_open, False, False)
    n_open = default_spread(r, assign, reason, n_open, True, True)
    n_open = default_spread(r, assign, reason, n_open, False, True)
    status = default_settle(r, assign, reason, failed)
    if status == GS_OK:
        default_follow(r, assign, reason)
    return status


cdef void weigh_offloaded(const gs_request *r, const int32_t *assign, const unsigned char *reason, int64_t *total,
                          int64_t *largest) noexcept nogil:
    """For each backend, the total bytes of host weights that its offloaded nodes read, and the largest weight."""
    cdef const gs_graph *g = r.g
    cdef int32_t i, k, id, s
    for i in range(g.n_work):
        id = g.work[i]
        if reason[id] != GS_REASON_OFFLOAD:
            continue
        for k in range(g.src_begin[id], g.src_begin[id + 1]):
            s = g.src[k]
            if r.p.resident[s] >= 0 and r.p.usage[s] == GS_USAGE_WEIGHTS and not reads_tensor(r, assign, assign[id], s):
                total[assign[id]] += g.nbytes[s]
                largest[assign[id]] = max(largest[assign[id]], g.nbytes[s])


cdef int split_default(const gs_request *r, const int32_t *assign, const unsigned char *reason,
                       gs_splits *w) noexcept nogil:
    """Cut the nodes into splits; a source is copied once to each other backend that reads it, and again after a write.

    Copies of unchanged weights are kept for later computes, unless they are streamed.  A streamed weight is copied by
    each compute and opens a split of its own, so that all streamed weights use the same memory one after the other.
    Weights of stores are always streamed: their reader opens a split, so that earlier nodes do not wait for the copy.
    Weights of offloaded nodes are streamed if keeping them takes more than twice the bytes of the largest; the policy
    may stream all weights.
    """
    cdef const gs_graph *g = r.g
    cdef int64_t *total = <int64_t *>calloc(2 * r.p.n_backends, sizeof(int64_t))
    cdef int64_t *largest
    cdef int32_t i, k, id, s, root, copy, here
    cdef bint closed = True, streams, fetches, streams_all, has_streamed = False
    if total == NULL:
        return GS_NO_HOST_MEMORY
    largest = total + r.p.n_backends
    if r.p.offloads != NULL:
        weigh_offloaded(r, assign, reason, total, largest)
    for i in range(g.n_work):
        id = g.work[i]
        here = assign[id]
        streams = fetches = False
        streams_all = r.p.policy.stream or total[here] > 2 * largest[here] and reason[id] == GS_REASON_OFFLOAD
        if streams_all or r.store != NULL:
            for k in range(g.src_begin[id], g.src_begin[id + 1]):
                s = g.src[k]
                if ((is_foreign_weight(r, s) if streams_all else is_stored(r, s))
                        and not reads_tensor(r, assign, here, s)):
                    streams = True
                    fetches |= is_stored(r, s)
        if (closed or w.split_backend.at[w.split_backend.n - 1] != here
                or streams and (has_streamed or fetches)):
            if splits_open(w, here, g.position[id] if w.split_backend.n else 0) != GS_OK:
                free(total)
                return GS_NO_HOST_MEMORY
            closed = has_streamed = False
        has_streamed |= streams
        if g.role[id] & GS_ROLE_WRITES:
            root = g.view_src[id]
            if not reads_tensor(r, assign, here, root):
                if splits_write_through(w, g, id, here) != GS_OK:
                    free(total)
                    return GS_NO_HOST_MEMORY
                closed = True
        for k in range(g.src_begin[id], g.src_begin[id + 1]):
            s = w.src[k]
            # Skip sources that are copies already, or that this backend reads in place.  The comparison of backends is
            # cheap, and nearly always decides.
            if s >= g.n_tensors or assign[g.memory[s]] == here or reads_tensor(r, assign, here, s):
                continue
            root = g.memory[s]
            copy = splits_known(w, s, here)
            if copy < 0 or w.copy_version.at[copy] != w.version[root]:
                copy = splits_new_copy(w, s, s, here, w.version[root])
                if copy < 0 or splits_add_input(w, copy) != GS_OK:
                    free(total)
                    return GS_NO_HOST_MEMORY
                splits_note(w, s, copy)
                if is_foreign_weight(r, s) and not streams_all and not is_stored(r, s):
                    w.copy_kept.at[copy] = 1
            w.src[k] = g.n_tensors + copy
        if g.role[id] & GS_ROLE_WRITES:
            w.version[g.view_src[id]] += 1
    free(total)
    return splits_finish(w, g, assign)
