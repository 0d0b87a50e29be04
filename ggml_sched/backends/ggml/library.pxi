# Api: the functions of one loaded ggml, and ggml's numbers of the ops that this package knows.
#
# Owns nothing: library.py loads the library and never unloads it, so the pointers stay valid.  Invariant: a function
# pointer is NULL only where library.py allows the function to be missing.

TENSOR_SIZE = sizeof(gx_tensor)
FUNCTIONS = tuple([(<bytes>gx_functions[i].name).decode() for i in range(GX_N_FUNCTIONS)])
"""The names of the functions of `Api`, without "ggml_"; from `graph_plan` on they are in libggml-cpu."""
QUIET = <uintptr_t><void *>&gx_quiet
"""The address of a log callback that drops its messages."""

cdef enum:
    N_NUMBERS = 256         # this package's numbers of ops, sub-ops included, are below it

ctypedef void (*custom_call)(gx_tensor *, int, int, void *) noexcept nogil


cdef class Api:
    """`Api(addresses, ops, sub_ops, types)`: {function name without "ggml_": address}; ggml's numbers of ops and of
    sub-ops by this package's numbers; the numbers of the types that the library and this package have in common."""

    cdef gx_api call
    cdef int32_t op[N_NUMBERS]      # ggml's number by this package's; -1: the library lacks the op
    cdef int32_t sub_op[N_NUMBERS]  # ggml's number of a unary op or GLU by this package's; -1: the library lacks it
    cdef int32_t custom             # ggml's number of the CUSTOM op; -1: the library lacks it
    cdef uint64_t types             # bit t: the library has type number t
    cdef readonly bint has_plans    # the CPU's graphs can be computed on a thread pool and work memory made here

    def __cinit__(self, dict addresses, ops, sub_ops, types):
        cdef gx_api *call = &self.call
        cdef int i
        for i in range(GX_N_FUNCTIONS):
            # A pointer to a function is as large as one to data wherever dlsym works.
            (<uintptr_t *>(<char *>call + gx_functions[i].offset))[0] = addresses.get(
                (<bytes>gx_functions[i].name).decode(), 0)
        self.has_plans = (call.graph_plan != NULL and call.graph_compute != NULL and call.threadpool_new != NULL
                          and call.threadpool_free != NULL and call.threadpool_params_default != NULL)
        for i in range(N_NUMBERS):
            self.op[i] = ops.get(i, -1)
            self.sub_op[i] = sub_ops.get(i, -1)
        self.custom = ops.get("CUSTOM", -1)
        self.types = 0
        for number in types:
            self.types |= <uint64_t>1 << <int>number

    cdef bint has_op(self, const gs_node *node) noexcept nogil:
        """Whether the library has the op and the types of a node."""
        cdef int i
        cdef int32_t op = self.op[node.layout.op]
        if is_ours(node.op):
            op = self.custom
        if op < 0 or not self.types >> node.layout.type & 1:
            return False
        if (node.op == GS_OP_UNARY or node.op == GS_OP_GLU) and self.sub_op[node.layout.op] < 0:
            return False
        for i in range(node.n_src):
            if node.src[i] != NULL and not self.types >> node.src[i].layout.type & 1:
                return False
        return True

    cdef void fill_layout(self, gx_tensor *out, const gs_layout *layout) noexcept nogil:
        """Set the type, extents and strides of a ggml tensor."""
        cdef gs_layout regular = gx_regular(layout)
        cdef int i
        out.type = layout.type
        for i in range(GS_MAX_DIMS):
            out.ne[i] = regular.ne[i]
            out.nb[i] = <size_t>regular.nb[i]

    cdef void fill_op(self, gx_tensor *out, const gs_node *node) noexcept nogil:
        """Set the op and parameters of a ggml tensor; ARGSORT, TOP_K and ARGMAX become calls of rows.h's kernels."""
        out.flags = GX_FLAG_COMPUTE
        if is_ours(node.op):
            self.fill_call(out, &gx_argmax if node.op == GS_OP_ARGMAX else &gx_order,
                           <void *>1 if node.op == GS_OP_TOP_K or node.params[0] != 0 else NULL)
            return
        memcpy(out.op_params, node.params, sizeof(out.op_params))
        out.op = self.op[node.layout.op]
        if node.op == GS_OP_UNARY or node.op == GS_OP_GLU:
            out.op_params[0] = self.sub_op[node.layout.op]

    cdef void fill_node(self, gx_tensor *made, const gs_node *node, void *buffer) noexcept nogil:
        """Make a node, made[0], and its sources, made[1 ..], which are in `buffer`, without data."""
        cdef int i
        memset(made, 0, (1 + GS_MAX_SRC) * sizeof(gx_tensor))
        self.fill_layout(made, &node.layout)
        self.fill_op(made, node)
        for i in range(node.n_src):
            if node.src[i] != NULL:
                self.fill_layout(&made[1 + i], &node.src[i].layout)
                made[1 + i].buffer = buffer
                made.src[i] = &made[1 + i]

    cdef void fill_call(self, gx_tensor *out, custom_call fun, void *user) noexcept nogil:
        """Make a ggml tensor a CUSTOM node: every thread of ggml's calls fun(tensor, its number, n_threads, user)."""
        cdef gx_custom custom
        memset(&custom, 0, sizeof(custom))
        custom.fun, custom.n_tasks, custom.user = fun, -1, user
        memset(out.op_params, 0, sizeof(out.op_params))
        memcpy(out.op_params, &custom, sizeof(custom))
        out.op, out.flags = self.custom, GX_FLAG_COMPUTE


cdef inline bint is_ours(int op) noexcept nogil:
    """Whether rows.h has a kernel for the op, which runs as a CUSTOM node in place of ggml's."""
    return op == GS_OP_ARGSORT or op == GS_OP_TOP_K or op == GS_OP_ARGMAX


def tensor_at(uintptr_t address):
    """The fields of the ggml tensor at an address, where abi.h declares them; pointers are ints."""
    cdef gx_tensor *t = <gx_tensor *>address
    return {"type": t.type, "buffer": <uintptr_t>t.buffer, "ne": t.ne, "nb": t.nb, "op": t.op, "name": t.name,
            "op_params": t.op_params, "flags": t.flags, "src": <uintptr_t>t.src[0], "data": <uintptr_t>t.data,
            "view_src": <uintptr_t>t.view_src, "view_offs": t.view_offs, "extra": <uintptr_t>t.extra}
