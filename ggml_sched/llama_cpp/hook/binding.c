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

/* Remove the address of a tensor that lies in one of our buffers: the next allocation may give it another. */
static void unplace(const gh_sched *s, gx_tensor *t)
{
    if (t->buffer != NULL && gh_pools_own(s->cache, t->buffer)) {
        t->buffer = NULL;
        t->data = NULL;
    }
}

/* The original of a source that is a copy; else the source. */
static gx_tensor *original_of(gx_tensor *t)
{
    const gh_copied *copy = gh_copy_of(t);
    return copy != NULL ? copy->original : t;
}

void gh_unbind(gh_sched *s, void *graph)
{
    const int n_nodes = s->lib->graph_n_nodes(graph), n_leafs = gh_graph_n_leafs(s->lib, graph);
    gx_tensor **nodes = s->lib->graph_nodes(graph), **leafs = gh_graph_leafs(s->lib, graph);
    for (int i = 0; i < n_nodes; i++) {
        gx_tensor *t = nodes[i];
        for (int k = 0; s->n_backends > 1 && k < GS_MAX_SRC; k++) {
            t->src[k] = original_of(t->src[k]);
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

/* The element of a node's src that a read through a copy is about: it points to the source, and later to the copy. */
static gx_tensor **source_at(const gh_plan_entry *e, const gh_read *read)
{
    return &gh_entry_tensor(e, read->id)->src[read->slot];
}

/* Fill s->original: for each of the plan's copies the tensor that it copies, then those views of these tensors that
 * nodes read, in the order of the plan's reads.  False without memory. */
static bool list_originals(gh_sched *s, const gh_plan_entry *e)
{
    const gh_plan *p = e->plan;
    const int32_t n = p->view.n_copies;
    if (!gh_make_room(&s->original, sizeof *s->original, &s->room_original, (int64_t)n + p->n_reads)) {
        return false;
    }
    for (int32_t c = 0; c < n; c++) {
        s->original[c] = gh_shape_of(e, p->view.copy_like[c]);
    }
    s->n_originals = n;
    for (int32_t i = 0; i < p->n_reads; i++) {
        gx_tensor *t = *source_at(e, &p->read[i]);
        if (t != NULL && t != s->original[p->read[i].copy]) {
            s->original[s->n_originals++] = t;
        }
    }
    return true;
}

static bool has_originals(const gh_copies *copies, gx_tensor *const *original, int32_t n)
{
    bool has = copies->n == n;
    for (int32_t i = 0; has && i < n; i++) {
        has = copies->copy[i].original == original[i];
    }
    return has;
}

/* Let e->copies[0] be the copies of the originals in s->original: those of the graph bound last, if its originals are
 * the same; otherwise room for new ones, which replaces the copies of the graph bound before that.  False without
 * memory. */
static bool choose_copies(const gh_sched *s, gh_plan_entry *e)
{
    gh_copies *copies = e->copies;
    if (has_originals(&copies[0], s->original, s->n_originals)) {
        return true;
    }
    GH_SWAP(gh_copies, copies[0], copies[1]);
    copies->n = 0;
    if (!gh_make_room(&copies->copy, sizeof *copies->copy, &copies->room, s->n_originals)) {
        return false;
    }
    copies->n = s->n_originals;
    return true;
}

static void start_copy(gh_copied *copy, gx_tensor *original)
{
    gx_tensor *t = &copy->tensor;
    memset(copy, 0, sizeof *copy);
    copy->original = original;
    gh_mark_copy(t);
    t->type = original->type;
    memcpy(t->ne, original->ne, sizeof t->ne);
    memcpy(t->nb, original->nb, sizeof t->nb);
}

/* Make copy c of the plan, at its address. */
static void make_copy(const gh_sched *s, gh_plan_entry *e, int32_t c)
{
    const gs_plan *v = &e->plan->view;
    const gh_places places = gh_entry_places(e);
    const int32_t id = id_of_copy(s, v, c);
    gx_tensor *copy = &e->copies->copy[c].tensor, *t = s->original[c];
    start_copy(&e->copies->copy[c], t);
    if (s->n_copies > 1) {
        copy->flags = GH_FLAG_INPUT | GH_FLAG_OUTPUT;
    }
    snprintf(copy->name, sizeof copy->name, "%.20s#%.36s#%d", s->lib->backend_name(s->backend[v->copy_backend[c]]),
             t->name, s->cur_copy);
    gh_place(copy, gh_chunk_at(s->cache->pool, places.chunk[id]), places.offset[id]);
    gh_init_tensor(s->lib, copy->buffer, copy);
}

/* Make a view of a copy for a node that reads t, a view of the copy's original: the same layout, at the same offset. */
static void make_view(const gh_sched *s, gh_copied *made, gh_copied *of, gx_tensor *t)
{
    gx_tensor *view = &made->tensor;
    start_copy(made, t);
    memcpy(view->name, t->name, sizeof view->name);
    view->view_src = &of->tensor;
    view->view_offs = t->view_offs - (of->original->view_src != NULL ? of->original->view_offs : 0);
    view->buffer = of->tensor.buffer;
    view->data = (char *)of->tensor.data + view->view_offs;
    gh_init_tensor(s->lib, view->buffer, view);
}

/* Make the copies of a graph, and replace each source of a node by the copy that the plan has the node read.  False
 * without memory. */
static bool make_copies(gh_sched *s, gh_plan_entry *e)
{
    const gh_plan *p = e->plan;
    int32_t n = p->view.n_copies;
    if (n == 0) {
        return true;
    }
    if (!list_originals(s, e) || !choose_copies(s, e)) {
        return false;
    }
    for (int32_t c = 0; c < n; c++) {
        make_copy(s, e, c);
    }
    for (int32_t i = 0; i < p->n_reads; i++) {
        gx_tensor **at = source_at(e, &p->read[i]);
        gh_copied *copy = &e->copies->copy[p->read[i].copy];
        copy->n_reads += *at != NULL;
        if (*at != NULL && *at != copy->original) {
            make_view(s, &e->copies->copy[n], copy, *at);
            *at = &e->copies->copy[n++].tensor;
        } else if (*at != NULL) {
            *at = &copy->tensor;
        }
    }
    return true;
}

/* -- splits -------------------------------------------------------------------------------------------------------- */

/* Whether a node writes to this leaf, for example to a cache: the node is a view of the leaf and computes something. */
static bool is_written(const gh_plan *p, int32_t leaf)
{
    for (int32_t i = 0; i < p->size.n_nodes; i++) {
        const int32_t id = p->arrays.node[i];
        if (p->arrays.view_src[id] == leaf && !gh_is_view_op(p->op[id])) {
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
                && (v->arena_of[src] >= 0 || p->op[src] != GS_OP_NONE || is_written(p, src))) {
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

/* Fill p->read: the sources that nodes read through copies.  False without memory. */
static bool find_reads(gh_plan *p)
{
    const gs_plan *v = &p->view;
    int32_t room = 0;
    p->n_reads = 0;
    for (int32_t i = 0; v->n_copies > 0 && i < p->size.n_nodes; i++) {
        const int32_t id = p->arrays.node[i];
        for (int32_t k = v->src_begin[id]; id < p->n && k < v->src_begin[id + 1]; k++) {
            if (v->src[k] < v->n_tensors) {
                continue;
            }
            if (!gh_make_room(&p->read, sizeof *p->read, &room, p->n_reads + 1)) {
                return false;
            }
            p->read[p->n_reads++] = (gh_read){id, p->arrays.slot[k], v->src[k] - v->n_tensors};
        }
    }
    return true;
}

/* Some of ggml's nodes are leafs in the planner's graph, and the planner's graph has nodes of its own, so the planner's
 * positions are translated to ggml's.  A split with only the planner's own nodes is empty, and not counted. */
bool gh_plan_find_splits(const gh_sched *s, gh_plan *p)
{
    const gs_plan *v = &p->view;
    if (p->split_at != NULL) {
        return true;
    }
    p->split_at = malloc(((size_t)v->n_splits + 1) * sizeof *p->split_at);
    if (p->split_at == NULL || !find_reads(p)) {
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
    /* ggml's nodes before the first split, which are leafs in the planner's graph, become a part of the first split. */
    for (int32_t i = 0, first = p->split_at[0]; i < v->n_splits && p->split_at[i] == first; i++) {
        p->split_at[i] = 0;
        if (p->split_at[i + 1] > first) {
            break;
        }
    }
    p->waits = s->n_backends > 1 && has_shared_reads(s, p);
    return true;
}

/* Make s->part: for each split a graph that lists the split's nodes, which a backend computes.  False without
 * memory. */
static bool make_parts(gh_sched *s, const gh_plan *p, void *graph)
{
    const int32_t n = p->view.n_splits;
    if (!gh_make_room(&s->part, sizeof *s->part, &s->room_part, n)) {
        return false;
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
    return make_copies(s, e);
}
