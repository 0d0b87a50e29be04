/* ggml_sched/llama_cpp/graph/planner_graph.c -- builds the planner's graph from a graph of ggml's that was read.  See
 * gh_build_planner_graph in fusion.h. */
#include "fusion.h"

#include <string.h>

const gs_layout gh_no_bytes = {.ne = {0, 1, 1, 1}, .nb = {4, 0, 0, 0}, .type = GS_TYPE_F32, .op = GS_OP_NONE};

static inline bool is_empty(const gs_layout *layout)
{
    return layout->ne[0] == 0 || layout->ne[1] == 0 || layout->ne[2] == 0 || layout->ne[3] == 0;
}

static void fill_tensor(const gh_reader *r, const gs_graph_arrays *a, int32_t id, bool inputs)
{
    const gh_item *item = &r->item[id];
    /* A leaf that was added for a node that is an input has the node's shape: its `root` is that node. */
    const gx_tensor *t = item->tensor != NULL || item->root < 0 ? item->tensor : r->item[item->root].tensor;
    gs_layout *layout = &a->layout[id];
    a->view_src[id] = -1;
    a->view_offs[id] = 0;
    a->flags[id] = 0;
    if (t == NULL || item->role == GH_ROLE_ALIAS) {
        *layout = gh_no_bytes;
        layout->op = item->op;
        return;
    }
    memcpy(layout->ne, t->ne, sizeof layout->ne);
    for (int k = 0; k < 4; k++) {
        layout->nb[k] = (int64_t)t->nb[k];
    }
    layout->type = gh_type(r->lib, t->type);
    layout->op = item->op;
    layout->nbytes = layout->type >= GH_FOREIGN_TYPE ? (int64_t)r->lib->nbytes(t) : 0;
    if (inputs && item->op == GS_OP_NONE && t->flags & GH_FLAG_INPUT) {
        a->flags[id] |= GS_FLAG_INPUT;
    }
    if (item->tensor != NULL && t->flags & GH_FLAG_OUTPUT) {
        a->flags[id] |= GS_FLAG_OUTPUT;
    }
    if (item->tensor != NULL && item->root >= 0) {
        int64_t offs = 0;
        a->view_src[id] = item->root;
        /* A view of no bytes may begin anywhere, even after the end of its root. */
        for (; t->view_src != NULL && !is_empty(layout); t = t->view_src) {
            offs += (int64_t)t->view_offs;
        }
        a->view_offs[id] = offs;
    }
}

int gh_build_planner_graph(const gh_reader *r, bool inputs, const gh_alloc_deps *deps, gs_api_graph **graph,
                           gs_graph_arrays *arrays, gs_error *error)
{
    gs_graph_size size = r->size;
    gs_graph_arrays a;
    int status;
    size.n_deps = deps->n;
    status = *graph != NULL ? gh_api->graph_refill(*graph, &size, &a, error)
                            : gh_api->graph_new(&size, &a, graph, error);
    if (status != GS_OK) {
        return status;
    }
    for (int32_t id = 0; id < r->n_all; id++) {
        fill_tensor(r, &a, id, inputs);
    }
    memcpy(a.src_begin, r->src_begin, ((size_t)r->n_all + 1) * sizeof(int32_t));
    memcpy(a.src, r->src, (size_t)size.n_src * sizeof(int32_t));
    memcpy(a.slot, r->slot, (size_t)size.n_src);
    memset(a.param_begin, 0, ((size_t)r->n_all + 1) * sizeof(int32_t));
    memcpy(a.node, r->order, (size_t)size.n_nodes * sizeof(int32_t));
    memcpy(a.leaf, r->leaf, (size_t)size.n_leafs * sizeof(int32_t));
    for (int32_t id = 0, k = 0; size.n_deps > 0 && id <= r->n_all; id++) {
        for (a.dep_begin[id] = k; k < deps->n && deps->dep[k].node == id; k++) {
            a.dep[k] = deps->dep[k].tensor;
        }
    }
    *arrays = a;
    return gh_api->graph_finish(*graph, error);
}
