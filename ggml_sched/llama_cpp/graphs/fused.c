/* ggml_sched/llama_cpp/graphs/fused.c -- whether a plan overlaps what a fused kernel reads and writes.  See fused.h. */
#include "arrays.h"
#include "fused.h"

#include <stdlib.h>
#include <string.h>

/* Nodes in a row that are looked at together: norm, product, sum. */
#define GH_WINDOW 3

static int add_pair(gh_keeps *k, int32_t node, int32_t kept)
{
    for (int32_t i = 0; i < k->n; i++) {
        if (k->node[i] == node && k->kept[i] == kept) {
            return 0;
        }
    }
    if (k->n == k->room) {
        const int32_t room = 2 * k->room + 16;
        if (!gh_grow(&k->node, sizeof *k->node, room) || !gh_grow(&k->kept, sizeof *k->kept, room)) {
            return GS_NO_HOST_MEMORY;
        }
        k->room = room;
    }
    k->node[k->n] = node;
    k->kept[k->n++] = kept;
    return 1;
}

/* Whether `later` alone reads `id`, and ggml would compute it in place of that if their layouts are the same: a kernel
 * may compute both at once. */
static bool may_follow(const gh_reading *r, const gs_graph_arrays *g, int32_t id, int32_t later)
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

static bool follows(const gh_reading *r, const gs_graph_arrays *g, int32_t id, int32_t later)
{
    return may_follow(r, g, id, later) && gh_same_layout(&g->layout[id], &g->layout[later]);
}

/* A view takes no bytes in a plan, but is read. */
static int64_t size_of(const gs_graph_arrays *g, const gs_plan_arrays *p, int32_t id)
{
    return p->size[id] > g->layout[id].nbytes ? p->size[id] : g->layout[id].nbytes;
}

static bool overlaps(const gs_graph_arrays *g, const gs_plan_arrays *p, int32_t s, int32_t written)
{
    const int64_t from = p->offset[s], at = p->offset[written];
    return p->home[s] >= 0 && p->home[s] == p->home[written] && from >= 0 && at >= 0
        && from < at + size_of(g, p, written) && at < from + size_of(g, p, s);
}

/* Whether the result of a node is written over a source of an earlier one, other than element by element. */
static bool clashes(const gh_reading *r, const gs_graph_arrays *g, const gs_plan_arrays *p, int32_t reader, int32_t s,
                    int32_t written)
{
    if (!overlaps(g, p, s, written)) {
        return false;
    }
    return p->offset[s] != p->offset[written] || r->lib->inplace[g->layout[reader].op] == 0
        || !gh_same_layout(&g->layout[s], &g->layout[written]);
}

bool gh_fused_risks(const gh_reading *r, const gs_graph_arrays *g, gh_risks *risks)
{
    const int32_t n = r->size.n_nodes;
    risks->n = 0;
    for (int32_t i = 0; i + 1 < n; i++) {
        const int32_t first = r->order[i];
        if (gh_is_view_op(g->layout[first].op)) {
            continue;
        }
        for (int32_t k = 1; k < GH_WINDOW && i + k < n && may_follow(r, g, r->order[i + k - 1], r->order[i + k]); k++) {
            for (int32_t j = g->src_begin[first]; j < g->src_begin[first + 1]; j++) {
                if (risks->n == risks->room) {
                    if (!gh_grow(&risks->risk, sizeof *risks->risk, 2 * (int64_t)risks->room + 64)) {
                        return false;
                    }
                    risks->room = 2 * risks->room + 64;
                }
                risks->risk[risks->n++] = (gh_risk){first, r->order[i + k - 1], r->order[i + k], g->src[j]};
            }
        }
    }
    return true;
}

bool gh_some_risk_overlaps(const gh_risks *risks, const gs_graph_arrays *g, const gs_plan_arrays *p)
{
    for (int32_t i = 0; i < risks->n; i++) {
        if (overlaps(g, p, risks->risk[i].source, risks->risk[i].last)) {
            return true;
        }
    }
    return false;
}

bool gh_risks_copy(gh_risks *to, const gh_risks *from)
{
    if (from->n > to->room) {
        if (!gh_grow(&to->risk, sizeof *to->risk, from->n)) {
            return false;
        }
        to->room = from->n;
    }
    to->n = from->n;
    if (from->n > 0) {
        memcpy(to->risk, from->risk, (size_t)from->n * sizeof *from->risk);
    }
    return true;
}

void gh_risks_free(gh_risks *risks)
{
    free(risks->risk);
    memset(risks, 0, sizeof *risks);
}

int32_t gh_fused_clashes(const gh_reading *r, const gs_graph_arrays *g, const gs_plan_arrays *p, gh_keeps *keeps)
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
                if (clashes(r, g, p, first, g->src[j], last)) {
                    const int status = add_pair(keeps, last, g->src[j]);
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

int gh_keeps_lay_out(gh_keeps *k, int32_t n_tensors)
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
    /* Each list is filled from its start, which moves on, and is put back. */
    for (int32_t i = 0; i < k->n; i++) {
        k->dep[k->dep_begin[k->node[i]]++] = k->kept[i];
    }
    for (int32_t id = n_tensors; id > 0; id--) {
        k->dep_begin[id] = k->dep_begin[id - 1];
    }
    k->dep_begin[0] = 0;
    return GS_OK;
}

void gh_keeps_free(gh_keeps *k)
{
    free(k->node);
    free(k->kept);
    free(k->dep_begin);
    free(k->dep);
    memset(k, 0, sizeof *k);
}
