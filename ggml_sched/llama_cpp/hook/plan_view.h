/* ggml_sched/llama_cpp/hook/plan_view.h -- the last plan of a cache as Python sees it. */
#ifndef GGML_SCHED_LLAMA_CPP_HOOK_PLAN_VIEW_H
#define GGML_SCHED_LLAMA_CPP_HOOK_PLAN_VIEW_H

#include "plan_cache.h"

typedef struct gh_arena_view {
    char name[64];
    int64_t alignment;
    int64_t max_size;           /* 0: no bound                          */
    int64_t nbytes;             /* of the buffers that there are        */
    const uint64_t *inplace;    /* [GS_N_OPS] as in gs_backend_info     */
} gh_arena_view;

typedef struct gh_plan_view {
    int n_backends;
    bool is_scheduler;
    bool has_deps;
    gs_graph_size size;
    gs_graph_arrays arrays;
    gs_plan plan;
    const gh_plan *named;       /* has the tensors' names               */
    const gh_problem *problem;
    const int64_t *nbytes;      /* [n_backends][n_tensors]              */
    const unsigned char *reads; /* [n_backends][n_backends]             */
    gh_arena_view arena[GH_MAX_BACKENDS];
    /* Owned: */
    gs_api_graph *own_graph;
    gs_api_plan *own_plan;
    int64_t *own_nbytes;
} gh_plan_view;

/* The plan of the graph that a locked cache was used for last.  False: there is none.  It is borrowed: valid until the
 * cache is unlocked, and to be closed before that. */
bool gh_plan_view_open(const gh_plan_cache *c, gh_plan_view *view);
void gh_plan_view_close(gh_plan_view *view);

static inline const char *gh_plan_view_name(const gh_plan_view *view, int32_t id)
{
    return gh_plan_name(view->named, id);
}

#endif
