# The order of nodes: depth first, as ggml visits them.
#
# The walk from outputs to leafs uses an array as its stack, so that depth has no limit.  Pointers to tensors are
# borrowed: the outputs own the tensors that they need.  Corresponds to ggml_visit_parents.

ctypedef struct gs_frame:
    void *t                     # a tensor whose requirements are being visited
    Py_ssize_t next             # index of its next requirement: first sources, then its root, then alloc dependencies


cdef class Walk:
    """One walk: the tensors reached so far, and the nodes and leafs in the order in which a graph lists them."""

    cdef void **seen                    # owned, [room]: tensors in the order in which they were reached; t is at t.mark
    cdef void **done                    # owned, [room]: the nodes from the front, the leafs from the back
    cdef gs_frame *stack                # owned, [room]
    cdef Py_ssize_t n_seen, n_nodes, n_leafs, depth, room

    def __dealloc__(self):
        free(self.seen)
        free(self.done)
        free(self.stack)

    cdef int grow(self) except -1:
        """Double the room of all arrays."""
        cdef Py_ssize_t room = max(2 * self.room, 256)
        cdef void **seen = <void **>realloc(self.seen, room * sizeof(void *))
        cdef void **done = NULL
        cdef gs_frame *stack = NULL
        if seen != NULL:
            self.seen = seen
            stack = <gs_frame *>realloc(self.stack, room * sizeof(gs_frame))
        if stack != NULL:
            self.stack = stack
            done = <void **>realloc(self.done, room * sizeof(void *))
        if done == NULL:
            raise no_host_memory(f"a graph of more than {self.room} tensors")
        memmove(done + room - self.n_leafs, done + self.room - self.n_leafs, self.n_leafs * sizeof(void *))
        self.done, self.room = done, room
        return 0

    cdef inline bint is_new(self, void *t) noexcept:
        cdef int32_t mark = (<Tensor>t).mark
        return not (0 <= mark < self.n_seen and self.seen[mark] == t)

    cdef inline int enter(self, void *t) except -1:
        """Add a tensor that is not yet in `seen`, and push it on the stack."""
        if self.n_seen == self.room:
            self.grow()
        (<Tensor>t).mark = <int32_t>self.n_seen
        self.seen[self.n_seen] = t
        self.stack[self.depth].t, self.stack[self.depth].next = t, 0
        self.n_seen += 1
        self.depth += 1
        return 0

    cdef inline void *next_source(self, gs_frame *frame) noexcept:
        """The next tensor that the frame's tensor needs and that is not yet in `seen`; NULL if there is none."""
        cdef Tensor t = <Tensor>frame.t
        cdef Py_ssize_t n = PyTuple_GET_SIZE(t.src)
        cdef Py_ssize_t last = n + (0 if t._deps is None else PyTuple_GET_SIZE(t._deps))
        cdef void *s
        while frame.next <= last:
            # The root is visited by itself, too: in a graph file, a view may not have it among its sources.
            if frame.next < n:
                s = <void *>PyTuple_GET_ITEM(t.src, frame.next)
            elif frame.next == n:
                s = <void *>t.view_src
            else:
                s = <void *>PyTuple_GET_ITEM(t._deps, frame.next - n - 1)
            frame.next += 1
            if s != <void *>None and self.is_new(s):
                return s
        return NULL

    cdef int visit(self, Tensor output) except -1:
        """Visit all tensors that an output needs, each after its own sources, sources from left to right."""
        cdef void *s
        if not self.is_new(<void *>output):
            return 0
        self.enter(<void *>output)
        while self.depth:
            s = self.next_source(&self.stack[self.depth - 1])
            if s != NULL:
                self.enter(s)
                continue
            self.depth -= 1
            s = self.stack[self.depth].t
            if (<Tensor>s).layout.op == GS_OP_NONE:
                self.n_leafs += 1
                self.done[self.room - self.n_leafs] = s
            else:
                self.done[self.n_nodes] = s
                self.n_nodes += 1
        return 0

    cdef tuple leafs(self):
        return () if self.done == NULL else tuple_over(self.done + self.room - 1, -1, self.n_leafs)

    cdef tuple nodes(self):
        return tuple_over(self.done, 1, self.n_nodes)


cdef tuple tuple_over(void **at, Py_ssize_t step, Py_ssize_t n):
    """A tuple of n objects, the first of them at[0], the next at[step]."""
    cdef tuple made = PyTuple_New(n)
    cdef Py_ssize_t i
    for i in range(n):
        Py_INCREF(<object>at[i * step])
        PyTuple_SET_ITEM(made, i, <object>at[i * step])
    return made
