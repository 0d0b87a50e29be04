# OwnProducts: products that CpuBackend's kernels compute, on ggml's threads and in its graph.
#
# Where ggml has no layout of its own for a quantised weight, its kernels are slower than ours, most of all for prompts.
# (For few columns less so, and there the bits of llama.cpp are worth more.)  Weights of floats are read once for few
# columns, and ours read faster; for prompts ggml's are level, and stay, or quantised models would be slower than
# those.  A product of ours is a few calls (the columns, for quantised weights to 8 bits, then the products), and each
# call is a CUSTOM node of the graph, since ggml puts a barrier behind every node.  A source that overlaps the result
# is copied by such a call, not by a node of ggml's.
#
# No memory beside ggml's: calls work in the memory that ggml's kernels have for theirs, and no other node runs between
# those of a product.

cdef enum:
    FEW_COLUMNS = 4     # tokens that are generated together


@cython.no_gc
cdef class OwnProducts:
    """The calls of a plan's products, and the ggml nodes of all but the last call of each; `own_products` makes it."""

    cdef Products products
    cdef gx_tensor *steps           # owned
    cdef int32_t *first             # owned; for each node the first of its steps, one more at the end
    cdef float[16] nothing          # what the steps have as their result

    def __dealloc__(self):
        free(self.steps)
        free(self.first)

    cdef Py_ssize_t before(self, Py_ssize_t i) noexcept nogil:
        """How many steps come before node i."""
        return self.first[i + 1] - self.first[i]

    cdef gx_tensor *step(self, Py_ssize_t i, Py_ssize_t k) noexcept nogil:
        return &self.steps[self.first[i] + k]


cdef OwnProducts own_products(NodeTable table, gx_tensor *made, Device device, int64_t least):
    """Let nodes that our kernels compute faster be calls of ours, by quantised weights those of `least` columns or more;
    None: there are none.  OutOfMemory.
    """
    cdef OwnProducts own = OwnProducts.__new__(OwnProducts)
    cdef gs_turn *turn
    cdef Py_ssize_t i, k, n_steps = 0
    cdef list counts = []
    cdef int n_calls
    own.products = Products.__new__(Products)
    own.first = <int32_t *>calloc(table.n + 1, sizeof(int32_t))
    if own.first == NULL:
        raise no_host_memory(f"the calls of {table.n} nodes")
    for i in range(table.n):
        n_calls = 0
        if is_ours_faster(&table.nodes[i], made[i].src[0], least):
            n_calls = own.products.add(&table.nodes[i])
        own.first[i] = <int32_t>n_steps
        n_steps += max(n_calls - 1, 0)
        counts.append(n_calls)
    own.first[table.n] = <int32_t>n_steps
    if not any(counts):
        return None
    own.steps = <gx_tensor *>calloc(max(n_steps, 1), sizeof(gx_tensor))
    if own.steps == NULL:
        raise no_host_memory(f"the calls of {table.n} nodes")
    turn = own.products.start()
    for i in range(table.n):
        for k in range(own.before(i)):
            fill_step(own.step(i, k), own.nothing, device.host_buffer)
            device.api.fill_call(own.step(i, k), &take_parts, turn)
            turn += 1
        if counts[i]:
            for k in range(table.nodes[i].n_src):
                made[i].src[k] = &made[table.nodes[i].src[k] - table.nodes]     # not a copy
            device.api.fill_call(&made[i], &take_parts, turn)
            turn += 1
    return own


cdef bint is_ours_faster(const gs_node *node, const gx_tensor *weight, int64_t least) noexcept nogil:
    """Whether a node multiplies `least` columns or more by a quantised weight that ggml has no better layout for, or a
    few by a weight of floats.
    """
    cdef const gs_layout *columns
    cdef const gs_node *factor = node.src[0]
    cdef int64_t block, n
    if node.op != GS_OP_MUL_MAT:
        return False
    columns = &node.src[1].layout
    n = columns.ne[1] * columns.ne[2] * columns.ne[3]
    gx_unit(&factor.layout, &block)
    if block > 1:
        return n >= least and weight.extra == NULL      # which says that it was packed
    return n <= FEW_COLUMNS and factor.op == GS_OP_NONE and factor.layout.ne[2] == 1 and factor.layout.ne[3] == 1


cdef void fill_step(gx_tensor *out, void *data, void *buffer) noexcept nogil:
    """A tensor of one element, as ggml looks at no node without any."""
    out.data, out.buffer = data, buffer
    out.ne[0], out.ne[1], out.ne[2], out.ne[3] = 1, 1, 1, 1
    out.nb[0], out.nb[1], out.nb[2], out.nb[3] = 4, 4, 4, 4


cdef void take_parts(gx_tensor *dst, int ith, int nth, void *user) noexcept nogil:
    gs_take_parts(<gs_turn *>user, ith)
