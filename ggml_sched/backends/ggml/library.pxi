# Api: the functions of one loaded library, and its numbers of our ops.
#
# Owns no memory of the library's, which library.py keeps and never unloads.  Invariant: a function pointer is NULL only
# where library.py allows it to be missing.

TENSOR_SIZE = sizeof(gx_tensor)
FUNCTIONS = tuple([(<bytes>gx_functions[i].name).decode() for i in range(GX_N_FUNCTIONS)])
"""The functions of `Api`, without "ggml_"; from `graph_plan` on they are those of the CPU's library."""
QUIET = <uintptr_t><void *>&gx_quiet
"""The address of a log callback that drops its messages."""

cdef enum:
    N_NUMBERS = 256         # of ops, sub-ops included

ctypedef void (*custom_call)(gx_tensor *, int, int, void *) noexcept nogil


cdef class Api:
    """`Api(addresses, ops, sub_ops, types)`: addresses by name without "ggml_"; ggml's number of each op and sub-op by
    our number, -1: not there; the types that the library has, as ours, by number."""

    cdef gx_api call
    cdef int32_t op[N_NUMBERS]
    cdef int32_t sub_op[N_NUMBERS]
    cdef int32_t custom             # number of the CUSTOM op, -1: not there
    cdef uint64_t types             # bits
    cdef readonly bint has_plans    # graphs of the CPU can be computed over work memory and threads that we give

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
        """Type, extents and strides."""
        cdef gs_layout regular = gx_regular(layout)
        cdef int i
        out.type = layout.type
        for i in range(GS_MAX_DIMS):
            out.ne[i] = regular.ne[i]
            out.nb[i] = <size_t>regular.nb[i]

    cdef void fill_op(self, gx_tensor *out, const gs_node *node) noexcept nogil:
        """Op and parameters; ARGSORT, TOP_K and ARGMAX become calls of ours."""
        out.flags = GX_FLAG_COMPUTE
        if is_ours(node.op):
            self.fill_call(out, &gx_argmax if node.op == GS_OP_ARGMAX else &gx_order,
                           <void *>1 if node.op == GS_OP_TOP_K or node.params[0] != 0 else NULL)
            return
        memcpy(out.op_params, node.params, sizeof(out.op_params))
        out.op = self.op[node.layout.op]
        if node.op == GS_OP_UNARY or node.op == GS_OP_GLU:
            out.op_params[0] = self.sub_op[node.layout.op]

    cdef void fill_call(self, gx_tensor *out, custom_call fun, void *user) noexcept nogil:
        """Let a node be a call of ours, made by every thread."""
        cdef gx_custom custom
        memset(&custom, 0, sizeof(custom))
        custom.fun, custom.n_tasks, custom.user = fun, -1, user
        memset(out.op_params, 0, sizeof(out.op_params))
        memcpy(out.op_params, &custom, sizeof(custom))
        out.op, out.flags = self.custom, GX_FLAG_COMPUTE


cdef inline bint is_ours(int op) noexcept nogil:
    """Ops that a kernel of ours computes, in ggml's graph."""
    return op == GS_OP_ARGSORT or op == GS_OP_TOP_K or op == GS_OP_ARGMAX
