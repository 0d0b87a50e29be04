# Fusion groups: nodes that a backend computes as one kernel, at the position of the last of them.
#
# Decides which of the groups that backends offer a plan keeps, and which results are needed outside their group.  A
# group changes no placement: a plan with groups is sound also when its nodes are computed one by one.
# A gs_groups owns its arrays.  Invariant: groups share no node; a kept group is in one split of its backend; no node
# between its members reads memory that an earlier member writes, or writes memory that a member reads or writes.  ggml
# fuses after planning.

cdef void groups_free(gs_groups *w) noexcept nogil:
    free(w.memory)
    memset(w, 0, sizeof(gs_groups))


cdef int groups_init(gs_groups *w, const gs_request *r) noexcept nogil:
    """Make w empty, with room for all groups of the request."""
    cdef int64_t n = r.g.n_tensors, m = r.p.n_groups
    cdef int32_t *cursor
    memset(w, 0, sizeof(gs_groups))
    cursor = <int32_t *>malloc((2 * n + 3 * m + 1 + 2 * <int64_t>r.p.group_begin[m]) * sizeof(int32_t))
    if cursor == NULL:
        return GS_NO_HOST_MEMORY
    w.memory = cursor
    w.n_tensors = r.g.n_tensors
    w.of = cursor
    w.within = w.of + n
    w.starts = w.within + n
    w.ends = w.starts + m
    w.begin = w.ends + m
    w.member = w.begin + m + 1
    w.id = w.member + r.p.group_begin[m]
    w.begin[0] = 0
    memset(w.of, 0xff, 2 * n * sizeof(int32_t))
    return GS_OK


cdef int groups_keep(gs_groups *w, const gs_request *r, const gs_plan *p) noexcept nogil:
    """Keep the groups whose members are in one split and may all be computed at the position of the last one.

    No write-back falls between the members, because split_default ends a split after a node that is written back.
    """
    cdef const gs_graph *g = r.g
    cdef int32_t i, k, id, n, split = 0
    cdef int32_t *seen = NULL
    cdef int status = GS_OK
    if r.p.n_groups == 0 or r.p.policy.placement == GS_PLACEMENT_SEED:
        return GS_OK
    # seen[m]: 1 + the last group that reads memory m; seen[n_tensors + m]: 1 + the last group that writes it; 0: none.
    seen = <int32_t *>calloc(2 * max(<int64_t>g.n_tensors, 1), sizeof(int32_t))
    status = groups_init(w, r)
    if status != GS_OK or seen == NULL:
        free(seen)
        return GS_NO_HOST_MEMORY
    for i in range(r.p.n_groups):
        k = r.p.group_begin[i]
        n = r.p.group_begin[i + 1] - k
        # Groups come in the order of their first members.
        while split < p.n_splits and p.split_stop[split] <= r.p.group_member[k]:
            split += 1
        if split == p.n_splits:
            break
        if (p.split_backend[split] != r.p.group_backend[i]
                or r.p.group_member[k + n - 1] >= p.split_stop[split]
                or not is_movable(g, r.p.group_member + k, n, i + 1, seen)):
            continue
        memcpy(w.member + w.begin[w.n], r.p.group_member + k, n * sizeof(int32_t))
        w.begin[w.n + 1] = w.begin[w.n] + n
        for k in range(w.begin[w.n], w.begin[w.n + 1]):
            w.id[k] = g.node[w.member[k]]
            w.of[w.id[k]] = w.n
        w.n += 1
    for id in range(g.n_tensors):
        w.within[id] = w.of[g.memory[id]]
    free(seen)
    return GS_OK


cdef bint is_movable(const gs_graph *g, const int32_t *member, int32_t n, int32_t mark, int32_t *seen) noexcept nogil:
    """Whether all nodes between the n members can be computed before the first member, with the same results.

    `seen` is scratch that all groups share: this call sets seen[m] to `mark`, unique to its group, if a member reads
    memory m, and seen[n_tensors + m] if a member writes it.
    """
    cdef int32_t *read = seen
    cdef int32_t *written = seen + g.n_tensors
    cdef int32_t k, id, position, at = 0
    for position in range(member[0], member[n - 1] + 1):
        id = g.node[position]
        if position == member[at]:
            at += 1
            written[g.memory[id]] = mark
            for k in range(g.src_begin[id], g.src_begin[id + 1]):
                read[g.memory[g.src[k]]] = mark
            if g.dep_begin != NULL:
                for k in range(g.dep_begin[id], g.dep_begin[id + 1]):
                    read[g.memory[g.dep[k]]] = mark
            continue
        if g.role[id] & GS_ROLE_VIEW:
            continue
        # A member that writes to another tensor's memory also reads it, so `read` has those memories, too.
        if read[g.memory[id]] == mark:
            return False
        for k in range(g.src_begin[id], g.src_begin[id + 1]):
            if written[g.memory[g.src[k]]] == mark:
                return False
        if g.dep_begin != NULL:
            for k in range(g.dep_begin[id], g.dep_begin[id + 1]):
                if written[g.memory[g.dep[k]]] == mark:
                    return False
    return True


cdef void groups_drop_late(gs_groups *w, const gs_plan *p) noexcept nogil:
    """Drop each group if a leaf is loaded between its members: no single Run of a program could compute them all."""
    cdef int32_t i, k, n, at = 0, kept = 0
    cdef bint whole
    for i in range(w.n):
        n = w.begin[i + 1] - at
        whole = True
        for k in range(p.n):
            if p.state[k] & GS_STATE_LATE and w.starts[i] < p.birth[k] <= w.ends[i]:
                whole = False
                break
        if whole:
            memmove(w.member + w.begin[kept], w.member + at, n * sizeof(int32_t))
        at = w.begin[i + 1]
        if whole:
            kept += 1
            w.begin[kept] = w.begin[kept - 1] + n
    w.n = kept


cdef int plan_take_groups(gs_plan *p, const gs_graph *g, int32_t n, const int32_t *begin,
                          const int32_t *member) noexcept nogil:
    """Copy n groups into a plan that is otherwise complete, and mark inner members (GS_STATE_INNER)."""
    p.n_groups = n
    if plan_alloc_groups(p, begin[n]) != GS_OK:
        return GS_NO_HOST_MEMORY
    memcpy(p.group_begin, begin, (n + 1) * sizeof(int32_t))
    memcpy(p.group_member, member, begin[n] * sizeof(int32_t))
    return plan_mark_inner(p, g)


cdef int plan_mark_inner(gs_plan *p, const gs_graph *g) noexcept nogil:
    """Set GS_STATE_INNER for the members, except the last of each group, whose results only their group reads."""
    cdef int64_t n = max(g.n_tensors, 1)
    cdef int32_t i, k, id, s
    cdef int32_t *of = <int32_t *>malloc(n * (sizeof(int32_t) + 2))
    cdef unsigned char *used
    cdef unsigned char *needed
    if of == NULL:
        return GS_NO_HOST_MEMORY
    used = <unsigned char *>(of + n)
    needed = used + n
    memset(of, 0xff, n * sizeof(int32_t))
    memset(used, 0, 2 * n)
    for i in range(p.n_groups):
        for k in range(p.group_begin[i], p.group_begin[i + 1]):
            of[g.node[p.group_member[k]]] = i
    mark_needed_at_end(g, needed, used)
    for i in range(g.n_work):
        id = g.work[i]
        for k in range(g.src_begin[id], g.src_begin[id + 1]):
            s = g.src[k]
            if of[id] < 0 or of[id] != of[g.memory[s]]:
                needed[g.memory[s]] = True
    for i in range(p.n_groups):
        for k in range(p.group_begin[i], p.group_begin[i + 1] - 1):
            id = g.node[p.group_member[k]]
            p.state[id] &= ~GS_STATE_INNER
            if g.memory[id] == id and p.arena_of[id] >= 0 and not needed[id]:
                p.state[id] |= GS_STATE_INNER
    free(of)
    return GS_OK
