/* ggml_sched/llama_cpp/hook/planning.c -- makes the plan of a graph that was read.  See plan_cache.h.
 *
 * Invariant: no plan lets a fused kernel overwrite what it reads (fusion.h), where its tensors finally lie in the
 * pools.
 */
#include "plan_cache.h"

#include <stdio.h>

#define GH_MAX_ROUNDS 16    /* most plans made of a graph, each with more alloc dependencies               */
#define GH_MAX_RAISES 64    /* most attempts at one of these plans, each with a higher limit for one buffer */

/* -- the planner's arguments --------------------------------------------------------------------------------------- */

gs_problem gh_planner_problem(const gh_plan_cache *c, const gh_plan *p, gs_backend_info *info)
{
    const gh_problem *own = &p->problem;
    gs_problem q;
    memset(&q, 0, sizeof q);
    q.policy = c->policy;
    q.n_backends = c->n_backends;
    q.backends = info;
    q.reads = c->key.reads;
    for (int b = 0; b < c->n_backends; b++) {
        info[b].name = c->name[b];
        info[b].alignment = (int64_t)(c->key.type[b].alignment > 0 ? c->key.type[b].alignment : 1);
        info[b].max_buffer = p->max_size[b];
        info[b].inplace = c->lib->inplace;
    }
    if (own->n == 0) {
        return q;
    }
    q.resident = own->resident;
    q.assigned = own->some_assigned ? own->assigned : NULL;
    q.nbytes = own->some_larger ? own->nbytes : NULL;
    if (own->has_answers) {
        q.usage = own->usage;
        q.n_buffers = own->n_buffers;
        q.buffer = own->buffer;
        q.reads_buffer = own->reads_buffer;
        q.supports = own->supports;
        q.offloads = own->offloads;
    }
    return q;
}

/* Build p->graph, the planner's graph of the graph that was read, with p's alloc dependencies.  If p shares another
 * plan's graph, that graph is not changed: p gets a new one. */
static int build_graph(gh_plan_cache *c, gh_plan *p, gs_error *error)
{
    if (p->shares_graph) {
        p->graph = NULL;
        p->shares_graph = false;
    }
    /* The input flag is for placement among several backends.  On one it is left out, so that an input's memory is free
     * for reuse after its last reader. */
    return gh_build_planner_graph(&c->reader, c->key.is_scheduler && c->n_backends > 1, &p->deps, &p->graph,
                                  &p->arrays, error);
}

/* -- new plans ----------------------------------------------------------------------------------------------------- */

/* Make one plan that succeeds, for the alloc dependencies so far.  The planner refuses a tensor larger than a backend's
 * largest buffer: the limit is then raised to that tensor's size and planning starts again, because ggml, too, gives
 * such a tensor a buffer of its own size. */
static int plan_once(gh_plan_cache *c, gh_plan *p, gs_error *error)
{
    gs_backend_info info[GH_MAX_BACKENDS];
    int status = GS_OUT_OF_MEMORY;
    for (int i = 0; i < GH_MAX_RAISES && status == GS_OUT_OF_MEMORY; i++) {
        gs_problem q = gh_planner_problem(c, p, info);
        memset(error, 0, sizeof *error);
        status = gh_api->plan_new(p->graph, &q, &p->plan, error);
        if (status == GS_OUT_OF_MEMORY) {
            const int32_t b = error->backend;
            if (b < 0 || b >= c->n_backends || !gh_raise_max_size(&info[b], error->value)) {
                break;
            }
            p->max_size[b] = info[b].max_buffer;
        }
    }
    return status;
}

/* Fill the locations and the hazards of a new plan.  *hazard becomes the number of the first hazard by which a fused
 * kernel would overwrite what it reads; -1: there is none. */
static int inspect(gh_plan_cache *c, gh_plan *p, int32_t *hazard)
{
    gh_api->plan_view(p->plan, &p->view);
    if (!gh_plan_locate(c, p, &c->reader) || !gh_fusion_find_hazards(&c->reader, &p->arrays, &p->hazards)) {
        return GS_NO_HOST_MEMORY;
    }
    *hazard = gh_plan_find_hazard(p, NULL, c->lib, p->places.offset, p->view.size, 0);
    return GS_OK;
}

/* Add an alloc dependency for hazard number `hazard`, and for each later hazard by which a fused kernel would overwrite
 * what it reads: the source then keeps its memory until the last fused node is done.  Returns how many dependencies
 * were new, or GS_NO_HOST_MEMORY, which is negative. */
static int32_t add_deps(const gh_plan_cache *c, gh_plan *p, int32_t hazard)
{
    const int32_t n = p->deps.n;
    while (hazard >= 0) {
        if (!gh_alloc_deps_add(&p->deps, p->hazards.hazard[hazard].last, p->hazards.hazard[hazard].source)) {
            return GS_NO_HOST_MEMORY;
        }
        hazard = gh_plan_find_hazard(p, NULL, c->lib, p->places.offset, p->view.size, hazard + 1);
    }
    return p->deps.n - n;
}

static void drop_plan(gh_plan *p)
{
    gh_api->plan_free(p->plan);
    p->plan = NULL;
}

/* Plan the graph of e, add alloc dependencies where a fused kernel would overwrite what it reads, and plan again until
 * none does. */
static int plan_until_sound(gh_plan_cache *c, gh_plan_entry *e, gs_error *error)
{
    gh_plan *p = e->plan;
    for (int round = 0; round < GH_MAX_ROUNDS; round++) {
        int32_t hazard, added;
        int status = plan_once(c, p, error);
        if (status != GS_OK) {
            return status;
        }
        status = inspect(c, p, &hazard);
        added = status == GS_OK ? add_deps(c, p, hazard) : status;
        if (added == 0) {
            return GS_OK;
        }
        drop_plan(p);
        status = added > 0 ? build_graph(c, p, error) : GS_NO_HOST_MEMORY;
        if (status != GS_OK) {
            return status;
        }
    }
    snprintf(error->message, sizeof error->message, "%d results would overwrite what fused nodes read", p->deps.n);
    return GS_OUT_OF_MEMORY;
}

/* Build the planner's graph of e->plan, unless that plan shares another plan's graph, and fill the problem of
 * e->plan. */
static int prepare(gh_plan_cache *c, gh_plan_entry *e, gs_error *error)
{
    const int status = e->plan->shares_graph ? GS_OK : build_graph(c, e->plan, error);
    for (int b = 0; b < c->n_backends; b++) {
        e->plan->max_size[b] = gh_max_buffer(c->key.type[b].max_size);
    }
    return status == GS_OK ? c->level->collect(c->owner, e, &e->plan->problem, error) : status;
}

/* Make two plans of a graph that the client reserves: with the bytes of gathered rows that gh_size_hints_raise_rows has
 * raised, and without.  Graphs of recurrent models gather any number of states, so the first plan serves more graphs;
 * it is used if it makes no pool larger than the second does. */
static int plan_with_rows(gh_plan_cache *c, gh_plan_entry *e, gs_error *error)
{
    gh_plan *raised = e->plan;
    bool stays = plan_until_sound(c, e, error) == GS_OK;
    int status = GS_NO_HOST_MEMORY;
    e->plan = gh_plan_new();
    if (e->plan != NULL && gh_plan_take_graph(e->plan, &c->reader)) {
        if (raised->deps.n == 0) {
            e->plan->graph = raised->graph;
            e->plan->arrays = raised->arrays;
            e->plan->shares_graph = true;
        }
        status = prepare(c, e, error);
        status = status == GS_OK ? plan_until_sound(c, e, error) : status;
    }
    for (int pool = 0; status == GS_OK && pool < c->n_pools; pool++) {
        stays = stays && gh_plan_nbytes(raised, pool) <= gh_plan_nbytes(e->plan, pool);
    }
    if (status == GS_OK && stays) {
        GH_SWAP(gh_plan *, e->plan, raised);
    } else if (e->plan != NULL) {
        GH_SWAP(bool, e->plan->shares_graph, raised->shares_graph);
    }
    gh_plan_drop(raised);
    return status;
}

int gh_plan_graph(gh_plan_cache *c, gh_plan_entry *e, int flags, gs_error *error)
{
    int status = prepare(c, e, error);
    if (status != GS_OK) {
        return status;
    }
    if (flags & GH_HINTS) {
        gh_size_hints_raise(c, e);
    }
    status = (flags & GH_PIN) != 0 && gh_size_hints_raise_rows(e) ? plan_with_rows(c, e, error)
                                                                   : plan_until_sound(c, e, error);
    if (status == GS_OK) {
        status = gh_api->graph_keep_wiring(e->plan->graph, &e->plan->arrays, error);
    }
    if (status == GS_OK && !gh_plan_take_names(e->plan, &c->reader)) {
        status = GS_NO_HOST_MEMORY;
    }
    if (status == GS_OK) {
        gh_count_one(GH_COUNT_PLANNED);
    }
    return status;
}
