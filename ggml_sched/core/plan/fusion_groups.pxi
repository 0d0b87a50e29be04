# Fusion groups that backends offer: queried and checked.
#
# A request calls `fusion_groups` of each backend once, in Python; the results are positions of nodes, which are kept in
# arrays of the request.
# Invariant: a group in a request has two or more computing nodes, in ascending order, and no two groups of one backend
# share a node.

cdef tuple query_groups(Request request):
    """The groups that the backends offer, each its own, as `Request.groups` gives them; also writes them to request.c."""
    cdef list found = []
    cdef int32_t b
    for b in range(request.devices.n):
        if request.devices.fuses[b]:
            for members in checked_groups(request.graph, request.devices.backends[b]):
                found.append((b, members))
    found.sort(key=_by_first)
    put_groups(&request.c, found)
    return tuple(found)


cdef tuple _by_first(tuple group):
    """The sort key of a group, (backend, positions): its first position, then its backend."""
    return group[1][0], group[0]


cdef list checked_groups(Graph graph, BackendBase backend):
    """The groups that one backend offers, as tuples of positions; BackendError for an invalid group."""
    cdef list found = []
    cdef set taken = set()
    for group in backend.fusion_groups(graph):
        try:
            members = tuple(map(_index, group))
        except TypeError:
            raise BackendError(f"backend {backend.name!r} would compute {group!r} as one, which are no positions of "
                               "nodes") from None
        what = f"backend {backend.name!r} would compute the nodes {list(members)} as one"
        if len(members) < 2:
            raise BackendError(f"{what}: a group has two or more")
        for position in members:
            if not 0 <= position < graph.flat.n_nodes:
                raise BackendError(f"{what}: the graph has the nodes 0 .. {graph.flat.n_nodes - 1}")
        check_members(graph, members, taken, what)
        found.append(members)
    return found


cdef int check_members(Graph graph, tuple members, set taken, str what) except -1:
    """BackendError unless the members of a group ascend, compute, and are not yet `taken` by another group."""
    cdef list names = []
    for position in members[:8]:
        names.append(describe(graph.nodes[position]))
    what = f"{what} ({', '.join(names)}{', ...' if len(members) > 8 else ''})"
    before = -1
    for position in members:
        t = graph.nodes[position]
        if position <= before:
            raise BackendError(f"{what}: they do not ascend")
        if not t.computes:
            raise BackendError(f"{what}: {describe(t)} computes nothing")
        if position in taken:
            raise BackendError(f"{what}: {describe(t)} is in another group of this backend already")
        taken.add(position)
        before = position
    return 0


cdef int put_groups(gs_request *r, list groups) except -1:
    """Write the groups to the request's arrays."""
    cdef int32_t *at
    cdef int32_t n = 0, n_members = 0
    for _, members in groups:
        n_members += <int32_t>len(members)
    if not groups:
        return 0
    at = <int32_t *>malloc((2 * len(groups) + 1 + n_members) * sizeof(int32_t))
    if at == NULL:
        raise no_host_memory(f"planning {r.g.n_tensors} tensors")
    r.p.group_backend = at
    r.p.group_begin = at + len(groups)
    r.p.group_member = r.p.group_begin + len(groups) + 1
    r.p.group_begin[0] = n_members = 0
    for b, members in groups:
        r.p.group_backend[n] = b
        for position in members:
            r.p.group_member[n_members] = position
            n_members += 1
        n += 1
        r.p.group_begin[n] = n_members
    r.p.n_groups = n
    return 0
