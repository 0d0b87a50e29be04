/* ggml_sched/llama_cpp/graphs/fused.h -- nodes that ggml's backends compute as one without looking at addresses.
 *
 * A fused kernel reads the sources of its first node while it writes the result of its last.  ggml's own allocator
 * never lets the two overlap: it always computes the later node in place of the earlier one, whose memory was taken
 * while those sources were still in use.  A planner that sees all lifetimes together may put the result where such a
 * source bits just died.  What is found here is to be tensor until the later node is done.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPH_FUSION_H
#define GGML_SCHED_LLAMA_CPP_GRAPH_FUSION_H

#include "graph_reader.h"

/* What nodes keep until they are done, for gs_graph_arrays; grows. */
typedef struct gh_alloc_deps {
    int32_t n;          /* pairs                                        */
    int32_t room;
    int32_t *node;      /* [n] ids, in the order in which they are run  */
    int32_t *tensor;      /* [n]                                          */
    int32_t *dep_begin; /* of n_tensors, made by gh_alloc_deps_index       */
    int32_t *dep;
    int32_t room_begin;
} gh_alloc_deps;

/* Add the pairs of node and source whose memory overlaps where it must not; how many were added, or
 * GS_NO_HOST_MEMORY. */
int32_t gh_fusion_find_conflicts(const gh_reader *r, const gs_graph_arrays *graph, const gs_plan_arrays *plan,
                         gh_alloc_deps *deps);

/* dep_begin and dep, of the pairs.  GS_OK or GS_NO_HOST_MEMORY. */
int gh_alloc_deps_index(gh_alloc_deps *deps, int32_t n_tensors);

/* Add a pair unless it is there: 1 or 0, or GS_NO_HOST_MEMORY. */
int gh_alloc_deps_add(gh_alloc_deps *deps, int32_t node, int32_t tensor);

bool gh_alloc_deps_copy(gh_alloc_deps *to, const gh_alloc_deps *from);

void gh_alloc_deps_free(gh_alloc_deps *deps);

/* A source of `first` that overlaps the result of `last` in a plan, `mid` in between or again `first`: fused, the two
 * may clash, if layouts make ggml compute one in place of the other. */
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

/* All hazards of a plan, whatever the layouts.  False without memory. */
bool gh_fusion_find_hazards(const gh_reader *r, const gs_graph_arrays *graph, gh_fusion_hazards *hazards);

void gh_fusion_hazards_free(gh_fusion_hazards *hazards);

#endif
