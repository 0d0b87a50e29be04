/* ggml_sched/llama_cpp/sched/planning.c -- the plan of a graph that was read: another's, or a new one.
 *
 * In this order: that of a graph that the planner finds equal; that of a larger one, repeated; a new one.
 * Invariant: no plan lets what ggml's kernels compute as one overlap (fused.h), wherever its ids lie in the pools.
 * See scheduler.h.
 */
#include "scheduler.h"

#include <stdlib.h>
#include <string.h>
#include "alloc.h"

/* -- planning ------------------------------------------------------------------------------------------------------ */

static void say(const gh_sched *s, const gs_error *error)
{
    gh_failed(error);
    if (s->lib->log != NULL) {
        s->lib->log(GH_LOG_ERROR, "ggml_sched: %s\n", error->message);
    }
}

static int build(gh_sched *s, gh_prepared *p, gs_error *error)
{
    const bool keeps = p->keeps.n > 0;
    if (keeps && gh_keeps_lay_out(&p->keeps, p->reading.n_all) != GS_OK) {
        return GS_NO_HOST_MEMORY;
    }
    /* With one backend, where inputs go is no question; their memory is then free after their last reader. */
    return gh_read_graph(&p->reading, s->n_backends > 1, keeps ? p->keeps.dep_begin : NULL,
                         keeps ? p->keeps.dep : NULL, &p->graph, &p->arrays, error);
}

static gs_problem problem_of(const gh_sched *s, const gh_prepared *p)
{
    gs_problem q;
    memset(&q, 0, sizeof q);
    gh_api->policy_default(&q.policy);
    q.policy.leafs_first = 1;
    q.policy.stream = 1; /* clients write to weights, and we would not know */
    q.policy.n_places = s->n_places;
    q.n_backends = s->n_backends;
    q.backends = s->info;
    if (p->reading.n_all == 0) {
        return q; /* of a graph of nothing there is nothing to tell */
    }
    q.resident = p->resident;
    q.usage = p->usage;
    q.n_buffers = p->n_buffers;
    q.buffer = p->buffer;
    q.reads_buffer = p->reads_buffer;
    q.reads = s->reads;
    q.assigned = p->some_chosen ? p->assigned : NULL;
    q.supports = p->supports;
    q.offloads = p->offloads;
    q.nbytes = p->some_larger ? p->nbytes : NULL;
    return q;
}

/* A new plan, in which tensors above the largest buffer have one of their own. */
static int plan_anew(gh_sched *s, gh_prepared *p, gs_error *error)
{
    gs_backend_info info[GH_MAX_BACKENDS];
    gs_problem q = problem_of(s, p);
    int status = GS_OK;
    memcpy(info, s->info, sizeof info);
    q.backends = info;
    for (int attempt = 0; attempt < 64; attempt++) {
        memset(error, 0, sizeof *error);
        status = gh_api->plan_new(p->graph, &q, &p->plan, error);
        if (status != GS_OUT_OF_MEMORY || error->backend < 0 || error->backend >= s->n_backends
            || !gh_let_hold(&info[error->backend], error->value)) {
            break;
        }
    }
    return status;
}

bool gh_same_problem(const gh_sched *s, const gh_prepared *a, const gh_prepared *b)
{
    const int64_t n = a->reading.n_all, m = s->n_backends;
    return b->reading.n_all == n && a->n_buffers == b->n_buffers && a->some_larger == b->some_larger
        && gh_same(a->resident, b->resident, n, sizeof *a->resident)
        && gh_same(a->buffer, b->buffer, n, sizeof *a->buffer)
        && gh_same(a->assigned, b->assigned, n, sizeof *a->assigned) && gh_same(a->usage, b->usage, n, 1)
        && gh_same(a->reads_buffer, b->reads_buffer, m * a->n_buffers, 1)
        && gh_same(a->supports, b->supports, m * n, 1) && gh_same(a->offloads, b->offloads, m * n, 1)
        && (!a->some_larger || gh_same(a->nbytes, b->nbytes, m * n, sizeof *a->nbytes));
}

/* Whether two graphs that were read have the same wiring, by id. */
static bool same_wiring(const gh_reading *a, const gh_reading *b)
{
    return a->n == b->n && a->n_all == b->n_all && a->n_nodes == b->n_nodes && a->size.n_nodes == b->size.n_nodes
        && a->size.n_src == b->size.n_src && gh_same(a->src_begin, b->src_begin, a->n_all + 1, sizeof *a->src_begin)
        && gh_same(a->src, b->src, a->size.n_src, sizeof *a->src)
        && gh_same(a->order, b->order, a->size.n_nodes, sizeof *a->order);
}

static bool same_keeps(const gh_keeps *a, const gh_keeps *b)
{
    return a->n == b->n && gh_same(a->node, b->node, a->n, sizeof *a->node)
        && gh_same(a->kept, b->kept, a->n, sizeof *a->kept);
}

static bool copy_keeps(gh_keeps *to, const gh_keeps *from)
{
    if (from->n > to->room) {
        if (!gh_grow(&to->node, sizeof *to->node, from->n) || !gh_grow(&to->kept, sizeof *to->kept, from->n)) {
            return false;
        }
        to->room = from->n;
    }
    to->n = from->n;
    if (from->n > 0) {
        memcpy(to->node, from->node, (size_t)from->n * sizeof *to->node);
        memcpy(to->kept, from->kept, (size_t)from->n * sizeof *to->kept);
    }
    return true;
}

/* Let p have the plan of q, whose graph and problem are the same, with the graph that it was made for; q is
 * forgotten. */
static void take_plan(gh_prepared *p, gh_prepared *q)
{
    GH_SWAP(gs_api_graph *, p->graph, q->graph);
    GH_SWAP(gs_graph_arrays, p->arrays, q->arrays);
    GH_SWAP(gs_api_plan *, p->plan, q->plan);
    GH_SWAP(gs_plan_arrays, p->view, q->view);
    GH_SWAP(gh_spot *, p->spot, q->spot);
    GH_SWAP(int32_t *, p->home, q->home);
    GH_SWAP(int64_t *, p->offset, q->offset);
    GH_SWAP(int64_t *, p->need, q->need);
    GH_SWAP(int32_t, p->room_spots, q->room_spots);
    GH_SWAP(int32_t, p->room_need, q->room_need);
    memcpy(p->need_begin, q->need_begin, sizeof p->need_begin);
    p->waits = q->waits;
    p->reserved |= q->reserved;
    p->replayed = q->replayed;
    gh_api->plan_free(q->plan);
    q->plan = NULL;
    q->reserved = false;
    q->used = 0;
}

/* Whether a plan lets fused kernels overlap; more is kept then.  GS_OK: it does not. */
static int look_for_clashes(gh_sched *s, gh_prepared *p, int32_t *found)
{
    gs_plan_arrays located;
    if (!gh_pools_locate(s, p)) {
        return GS_NO_HOST_MEMORY;
    }
    located = p->view;
    located.home = p->home;
    located.offset = p->offset;
    *found = gh_fused_clashes(&p->reading, &p->arrays, &located, &p->keeps);
    return *found < 0 ? GS_NO_HOST_MEMORY : GS_OK;
}

/* A plan of another graph that serves this one, too. */
static int plan_as_before(gh_sched *s, gh_prepared *p, gs_error *error)
{
    int status = GS_OK;
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < GH_N_PREPARED && status == GS_OK; i++) {
            gh_prepared *q = &s->prepared[i];
            int serves = 0;
            int32_t clashes = 0;
            if (q == p || q->plan == NULL || (pass == 1 && (q->replayed || !gh_pools_fit(s, q)))
                || !same_wiring(&q->reading, &p->reading)) {
                continue;
            }
            if (p->n_deps == 0 && !same_keeps(&p->keeps, &q->keeps)) {
                status = copy_keeps(&p->keeps, &q->keeps) ? build(s, p, error) : GS_NO_HOST_MEMORY;
            }
            if (status != GS_OK) {
                return status;
            }
            if (pass == 0) {
                if (gh_may_serve(s, q) && gh_api->graph_equal(q->graph, p->graph) && gh_same_problem(s, p, q)) {
                    take_plan(p, q);
                    gh_count_one(GH_COUNT_EQUAL);
                    return GS_OK;
                }
                continue;
            }
            const gs_problem problem = problem_of(s, p);
            if (gh_api->plan_replay(q->plan, q->graph, p->graph, &problem, &p->plan, &serves, error) != GS_OK) {
                continue; /* what fails here is found out again where it is planned */
            }
            if (serves) {
                gh_api->plan_view(p->plan, &p->view);
                status = look_for_clashes(s, p, &clashes);
                if (status == GS_OK && clashes == 0) {
                    p->replayed = true;
                    gh_count_one(GH_COUNT_REPLAYED);
                    return GS_OK;
                }
                gh_api->plan_free(p->plan);
                p->plan = NULL;
                status = status == GS_OK ? build(s, p, error) : status;
            }
        }
    }
    return status;
}

int gh_plan(gh_sched *s, gh_prepared *p, const gh_choices *choices)
{
    gs_error error = {0};
    int32_t clashes = 0;
    int status = build(s, p, &error);
    if (status == GS_OK) {
        status = gh_ask(s, p, choices, &error);
    }
    if (status == GS_OK) {
        status = plan_as_before(s, p, &error);
        if (status == GS_OK && p->plan != NULL) {
            return GS_OK;
        }
    }
    while (status == GS_OK) {
        status = plan_anew(s, p, &error);
        if (status != GS_OK || p->plan == NULL) {
            break;
        }
        gh_api->plan_view(p->plan, &p->view);
        gh_count_one(GH_COUNT_PLANNED);
        status = look_for_clashes(s, p, &clashes);
        if (status != GS_OK || clashes == 0) {
            break;
        }
        gh_api->plan_free(p->plan);
        p->plan = NULL;
        status = build(s, p, &error);
    }
    if (status != GS_OK) {
        gh_api->plan_free(p->plan);
        p->plan = NULL;
        if (error.message[0] == 0) {
            strcpy(error.message, gh_api->status_name(status) != NULL ? gh_api->status_name(status) : "no plan");
        }
        error.status = status;
        say(s, &error);
    }
    return status;
}
