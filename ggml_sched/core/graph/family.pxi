# Families of graphs: alike but for one number that their sizes grow with, such as the rows of a cache that are read.
#
# Owns nothing but two examples.  Invariant: every extent, stride and offset of the graph for n lies on the line through
# those of the examples, and all else is equal in both; so no op has to be asked what it does with the number, and a
# graph of the family costs a walk over its tensors instead of being built.  ggml builds each graph anew.

cdef extern from "Python.h":
    # Cython's own declaration wants an exception; NULL clips what is too large, and costs no try.
    Py_ssize_t PyNumber_AsSsize_t(object x, PyObject *exc) except? -1

cdef int64_t FAR = 1 << 61              # numbers further from 0 would leave no room to subtract


cdef class GraphFamily:
    """`GraphFamily(a, b, n_a, n_b)`: what graph `a` is for n_a and `b` for n_b, `at(n)` makes for n.

    Tensors that both have (weights, caches) are those of the new graph, too; the others are new, in a context of their
    own.  GraphError for examples that differ in more than sizes, ValueError for equal numbers.
    """

    cdef Graph a
    cdef Graph b
    cdef int64_t n_a
    cdef int64_t span

    def __init__(self, Graph a not None, Graph b not None, n_a, n_b):
        cdef int32_t i
        cdef Tensor s, t
        self.a, self.b = a, b
        self.n_a = 0
        self.n_a = self.step_to(n_a)
        self.span = self.step_to(n_b)
        if self.span == 0:
            raise ValueError(f"two graphs for {n_a} say nothing about others")
        if not graphs_alike(&a.flat, &b.flat):
            raise GraphError(f"{a!r} and {b!r} differ in more than sizes")
        for i in range(a.flat.n_tensors):
            s, t = a.tensors[i], b.tensors[i]
            if s is t:
                continue
            if s._resident is not None or t._resident is not None or s.layout.op != GS_OP_VIEW and (
                    s.n_params != t.n_params
                    or s.n_params and memcmp(s.params, t.params, s.n_params * sizeof(int32_t)) != 0):
                raise GraphError(f"{describe(s)} and {describe(t)} differ in more than sizes")

    def at(self, n):
        """The graph for n; GraphError where an extent would be no whole number, negative or too large."""
        cdef Graph a = self.a
        cdef Graph made = Graph.__new__(Graph)
        cdef ContextBase ctx = Context(f"a graph for {n}")
        cdef int64_t step = self.step_to(n)
        cdef gs_layout layout
        cdef list tensors = [None] * a.flat.n_tensors
        cdef int32_t i, k
        cdef Tensor s, t
        for i in range(a.flat.n_tensors):
            s = <Tensor>PyTuple_GET_ITEM(a.tensors, i)
            if <void *>s == <void *>PyTuple_GET_ITEM(self.b.tensors, i):
                tensors[i] = s
                continue
            layout = a.flat.layout[i]
            if not layout_equal(&layout, &self.b.flat.layout[i]):
                for k in range(GS_MAX_DIMS):
                    layout.ne[k] = self.between(s, layout.ne[k], self.b.flat.layout[i].ne[k], step)
                    layout.nb[k] = self.between(s, layout.nb[k], self.b.flat.layout[i].nb[k], step)
                if layout.ne[0] % traits[layout.type].block_size or layout_set_nbytes(&layout) != GS_OK:
                    raise GraphError(f"{describe(s)} has no extents for {n}")
            k = a.flat.view_src[i]
            t = ctx.add_tensor(layout.op, &layout, self.sources(i, tensors), None if k < 0 else <Tensor>tensors[k],
                               self.between(s, a.flat.view_offs[i], self.b.flat.view_offs[i], step))
            self.give_params(ctx, t, s, i, step)
            t._name, t.endings, t._flags = s._name, s.endings, a.flat.flags[i]
            tensors[i] = t
        made.fill(tuple(tensors), chosen(tensors, a.flat.node, a.flat.n_nodes),
                  chosen(tensors, a.flat.leaf, a.flat.n_leafs))
        made.meta = dict(a.meta)
        return made

    cdef int give_params(self, ContextBase ctx, Tensor t, Tensor s, int32_t i, int64_t step) except -1:
        """The parameters that both examples have; those of a VIEW are its offset into its source."""
        cdef int64_t offset
        if s.layout.op != GS_OP_VIEW:
            t.params, t.n_params = ctx.home.keep(s.params, s.n_params), s.n_params
            return 0
        offset = self.between(s, view_word(s), view_word(<Tensor>PyTuple_GET_ITEM(self.b.tensors, i)), step)
        with_params(t, <int32_t *>&offset, 2)
        return 0

    cdef tuple sources(self, int32_t i, list tensors):
        """The sources of tensor i among those that were made."""
        cdef gs_graph *g = &self.a.flat
        cdef tuple given = (<Tensor>PyTuple_GET_ITEM(self.a.tensors, i)).src
        cdef tuple src = PyTuple_New(PyTuple_GET_SIZE(given))
        cdef Py_ssize_t slot
        cdef int32_t k = g.src_begin[i]
        for slot in range(PyTuple_GET_SIZE(given)):
            if k < g.src_begin[i + 1] and g.slot[k] == slot:
                one = tensors[g.src[k]]
                if one is None:
                    raise GraphError(f"{describe(self.a.tensors[i])} stands before its sources")
                k += 1
            else:
                one = None
            Py_INCREF(one)
            PyTuple_SET_ITEM(src, slot, one)
        return src

    cdef int64_t step_to(self, object n) except? -1:
        cdef Py_ssize_t number = PyNumber_AsSsize_t(n, NULL)
        if not -FAR <= number <= FAR:
            raise GraphError(f"no graph is for {number}")
        return number - self.n_a

    cdef int64_t between(self, Tensor of, int64_t x, int64_t y, int64_t step) except? -1:
        """Where the line through x and y is `step` after x."""
        cdef int64_t size, rise = y - x
        cdef bint falls = ((rise < 0) + (step < 0) + (self.span < 0)) & 1
        if rise == 0 or step == 0:
            return x
        if gs_checked_mul(llabs(rise), llabs(step), &size) != GS_OK or size % llabs(self.span):
            raise GraphError(f"{describe(of)} has no size for {self.n_a + step}")
        size //= llabs(self.span)
        if not falls and gs_checked_add(x, size, &size) != GS_OK or falls and size > x:
            raise GraphError(f"{describe(of)} has no size for {self.n_a + step}")
        return x - size if falls else size


cdef int64_t view_word(Tensor t) noexcept:
    """The offset among the parameters of a VIEW, whose zeros are cut."""
    cdef int64_t offset = 0
    if t.n_params:
        memcpy(&offset, t.params, min(t.n_params, 2) * sizeof(int32_t))
    return offset


cdef bint graphs_alike(const gs_graph *a, const gs_graph *b) noexcept nogil:
    """Whether two graphs are wired alike and of the same ops, types and parameters, and keep nothing."""
    cdef int32_t i, n = a.n_tensors, n_src, n_params
    if not (n == b.n_tensors and a.n_nodes == b.n_nodes and a.n_leafs == b.n_leafs and a.dep_begin == NULL
            and b.dep_begin == NULL and a.src_begin[n] == b.src_begin[n] and a.param_begin[n] == b.param_begin[n]):
        return False
    for i in range(n):
        if a.layout[i].op != b.layout[i].op or a.layout[i].type != b.layout[i].type:
            return False
    n_src, n_params = a.src_begin[n], a.param_begin[n]
    return not (memcmp(a.src_begin, b.src_begin, (n + 1) * sizeof(int32_t))
                or memcmp(a.src, b.src, n_src * sizeof(int32_t))
                or memcmp(a.slot, b.slot, n_src) or memcmp(a.view_src, b.view_src, n * sizeof(int32_t))
                or memcmp(a.flags, b.flags, n)
                or memcmp(a.param_begin, b.param_begin, (n + 1) * sizeof(int32_t))
                or memcmp(a.param, b.param, n_params * sizeof(int32_t))
                or memcmp(a.node, b.node, a.n_nodes * sizeof(int32_t))
                or memcmp(a.leaf, b.leaf, a.n_leafs * sizeof(int32_t)))


cdef tuple chosen(list tensors, const int32_t *ids, Py_ssize_t n):
    """The tensors of some ids, in their order."""
    cdef tuple made = PyTuple_New(n)
    cdef Py_ssize_t i
    for i in range(n):
        one = tensors[ids[i]]
        Py_INCREF(one)
        PyTuple_SET_ITEM(made, i, one)
    return made
