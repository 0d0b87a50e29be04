/* ggml_sched/llama_cpp/hook/binding.c -- binds a client's graph to its plan: addresses, copies, splits.  See
 * scheduler.h.
 *
 * Where the plan has a node read a copy, that copy replaces the original among the node's sources.  It stays there
 * until the client passes the graph again: backends look at sources while they compute, which may be after our call has
 * returned, and the client may free the graph before its next call.
 */
#include "scheduler.h"

#include <stdio.h>

/* -- unbinding ---------------------------------------------------------------------------------------------------- */

/* Take the address from a tensor that lies in one of our buffers: it may be another in the next allocation. */
static void unplace(const gh_sched *s, gx_tensor *t)
{
    if (t->buffer != NULL && gh_pools_own(s->cache, t->buffer)) {
        t->buffer = NULL;
        t->data = NULL;
    }
}

/* The copies of one entry, `n` from `first` on, and of which tensors they are. */
typedef struct {
    const gx_tensor *first;
    gx_tensor *const *original;
    int32_t n;
} copy_table;

/* The original of a source that is a copy; else the source. */
static gx_tensor *original_of(const copy_table *tables, int n, gx_tensor *t)
{
    for (int i = 0; i < n; i++) {
        if (t >= tables[i].first && t < tables[i].first + tables[i].n) {
            return tables[i].original[t - tables[i].first];
        }
    }
    return t;
}

/* List the copies of all entries, evicted ones included, because nodes of a graph may name them as sources.  An entry
 * knows the originals of its last two graphs: if this graph is the one before the last, its originals are listed. */
static int find_copies(const gh_sched *s, gx_tensor *const *nodes, int n_nodes, copy_table *tables)
{
    int n = 0;
    for (int i = 0; i < s->cache->n_entries + s->cache->n_spare; i++) {
        const int spare = i - s->cache->n_entries;
        const gh_copies *k = spare < 0 ? &s->cache->entry[i]->copies : &s->cache->spare[spare]->copies;
        if (k->n > 0) {
            const bool was = k->n_previous == n_nodes && gh_same(k->previous_nodes, nodes, n_nodes, sizeof *nodes);
            tables[n++] = (copy_table){k->tensor, was ? k->previous : k->original, k->n};
        }
    }
    return n;
}

void gh_unbind(gh_sched *s, void *graph)
{
    const int n_nodes = s->lib->graph_n_nodes(graph), n_leafs = gh_graph_n_leafs(s->lib, graph);
    gx_tensor **nodes = s->lib->graph_nodes(graph), **leafs = gh_graph_leafs(s->lib, graph);
    copy_table tables[2 * GH_N_ENTRIES + 1];
    const int n = find_copies(s, nodes, n_nodes, tables);
    for (int i = 0; i < n_nodes; i++) {
        gx_tensor *t = nodes[i];
        for (int k = 0; n > 0 && k < GS_MAX_SRC; k++) {
            t->src[k] = original_of(tables, n, t->src[k]);
        }
        unplace(s, t);
    }
    for (int i = 0; i < n_leafs; i++) {
        unplace(s, leafs[i]);
    }
}

/* -- copies -------------------------------------------------------------------------------------------------------- */

/* The plan's id of copy c in the copy slot that this allocation uses: where computes may overlap, each copied tensor
 * has several copies, which computes use in turn. */
static int32_t id_of_copy(const gh_sched *s, const gs_plan *v, int32_t c)
{
    int32_t left = s->cur_copy;
    for (int32_t k = 0; left > 0 && k < v->n_slots; k++) {
        if (v->slot_copy[k] == c && --left == 0) {
            return v->n_tensors + v->n_copies + k;
        }
    }
    return v->n_tensors + c;
}

/* The tensor that copy c is a copy of. */
static gx_tensor *source_of(const gh_plan_entry *e, int32_t c)
{
    return gh_shape_of(e, e->plan->view.copy_like[c]);
}

static void take_layout(gx_tensor *copy, const gx_tensor *t)
{
    memset(copy, 0, sizeof *copy);
    copy->type = t->type;
    memcpy(copy->ne, t->ne, sizeof copy->ne);
    memcpy(copy->nb, t->nb, sizeof copy->nb);
}

/* A source of a node: where the node's tensor names it, and the copy that the plan has the node read instead. */
typedef struct {
    gx_tensor **at;
    int32_t copy;           /* -1: none */
} source;

static source source_at(const gh_plan_entry *e, int32_t id, int32_t k)
{
    const gh_plan *p = e->plan;
    source found = {NULL, p->view.src[k] - p->view.n_tensors};
    if (id < p->n && found.copy >= 0) {
        found.at = &gh_entry_tensor(e, id)->src[p->arrays.slot[k]];
    }
    return found;
}

/* An upper bound for the views of copies that make_view adds: one for each source that is a copy. */
static int32_t count_views(const gs_plan *v)
{
    int32_t n = 0;
    for (int32_t k = 0; v->n_copies > 0 && k < v->src_begin[v->n]; k++) {
        n += v->src[k] >= v->n_tensors;
    }
    return n;
}

/* Note that the copies now belong to the graph with these nodes.  The originals of the graph before it are kept as
 * `previous`, because the client may allocate that graph again.  False without memory. */
static bool set_nodes(gh_copies *copies, gx_tensor *const *nodes, int32_t n)
{
    if (copies->n_nodes == n && gh_same(copies->nodes, nodes, n, sizeof *nodes)) {
        return true;
    }
    if (n > copies->room_nodes) {
        if (!gh_grow(&copies->nodes, sizeof *nodes, n) || !gh_grow(&copies->previous_nodes, sizeof *nodes, n)) {
            return false;
        }
        copies->room_nodes = n;
    }
    GH_SWAP(gx_tensor **, copies->original, copies->previous);
    GH_SWAP(gx_tensor **, copies->nodes, copies->previous_nodes);
    copies->n_previous = copies->n_nodes;
    copies->n_nodes = n;
    memcpy(copies->nodes, nodes, (size_t)n * sizeof *nodes);
    return true;
}

static bool make_room(gh_copies *copies, int32_t n)
{
    copies->n = 0;
    if (n > copies->room) {
        if (!gh_grow(&copies->tensor, sizeof *copies->tensor, n)
            || !gh_grow(&copies->original, sizeof *copies->original, n)
            || !gh_grow(&copies->previous, sizeof *copies->previous, n)
            || !gh_grow(&copies->n_reads, sizeof *copies->n_reads, n)) {
            return false;
        }
        copies->room = n;
    }
    return true;
}

/* Make the tensors of the plan's copies, at their addresses.  False without memory. */
static bool make_copies(const gh_sched *s, gh_plan_entry *e, void *graph)
{
    const gs_plan *v = &e->plan->view;
    gh_copies *copies = &e->copies;
    if (!make_room(copies, v->n_copies + count_views(v))
        || (v->n_copies > 0 && !set_nodes(copies, s->lib->graph_nodes(graph), s->lib->graph_n_nodes(graph)))) {
        return false;
    }
    for (int32_t c = 0; c < v->n_copies; c++) {
        gx_tensor *copy = &copies->tensor[c], *t = source_of(e, c);
        const gh_slot *slot;
        take_layout(copy, t);
        if (s->n_copies > 1) {
            copy->flags = GH_FLAG_INPUT | GH_FLAG_OUTPUT;
        }
        snprintf(copy->name, sizeof copy->name, "%.20s#%.36s#%d", s->lib->backend_name(s->backend[v->copy_backend[c]]),
                 t->name, s->cur_copy);
        copies->original[c] = t;
        copies->n_reads[c] = 0;
        slot = &gh_entry_slots(e)[e->plan->n_slots + id_of_copy(s, v, c) - v->n_tensors];
        gh_place(copy, slot, gh_chunk_at(s->cache->pool, slot->chunk));
        gh_init_tensor(s->lib, copy->buffer, copy);
    }
    copies->n = v->n_copies;
    return true;
}

/* Add a view of copy c for a node that reads t, a view of the copy's original: the same layout, at the same offset. */
static gx_tensor *make_view(const gh_sched *s, gh_copies *copies, gx_tensor *t, int32_t c)
{
    gx_tensor *view = &copies->tensor[copies->n], *copy = &copies->tensor[c];
    const gx_tensor *of = copies->original[c];
    take_layout(view, t);
    memcpy(view->name, t->name, sizeof view->name);
    view->view_src = copy;
    view->view_offs = t->view_offs - (of->view_src != NULL ? of->view_offs : 0);
    view->buffer = copy->buffer;
    view->data = (char *)copy->data + view->view_offs;
    gh_init_tensor(s->lib, view->buffer, view);
    copies->original[copies->n++] = t;
    return view;
}

/* Replace each source of a node by the copy that the plan has the node read. */
static void read_copies(const gh_sched *s, gh_plan_entry *e)
{
    const gh_plan *p = e->plan;
    gh_copies *copies = &e->copies;
    for (int32_t i = 0; p->view.n_copies > 0 && i < p->size.n_nodes; i++) {
        const int32_t id = p->arrays.node[i];
        for (int32_t k = p->view.src_begin[id]; k < p->view.src_begin[id + 1]; k++) {
            const source src = source_at(e, id, k);
            if (src.at != NULL && *src.at != NULL) {
                copies->n_reads[src.copy]++;
                *src.at = *src.at == copies->original[src.copy] ? &copies->tensor[src.copy]
                                                                : make_view(s, copies, *src.at, src.copy);
            }
        }
    }
}

/* -- splits -------------------------------------------------------------------------------------------------------- */

/* Whether a node writes to this leaf, for example to a cache: it is a view of the leaf that computes something. */
static bool is_written(const gh_plan *p, int32_t leaf)
{
    for (int32_t i = 0; i < p->size.n_nodes; i++) {
        const int32_t id = p->arrays.node[i];
        if (p->arrays.view_src[id] == leaf && !gh_is_view_op(p->arrays.layout[id].op)) {
            return true;
        }
    }
    return false;
}

/* Whether a backend reads, without a copy, what another backend computes or what changes in another's memory; or
 * backends share a pool, so that one may overwrite what another read there.  Backends then must wait for each other. */
static bool has_shared_reads(const gh_sched *s, const gh_plan *p)
{
    const gs_plan *v = &p->view;
    for (int32_t i = 0; i < p->size.n_nodes; i++) {
        const int32_t id = p->arrays.node[i], b = v->assign[id];
        for (int32_t k = v->src_begin[id]; k < v->src_begin[id + 1]; k++) {
            const int32_t src = v->src[k];
            if (src < v->n_tensors && v->assign[src] != b
                && (v->arena_of[src] >= 0 || p->arrays.layout[src].op != GS_OP_NONE || is_written(p, src))) {
                return true;
            }
        }
    }
    return s->cache->n_pools < s->n_backends;
}

/* Position among ggml's nodes of the planner's node number i, or GH_NOWHERE. */
static int32_t position_of(const gh_plan *p, int32_t i)
{
    const int32_t id = p->arrays.node[i];
    return id < p->n ? p->node[id] : GH_NOWHERE;
}

/* The planner's graph lacks the nodes that are leafs to the planner, and has some that ggml's graph has not.  So the
 * planner's positions are translated to ggml's.  A split of added nodes alone is empty, and not counted. */
bool gh_plan_find_splits(const gh_sched *s, gh_plan *p)
{
    const gs_plan *v = &p->view;
    if (p->split_at != NULL) {
        return true;
    }
    p->split_at = malloc(((size_t)v->n_splits + 1) * sizeof *p->split_at);
    if (p->split_at == NULL) {
        return false;
    }
    p->n_splits = 0;
    p->split_at[v->n_splits] = p->n_nodes;
    for (int32_t i = v->n_splits - 1; i >= 0; i--) {
        int32_t at = v->split_start[i];
        while (at < v->split_stop[i] && position_of(p, at) == GH_NOWHERE) {
            at++;
        }
        p->split_at[i] = at < v->split_stop[i] ? position_of(p, at) : p->split_at[i + 1];
        p->n_splits += p->split_at[i] < p->split_at[i + 1];
    }
    /* ggml's nodes before the first split, all leafs to the planner, become a part of the first split. */
    for (int32_t i = 0, first = p->split_at[0]; i < v->n_splits && p->split_at[i] == first; i++) {
        p->split_at[i] = 0;
        if (p->split_at[i + 1] > first) {
            break;
        }
    }
    p->waits = s->n_backends > 1 && has_shared_reads(s, p);
    return true;
}

/* Make s->part: a view of the graph for each split, which is what a backend computes.  False without memory. */
static bool make_parts(gh_sched *s, const gh_plan *p, void *graph)
{
    const int32_t n = p->view.n_splits;
    if (n > s->room_part) {
        if (!gh_grow(&s->part, sizeof *s->part, n)) {
            return false;
        }
        s->room_part = n;
    }
    gh_number_graph(s->lib, graph);
    for (int32_t i = 0; i < n; i++) {
        s->part[i] = s->lib->graph_view(graph, p->split_at[i], p->split_at[i + 1]);
        gh_number_graph(s->lib, &s->part[i]);
    }
    return true;
}

bool gh_bind(gh_sched *s, gh_plan_entry *e, void *graph)
{
    if (!make_parts(s, e->plan, graph)) {
        return false;
    }
    gh_place_tensors(s->cache, e, false);
    if (!make_copies(s, e, graph)) {
        return false;
    }
    read_copies(s, e);
    return true;
}
