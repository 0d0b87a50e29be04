/* ggml_sched/llama_cpp/graphs/fused.h -- nodes that ggml's backends compute as one without looking at addresses.
 *
 * A fused kernel reads the sources of its first node while it writes the result of its last.  ggml's own allocator
 * never lets the two overlap: it always computes the later node in place of the earlier one, whose memory was taken
 * while those sources were still in use.  A planner that sees all lifetimes together may put the result where such a
 * source has just died.  What is found here is to be kept until the later node is done.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPHS_FUSED_H
#define GGML_SCHED_LLAMA_CPP_GRAPHS_FUSED_H

#include "read.h"

/* What nodes keep until they are done, for gs_graph_arrays; grows. */
typedef struct gh_keeps {
    int32_t n;          /* pairs                                        */
    int32_t room;
    int32_t *node;      /* [n] ids, in the order in which they are run  */
    int32_t *kept;      /* [n]                                          */
    int32_t *dep_begin; /* of n_tensors, made by gh_keeps_lay_out       */
    int32_t *dep;
    int32_t room_begin;
} gh_keeps;

/* Add the pairs of node and source whose memory overlaps where it must not; how many were added, or
 * GS_NO_HOST_MEMORY. */
int32_t gh_fused_clashes(const gh_reading *r, const gs_graph_arrays *graph, const gs_plan_arrays *plan,
                         gh_keeps *keeps);

/* dep_begin and dep, of the pairs.  GS_OK or GS_NO_HOST_MEMORY. */
int gh_keeps_lay_out(gh_keeps *keeps, int32_t n_tensors);

void gh_keeps_free(gh_keeps *keeps);

/* A source of `first` and the result of `last`, `mid` in between or again `first`: fused, the two may clash where a
 * plan lets them overlap, if layouts make ggml compute one in place of the other. */
typedef struct gh_risk {
    int32_t first;
    int32_t mid;
    int32_t last;
    int32_t source;
} gh_risk;

typedef struct gh_risks {
    gh_risk *risk;
    int32_t n;
    int32_t room;
} gh_risks;

/* All risks of a graph, whatever layouts and plan.  False without memory. */
bool gh_fused_risks(const gh_reading *r, const gs_graph_arrays *graph, gh_risks *risks);

/* Whether a plan overlaps what is at risk. */
bool gh_some_risk_overlaps(const gh_risks *risks, const gs_graph_arrays *graph, const gs_plan_arrays *plan);

/* Let `to` be the same.  False without memory. */
bool gh_risks_copy(gh_risks *to, const gh_risks *from);

void gh_risks_free(gh_risks *risks);

#endif
