/* ggml_sched/llama_cpp/ggml/library.h -- the ggml that a client has loaded: functions, numbers, offsets of fields.
 *
 * The hook is neither linked with ggml nor compiled with its headers.  A library is found by an address inside of it,
 * or inside of a library that needs it: the caller's, or that of a buffer type's functions.  Its functions are looked
 * up with dlsym, and it is probed once: whether tensors are as abi.h declares them, and where a graph has its leafs.
 * The results never change and stay for the life of the process, as ggml's libraries do.
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
#define GH_USAGE_COMPUTE 2
#define GH_LOG_ERROR 4

/* Numbers of ops and types below these are mapped; others are known to ggml only. */
#define GH_N_OPS 256
#define GH_N_TYPES 256
/* The planner's number of a type t that only ggml knows: this plus t. */
#define GH_FOREIGN_TYPE 1000

#define GH_UNKNOWN (-1)      /* an offset that was not found: the function is assumed to exist */

typedef struct gh_ggml {
    const void *key;            /* an address that differs between libraries                       */
    const char *unsupported;          /* why ggml's own allocator is used; NULL: it is supported         */

    const char *(*op_name)(int op);
    const char *(*unary_op_name)(int op);
    const char *(*glu_op_name)(int op);
    const char *(*type_name)(int type);
    size_t (*type_size)(int type);
    int64_t (*blck_size)(int type);
    bool (*op_can_inplace)(int op); /* NULL where the library does not export it                       */
    size_t (*nbytes)(const gx_tensor *tensor);
    int (*graph_n_nodes)(void *graph);
    gx_tensor **(*graph_nodes)(void *graph);
    const char *(*buft_name)(void *buft);
    void *(*buft_alloc_buffer)(void *buft, size_t size);
    size_t (*buft_get_alignment)(void *buft);
    size_t (*buft_get_max_size)(void *buft);
    size_t (*buft_get_alloc_size)(void *buft, const gx_tensor *tensor);
    void *(*buffer_get_base)(void *buffer);
    size_t (*buffer_get_size)(void *buffer);
    void (*buffer_free)(void *buffer);
    void (*buffer_reset)(void *buffer);
    void (*buffer_set_usage)(void *buffer, int usage);
    int (*buffer_init_tensor)(void *buffer, gx_tensor *tensor);

    void (*log)(int level, const char *format, ...); /* NULL where the library does not export it   */

    /* ggml's own allocator, for libraries that are not supported. */
    void *(*gallocr_new_n)(void **bufts, int n);
    void (*gallocr_free)(void *galloc);
    bool (*gallocr_reserve_n)(void *galloc, void *graph, const int *node_ids, const int *leaf_ids);
    void (*gallocr_reserve_n_size)(void *galloc, void *graph, const int *node_ids, const int *leaf_ids, size_t *sizes);
    bool (*gallocr_alloc_graph)(void *galloc, void *graph);
    size_t (*gallocr_get_buffer_size)(void *galloc, int id);

    void *handle;               /* of dlopen                                                       */
    size_t at_n_leafs;          /* offset of the number of leafs in a graph                        */
    size_t at_leafs;
    int at_init_tensor;         /* offset of init_tensor in a buffer, or GH_UNKNOWN                */
    int at_alloc_size;          /* offset of get_alloc_size in a buffer type, or GH_UNKNOWN        */
    unsigned char op[GH_N_OPS]; /* GS_OP_* by ggml's number; GS_OP_UNARY and GS_OP_GLU for families */
    unsigned char unary[GH_N_OPS];
    unsigned char glu[GH_N_OPS];
    int32_t type[GH_N_TYPES];
    uint64_t inplace[GS_N_OPS]; /* by GS_OP_*: bit k: source k may be the destination              */
} gh_ggml;

/* The library that one of these addresses belongs to, else one that is loaded; NULL: none.  Any thread. */
const gh_ggml *gh_ggml_find(const void *caller, void *const *bufts, int n_bufts);

/* The planner.  The extension module sets it before a client is loaded. */
extern const gs_api *gh_api;

static inline int gh_graph_n_leafs(const gh_ggml *lib, const void *graph)
{
    return *(const int *)((const char *)graph + lib->at_n_leafs);
}

static inline gx_tensor **gh_graph_leafs(const gh_ggml *lib, const void *graph)
{
    return *(gx_tensor **const *)((const char *)graph + lib->at_leafs);
}

/* Whether an object of ggml's has the function at offset `at`, or may have it. */
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
        lib->buffer_init_tensor(buffer, t);
    }
}

/* Whether a buffer type has a get_alloc_size function.  Without it a tensor takes its own bytes. */
static inline bool gh_has_alloc_size(const gh_ggml *lib, const void *buft)
{
    return gh_has(buft, lib->at_alloc_size);
}

/* Bytes that a tensor of `own` bytes takes in buffers of a type: not less than its own. */
static inline int64_t gh_alloc_size(const gh_ggml *lib, void *buft, const gx_tensor *t, int64_t own)
{
    const int64_t asked = gh_has_alloc_size(lib, buft) ? (int64_t)lib->buft_get_alloc_size(buft, t) : own;
    return asked > own ? asked : own;
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

/* Whether the planner's number of an op depends on the sub-op. */
static inline bool gh_is_of_family(const gh_ggml *lib, int32_t op)
{
    return op >= 0 && op < GH_N_OPS && lib->op[op] >= GS_OP_UNARY;
}

static inline int32_t gh_type(const gh_ggml *lib, int32_t type)
{
    return type >= 0 && type < GH_N_TYPES ? lib->type[type] : GH_FOREIGN_TYPE + (type & 0xffff);
}

#endif
