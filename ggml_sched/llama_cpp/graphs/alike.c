/* ggml_sched/llama_cpp/graphs/alike.c -- whether graphs of other tensors are wired alike.  See looks.h. */
#include "arrays.h"
#include "compare.h"

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
        const int place = k < GS_MAX_SRC ? gh_place_of_source(k) : GH_ROOT;
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

/* The form of a tensor where a form was; -1: of another kind, or no memory.  `was` mostly became what it became
 * last. */
static inline int32_t form_after(gh_forms *forms, int32_t *became, int32_t was, const gx_tensor *t, bool whole)
{
    int32_t found = became[was];
    if (gh_differing_form(t, &forms->form[found], whole) == 0) {
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
        if (form < 0 || (gh_differing_links(l, was, t) | gh_differing_memory(base, id, t, &buffers, whole)) != 0
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
    /* What has no id would have to be met, too: such graphs are few, and read. */
    if (!base->plain || base->n_named > base->n || lib->graph_n_nodes(graph) != n_nodes
        || gh_graph_n_leafs(lib, graph) != n_leafs || !gh_looks_make_room(l, base->n, 0)) {
        return GH_ANOTHER;
    }
    if (base->n_rest > l->room_rest) {
        if (!gh_grow(&l->rest, sizeof *l->rest, base->n_rest)) {
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
    l->n = l->n_named = base->n;
    l->n_nodes = n_nodes;
    l->n_leafs = n_leafs;
    l->plain = true;
    l->open = false;
    l->n_rest = base->n_rest;
    if (base->n_rest > 0) {
        memcpy(l->rest, base->rest, (size_t)base->n_rest * sizeof *l->rest);
    }
    if (n_leafs > 0) {
        memcpy(l->tensor, gh_graph_leafs(lib, graph), (size_t)n_leafs * sizeof *l->tensor);
    }
    if (n_nodes > 0) {
        memcpy(l->tensor + n_leafs, lib->graph_nodes(graph), (size_t)n_nodes * sizeof *l->tensor);
    }
    for (int32_t id = n_listed; id < base->n; id++) {
        l->tensor[id] = NULL;
    }
    found = base->forms->whole ? follow(l, base, became, true) : follow(l, base, became, false);
    free(became);
    return found;
}
