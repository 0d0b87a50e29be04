/* ggml_sched/llama_cpp/hook/plan_view.h -- what _hook.pyx shows to Python of the plan that a cache used last. */
#ifndef GGML_SCHED_LLAMA_CPP_HOOK_PLAN_VIEW_H
#define GGML_SCHED_LLAMA_CPP_HOOK_PLAN_VIEW_H

#include "plan_cache.h"

typedef struct gh_arena_view {
    char name[64];
    int64_t alignment;
    int64_t max_size;           /* 0: no bound                          */
    int64_t nbytes;             /* of the buffers that are held now     */
    const uint64_t *inplace;    /* [GS_N_OPS] as in gs_backend_info     */
} gh_arena_view;

typedef struct gh_plan_view {
    int n_backends;
    bool is_scheduler;
    bool has_deps;
    gs_graph_size size;
    gs_graph_arrays arrays;
    gs_plan plan;
    const gh_plan *named;       /* the plan that has the tensors' names */
    const gh_problem *problem;
    const int64_t *nbytes;      /* [n_backends][n_tensors]              */
    const unsigned char *reads; /* [n_backends][n_backends]             */
    gh_arena_view arena[GH_MAX_BACKENDS];
    /* Made for the view where the entry reuses a larger graph's plan, and freed with it; else NULL: */
    gs_api_graph *own_graph;
    gs_api_plan *own_plan;
    int64_t *own_nbytes;
} gh_plan_view;

/* Fill a view of the plan that a locked cache used last.  False: there is none.  The view points into the cache: it
 * must be closed before the cache is unlocked. */
bool gh_plan_view_open(const gh_plan_cache *c, gh_plan_view *view);
void gh_plan_view_close(gh_plan_view *view);

static inline const char *gh_plan_view_name(const gh_plan_view *view, int32_t id)
{
    return gh_plan_name(view->named, id);
}

#endif
