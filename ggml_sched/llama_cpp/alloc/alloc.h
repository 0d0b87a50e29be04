/* ggml_sched/llama_cpp/alloc/alloc.h -- level A: what a client's ggml calls ggml_gallocr, and what we say about it.
 *
 * The exported functions carry the names of ggml-alloc.h and take the place of the library's own; see alloc.c.
 */
#ifndef GGML_SCHED_LLAMA_CPP_ALLOC_ALLOC_H
#define GGML_SCHED_LLAMA_CPP_ALLOC_ALLOC_H

#include "counts.h"
#include "known.h"

#define GH_EXPORT __attribute__((visibility("default")))

typedef struct gh_gallocr gh_gallocr;

GH_EXPORT gh_gallocr *ggml_gallocr_new(void *buft);
GH_EXPORT gh_gallocr *ggml_gallocr_new_n(void **bufts, int n);
GH_EXPORT void ggml_gallocr_free(gh_gallocr *a);
GH_EXPORT bool ggml_gallocr_reserve(gh_gallocr *a, void *graph);
GH_EXPORT bool ggml_gallocr_reserve_n(gh_gallocr *a, void *graph, const int *node_ids, const int *leaf_ids);
GH_EXPORT void ggml_gallocr_reserve_n_size(gh_gallocr *a, void *graph, const int *node_ids, const int *leaf_ids,
                                           size_t *sizes);
GH_EXPORT bool ggml_gallocr_alloc_graph(gh_gallocr *a, void *graph);
GH_EXPORT size_t ggml_gallocr_get_buffer_size(gh_gallocr *a, int id);

/* -- plans ---------------------------------------------------------------------------------------------------- */

/* What the allocator number i (in order of creation) was asked for last: a reference to its graph and plan, or NULL
 * where it has none; its buffer types' names, alignments and buffers go to *arenas, which the caller frees, as many
 * as known->n_arenas.  *n_allocators says how many allocators there are.  Any thread. */
typedef struct gh_arena_facts {
    char name[64];
    int64_t alignment;
    int64_t max_size;           /* 0: no bound                          */
    int64_t nbytes;
    const uint64_t *inplace;    /* [GS_N_OPS] as in gs_backend_info     */
} gh_arena_facts;

gh_known *gh_last_known(int i, int *n_allocators, gh_arena_facts **arenas);

#endif
