# Op methods of a Context: arithmetic, unary functions, gated units, reductions, norms.

cdef class ElementwiseOps(ContextBase):
    """Arithmetic, unary functions, gated units, reductions and norms."""

    cdef Tensor binary(self, int op, Tensor a, Tensor b, bint inplace):
        if not layout_can_repeat(&b.layout, &a.layout):
            raise GraphError(f"{OP_NAMES[op].lower()}: {describe(b)} does not broadcast to {describe(a)}")
        return self.add_like(op, a, (a, b), inplace)

    def add(self, Tensor a not None, Tensor b not None, bint inplace=False):
        """a + b, with b repeated to a's shape."""
        return self.binary(GS_OP_ADD, a, b, inplace)

    def sub(self, Tensor a not None, Tensor b not None, bint inplace=False):
        """a - b, with b repeated to a's shape."""
        return self.binary(GS_OP_SUB, a, b, inplace)

    def mul(self, Tensor a not None, Tensor b not None, bint inplace=False):
        """a * b element by element, with b repeated to a's shape."""
        return self.binary(GS_OP_MUL, a, b, inplace)

    def div(self, Tensor a not None, Tensor b not None, bint inplace=False):
        """a / b, with b repeated to a's shape."""
        return self.binary(GS_OP_DIV, a, b, inplace)

    def add1(self, Tensor a not None, Tensor b not None, bint inplace=False):
        """a + b, where b holds one element."""
        if layout_n_elements(&b.layout) != 1:
            raise GraphError(f"add1: {describe(b)} holds {b.n_elements} elements, not 1")
        return self.add_like(GS_OP_ADD1, a, (a, b), inplace)

    def add_id(self, Tensor a not None, Tensor b not None, Tensor ids not None):
        """a[ne0, n_used, n_tokens] + the rows of b[ne0, n_rows] with the indices ids[n_used, n_tokens] (i32)."""
        if ids.layout.type != GS_TYPE_I32:
            raise GraphError(f"add_id: ids {describe(ids)} must be i32")
        if not (a.layout.ne[0] == b.layout.ne[0] and a.layout.ne[1] == ids.layout.ne[0]
                and a.layout.ne[2] == ids.layout.ne[1]):
            raise GraphError(f"add_id: {describe(a)}, {describe(b)} and ids {describe(ids)} do not fit together")
        return self.add_like(GS_OP_ADD_ID, a, (a, b, ids))

    def scale(self, Tensor a not None, s, bias=0.0, bint inplace=False):
        """a * s + bias."""
        cdef int32_t[2] words
        words[0], words[1] = f32_word("scale", a, "s", s), f32_word("scale", a, "bias", bias)
        return with_params(self.add_like(GS_OP_SCALE, a, (a,), inplace), words, 2)

    def sqr(self, Tensor a not None, bint inplace=False):
        """a * a."""
        return self.add_like(GS_OP_SQR, a, (a,), inplace)

    def sqrt(self, Tensor a not None, bint inplace=False):
        """The square root of each element."""
        return self.add_like(GS_OP_SQRT, a, (a,), inplace)

    def log(self, Tensor a not None, bint inplace=False):
        """The natural logarithm of each element."""
        return self.add_like(GS_OP_LOG, a, (a,), inplace)

    def clamp(self, Tensor a not None, min, max):
        """Each element limited to min .. max."""
        cdef int32_t[2] words
        words[0], words[1] = f32_word("clamp", a, "min", min), f32_word("clamp", a, "max", max)
        return with_params(self.add_like(GS_OP_CLAMP, a, (a,)), words, 2)

    # -- unary ------------------------------------------------------------------

    cdef Tensor add_unary(self, Tensor a, int32_t kind, bint inplace=False):
        return with_params(self.add_like(GS_OP_UNARY + kind, a, (a,), inplace), &kind, 1)

    def unary(self, Tensor a not None, str kind not None, bint inplace=False):
        """An element-wise function: "silu", "gelu", "gelu_quick", "relu", "tanh", "sigmoid", "neg", "abs",
        "exp", "step", "elu", "hardswish" and the others that ggml names."""
        cdef str name = f"UNARY:{kind.upper()}"
        if name not in OP_IDS:
            raise GraphError(f"unary: unknown kind {kind!r}; known: {', '.join(_UNARY_KINDS).lower()}")
        return self.add_unary(a, OP_IDS[name] - GS_OP_UNARY, inplace)

    def silu(self, Tensor a not None):
        """x * sigmoid(x)."""
        return self.add_unary(a, GS_UNARY_SILU)

    def gelu(self, Tensor a not None):
        """The Gaussian error linear unit, tanh approximation."""
        return self.add_unary(a, GS_UNARY_GELU)

    def gelu_quick(self, Tensor a not None):
        """x * sigmoid(1.702 x)."""
        return self.add_unary(a, GS_UNARY_GELU_QUICK)

    def relu(self, Tensor a not None):
        """max(x, 0)."""
        return self.add_unary(a, GS_UNARY_RELU)

    def tanh(self, Tensor a not None):
        """Hyperbolic tangent."""
        return self.add_unary(a, GS_UNARY_TANH)

    def sigmoid(self, Tensor a not None):
        """1 / (1 + exp(-x))."""
        return self.add_unary(a, GS_UNARY_SIGMOID)

    def neg(self, Tensor a not None):
        """-x."""
        return self.add_unary(a, GS_UNARY_NEG)

    def abs(self, Tensor a not None):
        """|x|."""
        return self.add_unary(a, GS_UNARY_ABS)

    def exp(self, Tensor a not None):
        """e to the x."""
        return self.add_unary(a, GS_UNARY_EXP)

    def step(self, Tensor a not None):
        """1 where x > 0, else 0."""
        return self.add_unary(a, GS_UNARY_STEP)

    def elu(self, Tensor a not None):
        """x where x > 0, else exp(x) - 1."""
        return self.add_unary(a, GS_UNARY_ELU)

    def hardswish(self, Tensor a not None):
        """x * clamp((x + 3) / 6, 0, 1)."""
        return self.add_unary(a, GS_UNARY_HARDSWISH)

    # -- gated linear units -----------------------------------------------------

    cdef Tensor add_glu(self, Tensor a, int32_t kind, bint swapped=False):
        cdef int32_t[2] words
        if a.layout.ne[0] % 2:
            raise GraphError(f"glu: rows of {describe(a)} have no two equal halves")
        words[0], words[1] = kind, swapped
        return with_params(self.add_dense(GS_OP_GLU + kind, a.layout.type, a.layout.ne[0] // 2, a.layout.ne[1],
                                          a.layout.ne[2], a.layout.ne[3], (a,)), words, 2)

    cdef Tensor add_glu_split(self, Tensor a, Tensor b, int32_t kind):
        if not layout_same_ne(&a.layout, &b.layout) or a.layout.type != b.layout.type:
            raise GraphError(f"glu_split: {describe(a)} and {describe(b)} differ in shape or type")
        return with_params(self.add_like(GS_OP_GLU + kind, a, (a, b)), &kind, 1)

    def glu(self, Tensor a not None, str kind not None, bint swapped=False):
        """act(first half) * second half of each row: [2n, ...] -> [n, ...].

        `kind` names the activation: "swiglu" (silu), "geglu" (gelu), "reglu" (relu) and others of ggml's.  With
        `swapped`, act is applied to the second half instead.
        """
        cdef str name = f"GLU:{kind.upper()}"
        if name not in OP_IDS:
            raise GraphError(f"glu: unknown kind {kind!r}; known: {', '.join(_GLU_KINDS).lower()}")
        return self.add_glu(a, OP_IDS[name] - GS_OP_GLU, swapped)

    def glu_split(self, Tensor a not None, Tensor b not None, str kind not None):
        """act(a) * b; both of one shape and type; kind "swiglu", "geglu", "reglu"."""
        cdef str name = f"GLU:{kind.upper()}"
        if name not in OP_IDS:
            raise GraphError(f"glu_split: unknown kind {kind!r}; known: {', '.join(_GLU_KINDS).lower()}")
        return self.add_glu_split(a, b, OP_IDS[name] - GS_OP_GLU)

    def swiglu(self, Tensor a not None):
        """silu(first half) * second half of each row."""
        return self.add_glu(a, GS_GLU_SWIGLU)

    def geglu(self, Tensor a not None):
        """gelu(first half) * second half of each row."""
        return self.add_glu(a, GS_GLU_GEGLU)

    def reglu(self, Tensor a not None):
        """relu(first half) * second half of each row."""
        return self.add_glu(a, GS_GLU_REGLU)

    def swiglu_split(self, Tensor a not None, Tensor b not None):
        """silu(a) * b."""
        return self.add_glu_split(a, b, GS_GLU_SWIGLU)

    def geglu_split(self, Tensor a not None, Tensor b not None):
        """gelu(a) * b."""
        return self.add_glu_split(a, b, GS_GLU_GEGLU)

    def reglu_split(self, Tensor a not None, Tensor b not None):
        """relu(a) * b."""
        return self.add_glu_split(a, b, GS_GLU_REGLU)

    def swiglu_oai(self, Tensor a not None, Tensor b not None, alpha=1.702, limit=7.0):
        """a' * sigmoid(alpha a') * (b' + 1), with a' = min(a, limit) and b' limited to -limit .. limit."""
        cdef int32_t[4] words
        words[0], words[1] = GS_GLU_SWIGLU_OAI, 0
        words[2], words[3] = f32_word("swiglu_oai", a, "alpha", alpha), f32_word("swiglu_oai", a, "limit", limit)
        return with_params(self.add_glu_split(a, b, GS_GLU_SWIGLU_OAI), words, 4)

    # -- reductions and order ---------------------------------------------------

    def sum(self, Tensor a not None):
        """The sum of all elements: [...] -> [1]."""
        return self.add_dense(GS_OP_SUM, a.layout.type, 1, 1, 1, 1, (a,))

    def sum_rows(self, Tensor a not None):
        """The sum of each row: [n, b, c, d] -> [1, b, c, d]."""
        return self.add_dense(GS_OP_SUM_ROWS, a.layout.type, 1, a.layout.ne[1], a.layout.ne[2], a.layout.ne[3], (a,))

    def mean(self, Tensor a not None):
        """The mean of each row: [n, b, c, d] -> f32 [1, b, c, d]."""
        return self.add_dense(GS_OP_MEAN, GS_TYPE_F32, 1, a.layout.ne[1], a.layout.ne[2], a.layout.ne[3], (a,))

    def argmax(self, Tensor a not None):
        """The index of the largest element of each row, the first on a tie: [n, m] -> i32 [m]."""
        if a.layout.ne[2] != 1 or a.layout.ne[3] != 1:
            raise GraphError(f"argmax: {describe(a)} is not a matrix")
        if a.layout.ne[0] > 0x7fffffff or a.layout.ne[0] == 0:
            raise GraphError(f"argmax: rows of {describe(a)} have no i32 index")
        return self.add_dense(GS_OP_ARGMAX, GS_TYPE_I32, a.layout.ne[1], 1, 1, 1, (a,))

    def argsort(self, Tensor a not None, order="asc"):
        """Indices that sort each row, "asc" or "desc": [n, ...] -> i32 [n, ...]."""
        cdef int32_t descends
        if not isinstance(order, str) or order not in ("asc", "desc"):
            raise ValueError(f'argsort: order is "asc" or "desc", not {shown(order)}')
        descends = order == "desc"
        if a.layout.ne[0] > 0x7fffffff:
            raise GraphError(f"argsort: rows of {describe(a)} are longer than an i32 index")
        return with_params(self.add_dense(GS_OP_ARGSORT, GS_TYPE_I32, a.layout.ne[0], a.layout.ne[1], a.layout.ne[2],
                                          a.layout.ne[3], (a,)), &descends, 1)

    def top_k(self, Tensor a not None, k):
        """Indices of the k largest elements of each row, largest first: [n, ...] -> i32 [k, ...]."""
        cdef int64_t n = whole("top_k", a, "k", k)
        if not 0 <= n <= a.layout.ne[0]:
            raise GraphError(f"top_k: k = {n} of rows of {describe(a)}")
        return self.add_dense(GS_OP_TOP_K, GS_TYPE_I32, n, a.layout.ne[1], a.layout.ne[2], a.layout.ne[3], (a,))

    def arange(self, start, stop, step=1.0):
        """f32 values start, start + step, ... below stop."""
        cdef double first = number("arange", None, "start", start), end = number("arange", None, "stop", stop)
        cdef double by = number("arange", None, "step", step), count
        cdef int32_t[3] words
        if by == 0 or not (isfinite(first) and isfinite(end) and isfinite(by)):
            raise GraphError(f"arange: {first} to {end} by {by} is not a finite progression")
        count = ceil((end - first) / by)
        if count < 0 or count > 2.0**53:
            raise GraphError(f"arange: {first} to {end} by {by} has {count:g} elements")
        if <float>by == 0:
            raise GraphError(f"arange: step = {by} is 0 in float32")
        words[0], words[1] = f32_word("arange", None, "start", first), f32_word("arange", None, "stop", end)
        words[2] = f32_word("arange", None, "step", by)
        return with_params(self.add_dense(GS_OP_ARANGE, GS_TYPE_F32, <int64_t>count, 1, 1, 1, ()), words, 3)

    # -- norms ------------------------------------------------------------------

    def norm(self, Tensor a not None, eps):
        """Each row less its mean, divided by sqrt(variance + eps)."""
        cdef int32_t word = f32_word("norm", a, "eps", eps)
        return with_params(self.add_like(GS_OP_NORM, a, (a,)), &word, 1)

    def rms_norm(self, Tensor a not None, eps, bint inplace=False):
        """Each row divided by sqrt(mean of squares + eps)."""
        cdef int32_t word = f32_word("rms_norm", a, "eps", eps)
        return with_params(self.add_like(GS_OP_RMS_NORM, a, (a,), inplace), &word, 1)

    def group_norm(self, Tensor a not None, n_groups, eps):
        """norm of each of n_groups groups of channels (dimension 2), with one mean and variance for a whole group."""
        cdef int32_t[2] words
        words[0] = whole32("group_norm", a, "n_groups", n_groups)
        words[1] = f32_word("group_norm", a, "eps", eps)
        if words[0] < 1:
            raise GraphError(f"group_norm: {words[0]} groups of {describe(a)}")
        return with_params(self.add_like(GS_OP_GROUP_NORM, a, (a,)), words, 2)

    def l2_norm(self, Tensor a not None, eps):
        """Each row divided by max(its Euclidean length, eps)."""
        cdef int32_t word = f32_word("l2_norm", a, "eps", eps)
        return with_params(self.add_like(GS_OP_L2_NORM, a, (a,)), &word, 1)
