# cython: language_level=3
"""Graphs: immutable sequences of nodes, with the leafs that they need.

A Graph has tuples of tensors for Python code, and a gs_graph, flat arrays, for the passes of the planner; both are
indexed by tensor id.  Invariant: every source of a node is a leaf or an earlier node, the root of every view is in the
graph, and nothing changes after construction.  Corresponds to ggml_cgraph and ggml_build_forward_expand.

`order.pxi` determines the order of nodes: depth first, as in ggml.
"""

from ggml_sched.errors import GraphError, no_host_memory

cimport cython
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE, PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

from ggml_sched._c cimport *
from ggml_sched.core.graph.flat cimport (
    MAX_KIND_WORDS, flat_alloc, flat_arrays, flat_classify, flat_fingerprint, kind_words, kinds_free,
    kinds_sort,
)
from ggml_sched.core.graph.tensor cimport ContextState, Tensor, describe, flag_names
from ggml_sched.core.graph.types cimport ints_tuple, op_is_view

include "order.pxi"

cdef enum:
    SHOWN_NODES = 40        # the most nodes that a notebook shows; the others are counted


cdef class Graph:
    """`Graph(*outputs)`: everything the outputs need, nodes in ggml's depth-first order.  Immutable.

    `nodes` are the computed tensors in execution order, `leafs` the others, `tensors` all of them
    (leafs, then nodes; in a graph loaded from a file the file's order), `meta` a dict of notes.
    Raises GraphError for a tensor whose context is closed.
    """

    def __cinit__(self, *outputs):
        self.nodes = self.leafs = self.tensors = ()
        self.meta = {}

    def __dealloc__(self):
        free(self.flat.layout)
        kinds_free(&self._kinds)

    def __init__(self, *outputs):
        cdef Walk walk
        cdef tuple nodes, leafs
        for t in outputs:
            if not isinstance(t, Tensor):
                raise TypeError(f"a graph is made of Tensors, not {list_of_tensors(t) or repr(t)}")
        walk = Walk()
        for t in outputs:
            walk.visit(t)
        nodes, leafs = walk.nodes(), walk.leafs()
        self.fill(leafs + nodes, nodes, leafs)

    @staticmethod
    def from_order(tensors, nodes, leafs, meta=None):
        """A graph of `tensors`, in this order of ids, with these `nodes` in execution order and these `leafs`.

        Raises GraphError when a source comes later than its node, a tensor appears twice or is missing, a leaf has an
        op or a node has none.
        """
        cdef Graph g = Graph.__new__(Graph)
        g.fill(tuple(tensors), tuple(nodes), tuple(leafs))
        g.meta = dict(meta or {})
        return g

    def with_order(self, nodes):
        """This graph with its nodes in another order, with the same flags and alloc dependencies.

        Raises GraphError when a source comes later than its node, a node appears twice or is missing.
        """
        cdef Graph g = Graph.__new__(Graph)
        nodes = tuple(nodes)
        if len(nodes) != self.flat.n_nodes:
            raise GraphError(f"an order of {len(nodes)} nodes for a graph of {self.flat.n_nodes}")
        g.fill(self.tensors, nodes, self.leafs, self)
        g.meta = dict(self.meta)
        return g

    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.nonecheck(False)
    cdef int fill(self, tuple tensors, tuple nodes, tuple leafs, Graph recorded=None) except -1:
        """Fill the flat arrays.  `recorded`: a graph of the same tensors whose flags and alloc dependencies to use."""
        cdef gs_graph *g = &self.flat
        cdef dict given = None if recorded is None else recorded.deps
        cdef gs_graph_size size
        cdef uint64_t[2] found
        self.tensors, self.nodes, self.leafs = tensors, nodes, leafs
        self.number(given, &size)
        flat_alloc(g, &size)
        self.fill_tensors(recorded)
        self.fill_order(given if size.n_deps else {})
        if size.n_deps:
            self.fill_deps(given)
        flat_classify(g)
        flat_fingerprint(g, g.layout_hash, found, &self.wiring)
        self.fingerprint = (int(found[0]) << 64) | int(found[1])
        return 0

    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.nonecheck(False)
    cdef int number(self, dict given, gs_graph_size *size) except -1:
        """Mark each tensor with its id, and count the entries of the arrays.

        `given`: the alloc dependencies by node, or None for those of the tensors.
        """
        # Borrowed references, here and below: the tuple owns its tensors.
        cdef void *at
        cdef ContextState context_state = None
        cdef list context_states = []
        cdef Py_ssize_t i
        cdef int64_t n_src = 0, n_params = 0, n_deps = 0
        for i in range(len(self.tensors)):
            at = PyTuple_GET_ITEM(self.tensors, i)
            if not isinstance(<object>at, Tensor):
                raise TypeError(f"a graph is made of Tensors, not {<object>at!r}")
            if <void *>(<Tensor>at).context_state != <void *>context_state:
                context_state = (<Tensor>at).context_state
                if context_state not in context_states:
                    context_states.append(context_state)
            if context_state.closed:
                raise GraphError(f"{describe(<Tensor>at)} belongs to closed context {context_state.name!r}")
            (<Tensor>at).mark = <int32_t>i
            self.names_residents |= <void *>(<Tensor>at)._resident != <void *>None
            n_src += PyTuple_GET_SIZE((<Tensor>at).src)
            n_params += 0 if op_is_view((<Tensor>at).layout.op) else (<Tensor>at).n_params
            if given is not None or <void *>(<Tensor>at)._deps != <void *>None:
                n_deps += len(kept_by(<Tensor>at, given))
        if max(<int64_t>len(self.tensors), n_src, n_params, n_deps) > 0x3fffffff:
            raise GraphError(f"a graph of {len(self.tensors)} tensors with {n_src} sources is too large")
        size.n_tensors, size.n_nodes, size.n_leafs = len(self.tensors), len(self.nodes), len(self.leafs)
        size.n_src, size.n_params, size.n_deps = n_src, n_params, n_deps
        self.context_states = tuple(context_states)
        return 0

    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.nonecheck(False)
    cdef int fill_tensors(self, Graph recorded) except -1:
        """Fill layouts, flags, roots, sources and parameters; `position` is -1 until fill_order."""
        cdef gs_graph *g = &self.flat
        cdef void *at
        cdef void *s
        cdef Py_ssize_t k
        cdef int32_t i, n_src = 0, n_params = 0
        for i in range(g.n_tensors):
            at = PyTuple_GET_ITEM(self.tensors, i)
            if (<Tensor>at).mark != i:
                raise GraphError(f"{describe(<Tensor>at)} appears twice in a graph")
            g.layout[i] = (<Tensor>at).layout
            g.flags[i] = <unsigned char>(<Tensor>at)._flags if recorded is None else recorded.flat.flags[i]
            g.view_offs[i] = (<Tensor>at).view_offs
            g.view_src[i] = -1
            if <void *>(<Tensor>at).view_src != <void *>None:
                g.view_src[i] = self.require(<void *>(<Tensor>at).view_src, at)
            g.position[i] = -1
            g.param_begin[i] = n_params
            if (<Tensor>at).n_params and not op_is_view((<Tensor>at).layout.op):
                memcpy(g.param + n_params, (<Tensor>at).params, (<Tensor>at).n_params * sizeof(int32_t))
                n_params += (<Tensor>at).n_params
            g.src_begin[i] = n_src
            for k in range(PyTuple_GET_SIZE((<Tensor>at).src)):
                s = PyTuple_GET_ITEM((<Tensor>at).src, k)
                if s != <void *>None:
                    g.src[n_src] = self.require(s, at)
                    g.slot[n_src] = <unsigned char>k
                    n_src += 1
        g.src_begin[g.n_tensors], g.param_begin[g.n_tensors] = n_src, n_params
        return 0

    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.nonecheck(False)
    cdef int fill_order(self, dict deps) except -1:
        """Fill the orders of leafs and nodes; GraphError unless each node comes after the tensors that it needs.

        `deps`: the alloc dependencies by node, or None for those of the tensors.
        """
        cdef gs_graph *g = &self.flat
        cdef void *at
        cdef Tensor t, s
        cdef int32_t i, k, id
        for i in range(g.n_leafs):
            at = PyTuple_GET_ITEM(self.leafs, i)
            id = g.leaf[i] = self.require_tensor(at)
            if g.position[id] != -1:
                raise GraphError(f"{describe(<Tensor>at)} appears twice among the nodes and leafs of a graph")
            if g.layout[id].op != GS_OP_NONE:
                raise GraphError(f"{describe(<Tensor>at)} is computed, and stands among the leafs of a graph")
            g.position[id] = -2
        for i in range(g.n_nodes):
            at = PyTuple_GET_ITEM(self.nodes, i)
            id = g.node[i] = self.require_tensor(at)
            if g.position[id] != -1:
                raise GraphError(f"{describe(<Tensor>at)} appears twice among the nodes and leafs of a graph")
            if g.layout[id].op == GS_OP_NONE:
                raise GraphError(f"{describe(<Tensor>at)} is a leaf, and stands among the nodes of a graph")
            k = g.view_src[id]
            if k >= 0 and g.position[k] == -1 and g.layout[k].op != GS_OP_NONE:
                raise GraphError(f"node {i} {describe(<Tensor>at)} is a view of {describe(self.tensors[k])}, which is "
                                 "not computed before it")
            g.position[id] = i
            for k in range(g.src_begin[id], g.src_begin[id + 1]):
                if g.position[g.src[k]] == -1:
                    raise GraphError(f"node {i} {describe(<Tensor>at)} reads {describe(self.tensors[g.src[k]])}, which "
                                     "is neither a leaf nor an earlier node: a cycle or a wrong order")
                if g.src[k] == id:
                    raise GraphError(f"node {i} {describe(<Tensor>at)} reads itself")
            if deps is None or len(deps):
                t = <Tensor>at
                for s in kept_by(t, deps):
                    if g.position[self.require(<void *>s, at)] == -1:
                        raise GraphError(f"node {i} {describe(t)} keeps {describe(s)}, which is neither a leaf nor an "
                                         "earlier node: a cycle or a wrong order")
        for i in range(g.n_leafs):
            g.position[g.leaf[i]] = -1
        for i in range(g.n_tensors):
            if g.position[i] < 0 and g.layout[i].op > GS_OP_TRANSPOSE:
                raise GraphError(f"{describe(self.tensors[i])} is computed, but is not among the nodes of the graph")
        return 0

    cdef int fill_deps(self, dict given) except -1:
        """Fill the alloc dependencies: those in `given`, or, if that is None, the tensors' own."""
        cdef gs_graph *g = &self.flat
        cdef Tensor t, s
        cdef int32_t i, at = 0
        for i in range(g.n_tensors):
            g.dep_begin[i] = at
            t = self.tensors[i]
            if g.position[i] >= 0:
                for s in kept_by(t, given):
                    g.dep[at] = self.require(<void *>s, <void *>t)
                    at += 1
        g.dep_begin[g.n_tensors] = at
        return 0

    @property
    def deps(self):
        """{node: its alloc dependencies}; see `Context.keep_until`."""
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

    cdef int find_kinds(self, bint all) except -1:
        """Find the kinds of the computing nodes, or of all tensors; kinds that are known already do not change."""
        cdef gs_graph *g = &self.flat
        cdef int status
        if self._kinds.of == NULL:
            self._kinds.of = <int32_t *>malloc(max(g.n_tensors, 1) * sizeof(int32_t))
            if self._kinds.of == NULL:
                raise no_host_memory(f"the kinds of {g.n_tensors} tensors")
            memset(self._kinds.of, 0xff, g.n_tensors * sizeof(int32_t))
        if self.sorted_all or self.sorted_work and not all:
            return 0
        if all:
            status = kinds_sort(&self._kinds, g, NULL, g.n_tensors)
        else:
            status = kinds_sort(&self._kinds, g, g.work, g.n_work)
        if status != GS_OK:
            raise no_host_memory(f"the kinds of {g.n_tensors} tensors")
        self.sorted_work = True
        self.sorted_all = all
        return 0

    def kinds(self):
        """For each of `tensors` the number of its kind; support queries have equal answers for tensors of one kind.

        Tensors of one kind have equal op, parameters (ignored for views), type, extents and strides, and equal types,
        extents and strides of the sources in each slot.
        """
        self.find_kinds(True)
        return ints_tuple(self._kinds.of, self.flat.n_tensors)

    def kind_of(self, Tensor t not None):
        """The properties that define the kind of a tensor, as bytes: equal for equal kinds in all graphs.

        GraphError for a tensor that is not of this graph.
        """
        cdef uint64_t[MAX_KIND_WORDS] words
        cdef int32_t n = kind_words(&self.flat, self.known(t), words)
        return (<char *>words)[:n * sizeof(uint64_t)]

    def flags_of(self, Tensor t not None):
        """The flags that a tensor of this graph had when the graph was made; GraphError for another."""
        return flag_names(self.flat.flags[self.known(t)])

    cdef int32_t known(self, Tensor t) except -1:
        """The id of a tensor of this graph; GraphError for another."""
        cdef int32_t k = self.id_of(t)
        if k < 0:
            raise GraphError(f"{describe(t)} is not a tensor of the graph")
        return k

    cpdef int32_t id_of(self, Tensor t) except -2:
        """The id of a tensor of this graph, -1 for another."""
        cdef int32_t k
        if t is None:
            raise TypeError("a graph has ids of Tensors, not of None")
        k = t.mark
        if 0 <= k < self.flat.n_tensors and self.tensors[k] is t:
            return k
        # Another graph has overwritten the tensor's mark.
        if self._ids is None:
            self._ids = dict(zip(self.tensors, range(len(self.tensors)), strict=True))
        return self._ids.get(t, -1)

    def position_of(self, Tensor t not None):
        """The position of a node in the execution order, -1 for a leaf or a tensor of another graph."""
        cdef int32_t k = self.id_of(t)
        return -1 if k < 0 else self.flat.position[k]

    cdef inline int32_t require(self, void *t, void *user) except -1:
        """The id of tensor t, read from its mark; if the graph lacks t, a GraphError that names tensor `user`, too."""
        cdef int32_t k = (<Tensor>t).mark
        if 0 <= k < self.flat.n_tensors and <void *>PyTuple_GET_ITEM(self.tensors, k) == t:
            return k
        raise GraphError(f"{describe(<Tensor>user)} refers to {describe(<Tensor>t)}, which is not among the tensors of "
                         "the graph")

    def arrays(self):
        """{name: bytes} of the arrays of gs_graph (include/ggml_sched/graph.h) that a program is made from.

        int32: `src_begin`, `src`, `memory`, `position`, `node`, `work`; int64: `view_offs`, `nbytes`; bytes: `slot`,
        `op`, `role`, `flags`.
        """
        return flat_arrays(&self.flat)

    cdef inline int32_t require_tensor(self, void *t) except -1:
        """The id of a node or leaf that the caller listed, read from its mark; GraphError if the graph lacks it."""
        if not isinstance(<object>t, Tensor):
            raise TypeError(f"a graph is made of Tensors, not {<object>t!r}")
        return self.require(t, t)

    cpdef int64_t residence_epoch(self) noexcept:
        """A number that grows when a tensor of one of the graph's contexts gets or loses a permanent address."""
        cdef int64_t total = 0
        cdef ContextState context_state
        for context_state in self.context_states:
            total += context_state.epoch + (<int64_t>1 << 48 if context_state.closed else 0)
        return total

    def __len__(self):
        return self.flat.n_nodes

    def __contains__(self, t):
        return isinstance(t, Tensor) and self.id_of(t) >= 0

    def __repr__(self):
        return f"<Graph of {self.flat.n_nodes} nodes, {self.flat.n_leafs} leafs>"

    def _repr_html_(self):
        """The graph in a notebook: its first nodes with their ids, shapes and sources."""
        import html

        cdef Tensor t, s
        cdef list lines = [repr(self)]
        cdef list sources
        for t in self.nodes[:SHOWN_NODES]:
            sources = []
            for s in t.src:
                if s is not None:
                    sources.append(s.name or f"tensor {self.id_of(s)}")
            lines.append(f"{self.id_of(t):>5}  {t.op} {t.type} {list(t.ne)} {t.name!r} of {', '.join(sources)}")
        if len(self.nodes) > SHOWN_NODES:
            lines.append(f"and {len(self.nodes) - SHOWN_NODES} more")
        return f"<pre>{html.escape(chr(10).join(lines))}</pre>"


cdef str list_of_tensors(object given):
    """The words for a list of tensors in a message, and how to give them one by one; "" if it is no list of tensors."""
    if isinstance(given, (list, tuple)) and given and all(isinstance(t, Tensor) for t in given):
        return (f"a {type(given).__name__} of {len(given)}: give each output as an argument, Graph(y) or "
                "Graph(*outputs)")
    return ""


cdef inline tuple kept_by(Tensor t, dict given):
    """The alloc dependencies of t: those in `given`, or, if that is None, the tensor's own."""
    if given is not None:
        return given.get(t, ())
    return () if t._deps is None else t._deps
