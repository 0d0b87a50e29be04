# Replay: a reserved plan serves every graph of the same wiring whose tensors are no larger.
#
# Nothing is decided anew: assignments, splits, copies, in-place reuse and offsets are those of
# the reserved plan, which is known to fit; what took over memory through a view moves with it.
# Invariant: a replayed plan is as sound as the one it repeats, or there is none.

cdef int ints_copy(gs_ints *to, const gs_ints *v) noexcept nogil:
    to.n = to.room = v.n
    to.at = <int32_t *>malloc(max(v.n, 1) * sizeof(int32_t))
    if to.at == NULL:
        to.n = to.room = 0
        return GS_NO_HOST_MEMORY
    memcpy(to.at, v.at, v.n * sizeof(int32_t))
    return GS_OK


cdef int routes_copy(gs_routes *to, const gs_routes *w, const gs_graph *g) noexcept nogil:
    """The splits and copies of finished routes; what only planning needs stays empty."""
    cdef int32_t n_src = g.src_begin[g.n_tensors]
    to.src = <int32_t *>malloc(max(n_src, 1) * sizeof(int32_t))
    if (to.src == NULL
            or ints_copy(&to.split_backend, &w.split_backend) != GS_OK
            or ints_copy(&to.split_start, &w.split_start) != GS_OK
            or ints_copy(&to.split_stop, &w.split_stop) != GS_OK
            or ints_copy(&to.split_inputs, &w.split_inputs) != GS_OK
            or ints_copy(&to.inputs, &w.inputs) != GS_OK
            or ints_copy(&to.copy_like, &w.copy_like) != GS_OK
            or ints_copy(&to.copy_from, &w.copy_from) != GS_OK
            or ints_copy(&to.copy_backend, &w.copy_backend) != GS_OK
            or ints_copy(&to.copy_version, &w.copy_version) != GS_OK
            or ints_copy(&to.copy_kept, &w.copy_kept) != GS_OK
            or ints_copy(&to.more_copy, &w.more_copy) != GS_OK
            or ints_copy(&to.back_node, &w.back_node) != GS_OK
            or ints_copy(&to.back_copy, &w.back_copy) != GS_OK):
        return GS_NO_HOST_MEMORY
    memcpy(to.src, w.src, n_src * sizeof(int32_t))
    return GS_OK


cdef bint still_supported(const gs_request *r, const int32_t *assign) noexcept nogil:
    """Whether every node may run where it is assigned: backends may judge by shapes."""
    cdef const gs_graph *g = r.g
    cdef int32_t i, id
    if r.supports == NULL:
        return True
    for i in range(g.n_nodes):
        id = g.node[i]
        if not g.kind[id] & KIND_VIEW and not request_supports(r, assign[id], id):
            return False
    return True


cdef int64_t flow_peak(const gs_flow *f, int32_t home) except -1:
    """The largest sum of live bytes in one arena, by the flow's lifetimes."""
    cdef int64_t live = 0, peak = 0
    cdef int32_t i
    cdef int64_t *change = <int64_t *>calloc(f.n_seq + 2, sizeof(int64_t))
    if change == NULL:
        raise MemoryError("live bytes of a plan")
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


def replay_plan(Request request not None, PlanData reserved not None, str policy):
    """The plan that a policy has reserved, for a graph of the same wiring; None where it does not serve.

    The graph must agree with the reserved one in wiring, residency and assignments (`Graph.wiring`,
    `Request.key`): the caller has compared them.
    """
    cdef PlanData p = PlanData.__new__(PlanData)
    cdef gs_request *r = &request.c
    cdef Devices devices = request.devices
    cdef int64_t *alignment
    cdef int32_t failed = -1, i
    cdef int status
    if r.g.n_tensors != reserved.n_tensors:
        return None
    request.ask()
    if not still_supported(r, reserved.assign):
        return None
    p.n_tensors = r.g.n_tensors
    p.assign = <int32_t *>malloc(max(r.g.n_tensors, 1) * sizeof(int32_t))
    p.why = <unsigned char *>malloc(max(r.g.n_tensors, 1))
    alignment = <int64_t *>malloc(devices.n * sizeof(int64_t))
    try:
        if p.assign == NULL or p.why == NULL or alignment == NULL:
            raise MemoryError(f"planning {r.g.n_tensors} tensors")
        memcpy(p.assign, reserved.assign, r.g.n_tensors * sizeof(int32_t))
        memcpy(p.why, reserved.why, r.g.n_tensors)
        for i in range(devices.n):
            alignment[i] = (<BackendBase>devices.backends[i]).alignment
        status = routes_copy(&p.routes, &reserved.routes, r.g)
        if status == GS_OK:
            status = flow_from_routes(&p.flow, r, p.assign, &p.routes, alignment, &failed)
        if status != GS_OK:
            raise_planning_error(status, request, failed)
        if not placing_replays(&p.flow, &reserved.flow, NULL if policy == "seed" else alignment):
            return None
        placing_copy(&p.flow, &reserved.flow)
        p.strides = reserved.strides
        p.chunk_sizes = reserved.chunk_sizes
        p.buffer_sizes = reserved.buffer_sizes
        p.methods = tuple(["replayed"] * devices.n)
        p.live_bytes = tuple([flow_peak(&p.flow, i) for i in range(devices.n)])
        flow_settle(&p.flow)
    finally:
        free(alignment)
    return p
