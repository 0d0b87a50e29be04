# Graphs: an immutable order of nodes over tensors, with a flat twin for the planner.
#
# A Graph holds Python tuples for people and one C struct of flat arrays for the
# passes; tensor ids index both.  Invariant: every source of a node is a leaf or
# an earlier node, every view's root is in the graph, nothing changes after
# construction.  Corresponds to ggml_cgraph and ggml_build_forward_expand.

cdef class Graph:
    """`Graph(*outputs)`: everything the outputs need, nodes in ggml's depth-first order.  Immutable.

    `nodes` are the computed tensors in execution order, `leafs` the others, `tensors` all of them
    (leafs, then nodes; in a graph loaded from a file the file's order), `meta` a dict for people.
    Raises GraphError for a tensor whose context is closed.
    """

    def __cinit__(self, *outputs):
        memset(&self.flat, 0, sizeof(gs_graph))
        self.nodes = self.leafs = self.tensors = ()
        self.meta = {}
        self._index = None

    def __dealloc__(self):
        flat_free(&self.flat)

    def __init__(self, *outputs):
        for t in outputs:
            if not isinstance(t, Tensor):
                raise TypeError(f"a graph is made of Tensors, not {t!r}")
        nodes, leafs = depth_first(outputs)
        self.fill(tuple(leafs + nodes), tuple(nodes), tuple(leafs))

    @staticmethod
    def from_order(tensors, nodes, leafs, meta=None):
        """A graph with a given order: `nodes` and `leafs` are drawn from `tensors`.

        Raises GraphError when a source comes later than its node, a tensor appears twice or is missing, a leaf has an
        op or a node has none.
        """
        cdef Graph g = Graph.__new__(Graph)
        g.fill(tuple(tensors), tuple(nodes), tuple(leafs))
        g.meta = dict(meta or {})
        return g

    def with_order(self, nodes):
        """This graph with its nodes in another order: flags and what is kept are those that it was made with.

        Raises GraphError when a source comes later than its node, a node appears twice or is missing.
        """
        cdef Graph g = Graph.__new__(Graph)
        nodes = tuple(nodes)
        if len(nodes) != self.flat.n_nodes:
            raise GraphError(f"an order of {len(nodes)} nodes for a graph of {self.flat.n_nodes}")
        g.fill(self.tensors, nodes, self.leafs, self)
        g.meta = dict(self.meta)
        return g

    cdef int fill(self, tuple tensors, tuple nodes, tuple leafs, Graph like=None) except -1:
        """`like`: a graph of the same tensors, whose flags and deps count, not those of the moment."""
        cdef Tensor t, s
        cdef dict given = None if like is None else like.deps
        cdef Py_ssize_t i
        cdef int32_t k, n_src = 0
        cdef int64_t total = 0, n_deps = 0
        cdef gs_graph *g = &self.flat
        cdef Home home = None
        cdef list homes = []
        cdef uint64_t[2] found
        if len(tensors) > 0x3fffffff:
            raise GraphError(f"a graph of {len(tensors)} tensors is too large")
        self.tensors, self.nodes, self.leafs = tensors, nodes, leafs
        for i in range(len(tensors)):
            t = tensors[i]
            if t.home.closed:
                raise GraphError(f"{describe(t)} belongs to closed context {t.home.name!r}")
            t.mark = <int32_t>i
            if t.home is not home:
                home = t.home
                if home not in homes:
                    homes.append(home)
        self.homes = tuple(homes)
        for t in tensors:
            total += len(t.src)
        flat_alloc(g, <int32_t>len(tensors), <int32_t>len(nodes), <int32_t>len(leafs), total)
        # Ids: -1 in `position` marks a tensor that is not a node (yet).
        for i in range(len(tensors)):
            t = tensors[i]
            if t.mark != i:
                raise GraphError(f"{describe(t)} appears twice in a graph")
            g.layout[i] = t.layout
            g.flags[i] = <unsigned char>t._flags if like is None else like.flat.flags[i]
            g.view_offs[i] = t.view_offs
            g.view_src[i] = -1 if t.view_src is None else self.require(t.view_src, t)
            g.position[i] = -1
            g.src_begin[i] = n_src
            k = 0
            for s in t.src:
                if s is not None:
                    g.src[n_src] = self.require(s, t)
                    g.slot[n_src] = <unsigned char>k
                    n_src += 1
                k += 1
            n_deps += len(kept_by(t, given))
        g.src_begin[len(tensors)] = n_src
        for i in range(len(leafs)):
            t = leafs[i]
            g.leaf[i] = self.require(t, t)
            if g.position[g.leaf[i]] != -1:
                raise GraphError(f"{describe(t)} appears twice among the nodes and leafs of a graph")
            if t.layout.op != GS_OP_NONE:
                raise GraphError(f"{describe(t)} is computed, and stands among the leafs of a graph")
            g.position[g.leaf[i]] = -2
        for i in range(len(nodes)):
            t = nodes[i]
            k = self.require(t, t)
            if g.position[k] != -1:
                raise GraphError(f"{describe(t)} appears twice among the nodes and leafs of a graph")
            if t.layout.op == GS_OP_NONE:
                raise GraphError(f"{describe(t)} is a leaf, and stands among the nodes of a graph")
            if t.view_src is not None and g.position[g.view_src[k]] == -1 and t.view_src.layout.op != GS_OP_NONE:
                raise GraphError(f"node {i} {describe(t)} is a view of {describe(t.view_src)}, which is not computed "
                                 "before it")
            g.node[i] = k
            g.position[k] = <int32_t>i
            for s in t.src:
                if s is not None and g.position[self.require(s, t)] == -1:
                    raise GraphError(f"node {i} {describe(t)} reads {describe(s)}, which is neither a leaf nor an "
                                     "earlier node: a cycle or a wrong order")
                if s is t:
                    raise GraphError(f"node {i} {describe(t)} reads itself")
            if n_deps:
                for s in kept_by(t, given):
                    if g.position[self.require(s, t)] == -1:
                        raise GraphError(f"node {i} {describe(t)} keeps {describe(s)}, which is neither a leaf nor an "
                                         "earlier node: a cycle or a wrong order")
        for i in range(g.n_leafs):
            g.position[g.leaf[i]] = -1
        for i in range(g.n_tensors):
            if g.position[i] < 0 and g.layout[i].op > GS_OP_TRANSPOSE:
                raise GraphError(f"{describe(tensors[i])} is computed, but is not among the nodes of the graph")
        if n_deps:
            self.fill_deps(n_deps, given)
        flat_classify(g)
        self.fingerprint_structure(found)
        self.fingerprint = (int(found[0]) << 64) | int(found[1])
        return 0

    cdef int fill_deps(self, int64_t n_deps, dict given) except -1:
        """What nodes keep until they are done."""
        cdef gs_graph *g = &self.flat
        cdef Tensor t, s
        cdef int32_t i, at = 0
        g.dep_begin = <int32_t *>malloc((g.n_tensors + 1) * sizeof(int32_t))
        g.dep = <int32_t *>malloc(n_deps * sizeof(int32_t))
        if g.dep_begin == NULL or g.dep == NULL:
            raise no_host_memory(f"a graph of {g.n_tensors} tensors")
        for i in range(g.n_tensors):
            g.dep_begin[i] = at
            t = self.tensors[i]
            if g.position[i] >= 0:
                for s in kept_by(t, given):
                    g.dep[at] = self.require(s, t)
                    at += 1
        g.dep_begin[g.n_tensors] = at
        return 0

    @property
    def deps(self):
        """{node: the tensors kept until it is done}; see `Context.keep_until`."""
        cdef gs_graph *g = &self.flat
        cdef int32_t i, k
        if g.dep_begin == NULL:
            return {}
        cdef dict found = {}
        for i in range(g.n_tensors):
            if g.dep_begin[i] < g.dep_begin[i + 1]:
                kept = []
                for k in range(g.dep_begin[i], g.dep_begin[i + 1]):
                    kept.append(self.tensors[g.dep[k]])
                found[self.tensors[i]] = tuple(kept)
        return found

    cdef void fingerprint_structure(self, uint64_t *found) noexcept nogil:
        """128 bits over op, type, shape, strides, wiring, views and flags of every tensor, and the order."""
        cdef gs_graph *g = &self.flat
        cdef uint64_t a = 0x243F6A8885A308D3, b = 0x13198A2E03707344, h
        cdef int32_t i, k
        cdef uint64_t w = gs_mix(<uint64_t>g.n_tensors, <uint64_t>g.n_nodes)
        a = gs_mix(a, <uint64_t>g.n_tensors)
        b = gs_mix(b, (<uint64_t>g.n_nodes << 32) | <uint64_t>g.n_leafs)
        for i in range(g.n_tensors):
            h = gs_mix((<uint64_t>g.layout[i].op << 32) | <uint64_t>g.layout[i].type,
                    (<uint64_t>g.flags[i] << 32) ^ <uint64_t><uint32_t>g.view_src[i])
            w = gs_mix(w, h)
            h = gs_mix(h, <uint64_t>g.view_offs[i])
            for k in range(GS_MAX_DIMS):
                h = gs_mix(h, <uint64_t>g.layout[i].ne[k])
                h = gs_mix(h, <uint64_t>g.layout[i].nb[k])
            for k in range(g.src_begin[i], g.src_begin[i + 1]):
                h = gs_mix(h, <uint64_t>g.src[k] + 1)
                w = gs_mix(w, <uint64_t>g.src[k] + 1)
            a = gs_mix(a, h)
            b = gs_mix(b, h ^ (h >> 32) ^ <uint64_t>0xD6E8FEB86659FD93)
        for i in range(g.n_nodes):
            a = gs_mix(a, <uint64_t>g.node[i])
            b = gs_mix(b, <uint64_t>g.node[i])
            w = gs_mix(w, <uint64_t>g.node[i])
        if g.dep_begin != NULL:
            for i in range(g.n_tensors):
                for k in range(g.dep_begin[i], g.dep_begin[i + 1]):
                    h = (<uint64_t>i << 32) ^ <uint64_t>g.dep[k]
                    a = gs_mix(a, h)
                    b = gs_mix(b, h)
                    w = gs_mix(w, h)
        found[0] = a
        found[1] = b
        self.wiring = w

    def flags_of(self, Tensor t not None):
        """The flags that a tensor of this graph had when the graph was made; GraphError for another."""
        cdef int32_t k = self.id_of(t)
        if k < 0:
            raise GraphError(f"{describe(t)} is not a tensor of the graph")
        return flag_names(self.flat.flags[k])

    cpdef int32_t id_of(self, Tensor t):
        """The id of a tensor of this graph, -1 for another."""
        cdef int32_t k = t.mark
        if 0 <= k < self.flat.n_tensors and self.tensors[k] is t:
            return k
        # Another graph has marked it since.
        if self._index is None:
            self._index = TensorSet(self.tensors)
        return self._index.find(t)

    def position_of(self, Tensor t not None):
        """A node's place in the execution order, -1 for a leaf or a stranger."""
        cdef int32_t k = self.id_of(t)
        return -1 if k < 0 else self.flat.position[k]

    cdef int32_t require(self, Tensor t, Tensor user) except -1:
        cdef int32_t k = t.mark
        if 0 <= k < len(self.tensors) and self.tensors[k] is t:
            return k
        raise GraphError(f"{describe(user)} refers to {describe(t)}, which is not among the tensors of the graph")

    def residence_epoch(self):
        """Grows whenever a tensor of one of the graph's contexts is given, or loses, a permanent address."""
        cdef int64_t total = 0
        cdef Home home
        for home in self.homes:
            total += home.epoch + (<int64_t>1 << 48 if home.closed else 0)
        return total

    def __len__(self):
        return self.flat.n_nodes

    def __contains__(self, t):
        return isinstance(t, Tensor) and self.id_of(t) >= 0

    def __repr__(self):
        return f"<Graph of {self.flat.n_nodes} nodes, {self.flat.n_leafs} leafs>"


cdef inline tuple kept_by(Tensor t, dict given):
    """What t keeps until it is done, by a graph's deps if they are given."""
    if given is not None:
        return given.get(t, ())
    return () if t._deps is None else t._deps


cdef tuple depth_first(tuple outputs):
    """Nodes and leafs in the order in which ggml visits them: sources first, left to right."""
    cdef list order = []            # visited tensors; t.mark indexes it
    cdef list nodes = []
    cdef list leafs = []
    cdef list stack = []            # (tensor, next source); explicit, so that depth has no limit
    cdef Tensor t, s
    cdef Py_ssize_t k, n, last
    for output in outputs:
        if is_marked(output, order):
            continue
        mark(output, order)
        stack.append((output, 0))
        while stack:
            t, k = stack.pop()
            n = len(t.src)
            last = n if t._deps is None else n + len(t._deps)
            s = None
            while k <= last:
                # After the sources, the root of a view (ops always list it, files may not), and what it keeps.
                s = t.src[k] if k < n else t.view_src if k == n else t._deps[k - n - 1]
                k += 1
                if s is not None and not is_marked(s, order):
                    break
                s = None
            if s is not None:
                stack.append((t, k))
                mark(s, order)
                stack.append((s, 0))
            elif t.layout.op == GS_OP_NONE:
                leafs.append(t)
            else:
                nodes.append(t)
    return nodes, leafs


cdef inline bint is_marked(Tensor t, list order):
    return 0 <= t.mark < len(order) and order[t.mark] is t


cdef inline void mark(Tensor t, list order):
    t.mark = <int32_t>len(order)
    order.append(t)
