/* ggml_sched/llama_cpp/follow.h -- a graph that is wired as one that was planned, found out tensor by tensor.
 *
 * A client builds its graphs anew for every batch: the same nodes in the same order, at other addresses, of other
 * shapes.  Such a graph is gone through once beside the planned one, each tensor next to the one of the same id, and
 * neither read nor made into a graph of the planner's.  Invariant: what is found here is what reading would find; where
 * it might be anything else, the answer is no, and the graph is read.
 */
#ifndef GGML_SCHED_LLAMA_CPP_FOLLOW_H
#define GGML_SCHED_LLAMA_CPP_FOLLOW_H

#include "known.h"

/* Whether `graph` is wired as `base`, which has a plan of its own: then `k`, which has none, gets its tensors and how
 * they look, by the ids of base.  Shapes may differ. */
bool gh_follow(gh_known *k, const gh_known *base, const gh_ggml *lib, void *graph);

/* Whether `k`, which followed `base`, is `other`, apart from addresses: the wiring, and how every tensor looks. */
bool gh_follow_equals(const gh_known *k, const gh_known *base, const gh_known *other);

/* Whether the plan of base serves k, which followed it, with its own shapes in these arenas: then k borrows it. */
bool gh_follow_borrows(gh_known *k, gh_known *base, const gh_ggml *lib, const gh_arena *arenas);

#endif
