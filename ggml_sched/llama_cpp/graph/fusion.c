/* ggml_sched/llama_cpp/graph/fusion.c -- conflicts and hazards of fused kernels.  See fusion.h. */
#include "arrays.h"
#include "fusion.h"

#include <stdlib.h>
#include <string.h>

/* Nodes that may be fused: a norm, a product, a sum. */
#define GH_WINDOW 3

int gh_alloc_deps_add(gh_alloc_deps *k, int32_t node, int32_t tensor)
{
    for (int32_t i = 0; i < k->n; i++) {
        if (k->node[i] == node && k->tensor[i] == tensor) {
            return 0;
        }
    }
    if (k->n == k->room) {
        const int32_t room = 2 * k->room + 16;
        if (!gh_grow(&k->node, sizeof *k->node, room) || !gh_grow(&k->tensor, sizeof *k->tensor, room)) {
            return GS_NO_HOST_MEMORY;
        }
        k->room = room;
    }
    k->node[k->n] = node;
    k->tensor[k->n++] = tensor;
    return 1;
}

/* Whether `later` is the only reader of `id`, and ggml would compute it in place of that if their layouts were the
 * same: one kernel may compute both. */
static bool may_follow(const gh_reader *r, const gs_graph_arrays *g, int32_t id, int32_t later)
{
    if (r->lib->inplace[g->layout[later].op] == 0 || r->item[id].n_readers != 1) {
        return false;
    }
    for (int32_t k = g->src_begin[later]; k < g->src_begin[later + 1]; k++) {
        if (g->src[k] == id) {
            return true;
        }
    }
    return false;
}

static bool follows(const gh_reader *r, const gs_graph_arrays *g, int32_t id, int32_t later)
{
    return may_follow(r, g, id, later) && gh_same_layout(&g->layout[id], &g->layout[later]);
}

/* A view takes no bytes in a plan, but has bytes that are read. */
static int64_t size_of(const gs_graph_arrays *g, const gs_plan *p, int32_t id)
{
    return p->size[id] > g->layout[id].nbytes ? p->size[id] : g->layout[id].nbytes;
}

static bool overlaps(const gs_graph_arrays *g, const gs_plan *p, int32_t s, int32_t written)
{
    const int64_t from = p->offset[s], at = p->offset[written];
    return p->arena_of[s] >= 0 && p->arena_of[s] == p->arena_of[written] && from >= 0 && at >= 0
        && from < at + size_of(g, p, written) && at < from + size_of(g, p, s);
}

/* Whether writing the result of a node overwrites a source of an earlier node, other than element by element. */
static bool conflicts(const gh_reader *r, const gs_graph_arrays *g, const gs_plan *p, int32_t reader, int32_t s,
                    int32_t written)
{
    if (!overlaps(g, p, s, written)) {
        return false;
    }
    return p->offset[s] != p->offset[written] || r->lib->inplace[g->layout[reader].op] == 0
        || !gh_same_layout(&g->layout[s], &g->layout[written]);
}

bool gh_fusion_find_hazards(const gh_reader *r, const gs_graph_arrays *g, gh_fusion_hazards *hazards)
{
    const int32_t n = r->size.n_nodes;
    hazards->n = 0;
    for (int32_t i = 0; i + 1 < n; i++) {
        const int32_t first = r->order[i];
        if (gh_is_view_op(g->layout[first].op)) {
            continue;
        }
        for (int32_t k = 1; k < GH_WINDOW && i + k < n && may_follow(r, g, r->order[i + k - 1], r->order[i + k]); k++) {
            for (int32_t j = g->src_begin[first]; j < g->src_begin[first + 1]; j++) {
                if (hazards->n == hazards->room) {
                    if (!gh_grow(&hazards->hazard, sizeof *hazards->hazard, 2 * (int64_t)hazards->room + 64)) {
                        return false;
                    }
                    hazards->room = 2 * hazards->room + 64;
                }
                hazards->hazard[hazards->n++] = (gh_fusion_hazard){first, r->order[i + k - 1],
                                                                       r->order[i + k], g->src[j]};
            }
        }
    }
    return true;
}

bool gh_alloc_deps_copy(gh_alloc_deps *to, const gh_alloc_deps *from)
{
    if (from->n > to->room) {
        if (!gh_grow(&to->node, sizeof *to->node, from->n) || !gh_grow(&to->tensor, sizeof *to->tensor, from->n)) {
            return false;
        }
        to->room = from->n;
    }
    to->n = from->n;
    gh_copy(to->node, from->node, from->n, sizeof *to->node);
    gh_copy(to->tensor, from->tensor, from->n, sizeof *to->tensor);
    return true;
}

void gh_fusion_hazards_free(gh_fusion_hazards *hazards)
{
    free(hazards->hazard);
    memset(hazards, 0, sizeof *hazards);
}

int32_t gh_fusion_find_conflicts(const gh_reader *r, const gs_graph_arrays *g, const gs_plan *p,
                                 gh_alloc_deps *deps)
{
    const int32_t n = r->size.n_nodes;
    int32_t added = 0;
    for (int32_t i = 0; i + 1 < n; i++) {
        /* A view reads nothing. */
        if (gh_is_view_op(g->layout[r->order[i]].op)) {
            continue;
        }
        for (int32_t k = 1; k < GH_WINDOW && i + k < n && follows(r, g, r->order[i + k - 1], r->order[i + k]); k++) {
            const int32_t first = r->order[i], last = r->order[i + k];
            for (int32_t j = g->src_begin[first]; j < g->src_begin[first + 1]; j++) {
                if (conflicts(r, g, p, first, g->src[j], last)) {
                    const int status = gh_alloc_deps_add(deps, last, g->src[j]);
                    if (status < 0) {
                        return status;
                    }
                    added += status;
                }
            }
        }
    }
    return added;
}

int gh_alloc_deps_index(gh_alloc_deps *k, int32_t n_tensors)
{
    int32_t at = 0;
    if (n_tensors + 1 > k->room_begin) {
        if (!gh_grow(&k->dep_begin, sizeof *k->dep_begin, n_tensors + 1)) {
            return GS_NO_HOST_MEMORY;
        }
        k->room_begin = n_tensors + 1;
    }
    if (!gh_grow(&k->dep, sizeof *k->dep, k->n > 0 ? k->n : 1)) {
        return GS_NO_HOST_MEMORY;
    }
    memset(k->dep_begin, 0, ((size_t)n_tensors + 1) * sizeof(int32_t));
    for (int32_t i = 0; i < k->n; i++) {
        k->dep_begin[k->node[i]]++;
    }
    for (int32_t id = 0; id <= n_tensors; id++) {
        const int32_t count = id < n_tensors ? k->dep_begin[id] : 0;
        k->dep_begin[id] = at;
        at += count;
    }
    /* Each list was filled from its start, which has moved to its end: move all back. */
    for (int32_t i = 0; i < k->n; i++) {
        k->dep[k->dep_begin[k->node[i]]++] = k->tensor[i];
    }
    for (int32_t id = n_tensors; id > 0; id--) {
        k->dep_begin[id] = k->dep_begin[id - 1];
    }
    k->dep_begin[0] = 0;
    return GS_OK;
}

void gh_alloc_deps_free(gh_alloc_deps *k)
{
    free(k->node);
    free(k->tensor);
    free(k->dep_begin);
    free(k->dep);
    memset(k, 0, sizeof *k);
}
