/* ggml_sched/llama_cpp/graph/fusion.h -- nodes that ggml's backends may compute as one kernel.
 *
 * A fused kernel reads the sources of its first node while it writes the result of its last, and no backend checks
 * whether the two overlap.  Under ggml's own allocator they never do: it computes the later node in place of the
 * earlier one, whose memory was taken while those sources were still in use.  A planner that packs all lifetimes may
 * put the result where such a source has just died.  Pairs that conflict become alloc dependencies: the source keeps
 * its memory until the last node is done.
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
    gh_alloc_dep *dep;  /* [n] ascending by node, each once                         */
    int32_t n;
    int32_t room;
} gh_alloc_deps;

/* Add a pair unless it is there.  False without memory. */
bool gh_alloc_deps_add(gh_alloc_deps *deps, int32_t node, int32_t tensor);

/* A source of `first` that must not overlap the result of `last`, if shapes are such that ggml fuses first, mid and
 * last.  `mid` is between the two, or is `first`. */
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

/* All hazards of a wiring, whatever shapes and plan.  False without memory. */
bool gh_fusion_find_hazards(const gh_reader *r, const gs_graph_arrays *graph, gh_fusion_hazards *hazards);

/* -- planner_graph.c: the planner's graph of what was read, finished.  *graph is refilled, or made where it is NULL;
 * *arrays gets its arrays.  `inputs`: leafs that are inputs are flagged so; they keep their memory until all readers
 * are done. */
int gh_build_planner_graph(const gh_reader *r, bool inputs, const gh_alloc_deps *deps, gs_api_graph **graph,
                           gs_graph_arrays *arrays, gs_error *error);

#endif
