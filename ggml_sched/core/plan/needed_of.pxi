# plan_needed (core/plan/needed.pxi) for Python.

def needed_of(Graph graph not None, PlanData data not None, int32_t first, int32_t last):
    """Which of the computing nodes at positions first .. last have results that are needed elsewhere.

    Returns a set of indices; 0 is the first computing node at or after `first`.  `plan_needed` has the rules.
    """
    cdef bytearray needed = bytearray(max(last + 1 - first, 0))
    cdef int n = plan_needed(&graph.flat, &data.c, first, last, <unsigned char *><char *>needed)
    cdef int k
    if n < 0:
        raise no_host_memory(f"the nodes of a graph of {graph.flat.n_tensors} tensors")
    cdef list found = []
    for k in range(n):
        if needed[k]:
            found.append(k)
    return frozenset(found)
