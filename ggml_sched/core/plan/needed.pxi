# Which results of a run of consecutive nodes are read later; a backend need not write the others to memory.

def needed_of(Graph graph not None, PlanData data not None, int32_t first, int32_t last):
    """Which of the computing nodes at positions first .. last have results that are needed elsewhere.

    Returns a set of indices; 0 is the first computing node at or after `first`.  The result of a member of a fusion
    group is needed if it is used outside the group; any other result, if nodes outside first .. last or the caller use
    it, or if it is not in memory of its own in an arena.
    """
    cdef const gs_graph *g = &graph.flat
    cdef const gs_plan *p = &data.c
    cdef unsigned char *read = <unsigned char *>calloc(3 * max(<int64_t>g.n_tensors, 1), 1)
    cdef unsigned char *used
    cdef unsigned char *grouped
    cdef int32_t i, k, id, at = 0
    cdef list found = []
    if read == NULL:
        raise no_host_memory(f"the nodes of a graph of {g.n_tensors} tensors")
    used = read + g.n_tensors
    grouped = used + g.n_tensors
    try:
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
            if (not p.state[id] & GS_STATE_INNER if grouped[id]
                    else g.memory[id] != id or p.arena_of[id] < 0 or read[id]):
                found.append(at)
            at += 1
    finally:
        free(read)
    return frozenset(found)
