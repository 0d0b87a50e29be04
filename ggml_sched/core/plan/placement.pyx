# cython: language_level=3
"""The default policy: which backend computes each node, and how the graph is cut into splits.

Includes, in this order:

    ints      Growing arrays of int32 for the passes.
    splits    Splits: cutting a graph with assigned backends into splits, and the copies between them.
    default   The placement of the default policy, and its splits.
    boundary  Boundaries: moving the boundary of two splits to the position where the fewest bytes are copied.
"""


from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

from ggml_sched._c cimport (
    GS_BAD_PLACEMENT,
    GS_KIND_FOLLOWS,
    GS_KIND_INPUT,
    GS_KIND_WRITES,
    GS_MAX_TENSORS,
    GS_NO_HOST_MEMORY,
    GS_OK,
    GS_OP_NONE,
    GS_REASON_BOUNDARY,
    GS_REASON_CONSUMER,
    GS_REASON_FIRST,
    GS_REASON_INPUT,
    GS_REASON_MOST_INPUTS,
    GS_REASON_NEIGHBOUR,
    GS_REASON_NOTHING,
    GS_REASON_OFFLOAD,
    GS_REASON_RESIDENT,
    GS_REASON_ROOT,
    GS_REASON_UNSUPPORTED,
    GS_REASON_UPGRADE,
    GS_REASON_USER,
    GS_REASON_WEIGHT,
    GS_UNSUPPORTED_OP,
    GS_USAGE_WEIGHTS,
    gs_graph,
    gs_request,
)
from ggml_sched.core.graph.types cimport layout_equal

include "ints.pxi"
include "splits.pxi"
include "default.pxi"
include "boundary.pxi"
