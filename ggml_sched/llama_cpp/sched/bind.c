/* ggml_sched/llama_cpp/sched/bind.c -- what a graph needs to be computed: addresses, copies, parts.  See scheduler.h.
 *
 * Nodes that read a copy name it among their sources until the graph comes again: backends look at them while they
 * compute, which may be after a call has returned, and a graph may be gone before we are asked anything else.
 */
#include "scheduler.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -- undoing ------------------------------------------------------------------------------------------------------- */

static void unplace(const gh_sched *s, gx_tensor *t)
{
    if (t->buffer != NULL && gh_pools_own(s, t->buffer)) {
        t->buffer = NULL;
        t->data = NULL;
    }
}

/* Copies that a graph may name among its sources. */
typedef struct {
    const gx_tensor *first;
    gx_tensor *const *of;
    int32_t n;
} named_copies;

/* What a source stands for, if it is a copy. */
static gx_tensor *copied(const named_copies *tables, int n, gx_tensor *t)
{
    for (int i = 0; i < n; i++) {
        if (t >= tables[i].first && t < tables[i].first + tables[i].n) {
            return tables[i].of[t - tables[i].first];
        }
    }
    return t;
}

/* The copies of all graphs; of one that was bound elsewhere before they stand for the tensors of that which is asked
 * about. */
static int find_copies(const gh_sched *s, gx_tensor *const *nodes, int n_nodes, named_copies *tables)
{
    int n = 0;
    for (int i = 0; i < GH_N_PREPARED; i++) {
        const gh_prepared *p = &s->prepared[i];
        if (p->copies.n > 0) {
            const bool was = p->copies.n_were == n_nodes && gh_same(p->copies.were, nodes, n_nodes, sizeof *nodes);
            tables[n++] = (named_copies){p->copies.tensor, was ? p->copies.was : p->copies.of, p->copies.n};
        }
    }
    return n;
}

void gh_unbind(gh_sched *s, void *graph)
{
    const int n_nodes = s->lib->graph_n_nodes(graph), n_leafs = gh_graph_n_leafs(s->lib, graph);
    gx_tensor **nodes = s->lib->graph_nodes(graph), **leafs = gh_graph_leafs(s->lib, graph);
    named_copies tables[GH_N_PREPARED];
    const int n = find_copies(s, nodes, n_nodes, tables);
    for (int i = 0; i < n_nodes; i++) {
        gx_tensor *t = nodes[i];
        for (int k = 0; n > 0 && k < GS_MAX_SRC; k++) {
            t->src[k] = copied(tables, n, t->src[k]);
        }
        unplace(s, t);
    }
    for (int i = 0; i < n_leafs; i++) {
        unplace(s, leafs[i]);
    }
}

/* -- addresses ----------------------------------------------------------------------------------------------------- */

static bool find(const gh_sched *s, const gh_prepared *p, int32_t id, void **buffer, void **data)
{
    const gh_spot *spot = &p->spot[id];
    const gh_chunk *chunk;
    if (spot->pool < 0 || spot->chunk >= s->pool[spot->pool].n_chunks) {
        return false;
    }
    chunk = &s->pool[spot->pool].chunk[spot->chunk];
    *buffer = chunk->buffer;
    *data = chunk->base + spot->offset;
    return true;
}

/* The addresses of a plan's tensors in the buffers that there are: the same as long as those stay. */
static bool find_slots(const gh_sched *s, gh_prepared *p)
{
    const gh_reading *r = &p->reading;
    if (p->generation == s->generation) {
        return true;
    }
    if (r->n > p->room_slots) {
        const int32_t room = r->n + r->n / 4;
        if (!gh_grow(&p->slot, sizeof *p->slot, room) || !gh_grow(&p->viewer, sizeof *p->viewer, room)) {
            return false;
        }
        p->room_slots = room;
    }
    p->n_slots = p->n_viewers = 0;
    for (int32_t id = 0; id < r->n; id++) {
        const int32_t role = r->item[id].role;
        gx_tensor *t = r->item[id].tensor;
        if (role == GH_VIEW || role == GH_ASIDE) {
            p->viewer[p->n_viewers++] = t;
        } else if (role == GH_PLACED) {
            gh_slot_at *slot = &p->slot[p->n_slots++];
            slot->tensor = t;
            if (!find(s, p, id, &slot->buffer, &slot->data)) {
                return false;
            }
        }
    }
    p->generation = s->generation;
    return true;
}

static void put_tensors(const gh_sched *s, const gh_prepared *p)
{
    for (int32_t i = 0; i < p->n_slots; i++) {
        const gh_slot_at *slot = &p->slot[i];
        slot->tensor->buffer = slot->buffer;
        slot->tensor->data = slot->data;
        gh_tell(s->lib, slot->buffer, slot->tensor);
    }
    for (int32_t i = 0; i < p->n_viewers; i++) {
        gx_tensor *t = p->viewer[i], *root = t->view_src;
        if (t->buffer == NULL && root->buffer != NULL) {
            t->buffer = root->buffer;
            t->data = (char *)root->data + t->view_offs;
            gh_tell(s->lib, t->buffer, t);
        }
    }
}

/* -- copies -------------------------------------------------------------------------------------------------------- */

/* The id of copy c in the place that this allocation uses. */
static int32_t id_of_copy(const gh_sched *s, const gs_plan_arrays *v, int32_t c)
{
    int32_t left = s->place;
    for (int32_t k = 0; left > 0 && k < v->n_places; k++) {
        if (v->place_copy[k] == c && --left == 0) {
            return v->n_tensors + v->n_copies + k;
        }
    }
    return v->n_tensors + c;
}

static gx_tensor *source_of(const gh_prepared *p, int32_t c)
{
    const gh_item *item = &p->reading.item[p->view.copy_like[c]];
    return item->tensor != NULL || item->root < 0 ? item->tensor : p->reading.item[item->root].tensor;
}

static void take_layout(gx_tensor *copy, const gx_tensor *t)
{
    memset(copy, 0, sizeof *copy);
    copy->type = t->type;
    memcpy(copy->ne, t->ne, sizeof copy->ne);
    memcpy(copy->nb, t->nb, sizeof copy->nb);
}

/* Sources that are not what the planner took them for: views without an op, of what it has copied. */
static int32_t count_twins(const gh_prepared *p)
{
    const gh_reading *r = &p->reading;
    const gs_plan_arrays *v = &p->view;
    int32_t n = 0;
    for (int32_t i = 0; i < r->size.n_nodes; i++) {
        const int32_t id = r->order[i];
        const gx_tensor *t = r->item[id].tensor;
        for (int32_t k = v->src_begin[id]; t != NULL && k < v->src_begin[id + 1]; k++) {
            const gx_tensor *src = t->src[r->slot[k]];
            n += v->src[k] >= v->n_tensors && src != NULL && src != source_of(p, v->src[k] - v->n_tensors);
        }
    }
    return n;
}

/* Let the copies be for this graph.  What they stood for where it was bound last is kept: it may come again, too. */
static bool turn_to(gh_copies *copies, gx_tensor *const *nodes, int32_t n)
{
    if (copies->n_nodes == n && gh_same(copies->nodes, nodes, n, sizeof *nodes)) {
        return true;
    }
    if (n > copies->room_nodes) {
        if (!gh_grow(&copies->nodes, sizeof *nodes, n) || !gh_grow(&copies->were, sizeof *nodes, n)) {
            return false;
        }
        copies->room_nodes = n;
    }
    GH_SWAP(gx_tensor **, copies->of, copies->was);
    GH_SWAP(gx_tensor **, copies->nodes, copies->were);
    copies->n_were = copies->n_nodes;
    copies->n_nodes = n;
    memcpy(copies->nodes, nodes, (size_t)n * sizeof *nodes);
    return true;
}

static bool make_room(gh_copies *copies, int32_t n)
{
    copies->n = 0;
    if (n > copies->room) {
        if (!gh_grow(&copies->tensor, sizeof *copies->tensor, n) || !gh_grow(&copies->of, sizeof *copies->of, n)
            || !gh_grow(&copies->was, sizeof *copies->was, n)
            || !gh_grow(&copies->n_reads, sizeof *copies->n_reads, n)) {
            return false;
        }
        copies->room = n;
    }
    return true;
}

static bool make_copies(const gh_sched *s, gh_prepared *p, void *graph)
{
    const gs_plan_arrays *v = &p->view;
    gh_copies *copies = &p->copies;
    if (!make_room(copies, v->n_copies + (v->n_copies > 0 ? count_twins(p) : 0))
        || (v->n_copies > 0 && !turn_to(copies, s->lib->graph_nodes(graph), s->lib->graph_n_nodes(graph)))) {
        return false;
    }
    for (int32_t c = 0; c < v->n_copies; c++) {
        gx_tensor *copy = &copies->tensor[c], *t = source_of(p, c);
        take_layout(copy, t);
        if (s->n_places > 1) {
            copy->flags = GH_FLAG_INPUT | GH_FLAG_OUTPUT;
        }
        snprintf(copy->name, sizeof copy->name, "%.20s#%.36s#%d", s->rt->backend_name(s->backend[v->copy_backend[c]]),
                 t->name, s->place);
        copies->of[c] = t;
        copies->n_reads[c] = 0;
        if (!find(s, p, id_of_copy(s, v, c), &copy->buffer, &copy->data)) {
            return false;
        }
        gh_tell(s->lib, copy->buffer, copy);
    }
    copies->n = v->n_copies;
    return true;
}

/* A view of a copy as `t` is one of what was copied, which may be a part of its root itself. */
static gx_tensor *make_twin(const gh_sched *s, gh_copies *copies, gx_tensor *t, int32_t c)
{
    gx_tensor *twin = &copies->tensor[copies->n], *copy = &copies->tensor[c];
    const gx_tensor *of = copies->of[c];
    take_layout(twin, t);
    memcpy(twin->name, t->name, sizeof twin->name);
    twin->view_src = copy;
    twin->view_offs = t->view_offs - (of->view_src != NULL ? of->view_offs : 0);
    twin->buffer = copy->buffer;
    twin->data = (char *)copy->data + twin->view_offs;
    gh_tell(s->lib, twin->buffer, twin);
    copies->of[copies->n++] = t;
    return twin;
}

static void read_copies(const gh_sched *s, gh_prepared *p)
{
    const gh_reading *r = &p->reading;
    const gs_plan_arrays *v = &p->view;
    gh_copies *copies = &p->copies;
    for (int32_t i = 0; v->n_copies > 0 && i < r->size.n_nodes; i++) {
        const int32_t id = r->order[i];
        gx_tensor *t = r->item[id].tensor;
        for (int32_t k = v->src_begin[id]; t != NULL && k < v->src_begin[id + 1]; k++) {
            const int32_t c = v->src[k] - v->n_tensors;
            gx_tensor **src = &t->src[r->slot[k]];
            if (c >= 0 && *src != NULL) {
                copies->n_reads[c]++;
                *src = *src == copies->of[c] ? &copies->tensor[c] : make_twin(s, copies, *src, c);
            }
        }
    }
}

/* -- parts --------------------------------------------------------------------------------------------------------- */

static bool make_parts(gh_sched *s, const gh_prepared *p, void *graph)
{
    const int32_t n = p->view.n_splits;
    if (n > s->room_part) {
        if (!gh_grow(&s->part, sizeof *s->part, n)) {
            return false;
        }
        s->room_part = n;
    }
    gh_number_graph(s->rt, graph);
    for (int32_t i = 0; i < n; i++) {
        s->part[i] = s->rt->graph_view(graph, p->cut[i], p->cut[i + 1]);
        gh_number_graph(s->rt, &s->part[i]);
    }
    return true;
}

bool gh_bind(gh_sched *s, gh_prepared *p, void *graph)
{
    for (int pool = 0; pool < s->n_pools; pool++) {
        gh_arena_reset(&s->pool[pool], s->lib);
    }
    if (!make_parts(s, p, graph) || !find_slots(s, p)) {
        return false;
    }
    put_tensors(s, p);
    if (!make_copies(s, p, graph)) {
        return false;
    }
    read_copies(s, p);
    return true;
}
