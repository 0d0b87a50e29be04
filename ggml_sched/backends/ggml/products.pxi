# OwnProducts: matrix products that CpuBackend's kernels compute, on ggml's threads and in ggml's graph.
#
# Which products: (1) those of many columns (prompts) by quantised weights for which ggml has no repacked layout; ggml's
# kernels are much slower there.  With few columns ggml's are only a little slower, and are used, because then results
# are equal to llama.cpp's to the bit.  (2) Those of few columns by float weights, which CpuBackend's kernels read
# faster.  With many columns both are equally fast, and ggml's kernels are used.
#
# A product is a few calls: one that converts the columns (for quantised weights to 8 bits), then the multiplication.
# Each call is a CUSTOM node of the graph, because ggml has a barrier after every node.  Where a source overlaps the
# result, another such call copies the source first; ggml's copy node is not used.
#
# The calls share the work memory of ggml's kernels.  That is safe as no other node runs between the calls of a product.

cdef enum:
    FEW_COLUMNS = 4     # the most columns of case (2); decoding has one column for each sequence


@cython.no_gc
cdef class OwnProducts:
    """The calls of a GraphPlan's own products.  The last call of a product is the product's own node; each earlier call
    is an extra node of the ggml graph.  Made by `own_products`."""

    cdef Products products
    cdef gx_tensor *earlier         # owned; the extra nodes, of one product after another
    cdef int32_t *first             # owned; [nodes + 1] the index in `earlier` of a node's first call, and the end
    cdef float[16] unused           # memory for the results of extra nodes, as ggml tensors need some; never written

    def __dealloc__(self):
        free(self.earlier)
        free(self.first)

    cdef Py_ssize_t n_earlier(self, Py_ssize_t i) noexcept nogil:
        """The number of steps of node i, which run before it."""
        return self.first[i + 1] - self.first[i]

    cdef gx_tensor *earlier_call(self, Py_ssize_t i, Py_ssize_t k) noexcept nogil:
        return &self.earlier[self.first[i] + k]


cdef OwnProducts own_products(NodeTable table, gx_tensor *made, Device device, int64_t least):
    """Replace each product that CpuBackend's kernels compute faster by calls of these kernels; None if there are none.

    `least`: the smallest number of columns of products by quantised weights.  OutOfMemory.
    """
    cdef OwnProducts own = OwnProducts.__new__(OwnProducts)
    cdef gs_shared_call *call
    cdef Py_ssize_t i, k, n_earlier = 0
    cdef list counts = []
    cdef int n_calls
    own.products = Products.__new__(Products)
    own.first = <int32_t *>calloc(table.n + 1, sizeof(int32_t))
    if own.first == NULL:
        raise no_host_memory(f"the calls of {table.n} nodes")
    for i in range(table.n):
        n_calls = 0
        if is_own_product(&table.nodes[i], made[i].src[0], least):
            n_calls = own.products.add(&table.nodes[i])
        own.first[i] = <int32_t>n_earlier
        n_earlier += max(n_calls - 1, 0)
        counts.append(n_calls)
    own.first[table.n] = <int32_t>n_earlier
    if not any(counts):
        return None
    own.earlier = <gx_tensor *>calloc(max(n_earlier, 1), sizeof(gx_tensor))
    if own.earlier == NULL:
        raise no_host_memory(f"the calls of {table.n} nodes")
    call = own.products.shared_calls()
    for i in range(table.n):
        for k in range(own.n_earlier(i)):
            fill_earlier(own.earlier_call(i, k), own.unused, device.host_buffer)
            device.api.fill_call(own.earlier_call(i, k), &run_parts, call)
            call += 1
        if counts[i]:
            for k in range(table.nodes[i].n_src):
                made[i].src[k] = &made[table.nodes[i].src[k] - table.nodes]     # undoes make_copies: a step copies src
            device.api.fill_call(&made[i], &run_parts, call)
            call += 1
    return own


cdef bint is_own_product(const gs_node *node, const gx_tensor *weight, int64_t least) noexcept nogil:
    """Whether CpuBackend's kernels compute a node: a product of at least `least` columns by a quantised weight that is
    not repacked, or of at most FEW_COLUMNS by a weight of floats."""
    cdef const gs_layout *columns
    cdef const gs_node *factor = node.src[0]
    cdef int64_t block, n
    if node.op != GS_OP_MUL_MAT:
        return False
    columns = &node.src[1].layout
    n = columns.ne[1] * columns.ne[2] * columns.ne[3]
    gx_unit(&factor.layout, &block)
    if block > 1:
        return n >= least and weight.extra == NULL      # extra is set only in a repacked copy
    return n <= FEW_COLUMNS and factor.op == GS_OP_NONE and factor.layout.ne[2] == 1 and factor.layout.ne[3] == 1


cdef void fill_earlier(gx_tensor *out, void *data, void *buffer) noexcept nogil:
    """Give an extra node a result of one f32 element that is never written, because ggml skips nodes whose result is
    empty.  The extra node makes a call of a product before the product's own node."""
    out.data, out.buffer = data, buffer
    out.ne[0], out.ne[1], out.ne[2], out.ne[3] = 1, 1, 1, 1
    out.nb[0], out.nb[1], out.nb[2], out.nb[3] = 4, 4, 4, 4


cdef void run_parts(gx_tensor *dst, int ith, int nth, void *user) noexcept nogil:
    gs_run_parts(<gs_shared_call *>user, ith)
