/* ggml_sched/llama_cpp/hook/planning.c -- the plan of a graph that was read.  See plan_cache.h.
 *
 * In this order: the plan of an equal graph; the replayed plan of a larger one; a new plan.
 * Invariant: no plan lets a fused kernel overwrite what it reads (fusion.h), wherever its ids lie in the pools.
 */
#include "plan_cache.h"

#include <stdio.h>

#define GH_MAX_ROUNDS 16    /* plans of one graph, each with more alloc dependencies                       */
#define GH_MAX_RAISES 64    /* plans of one graph, each with a larger buffer                               */

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

/* The planner's graph of what was read, with the plan's alloc dependencies. */
static int build_graph(gh_plan_cache *c, gh_plan *p, gs_error *error)
{
    /* On one backend inputs need no placement: their memory is free after the last reader. */
    return gh_build_planner_graph(&c->reader, c->key.is_scheduler && c->n_backends > 1, &p->deps, &p->graph,
                                  &p->arrays, error);
}

/* -- new plans ----------------------------------------------------------------------------------------------------- */

/* Plan once.  A tensor that is larger than the largest buffer gets a buffer of its own size. */
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

/* Find out where everything lies, and the first hazard from which a fused kernel would overwrite what it reads:
 * *conflict is -1 where there is none. */
static int inspect(gh_plan_cache *c, gh_plan *p, int32_t *conflict)
{
    gh_api->plan_view(p->plan, &p->view);
    if (!gh_plan_locate(c, p, &c->reader) || !gh_fusion_find_hazards(&c->reader, &p->arrays, &p->hazards)) {
        return GS_NO_HOST_MEMORY;
    }
    *conflict = gh_plan_find_conflict(p, NULL, c->lib, NULL, p->view.size, 0);
    return GS_OK;
}

/* Add an alloc dependency for each conflict from this one on; how many, or GS_NO_HOST_MEMORY. */
static int32_t add_deps(const gh_plan_cache *c, gh_plan *p, int32_t conflict)
{
    const int32_t n = p->deps.n;
    while (conflict >= 0) {
        if (!gh_alloc_deps_add(&p->deps, p->hazards.hazard[conflict].last, p->hazards.hazard[conflict].source)) {
            return GS_NO_HOST_MEMORY;
        }
        conflict = gh_plan_find_conflict(p, NULL, c->lib, NULL, p->view.size, conflict + 1);
    }
    return p->deps.n - n;
}

static void drop_plan(gh_plan *p)
{
    gh_api->plan_free(p->plan);
    p->plan = NULL;
}

/* Plan until no fused kernel overwrites what it reads. */
static int plan_until_sound(gh_plan_cache *c, gh_plan_entry *e, gs_error *error)
{
    gh_plan *p = e->plan;
    for (int round = 0; round < GH_MAX_ROUNDS; round++) {
        int32_t conflict, added;
        int status = plan_once(c, p, error);
        if (status != GS_OK) {
            return status;
        }
        status = inspect(c, p, &conflict);
        added = status == GS_OK ? add_deps(c, p, conflict) : status;
        if (added == 0) {
            return gh_plan_take_names(p, &c->reader) ? GS_OK : GS_NO_HOST_MEMORY;
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

/* -- plans of other graphs ----------------------------------------------------------------------------------------- */

static bool same_deps(const gh_alloc_deps *a, const gh_alloc_deps *b)
{
    return a->n == b->n && gh_same(a->dep, b->dep, a->n, sizeof *a->dep);
}

/* Give a plan's graph the alloc dependencies of another's.  GS_BAD_ARGUMENT: they do not fit this graph, which has
 * none then. */
static int take_deps(gh_plan_cache *c, gh_plan *p, const gh_alloc_deps *deps, gs_error *error)
{
    int status;
    if (same_deps(&p->deps, deps)) {
        return GS_OK;
    }
    if (!gh_make_room(&p->deps.dep, sizeof *deps->dep, &p->deps.room, deps->n)) {
        return GS_NO_HOST_MEMORY;
    }
    gh_copy(p->deps.dep, deps->dep, deps->n, sizeof *deps->dep);
    p->deps.n = deps->n;
    status = build_graph(c, p, error);
    if (status == GS_OK || status == GS_NO_HOST_MEMORY) {
        return status;
    }
    p->deps.n = 0;
    return build_graph(c, p, error) == GS_OK ? GS_BAD_ARGUMENT : GS_NO_HOST_MEMORY;
}

static bool same_roles(const gh_plan *a, const gh_plan *b)
{
    return a->n == b->n && a->n_all == b->n_all && a->n_nodes == b->n_nodes && gh_same(a->role, b->role, a->n, 1)
        && gh_same(a->node, b->node, a->n, sizeof *a->node);
}

/* Let e have the plan of entry number i, whose graph is equal, and evict that entry. */
static void take_plan(gh_plan_cache *c, gh_plan_entry *e, int i)
{
    gh_plan_entry *other = c->entry[i];
    gh_plan_drop(e->plan);
    e->plan = other->plan;
    e->plan->refs++;
    e->is_pinned |= other->is_pinned;
    gh_plan_cache_evict(c, i);
}

static bool has_bytes_of(const gh_problem *planned, const gh_problem *now)
{
    for (int64_t i = 0; i < (int64_t)now->n * now->n_backends; i++) {
        if (now->nbytes[i] > planned->nbytes[i]) {
            return false;
        }
    }
    return true;
}

/* Replay the plan of o for the graph of e; whether it serves. */
static bool replay(gh_plan_cache *c, gh_plan_entry *e, const gh_plan *o, gs_error *error)
{
    gh_plan *p = e->plan;
    gs_backend_info info[GH_MAX_BACKENDS];
    gs_problem q;
    int32_t conflict;
    int serves = 0;
    memcpy(p->max_size, o->max_size, sizeof p->max_size);
    q = gh_planner_problem(c, p, info);
    if (gh_api->plan_replay(o->plan, o->graph, p->graph, &q, &p->plan, &serves, error) != GS_OK || !serves) {
        return false;
    }
    p->is_replayed = inspect(c, p, &conflict) == GS_OK && conflict < 0 && gh_plan_take_names(p, &c->reader);
    if (!p->is_replayed) {
        drop_plan(p);
    }
    return p->is_replayed;
}

/* Whether the plan of entry `other` may serve: in the first pass an equal graph, in the second a smaller one. */
static bool may_share(const gh_plan_cache *c, const gh_plan_entry *other, const gh_plan *p, int flags, int pass)
{
    const gh_plan *o = other->plan;
    return !other->reuses && gh_problem_same(&o->problem, &p->problem)
        && (!o->is_replayed || (pass == 0 && (flags & GH_REUSE) && gh_pools_fit(c, o)));
}

/* The plan of an equal graph, or of a larger one: e->plan->plan stays NULL where there is none. */
static int find_plan(gh_plan_cache *c, gh_plan_entry *e, int flags, gs_error *error)
{
    gh_plan *p = e->plan;
    for (int pass = 0; pass < (flags & GH_REUSE ? 2 : 1); pass++) {
        for (int i = 0; i < c->n_entries; i++) {
            gh_plan *o = c->entry[i]->plan;
            int status;
            if (!may_share(c, c->entry[i], p, flags, pass)) {
                continue;
            }
            /* Alloc dependencies that backends named are not replaced. */
            status = e->deps.n == 0              ? take_deps(c, p, &o->deps, error)
                   : same_deps(&p->deps, &o->deps) ? GS_OK : GS_BAD_ARGUMENT;
            if (status == GS_NO_HOST_MEMORY) {
                return status;
            }
            if (status != GS_OK) {
                continue;
            }
            if (pass == 0 && gh_api->graph_equal(o->graph, p->graph) && same_roles(o, p)
                && has_bytes_of(&o->problem, &p->problem)) {
                take_plan(c, e, i);
                gh_count_one(GH_COUNT_EQUAL);
                return GS_OK;
            }
            if (pass == 1 && gh_pools_fit(c, o) && gh_api->graph_same_wiring(o->graph, p->graph)
                && replay(c, e, o, error)) {
                gh_count_one(GH_COUNT_REPLAYED);
                return GS_OK;
            }
        }
    }
    return e->deps.n == 0 ? take_deps(c, p, &(gh_alloc_deps){0}, error) : GS_OK;
}

/* The planner's graph and problem of the plan of e. */
static int prepare(gh_plan_cache *c, gh_plan_entry *e, gs_error *error)
{
    const int status = build_graph(c, e->plan, error);
    for (int b = 0; b < c->n_backends; b++) {
        e->plan->max_size[b] = gh_max_buffer(c->key.type[b].max_size);
    }
    return status == GS_OK ? c->level->collect(c->owner, e->plan, e, &e->plan->problem, error) : status;
}

/* Plan a graph that the client reserves, and whose rows that are gathered were raised: graphs of recurrent models move
 * any number of states.  The raised sizes stay if no buffer is larger for them. */
static int plan_with_rows(gh_plan_cache *c, gh_plan_entry *e, gs_error *error)
{
    gh_plan *raised = e->plan;
    bool stays = plan_until_sound(c, e, error) == GS_OK;
    int status = GS_NO_HOST_MEMORY;
    e->plan = gh_plan_new();
    if (e->plan != NULL && gh_plan_take_graph(e->plan, &c->reader)) {
        status = prepare(c, e, error);
        status = status == GS_OK ? plan_until_sound(c, e, error) : status;
    }
    for (int pool = 0; status == GS_OK && pool < c->n_pools; pool++) {
        stays = stays && gh_plan_nbytes(raised, pool) <= gh_plan_nbytes(e->plan, pool);
    }
    if (status == GS_OK && stays) {
        GH_SWAP(gh_plan *, e->plan, raised);
    }
    gh_plan_drop(raised);
    return status;
}

int gh_plan_graph(gh_plan_cache *c, gh_plan_entry *e, int flags, gs_error *error)
{
    int status = prepare(c, e, error);
    if (status == GS_OK) {
        status = find_plan(c, e, flags, error);
    }
    if (status != GS_OK || e->plan->plan != NULL) {
        return status;
    }
    if (flags & GH_HINTS) {
        gh_size_hints_raise(c, e);
    }
    status = (flags & GH_PIN) != 0 && e->deps.n == 0 && gh_size_hints_raise_rows(e) ? plan_with_rows(c, e, error)
                                                                                     : plan_until_sound(c, e, error);
    if (status == GS_OK) {
        gh_count_one(GH_COUNT_PLANNED);
    }
    return status;
}
