# NodeTable: tensors as gs_node structs (include/ggml_sched/graph.h), for compiled kernels and support queries in C.
#
# Also has functions on lists of nodes.  Invariant: `src` of a gs_node points into the same table, or is NULL.

cdef enum:
    MAX_IN_TABLE = 1 << 28


cdef class NodeTable:
    """`NodeTable(tensors)`: a gs_node for each tensor and for each source of one, with their current addresses.

    A source that is not itself among the tensors gets no sources in its gs_node.  The addresses are valid as long as
    those of the tensors.  Raises TypeError for items that are no Tensor.
    """

    def __cinit__(self, tensors):
        cdef list known = list(tensors)
        cdef dict at = {}                   # {tensor: its position in `tensors`}
        cdef Tensor t, s
        cdef Py_ssize_t i, k
        for i, given in enumerate(known):
            if not isinstance(given, Tensor):
                raise TypeError(f"a node is a Tensor, not {given!r}")
            at[given] = i
        self.n = len(known)
        for i in range(self.n):
            t = known[i]
            for s in t.src:
                if s is not None and s not in at:
                    at[s] = len(known)
                    known.append(s)
        if len(known) > MAX_IN_TABLE:
            raise GraphError(f"a table of {len(known)} nodes and sources is too large")
        self.tensors = tuple(known)
        self.nodes = <gs_node *>calloc(max(len(known), 1), sizeof(gs_node))
        if self.nodes == NULL:
            raise no_host_memory(f"a table of {len(known)} nodes")
        for i in range(len(known)):
            self.fill(&self.nodes[i], <Tensor>known[i])
        for i in range(self.n):
            t = known[i]
            self.nodes[i].n_src = <int32_t>len(t.src)
            for k in range(self.nodes[i].n_src):
                s = t.src[k]
                if s is not None:
                    self.nodes[i].src[k] = &self.nodes[<Py_ssize_t>at[s]]

    def __dealloc__(self):
        free(self.nodes)

    cdef void fill(self, gs_node *out, Tensor t):
        """Fill all fields of a gs_node but its sources."""
        cdef BufferBase buffer = t.c_buffer()
        out.layout = t.layout
        node_name_op(out)
        if t.n_params:
            memcpy(out.params, t.params, t.n_params * sizeof(int32_t))
        out.flags = t._flags
        if buffer is not None and buffer.base != 0:
            out.data = <void *><size_t>(buffer.base + t.c_offset())

    cdef const gs_node *node(self, Py_ssize_t i) except NULL:
        """The gs_node of the i-th tensor that NodeTable was called with; IndexError if there is none."""
        if not 0 <= i < self.n:
            raise IndexError(f"node {i} of {self.n}")
        return &self.nodes[i]

    def __len__(self):
        return self.n

    def fields(self, Py_ssize_t i):
        """What C sees of node i, a dict; `src` are positions in `tensors` or None, `data` is an address or None."""
        cdef const gs_node *node = self.node(i)
        cdef Py_ssize_t k
        cdef list src = []
        for k in range(node.n_src):
            src.append(None if node.src[k] == NULL else <Py_ssize_t>(node.src[k] - self.nodes))
        return {
            "op": node.op, "sub_op": node.sub_op, "type": node.layout.type, "flags": node.flags,
            "ne": ints_tuple(node.layout.ne, GS_MAX_DIMS),
            "nb": ints_tuple(node.layout.nb, GS_MAX_DIMS), "nbytes": node.layout.nbytes,
            "params": ints_tuple(node.params, GS_MAX_OP_PARAMS),
            "src": tuple(src),
            "data": None if node.data == NULL else <size_t>node.data,
        }


def computed(tuple nodes not None):
    """Those of the given nodes that compute, as a list: all but views."""
    cdef list found = []
    for t in nodes:
        if (<Tensor?>t).layout.op > GS_OP_TRANSPOSE:
            found.append(t)
    return nodes if len(found) == len(nodes) else tuple(found)


def any_staged(tuple nodes not None):
    """Whether a source, root or alloc dependency of the nodes has its data staged on the host, where no scheduler loads
    it."""
    cdef Tensor t, s
    for t in nodes:
        if t is None:
            raise TypeError("a node is a Tensor, not None")
        if is_staged(t):
            return True
        for s in t.src:
            if s is not None and is_staged(s):
                return True
        if t._deps is not None:
            for s in t._deps:
                if is_staged(s):
                    return True
    return False


cdef inline bint is_staged(Tensor t) noexcept:
    """Whether a tensor's address belongs to a lease that keeps data staged on the host, and is not a scheduler's."""
    cdef Lease lease = (t if t.view_src is None else t.view_src)._lease
    return lease is not None and lease.stages and not lease.transient
