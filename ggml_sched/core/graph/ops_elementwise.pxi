# Op methods of a Context: arithmetic, unary functions, gated units, reductions, norms.

cdef class ElementwiseOps(ContextBase):
    """Arithmetic, unary functions, gated units, reductions and norms."""

    cdef Tensor binary(self, str op, Tensor a, Tensor b, bint inplace):
        if not layout_can_repeat(&b.layout, &a.layout):
            raise GraphError(f"{op.lower()}: {describe(b)} does not broadcast to {describe(a)}")
        return self.add_like(OP_IDS[op], a, (a, b), (), inplace)

    def add(self, Tensor a not None, Tensor b not None, bint inplace=False):
        """a + b, with b repeated to a's shape."""
        return self.binary("ADD", a, b, inplace)

    def sub(self, Tensor a not None, Tensor b not None, bint inplace=False):
        """a - b, with b repeated to a's shape."""
        return self.binary("SUB", a, b, inplace)

    def mul(self, Tensor a not None, Tensor b not None, bint inplace=False):
        """a * b element by element, with b repeated to a's shape."""
        return self.binary("MUL", a, b, inplace)

    def div(self, Tensor a not None, Tensor b not None, bint inplace=False):
        """a / b, with b repeated to a's shape."""
        return self.binary("DIV", a, b, inplace)

    def add1(self, Tensor a not None, Tensor b not None, bint inplace=False):
        """a + b, where b holds one element."""
        if layout_n_elements(&b.layout) != 1:
            raise GraphError(f"add1: {describe(b)} holds {b.n_elements} elements, not 1")
        return self.add_like(OP_IDS["ADD1"], a, (a, b), (), inplace)

    def add_id(self, Tensor a not None, Tensor b not None, Tensor ids not None):
        """a[ne0, n_used, n_tokens] + the rows of b[ne0, n_rows] that ids[n_used, n_tokens] (i32) name."""
        if ids.layout.type != T_I32:
            raise GraphError(f"add_id: ids {describe(ids)} must be i32")
        if not (a.layout.ne[0] == b.layout.ne[0] and a.layout.ne[1] == ids.layout.ne[0]
                and a.layout.ne[2] == ids.layout.ne[1]):
            raise GraphError(f"add_id: {describe(a)}, {describe(b)} and ids {describe(ids)} do not fit together")
        return self.add_like(OP_IDS["ADD_ID"], a, (a, b, ids), ())

    def scale(self, Tensor a not None, double s, double bias=0.0, bint inplace=False):
        """a * s + bias."""
        return self.add_like(OP_IDS["SCALE"], a, (a,), cut_zeros(f32_word(s) + f32_word(bias)), inplace)

    def sqr(self, Tensor a not None, bint inplace=False):
        """a * a."""
        return self.add_like(OP_IDS["SQR"], a, (a,), (), inplace)

    def sqrt(self, Tensor a not None, bint inplace=False):
        """The square root of each element."""
        return self.add_like(OP_IDS["SQRT"], a, (a,), (), inplace)

    def log(self, Tensor a not None, bint inplace=False):
        """The natural logarithm of each element."""
        return self.add_like(OP_IDS["LOG"], a, (a,), (), inplace)

    def clamp(self, Tensor a not None, double min, double max):
        """Each element limited to min .. max."""
        return self.add_like(OP_IDS["CLAMP"], a, (a,), cut_zeros(f32_word(min) + f32_word(max)))

    # -- unary ------------------------------------------------------------------

    def unary(self, Tensor a not None, str kind, bint inplace=False):
        """An element-wise function: "silu", "gelu", "gelu_quick", "relu", "tanh", "sigmoid", "neg", "abs",
        "exp", "step", "elu", "hardswish" and the others that ggml names."""
        cdef str name = f"UNARY:{kind.upper()}"
        if name not in OP_IDS:
            raise GraphError(f"unary: unknown kind {kind!r}; known: {', '.join(_UNARY_KINDS).lower()}")
        return self.add_like(OP_IDS[name], a, (a,), cut_zeros((_UNARY_KINDS.index(kind.upper()),)), inplace)

    def silu(self, Tensor a not None):
        """x * sigmoid(x)."""
        return self.unary(a, "silu")

    def gelu(self, Tensor a not None):
        """The Gaussian error linear unit, tanh approximation."""
        return self.unary(a, "gelu")

    def gelu_quick(self, Tensor a not None):
        """x * sigmoid(1.702 x)."""
        return self.unary(a, "gelu_quick")

    def relu(self, Tensor a not None):
        """max(x, 0)."""
        return self.unary(a, "relu")

    def tanh(self, Tensor a not None):
        """Hyperbolic tangent."""
        return self.unary(a, "tanh")

    def sigmoid(self, Tensor a not None):
        """1 / (1 + exp(-x))."""
        return self.unary(a, "sigmoid")

    def neg(self, Tensor a not None):
        """-x."""
        return self.unary(a, "neg")

    def abs(self, Tensor a not None):
        """|x|."""
        return self.unary(a, "abs")

    def exp(self, Tensor a not None):
        """e to the x."""
        return self.unary(a, "exp")

    def step(self, Tensor a not None):
        """1 where x > 0, else 0."""
        return self.unary(a, "step")

    def elu(self, Tensor a not None):
        """x where x > 0, else exp(x) - 1."""
        return self.unary(a, "elu")

    def hardswish(self, Tensor a not None):
        """x * clamp((x + 3) / 6, 0, 1)."""
        return self.unary(a, "hardswish")

    # -- gated linear units -----------------------------------------------------

    def glu(self, Tensor a not None, str kind, bint swapped=False):
        """act(first half) * second half of each row: [2n, ...] -> [n, ...]; kind "swiglu", "geglu", "reglu".

        `swapped` takes the second half as the gate.
        """
        cdef str name = f"GLU:{kind.upper()}"
        if name not in OP_IDS:
            raise GraphError(f"glu: unknown kind {kind!r}; known: {', '.join(_GLU_KINDS).lower()}")
        if a.layout.ne[0] % 2:
            raise GraphError(f"glu: rows of {describe(a)} have no two equal halves")
        return self.add_dense(OP_IDS[name], a.layout.type, a.layout.ne[0] // 2, a.layout.ne[1], a.layout.ne[2],
                              a.layout.ne[3], (a,), cut_zeros((_GLU_KINDS.index(kind.upper()), int(swapped))))

    def glu_split(self, Tensor a not None, Tensor b not None, str kind):
        """act(a) * b; both of one shape and type; kind "swiglu", "geglu", "reglu"."""
        cdef str name = f"GLU:{kind.upper()}"
        if name not in OP_IDS:
            raise GraphError(f"glu_split: unknown kind {kind!r}; known: {', '.join(_GLU_KINDS).lower()}")
        if not layout_same_ne(&a.layout, &b.layout) or a.layout.type != b.layout.type:
            raise GraphError(f"glu_split: {describe(a)} and {describe(b)} differ in shape or type")
        return self.add_like(OP_IDS[name], a, (a, b), cut_zeros((_GLU_KINDS.index(kind.upper()),)))

    def swiglu(self, Tensor a not None):
        """silu(first half) * second half of each row."""
        return self.glu(a, "swiglu")

    def geglu(self, Tensor a not None):
        """gelu(first half) * second half of each row."""
        return self.glu(a, "geglu")

    def reglu(self, Tensor a not None):
        """relu(first half) * second half of each row."""
        return self.glu(a, "reglu")

    def swiglu_split(self, Tensor a not None, Tensor b not None):
        """silu(a) * b."""
        return self.glu_split(a, b, "swiglu")

    def geglu_split(self, Tensor a not None, Tensor b not None):
        """gelu(a) * b."""
        return self.glu_split(a, b, "geglu")

    def reglu_split(self, Tensor a not None, Tensor b not None):
        """relu(a) * b."""
        return self.glu_split(a, b, "reglu")

    # -- reductions and order ---------------------------------------------------

    def sum(self, Tensor a not None):
        """The sum of all elements: [...] -> [1]."""
        return self.add_dense(OP_IDS["SUM"], a.layout.type, 1, 1, 1, 1, (a,), ())

    def sum_rows(self, Tensor a not None):
        """The sum of each row: [n, b, c, d] -> [1, b, c, d]."""
        return self.add_dense(OP_IDS["SUM_ROWS"], a.layout.type, 1, a.layout.ne[1], a.layout.ne[2], a.layout.ne[3], (a,), ())

    def mean(self, Tensor a not None):
        """The mean of each row: [n, b, c, d] -> f32 [1, b, c, d]."""
        return self.add_dense(OP_IDS["MEAN"], T_F32, 1, a.layout.ne[1], a.layout.ne[2], a.layout.ne[3], (a,), ())

    def argmax(self, Tensor a not None):
        """The index of the largest element of each row, the first on a tie: [n, m] -> i32 [m]."""
        if a.layout.ne[2] != 1 or a.layout.ne[3] != 1:
            raise GraphError(f"argmax: {describe(a)} is not a matrix")
        if a.layout.ne[0] > 0x7fffffff or a.layout.ne[0] == 0:
            raise GraphError(f"argmax: rows of {describe(a)} have no i32 index")
        return self.add_dense(OP_IDS["ARGMAX"], T_I32, a.layout.ne[1], 1, 1, 1, (a,), ())

    def argsort(self, Tensor a not None, order="asc"):
        """Indices that sort each row, "asc" or "desc": [n, ...] -> i32 [n, ...]."""
        if order not in ("asc", "desc"):
            raise ValueError(f'argsort: order is "asc" or "desc", not {order!r}')
        if a.layout.ne[0] > 0x7fffffff:
            raise GraphError(f"argsort: rows of {describe(a)} are longer than an i32 index")
        return self.add_dense(OP_IDS["ARGSORT"], T_I32, a.layout.ne[0], a.layout.ne[1], a.layout.ne[2], a.layout.ne[3],
                              (a,), cut_zeros((int(order == "desc"),)))

    def top_k(self, Tensor a not None, k):
        """Indices of the k largest elements of each row, largest first: [n, ...] -> i32 [k, ...]."""
        cdef int64_t n = whole("top_k", a, k)
        if not 0 <= n <= a.layout.ne[0]:
            raise GraphError(f"top_k: k = {n} of rows of {describe(a)}")
        return self.add_dense(OP_IDS["TOP_K"], T_I32, n, a.layout.ne[1], a.layout.ne[2], a.layout.ne[3], (a,), ())

    def arange(self, double start, double stop, double step=1.0):
        """f32 values start, start + step, ... below stop."""
        cdef double count
        if step == 0 or not (isfinite(start) and isfinite(stop) and isfinite(step)):
            raise GraphError(f"arange: {start} to {stop} by {step} is not a finite progression")
        count = ceil((stop - start) / step)
        if count < 0 or count > 2.0**53:
            raise GraphError(f"arange: {start} to {stop} by {step} has {count:.0f} elements")
        return self.add_dense(OP_IDS["ARANGE"], T_F32, <int64_t>count, 1, 1, 1, (),
                              cut_zeros(f32_word(start) + f32_word(stop) + f32_word(step)))

    # -- norms ------------------------------------------------------------------

    def norm(self, Tensor a not None, double eps):
        """Each row less its mean, divided by sqrt(variance + eps)."""
        return self.add_like(OP_IDS["NORM"], a, (a,), cut_zeros(f32_word(eps)))

    def rms_norm(self, Tensor a not None, double eps, bint inplace=False):
        """Each row divided by sqrt(mean of squares + eps)."""
        return self.add_like(OP_IDS["RMS_NORM"], a, (a,), cut_zeros(f32_word(eps)), inplace)

    def group_norm(self, Tensor a not None, n_groups, double eps):
        """norm over n_groups groups of channels (dimension 2), each with its rows and columns."""
        cdef int n = whole32("group_norm", a, n_groups)
        if n < 1:
            raise GraphError(f"group_norm: {n} groups of {describe(a)}")
        return self.add_like(OP_IDS["GROUP_NORM"], a, (a,), cut_zeros((n,) + f32_word(eps)))

    def l2_norm(self, Tensor a not None, double eps):
        """Each row divided by max(its Euclidean length, eps)."""
        return self.add_like(OP_IDS["L2_NORM"], a, (a,), cut_zeros(f32_word(eps)))
