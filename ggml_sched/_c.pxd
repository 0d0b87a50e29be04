# The Cython declarations of the C headers in include/ggml_sched; no other file declares them.  Fields of a struct are
# listed by type, not in their order in memory, and constants without values: the C compiler takes both from the
# headers, which also say what each means.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef extern from "ggml_sched/status.h" nogil:
    enum:
        GS_OK, GS_NO_HOST_MEMORY, GS_OVERFLOW, GS_OUT_OF_MEMORY, GS_BAD_ARGUMENT, GS_BAD_PLACEMENT, GS_UNSUPPORTED_OP
        GS_HAZARD, GS_BACKEND_FAILED

    ctypedef struct gs_error:
        int32_t status, tensor, backend, index
        int64_t value, limit
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
    enum:
        GS_MAX_DIMS, GS_MAX_SRC, GS_MAX_OP_PARAMS, GS_FLAG_INPUT, GS_FLAG_OUTPUT

    ctypedef struct gs_layout:
        int64_t ne[4]
        int64_t nb[4]
        int64_t nbytes
        int32_t type, op

    ctypedef struct gs_block:
        int64_t offset, size

    ctypedef struct gs_type_traits:
        int32_t block_size, type_size

cdef extern from "ggml_sched/types.h" nogil:
    enum:
        GS_N_TYPES, GS_TYPE_F32, GS_TYPE_F16, GS_TYPE_I8, GS_TYPE_I32, GS_TYPE_I64
    const char *gs_type_name(int type)
    gs_type_traits gs_traits_of_type(int type)

cdef extern from "ggml_sched/ops.h" nogil:
    enum:
        GS_INPLACE_FIRST, GS_OP_NONE, GS_OP_VIEW, GS_OP_RESHAPE, GS_OP_PERMUTE, GS_OP_TRANSPOSE
        GS_OP_UNARY, GS_OP_GLU, GS_GLU_GEGLU, GS_GLU_REGLU, GS_GLU_SWIGLU, GS_GLU_SWIGLU_OAI, GS_OP_ADD, GS_OP_ADD1
        GS_OP_ADD_ID, GS_OP_ARANGE, GS_OP_ARGMAX, GS_OP_ARGSORT, GS_OP_CLAMP, GS_OP_CONCAT, GS_OP_CONT, GS_OP_CPY
        GS_OP_DIAG_MASK_INF, GS_OP_DIAG_MASK_ZERO, GS_OP_DIV, GS_OP_DUP, GS_OP_FLASH_ATTN_EXT, GS_OP_GET_ROWS
        GS_OP_GROUP_NORM, GS_OP_L2_NORM, GS_OP_LOG, GS_OP_MEAN, GS_OP_MUL, GS_OP_MUL_MAT, GS_OP_MUL_MAT_ID, GS_OP_NORM
        GS_OP_PAD, GS_OP_REPEAT, GS_OP_RMS_NORM, GS_OP_ROPE, GS_OP_SCALE, GS_OP_SET, GS_OP_SET_ROWS, GS_OP_SOFT_MAX
        GS_OP_SQR, GS_OP_SQRT, GS_OP_SSM_CONV, GS_OP_SSM_SCAN, GS_OP_SUB, GS_OP_SUM, GS_OP_SUM_ROWS, GS_OP_TOP_K
        GS_UNARY_ABS, GS_UNARY_ELU, GS_UNARY_EXP, GS_UNARY_GELU, GS_UNARY_GELU_QUICK, GS_UNARY_HARDSWISH, GS_UNARY_NEG
        GS_UNARY_RELU, GS_UNARY_SIGMOID, GS_UNARY_SILU, GS_UNARY_STEP, GS_UNARY_TANH, GS_N_OPS
    const char *gs_op_name(int op)
    int gs_op_inplace(int op)
    int gs_op_family(int op)

cdef extern from "ggml_sched/graph.h" nogil:
    enum:
        GS_ROLE_VIEW, GS_ROLE_WRITES, GS_ROLE_INPUT, GS_ROLE_FOLLOWS

    ctypedef struct gs_graph:
        int32_t n_tensors, n_nodes, n_leafs, n_work, n_roots, n_views
        gs_layout *layout
        int64_t *view_offs
        int64_t *nbytes
        int32_t *view_src
        int32_t *src_begin
        int32_t *src
        int32_t *param_begin
        int32_t *param
        int32_t *node
        int32_t *leaf
        int32_t *position
        int32_t *dep_begin
        int32_t *dep
        int32_t *root
        int32_t *work
        int32_t *view
        int32_t *memory
        int32_t *n_readers
        int32_t *n_viewers
        int32_t *first_view
        int32_t *next_view
        int32_t *reader_begin
        int32_t *reader
        unsigned char *flags
        unsigned char *slot
        unsigned char *op
        unsigned char *role
        uint64_t *layout_hash
        uint32_t *alike
        int32_t *type

    ctypedef struct gs_node:
        gs_layout layout
        int32_t op, sub_op, flags, n_src
        int32_t params[16]
        const gs_node *src[10]
        void *data

cdef extern from "ggml_sched/policy.h" nogil:
    enum:
        GS_USAGE_ANY, GS_USAGE_WEIGHTS, GS_STATE_ADDRESSED, GS_STATE_INPLACE, GS_STATE_LATE, GS_STATE_FREED
        GS_STATE_EXCLUSIVE, GS_STATE_WRITTEN, GS_STATE_DEPENDS, GS_STATE_INNER, GS_METHOD_BEST_FIT, GS_METHOD_PACKED
        GS_METHOD_REPLAYED, GS_PLACEMENT_DEFAULT, GS_PLACEMENT_SEED, GS_OFFSETS_PACKED, GS_OFFSETS_BEST_FIT
        GS_REUSE_FIRST, GS_REUSE_WHOLE, GS_REUSE_FRONT, GS_REUSE_ALL, GS_REASON_NOTHING, GS_REASON_USER
        GS_REASON_RESIDENT, GS_REASON_WEIGHT, GS_REASON_SOURCE, GS_REASON_CONSUMER, GS_REASON_ROOT, GS_REASON_FIRST
        GS_REASON_UNSUPPORTED, GS_REASON_INPUT, GS_REASON_OFFLOAD, GS_REASON_NEIGHBOUR, GS_REASON_UPGRADE
        GS_REASON_MOST_INPUTS, GS_REASON_BOUNDARY, GS_REASON_USER_UNSUPPORTED, GS_N_REASONS

    ctypedef struct gs_policy:
        int32_t placement, offsets, reuse, leafs_first, stream, n_copies

    ctypedef struct gs_arena_result:
        int64_t nbytes, live_bytes, stride
        int32_t method, first_chunk, n_chunks

    const char *gs_reason_name(int reason)

cdef extern from "ggml_sched/plan.h" nogil:
    enum: GS_MAX_BACKENDS
    const int64_t GS_MAX_CHUNK

    ctypedef struct gs_backend_info:
        const char *name
        int64_t alignment, max_buffer
        const uint64_t *inplace

    ctypedef struct gs_problem:
        gs_policy policy
        int32_t n_backends, n_buffers, n_groups
        const gs_backend_info *backends
        int32_t *resident
        int32_t *buffer
        int32_t *assigned
        int32_t *group_backend
        int32_t *group_begin
        int32_t *group_member
        unsigned char *usage
        unsigned char *reads_buffer
        unsigned char *reads
        unsigned char *supports
        unsigned char *offloads
        int64_t *nbytes

    ctypedef struct gs_plan:
        int32_t n_backends, n_tensors, n_copies, n_slots, n, n_seq, n_splits, n_inputs, n_write_backs, n_chunks
        int32_t n_groups
        int32_t *assign
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
        int32_t *seq
        int32_t *group_begin
        int32_t *group_member
        unsigned char *reason
        unsigned char *op
        unsigned char *flags
        unsigned char *state
        int64_t *size
        int64_t *view_offs
        int64_t *offset
        int64_t *rest
        int64_t *chunk_nbytes
        gs_arena_result *arena

cdef extern from "ggml_sched/program.h" nogil:
    enum: GS_STEP_LOAD, GS_STEP_COPY, GS_STEP_COPY_EXPERTS, GS_STEP_RUN, GS_STEP_WRITE_BACK, GS_NOT_DONE

    ctypedef struct gs_location:
        int32_t id, backend, chunk
        int64_t offset

    ctypedef struct gs_wait:
        int32_t step, back

    ctypedef struct gs_read:
        int32_t position, slot, location, n_slots

    ctypedef struct gs_step:
        int32_t kind, backend, tensor, ids, first, last, location, n_slots, read, n_reads, wait, n_waits, if_changed
        int32_t awaited
        int64_t start, nbytes

    ctypedef struct gs_program:
        int32_t n_steps, n_slots, n_reads, n_waits, n_inputs, n_ids, copy_slots, reach
        const gs_step *steps
        const gs_location *locations
        const gs_read *reads
        const gs_wait *waits
        const int32_t *inputs
        void **address

    ctypedef struct gs_run_nodes:
        int32_t n_nodes, step, turn, n_groups
        const gs_node **nodes
        const int32_t *ids
        const int32_t *group_begin
        const int32_t *group_member
        const unsigned char *needed

    ctypedef struct gs_backend:
        void *context
        const char *name
        int32_t concurrent_copies
        int (*alloc)(void *context, int64_t nbytes, void **memory, gs_error *error) noexcept nogil
        void (*free)(void *context, void *memory, int64_t nbytes) noexcept nogil
        int (*write)(void *context, void *to, const void *source, int64_t nbytes, gs_error *error) noexcept nogil
        int (*read)(void *context, void *to, const void *source, int64_t nbytes, gs_error *error) noexcept nogil
        int (*copy)(void *context, const gs_backend *to_backend, void *to, const gs_backend *from_backend,
                    const void *source, int64_t nbytes, gs_error *error) noexcept nogil
        int (*run)(void *context, const gs_run_nodes *run, gs_error *error) noexcept nogil
        int (*synchronize)(void *context, gs_error *error) noexcept nogil
        int (*event_new)(void *context, void **event, gs_error *error) noexcept nogil
        void (*event_free)(void *context, void *event) noexcept nogil
        int (*event_record)(void *context, void *event, gs_error *error) noexcept nogil
        int (*event_wait)(void *context, const gs_backend *of, void *event, gs_error *error) noexcept nogil
        int (*event_synchronize)(void *context, void *event, gs_error *error) noexcept nogil

cdef extern from "ggml_sched/api.h" nogil:
    enum: GS_API_MAJOR
    enum: GS_API_MINOR
    const char *GS_API_CAPSULE
    enum: GS_MAX_TENSORS, GS_PACK_NO_CAPACITY, GS_PACK_DEFAULT_BUDGET, GS_PACK_PLANNER_BUDGET

    ctypedef struct gs_api_graph:
        pass

    ctypedef struct gs_api_plan:
        pass

    ctypedef struct gs_api_program:
        pass

    ctypedef struct gs_api_arenas:
        pass

    ctypedef struct gs_graph_size:
        int32_t n_tensors, n_nodes, n_leafs, n_src, n_params, n_deps

    ctypedef struct gs_graph_arrays:
        gs_layout *layout
        int32_t *view_src
        int32_t *src_begin
        int32_t *src
        int32_t *param_begin
        int32_t *param
        int32_t *node
        int32_t *leaf
        int32_t *dep_begin
        int32_t *dep
        int64_t *view_offs
        unsigned char *flags
        unsigned char *slot

    ctypedef struct gs_pack_result:
        int64_t arena, bound, proven, tries
        int32_t method, optimal

    ctypedef struct gs_api:
        int32_t major, minor
        size_t size, size_layout, size_policy, size_arena_result, size_error, size_graph_size, size_graph_arrays
        size_t size_backend_info, size_problem, size_plan, size_pack_result
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
        int (*plan_compact)(const gs_api_plan *reserved, const int64_t *size, int in_order,
                            int64_t *offset) noexcept nogil
        int (*graph_trim)(gs_api_graph *graph, gs_graph_arrays *kept, gs_error *error) noexcept nogil
        size_t size_node, size_location, size_wait, size_read, size_step, size_program, size_run, size_backend
        int (*program_new)(const gs_api_graph *graph, const gs_api_plan *plan, const gs_backend *backends,
                           void *const *resident, gs_api_program **program, gs_error *error) noexcept nogil
        void (*program_view)(const gs_api_program *program, gs_program *view) noexcept nogil
        int (*program_set)(gs_api_program *program, int32_t tensor, const void *data, int64_t nbytes,
                           gs_error *error) noexcept nogil
        int (*program_touch)(gs_api_program *program, int32_t tensor, gs_error *error) noexcept nogil
        int (*program_run)(gs_api_program *program, gs_error *error) noexcept nogil
        int (*program_synchronize)(gs_api_program *program, gs_error *error) noexcept nogil
        int (*program_read)(gs_api_program *program, int32_t tensor, void *to, int64_t offset, int64_t nbytes,
                            gs_error *error) noexcept nogil
        void (*program_free)(gs_api_program *program) noexcept nogil
        int (*arenas_new)(const gs_api_plan *const *plans, int32_t n_plans, const gs_backend *backends,
                          gs_api_arenas **arenas, gs_error *error) noexcept nogil
        int (*program_new_in)(const gs_api_graph *graph, const gs_api_plan *plan, gs_api_arenas *arenas,
                              void *const *resident, gs_api_program **program, gs_error *error) noexcept nogil
        void (*arenas_free)(gs_api_arenas *arenas) noexcept nogil
        int (*graph_keep_wiring)(gs_api_graph *graph, gs_graph_arrays *kept, gs_error *error) noexcept nogil

    int gs_api_check(const gs_api *api, gs_error *error) noexcept
    # gs_import_api is declared only if Python.h is included.  Its caller holds the GIL; it raises ImportError.
    const gs_api *gs_import_api() except NULL with gil
