# Binding: giving the tensors of a graph the addresses of a plan.
#
# The graph's own tensors get addresses, all under one lease.  Copies, and nodes that read copies, become new tensors,
# so that the graph itself does not change.

@cython.boundscheck(False)
@cython.wraparound(False)
@cython.nonecheck(False)
def bind_plan(Graph graph not None, PlanData data not None, tuple buffers not None, Lease lease not None):
    """Give every tensor of the plan its address; `buffers[i]` are backend i's buffers, one for each chunk."""
    cdef gs_plan *f = &data.c
    cdef int32_t i, k
    cdef tuple tensors = graph.tensors
    # Borrowed references: the graph owns its tensors, `buffers` the buffers.
    cdef void *at
    cdef void *buffer
    cdef void *old
    cdef Lease known = None             # the lease that was rebound last: marking it again is not needed
    cdef int64_t offset, stride
    cdef list single = []               # of each backend: its only buffer; None if its arena has chunks
    if f.n_tensors != graph.flat.n_tensors:
        raise HazardError("a plan was bound to another graph")
    for i in range(len(buffers)):
        single.append(buffers[i][0] if len(buffers[i]) and not f.arena[i].stride else None)
    for k in range(graph.flat.n_roots):
        i = graph.flat.root[k]
        offset = f.offset[i]
        if offset < 0:
            continue
        at = PyTuple_GET_ITEM(tensors, i)
        buffer = PyList_GET_ITEM(single, f.arena_of[i])
        if buffer == <void *>None:
            stride = f.arena[f.arena_of[i]].stride
            buffer = <void *>(<BufferBase?>buffers[f.arena_of[i]][offset // stride])
            offset %= stride
        old = <void *>(<Tensor>at)._lease
        if old != <void *>None and old != <void *>known and old != <void *>lease:
            known = <Lease>old
            mark_rebound(known)
        if <void *>(<Tensor>at)._buffer != buffer:
            (<Tensor>at)._buffer = <BufferBase>buffer
        (<Tensor>at)._offset = offset
        (<Tensor>at).overwritten = False
        (<Tensor>at)._lease = lease


cdef int mark_rebound(Lease lease) except -1:
    """Mark a lease as rebound: its tensors are about to get addresses under another lease."""
    if lease.alive and lease.drain is not None:
        # Wait for queued computes of another scheduler that use the lease's addresses.
        lease.drain()
    lease.rebound = True
    return 0


def stand_in(Tensor like not None, str name, BufferBase buffer, int64_t offset, Lease lease not None):
    """A tensor for a copy: it has the layout of `like`, and `offset` in `buffer` as its address."""
    cdef Tensor t = Tensor.__new__(Tensor)
    t.context_state = ContextState.__new__(ContextState)
    t._name = name
    t.layout = like.layout
    t.layout.op = GS_OP_NONE
    t.src = ()
    t.mark = -1
    t.bind(buffer, offset, lease)
    return t


def rewired(Tensor node not None, tuple src not None, Tensor memory, Lease lease not None):
    """A node like `node` that reads the sources `src`, such as copies.  It computes into the memory of `node`, or, if
    `memory` is not None, into that tensor's."""
    cdef Tensor t = Tensor.__new__(Tensor)
    t.context_state = ContextState.__new__(ContextState)
    t._name, t.endings = node._name, node.endings
    t.layout = node.layout
    t.src = src
    t.params = t.context_state.keep(node.params, node.n_params)
    t.n_params = node.n_params
    t.mark = -1
    t._flags = node._flags
    if memory is not None:
        t.view_src = memory
    elif node.view_src is not None:
        t.view_src = node.view_src
        t.view_offs = node.view_offs
    else:
        t.bind(node._buffer, node._offset, lease)
    return t


def new_lease():
    """A lease for one allocation of a scheduler: transient, and with inputs that wait on the host until loaded."""
    cdef Lease lease = Lease()
    lease.transient = True
    lease.stages = True
    return lease


def written_leafs(tuple nodes not None):
    """{leaf that nodes write to: the position of the first such node}."""
    cdef dict found = {}
    cdef Py_ssize_t k
    cdef Tensor t, root
    for k in range(len(nodes)):
        t = <Tensor?>nodes[k]
        root = t.view_src
        if root is not None and t.layout.op > GS_OP_TRANSPOSE and root.layout.op == GS_OP_NONE and root not in found:
            found[root] = k
    return found
