/* ggml_sched/llama_cpp/graph/fusion.c -- hazards of fused kernels.  See fusion.h. */
#include "fusion.h"

/* The most nodes that ggml fuses into one kernel: a norm, the product with its weight, and a sum. */
#define GH_WINDOW 3

bool gh_alloc_deps_add(gh_alloc_deps *deps, int32_t node, int32_t tensor)
{
    int32_t at = deps->n;
    for (; at > 0 && deps->dep[at - 1].node >= node; at--) {
        if (deps->dep[at - 1].node == node && deps->dep[at - 1].tensor == tensor) {
            return true;
        }
    }
    if (!gh_make_room(&deps->dep, sizeof *deps->dep, &deps->room, deps->n + 1)) {
        return false;
    }
    memmove(deps->dep + at + 1, deps->dep + at, (size_t)(deps->n++ - at) * sizeof *deps->dep);
    deps->dep[at] = (gh_alloc_dep){node, tensor};
    return true;
}

/* Whether one kernel may compute both nodes `id` and `later`: `later` is the only reader of `id`, and has an op that
 * ggml computes in place of a source of the same layout. */
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

bool gh_fusion_find_hazards(const gh_reader *r, const gs_graph_arrays *g, gh_fusion_hazards *hazards)
{
    const int32_t n = r->size.n_nodes;
    hazards->n = 0;
    for (int32_t i = 0; i + 1 < n; i++) {
        const int32_t first = r->order[i];
        /* A node that is a view reads nothing, and so cannot be the first node of a kernel. */
        if (gh_is_view_op(g->layout[first].op)) {
            continue;
        }
        for (int32_t k = 1; k < GH_WINDOW && i + k < n && may_follow(r, g, r->order[i + k - 1], r->order[i + k]); k++) {
            for (int32_t j = g->src_begin[first]; j < g->src_begin[first + 1]; j++) {
                if (!gh_make_room(&hazards->hazard, sizeof *hazards->hazard, &hazards->room, hazards->n + 1)) {
                    return false;
                }
                hazards->hazard[hazards->n++] = (gh_fusion_hazard){first, r->order[i + k - 1], r->order[i + k],
                                                                   g->src[j]};
            }
        }
    }
    return true;
}
