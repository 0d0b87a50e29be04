/* ggml_sched/llama_cpp/ggml/runtime.h -- the functions of a client's ggml that the scheduler needs: backends, events,
 * copies, views of graphs; and ggml's own scheduler, for calls that are passed on.
 *
 * Looked up once for each library (library.h), and never changed.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GGML_RUNTIME_H
#define GGML_SCHED_LLAMA_CPP_GGML_RUNTIME_H

#include "library.h"

#define GH_STATUS_ALLOC_FAILED (-2)
#define GH_STATUS_FAILED (-1)
#define GH_STATUS_SUCCESS 0
#define GH_USAGE_WEIGHTS 1
#define GH_DEVICE_CPU 0

/* A view of a graph, as ggml returns it.  No version needs a third of this. */
typedef struct gh_part {
    char bytes[512];
} gh_part;

typedef bool (*gh_eval_callback)(gx_tensor *tensor, bool ask, void *user);

/* Arguments of a backend's function that reorders nodes: it reports that `tensor` must keep its memory until `until` is
 * done. */
typedef struct gh_optimize_params {
    void (*add_alloc_dep)(void *user, gx_tensor *tensor, gx_tensor *until);
    void *user;
} gh_optimize_params;

typedef void (*gh_optimize)(void *backend, void *part, const gh_optimize_params *params);

/* X(result, name without "ggml_", parameters, whether all supported versions have it) */
#define GH_RUNTIME(X) \
    X(gh_part, graph_view, (void *graph, int first, int stop), true)                                            \
    X(uint64_t, graph_next_uid, (void), false)                                                                  \
    X(const char *, backend_name, (void *backend), true)                                                        \
    X(void *, backend_get_default_buffer_type, (void *backend), true)                                           \
    X(void *, backend_get_device, (void *backend), true)                                                        \
    X(int, backend_dev_type, (void *device), true)                                                              \
    X(bool, backend_supports_op, (void *backend, const gx_tensor *node), true)                                  \
    X(bool, backend_supports_buft, (void *backend, void *buft), true)                                           \
    X(bool, backend_offload_op, (void *backend, const gx_tensor *node), true)                                   \
    X(void, backend_synchronize, (void *backend), true)                                                         \
    X(int, backend_graph_compute_async, (void *backend, void *graph), true)                                     \
    X(void *, backend_event_new, (void *device), true)                                                          \
    X(void, backend_event_free, (void *event), true)                                                            \
    X(void, backend_event_record, (void *event, void *backend), true)                                           \
    X(void, backend_event_synchronize, (void *event), true)                                                     \
    X(void, backend_event_wait, (void *backend, void *event), true)                                             \
    X(void, backend_tensor_copy, (gx_tensor *from, gx_tensor *to), true)                                        \
    X(void, backend_tensor_copy_async, (void *b_from, void *b_to, gx_tensor *from, gx_tensor *to), true)        \
    X(void, backend_tensor_set_async, (void *backend, gx_tensor *t, const void *data, size_t at, size_t size), true) \
    X(void, backend_tensor_get_async, (void *backend, const gx_tensor *t, void *data, size_t at, size_t size), true) \
    X(void *, backend_buffer_get_type, (void *buffer), true)                                                    \
    X(int, backend_buffer_get_usage, (void *buffer), true)                                                      \
    X(bool, backend_buffer_is_host, (void *buffer), true)                                                       \
    X(bool, backend_buft_is_meta, (void *buft), false)                                                          \
    X(void *, backend_sched_new, (void **backends, void **bufts, int n, size_t size, bool parallel, bool offload), \
      true)                                                                                                     \
    X(void, backend_sched_free, (void *sched), true)                                                            \
    X(void, backend_sched_reserve_size, (void *sched, void *graph, size_t *sizes), false)                       \
    X(bool, backend_sched_reserve, (void *sched, void *graph), true)                                            \
    X(void, backend_sched_split_graph, (void *sched, void *graph), false)                                       \
    X(bool, backend_sched_alloc_graph, (void *sched, void *graph), true)                                        \
    X(int, backend_sched_graph_compute, (void *sched, void *graph), true)                                       \
    X(int, backend_sched_graph_compute_async, (void *sched, void *graph), true)                                 \
    X(void, backend_sched_synchronize, (void *sched), true)                                                     \
    X(void, backend_sched_reset, (void *sched), true)                                                           \
    X(void, backend_sched_set_eval_callback, (void *sched, gh_eval_callback callback, void *user), true)        \
    X(int, backend_sched_get_n_backends, (void *sched), true)                                                   \
    X(int, backend_sched_get_n_splits, (void *sched), true)                                                     \
    X(int, backend_sched_get_n_copies, (void *sched), true)                                                     \
    X(void *, backend_sched_get_backend, (void *sched, int i), true)                                            \
    X(void *, backend_sched_get_buffer_type, (void *sched, void *backend), false)                               \
    X(size_t, backend_sched_get_buffer_size, (void *sched, void *backend), true)                                \
    X(void, backend_sched_set_tensor_backend, (void *sched, gx_tensor *tensor, void *backend), true)            \
    X(void *, backend_sched_get_tensor_backend, (void *sched, gx_tensor *tensor), true)

typedef struct gh_runtime {
    const gh_ggml *lib;
    const char *unsupported;          /* why ggml's own scheduler is used; NULL: it is supported                 */
    bool asks_offload;          /* clients say whether work is offloaded: before May 2025 it always was    */
    size_t at_uid;              /* offset of a graph's unique id, by which backends recognise it; 0: none  */
#define GH_X(result, name, parameters, needed) result (*name) parameters;
    GH_RUNTIME(GH_X)
#undef GH_X
} gh_runtime;

/* The runtime of the library that an address or a backend belongs to; NULL: none.  Any thread. */
const gh_runtime *gh_runtime_find(const void *caller, void *const *bufts, int n_bufts);

/* The same for an address alone, cached by thread. */
const gh_runtime *gh_runtime_of_caller(const void *caller);

/* A backend's function that reorders nodes; NULL: it has none. */
gh_optimize gh_runtime_optimize(const gh_runtime *rt, void *backend);

/* Give a graph, or a view of one, a new unique id. */
static inline void gh_number_graph(const gh_runtime *rt, void *graph)
{
    if (rt->at_uid != 0) {
        *(uint64_t *)((char *)graph + rt->at_uid) = rt->graph_next_uid();
    }
}

#endif
