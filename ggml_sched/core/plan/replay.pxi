# Replay: a reserved plan for other graphs of the same wiring whose tensors are no larger.
#
# No decision is made again: assignments, splits, copies and in-place reuse are those of the reserved plan.  A node that
# reuses the memory of a view in place follows the view to its new offset.  Offsets are those of the reserved plan,
# compacted if the graph needs less memory.  They are not compacted if computes overlap (several copy slots), because
# the compute of another graph may still use the memory.
# Invariant: a replayed plan is as sound as the reserved plan, or no plan is made.

cdef bint still_supported(const gs_request *r, const int32_t *assign) noexcept nogil:
    """Whether every node's backend supports it: support may depend on shapes."""
    cdef const gs_graph *g = r.g
    cdef int32_t i, id
    if r.p.supports == NULL:
        return True
    for i in range(g.n_nodes):
        id = g.node[i]
        if not g.role[id] & GS_ROLE_VIEW and not request_supports(r, assign[id], id):
            return False
    return True


cdef int64_t plan_peak(const gs_plan *p, int32_t backend) noexcept nogil:
    """The most bytes alive at one position in one arena; -1 if malloc fails."""
    cdef int64_t live = 0, peak = 0
    cdef int32_t i
    cdef int64_t *change = <int64_t *>calloc(p.n_seq + 2, sizeof(int64_t))
    if change == NULL:
        return -1
    for i in range(p.n):
        if p.arena_of[i] == backend and p.birth[i] >= 0:
            change[p.birth[i]] += p.size[i]
            change[p.trimmed[i]] -= p.size[i] - p.rest[i]
            change[p.death[i] + 1] -= p.rest[i]
    for i in range(p.n_seq + 2):
        live += change[i]
        peak = max(peak, live)
    free(change)
    return peak


cdef bint takes_less(const gs_plan *p, const gs_plan *reserved) noexcept nogil:
    """Whether any tensor or copy has fewer bytes than in the reserved plan."""
    cdef int32_t i
    for i in range(p.n):
        if p.size[i] < reserved.size[i]:
            return True
    return False


cdef int gs_plan_replay(const gs_request *r, const gs_plan *reserved, gs_plan *p, bint *serves,
                        gs_failure *failed) noexcept nogil:
    """Make a plan with the decisions of a reserved plan; if these do not fit the graph, serves[0] is 0 and p is empty.

    The request's graph has the wiring of the reserved plan's graph.  The errors are those of gs_plan_make.
    """
    cdef gs_walk walk
    cdef const gs_backend_info *backends = NULL
    cdef int status
    memset(p, 0, sizeof(gs_plan))
    memset(&walk, 0, sizeof(gs_walk))
    failed.tensor, failed.backend, failed.nbytes = -1, -1, 0
    serves[0] = False
    if (r.g.n_tensors != reserved.n_tensors or r.p.n_backends != reserved.n_backends
            or not still_supported(r, reserved.assign)):
        return GS_OK
    if r.p.policy.reuse != GS_REUSE_FIRST:
        backends = r.p.backends
    status = walk_from_splits(&walk, r, reserved, reserved.src, &failed.tensor)
    if status == GS_OK and walk_can_replay(&walk, reserved, backends):
        walk_replay(&walk, reserved)
        if r.p.policy.offsets == GS_OFFSETS_PACKED and reserved.n_slots == 0 and takes_less(&walk.p, reserved):
            mark_shared(&walk.p)
            status = compact_offsets(&walk.p, r.p.n_backends, reserved.arena, False)
        if status == GS_OK:
            status = plan_repeat(p, r, reserved, &walk)
        serves[0] = status == GS_OK
    if status != GS_OK:
        gs_plan_free(p)
    walk_free(&walk)
    return status


cdef void mark_shared(gs_plan *p) noexcept nogil:
    """Correct the states that compaction may make wrong, by clearing EXCLUSIVE and recomputing LATE.

    A memory that was exclusive may now be shared, and a leaf born after the start may have memory that was used before.
    """
    cdef int32_t i
    for i in range(p.n):
        p.state[i] &= ~GS_STATE_EXCLUSIVE
        plan_mark_late(p, i)


cdef int gs_plan_compact(const gs_plan *reserved, const int64_t *size, bint in_order, int64_t *offset) noexcept nogil:
    """Write to `offset` what a replay of a reserved plan would choose for ids of size[i] bytes, which are aligned;
    with in_order, the offsets keep the order of the reserved ones.

    Errors: GS_NO_HOST_MEMORY; GS_BAD_ARGUMENT for a size above that of the reserved plan.
    """
    cdef gs_plan p = reserved[0]
    cdef int32_t i
    p.size = <int64_t *>size
    p.offset = offset
    memcpy(offset, reserved.offset, p.n * sizeof(int64_t))
    for i in range(p.n):
        if not 0 <= size[i] <= reserved.size[i]:
            return GS_BAD_ARGUMENT
    if reserved.n_slots or not takes_less(&p, reserved):
        return GS_OK
    return compact_offsets(&p, reserved.n_backends, reserved.arena, in_order)


cdef int plan_repeat(gs_plan *p, const gs_request *r, const gs_plan *reserved, gs_walk *walk) noexcept nogil:
    """Fill p with a new walk, and with the other decisions of the reserved plan."""
    cdef int32_t i
    cdef int status
    plan_take_walk(p, walk)
    # p now has the counts of the reserved plan, and borrows arrays from it, which are copied here.
    p.assign, p.split_backend, p.arena, p.group_begin = NULL, NULL, NULL, NULL
    if plan_alloc_assign(p) != GS_OK or plan_alloc_splits(p) != GS_OK or plan_alloc_arenas(p) != GS_OK:
        return GS_NO_HOST_MEMORY
    memcpy(p.assign, reserved.assign, p.n_tensors * sizeof(int32_t))
    memcpy(p.reason, reserved.reason, p.n_tensors)
    memcpy(p.split_backend, reserved.split_backend, plan_split_ints(p) * sizeof(int32_t))
    memcpy(p.arena, reserved.arena, p.n_backends * sizeof(gs_arena_result))
    memcpy(p.chunk_nbytes, reserved.chunk_nbytes, p.n_chunks * sizeof(int64_t))
    for i in range(p.n_backends):
        p.arena[i].method = GS_METHOD_REPLAYED
        p.arena[i].live_bytes = plan_peak(p, i)
        if p.arena[i].live_bytes < 0:
            return GS_NO_HOST_MEMORY
    if reserved.n_groups == 0:
        return GS_OK
    return plan_take_groups(p, r.g, reserved.n_groups, reserved.group_begin, reserved.group_member)
