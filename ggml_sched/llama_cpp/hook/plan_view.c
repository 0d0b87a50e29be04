/* ggml_sched/llama_cpp/hook/plan_view.c -- the last plan of a cache, for Python.  See plan_view.h.
 *
 * The client may have freed the tensors of an entry, so nothing here follows a pointer to one: shapes come from the
 * signature's descriptors, names from the plan.
 */
#include "plan_view.h"

/* Build view->own_graph for an entry that reuses the plan of a larger graph: that graph with the entry's shapes. */
static bool build_smaller(const gh_plan_entry *e, gh_plan_view *view)
{
    const gh_plan *p = e->plan;
    const gs_graph_arrays *from = &p->arrays;
    gs_graph_size size = p->size;
    gs_graph_arrays to;
    gs_error error;
    size.n_deps = from->dep_begin != NULL ? from->dep_begin[p->n_all] : 0;
    if (gh_api->graph_new(&size, &to, &view->own_graph, &error) != GS_OK) {
        return false;
    }
    gh_copy(to.layout, from->layout, p->n_all, sizeof *to.layout);
    gh_copy(to.view_src, from->view_src, p->n_all, sizeof *to.view_src);
    gh_copy(to.view_offs, from->view_offs, p->n_all, sizeof *to.view_offs);
    gh_copy(to.flags, from->flags, p->n_all, sizeof *to.flags);
    gh_copy(to.src_begin, from->src_begin, (int64_t)p->n_all + 1, sizeof *to.src_begin);
    gh_copy(to.src, from->src, size.n_src, sizeof *to.src);
    gh_copy(to.slot, from->slot, size.n_src, sizeof *to.slot);
    memset(to.param_begin, 0, ((size_t)p->n_all + 1) * sizeof *to.param_begin);
    gh_copy(to.node, from->node, size.n_nodes, sizeof *to.node);
    gh_copy(to.leaf, from->leaf, size.n_leafs, sizeof *to.leaf);
    if (size.n_deps > 0) {
        gh_copy(to.dep_begin, from->dep_begin, (int64_t)p->n_all + 1, sizeof *to.dep_begin);
        gh_copy(to.dep, from->dep, size.n_deps, sizeof *to.dep);
    }
    for (int32_t id = 0; id < p->n; id++) {
        const gh_descriptor *d = gh_descriptor_at(&e->signature, id);
        if (p->role[id] == GH_ROLE_ALIAS) {
            continue;
        }
        memcpy(to.layout[id].ne, d->shape, sizeof to.layout[id].ne);
        memcpy(to.layout[id].nb, d->shape + 4, sizeof to.layout[id].nb);
        to.layout[id].nbytes = d->nbytes;
        to.view_offs[id] = to.view_src[id] >= 0 && d->nbytes > 0 ? (int64_t)d->view_offs : 0;
    }
    view->arrays = to;
    return gh_api->graph_finish(view->own_graph, &error) == GS_OK;
}

/* Fill view->nbytes for the smaller graph: each tensor's own bytes; in buffer types that pad tensors the bytes planned
 * for the larger graph, because a query of such a type needs the tensor itself. */
static bool measure_smaller(const gh_plan_cache *c, const gh_plan *p, gh_plan_view *view)
{
    int64_t *nbytes = malloc((size_t)p->n_all * (size_t)c->n_backends * sizeof *nbytes + 1);
    for (int b = 0; nbytes != NULL && b < c->n_backends; b++) {
        for (int32_t id = 0; id < p->n_all; id++) {
            const int64_t at = (int64_t)b * p->n_all + id;
            nbytes[at] = gh_has_alloc_size(c->lib, c->key.type[b].buft) ? p->problem.nbytes[at]
                                                                        : view->arrays.layout[id].nbytes;
        }
    }
    view->nbytes = view->own_nbytes = nbytes;
    return nbytes != NULL;
}

/* Replay the larger graph's plan for view->own_graph, so that the view shows the smaller graph's own lifetimes and
 * bytes at the planned offsets. */
static bool replay_smaller(const gh_plan_cache *c, const gh_plan *p, gh_plan_view *view)
{
    gs_backend_info info[GH_MAX_BACKENDS];
    gs_problem q = gh_planner_problem(c, p, info);
    gs_error error;
    int serves = 0;
    q.nbytes = view->nbytes;
    if (gh_api->plan_replay(p->plan, p->graph, view->own_graph, &q, &view->own_plan, &serves, &error) != GS_OK
        || !serves) {
        return false;
    }
    gh_api->plan_view(view->own_plan, &view->plan);
    return true;
}

bool gh_plan_view_open(const gh_plan_cache *c, gh_plan_view *view)
{
    const gh_plan_entry *e = gh_plan_cache_last(c);
    memset(view, 0, sizeof *view);
    if (e == NULL) {
        return false;
    }
    view->of = e->plan;
    view->arrays = e->plan->arrays;
    view->plan = e->plan->view;
    view->nbytes = e->plan->problem.nbytes;
    if (e->reuses && (!build_smaller(e, view) || !measure_smaller(c, e->plan, view)
                      || !replay_smaller(c, e->plan, view))) {
        gh_plan_view_close(view);
        return false;
    }
    return true;
}

void gh_plan_view_close(gh_plan_view *view)
{
    gh_api->plan_free(view->own_plan);
    gh_api->graph_free(view->own_graph);
    free(view->own_nbytes);
    view->own_plan = NULL;
    view->own_graph = NULL;
    view->own_nbytes = NULL;
}
