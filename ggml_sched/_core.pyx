# cython: language_level=3
"""Where it lives: allocators for tensors and graphs, and the planner; re-exports what is computed, and packing.

A contents page.  All imports stand here; the parts below, in core/alloc/ and core/plan/, are read in order:

    alloc/tallocr           TensorAllocator: single tensors in one buffer
    plan/ints               growing arrays
    plan/policy             Policy: how a plan is made
    plan/devices            what backends declare once, and who is asked what
    plan/answers            what backends have said of each kind of node
    plan/ask                asking them
    plan/request            what a plan depends on besides the graph
    plan/problem            the same, given by a C caller
    plan/offered            what backends would compute as one
    plan/reasons            why a tensor is where it is
    plan/splits             splits, and the copies between them
    plan/seed               the first generation's passes
    plan/groups             nodes that a backend computes as one
    plan/default            the default policy's placement and splits
    plan/boundary           the default policy's last pass: where splits meet
    alloc/walk              what an allocation pass walks over
    alloc/gallocr           graph allocation, first generation
    alloc/placing           offsets that serve another walk of the same wiring
    alloc/graph_allocator   GraphAllocator
    alloc/allocr            Allocator: single tensors and graphs in one buffer
    alloc/offsets           the offsets of an arena, all lifetimes known
    alloc/arenas            what the memory of a graph in splits comes to, in-place reuse weighed
    plan/make               from a request to a plan, in C
    plan/plan_data          PlanData: a plan for Python
    plan/plan_values        plans as plain values, and made of them again
    plan/alone              what a program loads where one backend does everything
    plan/replay             a reserved plan for a smaller graph of the same wiring
    plan/bind               addresses for a graph's tensors
"""

import itertools
from operator import index as _index
from operator import itemgetter

from ggml_sched import _graph
from ggml_sched._graph import measure_buffer, new_buffer, op_numbers
from ggml_sched._pack import Packing, pack  # no-cython-lint: exported
from ggml_sched.errors import (
    BackendError,
    GraphError,
    HazardError,
    OutOfMemory,
    PlacementError,
    UnsupportedOp,
    no_host_memory,
)

cimport cython
from cpython.list cimport PyList_GET_ITEM
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memmove, memset

from ggml_sched._c cimport (
    GS_BAD_ARGUMENT,
    GS_BAD_PLACEMENT,
    GS_FLAG_INPUT,
    GS_FLAG_OUTPUT,
    GS_INPLACE_FIRST,
    GS_KIND_FOLLOWS,
    GS_KIND_INPUT,
    GS_KIND_VIEW,
    GS_KIND_WRITES,
    GS_MAX_BACKENDS,
    GS_MAX_SRC,
    GS_MAX_TENSORS,
    GS_METHOD_BEST_FIT,
    GS_METHOD_PACKED,
    GS_METHOD_REPLAYED,
    GS_NO_HOST_MEMORY,
    GS_N_OPS,
    GS_N_REASONS,
    GS_OFFSETS_BEST_FIT,
    GS_OFFSETS_PACKED,
    GS_OK,
    GS_OP_NONE,
    GS_OP_TRANSPOSE,
    GS_OUT_OF_MEMORY,
    GS_OVERFLOW,
    GS_PLACEMENT_DEFAULT,
    GS_PLACEMENT_SEED,
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
    GS_REASON_SOURCE,
    GS_REASON_UNSUPPORTED,
    GS_REASON_UPGRADE,
    GS_REASON_USER,
    GS_REASON_WEIGHT,
    GS_REUSE_ALL,
    GS_REUSE_FIRST,
    GS_REUSE_FRONT,
    GS_REUSE_WHOLE,
    GS_STATE_ADDRESSED,
    GS_STATE_DEPENDS,
    GS_STATE_EXCLUSIVE,
    GS_STATE_FREED,
    GS_STATE_INNER,
    GS_STATE_LATE,
    GS_STATE_TOOK_OVER,
    GS_STATE_WRITTEN,
    GS_UNSUPPORTED_OP,
    GS_USAGE_ANY,
    GS_USAGE_WEIGHTS,
    gs_arena_result,
    gs_backend_info,
    gs_checked_align,
    gs_error,
    gs_graph,
    gs_layout,
    gs_mix,
    gs_node,
    gs_op_inplace,
    gs_op_name,
    gs_plan,
    gs_policy,
    gs_problem,
    gs_reason_name,
    gs_request,
)
from ggml_sched._graph cimport (
    ASKS_OFFLOAD,
    ASKS_SIZE,
    ASKS_SUPPORTS,
    MAX_KIND_WORDS,
    BackendBase,
    BufferBase,
    Graph,
    Home,
    Lease,
    Tensor,
    bytes_tuple,
    checked_alloc_size,
    describe,
    ints_tuple,
    kind_words,
    layout_equal,
    longs_tuple,
    node_of_kind,
)
from ggml_sched._pack cimport (
    N_PACK_METHODS,
    PACK_INDEX_BITS,
    PACK_INDEX_MASK,
    PACK_NO_CAPACITY,
    PACK_PLANNER_BUDGET,
    blocks_copy,
    blocks_cut,
    blocks_free,
    blocks_give,
    blocks_largest,
    blocks_reset,
    blocks_reset_chunked,
    blocks_take,
    gs_blocks,
    gs_pack,
    gs_packing,
    method_name,
    pack_expect,
    pack_free,
    pack_measure,
    pack_prepared,
    pack_sort_keys,
)

# What is computed, under the core's name, too; Cython keeps names that it knows as types to itself.
globals().update({name: value for name, value in vars(_graph).items() if not name.startswith("_")})

include "core/alloc/tallocr.pxi"
include "core/plan/ints.pxi"
include "core/plan/policy.pxi"
include "core/plan/answers.pxi"
include "core/plan/devices.pxi"
include "core/plan/ask.pxi"
include "core/plan/request.pxi"
include "core/plan/problem.pxi"
include "core/plan/offered.pxi"
include "core/plan/reasons.pxi"
include "core/plan/splits.pxi"
include "core/plan/seed.pxi"
include "core/plan/groups.pxi"
include "core/plan/default.pxi"
include "core/plan/boundary.pxi"
include "core/alloc/walk.pxi"
include "core/alloc/gallocr.pxi"
include "core/alloc/placing.pxi"
include "core/alloc/graph_allocator.pxi"
include "core/alloc/allocr.pxi"
include "core/alloc/offsets.pxi"
include "core/alloc/compaction.pxi"
include "core/alloc/arenas.pxi"
include "core/plan/make.pxi"
include "core/plan/plan_data.pxi"
include "core/plan/plan_values.pxi"
include "core/plan/alone.pxi"
include "core/plan/replay.pxi"
include "core/plan/bind.pxi"
