/* ggml_sched/llama_cpp/alloc/known.c -- what was planned of a graph, and the addresses of its tensors.  See known.h. */
#include "arrays.h"
#include "known.h"

#include <stdlib.h>
#include <string.h>

gh_known *gh_known_new(void)
{
    gh_known *k = calloc(1, sizeof *k);
    if (k != NULL) {
        atomic_init(&k->refs, 1);
    }
    return k;
}

void gh_known_drop(gh_known *k)
{
    if (k == NULL || atomic_fetch_sub(&k->refs, 1) != 1) {
        return;
    }
    gh_api->plan_free(k->plan);
    gh_known_drop(k->lender);
    gh_api->graph_free(k->graph);
    gh_keeps_free(&k->keeps);
    gh_risks_free(&k->risks);
    gh_looks_free(&k->looks);
    free(k->node_arena);
    free(k->leaf_arena);
    gh_names_free(&k->names);
    free(k->resident);
    free(k->assigned);
    free(k->nbytes);
    free(k->taken);
    free(k->offset);
    free(k->slot);
    free(k->viewer);
    free(k);
}

/* -- room -------------------------------------------------------------------------------------------- */

bool gh_known_make_room(gh_known *k, int32_t n_all, int32_t listed, int32_t n_arenas)
{
    const int64_t nbytes = (int64_t)n_arenas * n_all;
    if (n_all > k->room || k->room == 0) {
        const int32_t n = n_all + n_all / 4 + 1;
        if (!gh_grow(&k->resident, sizeof(int32_t), n) || !gh_grow(&k->assigned, sizeof(int32_t), n)
            || !gh_grow(&k->slot, sizeof *k->slot, n) || !gh_grow(&k->viewer, sizeof *k->viewer, n)) {
            return false;
        }
        k->room = n;
    }
    if (listed > k->room_listed || k->room_listed == 0) {
        const int32_t n = listed + listed / 4 + 1;
        if (!gh_grow(&k->node_arena, sizeof(int32_t), n) || !gh_grow(&k->leaf_arena, sizeof(int32_t), n)) {
            return false;
        }
        k->room_listed = n;
    }
    if (nbytes > k->room_nbytes) {
        if (!gh_grow(&k->nbytes, sizeof *k->nbytes, nbytes + nbytes / 4)) {
            return false;
        }
        k->room_nbytes = nbytes + nbytes / 4;
    }
    return true;
}

/* The arena that the caller wants an id in; -1: it did not say. */
static int32_t arena_of(const gh_item *item, const int32_t *node_arena, const int32_t *leaf_arena, int32_t n_nodes)
{
    if (item->leaf != GH_NOWHERE && item->op == GS_OP_NONE) {
        return leaf_arena[item->leaf];
    }
    if (item->node != GH_NOWHERE) {
        return node_arena[item->node];
    }
    return item->reader != GH_NOWHERE && item->reader < n_nodes ? node_arena[item->reader] : 0;
}

void gh_known_forget(gh_known *k)
{
    gh_api->plan_free(k->plan);
    k->plan = NULL;
    gh_known_drop(k->lender);
    k->lender = NULL;
    k->planned = k->replayed = k->reserved = k->drawn = false;
    k->generation = 0;
}

int gh_known_take(gh_known *k, gh_forms *forms, const gh_reading *r, const int32_t *node_arena,
                  const int32_t *leaf_arena, int32_t n_arenas)
{
    if (!gh_known_make_room(k, r->n_all, r->n_nodes > r->n_leafs ? r->n_nodes : r->n_leafs, n_arenas)) {
        return GS_NO_HOST_MEMORY;
    }
    gh_known_forget(k);
    if (!gh_looks_take(&k->looks, forms, r)) {
        return GS_NO_HOST_MEMORY;
    }
    k->keeps.n = 0;
    k->size = r->size;
    k->n_all = r->n_all;
    k->n_arenas = n_arenas;
    k->n_slots = k->n_viewers = 0;
    k->names.n = 0;
    memcpy(k->node_arena, node_arena, (size_t)r->n_nodes * sizeof(int32_t));
    memcpy(k->leaf_arena, leaf_arena, (size_t)r->n_leafs * sizeof(int32_t));
    for (int32_t id = 0; id < r->n_all; id++) {
        const gh_item *item = &r->item[id];
        const int32_t wanted = arena_of(item, node_arena, leaf_arena, r->n_nodes);
        const bool external = item->role == GH_EXTERNAL && item->tensor != NULL;
        const bool there = external || (item->role == GH_ASIDE && item->op == GS_OP_NONE);
        k->assigned[id] = wanted;
        k->resident[id] = !there ? -1 : wanted < 0 ? 0 : wanted;
        if (id >= r->n) {
            continue;
        }
        if (item->role == GH_PLACED) {
            if (wanted < 0) {
                return GS_BAD_PLACEMENT;
            }
            k->slot[k->n_slots++] = (gh_slot){.id = id};
        } else if (item->role != GH_EXTERNAL) {
            k->viewer[k->n_viewers++] = id;
        }
    }
    return GS_OK;
}

void gh_known_measure(gh_known *k, const gh_reading *r, const gh_arena *arenas)
{
    const gh_ggml *lib = r->lib;
    k->some_larger = false;
    for (int32_t b = 0; b < k->n_arenas; b++) {
        int64_t *row = k->nbytes + (int64_t)b * k->n_all;
        for (int32_t id = 0; id < k->n_all; id++) {
            const gh_item *item = &r->item[id];
            const gx_tensor *t = item->tensor != NULL || item->role != GH_PLACED ? item->tensor
                                                                               : r->item[item->root].tensor;
            row[id] = k->arrays.layout[id].nbytes;
            if (item->role == GH_PLACED && k->assigned[id] == b) {
                row[id] = gh_bytes_in(lib, arenas[b].buft, t, k->arrays.layout[id].nbytes);
                k->some_larger |= row[id] > k->arrays.layout[id].nbytes;
            }
        }
    }
}

bool gh_known_measures(const gh_known *k, gx_tensor *const *now, const gh_ggml *lib, const gh_arena *arenas)
{
    bool asked = false;
    for (int32_t b = 0; b < k->n_arenas; b++) {
        asked |= gh_is_asked(lib, arenas[b].buft);
    }
    for (int32_t i = 0; i < k->n_slots && asked; i++) {
        const int32_t id = k->slot[i].id, b = k->assigned[id];
        if (gh_bytes_in(lib, arenas[b].buft, now[id], gh_form_at(&k->looks, id)->nbytes)
            != k->nbytes[(int64_t)b * k->n_all + id]) {
            return false;
        }
    }
    return true;
}

bool gh_known_same_problem(const gh_known *a, const gh_known *b, bool sizes)
{
    return a->n_all == b->n_all && a->looks.n == b->looks.n && a->n_arenas == b->n_arenas && a->n_slots == b->n_slots
        && gh_same(a->resident, b->resident, a->n_all, sizeof(int32_t))
        && gh_same(a->assigned, b->assigned, a->n_all, sizeof(int32_t))
        && (!sizes || (a->some_larger == b->some_larger
                       && (!a->some_larger || gh_same(a->nbytes, b->nbytes, (int64_t)a->n_arenas * a->n_all,
                                                   sizeof *a->nbytes))));
}

bool gh_known_own(gh_known *k, gs_api_plan *plan)
{
    if (!gh_names_copy(&k->names, &k->lender->names) || !gh_risks_copy(&k->risks, &k->lender->risks)) {
        return false;
    }
    k->plan = plan;
    gh_api->plan_view(plan, &k->view);
    gh_known_drop(k->lender);
    k->lender = NULL;
    return true;
}

void gh_known_rebind(gh_known *k, gh_known *other)
{
    GH_SWAP(gh_looks, k->looks, other->looks);
    GH_SWAP(int32_t *, k->node_arena, other->node_arena);
    GH_SWAP(int32_t *, k->leaf_arena, other->leaf_arena);
    GH_SWAP(int32_t, k->room_listed, other->room_listed);
    GH_SWAP(gh_slot *, k->slot, other->slot);
    GH_SWAP(int32_t, k->n_slots, other->n_slots);
    GH_SWAP(int32_t *, k->viewer, other->viewer);
    GH_SWAP(int32_t, k->n_viewers, other->n_viewers);
    k->generation = 0;
    /* What was swapped has the room of the other's: both count on the lesser. */
    if (k->room != other->room) {
        k->room = other->room = k->room < other->room ? k->room : other->room;
    }
}

int gh_known_draw(gh_known *k, gs_error *error)
{
    const gh_known *from = k->lender;
    gs_graph_size size;
    gs_graph_arrays a;
    int status;
    if (k->drawn) {
        return GS_OK;
    }
    size = from->size;
    size.n_deps = from->arrays.dep_begin != NULL ? from->arrays.dep_begin[from->n_all] : 0;
    status = k->graph != NULL ? gh_api->graph_refill(k->graph, &size, &a, error)
                              : gh_api->graph_new(&size, &a, &k->graph, error);
    if (status != GS_OK) {
        return status;
    }
    memcpy(a.layout, from->arrays.layout, (size_t)k->n_all * sizeof *a.layout);
    memcpy(a.view_src, from->arrays.view_src, (size_t)k->n_all * sizeof *a.view_src);
    memcpy(a.view_offs, from->arrays.view_offs, (size_t)k->n_all * sizeof *a.view_offs);
    memcpy(a.flags, from->arrays.flags, (size_t)k->n_all * sizeof *a.flags);
    for (int32_t id = 0; id < k->looks.n; id++) {
        const gh_form *form = gh_form_at(&k->looks, id);
        if (gh_known_is_aside(from, id)) {
            continue;
        }
        memcpy(a.layout[id].ne, form->shape, sizeof a.layout[id].ne);
        memcpy(a.layout[id].nb, form->shape + 4, sizeof a.layout[id].nb);
        a.layout[id].nbytes = form->nbytes;
        a.view_offs[id] = a.view_src[id] >= 0 && form->nbytes > 0 ? (int64_t)form->view_offs : 0;
    }
    memcpy(a.src_begin, from->arrays.src_begin, ((size_t)k->n_all + 1) * sizeof *a.src_begin);
    memcpy(a.src, from->arrays.src, (size_t)size.n_src * sizeof *a.src);
    memcpy(a.slot, from->arrays.slot, (size_t)size.n_src);
    memset(a.param_begin, 0, ((size_t)k->n_all + 1) * sizeof *a.param_begin);
    memcpy(a.node, from->arrays.node, (size_t)size.n_nodes * sizeof *a.node);
    memcpy(a.leaf, from->arrays.leaf, (size_t)size.n_leafs * sizeof *a.leaf);
    if (size.n_deps > 0) {
        memcpy(a.dep_begin, from->arrays.dep_begin, ((size_t)k->n_all + 1) * sizeof *a.dep_begin);
        memcpy(a.dep, from->arrays.dep, (size_t)size.n_deps * sizeof *a.dep);
    }
    k->arrays = a;
    status = gh_api->graph_finish(k->graph, error);
    k->drawn = status == GS_OK;
    return status;
}

/* -- addresses ------------------------------------------------------------------------------------------------ */

bool gh_known_resolve(gh_known *k, const gh_arena *arenas, uint64_t generation)
{
    const gs_graph_arrays *arrays = k->drawn ? &k->arrays : &k->lender->arrays;
    if (k->generation == generation) {
        return true;
    }
    for (int32_t i = 0; i < k->n_slots; i++) {
        gh_slot *slot = &k->slot[i];
        const int32_t home = k->view.home[slot->id] >= 0 ? k->view.home[slot->id] : k->assigned[slot->id];
        const int64_t offset = k->view.offset[slot->id] >= 0 ? k->view.offset[slot->id] : 0;
        const int64_t stride = k->view.arena[home].stride;
        const int32_t chunk = stride > 0 ? (int32_t)(offset / stride) : 0;
        if (chunk >= arenas[home].n_chunks
            || (k->view.offset[slot->id] < 0 && arrays->layout[slot->id].nbytes != 0)) {
            return false;
        }
        slot->buffer = arenas[home].chunk[chunk].buffer;
        slot->data = arenas[home].chunk[chunk].base + (stride > 0 ? offset % stride : offset);
    }
    k->generation = generation;
    return true;
}

void gh_known_commit(const gh_known *k, const gh_ggml *lib, const gh_arena *arenas, bool placed)
{
    const int32_t n = placed && !gh_some_are_told(arenas, k->n_arenas, lib) ? 0 : k->n_slots;
    for (int32_t i = 0; i < n; i++) {
        const gh_slot *slot = &k->slot[i];
        gx_tensor *t = k->looks.tensor[slot->id];
        if (!placed) {
            t->buffer = slot->buffer;
            t->data = slot->data;
        }
        gh_tell(lib, slot->buffer, t);
    }
    for (int32_t i = 0; i < k->n_viewers; i++) {
        gx_tensor *t = k->looks.tensor[k->viewer[i]], *root = t->view_src;
        /* A view of what was allocated without a buffer is so itself. */
        if (t->buffer == NULL && root->buffer != NULL) {
            t->buffer = root->buffer;
            t->data = (char *)root->data + t->view_offs;
            gh_tell(lib, t->buffer, t);
        }
    }
}
