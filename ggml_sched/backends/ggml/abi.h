/* ggml_sched/backends/ggml/abi.h -- declarations of ggml's structs and functions.
 *
 * ggml's headers are not needed to build: the few structs exchanged with the library are declared here, and a library
 * is used only after probe.py has found every field where this file says it is.  Functions come from dlsym, in a table
 * of pointers; nothing here is linked.
 */
#ifndef GGML_SCHED_BACKENDS_GGML_ABI_H
#define GGML_SCHED_BACKENDS_GGML_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GX_FLAG_COMPUTE 16
#define GX_BUFFER_USAGE_WEIGHTS 1

typedef struct gx_tensor {
    int32_t type;
    void *buffer;
    int64_t ne[4];
    size_t nb[4];
    int32_t op;
    int32_t op_params[16];
    int32_t flags;
    struct gx_tensor *src[10];
    struct gx_tensor *view_src;
    size_t view_offs;
    void *data;
    char name[64];
    void *extra;
    char padding[8];
} gx_tensor;

typedef struct gx_init_params {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
} gx_init_params;

/* The first fields of ggml_cplan.  `rest` is room for fields that newer versions have after them. */
typedef struct gx_cplan {
    size_t work_size;
    uint8_t *work_data;
    int32_t n_threads;
    void *threadpool;
    void *abort_callback;
    void *abort_callback_data;
    uint64_t rest[10];
} gx_cplan;

/* ggml_threadpool_params.  `rest` is room for fields that newer versions have after these. */
typedef struct gx_threadpool_params {
    bool cpumask[512];
    int32_t n_threads;
    int32_t prio;
    uint32_t poll;
    bool strict_cpu;
    bool paused;
    char rest[64];
} gx_threadpool_params;

/* ggml_custom_op_params: what a CUSTOM node keeps in its op_params. */
typedef struct gx_custom {
    void (*fun)(gx_tensor *dst, int ith, int nth, void *user);
    int32_t n_tasks;
    void *user;
} gx_custom;

/* ggml's functions, each under its name without "ggml_".  Those from graph_plan on are in libggml-cpu; they are NULL
 * where the library lacks them. */
typedef struct gx_api {
    void *(*init)(gx_init_params);
    void (*free)(void *ctx);
    void *(*new_graph_custom)(void *ctx, size_t size, bool grads);
    size_t (*graph_overhead_custom)(size_t size, bool grads);
    void (*graph_add_node)(void *graph, gx_tensor *node);
    void *(*backend_dev_init)(void *dev, const char *params);
    void (*backend_free)(void *backend);
    int (*backend_graph_compute)(void *backend, void *graph);
    bool (*backend_dev_supports_op)(void *dev, const gx_tensor *node);
    void *(*backend_buft_alloc_buffer)(void *buft, size_t size);
    size_t (*backend_buft_get_alloc_size)(void *buft, const gx_tensor *tensor);
    void *(*backend_buffer_get_base)(void *buffer);
    void (*backend_buffer_free)(void *buffer);
    void (*backend_buffer_set_usage)(void *buffer, int usage);
    int (*backend_buffer_init_tensor)(void *buffer, gx_tensor *tensor);
    int (*backend_tensor_alloc)(void *buffer, gx_tensor *tensor, void *address);
    void (*backend_tensor_set)(gx_tensor *tensor, const void *data, size_t offset, size_t size);
    void (*backend_tensor_get)(const gx_tensor *tensor, void *data, size_t offset, size_t size);
    void *(*backend_cpu_buffer_from_ptr)(void *address, size_t size);

    gx_cplan (*graph_plan)(const void *graph, int n_threads, void *threadpool);
    int (*graph_compute)(void *graph, gx_cplan *plan);
    void *(*threadpool_new)(gx_threadpool_params *params);
    void (*threadpool_free)(void *threadpool);
    gx_threadpool_params (*threadpool_params_default)(int n_threads);
} gx_api;

/* The offset in gx_api of the pointer to the function ggml_NAME, so that a loop can fill gx_api. */
typedef struct gx_function {
    const char *name;
    size_t offset;
} gx_function;

#define GX_F(name) {#name, offsetof(gx_api, name)}
static const gx_function gx_functions[] = {
    GX_F(init), GX_F(free), GX_F(new_graph_custom), GX_F(graph_overhead_custom), GX_F(graph_add_node),
    GX_F(backend_dev_init), GX_F(backend_free), GX_F(backend_graph_compute), GX_F(backend_dev_supports_op),
    GX_F(backend_buft_alloc_buffer), GX_F(backend_buft_get_alloc_size), GX_F(backend_buffer_get_base),
    GX_F(backend_buffer_free), GX_F(backend_buffer_set_usage), GX_F(backend_buffer_init_tensor),
    GX_F(backend_tensor_alloc), GX_F(backend_tensor_set), GX_F(backend_tensor_get), GX_F(backend_cpu_buffer_from_ptr),
    GX_F(graph_plan), GX_F(graph_compute), GX_F(threadpool_new), GX_F(threadpool_free),
    GX_F(threadpool_params_default),
};
#undef GX_F
#define GX_N_FUNCTIONS ((int)(sizeof gx_functions / sizeof *gx_functions))

/* A log callback that drops its messages, so that ggml prints nothing. */
static inline void gx_quiet(int level, const char *text, void *user)
{
    (void)level;
    (void)text;
    (void)user;
}

#endif
