# Programs of plans on a single backend without copies.
#
# Finds out whether a plan is of this kind, and the loads of its program.  Most plans are of this kind; making their
# programs needs one pass over the graph's arrays, and no other arrays.  Invariant: the result is the same as that of
# the general way (planning/compiler.py).

def single_backend_loads(Graph graph not None, PlanData data not None):
    """The leafs that a compute loads, for a plan on one backend; None for a plan that needs the general way.

    Tuples (leaf, home, bytes, chunk, offset, whether its memory is exclusive, position of the node before which it is
    loaded or -1 for the start, whether a node reads it), ascending.  The general way is needed for several backends,
    for copies, and if nodes write to a leaf that is loaded.
    """
    cdef const gs_graph *g = &graph.flat
    cdef gs_plan *p = &data.c
    cdef list found = []
    cdef int32_t i
    cdef unsigned char *use
    if p.n_copies or p.n_inputs or p.n_write_backs or p.n_splits == 0 or p.n_tensors != g.n_tensors:
        return None
    if memcmp(p.src_begin, g.src_begin, (g.n_tensors + 1) * sizeof(int32_t)) or memcmp(
            p.src, g.src, g.src_begin[g.n_tensors] * sizeof(int32_t)):
        return None
    for i in range(1, p.n_splits):
        if p.split_backend[i] != p.split_backend[0]:
            return None
    use = <unsigned char *>calloc(max(g.n_tensors, 1), 1)
    if use == NULL:
        raise no_host_memory(f"the program of a graph of {g.n_tensors} tensors")
    try:
        data.find_exclusive()
        find_uses(g, use)
        for i in range(g.n_tensors):
            if not use[i] or g.op[i] != GS_OP_NONE or p.offset[i] < 0:
                continue
            if use[i] & USE_WRITTEN or p.arena_of[i] != p.split_backend[0]:
                return None
            found.append((i, p.arena_of[i], g.nbytes[i], data.chunk(i), data.offset(i),
                          p.state[i] & GS_STATE_EXCLUSIVE != 0, p.birth[i] if p.state[i] & GS_STATE_LATE else -1,
                          use[i] & USE_READ != 0))
    finally:
        free(use)
    return found


cdef enum:
    USE_READ = 1
    USE_WRITTEN = 2
    USE_KEPT = 4


cdef void find_uses(const gs_graph *g, unsigned char *use) noexcept nogil:
    """Set in `use`, by the id of the memory's owner, how nodes use each memory: USE_* bits."""
    cdef int32_t i, k, id
    for i in range(g.n_work):
        id = g.work[i]
        if g.kind[id] & GS_KIND_WRITES:
            use[g.memory[id]] |= USE_WRITTEN
        for k in range(g.src_begin[id], g.src_begin[id + 1]):
            use[g.memory[g.src[k]]] |= USE_READ
    if g.dep_begin != NULL:
        for i in range(g.dep_begin[g.n_tensors]):
            use[g.memory[g.dep[i]]] |= USE_KEPT


def any_computes(Graph graph not None, int32_t first, int32_t last):
    """Whether one of the nodes at positions first .. last computes something."""
    cdef const gs_graph *g = &graph.flat
    cdef int32_t i
    for i in range(max(first, 0), min(last, g.n_nodes - 1) + 1):
        if not g.kind[g.node[i]] & GS_KIND_VIEW:
            return True
    return False


def needed_of(Graph graph not None, PlanData data not None, int32_t first, int32_t last):
    """Which of the computing nodes at positions first .. last have results that are needed elsewhere.

    A set of indices that count the computing nodes from `first`.  The result of a member of a fusion group is needed
    if it is used outside the group; any other result, if nodes outside first .. last or the caller use it.
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
            if g.kind[id] & GS_KIND_VIEW:
                continue
            if (not p.state[id] & GS_STATE_INNER if grouped[id]
                    else g.memory[id] != id or p.arena_of[id] < 0 or read[id]):
                found.append(at)
            at += 1
    finally:
        free(read)
    return frozenset(found)
