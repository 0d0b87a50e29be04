# The Cython declarations of the C headers in include/ggml_sched; no other file declares them.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef extern from "ggml_sched/status.h" nogil:
    enum: GS_OK
    enum: GS_NO_HOST_MEMORY
    enum: GS_OVERFLOW
    enum: GS_OUT_OF_MEMORY
    enum: GS_BAD_ARGUMENT
    enum: GS_BAD_PLACEMENT
    enum: GS_UNSUPPORTED_OP
    enum: GS_HAZARD

    ctypedef struct gs_error:
        int32_t status
        int32_t tensor
        int32_t backend
        int32_t index
        int64_t value
        int64_t limit
        char message[256]

    const char *gs_status_name(int status)

cdef extern from "ggml_sched/checked.h" nogil:
    int gs_checked_add(int64_t a, int64_t b, int64_t *out)
    int gs_checked_mul(int64_t a, int64_t b, int64_t *out)
    int gs_checked_align(int64_t a, int64_t alignment, int64_t *out)
    bint gs_range_fits(int64_t offset, int64_t size, int64_t capacity)

cdef extern from "ggml_sched/hash.h" nogil:
    uint64_t gs_mix(uint64_t h, uint64_t x)
    uint64_t gs_mix_other(uint64_t h, uint64_t x)

cdef extern from "ggml_sched/structs.h" nogil:
    enum: GS_MAX_DIMS
    enum: GS_MAX_SRC
    enum: GS_MAX_OP_PARAMS
    enum: GS_FLAG_INPUT
    enum: GS_FLAG_OUTPUT

    ctypedef struct gs_layout:
        int64_t ne[4]
        int64_t nb[4]
        int64_t nbytes
        int32_t type
        int32_t op

    ctypedef struct gs_block:
        int64_t offset
        int64_t size

    ctypedef struct gs_type_traits:
        int32_t block_size
        int32_t type_size

cdef extern from "ggml_sched/types.h" nogil:
    enum: GS_N_TYPES
    enum: GS_TYPE_F32
    enum: GS_TYPE_F16
    enum: GS_TYPE_I8
    enum: GS_TYPE_I16
    enum: GS_TYPE_I32
    enum: GS_TYPE_I64
    enum: GS_TYPE_F64
    enum: GS_TYPE_BF16
    const char *gs_type_name(int type)
    gs_type_traits gs_traits_of_type(int type)

cdef extern from "ggml_sched/ops.h" nogil:
    enum: GS_INPLACE_FIRST
    enum: GS_INPLACE_LATER
    enum: GS_OP_NONE
    enum: GS_OP_VIEW
    enum: GS_OP_RESHAPE
    enum: GS_OP_PERMUTE
    enum: GS_OP_TRANSPOSE
    enum: GS_OP_UNARY
    enum: GS_OP_GLU
    enum: GS_GLU_GEGLU
    enum: GS_GLU_REGLU
    enum: GS_GLU_SWIGLU
    enum: GS_GLU_SWIGLU_OAI
    enum: GS_OP_ADD
    enum: GS_OP_ADD1
    enum: GS_OP_ADD_ID
    enum: GS_OP_ARANGE
    enum: GS_OP_ARGMAX
    enum: GS_OP_ARGSORT
    enum: GS_OP_CLAMP
    enum: GS_OP_CONCAT
    enum: GS_OP_CONT
    enum: GS_OP_CPY
    enum: GS_OP_DIAG_MASK_INF
    enum: GS_OP_DIAG_MASK_ZERO
    enum: GS_OP_DIV
    enum: GS_OP_DUP
    enum: GS_OP_FLASH_ATTN_EXT
    enum: GS_OP_GET_ROWS
    enum: GS_OP_GROUP_NORM
    enum: GS_OP_L2_NORM
    enum: GS_OP_LOG
    enum: GS_OP_MEAN
    enum: GS_OP_MUL
    enum: GS_OP_MUL_MAT
    enum: GS_OP_MUL_MAT_ID
    enum: GS_OP_NORM
    enum: GS_OP_PAD
    enum: GS_OP_REPEAT
    enum: GS_OP_RMS_NORM
    enum: GS_OP_ROPE
    enum: GS_OP_SCALE
    enum: GS_OP_SET
    enum: GS_OP_SET_ROWS
    enum: GS_OP_SOFT_MAX
    enum: GS_OP_SQR
    enum: GS_OP_SQRT
    enum: GS_OP_SSM_CONV
    enum: GS_OP_SSM_SCAN
    enum: GS_OP_SUB
    enum: GS_OP_SUM
    enum: GS_OP_SUM_ROWS
    enum: GS_OP_TOP_K
    enum: GS_UNARY_ABS
    enum: GS_UNARY_ELU
    enum: GS_UNARY_EXP
    enum: GS_UNARY_GELU
    enum: GS_UNARY_GELU_QUICK
    enum: GS_UNARY_HARDSWISH
    enum: GS_UNARY_NEG
    enum: GS_UNARY_RELU
    enum: GS_UNARY_SIGMOID
    enum: GS_UNARY_SILU
    enum: GS_UNARY_STEP
    enum: GS_UNARY_TANH
    enum: GS_N_OPS
    const char *gs_op_name(int op)
    int gs_op_inplace(int op)
    int gs_op_family(int op)

cdef extern from "ggml_sched/graph.h" nogil:
    enum: GS_KIND_VIEW
    enum: GS_KIND_WRITES
    enum: GS_KIND_INPUT
    enum: GS_KIND_FOLLOWS

    ctypedef struct gs_graph:
        int32_t n_tensors
        int32_t n_nodes
        int32_t n_leafs
        gs_layout *layout
        int64_t *view_offs
        int32_t *view_src
        unsigned char *flags
        int32_t *src_begin
        int32_t *src
        unsigned char *slot
        int32_t *param_begin
        int32_t *param
        int32_t *node
        int32_t *leaf
        int32_t *position
        int32_t *dep_begin
        int32_t *dep
        int32_t n_work
        int32_t n_roots
        int32_t n_views
        int32_t *root
        int32_t *work
        int32_t *view
        int32_t *memory
        int64_t *nbytes
        int32_t *n_readers
        int32_t *n_viewers
        int32_t *first_view
        int32_t *next_view
        int32_t *reader_begin
        int32_t *reader
        unsigned char *op
        unsigned char *kind
        uint64_t *form
        uint32_t *alike

    ctypedef struct gs_node:
        gs_layout layout
        int32_t op
        int32_t sub_op
        int32_t params[16]
        int32_t flags
        int32_t n_src
        const gs_node *src[10]
        void *data

cdef extern from "ggml_sched/policy.h" nogil:
    enum: GS_USAGE_ANY
    enum: GS_USAGE_WEIGHTS
    enum: GS_STATE_ADDRESSED
    enum: GS_STATE_INPLACE
    enum: GS_STATE_LATE
    enum: GS_STATE_FREED
    enum: GS_STATE_EXCLUSIVE
    enum: GS_STATE_WRITTEN
    enum: GS_STATE_DEPENDS
    enum: GS_STATE_INNER
    enum: GS_METHOD_BEST_FIT
    enum: GS_METHOD_PACKED
    enum: GS_METHOD_REPLAYED
    enum: GS_PLACEMENT_DEFAULT
    enum: GS_PLACEMENT_SEED
    enum: GS_OFFSETS_PACKED
    enum: GS_OFFSETS_BEST_FIT
    enum: GS_REUSE_FIRST
    enum: GS_REUSE_WHOLE
    enum: GS_REUSE_FRONT
    enum: GS_REUSE_ALL
    enum: GS_REASON_NOTHING
    enum: GS_REASON_USER
    enum: GS_REASON_RESIDENT
    enum: GS_REASON_WEIGHT
    enum: GS_REASON_SOURCE
    enum: GS_REASON_CONSUMER
    enum: GS_REASON_ROOT
    enum: GS_REASON_FIRST
    enum: GS_REASON_UNSUPPORTED
    enum: GS_REASON_INPUT
    enum: GS_REASON_OFFLOAD
    enum: GS_REASON_NEIGHBOUR
    enum: GS_REASON_UPGRADE
    enum: GS_REASON_MOST_INPUTS
    enum: GS_REASON_BOUNDARY
    enum: GS_N_REASONS

    ctypedef struct gs_policy:
        int32_t placement
        int32_t offsets
        int32_t reuse
        int32_t leafs_first
        int32_t stream
        int32_t n_copies

    ctypedef struct gs_arena_result:
        int64_t nbytes
        int64_t live_bytes
        int64_t stride
        int32_t method
        int32_t first_chunk
        int32_t n_chunks

    const char *gs_reason_name(int reason)

cdef extern from "ggml_sched/plan.h" nogil:
    enum: GS_MAX_BACKENDS
    const int64_t GS_MAX_CHUNK

    ctypedef struct gs_backend_info:
        const char *name
        int64_t alignment
        int64_t max_buffer
        const uint64_t *inplace

    ctypedef struct gs_problem:
        gs_policy policy
        int32_t n_backends
        int32_t n_buffers
        int32_t n_groups
        const gs_backend_info *backends
        int32_t *resident
        unsigned char *usage
        int32_t *buffer
        unsigned char *reads_buffer
        unsigned char *reads
        int32_t *assigned
        unsigned char *supports
        unsigned char *offloads
        int64_t *nbytes
        int32_t *group_backend
        int32_t *group_begin
        int32_t *group_member

    ctypedef struct gs_plan:
        int32_t n_backends
        int32_t n_tensors
        int32_t n_copies
        int32_t n_slots
        int32_t n
        int32_t n_seq
        int32_t n_splits
        int32_t n_inputs
        int32_t n_write_backs
        int32_t n_chunks
        int32_t n_groups
        int32_t *assign
        unsigned char *reason
        int32_t *split_backend
        int32_t *split_start
        int32_t *split_stop
        int32_t *split_inputs
        int32_t *inputs
        int32_t *copy_like
        int32_t *copy_from
        int32_t *copy_backend
        int32_t *copy_kept
        int32_t *slot_copy
        int32_t *back_node
        int32_t *back_copy
        int32_t *like
        int32_t *arena_of
        int32_t *root
        int32_t *birth
        int32_t *death
        int32_t *trimmed
        int32_t *src_begin
        int32_t *src
        int64_t *size
        int64_t *view_offs
        int64_t *offset
        int64_t *rest
        unsigned char *op
        unsigned char *flags
        unsigned char *state
        int32_t *seq
        gs_arena_result *arena
        int64_t *chunk_nbytes
        int32_t *group_begin
        int32_t *group_member

cdef extern from "ggml_sched/api.h" nogil:
    enum: GS_API_MAJOR
    enum: GS_API_MINOR
    const char *GS_API_CAPSULE
    enum: GS_MAX_TENSORS
    enum: GS_PACK_NO_CAPACITY
    enum: GS_PACK_DEFAULT_BUDGET
    enum: GS_PACK_PLANNER_BUDGET

    ctypedef struct gs_api_graph:
        pass

    ctypedef struct gs_api_plan:
        pass

    ctypedef struct gs_graph_size:
        int32_t n_tensors
        int32_t n_nodes
        int32_t n_leafs
        int32_t n_src
        int32_t n_params
        int32_t n_deps

    ctypedef struct gs_graph_arrays:
        gs_layout *layout
        int32_t *view_src
        int64_t *view_offs
        unsigned char *flags
        int32_t *src_begin
        int32_t *src
        unsigned char *slot
        int32_t *param_begin
        int32_t *param
        int32_t *node
        int32_t *leaf
        int32_t *dep_begin
        int32_t *dep

    ctypedef struct gs_pack_result:
        int64_t arena
        int64_t bound
        int64_t proven
        int64_t tries
        int32_t method
        int32_t optimal

    ctypedef struct gs_api:
        int32_t major
        int32_t minor
        size_t size
        size_t size_layout
        size_t size_policy
        size_t size_arena_result
        size_t size_error
        size_t size_graph_size
        size_t size_graph_arrays
        size_t size_backend_info
        size_t size_problem
        size_t size_plan
        size_t size_pack_result
        int (*graph_new)(const gs_graph_size *size, gs_graph_arrays *fill, gs_api_graph **graph,
                         gs_error *error) noexcept nogil
        int (*graph_refill)(gs_api_graph *graph, const gs_graph_size *size, gs_graph_arrays *fill,
                            gs_error *error) noexcept nogil
        int (*graph_finish)(gs_api_graph *graph, gs_error *error) noexcept nogil
        void (*graph_free)(gs_api_graph *graph) noexcept nogil
        int (*graph_equal)(const gs_api_graph *a, const gs_api_graph *b) noexcept nogil
        int (*graph_same_wiring)(const gs_api_graph *a, const gs_api_graph *b) noexcept nogil
        int (*graph_fingerprint)(const gs_api_graph *graph, uint64_t *fingerprint, uint64_t *wiring,
                                 gs_error *error) noexcept nogil
        void (*policy_default)(gs_policy *policy) noexcept nogil
        void (*policy_seed)(gs_policy *policy) noexcept nogil
        int (*plan_new)(const gs_api_graph *graph, const gs_problem *problem, gs_api_plan **plan,
                        gs_error *error) noexcept nogil
        int (*plan_replay)(const gs_api_plan *reserved, const gs_api_graph *reserved_graph, const gs_api_graph *graph,
                           const gs_problem *problem, gs_api_plan **plan, int *serves, gs_error *error) noexcept nogil
        void (*plan_find_exclusive)(gs_api_plan *plan) noexcept nogil
        void (*plan_view)(const gs_api_plan *plan, gs_plan *view) noexcept nogil
        void (*plan_free)(gs_api_plan *plan) noexcept nogil
        int (*pack)(int32_t n, const int64_t *lower, const int64_t *upper, const int64_t *size, int64_t capacity,
                    int64_t budget, int64_t *offsets, gs_pack_result *result, gs_error *error) noexcept nogil
        const char *(*status_name)(int status) noexcept nogil
        const char *(*reason_name)(int reason) noexcept nogil
        const char *(*pack_method_name)(int method) noexcept nogil
        const char *(*op_name)(int op) noexcept nogil
        int (*op_of_name)(const char *name) noexcept nogil
        const char *(*type_name)(int type) noexcept nogil
        int (*type_of_name)(const char *name) noexcept nogil
        int (*type_traits)(int type, gs_type_traits *traits) noexcept nogil
        int (*plan_compact)(const gs_api_plan *reserved, const int64_t *size, int64_t *offset) noexcept nogil

    int gs_api_check(const gs_api *api, gs_error *error) noexcept
    # Declared if Python.h is included; the caller holds the GIL; raises ImportError.
    const gs_api *gs_import_api() except NULL with gil
