/* ggml_sched/llama_cpp/hook/plan_view.h -- what _hook.pyx shows to Python of the plans of a cache. */
#ifndef GGML_SCHED_LLAMA_CPP_HOOK_PLAN_VIEW_H
#define GGML_SCHED_LLAMA_CPP_HOOK_PLAN_VIEW_H

#include "plan_cache.h"

typedef struct gh_plan_view {
    const gh_plan *of;          /* whose names, problem and size are shown */
    gs_graph_arrays arrays;
    gs_plan plan;
    const int64_t *nbytes;      /* [n_backends][n_tensors] bytes that each tensor takes */
    gs_api_graph *graph;        /* made for the view, and freed with it; its arrays are `arrays` */
    /* Made for the view where the entry reuses a larger graph's plan, and freed with it; else NULL: */
    gs_api_plan *own_plan;
    int64_t *own_nbytes;
} gh_plan_view;

/* Fill a view of the plan of an entry of a locked cache.  False: the entry is NULL, or memory is short.  The view
 * points into the cache: it must be closed before the cache is unlocked. */
bool gh_plan_view_open(const gh_plan_cache *c, const gh_plan_entry *e, gh_plan_view *view);
void gh_plan_view_close(gh_plan_view *view);

#endif
