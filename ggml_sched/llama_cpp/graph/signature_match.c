/* ggml_sched/llama_cpp/graph/signature_match.c -- matches graphs of other tensors: the same signature, or the same
 * wiring. See graph_signature.h. */
#include "arrays.h"
#include "signature_compare.h"

/* -- tensors by id ------------------------------------------------------------------------------------------------- */

static bool names_unlisted(const gh_signature_item *item, int32_t n_listed)
{
    int32_t most = -1;
    for (int k = 0; k < GH_N_LINKS; k++) {
        most = item->link[k] > most ? item->link[k] : most;
    }
    return most >= n_listed || item->bits >> GH_REST_SHIFT != 0;
}

/* A tensor that the graph does not list gets its id from the item that names it first. */
static inline void intern(const gh_signature *l, gx_tensor **tensor, const gh_signature_item *item, const gx_tensor *t,
                        int32_t n_listed)
{
    if (n_listed == l->n || !names_unlisted(item, n_listed)) {
        return;
    }
    for (int k = 0; k <= GS_MAX_SRC; k++) {
        const int place = k < GS_MAX_SRC ? gh_place_of_source(k) : GH_ROOT;
        const int32_t rest = item->bits >> GH_REST_SHIFT;
        const int32_t id = place <= GH_ROOT ? item->link[place]
                         : rest > 0         ? l->rest[rest - 1][place - GH_ROOT - 1] : -1;
        if (id >= n_listed && tensor[id] == NULL) {
            tensor[id] = k < GS_MAX_SRC ? t->src[k] : t->view_src;
        }
    }
}

/* Fill the tensors that a graph lists.  False: it cannot match, or there is no memory. */
static bool take_listed(gh_signature *l, const gh_signature *base, void *graph)
{
    const gh_ggml *lib = base->descriptors->lib;
    const int32_t n_nodes = base->n_nodes, n_leafs = base->n_leafs;
    /* Tensors that are named but have no id would have to be found as well.  Such graphs are rare; they are read. */
    if (!base->plain || base->n_named > base->n || lib->graph_n_nodes(graph) != n_nodes
        || gh_graph_n_leafs(lib, graph) != n_leafs || !gh_signature_make_room_for_tensors(l, base->n)) {
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

/* Whether all tensors are different: a graph with one tensor in the place of two does not match. */
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
        uint32_t at = gh_bucket(mask, tensor[id]);
        while (seen[at] != NULL && seen[at] != tensor[id]) {
            at = (at + 1) & mask;
        }
        differ = seen[at] == NULL;
        seen[at] = tensor[id];
    }
    free(seen);
    return differ;
}

/* -- the same signature -------------------------------------------------------------------------------------------- */

static inline __attribute__((always_inline)) bool matches_moved(const gh_signature *l, gx_tensor **tensor, bool full)
{
    const int32_t n_listed = l->n_leafs + l->n_nodes;
    const gh_descriptor *descriptor = l->descriptors->descriptor;
    gh_buffers buffers = {.descriptors = l->descriptors};
    for (int32_t id = 0; id < l->n; id++) {
        const gh_signature_item *item = &l->item[id];
        const gx_tensor *t = tensor[id];
        if (id + GH_AHEAD < n_listed) {
            gh_prefetch(tensor[id + GH_AHEAD]);
        }
        if (t == NULL) {
            return false;
        }
        intern(l, tensor, item, t, n_listed);
        if (item->bits & GH_HAS_CONSTANT_DATA && t == l->tensor[id]) {
            if (!gh_has_constant_data(t)) {
                return false;
            }
        } else if (!gh_matches_item(l, id, t, tensor, &descriptor[item->descriptor], &buffers, full)) {
            return false;
        }
    }
    return all_differ(tensor, l->n);
}

bool gh_signature_matches_moved(const gh_signature *l, gh_signature *other, void *graph)
{
    return take_listed(other, l, graph)
        && (l->descriptors->full ? matches_moved(l, other->tensor, true) : matches_moved(l, other->tensor, false));
}

/* -- the same wiring ----------------------------------------------------------------------------------------------- */

/* The descriptor of a tensor whose counterpart has descriptor `was`; -1: it is of another kind, or there is no memory.
 * Tensors that shared a descriptor mostly share one again: latest[was] has the last. */
static inline int32_t descriptor_after(gh_descriptors *descriptors, int32_t *latest, int32_t was, const gx_tensor *t)
{
    int32_t found = latest[was];
    if (gh_has_descriptor(t, &descriptors->descriptor[found], descriptors->full)) {
        return found;
    }
    found = gh_descriptor_intern(descriptors, t);
    if (found < 0 || !gh_same_kind(&descriptors->descriptor[found], &descriptors->descriptor[was])) {
        return -1;
    }
    return latest[was] = found;
}

static bool match_wiring(gh_signature *l, const gh_signature *base, int32_t *latest)
{
    const int32_t n_listed = base->n_leafs + base->n_nodes;
    const bool full = base->descriptors->full;
    gh_buffers buffers = {.descriptors = base->descriptors};
    for (int32_t id = 0; id < base->n; id++) {
        const gh_signature_item *was = &base->item[id];
        const gx_tensor *t = l->tensor[id];
        gh_signature_item *item = &l->item[id];
        gh_difference d = {{0, 0}, 0};
        if (id + GH_AHEAD < n_listed) {
            gh_prefetch(l->tensor[id + GH_AHEAD]);
        }
        if (t == NULL) {
            return false;
        }
        intern(l, l->tensor, was, t, n_listed);
        *item = *was;
        if (full) {
            l->memory[id] = base->memory[id];
        }
        item->descriptor = descriptor_after(l->descriptors, latest, was->descriptor, t);
        gh_compare_links(&d, l, l->tensor, was, t);
        gh_compare_memory(&d, base, id, t, &buffers, full);
        if (item->descriptor < 0 || gh_is_some(d)) {
            return false;
        }
    }
    return all_differ(l->tensor, base->n);
}

bool gh_signature_matches_wiring(gh_signature *l, const gh_signature *base, void *graph)
{
    const int32_t n_descriptors = base->descriptors->n;
    bool found;
    int32_t *latest;
    l->descriptors = base->descriptors;
    l->has_previous = false;
    if (!take_listed(l, base, graph) || !gh_signature_make_room(l, base->n, 0)) {
        return false;
    }
    if (base->n_rest > l->room_rest) {
        if (!gh_grow(&l->rest, sizeof *l->rest, base->n_rest)) {
            return false;
        }
        l->room_rest = base->n_rest;
    }
    latest = malloc((size_t)n_descriptors * sizeof *latest + 1);
    if (latest == NULL) {
        return false;
    }
    for (int32_t i = 0; i < n_descriptors; i++) {
        latest[i] = i;
    }
    l->n = l->n_named = base->n;
    l->n_nodes = base->n_nodes;
    l->n_leafs = base->n_leafs;
    l->plain = true;
    l->incomplete = false;
    l->n_rest = base->n_rest;
    if (base->n_rest > 0) {
        memcpy(l->rest, base->rest, (size_t)base->n_rest * sizeof *l->rest);
    }
    found = match_wiring(l, base, latest);
    free(latest);
    return found;
}
