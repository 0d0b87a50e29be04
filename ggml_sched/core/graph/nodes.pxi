# NodeTable: tensors as gs_node structs (include/ggml_sched/graph.h), for compiled kernels and support queries in C.
#
# Also has functions on lists of nodes.  Invariant: `src` of a gs_node points into the same table, or is NULL.

cdef enum:
    MAX_IN_TABLE = 1 << 28


cdef int table_init(gs_tensor_table *table, int64_t n) noexcept nogil:
    """Make an empty table with memory for n tensors; the only error is GS_NO_HOST_MEMORY."""
    cdef int bits = 4
    while (<int64_t>1 << bits) < 2 * n:
        bits += 1
    table.shift = 64 - bits
    table.slot = <gs_table_slot *>calloc(<size_t>1 << bits, sizeof(gs_table_slot))
    return GS_NO_HOST_MEMORY if table.slot == NULL else GS_OK


cdef class NodeTable:
    """`NodeTable(tensors)`: a gs_node for each tensor and for each source of one, with their current addresses.

    A source that is not itself among the tensors gets no sources in its gs_node.  The addresses are valid as long as
    those of the tensors.  Raises TypeError for items that are no Tensor.
    """

    def __cinit__(self, tensors):
        cdef tuple given = tuple(tensors)
        cdef gs_tensor_table table
        cdef int32_t *src
        cdef int64_t n_src = 0
        for t in given:
            if not isinstance(t, Tensor):
                raise TypeError(f"a node is a Tensor, not {t!r}")
            n_src += PyTuple_GET_SIZE((<Tensor>t).src)
        if len(given) + n_src > MAX_IN_TABLE:
            raise GraphError(f"a table of {len(given)} nodes with {n_src} sources is too large")
        self.n = len(given)
        src = <int32_t *>malloc(max(n_src, 1) * sizeof(int32_t))
        if table_init(&table, len(given) + n_src) != GS_OK or src == NULL:
            free(table.slot)
            free(src)
            raise no_host_memory(f"a table of {self.n} nodes")
        try:
            self.number(given, &table, src)
            self.connect(given, src)
        finally:
            free(table.slot)
            free(src)

    cdef int number(self, tuple given, gs_tensor_table *table, int32_t *src) except -1:
        """Set `tensors` to those given and their sources; write to `src` their positions, -1 for an empty slot."""
        # Borrowed references: `given` owns them.
        cdef void *t
        cdef void *s
        cdef list known = list(given)
        cdef gs_table_slot *slot
        cdef int32_t n = <int32_t>self.n, n_src = 0
        cdef Py_ssize_t i, k
        for i in range(self.n):
            slot = table_find(table, PyTuple_GET_ITEM(given, i))
            slot.of, slot.at = PyTuple_GET_ITEM(given, i), <int32_t>i
        for i in range(self.n):
            t = PyTuple_GET_ITEM(given, i)
            for k in range(PyTuple_GET_SIZE((<Tensor>t).src)):
                s = PyTuple_GET_ITEM((<Tensor>t).src, k)
                src[n_src] = -1
                if s != <void *>None:
                    slot = table_find(table, s)
                    if slot.of == NULL:
                        slot.of, slot.at = s, n
                        known.append(<Tensor>s)
                        n += 1
                    src[n_src] = slot.at
                n_src += 1
        self.tensors = tuple(known)
        return 0

    cdef int connect(self, tuple given, const int32_t *src) except -1:
        """Make the gs_node structs of all tensors, and the pointers to the sources of the given ones."""
        cdef Py_ssize_t i, k, n = len(self.tensors), n_src = 0
        self.nodes = <gs_node *>calloc(max(n, 1), sizeof(gs_node))
        if self.nodes == NULL:
            raise no_host_memory(f"a table of {n} nodes")
        for i in range(n):
            self.fill(&self.nodes[i], <Tensor>PyTuple_GET_ITEM(self.tensors, i))
        for i in range(self.n):
            self.nodes[i].n_src = <int32_t>PyTuple_GET_SIZE((<Tensor>PyTuple_GET_ITEM(given, i)).src)
            for k in range(self.nodes[i].n_src):
                if src[n_src] >= 0:
                    self.nodes[i].src[k] = &self.nodes[src[n_src]]
                n_src += 1
        return 0

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
        """The fields of the gs_node of node i, as a dict; `src` are positions in `tensors` or None, `data` is an
        address or None."""
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
    """The given nodes without views, which compute nothing, as a tuple."""
    cdef list found = []
    for t in nodes:
        if (<Tensor?>t).layout.op > GS_OP_TRANSPOSE:
            found.append(t)
    return nodes if len(found) == len(nodes) else tuple(found)


def staged_leafs(tuple nodes not None):
    """The leafs with staged data that nodes use: {index of a node: pairs (leaf, whether the node writes to it)}.

    A backend calls `apply_staged` with each pair just before the node, because until then the leaf's memory may hold
    other tensors.  Only leafs that a GraphAllocator placed are listed: a scheduler loads those of its plans itself.
    """
    cdef dict found = {}
    cdef set seen = set()
    cdef Tensor t, s
    cdef Py_ssize_t i
    for i in range(len(nodes)):
        t = <Tensor?>nodes[i]
        add_staged(t, i, found, seen)
        for s in t.src:
            if s is not None:
                add_staged(s, i, found, seen)
        for s in t._deps or ():
            add_staged(s, i, found, seen)
        if seen and t.layout.op > GS_OP_TRANSPOSE and t.view_src in seen:
            found.setdefault(i, []).append((t.view_src, True))
    return found


cdef int add_staged(Tensor t, Py_ssize_t i, dict found, set seen) except -1:
    """List the root of a tensor that node i uses, if it is a leaf with staged data that no node before i uses."""
    cdef Tensor root = t if t.view_src is None else t.view_src
    cdef Lease lease = root._lease
    if (lease is not None and lease.stages and not lease.transient and root.layout.op == GS_OP_NONE
            and root not in seen):
        seen.add(root)
        found.setdefault(i, []).append((root, False))
    return 0


def apply_staged(Tensor leaf not None, bint written):
    """Write the staged data of a leaf to its memory; or, if a node is about to write there, note that the data is
    overwritten."""
    if written:
        leaf.overwritten = True
    elif leaf.stash:
        leaf.c_buffer().write(leaf._offset, memoryview(leaf.stash))


def check_graph_plan(name, bint freed, tuple buffers not None):
    """BackendError for a freed graph plan of the backend `name`, PlacementError for one that uses a closed buffer."""
    cdef BufferBase buffer
    if freed:
        raise BackendError(f"backend {name!r}: this graph plan was freed")
    for buffer in buffers:
        if buffer.closed:
            raise PlacementError(f"backend {name!r}: a graph plan uses a buffer of backend {buffer.backend.name!r} "
                                 f"({buffer.size} bytes) that is closed")
