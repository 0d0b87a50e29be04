/* ggml_sched/llama_cpp/graph/graph_signature.c -- fills signatures and matches graphs with them.  See
 * graph_signature.h. */
#include "arrays.h"
#include "signature_compare.h"

#include <stdlib.h>

bool gh_signature_make_room_for_tensors(gh_signature *l, int32_t n)
{
    if (n >= l->room_tensor) {
        const int32_t room = n + n / 4 + 64;
        gx_tensor **tensor = realloc(l->tensor != NULL ? l->tensor - 1 : NULL, ((size_t)room + 1) * sizeof *tensor);
        if (tensor == NULL) {
            return false;
        }
        tensor[0] = NULL;
        l->tensor = tensor + 1;
        l->room_tensor = room;
    }
    return true;
}

bool gh_signature_make_room(gh_signature *l, int32_t n, int32_t listed)
{
    if (!gh_signature_make_room_for_tensors(l, n)) {
        return false;
    }
    if (n >= l->room) {
        const int32_t room = n + n / 4 + 64;
        if (!gh_grow(&l->item, sizeof *l->item, room)
            || (l->descriptors->full && !gh_grow(&l->memory, sizeof *l->memory, room))) {
            return false;
        }
        l->room = room;
    }
    if (listed > l->room_listed) {
        const int32_t room = listed + listed / 4 + 16;
        if (!gh_grow(&l->nodes, sizeof *l->nodes, room) || !gh_grow(&l->leafs, sizeof *l->leafs, room)) {
            return false;
        }
        l->room_listed = room;
    }
    return true;
}

void gh_signature_free(gh_signature *l)
{
    free(l->tensor != NULL ? l->tensor - 1 : NULL);
    free(l->previous != NULL ? l->previous - 1 : NULL);
    free(l->nodes);
    free(l->leafs);
    free(l->item);
    free(l->memory);
    free(l->rest);
    memset(l, 0, sizeof *l);
}

bool gh_signature_same_wiring(const gh_signature *a, const gh_signature *b)
{
    bool same = a->descriptors == b->descriptors && a->plain && b->plain && !a->incomplete && !b->incomplete
        && a->n == b->n
             && a->n_named == b->n_named && a->n_nodes == b->n_nodes && a->n_leafs == b->n_leafs
             && a->n_rest == b->n_rest && gh_same(a->rest, b->rest, a->n_rest, sizeof *a->rest);
    for (int32_t id = 0; same && id < a->n; id++) {
        const gh_signature_item *x = &a->item[id], *y = &b->item[id];
        same = x->bits == y->bits && memcmp(x->link, y->link, sizeof x->link) == 0
            && gh_same_kind(gh_descriptor_at(a, id), gh_descriptor_at(b, id));
    }
    return same;
}

void gh_signatures_compact(gh_signature *const *l, int n, gh_descriptors *descriptors)
{
    int32_t *number, count = 0;
    if (descriptors->n <= descriptors->n_kept) {
        return;
    }
    number = calloc((size_t)descriptors->n, sizeof *number);
    for (int i = 0; i < n && number != NULL; i++) {
        for (int32_t id = 0; l[i]->descriptors == descriptors && id < l[i]->n; id++) {
            number[l[i]->item[id].descriptor] = 1;
        }
    }
    for (int32_t descriptor = 0; descriptor < descriptors->n && number != NULL; descriptor++) {
        count += number[descriptor];
        number[descriptor] = number[descriptor] ? count - 1 : -1;
    }
    if (number != NULL) {
        gh_descriptors_keep(descriptors, number, count);
        for (int i = 0; i < n; i++) {
            bool done = l[i]->descriptors != descriptors;
            for (int k = 0; k < i; k++) {
                done |= l[k] == l[i];
            }
            for (int32_t id = 0; !done && id < l[i]->n; id++) {
                l[i]->item[id].descriptor = number[l[i]->item[id].descriptor];
            }
        }
    }
    free(number);
}

/* -- filling ------------------------------------------------------------------------------------------------------- */

/* The id of a tensor that another names; a number behind the ids where it has none; -1: NULL, -2: no memory. */
static int32_t id_of(gh_signature *l, const gh_reader *r, gx_tensor *named, int32_t *n_named)
{
    int32_t id = named != NULL ? gh_reader_id(r, named) : -1;
    if (named == NULL || id >= 0) {
        return id;
    }
    for (id = l->n; id < *n_named; id++) {
        if (l->tensor[id] == named) {
            return id;
        }
    }
    if (!gh_signature_make_room(l, *n_named + 1, 0)) {
        return -2;
    }
    l->tensor[id] = named;
    ++*n_named;
    /* The reader followed this view, but no item that is compared names its root. */
    l->incomplete |= named->view_src != NULL;
    return id;
}

/* Where an item keeps the id of link number k: first sources and root in the item, further sources in `rest`. */
static int32_t *link_of(gh_signature *l, gh_signature_item *item, int k)
{
    if (k <= GH_ROOT) {
        return &item->link[k];
    }
    if (item->bits >> GH_REST_SHIFT == 0) {
        if (l->n_rest == l->room_rest) {
            if (!gh_grow(&l->rest, sizeof *l->rest, 2 * (int64_t)l->room_rest + 16)) {
                return NULL;
            }
            l->room_rest = 2 * l->room_rest + 16;
        }
        memset(l->rest[l->n_rest], -1, sizeof l->rest[0]);
        item->bits |= ++l->n_rest << GH_REST_SHIFT;
    }
    return &l->rest[(item->bits >> GH_REST_SHIFT) - 1][k - GH_ROOT - 1];
}

/* Look up every tensor that a tensor names. */
static bool take_links(gh_signature *l, const gh_reader *r, int32_t id, int32_t *n_named)
{
    for (int k = 0; k <= GS_MAX_SRC; k++) {
        const gx_tensor *t = l->tensor[id];
        gx_tensor *named = k < GS_MAX_SRC ? t->src[k] : t->view_src;
        const int32_t found = id_of(l, r, named, n_named);
        if (found >= 0) {
            int32_t *link = link_of(l, &l->item[id], k < GS_MAX_SRC ? gh_place_of_source(k) : GH_ROOT);
            if (link == NULL) {
                return false;
            }
            *link = found;
        } else if (found == -2) {
            return false;
        }
    }
    return true;
}

/* The same for a node of a plain graph, from what was read.  A root that the node does not name as a source is a source
 * to the planner only; a view of an alias has no root to the planner. */
static bool take_plain_links(gh_signature *l, const gh_reader *r, int32_t id, int32_t *n_named)
{
    const gx_tensor *t = l->tensor[id];
    for (int32_t j = r->src_begin[id]; j < r->src_begin[id + 1]; j++) {
        if (t->src[r->slot[j]] != NULL) {
            int32_t *link = link_of(l, &l->item[id], gh_place_of_source(r->slot[j]));
            if (link == NULL) {
                return false;
            }
            *link = r->src[j];
        }
    }
    if (t->view_src != NULL) {
        const int32_t root = r->item[id].root >= 0 ? r->item[id].root : id_of(l, r, t->view_src, n_named);
        if (root < 0) {
            return false;
        }
        l->item[id].link[GH_ROOT] = root;
    }
    return true;
}

bool gh_signature_fill(gh_signature *l, gh_descriptors *descriptors, const gh_reader *r)
{
    int32_t n_named = r->n;
    gh_buffers buffers = {.descriptors = descriptors};
    l->descriptors = descriptors;
    if (!gh_signature_make_room(l, r->n, r->plain ? 0 : r->n_nodes > r->n_leafs ? r->n_nodes : r->n_leafs)) {
        return false;
    }
    l->n = r->n;
    l->n_nodes = r->n_nodes;
    l->n_leafs = r->n_leafs;
    l->n_rest = 0;
    l->plain = r->plain;
    l->incomplete = l->has_previous = false;
    if (!r->plain && r->n_nodes > 0) {
        memcpy(l->nodes, r->nodes, (size_t)r->n_nodes * sizeof *l->nodes);
    }
    if (!r->plain && r->n_leafs > 0) {
        memcpy(l->leafs, r->leafs, (size_t)r->n_leafs * sizeof *l->leafs);
    }
    for (int32_t id = 0; id < r->n; id++) {
        const gh_item *read = &r->item[id];
        const gx_tensor *t = read->tensor;
        gh_signature_item *item = &l->item[id];
        l->tensor[id] = read->tensor;
        memset(item->link, -1, sizeof item->link);
        item->bits = gh_memory_bits(t, descriptors->full);
        item->descriptor = gh_descriptor_intern(descriptors, t);
        if (item->descriptor < 0) {
            return false;
        }
        if (descriptors->full) {
            l->memory[id] = gh_memory_kind(&buffers, t);
        } else if (read->role == GH_ROLE_EXTERNAL && t->data != NULL && read->op == GS_OP_NONE
            && read->node == GH_NOWHERE) {
            item->bits |= GH_HAS_CONSTANT_DATA;
        }
    }
    for (int32_t id = 0; id < r->n; id++) {
        const bool bare = r->plain ? r->item[id].op == GS_OP_NONE : (l->item[id].bits & GH_HAS_CONSTANT_DATA) != 0;
        /* A node without an op may name tensors that the reader ignored. */
        const bool wired = r->plain && l->tensor[id]->op != 0;
        if (!bare && !(wired ? take_plain_links(l, r, id, &n_named) : take_links(l, r, id, &n_named))) {
            return false;
        }
    }
    l->n_named = n_named;
    return true;
}

/* -- matching ------------------------------------------------------------------------------------------------------ */

/* Slots that are still to be written. */
typedef struct gh_slots {
    const gh_slot *next;
    const gh_slot *stop;
} gh_slots;

/* Whether tensors `first` to `stop` match their items, and are those of `listed` unless that is NULL.  `slots` may be
 * NULL. */
static inline __attribute__((always_inline)) bool matches(const gh_signature *l, gx_tensor *const *tensor,
                                                          gx_tensor *const *listed, int32_t first, int32_t stop,
                                                          bool full, gh_slots *slots)
{
    const gh_descriptor *descriptor = l->descriptors->descriptor;
    const gh_signature_item *items = l->item;
    const gh_slot *next = slots != NULL ? slots->next : NULL, *const end = slots != NULL ? slots->stop : NULL;
    const int32_t n = l->n;
    gh_buffers buffers = {.descriptors = l->descriptors};
    bool same = true;
    for (int32_t id = first; id < stop; id++) {
        gx_tensor *t = tensor[id];
        const gh_signature_item *item = &items[id];
        const int32_t ahead = id + GH_AHEAD < n ? id + GH_AHEAD : id;
        if (listed != NULL && listed[id - first] != t) {
            same = false;
            break;
        }
        __builtin_prefetch(item + GH_ITEMS_AHEAD);
        if (items[ahead].bits & GH_HAS_CONSTANT_DATA) {
            __builtin_prefetch((const char *)tensor[ahead] + offsetof(gx_tensor, view_src));
        } else {
            gh_prefetch(tensor[ahead]);
        }
        if (item->bits & GH_HAS_CONSTANT_DATA) {
            same = gh_has_constant_data(t);
        } else {
            same = gh_matches_item(l, id, t, tensor, &descriptor[item->descriptor], &buffers, full);
        }
        if (!same) {
            break;
        }
        if (next != end && next->id == id) {
            t->buffer = next->buffer;
            t->data = next->data;
            next++;
        }
    }
    if (slots != NULL) {
        slots->next = next;
    }
    return same;
}

/* Two functions that are not inlined: each loop has all registers to itself. */
typedef bool gh_matches(const gh_signature *l, gx_tensor *const *tensor, gx_tensor *const *listed, int32_t first,
                        int32_t stop, gh_slots *slots);

static __attribute__((noinline)) bool matches_full(const gh_signature *l, gx_tensor *const *tensor,
                                                    gx_tensor *const *listed, int32_t first, int32_t stop,
                                                    gh_slots *slots)
{
    (void)slots;
    return matches(l, tensor, listed, first, stop, true, NULL);
}

static __attribute__((noinline)) bool matches_placing(const gh_signature *l, gx_tensor *const *tensor,
                                                      gx_tensor *const *listed, int32_t first, int32_t stop,
                                                      gh_slots *slots)
{
    return matches(l, tensor, listed, first, stop, false, slots);
}

/* Whether a graph consists of these tensors and they match. */
static bool match(const gh_signature *l, gx_tensor *const *tensor, void *graph, gh_matches *matches_as, gh_slots *slots)
{
    const gh_ggml *lib = l->descriptors->lib;
    const int32_t n_nodes = lib->graph_n_nodes(graph), n_leafs = gh_graph_n_leafs(lib, graph);
    gx_tensor *const *nodes = lib->graph_nodes(graph), *const *leafs = gh_graph_leafs(lib, graph);
    if (l->incomplete || n_nodes != l->n_nodes || n_leafs != l->n_leafs) {
        return false;
    }
    /* Leafs come first: a prompt and a token differ in their inputs.  Tensors that are not listed come last: the nodes
     * that name them have matched by then. */
    if (l->plain) {
        return matches_as(l, tensor, leafs, 0, n_leafs, slots)
            && matches_as(l, tensor, nodes, n_leafs, n_leafs + n_nodes, slots)
            && matches_as(l, tensor, NULL, n_leafs + n_nodes, l->n, slots);
    }
    return gh_same(leafs, l->leafs, n_leafs, sizeof *leafs) && gh_same(nodes, l->nodes, n_nodes, sizeof *nodes)
        && matches_as(l, tensor, NULL, 0, l->n, slots);
}

bool gh_signature_matches(const gh_signature *l, void *graph)
{
    return match(l, l->tensor, graph, matches_full, NULL);
}

bool gh_signature_matches_previous(const gh_signature *l, void *graph)
{
    return l->has_previous && match(l, l->previous, graph, matches_full, NULL);
}

static bool place(const gh_signature *l, gx_tensor *const *tensor, void *graph, const gh_slot *slot, int32_t n)
{
    gh_slots slots = {slot, slot + n};
    if (match(l, tensor, graph, matches_placing, &slots)) {
        return true;
    }
    for (; slot != slots.next; slot++) {
        tensor[slot->id]->buffer = tensor[slot->id]->data = NULL;
    }
    return false;
}

bool gh_signature_match_and_place(gh_signature *l, void *graph, const gh_slot *slot, int32_t n)
{
    if (place(l, l->tensor, graph, slot, n)) {
        return true;
    }
    if (!l->has_previous || !place(l, l->previous, graph, slot, n)) {
        return false;
    }
    gh_signature_restore(l);
    return true;
}

/* -- rebinding ----------------------------------------------------------------------------------------------------- */

void gh_signature_restore(gh_signature *l)
{
    GH_SWAP(gx_tensor **, l->tensor, l->previous);
    GH_SWAP(int32_t, l->room_tensor, l->room_previous);
}

void gh_signature_rebind(gh_signature *l, gh_signature *other)
{
    GH_SWAP(gx_tensor **, l->previous, other->tensor);
    GH_SWAP(int32_t, l->room_previous, other->room_tensor);
    gh_signature_restore(l);
    l->has_previous = true;
}
