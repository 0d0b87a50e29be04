/* ggml_sched/llama_cpp/graph/fusion.h -- nodes that ggml's backends may compute as one kernel.
 *
 * A fused kernel reads the sources of its first node while it writes the result of its last, and no backend checks
 * whether result and sources overlap.  Under ggml's own allocator they never do: the later node is computed in place of
 * the earlier one, whose memory was allocated while the sources were still in use.  Our planner packs all lifetimes and
 * may put the result where such a source has just died.  Then the source becomes an alloc dependency of the last node,
 * which means that it keeps its memory until that node is done, and the graph is planned again.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPH_FUSION_H
#define GGML_SCHED_LLAMA_CPP_GRAPH_FUSION_H

#include "graph_reader.h"

/* An alloc dependency: a node, and a tensor that keeps its memory until the node is done. */
typedef struct gh_alloc_dep {
    int32_t node;
    int32_t tensor;
} gh_alloc_dep;

typedef struct gh_alloc_deps {
    gh_alloc_dep *dep;  /* [n] ascending by node, each pair once                    */
    int32_t n;
    int32_t room;
} gh_alloc_deps;

/* Add a node and a tensor unless `deps` has this pair.  False without memory. */
bool gh_alloc_deps_add(gh_alloc_deps *deps, int32_t node, int32_t tensor);

/* A source of the node `first` that the result of the node `last` must not overlap if ggml may compute first, mid and
 * last as one kernel: if all three have the same shape.  `mid` is the node just before `last`; it is `first` itself
 * where only two nodes are fused.  All four are ids. */
typedef struct gh_fusion_hazard {
    int32_t first;
    int32_t mid;
    int32_t last;
    int32_t source;
} gh_fusion_hazard;

typedef struct gh_fusion_hazards {
    gh_fusion_hazard *hazard;
    int32_t n;
    int32_t room;
} gh_fusion_hazards;

/* List every hazard that a graph of this wiring can have, whatever its shapes and its plan: gh_plan_find_hazard finds
 * those that a plan really has.  False without memory. */
bool gh_fusion_find_hazards(const gh_reader *r, const gs_graph_arrays *graph, gh_fusion_hazards *hazards);

/* The layout, but for its op, of a tensor of the planner's graph that has no bytes. */
extern const gs_layout gh_no_bytes;

/* -- planner_graph.c: build the planner's graph of the graph that was read, and finish it (graph_finish of the C API).
 * *graph is refilled, or made where it is NULL; *arrays receives its arrays.  `inputs`: whether leafs that ggml flags
 * as inputs get the planner's input flag, with which they keep their memory until all their readers are done. */
int gh_build_planner_graph(const gh_reader *r, bool inputs, const gh_alloc_deps *deps, gs_api_graph **graph,
                           gs_graph_arrays *arrays, gs_error *error);

#endif
