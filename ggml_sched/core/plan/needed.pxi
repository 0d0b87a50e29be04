# Which results of a range of nodes are read elsewhere; a backend need not write the others to memory.

cdef void mark_needed_at_end(const gs_graph *g, unsigned char *needed, unsigned char *used) noexcept nogil:
    """Mark in needed[n_tensors] the memories whose data must be valid after all nodes have run.

    These are the memories of alloc dependencies, of outputs, and of nodes without readers.  used[n_tensors] is scratch
    memory, all zero.
    """
    cdef int32_t i, k, id
    for i in range(g.n_nodes):
        id = g.node[i]
        if g.view_src[id] >= 0:
            used[g.view_src[id]] = True
        for k in range(g.src_begin[id], g.src_begin[id + 1]):
            used[g.src[k]] = True
    if g.dep_begin != NULL:
        for k in range(g.dep_begin[g.n_tensors]):
            needed[g.memory[g.dep[k]]] = used[g.dep[k]] = True
    for id in range(g.n_tensors):
        # What the caller may read: outputs, and nodes that nothing reads.
        if g.flags[id] & GS_FLAG_OUTPUT or g.position[id] >= 0 and not used[id]:
            needed[g.memory[id]] = True


cdef int plan_needed(const gs_graph *g, const gs_plan *p, int32_t first, int32_t last,
                     unsigned char *needed) noexcept nogil:
    """Set needed[k] to whether memory must hold the result of the k-th computing node at positions first .. last.

    The result of a member of a fusion group is needed if it is used outside the group.  That of another node is needed
    if the caller or a node outside first .. last uses it, or if it has no memory of its own in an arena.
    Returns the number of computing nodes at these positions, or GS_NO_HOST_MEMORY.
    """
    cdef unsigned char *read = <unsigned char *>calloc(3 * max(<int64_t>g.n_tensors, 1), 1)
    cdef unsigned char *used
    cdef unsigned char *grouped
    cdef int32_t i, k, id, at = 0
    if read == NULL:
        return GS_NO_HOST_MEMORY
    used = read + g.n_tensors
    grouped = used + g.n_tensors
    for k in range(p.group_begin[p.n_groups] if p.n_groups else 0):
        grouped[g.node[p.group_member[k]]] = True
    mark_needed_at_end(g, read, used)
    for i in range(g.n_work):
        id = g.work[i]
        if not first <= g.position[id] <= last:
            for k in range(g.src_begin[id], g.src_begin[id + 1]):
                read[g.memory[g.src[k]]] = True
    for i in range(first, last + 1):
        id = g.node[i]
        if g.role[id] & GS_ROLE_VIEW:
            continue
        needed[at] = (not p.state[id] & GS_STATE_INNER if grouped[id]
                      else g.memory[id] != id or p.arena_of[id] < 0 or read[id])
        at += 1
    free(read)
    return at
