/* ggml_sched/llama_cpp/alloc.h -- level A: what a client's ggml calls ggml_gallocr, and what we say about it.
 *
 * The exported functions carry the names of ggml-alloc.h and take the place of the library's own; see alloc.c.
 */
#ifndef GGML_SCHED_LLAMA_CPP_ALLOC_H
#define GGML_SCHED_LLAMA_CPP_ALLOC_H

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

/* -- what is counted, for all allocators of the process ------------------------------------------------------- */

enum gh_count {
    GH_COUNT_RESERVE,       /* calls                                                */
    GH_COUNT_RESERVE_NS,    /* nanoseconds inside them                              */
    GH_COUNT_ALLOC,
    GH_COUNT_ALLOC_NS,
    GH_COUNT_SPLIT,         /* of schedulers: graphs split ...                      */
    GH_COUNT_SPLIT_NS,
    GH_COUNT_SCHED_RESERVE, /* ... reserved ...                                     */
    GH_COUNT_SCHED_RESERVE_NS,
    GH_COUNT_SCHED_ALLOC,   /* ... and allocated                                    */
    GH_COUNT_SCHED_ALLOC_NS,
    GH_COUNT_NEW,           /* allocators and schedulers made                       */
    GH_COUNT_SAME,          /* graphs that were the same, byte for byte             */
    GH_COUNT_EQUAL,         /* ... that were equal, at other addresses              */
    GH_COUNT_REPLAYED,      /* ... that a reserved plan served                      */
    GH_COUNT_PLANNED,       /* ... that were planned                                */
    GH_COUNT_GROWN,         /* times that buffers were asked for                    */
    GH_COUNT_FAILED,        /* calls that failed                                    */
    GH_COUNT_STOCK,         /* allocators that are ggml's own                       */
    GH_N_COUNTS
};

extern atomic_llong gh_counts[GH_N_COUNTS];

static inline void gh_count_one(enum gh_count what)
{
    atomic_fetch_add_explicit(&gh_counts[what], 1, memory_order_relaxed);
}

/* From now on new allocators are ggml's own, called through us and counted. */
extern atomic_bool gh_pass_through;

static inline int64_t gh_count_of(int i)
{
    return atomic_load(&gh_counts[i]);
}

static inline void gh_clear_counts(void)
{
    for (int i = 0; i < GH_N_COUNTS; i++) {
        atomic_store(&gh_counts[i], 0);
    }
}

static inline void gh_set_pass_through(bool on)
{
    atomic_store(&gh_pass_through, on);
}

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

/* Keep why a call failed, and count it; false.  Any thread. */
bool gh_failed(const gs_error *error);

/* Keep why a library is not understood. */
void gh_note_not_understood(const char *why);

/* Why the last failing call of the process failed; false: none has.  Any thread. */
bool gh_last_error(gs_error *error);

/* Why the first library that we do not understand is not understood, or NULL. */
const char *gh_not_understood(void);

#endif
