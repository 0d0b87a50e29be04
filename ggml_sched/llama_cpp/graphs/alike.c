/* ggml_sched/llama_cpp/graphs/alike.c -- whether graphs of other tensors look the same, or alike.  See looks.h. */
#include "arrays.h"
#include "compare.h"

/* -- which tensors ------------------------------------------------------------------------------------------------- */

static bool names_unlisted(const gh_mark *mark, int32_t n_listed)
{
    int32_t most = -1;
    for (int k = 0; k < GH_N_LINKS; k++) {
        most = mark->link[k] > most ? mark->link[k] : most;
    }
    return most >= n_listed || mark->has >> GH_REST_SHIFT != 0;
}

/* Tensors that the graph does not list are those that stand where they were named first. */
static inline void meet(const gh_looks *l, gx_tensor **tensor, const gh_mark *mark, const gx_tensor *t,
                        int32_t n_listed)
{
    if (n_listed == l->n || !names_unlisted(mark, n_listed)) {
        return;
    }
    for (int k = 0; k <= GS_MAX_SRC; k++) {
        const int place = k < GS_MAX_SRC ? gh_place_of_source(k) : GH_ROOT;
        const int32_t rest = mark->has >> GH_REST_SHIFT;
        const int32_t id = place <= GH_ROOT ? mark->link[place]
                         : rest > 0         ? l->rest[rest - 1][place - GH_ROOT - 1] : -1;
        if (id >= n_listed && tensor[id] == NULL) {
            tensor[id] = k < GS_MAX_SRC ? t->src[k] : t->view_src;
        }
    }
}

/* The tensors that a graph lists, for as many ids as `base` has.  False where it cannot be the same, or for want of
 * memory. */
static bool take_listed(gh_looks *l, const gh_looks *base, void *graph)
{
    const gh_ggml *lib = base->forms->lib;
    const int32_t n_nodes = base->n_nodes, n_leafs = base->n_leafs;
    /* What has no id would have to be met, too: such graphs are few, and read. */
    if (!base->plain || base->n_named > base->n || lib->graph_n_nodes(graph) != n_nodes
        || gh_graph_n_leafs(lib, graph) != n_leafs || !gh_looks_make_room_for_tensors(l, base->n)) {
        return false;
    }
    if (n_leafs > 0) {
        memcpy(l->tensor, gh_graph_leafs(lib, graph), (size_t)n_leafs * sizeof *l->tensor);
    }
    if (n_nodes > 0) {
        memcpy(l->tensor + n_leafs, lib->graph_nodes(graph), (size_t)n_nodes * sizeof *l->tensor);
    }
    for (int32_t id = n_leafs + n_nodes; id < base->n; id++) {
        l->tensor[id] = NULL;
    }
    return true;
}

/* Whether all are different: a graph with one in the place of two is another. */
static bool all_differ(gx_tensor *const *tensor, int32_t n)
{
    uint32_t mask = 255;
    const gx_tensor **seen;
    bool differ = true;
    while (mask / 2 < (uint32_t)n) {
        mask = 2 * mask + 1;
    }
    seen = calloc((size_t)mask + 1, sizeof *seen);
    if (seen == NULL) {
        return false;
    }
    for (int32_t id = 0; id < n && differ; id++) {
        uint32_t at = gh_place_in(mask, tensor[id]);
        while (seen[at] != NULL && seen[at] != tensor[id]) {
            at = (at + 1) & mask;
        }
        differ = seen[at] == NULL;
        seen[at] = tensor[id];
    }
    free(seen);
    return differ;
}

/* -- the same ------------------------------------------------------------------------------------------------------ */

static inline __attribute__((always_inline)) bool is_elsewhere(const gh_looks *l, gx_tensor **tensor, bool whole)
{
    const int32_t n_listed = l->n_leafs + l->n_nodes;
    const gh_form *form = l->forms->form;
    gh_buffers buffers = {.forms = l->forms};
    for (int32_t id = 0; id < l->n; id++) {
        const gh_mark *mark = &l->mark[id];
        const gx_tensor *t = tensor[id];
        if (id + GH_AHEAD < n_listed) {
            gh_prefetch(tensor[id + GH_AHEAD]);
        }
        if (t == NULL) {
            return false;
        }
        meet(l, tensor, mark, t, n_listed);
        if (mark->has & GH_STILL && t == l->tensor[id]) {
            if (!gh_is_still(t)) {
                return false;
            }
        } else if (!gh_is_like(l, id, t, tensor, &form[mark->form], &buffers, whole)) {
            return false;
        }
    }
    return all_differ(tensor, l->n);
}

bool gh_looks_match_elsewhere(const gh_looks *l, gh_looks *other, void *graph)
{
    return take_listed(other, l, graph)
        && (l->forms->whole ? is_elsewhere(l, other->tensor, true) : is_elsewhere(l, other->tensor, false));
}

/* -- alike --------------------------------------------------------------------------------------------------------- */

/* The form of a tensor where a form was; -1: of another kind, or no memory.  `was` mostly became what it became
 * last. */
static inline int32_t form_after(gh_forms *forms, int32_t *became, int32_t was, const gx_tensor *t)
{
    int32_t found = became[was];
    if (gh_is_of_form(t, &forms->form[found], false)) {
        return found;
    }
    found = gh_form_of(forms, t);
    if (found < 0 || !gh_same_kind(&forms->form[found], &forms->form[was])) {
        return -1;
    }
    return became[was] = found;
}

static bool follow(gh_looks *l, const gh_looks *base, int32_t *became)
{
    const int32_t n_listed = base->n_leafs + base->n_nodes;
    gh_buffers buffers = {.forms = base->forms};
    for (int32_t id = 0; id < base->n; id++) {
        const gh_mark *was = &base->mark[id];
        const gx_tensor *t = l->tensor[id];
        gh_mark *mark = &l->mark[id];
        gh_difference d = {{0, 0}, 0};
        if (id + GH_AHEAD < n_listed) {
            gh_prefetch(l->tensor[id + GH_AHEAD]);
        }
        if (t == NULL) {
            return false;
        }
        meet(l, l->tensor, was, t, n_listed);
        *mark = *was;
        mark->form = form_after(l->forms, became, was->form, t);
        gh_compare_links(&d, l, l->tensor, was, t);
        gh_compare_memory(&d, base, id, t, &buffers, false);
        if (mark->form < 0 || gh_is_some(d)) {
            return false;
        }
    }
    return all_differ(l->tensor, base->n);
}

bool gh_looks_follow(gh_looks *l, const gh_looks *base, void *graph)
{
    const int32_t n_forms = base->forms->n;
    bool found;
    int32_t *became;
    l->forms = base->forms;
    l->moved = false;
    if (!take_listed(l, base, graph) || !gh_looks_make_room(l, base->n, 0)) {
        return false;
    }
    if (base->n_rest > l->room_rest) {
        if (!gh_grow(&l->rest, sizeof *l->rest, base->n_rest)) {
            return false;
        }
        l->room_rest = base->n_rest;
    }
    became = malloc((size_t)n_forms * sizeof *became + 1);
    if (became == NULL) {
        return false;
    }
    for (int32_t i = 0; i < n_forms; i++) {
        became[i] = i;
    }
    l->n = l->n_named = base->n;
    l->n_nodes = base->n_nodes;
    l->n_leafs = base->n_leafs;
    l->plain = true;
    l->open = false;
    l->n_rest = base->n_rest;
    if (base->n_rest > 0) {
        memcpy(l->rest, base->rest, (size_t)base->n_rest * sizeof *l->rest);
    }
    found = follow(l, base, became);
    free(became);
    return found;
}
