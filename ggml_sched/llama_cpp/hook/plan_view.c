/* ggml_sched/llama_cpp/hook/plan_view.c -- plans of a cache, for Python.  See plan_view.h.
 *
 * The client may have freed the tensors of an entry, so nothing here follows a pointer to one: shapes come from the
 * signature's descriptors, names from the plan.
 */
#include "plan_view.h"

/* The layout of an id in the planner's graph of an entry. */
static gs_layout layout_of(const gh_plan_cache *c, const gh_plan_entry *e, int32_t id)
{
    const gh_plan *p = e->plan;
    const int32_t like = gh_layout_id(p, id);
    gs_layout layout = gh_no_bytes;
    if (like >= 0 && (id >= p->n || p->role[id] != GH_ROLE_ALIAS)) {
        const gh_descriptor *d = gh_entry_descriptor(e, like);
        memcpy(layout.ne, d->shape, sizeof layout.ne);
        memcpy(layout.nb, d->shape + 4, sizeof layout.nb);
        layout.type = gh_type(c->lib, d->type);
        layout.nbytes = d->nbytes;
    }
    layout.op = p->op[id];
    return layout;
}

/* Where a view begins in its root, in bytes.  An entry that reuses a larger graph's plan has other view offsets than
 * it. */
static int64_t view_offset(const gh_plan_entry *e, int32_t id)
{
    if (e->plan->arrays.view_src[id] < 0) {
        return 0;
    }
    if (e->reuses) {
        const gh_descriptor *d = gh_entry_descriptor(e, id);
        return d->nbytes > 0 ? (int64_t)d->view_offs : 0;
    }
    return e->plan->view.view_offs[id];
}

/* Build view->graph: the planner's graph of an entry, from the wiring that the plan keeps and the entry's layouts. */
static bool build_graph(const gh_plan_cache *c, const gh_plan_entry *e, gh_plan_view *view)
{
    const gh_plan *p = e->plan;
    const gs_graph_arrays *from = &p->arrays;
    gs_graph_size size = p->size;
    gs_graph_arrays to;
    gs_error error;
    size.n_deps = from->dep_begin != NULL ? from->dep_begin[p->n_all] : 0;
    if (gh_api->graph_new(&size, &to, &view->graph, &error) != GS_OK) {
        return false;
    }
    for (int32_t id = 0; id < p->n_all; id++) {
        to.layout[id] = layout_of(c, e, id);
        to.view_offs[id] = view_offset(e, id);
    }
    gh_copy(to.view_src, from->view_src, p->n_all, sizeof *to.view_src);
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
    view->arrays = to;
    return gh_api->graph_finish(view->graph, &error) == GS_OK;
}

/* Fill view->nbytes for an entry that reuses a larger graph's plan: each tensor's own bytes; in buffer types that pad
 * tensors the bytes planned for the larger graph, because asking such a type needs the tensor itself. */
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

/* For an entry that reuses a larger graph's plan: replay that plan for view->graph, so that the view shows the entry's
 * own lifetimes and bytes at the planned offsets. */
static bool replay_smaller(const gh_plan_cache *c, const gh_plan *p, gh_plan_view *view)
{
    gs_backend_info info[GH_MAX_BACKENDS];
    gs_problem q = gh_planner_problem(c, p, info);
    gs_error error;
    int serves = 0;
    q.nbytes = view->nbytes;
    if (gh_api->plan_replay(p->plan, p->graph, view->graph, &q, &view->own_plan, &serves, &error) != GS_OK
        || !serves) {
        return false;
    }
    gh_api->plan_view(view->own_plan, &view->plan);
    return true;
}

bool gh_plan_view_open(const gh_plan_cache *c, const gh_plan_entry *e, gh_plan_view *view)
{
    memset(view, 0, sizeof *view);
    if (e == NULL) {
        return false;
    }
    view->of = e->plan;
    view->plan = e->plan->view;
    view->nbytes = e->plan->problem.nbytes;
    if (!build_graph(c, e, view)
        || (e->reuses && (!measure_smaller(c, e->plan, view) || !replay_smaller(c, e->plan, view)))) {
        gh_plan_view_close(view);
        return false;
    }
    return true;
}

void gh_plan_view_close(gh_plan_view *view)
{
    gh_api->plan_free(view->own_plan);
    gh_api->graph_free(view->graph);
    free(view->own_nbytes);
    view->own_plan = NULL;
    view->graph = NULL;
    view->own_nbytes = NULL;
}
