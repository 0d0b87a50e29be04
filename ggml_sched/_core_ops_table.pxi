# The op table: names, and which ops ggml computes in place.
#
# Owns op numbers.  Ops that only ggml knows have a row too, so that any graph
# file can be planned; whether an op *runs* is a backend's business.
# UNARY and GLU carry a kind; each kind is a row of its own ("UNARY:SILU").

cdef enum:
    OP_NONE = 0
    OP_VIEW = 1
    OP_RESHAPE = 2
    OP_PERMUTE = 3
    OP_TRANSPOSE = 4
    N_OPS_MAX = 256

# In-place rules.  FIRST: ggml's first generation (section 2 of the specification);
# LATER: what today's ggml added.
cdef enum:
    INPLACE_ANY = 0         # as a rule: whatever the backend declares
    INPLACE_FIRST = 1
    INPLACE_LATER = 2

_UNARY_KINDS = (
    "ABS", "SGN", "NEG", "STEP", "TANH", "ELU", "RELU", "SIGMOID", "GELU", "GELU_QUICK", "SILU",
    "HARDSWISH", "HARDSIGMOID", "EXP", "GELU_ERF", "XIELU", "FLOOR", "CEIL", "ROUND", "TRUNC",
    "EXPM1", "SOFTPLUS",
)
_GLU_KINDS = ("REGLU", "GEGLU", "SWIGLU", "SWIGLU_OAI", "GEGLU_ERF", "GEGLU_QUICK")

_VIEW_OPS = ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")
_INPLACE_FIRST_OPS = (
    "SCALE", "DIAG_MASK_ZERO", "DIAG_MASK_INF", "ADD", "ADD1", "SUB", "MUL", "DIV", "SQR", "SQRT",
    "LOG", "ROPE", "RMS_NORM", "SOFT_MAX",
)
_INPLACE_LATER_OPS = (
    "FILL", "ADD_ID", "ROPE_BACK", "SILU_BACK", "RMS_NORM_BACK", "CLAMP", "SOFT_MAX_BACK",
)
_OTHER_OPS = (
    "DUP", "ACC", "SUM", "SUM_ROWS", "CUMSUM", "MEAN", "ARGMAX", "COUNT_EQUAL", "REPEAT",
    "REPEAT_BACK", "CONCAT", "NORM", "GROUP_NORM", "L2_NORM", "MUL_MAT", "MUL_MAT_ID", "OUT_PROD",
    "SET", "CPY", "CONT", "GET_ROWS", "GET_ROWS_BACK", "SET_ROWS", "DIAG", "SIN", "COS",
    "CONV_TRANSPOSE_1D", "IM2COL", "IM2COL_BACK", "IM2COL_3D", "CONV_2D", "CONV_3D", "CONV_2D_DW",
    "CONV_TRANSPOSE_2D", "POOL_1D", "POOL_2D", "POOL_2D_BACK", "UPSCALE", "PAD", "PAD_REFLECT_1D",
    "ROLL", "ARANGE", "TIMESTEP_EMBEDDING", "ARGSORT", "TOP_K", "LEAKY_RELU", "TRI",
    "FLASH_ATTN_EXT", "FLASH_ATTN_BACK", "SSM_CONV", "SSM_SCAN", "WIN_PART", "WIN_UNPART",
    "GET_REL_POS", "ADD_REL_POS", "RWKV_WKV6", "GATED_LINEAR_ATTN", "RWKV_WKV7", "SOLVE_TRI",
    "GATED_DELTA_NET", "MAP_CUSTOM1", "MAP_CUSTOM2", "MAP_CUSTOM3", "CUSTOM", "CROSS_ENTROPY_LOSS",
    "CROSS_ENTROPY_LOSS_BACK", "OPT_STEP_ADAMW", "OPT_STEP_SGD",
)

cdef list OP_NAMES = []
cdef dict OP_IDS = {}
cdef unsigned char op_inplace[N_OPS_MAX]
memset(op_inplace, 0, sizeof(op_inplace))


def _fill_op_table():
    def add(str name, int rule=0):
        OP_IDS[name] = len(OP_NAMES)
        op_inplace[len(OP_NAMES)] = rule
        OP_NAMES.append(name)

    for name in _VIEW_OPS:
        add(name)
    for name in _INPLACE_FIRST_OPS:
        add(name, INPLACE_FIRST | INPLACE_LATER)
    for name in _INPLACE_LATER_OPS:
        add(name, INPLACE_LATER)
    for name in _OTHER_OPS:
        add(name)
    for kind in _UNARY_KINDS:
        add(f"UNARY:{kind}", INPLACE_FIRST | INPLACE_LATER)
    for kind in _GLU_KINDS:
        add(f"GLU:{kind}")
    for name in _SMALL_WEIGHT_OPS:
        op_has_small_weights[<int>OP_IDS[name]] = 1


# Ops whose weight-like source is small (factors, sinks): they do not go where it is.
_SMALL_WEIGHT_OPS = ("ROPE", "SOFT_MAX", "FLASH_ATTN_EXT")
cdef unsigned char op_has_small_weights[N_OPS_MAX]
memset(op_has_small_weights, 0, sizeof(op_has_small_weights))

_fill_op_table()
_INPLACE_OPS = frozenset(name for i, name in enumerate(OP_NAMES) if op_inplace[i])


cdef inline bint op_is_view(int op) noexcept nogil:
    """VIEW, RESHAPE, PERMUTE, TRANSPOSE: nodes that compute nothing."""
    return OP_VIEW <= op <= OP_TRANSPOSE


def op_names():
    """The names of every op that a graph may hold, as a tuple of strings."""
    return tuple(OP_NAMES)
