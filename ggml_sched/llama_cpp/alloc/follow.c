/* ggml_sched/llama_cpp/alloc/follow.c -- plans for graphs that are wired as a planned one.  See follow.h. */
#include "follow.h"
#include "arrays.h"

static bool is_sane(const gh_form *form)
{
    int64_t signs = form->nbytes;
    for (int i = 0; i < 8; i++) {
        signs |= form->shape[i];
    }
    return signs >= 0;
}

static bool make_room_for_offsets(gh_known *k, int32_t n)
{
    if (n > k->room_offsets) {
        if (!gh_grow(&k->taken, sizeof *k->taken, n) || !gh_grow(&k->offset, sizeof *k->offset, n)) {
            return false;
        }
        k->room_offsets = n;
    }
    return true;
}

/* Bytes of everything, asked where it is placed.  False where something is larger than planned, or lies outside of what
 * it views. */
static bool measure(gh_known *k, const gh_known *base, const gh_ggml *lib, const gh_arena *arenas)
{
    const gs_plan_arrays *p = &base->view;
    const int32_t *view_src = base->arrays.view_src;
    int32_t next = 0;
    k->some_larger = base->some_larger;
    memcpy(k->taken, p->size, (size_t)p->n * sizeof *k->taken);
    for (int32_t id = 0; id < k->looks.n; id++) {
        const gh_form *form = gh_form_at(&k->looks, id);
        if (!is_sane(form)) {
            return false;
        }
        if (view_src[id] >= 0 && form->nbytes > 0) {
            const int64_t room = gh_form_at(&k->looks, view_src[id])->nbytes;
            if (form->nbytes > room || form->view_offs > (uint64_t)(room - form->nbytes)) {
                return false;
            }
        }
        for (int32_t b = 0; b < k->n_arenas; b++) {
            k->nbytes[(int64_t)b * k->n_all + id] = gh_known_is_aside(base, id) ? 0 : form->nbytes;
        }
        if (next < base->n_slots && base->slot[next].id == id) {
            const int32_t b = base->assigned[id], home = p->home[id];
            const int64_t alignment = arenas[b].alignment > 0 ? (int64_t)arenas[b].alignment : 1;
            const int64_t size = gh_bytes_in(lib, arenas[b].buft, k->looks.tensor[id], form->nbytes);
            next++;
            k->nbytes[(int64_t)b * k->n_all + id] = size;
            k->some_larger |= size > form->nbytes;
            if (home != b ? size > 0 : size > p->size[id]) {
                return false;
            }
            if (home == b) {
                k->taken[id] = (size + alignment - 1) / alignment * alignment;
            }
        }
    }
    return true;
}

static inline bool has_same_shape(const gh_known *k, int32_t a, int32_t b)
{
    return gh_same_shape(gh_form_at(&k->looks, a), gh_form_at(&k->looks, b));
}

/* Whether the source whose memory a node took over still has its layout, and lies where it did. */
static bool takes_over(const gh_known *k, const gh_known *base, int32_t id)
{
    const gs_plan_arrays *p = &base->view;
    const gs_graph_arrays *g = &base->arrays;
    const int32_t root = p->root[id];
    for (int32_t j = g->src_begin[id]; j < g->src_begin[id + 1]; j++) {
        const int32_t s = g->src[j];
        if (s < k->looks.n && (s == root || p->root[s] == root) && p->offset[s] == p->offset[id]
            && has_same_shape(k, id, s)) {
            return s == root || g->view_src[s] < 0 || (int64_t)gh_form_at(&k->looks, s)->view_offs == p->view_offs[s];
        }
    }
    return false;
}

/* A view takes no bytes in a plan, but is read. */
static int64_t bytes_of(const gh_known *k, int32_t id)
{
    const int64_t own = id < k->looks.n ? gh_form_at(&k->looks, id)->nbytes : 0;
    return k->taken[id] > own ? k->taken[id] : own;
}

static bool overlaps(const gh_known *k, const gs_plan_arrays *p, const int64_t *offset, int32_t a, int32_t b)
{
    return p->home[a] >= 0 && p->home[a] == p->home[b] && offset[a] >= 0 && offset[b] >= 0
        && offset[a] < offset[b] + bytes_of(k, b) && offset[b] < offset[a] + bytes_of(k, a);
}

/* Whether what overlaps at these offsets may be fused, with the layouts of `k`, and would clash. */
static bool clashes(const gh_known *k, const gh_known *base, const gh_ggml *lib, const int64_t *offset)
{
    for (int32_t i = 0; i < base->risks.n; i++) {
        const gh_risk *risk = &base->risks.risk[i];
        const bool in_place = offset[risk->source] == offset[risk->last]
                           && lib->inplace[base->arrays.layout[risk->first].op] != 0;
        if (!overlaps(k, &base->view, offset, risk->source, risk->last)) {
            continue;
        }
        /* Of what only planning knows there are no looks. */
        if (risk->source >= k->looks.n || risk->first >= k->looks.n || risk->mid >= k->looks.n
            || risk->last >= k->looks.n) {
            return true;
        }
        if (has_same_shape(k, risk->first, risk->mid) && has_same_shape(k, risk->mid, risk->last)
            && !(in_place && has_same_shape(k, risk->source, risk->last))) {
            return true;
        }
    }
    return false;
}

/* Offsets at the low end of the arenas; where fused kernels would clash there, those of the lender. */
static bool choose_offsets(gh_known *k, const gh_known *base, const gh_ggml *lib)
{
    const gs_plan_arrays *p = &base->view;
    if (gh_api->plan_compact(base->plan, k->taken, k->offset) == GS_OK && !clashes(k, base, lib, k->offset)) {
        return true;
    }
    memcpy(k->offset, p->offset, (size_t)p->n * sizeof *k->offset);
    return !clashes(k, base, lib, k->offset);
}

bool gh_follow_borrows(gh_known *k, gh_known *base, const gh_ggml *lib, const gh_arena *arenas)
{
    const gs_plan_arrays *p = &base->view;
    const int64_t n_all = base->n_all, n = base->looks.n;
    if (p->n != n_all || p->n_seq != base->size.n_nodes || p->n_groups != 0
        || !gh_known_make_room(k, base->n_all, gh_known_n_listed(base), base->n_arenas)
        || !make_room_for_offsets(k, p->n)) {
        return false;
    }
    k->n_all = base->n_all;
    k->n_arenas = base->n_arenas;
    for (int32_t b = 0; b < k->n_arenas && n < n_all; b++) {
        memcpy(k->nbytes + b * n_all + n, base->nbytes + b * n_all + n, (size_t)(n_all - n) * sizeof *k->nbytes);
    }
    if (!measure(k, base, lib, arenas) || !choose_offsets(k, base, lib)) {
        return false;
    }
    for (int32_t id = 0; id < n; id++) {
        if (p->state[id] & GS_STATE_TOOK_OVER && !takes_over(k, base, id)) {
            return false;
        }
    }
    k->size = base->size;
    k->n_slots = base->n_slots;
    k->n_viewers = base->n_viewers;
    k->names.n = 0;
    k->generation = 0;
    k->keeps.n = 0;
    k->drawn = false;
    memcpy(k->node_arena, base->node_arena, (size_t)base->looks.n_nodes * sizeof *k->node_arena);
    memcpy(k->leaf_arena, base->leaf_arena, (size_t)base->looks.n_leafs * sizeof *k->leaf_arena);
    memcpy(k->resident, base->resident, (size_t)n_all * sizeof *k->resident);
    memcpy(k->assigned, base->assigned, (size_t)n_all * sizeof *k->assigned);
    memcpy(k->slot, base->slot, (size_t)k->n_slots * sizeof *k->slot);
    memcpy(k->viewer, base->viewer, (size_t)k->n_viewers * sizeof *k->viewer);
    atomic_fetch_add(&base->refs, 1);
    k->lender = base;
    k->view = base->view;
    k->view.offset = k->offset;
    k->planned = k->replayed = true;
    return true;
}
