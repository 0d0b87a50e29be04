/* ggml_sched/llama_cpp/hook/planning.c -- finds or makes the plan of a graph that was read.  See plan_cache.h.
 *
 * It tries, in this order: the plan of an equal graph; the replayed plan of a larger one; a new plan.
 * Invariant: no plan lets a fused kernel overwrite what it reads (fusion.h), where its tensors finally lie in the
 * pools.
 */
#include "plan_cache.h"

#include <stdio.h>

#define GH_MAX_ROUNDS 16    /* how often a graph is planned again with more alloc dependencies             */
#define GH_MAX_RAISES 64    /* how often it is planned again with a higher limit for one buffer            */

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

/* Build p->graph, the planner's graph of the graph that was read, with p's alloc dependencies. */
static int build_graph(gh_plan_cache *c, gh_plan *p, gs_error *error)
{
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

/* Fill the locations and the hazards of a new plan.  *conflict becomes the first hazard by which a fused kernel would
 * overwrite what it reads, -1: there is none. */
static int inspect(gh_plan_cache *c, gh_plan *p, int32_t *conflict)
{
    gh_api->plan_view(p->plan, &p->view);
    if (!gh_plan_locate(c, p, &c->reader) || !gh_fusion_find_hazards(&c->reader, &p->arrays, &p->hazards)) {
        return GS_NO_HOST_MEMORY;
    }
    *conflict = gh_plan_find_conflict(p, NULL, c->lib, NULL, p->view.size, 0);
    return GS_OK;
}

/* Add an alloc dependency for `conflict` and for each conflict after it; returns how many were new, or
 * GS_NO_HOST_MEMORY, which is negative. */
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

/* Plan the graph of e, add alloc dependencies where a fused kernel would overwrite what it reads, and plan again until
 * none does. */
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

/* Build the graph of p again with the alloc dependencies of another plan: graphs are compared with them, and a replayed
 * plan must keep them.  GS_BAD_ARGUMENT: they do not fit this graph, which has none then. */
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

/* Whether the plan of entry `other` may serve the graph of p.  In pass 0 it serves an equal graph; in pass 1 it is
 * replayed for a smaller one, and must not be a replayed one itself. */
static bool may_share(const gh_plan_cache *c, const gh_plan_entry *other, const gh_plan *p, int flags, int pass)
{
    const gh_plan *o = other->plan;
    return !other->reuses && gh_problem_same(&o->problem, &p->problem)
        && (!o->is_replayed || (pass == 0 && (flags & GH_REUSE) && gh_pools_fit(c, o)));
}

/* Let e have the plan of an equal graph, or the replayed plan of a larger one.  GS_OK, too, if no plan serves:
 * e->plan->plan stays NULL then. */
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
            /* Alloc dependencies that backends named belong to this graph: they are not replaced by another's. */
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

/* Build the planner's graph of the plan of e, and fill its problem. */
static int prepare(gh_plan_cache *c, gh_plan_entry *e, gs_error *error)
{
    const int status = build_graph(c, e->plan, error);
    for (int b = 0; b < c->n_backends; b++) {
        e->plan->max_size[b] = gh_max_buffer(c->key.type[b].max_size);
    }
    return status == GS_OK ? c->level->collect(c->owner, e->plan, e, &e->plan->problem, error) : status;
}

/* Plan a graph that the client reserves, twice: with the bytes of gathered rows that gh_size_hints_raise_rows has
 * raised, and without.  Graphs of recurrent models gather any number of states, so the first plan serves more graphs;
 * it is kept if no buffer is larger for it. */
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
