# Replay: a reserved plan for other graphs of the same wiring whose tensors are no larger.
#
# No decision is made again: assignments, splits, copies and in-place reuse are those of the reserved plan.  A node that
# reuses memory in place through a view moves with the view.  Offsets are those of the reserved plan, compacted if the
# graph needs less memory.  They are not compacted if computes overlap (several copy slots), because the compute of
# another graph may still use the memory.
# Invariant: a replayed plan is as sound as the reserved plan, or no plan is made.

cdef gs_ints ints_over(int32_t *at, int32_t n) noexcept nogil:
    """A read-only gs_ints over a borrowed array."""
    cdef gs_ints v
    v.at = at
    v.n = v.room = n
    return v


cdef void splits_of_plan(gs_splits *w, const gs_plan *p) noexcept nogil:
    """The splits and copies of a finished plan, borrowed; without the arrays that only planning needs."""
    memset(w, 0, sizeof(gs_splits))
    w.split_backend = ints_over(p.split_backend, p.n_splits)
    w.split_start = ints_over(p.split_start, p.n_splits)
    w.split_stop = ints_over(p.split_stop, p.n_splits)
    w.split_inputs = ints_over(p.split_inputs, p.n_splits)
    w.inputs = ints_over(p.inputs, p.n_inputs)
    w.copy_like = ints_over(p.copy_like, p.n_copies)
    w.copy_from = ints_over(p.copy_from, p.n_copies)
    w.copy_backend = ints_over(p.copy_backend, p.n_copies)
    w.copy_kept = ints_over(p.copy_kept, p.n_copies)
    w.place_copy = ints_over(p.place_copy, p.n_places)
    w.back_node = ints_over(p.back_node, p.n_write_backs)
    w.back_copy = ints_over(p.back_copy, p.n_write_backs)
    w.src = p.src


cdef gs_groups groups_of_plan(const gs_plan *p) noexcept nogil:
    """The groups of a finished plan, borrowed; without the arrays that only planning needs."""
    cdef gs_groups w
    memset(&w, 0, sizeof(gs_groups))
    w.n, w.begin, w.member = p.n_groups, p.group_begin, p.group_member
    return w


cdef bint still_supported(const gs_request *r, const int32_t *assign) noexcept nogil:
    """Whether every node's backend supports it: support may depend on shapes."""
    cdef const gs_graph *g = r.g
    cdef int32_t i, id
    if r.supports == NULL:
        return True
    for i in range(g.n_nodes):
        id = g.node[i]
        if not g.kind[id] & GS_KIND_VIEW and not request_supports(r, assign[id], id):
            return False
    return True


cdef int64_t walk_peak(const gs_walk *f, int32_t home) noexcept nogil:
    """The most bytes alive at one position in one arena; -1 if malloc fails."""
    cdef int64_t live = 0, peak = 0
    cdef int32_t i
    cdef int64_t *change = <int64_t *>calloc(f.n_seq + 2, sizeof(int64_t))
    if change == NULL:
        return -1
    for i in range(f.n):
        if f.home[i] == home and f.birth[i] >= 0:
            change[f.birth[i]] += f.size[i]
            change[f.trimmed[i]] -= f.size[i] - f.rest[i]
            change[f.death[i] + 1] -= f.rest[i]
    for i in range(f.n_seq + 2):
        live += change[i]
        peak = max(peak, live)
    free(change)
    return peak


cdef bint takes_less(const gs_walk *f, const gs_walk *measured) noexcept nogil:
    """Whether any id is smaller than in the measured walk."""
    cdef int32_t i
    for i in range(f.n):
        if f.size[i] < measured.size[i]:
            return True
    return False


cdef int gs_plan_replay(const gs_request *r, const gs_plan *reserved, gs_plan *p, int32_t *serves) noexcept nogil:
    """Make a plan with the decisions of a reserved plan; if it does not fit, serves[0] is 0 and p is empty.

    The request's graph has the wiring of the reserved plan's graph.  Errors as those of gs_plan_make.
    """
    cdef gs_splits splits
    cdef gs_walk walk, measured
    cdef const int64_t *alignment = NULL
    cdef int32_t failed = -1
    cdef int status
    memset(p, 0, sizeof(gs_plan))
    memset(&walk, 0, sizeof(gs_walk))
    p.failed = -1
    serves[0] = False
    if (r.g.n_tensors != reserved.n_tensors or r.n_backends != reserved.n_backends
            or not still_supported(r, reserved.assign)):
        return GS_OK
    splits_of_plan(&splits, reserved)
    walk_of_plan(&measured, reserved)
    status = walk_from_splits(&walk, r, reserved.assign, &splits, &failed)
    if r.policy.reuse != GS_REUSE_FIRST:
        alignment = r.alignment
    if status == GS_OK and placing_replays(&walk, &measured, alignment):
        placing_copy(&walk, &measured)
        if r.policy.offsets == GS_OFFSETS_PACKED and reserved.n_places == 0 and takes_less(&walk, &measured):
            status = walk_compact(&walk, r.n_backends, reserved.arena)
        if status == GS_OK:
            status = plan_repeat(p, r, reserved, &splits, &walk)
        serves[0] = status == GS_OK
    if status != GS_OK:
        gs_plan_free(p)
        p.failed = splits_tensor(&splits, r.g, failed)
    walk_free(&walk)
    return status


cdef int gs_plan_compact(const gs_plan *reserved, const int64_t *size, int64_t *offset) noexcept nogil:
    """The offsets that a replay of a reserved plan gives ids of size[i] bytes, aligned.

    GS_NO_HOST_MEMORY; GS_BAD_ARGUMENT for a size above that of the reserved plan.
    """
    cdef gs_walk f, measured
    cdef int32_t i
    walk_of_plan(&measured, reserved)
    f = measured
    f.size, f.offset = <int64_t *>size, offset
    memcpy(offset, measured.offset, f.n * sizeof(int64_t))
    for i in range(f.n):
        if not 0 <= size[i] <= measured.size[i]:
            return GS_BAD_ARGUMENT
    if reserved.n_places or not takes_less(&f, &measured):
        return GS_OK
    return compact_offsets(&f, reserved.n_backends, reserved.arena)


cdef int plan_repeat(gs_plan *p, const gs_request *r, const gs_plan *reserved, const gs_splits *splits,
                     gs_walk *walk) noexcept nogil:
    """Fill p with a new walk, and with the other decisions of the reserved plan."""
    cdef gs_walk taken
    cdef gs_groups groups
    cdef int32_t i
    cdef int status = plan_begin(p, r)
    if status == GS_OK:
        status = plan_take(p, splits, walk, reserved.n_chunks)
    if status != GS_OK:
        return status
    memcpy(p.assign, reserved.assign, p.n_tensors * sizeof(int32_t))
    memcpy(p.reason, reserved.reason, p.n_tensors)
    memcpy(p.arena, reserved.arena, p.n_backends * sizeof(gs_arena_result))
    memcpy(p.chunk_nbytes, reserved.chunk_nbytes, p.n_chunks * sizeof(int64_t))
    if reserved.n_groups:
        groups = groups_of_plan(reserved)
        status = plan_take_groups(p, r.g, &groups)
    walk_of_plan(&taken, p)
    for i in range(p.n_backends):
        p.arena[i].method = GS_METHOD_REPLAYED
        p.arena[i].live_bytes = walk_peak(&taken, i)
        if p.arena[i].live_bytes < 0:
            status = GS_NO_HOST_MEMORY
    return status
