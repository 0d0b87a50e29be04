# cython: language_level=3
"""Problems of the C API: checking a gs_problem, and completing it to the gs_request that the passes take.

The request owns one block with all inputs that a reserved plan and its replays must have in common.  Invariant: with a
problem that passes the checks no pass reads or writes outside its arrays; from the same inputs the Python class Request
makes an equal request.
"""

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memset

from ggml_sched._c cimport *
from ggml_sched.core.plan.placement cimport gs_request


cdef void name_backend(char *out, int32_t b, const char *name) noexcept nogil:
    if name != NULL:
        snprintf(out, NAME_ROOM, b"backend %d '%.40s'", <int>b, name)
    else:
        snprintf(out, NAME_ROOM, b"backend %d", <int>b)


cdef int refuse(gs_error *error, const gs_problem *p, const char *array, int64_t index, int64_t value, int64_t limit,
                const char *why, int32_t tensor=-1, int32_t backend=-1, int status=GS_BAD_ARGUMENT) noexcept nogil:
    """Describe in `error` which entry of which array is wrong, and why; returns the status.

    `index`, `tensor` and `backend` are -1 where they have no meaning.
    """
    cdef char about[96]
    cdef char named[NAME_ROOM]
    if error == NULL:
        return status
    error.status, error.tensor, error.backend = status, tensor, backend
    error.index = <int32_t>max(min(index, INT32_MAX), -1)
    error.value, error.limit = value, limit
    about[0] = 0
    if backend >= 0:
        name_backend(named, backend, p.backends[backend].name)
    if tensor >= 0 and backend >= 0:
        snprintf(about, sizeof(about), b"tensor %d on %s: ", <int>tensor, named)
    elif tensor >= 0:
        snprintf(about, sizeof(about), b"tensor %d: ", <int>tensor)
    elif backend >= 0:
        snprintf(about, sizeof(about), b"%s: ", named)
    if index >= 0:
        snprintf(error.message, sizeof(error.message), b"%s%s[%lld] = %lld %s", about, array, <long long>index,
                 <long long>value, why)
    else:
        snprintf(error.message, sizeof(error.message), b"%s%s = %lld %s", about, array, <long long>value, why)
    return status


cdef int request_init(gs_request *r, const gs_graph *g, const gs_problem *p, gs_error *error) noexcept nogil:
    """Check a problem, and make the request of it; after an error there is nothing to free.

    Errors: GS_BAD_ARGUMENT, described in `error` if that is not NULL, and GS_NO_HOST_MEMORY.
    """
    cdef int status
    memset(r, 0, sizeof(gs_request))
    status = check_counts(p, error)
    if status == GS_OK:
        status = request_alloc(r, g, p, error)
    if status == GS_OK:
        status = take_backends(r, p, error)
    if status == GS_OK:
        status = take_residents(r, p, error)
    if status == GS_OK and p.assigned != NULL:
        status = take_assigned(r, p, error)
    if status == GS_OK and p.nbytes != NULL:
        status = check_sizes(g, p, error)
    if status == GS_OK and p.n_groups:
        status = take_groups(r, p, error)
    if status != GS_OK:
        free(r.memory)
        memset(r, 0, sizeof(gs_request))
    return status


cdef int check_counts(const gs_problem *p, gs_error *error) noexcept nogil:
    """Check the policy, and the numbers of backends, buffers and fusion groups."""
    if not GS_PLACEMENT_DEFAULT <= p.policy.placement <= GS_PLACEMENT_SEED:
        return refuse(error, p, b"policy.placement", -1, p.policy.placement, GS_PLACEMENT_SEED, b"is no GS_PLACEMENT_*")
    if not GS_OFFSETS_PACKED <= p.policy.offsets <= GS_OFFSETS_BEST_FIT:
        return refuse(error, p, b"policy.offsets", -1, p.policy.offsets, GS_OFFSETS_BEST_FIT, b"is no GS_OFFSETS_*")
    if not GS_REUSE_FIRST <= p.policy.reuse <= GS_REUSE_ALL:
        return refuse(error, p, b"policy.reuse", -1, p.policy.reuse, GS_REUSE_ALL, b"is no GS_REUSE_*")
    if not 1 <= p.policy.n_copies <= 0xffff:
        return refuse(error, p, b"policy.n_copies", -1, p.policy.n_copies, 0xffff, b"is not in 1 .. 65535")
    if not 1 <= p.n_backends <= GS_MAX_BACKENDS or p.backends == NULL:
        return refuse(error, p, b"n_backends", -1, p.n_backends, GS_MAX_BACKENDS,
                      b"is none or too many, or `backends` is NULL")
    if not 0 <= p.n_buffers <= GS_MAX_TENSORS or (p.n_buffers > 0) != (p.buffer != NULL) or (
            p.n_buffers > 0) != (p.reads_buffer != NULL):
        return refuse(error, p, b"n_buffers", -1, p.n_buffers, GS_MAX_TENSORS,
                      b"does not go with `buffer` and `reads_buffer`: all three are given, or none")
    if p.n_groups < 0 or p.n_groups and (p.group_backend == NULL or p.group_begin == NULL or p.group_member == NULL):
        return refuse(error, p, b"n_groups", -1, p.n_groups, -1, b"is negative, or one of the groups' arrays is NULL")
    return GS_OK


cdef int request_alloc(gs_request *r, const gs_graph *g, const gs_problem *p, gs_error *error) noexcept nogil:
    """Allocate one block for all arrays of the request, those of the widest elements first.

    The fusion groups of one backend have at most as many members, all together, as the graph has nodes.
    """
    cdef int64_t n = g.n_tensors, m = p.n_backends, n_buffers = p.n_buffers if p.n_buffers else m, n_members = 0
    cdef int64_t room
    cdef int32_t *ints
    if p.n_groups:
        n_members = p.group_begin[p.n_groups]
        if not 2 * <int64_t>p.n_groups <= n_members <= m * g.n_nodes:
            return refuse(error, p, b"group_begin", p.n_groups, n_members, m * g.n_nodes,
                          b"is less than two nodes for each group, or more than the backends may have")
    r.n_bytes = m * <int64_t>(sizeof(gs_backend_info) + GS_N_OPS * sizeof(uint64_t))
    r.n_bytes += (2 * n + (n if p.assigned != NULL else 0)) * <int64_t>sizeof(int32_t)
    if p.n_groups:
        r.n_bytes += (2 * <int64_t>p.n_groups + 1 + n_members) * <int64_t>sizeof(int32_t)
    r.n_bytes += n + m * m + m * n_buffers
    # Behind the arrays is scratch memory for take_groups: an int32 for each node.
    room = r.n_bytes + 3 + (g.n_nodes * <int64_t>sizeof(int32_t) if p.n_groups else 0)
    r.memory = malloc(room)
    if r.memory == NULL:
        return refuse(error, p, b"n_tensors", -1, n, room, b"are too many to plan", -1, -1, GS_NO_HOST_MEMORY)
    r.g = g
    r.p = p[0]
    # Truth values become 0 or 1, because requests are compared by bytes.
    r.p.policy.leafs_first = p.policy.leafs_first != 0
    r.p.policy.stream = p.policy.stream != 0
    r.p.n_buffers = <int32_t>n_buffers
    r.p.backends = <gs_backend_info *>r.memory
    r.inplace = <uint64_t *>(r.p.backends + m)
    r.p.resident = <int32_t *>(r.inplace + m * GS_N_OPS)
    r.p.buffer = r.p.resident + n
    ints = r.p.buffer + n
    if p.assigned != NULL:
        r.p.assigned = ints
        ints += n
    if p.n_groups:
        r.p.group_backend = ints
        r.p.group_begin = r.p.group_backend + p.n_groups
        r.p.group_member = r.p.group_begin + p.n_groups + 1
        ints = r.p.group_member + n_members
    r.p.usage = <unsigned char *>ints
    r.p.reads = r.p.usage + n
    r.p.reads_buffer = r.p.reads + m * m
    return GS_OK


cdef int take_backends(gs_request *r, const gs_problem *p, gs_error *error) noexcept nogil:
    """Take the properties of the backends, and which memory each of them can read."""
    cdef gs_backend_info *infos = <gs_backend_info *>r.p.backends
    cdef uint64_t *inplace = <uint64_t *>r.inplace
    cdef const gs_backend_info *backend
    cdef int32_t b, k, op, n = r.p.n_backends
    memset(infos, 0, n * sizeof(gs_backend_info))
    for b in range(n):
        backend = &p.backends[b]
        if not 1 <= backend.alignment <= <int64_t>1 << 30:
            return refuse(error, p, b"alignment", -1, backend.alignment, <int64_t>1 << 30, b"is not in 1 .. 2**30",
                          -1, b)
        if backend.max_buffer < 0:
            return refuse(error, p, b"max_buffer", -1, backend.max_buffer, -1, b"is negative", -1, b)
        infos[b].alignment = backend.alignment
        infos[b].max_buffer = min(backend.max_buffer, GS_MAX_CHUNK)
        for op in range(GS_N_OPS):
            k = gs_op_inplace(op)
            if r.p.policy.reuse == GS_REUSE_FIRST and not k & GS_INPLACE_FIRST:
                inplace[b * GS_N_OPS + op] = 0
            elif backend.inplace != NULL:
                inplace[b * GS_N_OPS + op] = backend.inplace[op]
            else:
                inplace[b * GS_N_OPS + op] = ~<uint64_t>0 if k else 0
    r.shares = p.n_buffers > 0
    for b in range(n):
        for k in range(n):
            r.p.reads[b * n + k] = b == k or p.reads != NULL and p.reads[b * n + k] != 0
            if b != k and r.p.reads[b * n + k]:
                r.shares = True
        # Without p.buffer, backend k has the one buffer k: a backend reads this buffer if it reads backend k's memory.
        for k in range(r.p.n_buffers):
            r.p.reads_buffer[<int64_t>b * r.p.n_buffers + k] = (
                p.reads_buffer[<int64_t>b * r.p.n_buffers + k] != 0 if p.n_buffers else r.p.reads[b * n + k])
    return GS_OK


cdef int take_residents(gs_request *r, const gs_problem *p, gs_error *error) noexcept nogil:
    """Fill the backend, buffer and usage of each resident tensor; a view has the entries of its root."""
    cdef const gs_graph *g = r.g
    cdef int32_t i, m, b
    if p.resident == NULL:
        memset(r.p.resident, 0xff, g.n_tensors * sizeof(int32_t))
        memset(r.p.buffer, 0, g.n_tensors * sizeof(int32_t))
        memset(r.p.usage, 0, g.n_tensors)
        return GS_OK
    for i in range(g.n_tensors):
        m = g.memory[i]
        b = p.resident[m]
        if not -1 <= b < r.p.n_backends:
            return refuse(error, p, b"resident", m, b, r.p.n_backends - 1, b"is no backend", m)
        r.p.resident[i] = b
        r.p.buffer[i] = 0
        r.p.usage[i] = GS_USAGE_ANY
        if b < 0:
            continue
        if p.n_buffers and not 0 <= p.buffer[m] < r.p.n_buffers:
            return refuse(error, p, b"buffer", m, p.buffer[m], r.p.n_buffers - 1, b"is no buffer", m, b)
        r.p.buffer[i] = p.buffer[m] if p.n_buffers else b
        if p.usage != NULL:
            if p.usage[m] > GS_USAGE_WEIGHTS:
                return refuse(error, p, b"usage", m, p.usage[m], GS_USAGE_WEIGHTS, b"is no GS_USAGE_*", m, b)
            r.p.usage[i] = p.usage[m]
    return GS_OK


cdef int take_assigned(gs_request *r, const gs_problem *p, gs_error *error) noexcept nogil:
    """Check and copy the assignments of the caller."""
    cdef int32_t i
    for i in range(r.g.n_tensors):
        if not -1 <= p.assigned[i] < r.p.n_backends:
            return refuse(error, p, b"assigned", i, p.assigned[i], r.p.n_backends - 1, b"is no backend", i)
        r.p.assigned[i] = p.assigned[i]
    return GS_OK


cdef int check_sizes(const gs_graph *g, const gs_problem *p, gs_error *error) noexcept nogil:
    """Check that no backend allocates less for a tensor than the tensor's own bytes."""
    cdef int64_t at = 0
    cdef int32_t b, i
    for b in range(p.n_backends):
        for i in range(g.n_tensors):
            if p.nbytes[at] < g.nbytes[i]:
                return refuse(error, p, b"nbytes", at, p.nbytes[at], g.nbytes[i],
                              b"is less than the tensor's own bytes", i, b)
            at += 1
    return GS_OK


cdef int take_groups(gs_request *r, const gs_problem *p, gs_error *error) noexcept nogil:
    """Check and copy the fusion groups: ordered by first member, then backend; those of one backend share no node."""
    cdef const gs_graph *g = r.g
    cdef const int32_t *member = p.group_member
    cdef const int32_t *begin = p.group_begin
    cdef int32_t *taken = <int32_t *>(<char *>r.memory + ((r.n_bytes + 3) & ~<int64_t>3))
    cdef int32_t i, k, b, first, before
    r.p.group_begin[0] = 0
    if begin[0] != 0:
        return refuse(error, p, b"group_begin", 0, begin[0], 0, b"is not 0")
    for i in range(p.n_groups):
        b, first = p.group_backend[i], begin[i]
        if not 0 <= b < r.p.n_backends:
            return refuse(error, p, b"group_backend", i, b, r.p.n_backends - 1, b"is no backend")
        r.p.group_backend[i] = b
        r.p.group_begin[i + 1] = begin[i + 1]
        if begin[i + 1] - <int64_t>first < 2 or begin[i + 1] > begin[p.n_groups]:
            return refuse(error, p, b"group_begin", i + 1, begin[i + 1], begin[p.n_groups],
                          b"ends a group of less than two nodes, or lies past the end", -1, b)
        for k in range(first, begin[i + 1]):
            if not 0 <= member[k] < g.n_nodes or k > first and member[k] <= member[k - 1]:
                return refuse(error, p, b"group_member", k, member[k], g.n_nodes - 1,
                              b"is no position of a node, or not after the member before", -1, b)
            if g.role[g.node[member[k]]] & GS_ROLE_VIEW:
                return refuse(error, p, b"group_member", k, member[k], g.n_nodes - 1,
                              b"is the position of a view, which computes nothing", g.node[member[k]], b)
            r.p.group_member[k] = member[k]
        if i:
            before = member[begin[i - 1]]
            if member[first] < before or member[first] == before and b <= p.group_backend[i - 1]:
                return refuse(error, p, b"group_member", first, member[first], before,
                              b"begins a group that is not after the one before, by first member and backend", -1, b)
    memset(taken, 0xff, g.n_nodes * sizeof(int32_t))
    for b in range(r.p.n_backends):
        for i in range(p.n_groups):
            if p.group_backend[i] != b:
                continue
            for k in range(begin[i], begin[i + 1]):
                if taken[member[k]] == b:
                    return refuse(error, p, b"group_member", k, member[k], -1,
                                  b"is in another group of this backend already", g.node[member[k]], b)
                taken[member[k]] = b
    return GS_OK


cdef bint requests_match(const gs_request *a, const gs_request *b) noexcept nogil:
    """Whether two problems differ in nothing but supports, offloads and nbytes, so that one may replay the other's
    plan."""
    return (a.n_bytes == b.n_bytes and a.p.n_backends == b.p.n_backends and a.p.n_buffers == b.p.n_buffers
            and a.p.n_groups == b.p.n_groups and (a.p.assigned == NULL) == (b.p.assigned == NULL)
            and memcmp(&a.p.policy, &b.p.policy, sizeof(gs_policy)) == 0
            and memcmp(a.memory, b.memory, a.n_bytes) == 0)


cdef int planning_error(gs_error *error, const gs_request *r, const gs_problem *p, int status,
                        const gs_failure *failed) noexcept nogil:
    """Describe a failure of planning in `error`: the tensor, the backend and the numbers; returns the status."""
    cdef const gs_graph *g = r.g
    cdef const char *op
    cdef char named[NAME_ROOM]
    cdef int32_t id = failed.tensor, b = failed.backend
    if status == GS_NO_HOST_MEMORY or not 0 <= id < g.n_tensors:
        return refuse(error, p, b"n_tensors", -1, g.n_tensors, 0, b"are too many to plan", -1, -1, GS_NO_HOST_MEMORY)
    if error == NULL:
        return status
    op = gs_op_name(g.layout[id].op)
    error.status, error.tensor, error.backend, error.index = status, id, -1, -1
    error.value, error.limit = g.nbytes[id], 0
    if status == GS_UNSUPPORTED_OP:
        snprintf(error.message, sizeof(error.message), b"tensor %d (%s): none of the %d backends supports it", <int>id,
                 op, <int>r.p.n_backends)
        return status
    if status == GS_BAD_PLACEMENT:
        error.backend = r.p.resident[id]
        name_backend(named, r.p.resident[id], p.backends[r.p.resident[id]].name)
        snprintf(error.message, sizeof(error.message), b"tensor %d (%s) has memory on %s, which does not support it",
                 <int>id, op, named)
        return status
    if b >= 0:
        error.backend, error.value, error.limit = b, failed.nbytes, r.p.backends[b].max_buffer
        name_backend(named, b, p.backends[b].name)
        snprintf(error.message, sizeof(error.message),
                 b"tensor %d (%s): %lld bytes exceed the maximum buffer size %lld of %s", <int>id, op,
                 <long long>error.value, <long long>error.limit, named)
        return status
    error.status = GS_OVERFLOW
    snprintf(error.message, sizeof(error.message), b"tensor %d (%s) of %lld bytes: sizes leave the 64-bit range",
             <int>id, op, <long long>g.nbytes[id])
    return GS_OVERFLOW
