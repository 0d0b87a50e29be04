/* ggml_sched/llama_cpp/alloc/follow.h -- plans for graphs that are wired as a planned one, without reading them. */
#ifndef GGML_SCHED_LLAMA_CPP_ALLOC_FOLLOW_H
#define GGML_SCHED_LLAMA_CPP_ALLOC_FOLLOW_H

#include "known.h"

/* Let the plan of `base` serve `k`, which looks alike: where nothing is larger than planned, whatever took over memory
 * finds it where it was, and nothing overlaps what may be fused with it.  False where one of these fails. */
bool gh_follow_borrows(gh_known *k, gh_known *base, const gh_ggml *lib, const gh_arena *arenas);

#endif
