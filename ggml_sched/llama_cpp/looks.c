/* ggml_sched/llama_cpp/looks.c -- taking the looks of graphs, and comparing them.  See looks.h. */
#include "looks.h"

#include <stdlib.h>

/* Tensors from one that is compared to one that is fetched. */
#define GH_AHEAD 8

static bool grow(void *field, size_t item, int64_t n)
{
    void *found = realloc(*(void **)field, item * (size_t)n);
    if (found == NULL) {
        return false;
    }
    memcpy(field, &found, sizeof found);
    return true;
}

static bool make_room(gh_looks *l, int32_t n, int32_t listed)
{
    if (n >= l->room) {
        const int32_t room = n + n / 4 + 64;
        gx_tensor **tensor = realloc(l->tensor != NULL ? l->tensor - 1 : NULL, ((size_t)room + 1) * sizeof *tensor);
        if (tensor == NULL) {
            return false;
        }
        tensor[0] = NULL;
        l->tensor = tensor + 1;
        if (!grow(&l->mark, sizeof *l->mark, room)
            || (l->forms->whole && !grow(&l->memory, sizeof *l->memory, room))) {
            return false;
        }
        l->room = room;
    }
    if (listed >= l->room_listed) {
        const int32_t room = listed + listed / 4 + 16;
        if (!grow(&l->nodes, sizeof *l->nodes, room) || !grow(&l->leafs, sizeof *l->leafs, room)) {
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

/* -- taking -------------------------------------------------------------------------------------------------------- */

static inline bool is_whole(const gh_looks *l)
{
    return l->forms->whole;
}

/* Whether a tensor has memory.  Where plans are of backends, too, views get their root's: that they have it is no news. */
static inline int32_t memory_of(const gx_tensor *t, bool whole)
{
    if (whole && t->view_src != NULL) {
        return 0;
    }
    return (t->data != NULL ? GH_HAS_DATA : 0) | (t->buffer != NULL ? GH_HAS_BUFFER : 0);
}

/* What sort of memory a buffer is: many tensors in a row have the same. */
typedef struct gh_buffers {
    const gh_forms *forms;
    void *last;
    uintptr_t sort;
} gh_buffers;

static inline uintptr_t sort_of(gh_buffers *b, const gx_tensor *t)
{
    if (t->view_src != NULL || t->buffer == NULL) {
        return 0;
    }
    if (t->buffer != b->last) {
        b->last = t->buffer;
        b->sort = (uintptr_t)b->forms->buffer_get_type(t->buffer) + (uintptr_t)b->forms->buffer_get_usage(t->buffer);
    }
    return b->sort;
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
    if (!make_room(l, *n_named + 1, 0)) {
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
            if (!grow(&l->rest, sizeof *l->rest, 2 * (int64_t)l->room_rest + 16)) {
                return NULL;
            }
            l->room_rest = 2 * l->room_rest + 16;
        }
        memset(l->rest[l->n_rest], -1, sizeof l->rest[0]);
        mark->has |= ++l->n_rest << GH_REST_SHIFT;
    }
    return &l->rest[(mark->has >> GH_REST_SHIFT) - 1][k - GH_ROOT - 1];
}

static inline int place_of_source(int k)
{
    return k < GH_ROOT ? k : k + 1;
}

/* What a tensor names, looked up one by one. */
static bool take_links(gh_looks *l, const gh_reading *r, int32_t id, int32_t *n_named)
{
    for (int k = 0; k <= GS_MAX_SRC; k++) {
        const gx_tensor *t = l->tensor[id];
        gx_tensor *named = k < GS_MAX_SRC ? t->src[k] : t->view_src;
        const int32_t found = id_of(l, r, named, n_named);
        if (found >= 0) {
            int32_t *link = link_of(l, &l->mark[id], k < GS_MAX_SRC ? place_of_source(k) : GH_ROOT);
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

/* What a node of a plain graph names: what was read.  A root that it does not name is a source to the planner alone. */
static bool take_plain_links(gh_looks *l, const gh_reading *r, int32_t id)
{
    const gx_tensor *t = l->tensor[id];
    for (int32_t j = r->src_begin[id]; j < r->src_begin[id + 1]; j++) {
        if (t->src[r->slot[j]] != NULL) {
            int32_t *link = link_of(l, &l->mark[id], place_of_source(r->slot[j]));
            if (link == NULL) {
                return false;
            }
            *link = r->src[j];
        }
    }
    l->mark[id].link[GH_ROOT] = t->view_src != NULL ? r->item[id].root : -1;
    return true;
}

bool gh_looks_take(gh_looks *l, gh_forms *forms, const gh_reading *r)
{
    int32_t n_named = r->n;
    gh_buffers buffers = {.forms = forms};
    l->forms = forms;
    if (!make_room(l, r->n, r->n_nodes > r->n_leafs ? r->n_nodes : r->n_leafs)) {
        return false;
    }
    l->n = r->n;
    l->n_nodes = r->n_nodes;
    l->n_leafs = r->n_leafs;
    l->n_rest = 0;
    l->plain = r->plain;
    l->open = false;
    if (r->n_nodes > 0) {
        memcpy(l->nodes, r->nodes, (size_t)r->n_nodes * sizeof *l->nodes);
    }
    if (r->n_leafs > 0) {
        memcpy(l->leafs, r->leafs, (size_t)r->n_leafs * sizeof *l->leafs);
    }
    for (int32_t id = 0; id < r->n; id++) {
        const gh_item *item = &r->item[id];
        const gx_tensor *t = item->tensor;
        gh_mark *mark = &l->mark[id];
        l->tensor[id] = item->tensor;
        memset(mark->link, -1, sizeof mark->link);
        mark->has = memory_of(t, forms->whole);
        mark->form = gh_form_of(forms, t);
        if (mark->form < 0) {
            return false;
        }
        if (forms->whole) {
            l->memory[id] = sort_of(&buffers, t);
        } else if (item->role == GH_EXTERNAL && item->op == GS_OP_NONE && item->node == GH_NOWHERE) {
            mark->has |= GH_STILL;
        }
    }
    for (int32_t id = 0; id < r->n; id++) {
        if (r->plain ? r->item[id].op != GS_OP_NONE && !take_plain_links(l, r, id)
                     : !(l->mark[id].has & GH_STILL) && !take_links(l, r, id, &n_named)) {
            return false;
        }
    }
    return true;
}

/* -- comparing ----------------------------------------------------------------------------------------------------- */

/* The bits that differ between what a tensor names and the tensors of those ids. */
static inline uint64_t differing_links(const gh_looks *l, const gh_mark *mark, const gx_tensor *t)
{
    gx_tensor *const *named = l->tensor;
    uint64_t found = (uintptr_t)named[mark->link[GH_ROOT]] ^ (uintptr_t)t->view_src;
    for (int k = 0; k < GH_ROOT; k++) {
        found |= (uintptr_t)named[mark->link[k]] ^ (uintptr_t)t->src[k];
    }
    if (mark->has >> GH_REST_SHIFT == 0) {
        for (int k = GH_ROOT; k < GS_MAX_SRC; k++) {
            found |= (uintptr_t)t->src[k];
        }
    } else {
        const int32_t *rest = l->rest[(mark->has >> GH_REST_SHIFT) - 1];
        for (int k = GH_ROOT; k < GS_MAX_SRC; k++) {
            found |= (uintptr_t)named[rest[k - GH_ROOT]] ^ (uintptr_t)t->src[k];
        }
    }
    return found;
}

static inline bool has_same_memory(const gh_looks *l, int32_t id, const gx_tensor *t, gh_buffers *buffers, bool whole)
{
    return (l->mark[id].has & (GH_HAS_DATA | GH_HAS_BUFFER)) == memory_of(t, whole)
        && (!whole || l->memory[id] == sort_of(buffers, t));
}

static inline bool matches(const gh_looks *l, bool whole)
{
    const gh_form *form = l->forms->form;
    gh_buffers buffers = {.forms = l->forms};
    for (int32_t id = 0; id < l->n; id++) {
        const gx_tensor *t = l->tensor[id];
        const gh_mark *mark = &l->mark[id];
        const int32_t ahead = id + GH_AHEAD < l->n ? id + GH_AHEAD : id;
        if (l->mark[ahead].has & GH_STILL) {
            __builtin_prefetch((const char *)l->tensor[ahead] + offsetof(gx_tensor, view_src));
        } else {
            gh_prefetch(l->tensor[ahead]);
        }
        if (mark->has & GH_STILL) {
            if (t->view_src != NULL || !has_same_memory(l, id, t, &buffers, false)) {
                return false;
            }
        } else if (differing_links(l, mark, t) != 0 || !gh_has_form(t, &form[mark->form], whole)
                   || !has_same_memory(l, id, t, &buffers, whole)) {
            return false;
        }
    }
    return true;
}

static bool same(const void *a, const void *b, int32_t n)
{
    return n == 0 || memcmp(a, b, (size_t)n * sizeof(void *)) == 0;
}

bool gh_looks_match(const gh_looks *l, void *graph)
{
    const gh_ggml *lib = l->forms->lib;
    /* What the graph does not list is named by what it does, and compared after it. */
    return !l->open && lib->graph_n_nodes(graph) == l->n_nodes && gh_graph_n_leafs(lib, graph) == l->n_leafs
        && same(lib->graph_nodes(graph), l->nodes, l->n_nodes) && same(gh_graph_leafs(lib, graph), l->leafs, l->n_leafs)
        && (is_whole(l) ? matches(l, true) : matches(l, false));
}

/* -- following ----------------------------------------------------------------------------------------------------- */

/* Tensors of one kind whose addresses moved by one distance: those that were different are so still.  Tensors of two
 * kinds are different anyway, and of two groups of a kind where their addresses do not mingle. */
typedef struct gh_group {
    int kind;               /* bit 0: it has memory, bit 1: it is a view                            */
    uintptr_t distance;
    uintptr_t least;        /* addresses                                                            */
    uintptr_t most;
} gh_group;

#define GH_MAX_GROUPS 8

typedef struct gh_groups {
    gh_group group[GH_MAX_GROUPS];
    int n;
    int last;
} gh_groups;

static bool join_group(gh_groups *g, const gx_tensor *t, const gx_tensor *was, const gh_mark *mark)
{
    const int kind = ((mark->has & (GH_HAS_DATA | GH_HAS_BUFFER)) != 0) + 2 * (mark->link[GH_ROOT] >= 0);
    const uintptr_t at = (uintptr_t)t, distance = at - (uintptr_t)was;
    int i = g->last;
    if (g->n == 0 || g->group[i].kind != kind || g->group[i].distance != distance) {
        for (i = 0; i < g->n && (g->group[i].kind != kind || g->group[i].distance != distance);) {
            i++;
        }
        if (i == GH_MAX_GROUPS) {
            return false;
        }
        if (i == g->n) {
            g->group[g->n++] = (gh_group){kind, distance, at, at};
        }
        g->last = i;
    }
    g->group[i].least = at < g->group[i].least ? at : g->group[i].least;
    g->group[i].most = at > g->group[i].most ? at : g->group[i].most;
    return true;
}

static bool are_apart(const gh_groups *g)
{
    for (int i = 0; i < g->n; i++) {
        for (int j = 0; j < i; j++) {
            const gh_group *a = &g->group[i], *b = &g->group[j];
            if (a->kind == b->kind && a->least <= b->most && b->least <= a->most) {
                return false;
            }
        }
    }
    return true;
}

/* Tensors that the graph does not list are those that stand where they were named first. */
static void meet(gh_looks *l, const gh_mark *mark, const gx_tensor *t, int32_t n_listed)
{
    for (int k = 0; k <= GS_MAX_SRC; k++) {
        const int place = k < GS_MAX_SRC ? place_of_source(k) : GH_ROOT;
        const int32_t rest = mark->has >> GH_REST_SHIFT;
        const int32_t id = place <= GH_ROOT ? mark->link[place]
                         : rest > 0         ? l->rest[rest - 1][place - GH_ROOT - 1] : -1;
        if (id >= n_listed && l->tensor[id] == NULL) {
            l->tensor[id] = k < GS_MAX_SRC ? t->src[k] : t->view_src;
        }
    }
}

static bool names_unlisted(const gh_looks *l, const gh_mark *mark, int32_t n_listed)
{
    int32_t most = -1;
    for (int k = 0; k < GH_N_LINKS; k++) {
        most = mark->link[k] > most ? mark->link[k] : most;
    }
    return most >= n_listed || mark->has >> GH_REST_SHIFT != 0;
}

/* The form of a tensor where a form was; -1: of another kind, or no memory.  `was` mostly became what it became last. */
static inline int32_t form_after(gh_forms *forms, int32_t *became, int32_t was, const gx_tensor *t, bool whole)
{
    int32_t found = became[was];
    if (gh_has_form(t, &forms->form[found], whole)) {
        return found;
    }
    found = gh_form_of(forms, t);
    if (found < 0 || !gh_same_kind(&forms->form[found], &forms->form[was])) {
        return -1;
    }
    return became[was] = found;
}

static enum gh_likeness follow(gh_looks *l, const gh_looks *base, int32_t *became, bool whole)
{
    const int32_t n_listed = base->n_leafs + base->n_nodes;
    gh_groups groups = {.n = 0};
    gh_buffers buffers = {.forms = base->forms};
    bool equal = true;
    for (int32_t id = 0; id < base->n; id++) {
        const gh_mark *was = &base->mark[id];
        const gx_tensor *t = l->tensor[id];
        gh_mark *mark = &l->mark[id];
        int32_t form;
        if (id + GH_AHEAD < n_listed) {
            gh_prefetch(l->tensor[id + GH_AHEAD]);
        }
        if (t == NULL) {
            return GH_ANOTHER;
        }
        if (names_unlisted(base, was, n_listed)) {
            meet(l, was, t, n_listed);
        }
        form = form_after(l->forms, became, was->form, t, whole);
        *mark = *was;
        mark->form = form;
        if (form < 0 || differing_links(l, was, t) != 0 || !has_same_memory(base, id, t, &buffers, whole)
            || !join_group(&groups, t, base->tensor[id], was)) {
            return GH_ANOTHER;
        }
        if (whole) {
            l->memory[id] = base->memory[id];
        }
        equal &= form == was->form;
    }
    return !are_apart(&groups) ? GH_ANOTHER : equal ? GH_EQUAL : GH_ALIKE;
}

enum gh_likeness gh_looks_follow(gh_looks *l, const gh_looks *base, void *graph)
{
    const gh_ggml *lib = base->forms->lib;
    const int32_t n_nodes = base->n_nodes, n_leafs = base->n_leafs, n_listed = n_nodes + n_leafs;
    const int32_t n_forms = base->forms->n;
    enum gh_likeness found;
    int32_t *became;
    l->forms = base->forms;
    if (!base->plain || lib->graph_n_nodes(graph) != n_nodes || gh_graph_n_leafs(lib, graph) != n_leafs
        || !make_room(l, base->n, n_nodes > n_leafs ? n_nodes : n_leafs)) {
        return GH_ANOTHER;
    }
    if (base->n_rest > l->room_rest) {
        if (!grow(&l->rest, sizeof *l->rest, base->n_rest)) {
            return GH_ANOTHER;
        }
        l->room_rest = base->n_rest;
    }
    became = malloc((size_t)n_forms * sizeof *became + 1);
    if (became == NULL) {
        return GH_ANOTHER;
    }
    for (int32_t i = 0; i < n_forms; i++) {
        became[i] = i;
    }
    l->n = base->n;
    l->n_nodes = n_nodes;
    l->n_leafs = n_leafs;
    l->plain = true;
    l->open = false;
    l->n_rest = base->n_rest;
    if (base->n_rest > 0) {
        memcpy(l->rest, base->rest, (size_t)base->n_rest * sizeof *l->rest);
    }
    if (n_leafs > 0) {
        memcpy(l->leafs, gh_graph_leafs(lib, graph), (size_t)n_leafs * sizeof *l->leafs);
        memcpy(l->tensor, l->leafs, (size_t)n_leafs * sizeof *l->leafs);
    }
    if (n_nodes > 0) {
        memcpy(l->nodes, lib->graph_nodes(graph), (size_t)n_nodes * sizeof *l->nodes);
        memcpy(l->tensor + n_leafs, l->nodes, (size_t)n_nodes * sizeof *l->nodes);
    }
    for (int32_t id = n_listed; id < base->n; id++) {
        l->tensor[id] = NULL;
    }
    found = base->forms->whole ? follow(l, base, became, true) : follow(l, base, became, false);
    free(became);
    return found;
}
