/* ggml_sched/llama_cpp/follow.c -- graphs beside planned ones.  See follow.h. */
#include "follow.h"

#define GH_N_SRC 10

/* Distances between addresses of the same id: of what has memory and what has none, of views and what are none.  Where
 * one distance holds for all of a kind, tensors that were different are so still, and those of two kinds are anyway. */
typedef struct gh_distances {
    uintptr_t distance[4];
    bool known[4];
} gh_distances;

static inline bool keeps_distance(gh_distances *d, const gx_tensor *t, const gx_tensor *was, const gh_image *image)
{
    const int kind = (image->has != 0) + 2 * (image->links[10] != 0);
    const uintptr_t found = (uintptr_t)t - (uintptr_t)was;
    if (!d->known[kind]) {
        d->known[kind] = true;
        d->distance[kind] = found;
    }
    return d->distance[kind] == found;
}

static inline bool has_links(const gh_image *image)
{
    uint64_t found = 0;
    for (int i = 0; i < GH_N_SRC + 1; i++) {
        found |= image->links[i];
    }
    return found != 0;
}

/* The tensor that stands for an id: now known, or as before. */
static inline bool stands_for(gh_known *k, int32_t id, gx_tensor *t)
{
    if (k->tensor[id] == NULL) {
        k->tensor[id] = t;
    }
    return k->tensor[id] == t;
}

/* Whether the sources and the root of a node stand for those of the same id. */
static bool reads_the_same(gh_known *k, const gh_known *base, int32_t id)
{
    const gs_graph_arrays *g = &base->arrays;
    const gx_tensor *t = k->tensor[id];
    const gh_image *image = &base->image[id];
    for (int i = 0; i < GH_N_SRC; i++) {
        if ((t->src[i] != NULL) != (image->links[i] != 0)) {
            return false;
        }
    }
    for (int32_t j = g->src_begin[id]; j < g->src_begin[id + 1]; j++) {
        /* A root that the node does not name is a source to the planner alone. */
        gx_tensor *source = t->src[g->slot[j]] != NULL ? t->src[g->slot[j]] : t->view_src;
        if (source == NULL || !stands_for(k, g->src[j], source)) {
            return false;
        }
    }
    return g->view_src[id] >= 0 ? t->view_src != NULL && stands_for(k, g->view_src[id], t->view_src)
                                : t->view_src == NULL;
}

bool gh_follow(gh_known *k, const gh_known *base, const gh_ggml *lib, void *graph)
{
    const int32_t n_nodes = base->n_nodes, n_leafs = base->n_leafs, listed = n_nodes > n_leafs ? n_nodes : n_leafs;
    gh_distances distances = {.known = {false}};
    if (!base->plain || base->plan == NULL || !base->drawn || lib->graph_n_nodes(graph) != n_nodes
        || gh_graph_n_leafs(lib, graph) != n_leafs || !gh_known_make_room(k, base->n_all, listed, base->n_arenas)) {
        return false;
    }
    if (n_leafs > 0) {
        memcpy(k->tensor, gh_graph_leafs(lib, graph), (size_t)n_leafs * sizeof *k->tensor);
    }
    if (n_nodes > 0) {
        memcpy(k->tensor + n_leafs, lib->graph_nodes(graph), (size_t)n_nodes * sizeof *k->tensor);
    }
    for (int32_t id = n_leafs + n_nodes; id < base->n; id++) {
        k->tensor[id] = NULL;
    }
    /* What the graph does not list is named by a node: it comes after all of them. */
    for (int32_t id = 0; id < base->n; id++) {
        const gh_image *was = &base->image[id];
        const gx_tensor *t = k->tensor[id];
        gh_image *image = &k->image[id];
        if (t == NULL) {
            return false;
        }
        gh_take_image(image, t, was->sub_mask);
        if (((image->type ^ was->type) | (image->op ^ was->op) | (image->flags ^ was->flags) | (image->has ^ was->has)
             | ((image->sub ^ was->sub) & was->sub_mask)) != 0
            || !keeps_distance(&distances, t, base->tensor[id], image)
            || (image->links[10] != 0) != (was->links[10] != 0)) {
            return false;
        }
        if (base->arrays.layout[id].op == GS_OP_NONE ? has_links(image) : !reads_the_same(k, base, id)) {
            return false;
        }
    }
    return true;
}

static bool same(const void *a, const void *b, int64_t n, size_t item)
{
    return n == 0 || memcmp(a, b, (size_t)n * item) == 0;
}

/* Whether two that were read have the same wiring, id by id. */
static bool same_wiring(const gh_known *a, const gh_known *b)
{
    const gs_graph_arrays *x = &a->arrays, *y = &b->arrays;
    return a == b
        || (a->n == b->n && a->n_all == b->n_all && a->n_nodes == b->n_nodes && a->n_leafs == b->n_leafs
            && a->size.n_nodes == b->size.n_nodes && a->size.n_leafs == b->size.n_leafs
            && a->size.n_src == b->size.n_src && same(x->src_begin, y->src_begin, a->n_all + 1, sizeof *x->src_begin)
            && same(x->src, y->src, a->size.n_src, sizeof *x->src) && same(x->slot, y->slot, a->size.n_src, 1)
            && same(x->view_src, y->view_src, a->n_all, sizeof *x->view_src)
            && same(x->node, y->node, a->size.n_nodes, sizeof *x->node)
            && same(x->leaf, y->leaf, a->size.n_leafs, sizeof *x->leaf));
}

bool gh_follow_equals(const gh_known *k, const gh_known *base, const gh_known *other)
{
    const gh_known *wired = other->followed ? other->lender : other;
    if (!other->planned || wired == NULL || !wired->plain || !wired->drawn || !same_wiring(wired, base)) {
        return false;
    }
    for (int32_t id = 0; id < base->n; id++) {
        const gh_image *a = &k->image[id], *b = &other->image[id];
        const int differs = (a->type ^ b->type) | (a->op ^ b->op) | (a->flags ^ b->flags) | (a->has ^ b->has)
                          | ((a->sub ^ b->sub) & b->sub_mask);
        uint64_t others = a->links[11] ^ b->links[11];
        for (int i = 0; i < 8; i++) {
            others |= (uint64_t)(a->shape[i] ^ b->shape[i]);
        }
        if (differs != 0 || others != 0) {
            return false;
        }
    }
    return true;
}

static inline bool same_layout(const gh_image *a, const gh_image *b)
{
    return a->type == b->type && memcmp(a->shape, b->shape, sizeof a->shape) == 0;
}

/* Bytes of what looks so: quickly for the few types that nearly all results have. */
static int64_t nbytes_of(const gh_ggml *lib, const gh_image *image, const gx_tensor *t)
{
    const int32_t type = gh_type(lib, image->type);
    const int64_t *ne = image->shape, *nb = image->shape + 4;
    const int64_t size = type == GS_TYPE_F32 || type == GS_TYPE_I32 ? 4 : type == GS_TYPE_F16 ? 2 : 0;
    if (size == 0 || (ne[0] | ne[1] | ne[2] | ne[3]) >> 15 != 0 || (nb[0] | nb[1] | nb[2] | nb[3]) >> 45 != 0
        || ne[0] == 0 || ne[1] == 0 || ne[2] == 0 || ne[3] == 0) {
        return (int64_t)lib->nbytes(t);
    }
    return size + (ne[0] - 1) * nb[0] + (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3];
}

static bool is_sane(const gh_image *image)
{
    int64_t signs = 0;
    for (int i = 0; i < 8; i++) {
        signs |= image->shape[i];
    }
    return signs >= 0;
}

/* Bytes of everything, asked where it is placed.  False where something is larger than planned, or lies outside of what
 * it views. */
static bool measure(gh_known *k, const gh_known *base, const gh_ggml *lib, const gh_arena *arenas)
{
    const gs_plan_arrays *p = &base->view;
    int32_t next = 0;
    k->some_larger = base->some_larger;
    for (int32_t id = 0; id < k->n; id++) {
        const gh_image *image = &k->image[id];
        const int64_t nbytes = nbytes_of(lib, image, k->tensor[id]);
        if (!is_sane(image) || nbytes < 0) {
            return false;
        }
        for (int32_t b = 0; b < k->n_arenas; b++) {
            k->nbytes[(int64_t)b * k->n_all + id] = nbytes;
        }
        if (next < base->n_slots && base->slot[next].id == id) {
            const int32_t b = base->assigned[id], home = p->home[id];
            const int64_t asked = (int64_t)lib->buft_get_alloc_size(arenas[b].buft, k->tensor[id]);
            const int64_t size = asked > nbytes ? asked : nbytes;
            next++;
            k->nbytes[(int64_t)b * k->n_all + id] = size;
            k->some_larger |= size > nbytes;
            if (home != b ? size > 0 : size > p->size[id]) {
                return false;
            }
        }
    }
    for (int32_t id = 0; id < k->n; id++) {
        const int32_t root = base->arrays.view_src[id];
        const int64_t offs = (int64_t)k->image[id].links[11];
        /* Rows of the first arena say bytes of layouts: views have no others, and roots at least those. */
        if (root >= 0 && (offs < 0 || offs > INT64_MAX - k->nbytes[id]
                          || offs + k->nbytes[id] > nbytes_of(lib, &k->image[root], k->tensor[root]))) {
            return false;
        }
    }
    return true;
}

/* Whether the source whose memory a node took over still has its layout, and lies where it did. */
static bool takes_over(const gh_known *k, const gh_known *base, int32_t id)
{
    const gs_plan_arrays *p = &base->view;
    const gs_graph_arrays *g = &base->arrays;
    const int32_t root = p->root[id];
    for (int32_t j = g->src_begin[id]; j < g->src_begin[id + 1]; j++) {
        const int32_t s = g->src[j];
        if (s < k->n && (s == root || p->root[s] == root) && p->offset[s] == p->offset[id]
            && same_layout(&k->image[id], &k->image[s])) {
            return s == root || g->view_src[s] < 0 || (int64_t)k->image[s].links[11] == p->view_offs[s];
        }
    }
    return false;
}

/* Whether what overlaps in the plan may be fused, with these layouts, and would clash. */
static bool clashes(const gh_known *k, const gh_known *base, const gh_ggml *lib)
{
    const gs_plan_arrays *p = &base->view;
    for (int32_t i = 0; i < base->risks.n; i++) {
        const gh_risk *risk = &base->risks.risk[i];
        const bool in_place = p->offset[risk->source] == p->offset[risk->last]
                           && lib->inplace[base->arrays.layout[risk->first].op] != 0;
        if (risk->source >= k->n || risk->first >= k->n || risk->mid >= k->n || risk->last >= k->n) {
            return true;
        }
        if (same_layout(&k->image[risk->first], &k->image[risk->mid])
            && same_layout(&k->image[risk->mid], &k->image[risk->last])
            && !(in_place && same_layout(&k->image[risk->source], &k->image[risk->last]))) {
            return true;
        }
    }
    return false;
}

bool gh_follow_borrows(gh_known *k, gh_known *base, const gh_ggml *lib, const gh_arena *arenas)
{
    const gs_plan_arrays *p = &base->view;
    const int64_t n_all = base->n_all;
    if (p->n != n_all || p->n_seq != base->size.n_nodes || p->n_groups != 0) {
        return false;
    }
    k->n = base->n;
    k->n_all = base->n_all;
    k->n_arenas = base->n_arenas;
    for (int32_t b = 0; b < k->n_arenas; b++) {
        memcpy(k->nbytes + b * n_all + k->n, base->nbytes + b * n_all + k->n, (size_t)(n_all - k->n) * sizeof *k->nbytes);
    }
    if (!measure(k, base, lib, arenas) || clashes(k, base, lib)) {
        return false;
    }
    for (int32_t id = 0; id < k->n; id++) {
        if (p->state[id] & GS_STATE_TOOK_OVER && !takes_over(k, base, id)) {
            return false;
        }
    }
    k->n_nodes = base->n_nodes;
    k->n_leafs = base->n_leafs;
    k->n_named = base->n_named;
    k->size = base->size;
    k->n_slots = base->n_slots;
    k->n_viewers = base->n_viewers;
    k->generation = base->generation;
    k->keeps.n = 0;
    k->plain = k->drawn = false;
    memcpy(k->resident, base->resident, (size_t)n_all * sizeof *k->resident);
    memcpy(k->assigned, base->assigned, (size_t)n_all * sizeof *k->assigned);
    memcpy(k->slot, base->slot, (size_t)k->n_slots * sizeof *k->slot);
    memcpy(k->viewer, base->viewer, (size_t)k->n_viewers * sizeof *k->viewer);
    gh_known_borrow(k, base);
    k->followed = true;
    return true;
}
