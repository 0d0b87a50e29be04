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

/* Called by a backend's function that reorders: `tensor` must keep its memory until `until` is computed.  Each pair is
 * stored once. */
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

/* Whether the nodes of a graph are in the order in which they were planned. */
static bool has_order(const gh_plan *p, const gh_plan_entry *e, gx_tensor *const *nodes)
{
    for (int32_t id = 0; id < p->n; id++) {
        if (p->node[id] != GH_NOWHERE && nodes[p->node[id]] != gh_entry_tensor(e, id)) {
            return false;
        }
    }
    return true;
}

/* Whether these pairs are those of the plan.  A tensor that was not in the graph when the plan was made is matched by
 * any tensor that is not in the graph now. */
static bool has_pairs(const gh_plan_entry *e, const gh_tensor_pairs *deps)
{
    bool same = deps->n == e->plan->n_pairs;
    for (int32_t i = 0; same && i < 2 * deps->n; i++) {
        const int32_t id = e->plan->pair[i / 2][i % 2];
        const gx_tensor *t = deps->pair[i / 2][i % 2];
        same = id >= 0 ? gh_entry_tensor(e, id) == t : gh_entry_id(e, t) < 0;
    }
    return same;
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
    *same = has_order(p, e, s->lib->graph_nodes(graph)) && has_pairs(e, &s->deps);
    return !s->dep_failed;
}

/* Store in p->pair the ids of the pairs that backends named, and make the pairs alloc dependencies of the plan.  A pair
 * is left out there if the plan does not choose the tensor's memory, or the tensor is computed after the node until
 * which it should be kept. */
static bool take_deps(const gh_sched *s, gh_plan *p)
{
    const gh_reader *r = &s->cache->reader;
    if (!gh_grow(&p->pair, sizeof *p->pair, s->deps.n)) {
        return false;
    }
    p->n_pairs = s->deps.n;
    for (int32_t i = 0; i < s->deps.n; i++) {
        int32_t tensor = gh_reader_id(r, s->deps.pair[i][0]);
        const int32_t node = gh_reader_id(r, s->deps.pair[i][1]);
        p->pair[i][0] = tensor;
        p->pair[i][1] = node;
        if (tensor >= 0 && r->item[tensor].root >= 0) {
            tensor = r->item[tensor].root;
        }
        if (tensor < 0 || node < 0 || r->item[node].op == GS_OP_NONE || r->item[tensor].role != GH_ROLE_PLACED
            || (r->item[tensor].op != GS_OP_NONE && r->item[tensor].node >= r->item[node].node)) {
            continue;
        }
        if (!gh_alloc_deps_add(&p->deps, node, tensor)) {
            return false;
        }
    }
    return true;
}

/* Fill p->order: for each id of the graph that was read, the id that its tensor has in the signature.  False: a tensor
 * is not in the signature, or there is no memory. */
static bool take_order(const gh_reader *r, const gh_signature *signature, gh_plan *p)
{
    gs_index index = {NULL, 0, 0};
    bool done = r->n == signature->n && gh_grow(&p->order, sizeof *p->order, r->n) && gs_index_reset(&index, r->n);
    for (int32_t id = 0; done && id < r->n; id++) {
        *gs_index_find(&index, signature->tensor, sizeof *signature->tensor, signature->tensor[id]) = id + 1;
    }
    for (int32_t id = 0; done && id < r->n; id++) {
        p->order[id] = *gs_index_find(&index, signature->tensor, sizeof *signature->tensor, r->item[id].tensor) - 1;
        done = p->order[id] >= 0;
    }
    free(index.slot);
    return done;
}

/* Read the reordered graph, and give e a new plan for it.  Its nodes have other ids than in the signature, which keeps
 * the client's order: the plan's `order` translates them. */
static int read_reordered(gh_sched *s, gh_plan_entry *e, void *graph)
{
    gh_reader *r = &s->cache->reader;
    const int status = gh_reader_read(r, s->lib, graph);
    if (status != GS_OK) {
        return status;
    }
    e->plan = gh_plan_new();
    return e->plan != NULL && gh_plan_take_graph(e->plan, r) && take_order(r, &e->signature, e->plan)
                   && take_deps(s, e->plan)
               ? GS_OK : GS_NO_HOST_MEMORY;
}

int gh_sched_plan_reordered(void *owner, gh_plan_entry *e, void *graph, gs_error *error)
{
    gh_sched *s = owner;
    gh_plan *first = e->plan;
    int status;
    e->plan = NULL;
    status = read_reordered(s, e, graph);
    s->first = first;
    if (status == GS_OK) {
        status = gh_plan_graph(s->cache, e, 0, error);
    }
    s->first = NULL;
    gh_plan_drop(first);
    return status;
}
