/* ggml_sched/llama_cpp/ggml/library.h -- the ggml library that a client (llama.cpp) has loaded: its functions, its
 * numbers of ops and types, offsets of fields in its structs.
 *
 * The hook is neither linked with ggml nor compiled with its headers, so that it serves many versions.  A library is
 * found by an address in it, or in a library that depends on it: the address of a buffer type's functions, or of the
 * calling code.  Its functions are looked up with dlsym, and it is probed once: whether tensors are as abi.h declares
 * them, and where a graph has its leafs.  The results never change and stay for the life of the process, as ggml's
 * libraries do.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GGML_LIBRARY_H
#define GGML_SCHED_LLAMA_CPP_GGML_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "abi.h"
#include "ggml_sched/api.h"

#define GH_FLAG_INPUT 1
#define GH_FLAG_OUTPUT 2
#define GH_USAGE_WEIGHTS 1
#define GH_USAGE_COMPUTE 2
#define GH_LOG_ERROR 4
#define GH_DEVICE_CPU 0
#define GH_STATUS_ALLOC_FAILED (-2)
#define GH_STATUS_FAILED (-1)
#define GH_STATUS_SUCCESS 0

/* Sizes of the tables from ggml's numbers of ops and types to the planner's.  An op that the planner does not have
 * becomes GS_OP_CUSTOM, a type t that it does not have GH_FOREIGN_TYPE + t. */
#define GH_N_OPS 256
#define GH_N_TYPES 256
/* The planner's number of a type t that exists in ggml only: this plus t. */
#define GH_FOREIGN_TYPE 1000

#define GH_UNKNOWN (-1)      /* instead of a function's offset: not found, and the function is assumed to exist */

/* Room for what ggml_graph_view returns: a graph struct that lists some consecutive nodes of another graph.  ggml
 * returns it by value; its size depends on ggml's version, and is less than a third of these bytes in all versions. */
typedef struct gh_part {
    char bytes[512];
} gh_part;

typedef bool (*gh_eval_callback)(gx_tensor *tensor, bool ask, void *user);

/* Argument of a backend's function that reorders nodes.  That function calls add_alloc_dep for each `tensor` that must
 * keep its memory until the node `until` is done. */
typedef struct gh_optimize_params {
    void (*add_alloc_dep)(void *user, gx_tensor *tensor, gx_tensor *until);
    void *user;
} gh_optimize_params;

typedef void (*gh_optimize)(void *backend, void *part, const gh_optimize_params *params);

/* Which level of the hook (alloc, sched) needs a function of ggml's.  A level is not available with a library that
 * lacks a function it needs; an optional function that the library lacks is NULL. */
enum gh_need { GH_OPTIONAL, GH_BY_SCHEDULER, GH_BY_BOTH };

/* X(result, name without "ggml_", parameters, gh_need) */
#define GH_FUNCTIONS(X) \
    X(void *, init, (gx_init_params params), GH_BY_BOTH)                                                             \
    X(void, free, (void *ctx), GH_BY_BOTH)                                                                           \
    X(gx_tensor *, new_tensor_4d, (void *ctx, int, int64_t, int64_t, int64_t, int64_t), GH_BY_BOTH)                  \
    X(gx_tensor *, view_1d, (void *ctx, gx_tensor *, int64_t, size_t), GH_BY_BOTH)                                   \
    X(gx_tensor *, scale, (void *ctx, gx_tensor *, float), GH_BY_BOTH)                                               \
    X(gx_tensor *, add, (void *ctx, gx_tensor *, gx_tensor *), GH_BY_BOTH)                                           \
    X(gx_tensor *, set_name, (gx_tensor *, const char *), GH_BY_BOTH)                                                \
    X(void, set_output, (gx_tensor *), GH_BY_BOTH)                                                                   \
    X(void *, get_data, (const gx_tensor *), GH_BY_BOTH)                                                             \
    X(size_t, tensor_overhead, (void), GH_BY_BOTH)                                                                   \
    X(void *, new_graph_custom, (void *ctx, size_t size, bool grads), GH_BY_BOTH)                                    \
    X(void, build_forward_expand, (void *graph, gx_tensor *), GH_BY_BOTH)                                            \
    X(const char *, op_name, (int op), GH_BY_BOTH)                                                                   \
    X(const char *, unary_op_name, (int op), GH_BY_BOTH)                                                             \
    X(const char *, glu_op_name, (int op), GH_OPTIONAL)                                                              \
    X(const char *, type_name, (int type), GH_BY_BOTH)                                                               \
    X(size_t, type_size, (int type), GH_BY_BOTH)                                                                     \
    X(int64_t, blck_size, (int type), GH_BY_BOTH)                                                                    \
    X(bool, op_can_inplace, (int op), GH_OPTIONAL)                                                                   \
    X(size_t, nbytes, (const gx_tensor *tensor), GH_BY_BOTH)                                                         \
    X(void, log_internal, (int level, const char *format, ...), GH_OPTIONAL)                                         \
    X(int, graph_n_nodes, (void *graph), GH_BY_BOTH)                                                                 \
    X(gx_tensor **, graph_nodes, (void *graph), GH_BY_BOTH)                                                          \
    X(gh_part, graph_view, (void *graph, int first, int stop), GH_BY_SCHEDULER)                                      \
    X(uint64_t, graph_next_uid, (void), GH_OPTIONAL)                                                                 \
    X(const char *, backend_buft_name, (void *buft), GH_BY_BOTH)                                                     \
    X(void *, backend_buft_alloc_buffer, (void *buft, size_t size), GH_BY_BOTH)                                      \
    X(size_t, backend_buft_get_alignment, (void *buft), GH_BY_BOTH)                                                  \
    X(size_t, backend_buft_get_max_size, (void *buft), GH_BY_BOTH)                                                   \
    X(size_t, backend_buft_get_alloc_size, (void *buft, const gx_tensor *tensor), GH_BY_BOTH)                        \
    X(bool, backend_buft_is_meta, (void *buft), GH_OPTIONAL)                                                         \
    X(void *, backend_buffer_get_base, (void *buffer), GH_BY_BOTH)                                                   \
    X(size_t, backend_buffer_get_size, (void *buffer), GH_BY_BOTH)                                                   \
    X(void, backend_buffer_free, (void *buffer), GH_BY_BOTH)                                                         \
    X(void, backend_buffer_reset, (void *buffer), GH_BY_BOTH)                                                        \
    X(void, backend_buffer_set_usage, (void *buffer, int usage), GH_BY_BOTH)                                         \
    X(int, backend_buffer_init_tensor, (void *buffer, gx_tensor *tensor), GH_BY_BOTH)                                \
    X(void *, backend_buffer_get_type, (void *buffer), GH_BY_SCHEDULER)                                              \
    X(int, backend_buffer_get_usage, (void *buffer), GH_BY_SCHEDULER)                                                \
    X(bool, backend_buffer_is_host, (void *buffer), GH_BY_SCHEDULER)                                                 \
    X(const char *, backend_name, (void *backend), GH_BY_SCHEDULER)                                                  \
    X(void *, backend_get_default_buffer_type, (void *backend), GH_BY_SCHEDULER)                                     \
    X(void *, backend_get_device, (void *backend), GH_BY_SCHEDULER)                                                  \
    X(int, backend_dev_type, (void *device), GH_BY_SCHEDULER)                                                        \
    X(bool, backend_supports_op, (void *backend, const gx_tensor *node), GH_BY_SCHEDULER)                            \
    X(bool, backend_supports_buft, (void *backend, void *buft), GH_BY_SCHEDULER)                                     \
    X(bool, backend_offload_op, (void *backend, const gx_tensor *node), GH_BY_SCHEDULER)                             \
    X(void, backend_synchronize, (void *backend), GH_BY_SCHEDULER)                                                   \
    X(int, backend_graph_compute_async, (void *backend, void *graph), GH_BY_SCHEDULER)                               \
    X(void *, backend_event_new, (void *device), GH_BY_SCHEDULER)                                                    \
    X(void, backend_event_free, (void *event), GH_BY_SCHEDULER)                                                      \
    X(void, backend_event_record, (void *event, void *backend), GH_BY_SCHEDULER)                                     \
    X(void, backend_event_synchronize, (void *event), GH_BY_SCHEDULER)                                               \
    X(void, backend_event_wait, (void *backend, void *event), GH_BY_SCHEDULER)                                       \
    X(void, backend_tensor_copy, (gx_tensor *from, gx_tensor *to), GH_BY_SCHEDULER)                                  \
    X(void, backend_tensor_copy_async, (void *b_from, void *b_to, gx_tensor *from, gx_tensor *to), GH_BY_SCHEDULER)  \
    X(void, backend_tensor_set_async, (void *backend, gx_tensor *t, const void *data, size_t at, size_t size),       \
      GH_BY_SCHEDULER)                                                                                               \
    X(void, backend_tensor_get_async, (void *backend, const gx_tensor *t, void *data, size_t at, size_t size),       \
      GH_BY_SCHEDULER)                                                                                               \
    X(gx_tensor *, get_first_tensor, (const void *ctx), GH_OPTIONAL)                                                 \
    X(gx_tensor *, get_next_tensor, (const void *ctx, gx_tensor *tensor), GH_OPTIONAL)                               \
    X(void *, backend_alloc_ctx_tensors_from_buft, (void *ctx, void *buft), GH_OPTIONAL)                             \
    X(size_t, backend_alloc_ctx_tensors_from_buft_size, (void *ctx, void *buft), GH_OPTIONAL)                        \
    X(void *, backend_dev_buffer_from_host_ptr, (void *device, void *memory, size_t size, size_t max), GH_OPTIONAL)  \
    X(void *, backend_cpu_buffer_from_ptr, (void *memory, size_t size), GH_OPTIONAL)                                 \
    X(void *, backend_buft_get_device, (void *buft), GH_OPTIONAL)                                                    \
    X(const char *, backend_dev_name, (void *device), GH_OPTIONAL)                                                   \
    X(void, backend_dev_memory, (void *device, size_t *free, size_t *total), GH_OPTIONAL)                            \
    X(void *, gallocr_new_n, (void **bufts, int n), GH_BY_BOTH)                                                      \
    X(void, gallocr_free, (void *galloc), GH_BY_BOTH)                                                                \
    X(bool, gallocr_reserve_n, (void *galloc, void *graph, const int *node_ids, const int *leaf_ids), GH_BY_BOTH)    \
    X(void, gallocr_reserve_n_size, (void *galloc, void *graph, const int *nodes, const int *leafs, size_t *sizes),  \
      GH_OPTIONAL)                                                                                                   \
    X(bool, gallocr_alloc_graph, (void *galloc, void *graph), GH_BY_BOTH)                                            \
    X(size_t, gallocr_get_buffer_size, (void *galloc, int id), GH_BY_BOTH)                                           \
    X(void *, backend_sched_new, (void **backends, void **bufts, int n, size_t size, bool parallel, bool offload),   \
      GH_BY_SCHEDULER)                                                                                               \
    X(void, backend_sched_free, (void *sched), GH_BY_SCHEDULER)                                                      \
    X(void, backend_sched_reserve_size, (void *sched, void *graph, size_t *sizes), GH_OPTIONAL)                      \
    X(bool, backend_sched_reserve, (void *sched, void *graph), GH_BY_SCHEDULER)                                      \
    X(void, backend_sched_split_graph, (void *sched, void *graph), GH_OPTIONAL)                                      \
    X(bool, backend_sched_alloc_graph, (void *sched, void *graph), GH_BY_SCHEDULER)                                  \
    X(int, backend_sched_graph_compute, (void *sched, void *graph), GH_BY_SCHEDULER)                                 \
    X(int, backend_sched_graph_compute_async, (void *sched, void *graph), GH_BY_SCHEDULER)                           \
    X(void, backend_sched_synchronize, (void *sched), GH_BY_SCHEDULER)                                               \
    X(void, backend_sched_reset, (void *sched), GH_BY_SCHEDULER)                                                     \
    X(void, backend_sched_set_eval_callback, (void *sched, gh_eval_callback callback, void *user), GH_BY_SCHEDULER)  \
    X(int, backend_sched_get_n_backends, (void *sched), GH_BY_SCHEDULER)                                             \
    X(int, backend_sched_get_n_splits, (void *sched), GH_BY_SCHEDULER)                                               \
    X(int, backend_sched_get_n_copies, (void *sched), GH_BY_SCHEDULER)                                               \
    X(void *, backend_sched_get_backend, (void *sched, int i), GH_BY_SCHEDULER)                                      \
    X(void *, backend_sched_get_buffer_type, (void *sched, void *backend), GH_OPTIONAL)                              \
    X(size_t, backend_sched_get_buffer_size, (void *sched, void *backend), GH_BY_SCHEDULER)                          \
    X(void, backend_sched_set_tensor_backend, (void *sched, gx_tensor *tensor, void *backend), GH_BY_SCHEDULER)      \
    X(void *, backend_sched_get_tensor_backend, (void *sched, gx_tensor *tensor), GH_BY_SCHEDULER)

typedef struct gh_ggml {
    const void *key;            /* address of one of the library's functions, by which it is recognised */
    void *handle;               /* handle of the library, from dlopen                               */
    const char *unsupported;    /* why the library keeps its own allocator; NULL: ours serves it    */
    const char *unsupported_scheduler; /* why the library keeps its own scheduler; NULL: ours serves it */
#define GH_X(result, name, parameters, need) result (*name) parameters;
    GH_FUNCTIONS(GH_X)
#undef GH_X
    size_t at_n_leafs;          /* offset of the number of leafs in a graph                         */
    size_t at_leafs;            /* offset of the pointer to the leafs in a graph                    */
    size_t at_uid;              /* offset of a graph's unique id, by which backends recognise it; 0: none */
    int at_init_tensor;         /* offset of init_tensor in a buffer, or GH_UNKNOWN                 */
    int at_alloc_size;          /* offset of get_alloc_size in a buffer type, or GH_UNKNOWN         */
    bool has_op_offload;        /* sched_new has the parameter op_offload; without it ops are always offloaded */
    unsigned char op[GH_N_OPS]; /* GS_OP_* by ggml's number; for GS_OP_UNARY and GS_OP_GLU look in the next tables */
    unsigned char unary[GH_N_OPS]; /* GS_OP_* by ggml's number of a unary op                        */
    unsigned char glu[GH_N_OPS]; /* GS_OP_* by ggml's number of a gated linear unit                 */
    int32_t type[GH_N_TYPES];   /* GS_TYPE_* by ggml's number, or GH_FOREIGN_TYPE + that number     */
    uint64_t inplace[GS_N_OPS]; /* by GS_OP_*: bit k is set where source k may be the destination   */
} gh_ggml;

/* The planner's C API.  The extension module _hook sets it before a client is loaded. */
extern const gs_api *gh_api;

/* The ggml library that one of these buffer types or backends comes from; else that of the code at the address
 * `caller`; else one that the process has loaded; NULL: there is none.  Any thread. */
const gh_ggml *gh_ggml_find(const void *caller, void *const *bufts, int n_bufts);

/* gh_ggml_find for the address of the calling code alone.  Each thread caches the results. */
const gh_ggml *gh_ggml_of_caller(const void *caller);

/* -- introspection of a library at its first use */

/* Map the library's numbers of ops and types to the planner's, and find which ops its kernels compute in place. */
void gh_find_op_map(gh_ggml *lib);

/* Find two offsets in ggml's structs: of the pointers to a buffer's init_tensor and to a buffer type's get_alloc_size,
 * functions that may be absent. */
void gh_find_buffer_hooks(gh_ggml *lib);

/* Make tensors and a graph with the library, and check that every field that we use is where we expect it.  Returns the
 * name of what differs; NULL: nothing does.  Also finds where a graph has its leafs. */
const char *gh_probe(gh_ggml *lib);

/* Find the offset of the unique id in a graph, which newer versions have. */
void gh_find_uid(gh_ggml *lib);

/* A backend's function that reorders nodes; NULL: the backend has none. */
gh_optimize gh_find_optimize(const gh_ggml *lib, void *backend);

/* -- objects of ggml's */

/* Give a graph, or a view of one, a new unique id: a backend that recorded a graph of the old id must not replay it. */
static inline void gh_number_graph(const gh_ggml *lib, void *graph)
{
    if (lib->at_uid != 0) {
        *(uint64_t *)((char *)graph + lib->at_uid) = lib->graph_next_uid();
    }
}

static inline int gh_graph_n_leafs(const gh_ggml *lib, const void *graph)
{
    return *(const int *)((const char *)graph + lib->at_n_leafs);
}

static inline gx_tensor **gh_graph_leafs(const gh_ggml *lib, const void *graph)
{
    return *(gx_tensor **const *)((const char *)graph + lib->at_leafs);
}

/* Whether a struct has, or may have, the function whose pointer is at offset `at`: it is not NULL, or `at` is
 * GH_UNKNOWN. */
static inline bool gh_has(const void *of, int at)
{
    return at == GH_UNKNOWN || *(void *const *)((const char *)of + at) != NULL;
}

/* Whether a buffer has an init_tensor function. */
static inline bool gh_has_init_tensor(const gh_ggml *lib, const void *buffer)
{
    return gh_has(buffer, lib->at_init_tensor);
}

/* Call a buffer's init_tensor function for a tensor that was placed in it, if it has one. */
static inline void gh_init_tensor(const gh_ggml *lib, void *buffer, gx_tensor *t)
{
    if (gh_has_init_tensor(lib, buffer)) {
        lib->backend_buffer_init_tensor(buffer, t);
    }
}

/* Whether a buffer type has a get_alloc_size function.  Without it a tensor takes its own bytes. */
static inline bool gh_has_alloc_size(const gh_ggml *lib, const void *buft)
{
    return gh_has(buft, lib->at_alloc_size);
}

/* Bytes that a tensor takes in buffers of a type.  `own`: those of the tensor itself, as ggml_nbytes reports; some
 * types pad tensors and take more, none less. */
static inline int64_t gh_alloc_size(const gh_ggml *lib, void *buft, const gx_tensor *t, int64_t own)
{
    const int64_t nbytes = gh_has_alloc_size(lib, buft) ? (int64_t)lib->backend_buft_get_alloc_size(buft, t) : own;
    return nbytes > own ? nbytes : own;
}

/* The planner's number of a tensor's op, its sub-op included. */
static inline int gh_op(const gh_ggml *lib, const gx_tensor *t)
{
    const int op = t->op >= 0 && t->op < GH_N_OPS ? lib->op[t->op] : GS_OP_CUSTOM;
    const int sub = t->op_params[0];
    if (op < GS_OP_UNARY) {
        return op;
    }
    if (sub < 0 || sub >= GH_N_OPS) {
        return GS_OP_CUSTOM;
    }
    return op == GS_OP_GLU ? lib->glu[sub] : lib->unary[sub];
}

/* Whether ggml's number of an op stands for a family (unary ops, gated linear units): the op that is meant, and so the
 * planner's number, is in the tensor's first parameter. */
static inline bool gh_is_of_family(const gh_ggml *lib, int32_t op)
{
    return op >= 0 && op < GH_N_OPS && lib->op[op] >= GS_OP_UNARY;
}

static inline int32_t gh_type(const gh_ggml *lib, int32_t type)
{
    return type >= 0 && type < GH_N_TYPES ? lib->type[type] : GH_FOREIGN_TYPE + (type & 0xffff);
}

#endif
