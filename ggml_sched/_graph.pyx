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
    graph               Graph: an immutable order of nodes
"""

import enum
from operator import index as _index
from struct import pack as _struct_pack
from struct import unpack as _struct_unpack
from weakref import WeakSet

from ggml_sched.errors import BackendError, GraphError, PlacementError, UnsupportedOp, no_host_memory

cimport cython
from cpython.object cimport PyObject
from cpython.pyport cimport PY_SSIZE_T_MAX, PY_SSIZE_T_MIN
from libc.math cimport ceil, isfinite
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from ggml_sched._c cimport (
    GS_FLAG_INPUT,
    GS_FLAG_OUTPUT,
    GS_KIND_FOLLOWS,
    GS_KIND_INPUT,
    GS_KIND_VIEW,
    GS_KIND_WRITES,
    GS_MAX_DIMS,
    GS_MAX_OP_PARAMS,
    GS_MAX_SRC,
    GS_N_OPS,
    GS_OK,
    GS_OP_NONE,
    GS_OP_PERMUTE,
    GS_OP_RESHAPE,
    GS_OP_TRANSPOSE,
    GS_OP_VIEW,
    GS_OVERFLOW,
    gs_checked_add,
    gs_checked_mul,
    gs_graph,
    gs_layout,
    gs_mix,
    gs_op_inplace,
    gs_op_name,
    gs_range_fits,
    gs_type_traits,
)

include "core/graph/types.pxi"
include "core/graph/ops_table.pxi"
include "core/graph/places.pxi"
include "core/graph/tensor.pxi"
include "core/graph/wiring.pxi"
include "core/graph/context.pxi"
include "core/graph/ops_elementwise.pxi"
include "core/graph/ops_matrix.pxi"
include "core/graph/ops_view.pxi"
include "core/graph/ops_attention.pxi"
include "core/graph/tensor_set.pxi"
include "core/graph/flat.pxi"
include "core/graph/graph.pxi"
