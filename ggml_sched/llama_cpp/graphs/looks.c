/* ggml_sched/llama_cpp/graphs/looks.c -- taking the looks of graphs, and comparing them.  See looks.h. */
#include "arrays.h"
#include "compare.h"

#include <stdlib.h>

bool gh_looks_make_room(gh_looks *l, int32_t n, int32_t listed)
{
    if (n >= l->room) {
        const int32_t room = n + n / 4 + 64;
        gx_tensor **tensor = realloc(l->tensor != NULL ? l->tensor - 1 : NULL, ((size_t)room + 1) * sizeof *tensor);
        if (tensor == NULL) {
            return false;
        }
        tensor[0] = NULL;
        l->tensor = tensor + 1;
        if (!gh_grow(&l->mark, sizeof *l->mark, room)
            || (l->forms->whole && !gh_grow(&l->memory, sizeof *l->memory, room))) {
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

void gh_looks_free(gh_looks *l)
{
    free(l->tensor != NULL ? l->tensor - 1 : NULL);
    free(l->nodes);
    free(l->leafs);
    free(l->mark);
    free(l->memory);
    free(l->rest);
    memset(l, 0, sizeof *l);
}

bool gh_looks_are_few(const gh_looks *const *l, int n, const gh_forms *forms)
{
    unsigned char *used;
    int32_t count = 0;
    if (forms->n <= GH_FEW_FORMS) {
        return false;
    }
    used = calloc((size_t)forms->n, 1);
    for (int i = 0; i < n && used != NULL; i++) {
        for (int32_t id = 0; l[i]->forms == forms && id < l[i]->n; id++) {
            count += !used[l[i]->mark[id].form];
            used[l[i]->mark[id].form] = 1;
        }
    }
    free(used);
    return count < forms->n / 2;
}

/* -- taking -------------------------------------------------------------------------------------------------------- */

static inline bool is_whole(const gh_looks *l)
{
    return l->forms->whole;
}

/* The id of what a tensor names, or, behind the ids, the place of what has none; -1: NULL, -2: no memory. */
static int32_t id_of(gh_looks *l, const gh_reading *r, gx_tensor *named, int32_t *n_named)
{
    int32_t id = named != NULL ? gh_reading_id(r, named) : -1;
    if (named == NULL || id >= 0) {
        return id;
    }
    for (id = l->n; id < *n_named; id++) {
        if (l->tensor[id] == named) {
            return id;
        }
    }
    if (!gh_looks_make_room(l, *n_named + 1, 0)) {
        return -2;
    }
    l->tensor[id] = named;
    ++*n_named;
    /* What such a view names was read, but nothing that is compared names it. */
    l->open |= named->view_src != NULL;
    return id;
}

/* Where link number k of a tensor goes: the first sources, the root, then the rest. */
static int32_t *link_of(gh_looks *l, gh_mark *mark, int k)
{
    if (k <= GH_ROOT) {
        return &mark->link[k];
    }
    if (mark->has >> GH_REST_SHIFT == 0) {
        if (l->n_rest == l->room_rest) {
            if (!gh_grow(&l->rest, sizeof *l->rest, 2 * (int64_t)l->room_rest + 16)) {
                return NULL;
            }
            l->room_rest = 2 * l->room_rest + 16;
        }
        memset(l->rest[l->n_rest], -1, sizeof l->rest[0]);
        mark->has |= ++l->n_rest << GH_REST_SHIFT;
    }
    return &l->rest[(mark->has >> GH_REST_SHIFT) - 1][k - GH_ROOT - 1];
}

/* What a tensor names, looked up one by one. */
static bool take_links(gh_looks *l, const gh_reading *r, int32_t id, int32_t *n_named)
{
    for (int k = 0; k <= GS_MAX_SRC; k++) {
        const gx_tensor *t = l->tensor[id];
        gx_tensor *named = k < GS_MAX_SRC ? t->src[k] : t->view_src;
        const int32_t found = id_of(l, r, named, n_named);
        if (found >= 0) {
            int32_t *link = link_of(l, &l->mark[id], k < GS_MAX_SRC ? gh_place_of_source(k) : GH_ROOT);
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

/* What a node of a plain graph names: what was read.  A root that it does not name is a source to the planner alone;
 * what views something without an op has no root to it. */
static bool take_plain_links(gh_looks *l, const gh_reading *r, int32_t id, int32_t *n_named)
{
    const gx_tensor *t = l->tensor[id];
    for (int32_t j = r->src_begin[id]; j < r->src_begin[id + 1]; j++) {
        if (t->src[r->slot[j]] != NULL) {
            int32_t *link = link_of(l, &l->mark[id], gh_place_of_source(r->slot[j]));
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
        l->mark[id].link[GH_ROOT] = root;
    }
    return true;
}

bool gh_looks_take(gh_looks *l, gh_forms *forms, const gh_reading *r)
{
    int32_t n_named = r->n;
    gh_buffers buffers = {.forms = forms};
    l->forms = forms;
    if (!gh_looks_make_room(l, r->n, r->plain ? 0 : r->n_nodes > r->n_leafs ? r->n_nodes : r->n_leafs)) {
        return false;
    }
    l->n = r->n;
    l->n_nodes = r->n_nodes;
    l->n_leafs = r->n_leafs;
    l->n_rest = 0;
    l->plain = r->plain;
    l->open = false;
    if (!r->plain && r->n_nodes > 0) {
        memcpy(l->nodes, r->nodes, (size_t)r->n_nodes * sizeof *l->nodes);
    }
    if (!r->plain && r->n_leafs > 0) {
        memcpy(l->leafs, r->leafs, (size_t)r->n_leafs * sizeof *l->leafs);
    }
    for (int32_t id = 0; id < r->n; id++) {
        const gh_item *item = &r->item[id];
        const gx_tensor *t = item->tensor;
        gh_mark *mark = &l->mark[id];
        l->tensor[id] = item->tensor;
        memset(mark->link, -1, sizeof mark->link);
        mark->has = gh_memory_of(t, forms->whole);
        mark->form = gh_form_of(forms, t);
        if (mark->form < 0) {
            return false;
        }
        if (forms->whole) {
            l->memory[id] = gh_sort_of(&buffers, t);
        } else if (item->role == GH_EXTERNAL && t->data != NULL && item->op == GS_OP_NONE && item->node == GH_NOWHERE) {
            mark->has |= GH_STILL;
        }
    }
    for (int32_t id = 0; id < r->n; id++) {
        if (r->plain ? r->item[id].op != GS_OP_NONE && !take_plain_links(l, r, id, &n_named)
                     : !(l->mark[id].has & GH_STILL) && !take_links(l, r, id, &n_named)) {
            return false;
        }
    }
    l->n_named = n_named;
    return true;
}

/* -- comparing ----------------------------------------------------------------------------------------------------- */

/* Slots that are still to be written. */
typedef struct gh_slots {
    const gh_slot *next;
    const gh_slot *stop;
} gh_slots;

/* Whether the ids from `first` to `stop` are what is listed, unless nothing is, and look the same.  `slots` may be
 * NULL. */
static inline __attribute__((always_inline)) bool matches(const gh_looks *l, gx_tensor *const *listed, int32_t first,
                                                          int32_t stop, bool whole, gh_slots *slots)
{
    const gh_form *form = l->forms->form;
    gh_buffers buffers = {.forms = l->forms};
    for (int32_t id = first; id < stop; id++) {
        gx_tensor *t = l->tensor[id];
        const gh_mark *mark = &l->mark[id];
        const int32_t ahead = id + GH_AHEAD < l->n ? id + GH_AHEAD : id;
        if (listed != NULL && listed[id - first] != t) {
            return false;
        }
        __builtin_prefetch(mark + GH_MARKS_AHEAD);
        if (l->mark[ahead].has & GH_STILL) {
            __builtin_prefetch((const char *)l->tensor[ahead] + offsetof(gx_tensor, view_src));
        } else {
            gh_prefetch(l->tensor[ahead]);
        }
        if (mark->has & GH_STILL) {
            if (t->view_src != NULL || t->data == NULL) {
                return false;
            }
        } else if ((gh_differing_links(l, mark, t) | gh_differing_form(t, &form[mark->form], whole)
                    | gh_differing_memory(l, id, t, &buffers, whole)) != 0) {
            return false;
        }
        if (slots != NULL && slots->next != slots->stop && slots->next->id == id) {
            t->buffer = slots->next->buffer;
            t->data = slots->next->data;
            slots->next++;
        }
    }
    return true;
}

static inline __attribute__((always_inline)) bool match(const gh_looks *l, void *graph, bool whole,
                                                        gh_slots *slots)
{
    const gh_ggml *lib = l->forms->lib;
    const int32_t n_nodes = lib->graph_n_nodes(graph), n_leafs = gh_graph_n_leafs(lib, graph);
    gx_tensor *const *nodes = lib->graph_nodes(graph), *const *leafs = gh_graph_leafs(lib, graph);
    if (l->open || n_nodes != l->n_nodes || n_leafs != l->n_leafs) {
        return false;
    }
    /* A prompt and a token are built in one place: they differ in their inputs, which come first.  What the graph does
     * not list is named by what it does, and compared after it. */
    if (l->plain) {
        return matches(l, leafs, 0, n_leafs, whole, slots)
            && matches(l, nodes, n_leafs, n_leafs + n_nodes, whole, slots)
            && matches(l, NULL, n_leafs + n_nodes, l->n, whole, slots);
    }
    return gh_same(leafs, l->leafs, n_leafs, sizeof *leafs) && gh_same(nodes, l->nodes, n_nodes, sizeof *nodes)
        && matches(l, NULL, 0, l->n, whole, slots);
}

bool gh_looks_match(const gh_looks *l, void *graph)
{
    if (l->forms == NULL) {
        return false;
    }
    return is_whole(l) ? match(l, graph, true, NULL) : match(l, graph, false, NULL);
}

bool gh_looks_place(const gh_looks *l, void *graph, const gh_slot *slot, int32_t n)
{
    gh_slots slots = {slot, slot + n};
    if (l->forms == NULL) {
        return false;
    }
    if (match(l, graph, false, &slots)) {
        return true;
    }
    for (; slot != slots.next; slot++) {
        l->tensor[slot->id]->buffer = l->tensor[slot->id]->data = NULL;
    }
    return false;
}

bool gh_looks_equal(const gh_looks *a, const gh_looks *b)
{
    return a->plain && b->plain && a->forms == b->forms && a->n == b->n && a->n_nodes == b->n_nodes
        && a->n_leafs == b->n_leafs && a->n_rest == b->n_rest && gh_same(a->mark, b->mark, a->n, sizeof *a->mark)
        && gh_same(a->rest, b->rest, a->n_rest, sizeof *a->rest);
}
