/* ggml_sched/llama_cpp/alloc/remember.c -- the plan of a graph, as an allocator finds it.  See allocator.h.
 *
 * In this order:
 *   1. the graph is one of the last few: its plan and addresses are known;
 *   2. it is wired as one of them: that is the same graph at other addresses, or its plan serves;
 *   3. it is read, and equal to one of them, or that one's plan is replayed;
 *   4. it is planned.
 * Invariant: a plan that was made for a larger graph serves only where the buffers hold it already.
 */
#include "allocator.h"
#include "arrays.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Times that a graph is planned again with more of it kept. */
#define GH_MAX_KEEPS 16

/* -- memory --------------------------------------------------------------------------------------------------- */

int32_t gh_needs(const gh_known *k, int32_t arena, const int64_t **nbytes)
{
    const gs_arena_result *result = &k->view.arena[arena];
    *nbytes = k->view.chunk_nbytes + result->first_chunk;
    if (result->nbytes > 0) {
        return result->n_chunks;
    }
    for (int32_t i = 0; i < k->n_slots; i++) {
        if (k->assigned[k->slot[i].id] == arena) {
            return 1;           /* of no bytes, but tensors lie in a buffer */
        }
    }
    return 0;
}

bool gh_fits(const gh_gallocr *a, const gh_known *k)
{
    for (int32_t b = 0; b < a->n_arenas; b++) {
        const int64_t *nbytes;
        const int32_t n = gh_needs(k, b, &nbytes);
        if (!gh_arena_fits(&a->arena[b], nbytes, n)) {
            return false;
        }
    }
    return true;
}

/* -- planning ----------------------------------------------------------------------------------------------------- */

/* The known graph number i is the last used. */
static gh_known *first(gh_gallocr *a, int i)
{
    gh_known *k = a->known[i];
    for (; i > 0; i--) {
        a->known[i] = a->known[i - 1];
    }
    a->known[0] = k;
    k->life = a->life;
    return k;
}

/* The position that makes room for one more: that of the borrower used longest ago once there are enough, then of what
 * nobody reserved, then of any; the end of the list where there is room. */
static int least_useful(const gh_gallocr *a, bool borrows)
{
    int n = 0, n_borrowed = 0, borrower = -1, unreserved = -1;
    for (; n < GH_N_KNOWN && a->known[n] != NULL; n++) {
        if (a->known[n]->replayed) {
            n_borrowed++;
            borrower = n;
        } else if (!a->known[n]->reserved) {
            unreserved = n;
        }
    }
    if (borrower >= 0 && ((borrows && n_borrowed >= GH_N_BORROWED) || n == GH_N_KNOWN)) {
        return borrower;
    }
    return n < GH_N_KNOWN ? n : unreserved >= 0 ? unreserved : GH_N_KNOWN - 1;
}

/* Whether a plan that was made for one graph serves another of its wiring: nothing of that is larger. */
static bool covers(const gh_known *k, const gh_known *o)
{
    if (k->n_slots != o->n_slots || k->n_all != o->n_all || !gh_looks_same_wiring(&k->looks, &o->looks)) {
        return false;
    }
    for (int32_t i = 0; i < k->n_slots; i++) {
        const int32_t id = k->slot[i].id, b = k->assigned[id];
        if (o->slot[i].id != id || o->assigned[id] != b || o->nbytes[(int64_t)b * o->n_all + id] > k->view.size[id]) {
            return false;
        }
    }
    return true;
}

/* Forget what a new plan serves as well: it is kept in its place. */
static void replace_covered(gh_gallocr *a, gh_known *k)
{
    int n = 0;
    for (int i = 0; i < GH_N_KNOWN && a->known[i] != NULL; i++) {
        gh_known *o = a->known[i];
        if (!k->replayed && o->life == a->life && !o->replayed && covers(k, o)) {
            k->reserved |= o->reserved;
            gh_known_drop(o);
        } else {
            a->known[n++] = o;
        }
    }
    for (; n < GH_N_KNOWN && a->known[n] != NULL; n++) {
        a->known[n] = NULL;
    }
}

/* The spare is known now; what makes room for it is the next spare unless somebody looks at it. */
static gh_known *remember(gh_gallocr *a)
{
    gh_known *k = a->spare;
    int at;
    replace_covered(a, k);
    at = least_useful(a, k->replayed);
    a->spare = a->known[at];
    a->known[at] = k;
    return first(a, at);
}

static gh_known *spare(gh_gallocr *a)
{
    if (a->spare != NULL && atomic_load(&a->spare->refs) > 1) {
        gh_known_drop(a->spare);
        a->spare = NULL;
    }
    if (a->spare == NULL) {
        a->spare = gh_known_new();
    }
    return a->spare;
}

/* The planner's graph of what was read, with what some known graph's nodes keep. */
static int make_graph(gh_gallocr *a, gh_known *k, const gh_keeps *keeps, gs_error *error)
{
    const bool some = keeps->n > 0;
    return gh_read_graph(&a->reading, false, some ? keeps->dep_begin : NULL, some ? keeps->dep : NULL, &k->graph,
                         &k->arrays, error);
}

static gs_problem problem_of(gh_gallocr *a, const gh_known *k)
{
    gs_problem problem;
    memset(&problem, 0, sizeof problem);
    gh_api->policy_default(&problem.policy);
    for (int32_t b = 0; b < a->n_arenas; b++) {
        const gh_arena *arena = &a->arena[b];
        gs_backend_info *info = &a->info[b];
        info->name = a->lib->buft_name(arena->buft);
        info->alignment = (int64_t)(arena->alignment > 0 ? arena->alignment : 1);
        info->inplace = a->lib->inplace;
        info->max_buffer = gh_max_buffer(arena->max_size);
        for (int32_t i = 0; info->max_buffer > 0 && i < k->n_slots; i++) {
            if (k->assigned[k->slot[i].id] == b) {
                gh_let_hold(info, k->nbytes[(int64_t)b * k->n_all + k->slot[i].id]);
            }
        }
    }
    problem.n_backends = a->n_arenas;
    problem.backends = a->info;
    problem.resident = k->resident;
    problem.reads = a->reads;
    problem.assigned = k->assigned;
    problem.nbytes = k->some_larger ? k->nbytes : NULL;
    return problem;
}

/* Plan the spare; where nodes that may be computed as one would overwrite what they read, again, with that kept. */
static int plan(gh_gallocr *a, gh_known *k, gs_error *error)
{
    for (int round = 0;; round++) {
        gs_problem problem = problem_of(a, k);
        int32_t clashes;
        int status = gh_api->plan_new(k->graph, &problem, &k->plan, error);
        if (status != GS_OK) {
            return status;
        }
        gh_api->plan_view(k->plan, &k->view);
        if (!gh_fused_risks(&a->reading, &k->arrays, &k->risks)) {
            return GS_NO_HOST_MEMORY;
        }
        clashes = gh_some_risk_overlaps(&k->risks, &k->arrays, &k->view)
                      ? gh_fused_clashes(&a->reading, &k->arrays, &k->view, &k->keeps) : 0;
        if (clashes == 0) {
            if (!gh_names_take(&k->names, &a->reading)) {
                return GS_NO_HOST_MEMORY;
            }
            k->planned = true;
            return GS_OK;
        }
        gh_api->plan_free(k->plan);
        k->plan = NULL;
        if (clashes < 0 || round == GH_MAX_KEEPS) {
            error->status = clashes < 0 ? clashes : GS_OUT_OF_MEMORY;
            snprintf(error->message, sizeof error->message, "%d results would overwrite what fused nodes read",
                     k->keeps.n);
            return error->status;
        }
        status = gh_keeps_lay_out(&k->keeps, k->n_all);
        if (status == GS_OK) {
            status = make_graph(a, k, &k->keeps, error);
        }
        if (status != GS_OK) {
            return status;
        }
    }
}

/* Whether the plan of a known graph may be that of the same one.  What was made for a larger graph asks for more than
 * this one needs, unless that is there. */
static bool may_serve(const gh_gallocr *a, const gh_known *o, bool replay)
{
    return o->planned && (!o->replayed || (replay && gh_fits(a, o)));
}

/* Whether a plan that another graph was given lets what is fused with these layouts overlap. */
static bool clashes_in(gh_gallocr *a, gh_known *k)
{
    const int32_t found = gh_fused_clashes(&a->reading, &k->arrays, &k->view, &k->keeps);
    k->keeps.n = 0; /* the graph keeps nothing yet */
    return found != 0;
}

/* Whether a graph of an allocator before this, whose tensors are these now, takes the bytes that it took. */
static bool measures(const gh_gallocr *a, const gh_known *o, gx_tensor *const *now)
{
    return o->life == a->life || gh_known_measures(o, now, a->lib, a->arena);
}

/* The spare's graph with what a known one's nodes keep, unless it has that.  GS_BAD_ARGUMENT: those are no nodes of
 * it. */
static int keep_as(gh_gallocr *a, gh_known *k, const gh_keeps **has, const gh_keeps *keeps, gs_error *error)
{
    static const gh_keeps none;
    int status, again;
    if (*has == keeps || ((*has)->n == 0 && keeps->n == 0)) {
        return GS_OK;
    }
    *has = keeps;
    status = make_graph(a, k, keeps, error);
    if (status == GS_OK || keeps->n == 0) {
        return status;
    }
    *has = &none;
    again = make_graph(a, k, &none, error);
    return again != GS_OK || status == GS_NO_HOST_MEMORY ? GS_NO_HOST_MEMORY : GS_BAD_ARGUMENT;
}

/* The plan of a known graph, replayed for the one just read; whether it serves. */
static bool replays(gh_gallocr *a, gh_known *k, const gh_known *o, gs_error *error)
{
    const gs_problem problem = problem_of(a, k);
    int serves = 0;
    if (gh_api->plan_replay(o->plan, o->graph, k->graph, &problem, &k->plan, &serves, error) != GS_OK || !serves) {
        return false;
    }
    gh_api->plan_view(k->plan, &k->view);
    if (clashes_in(a, k) || !gh_fused_risks(&a->reading, &k->arrays, &k->risks)
        || !gh_names_take(&k->names, &a->reading)) {
        gh_api->plan_free(k->plan);
        k->plan = NULL;
        return false;
    }
    k->planned = k->replayed = true;
    return true;
}

/* A known graph that the one just read equals, or whose plan serves it; *served is NULL where there is none.  The spare
 * has the graph and the problem.  GS_OK or GS_NO_HOST_MEMORY. */
static int serve(gh_gallocr *a, gh_known *k, bool replay, gh_known **served, gs_error *error)
{
    static const gh_keeps none;
    const gh_keeps *has = &none;
    *served = NULL;
    for (int pass = 0; pass < (replay ? 2 : 1); pass++) {
        for (int i = 0; i < GH_N_KNOWN && a->known[i] != NULL; i++) {
            gh_known *o = a->known[i];
            int status;
            if (!may_serve(a, o, replay) || !o->drawn || !gh_known_same_problem(o, k, pass == 0)) {
                continue;
            }
            status = keep_as(a, k, &has, &o->keeps, error);
            if (status == GS_NO_HOST_MEMORY) {
                return status;
            }
            if (status != GS_OK) {
                continue;
            }
            if (pass == 0 && gh_api->graph_equal(o->graph, k->graph)) {
                gh_known_rebind(o, k);
                gh_count_one(GH_COUNT_EQUAL);
                *served = first(a, i);
                return GS_OK;
            }
            /* Buffers may be too small for what an allocator before this was given; a lender may be known, too. */
            if (pass == 1 && gh_fits(a, o) && o->plan != NULL && gh_api->graph_same_wiring(o->graph, k->graph)
                && replays(a, k, o, error)) {
                gh_count_one(GH_COUNT_REPLAYED);
                *served = remember(a);
                return GS_OK;
            }
        }
    }
    return keep_as(a, k, &has, &none, error);
}

/* Whether the caller wants the nodes and leafs where a known graph has its. */
static bool wants_same_arenas(const gh_gallocr *a, const gh_known *o)
{
    return o->looks.n_nodes == a->n_node_ids && o->looks.n_leafs == a->n_leaf_ids
        && (a->n_arenas == 1
            || (gh_same(o->node_arena, a->node_arena, a->n_node_ids, sizeof *a->node_arena)
                && gh_same(o->leaf_arena, a->leaf_arena, a->n_leaf_ids, sizeof *a->leaf_arena)));
}

/* Whether others may have the plan of a known graph: it was made for it, and the buffers hold it. */
static bool may_lend(const gh_gallocr *a, const gh_known *o)
{
    return o->planned && !o->replayed && o->plan != NULL && o->drawn && wants_same_arenas(a, o) && gh_fits(a, o);
}

/* A graph that is wired as a known one: that itself, now of other tensors, or the spare with its plan.  NULL: it is to
 * be read. */
static gh_known *follow(gh_gallocr *a, void *graph, gh_known *k, bool replay)
{
    for (int i = 0; i < GH_N_KNOWN && a->known[i] != NULL; i++) {
        gh_known *o = a->known[i];
        if (may_serve(a, o, replay) && wants_same_arenas(a, o)
            && gh_looks_match_elsewhere(&o->looks, &k->looks, graph)) {
            if (!measures(a, o, k->looks.tensor)) {
                return NULL;
            }
            gh_looks_move(&o->looks, &k->looks);
            gh_count_one(GH_COUNT_EQUAL);
            return first(a, i);
        }
    }
    if (!replay) {
        return NULL;
    }
    for (int i = 0; i < GH_N_KNOWN && a->known[i] != NULL; i++) {
        gh_known *base = a->known[i];
        if (may_lend(a, base) && gh_looks_follow(&k->looks, &base->looks, graph)
            && gh_follow_borrows(k, base, a->lib, a->arena)) {
            gh_count_one(GH_COUNT_REPLAYED);
            base->life = a->life;
            return remember(a);
        }
    }
    return NULL;
}

/* A graph that was not found is read, and planned unless it equals one that was. */
static int read_and_plan(gh_gallocr *a, void *graph, gh_known *k, bool replay, gh_known **served, gs_error *error)
{
    const gh_keeps none = {0};
    int status = gh_read(&a->reading, a->lib, graph);
    if (status != GS_OK) {
        snprintf(error->message, sizeof error->message, "a graph of %d nodes cannot be read",
                 a->lib->graph_n_nodes(graph));
        return status;
    }
    status = gh_known_take(k, &a->forms, &a->reading, a->node_arena, a->leaf_arena, a->n_arenas);
    if (status == GS_BAD_PLACEMENT) {
        snprintf(error->message, sizeof error->message, "a tensor is wanted in a buffer that the allocator has not");
    }
    if (status == GS_OK) {
        status = make_graph(a, k, &none, error);
        k->drawn = status == GS_OK;
    }
    if (status != GS_OK) {
        return status;
    }
    gh_known_measure(k, &a->reading, a->arena);
    status = serve(a, k, replay, served, error);
    return status != GS_OK || *served != NULL ? status : plan(a, k, error);
}

void gh_compact_forms(gh_gallocr *a)
{
    gh_looks *looks[2 * GH_N_KNOWN];
    int n = 0;
    for (int i = 0; i < GH_N_KNOWN && a->known[i] != NULL; i++) {
        looks[n++] = &a->known[i]->looks;
        if (a->known[i]->lender != NULL) {
            looks[n++] = &a->known[i]->lender->looks;
        }
    }
    gh_looks_compact(looks, n, &a->forms);
}

gh_known *gh_remember(gh_gallocr *a, void *graph, bool replay, bool *placed, gs_error *error)
{
    gh_known *k, *served;
    int status;
    memset(error, 0, sizeof *error);
    error->tensor = error->backend = error->index = -1;
    for (int i = 0; i < GH_N_KNOWN && a->known[i] != NULL; i++) {
        gh_known *o = a->known[i];
        /* Addresses in these buffers are of this allocator's time: nothing is to be asked again. */
        const bool place = placed != NULL && o->generation == a->generation;
        if (may_serve(a, o, replay) && wants_same_arenas(a, o)
            && gh_looks_place(&o->looks, graph, o->slot, place ? o->n_slots : 0)
            && measures(a, o, o->looks.tensor)) {
            if (place) {
                *placed = true;
            }
            gh_count_one(GH_COUNT_SAME);
            return first(a, i);
        }
    }
    gh_compact_forms(a);
    k = spare(a);
    if (k == NULL) {
        error->status = GS_NO_HOST_MEMORY;
        return NULL;
    }
    gh_known_forget(k);
    served = follow(a, graph, k, replay);
    if (served != NULL) {
        return served;
    }
    status = read_and_plan(a, graph, k, replay, &served, error);
    if (status != GS_OK) {
        error->status = status;
        return NULL;
    }
    if (served != NULL) {
        return served;
    }
    gh_count_one(GH_COUNT_PLANNED);
    return remember(a);
}

bool gh_own_plan(gh_gallocr *a, gh_known *k)
{
    gs_error error;
    int serves = 1;
    if (gh_known_draw(k, &error) != GS_OK) {
        return false;
    }
    if (k->plan == NULL) {
        gs_problem problem = problem_of(a, k);
        gs_api_plan *plan = NULL;
        if (gh_api->plan_replay(k->lender->plan, k->lender->graph, k->graph, &problem, &plan, &serves, &error) != GS_OK
            || !serves) {
            return false;
        }
        if (!gh_known_own(k, plan)) {
            gh_api->plan_free(plan);
            return false;
        }
    }
    return true;
}
