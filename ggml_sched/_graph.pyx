# cython: language_level=3
"""What is computed: types, tensors, ops and graphs; knows nothing of plans.

A contents page.  All imports stand here; the parts below, in core/graph/, are read in order:

    types               element types, checked shape arithmetic
    ops_table           op names and in-place rules, by number
    places              leases, and the bases of Backend and Buffer
    tensor              Tensor, and its address
    wiring              what an op demands of its sources and its root
    context             the makers of tensors, and who owns them
    ops_*               the ops, one family a file; the last one ends in class Context
    tensor_set          an open-addressing hash set of tensors
    flat                the arrays in which passes see a graph
    check               whether arrays that somebody else has written are a graph
    equal               whether two graphs are the same
    fingerprint         what makes graphs equal
    kinds               nodes that no backend may tell apart
    nodes               nodes as C takes them
    order               nodes depth first
    graph               Graph: an immutable order of nodes
    family              GraphFamily: graphs alike but for sizes
"""

import enum
from operator import index as _index
from weakref import WeakSet

from ggml_sched.errors import BackendError, GraphError, PlacementError, no_host_memory

cimport cython
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from cpython.pyport cimport PY_SSIZE_T_MAX, PY_SSIZE_T_MIN
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE, PyTuple_New, PyTuple_SET_ITEM
from libc.math cimport ceil, isfinite
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, llabs, malloc, realloc
from libc.string cimport memcmp, memcpy, memmove, memset

from ggml_sched._c cimport (
    GS_BAD_ARGUMENT,
    GS_FLAG_INPUT,
    GS_FLAG_OUTPUT,
    GS_GLU_GEGLU,
    GS_GLU_REGLU,
    GS_GLU_SWIGLU,
    GS_GLU_SWIGLU_OAI,
    GS_KIND_FOLLOWS,
    GS_KIND_INPUT,
    GS_KIND_VIEW,
    GS_KIND_WRITES,
    GS_MAX_DIMS,
    GS_MAX_OP_PARAMS,
    GS_MAX_SRC,
    GS_NO_HOST_MEMORY,
    GS_N_OPS,
    GS_N_TYPES,
    GS_OK,
    GS_OP_ADD,
    GS_OP_ADD1,
    GS_OP_ADD_ID,
    GS_OP_ARANGE,
    GS_OP_ARGMAX,
    GS_OP_ARGSORT,
    GS_OP_CLAMP,
    GS_OP_CONCAT,
    GS_OP_CONT,
    GS_OP_CPY,
    GS_OP_DIAG_MASK_INF,
    GS_OP_DIAG_MASK_ZERO,
    GS_OP_DIV,
    GS_OP_DUP,
    GS_OP_FLASH_ATTN_EXT,
    GS_OP_GET_ROWS,
    GS_OP_GLU,
    GS_OP_GROUP_NORM,
    GS_OP_L2_NORM,
    GS_OP_LOG,
    GS_OP_MEAN,
    GS_OP_MUL,
    GS_OP_MUL_MAT,
    GS_OP_MUL_MAT_ID,
    GS_OP_NONE,
    GS_OP_NORM,
    GS_OP_PAD,
    GS_OP_PERMUTE,
    GS_OP_REPEAT,
    GS_OP_RESHAPE,
    GS_OP_RMS_NORM,
    GS_OP_ROPE,
    GS_OP_SCALE,
    GS_OP_SET,
    GS_OP_SET_ROWS,
    GS_OP_SOFT_MAX,
    GS_OP_SQR,
    GS_OP_SQRT,
    GS_OP_SSM_CONV,
    GS_OP_SSM_SCAN,
    GS_OP_SUB,
    GS_OP_SUM,
    GS_OP_SUM_ROWS,
    GS_OP_TOP_K,
    GS_OP_TRANSPOSE,
    GS_OP_UNARY,
    GS_OP_VIEW,
    GS_OVERFLOW,
    GS_TYPE_BF16,
    GS_TYPE_F16,
    GS_TYPE_F32,
    GS_TYPE_F64,
    GS_TYPE_I8,
    GS_TYPE_I16,
    GS_TYPE_I32,
    GS_TYPE_I64,
    GS_UNARY_ABS,
    GS_UNARY_ELU,
    GS_UNARY_EXP,
    GS_UNARY_GELU,
    GS_UNARY_GELU_QUICK,
    GS_UNARY_HARDSWISH,
    GS_UNARY_NEG,
    GS_UNARY_RELU,
    GS_UNARY_SIGMOID,
    GS_UNARY_SILU,
    GS_UNARY_STEP,
    GS_UNARY_TANH,
    gs_checked_add,
    gs_checked_mul,
    gs_error,
    gs_graph,
    gs_layout,
    gs_mix,
    gs_mix_other,
    gs_node,
    gs_op_family,
    gs_op_inplace,
    gs_op_name,
    gs_range_fits,
    gs_traits_of_type,
    gs_type_name,
    gs_type_traits,
)

include "core/graph/tuples.pxi"
include "core/graph/types.pxi"
include "core/graph/ops_table.pxi"
include "core/graph/places.pxi"
include "core/graph/tensor.pxi"
include "core/graph/wiring.pxi"
include "core/graph/context.pxi"
include "core/graph/ops_elementwise.pxi"
include "core/graph/ops_matrix.pxi"
include "core/graph/ops_view.pxi"
include "core/graph/ops_recurrent.pxi"
include "core/graph/ops_attention.pxi"
include "core/graph/tensor_set.pxi"
include "core/graph/flat.pxi"
include "core/graph/check.pxi"
include "core/graph/equal.pxi"
include "core/graph/fingerprint.pxi"
include "core/graph/kinds.pxi"
include "core/graph/nodes.pxi"
include "core/graph/order.pxi"
include "core/graph/graph.pxi"
include "core/graph/family.pxi"
