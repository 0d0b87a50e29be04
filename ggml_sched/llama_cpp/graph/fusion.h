/* ggml_sched/llama_cpp/graph/fusion.h -- nodes that ggml's backends may compute as one kernel.
 *
 * A fused kernel reads the sources of its first node while it writes the result of its last, and no backend checks
 * whether the two overlap.  Under ggml's own allocator they never do: it computes the later node in place of the
 * earlier one, whose memory was taken while those sources were still in use.  A planner that knows all lifetimes may
 * put the result where such a source has just died.  Pairs that conflict become alloc dependencies: the source keeps
 * its memory until the last node is done.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPH_FUSION_H
#define GGML_SCHED_LLAMA_CPP_GRAPH_FUSION_H

#include "graph_reader.h"

/* Alloc dependencies: pairs of a node and a tensor that keeps its memory until the node is done. */
typedef struct gh_alloc_deps {
    int32_t n;          /* pairs                                                    */
    int32_t room;
    int32_t *node;      /* [n] ids                                                  */
    int32_t *tensor;    /* [n] ids                                                  */
    int32_t *dep_begin; /* the same as gs_graph_arrays has it, after gh_alloc_deps_index */
    int32_t *dep;
    int32_t room_begin;
} gh_alloc_deps;

/* Add the pairs whose memory overlaps in a plan though fused kernels may read and write it at once; how many were
 * added, or GS_NO_HOST_MEMORY. */
int32_t gh_fusion_find_conflicts(const gh_reader *r, const gs_graph_arrays *graph, const gs_plan *plan,
                                 gh_alloc_deps *deps);

/* Fill dep_begin and dep.  GS_OK or GS_NO_HOST_MEMORY. */
int gh_alloc_deps_index(gh_alloc_deps *deps, int32_t n_tensors);

/* Add a pair unless it is there: 1 or 0, or GS_NO_HOST_MEMORY. */
int gh_alloc_deps_add(gh_alloc_deps *deps, int32_t node, int32_t tensor);

bool gh_alloc_deps_copy(gh_alloc_deps *to, const gh_alloc_deps *from);

void gh_alloc_deps_free(gh_alloc_deps *deps);

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

void gh_fusion_hazards_free(gh_fusion_hazards *hazards);

#endif
