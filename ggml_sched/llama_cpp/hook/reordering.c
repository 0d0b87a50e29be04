/* ggml_sched/llama_cpp/hook/reordering.c -- graphs whose nodes backends reorder.  See scheduler.h.
 *
 * ggml lets each backend reorder the nodes of its splits, for example so that more of them run at once, and name
 * tensors that must keep their memory longer than usual.  Splits are known only once a graph is planned.  So a
 * reordered graph is planned a second time, in the new order, with every node on the backend that the first plan chose.
 */
#include "scheduler.h"

static bool add_pair(gh_tensor_pairs *pairs, gx_tensor *tensor, gx_tensor *until)
{
    if (!gh_make_room(&pairs->pair, sizeof *pairs->pair, &pairs->room, pairs->n + 1)) {
        return false;
    }
    pairs->pair[pairs->n][0] = tensor;
    pairs->pair[pairs->n++][1] = until;
    return true;
}

/* Called by a backend's function: `tensor` must keep its memory until `until` is computed.  Each pair is stored once.
 */
static void add_dep(void *user, gx_tensor *tensor, gx_tensor *until)
{
    gh_sched *s = user;
    for (int32_t i = 0; i < s->deps.n; i++) {
        if (s->deps.pair[i][0] == tensor && s->deps.pair[i][1] == until) {
            return;
        }
    }
    s->dep_failed |= !add_pair(&s->deps, tensor, until);
}

bool gh_sched_reorder(void *owner, const gh_plan_entry *e, void *graph, bool *same)
{
    gh_sched *s = owner;
    const gh_optimize_params params = {.add_alloc_dep = add_dep, .user = s};
    const gh_plan *p = e->plan;
    s->deps.n = 0;
    s->dep_failed = false;
    if (!gh_plan_find_splits(s, e->plan)) {
        return false;
    }
    for (int32_t i = 0; i < p->view.n_splits; i++) {
        const int b = p->view.split_backend[i];
        if (s->optimize[b] != NULL && p->split_at[i] < p->split_at[i + 1]) {
            gh_part part = s->lib->graph_view(graph, p->split_at[i], p->split_at[i + 1]);
            s->optimize[b](s->backend[b], &part, &params);
        }
    }
    *same = gh_same(s->lib->graph_nodes(graph), e->order, p->n_nodes, sizeof *e->order) && s->deps.n == e->deps.n
         && gh_same(s->deps.pair, e->deps.pair, s->deps.n, sizeof *s->deps.pair);
    return !s->dep_failed;
}

/* Store the pairs that backends named in e->deps, and as alloc dependencies of the plan.  Skipped are tensors whose
 * memory the plan does not choose, and those that are computed only after the node until which they should be kept. */
static bool take_deps(const gh_sched *s, gh_plan_entry *e)
{
    const gh_reader *r = &s->cache->reader;
    e->deps.n = 0;
    for (int32_t i = 0; i < s->deps.n; i++) {
        gx_tensor *const *pair = s->deps.pair[i];
        int32_t tensor = gh_reader_id(r, pair[0]);
        const int32_t node = gh_reader_id(r, pair[1]);
        if (!add_pair(&e->deps, pair[0], pair[1])) {
            return false;
        }
        if (tensor >= 0 && r->item[tensor].root >= 0) {
            tensor = r->item[tensor].root;
        }
        if (tensor < 0 || node < 0 || r->item[node].op == GS_OP_NONE || r->item[tensor].role != GH_ROLE_PLACED
            || (r->item[tensor].op != GS_OP_NONE && r->item[tensor].node >= r->item[node].node)) {
            continue;
        }
        if (!gh_alloc_deps_add(&e->plan->deps, node, tensor)) {
            return false;
        }
    }
    return true;
}

/* Store the backend that the plan of e chose for each tensor in s->kept: the second plan takes these as assignments. */
static bool keep_placement(gh_sched *s, const gh_plan_entry *e)
{
    gh_assignments_clear(&s->kept);
    for (int32_t id = 0; id < e->plan->n; id++) {
        if (e->plan->view.assign[id] >= 0
            && !gh_assignments_set(&s->kept, gh_entry_tensor(e, id), e->plan->view.assign[id])) {
            return false;
        }
    }
    return true;
}

/* Read the reordered graph, and give e a new plan for it.  Nodes have other ids now than in the signature, which is of
 * the client's order: e->reordered has the tensors by their new ids. */
static int read_reordered(gh_sched *s, gh_plan_entry *e, void *graph)
{
    gh_reader *r = &s->cache->reader;
    const int status = gh_reader_read(r, s->lib, graph);
    if (status != GS_OK) {
        return status;
    }
    gh_plan_drop(e->plan);
    e->plan = gh_plan_new();
    e->reordered = malloc((size_t)r->n * sizeof *e->reordered + 1);
    if (e->plan == NULL || e->reordered == NULL || !gh_plan_take_graph(e->plan, r) || !take_deps(s, e)) {
        return GS_NO_HOST_MEMORY;
    }
    for (int32_t id = 0; id < r->n; id++) {
        e->reordered[id] = r->item[id].tensor;
    }
    gh_copy(e->order, r->nodes, r->n_nodes, sizeof *e->order);
    return GS_OK;
}

int gh_sched_plan_reordered(void *owner, gh_plan_entry *e, void *graph, gs_error *error)
{
    gh_sched *s = owner;
    int status = keep_placement(s, e) ? read_reordered(s, e, graph) : GS_NO_HOST_MEMORY;
    s->uses_kept = true;
    if (status == GS_OK) {
        status = gh_plan_graph(s->cache, e, 0, error);
    }
    s->uses_kept = false;
    return status;
}
