# Nodes as C takes them: gs_node (include/ggml_sched/graph.h), for kernels and for backends that answer in C.
#
# Owns NodeTable, and what is put into a gs_node.  Invariant: `src` points into the same table, or is NULL.

cdef inline void node_name_op(gs_node *out) noexcept nogil:
    """Family and sub-op of the op that stands in the layout."""
    out.op = gs_op_family(out.layout.op)
    out.sub_op = out.layout.op - out.op


cdef void node_of_kind(const gs_graph *g, int32_t id, gs_node *out) noexcept nogil:
    """What backends are asked about: out[0] is the node, the rest of out[1 + GS_MAX_SRC] its sources.

    Nothing but what makes its kind: no flags, no addresses, of sources neither op nor parameters.
    """
    cdef gs_node *s
    cdef int32_t k
    memset(out, 0, sizeof(gs_node))
    out.layout = g.layout[id]
    node_name_op(out)
    memcpy(out.params, g.param + g.param_begin[id],
           (g.param_begin[id + 1] - g.param_begin[id]) * sizeof(int32_t))
    for k in range(g.src_begin[id], g.src_begin[id + 1]):
        s = out + 1 + g.slot[k]
        memset(s, 0, sizeof(gs_node))
        s.layout = g.layout[g.src[k]]
        s.layout.op = GS_OP_NONE
        out.src[g.slot[k]] = s
        out.n_src = g.slot[k] + 1


cdef class NodeTable:
    """`NodeTable(tensors)`: a gs_node for each tensor and for each of their sources, at the addresses of the moment.

    Of a source that is not one of the tensors its own sources are left out.  The addresses hold while those of the
    tensors do.  Raises TypeError for what is no Tensor.
    """

    def __cinit__(self, tensors):
        cdef Tensor t, s
        cdef dict index = {}
        cdef list known = []
        cdef Py_ssize_t i, k
        cdef tuple given = tuple(tensors)
        for t in given:
            if t is None:
                raise TypeError("a node is a Tensor, not None")
            index[t] = len(known)
            known.append(t)
        for t in given:
            for s in t.src:
                if s is not None and s not in index:
                    index[s] = len(known)
                    known.append(s)
        self.tensors = tuple(known)
        self.n = len(given)
        self.nodes = <gs_node *>calloc(max(len(known), 1), sizeof(gs_node))
        if self.nodes == NULL:
            raise no_host_memory(f"a table of {len(known)} nodes")
        for i in range(len(known)):
            self.fill(&self.nodes[i], known[i])
        for i in range(self.n):
            t = given[i]
            self.nodes[i].n_src = <int32_t>len(t.src)
            for k in range(len(t.src)):
                s = t.src[k]
                if s is not None:
                    self.nodes[i].src[k] = &self.nodes[<Py_ssize_t>index[s]]

    def __dealloc__(self):
        free(self.nodes)

    cdef void fill(self, gs_node *out, Tensor t):
        """Everything but the sources."""
        cdef BufferBase buffer = t.c_buffer()
        out.layout = t.layout
        node_name_op(out)
        if t.n_params:
            memcpy(out.params, t.params, t.n_params * sizeof(int32_t))
        out.flags = t._flags
        if buffer is not None and buffer.base != 0:
            out.data = <void *><size_t>(buffer.base + (t._offset if t.view_src is None
                                                       else t.view_src._offset + t.view_offs))

    cdef const gs_node *node(self, Py_ssize_t i) except NULL:
        """Node i of those that the table was made of; IndexError."""
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
            "ne": longs_tuple(node.layout.ne, GS_MAX_DIMS),
            "nb": longs_tuple(node.layout.nb, GS_MAX_DIMS), "nbytes": node.layout.nbytes,
            "params": ints_tuple(node.params, GS_MAX_OP_PARAMS),
            "src": tuple(src),
            "data": None if node.data == NULL else <size_t>node.data,
        }
