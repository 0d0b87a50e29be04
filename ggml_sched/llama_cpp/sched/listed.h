/* ggml_sched/llama_cpp/sched/listed.h -- the schedulers of the process, and their last plans. */
#ifndef GGML_SCHED_LLAMA_CPP_SCHED_LISTED_H
#define GGML_SCHED_LLAMA_CPP_SCHED_LISTED_H

#include "alloc.h"
#include "scheduler.h"

void gh_list(gh_sched *s);
void gh_unlist(gh_sched *s); /* before it is freed */

/* The scheduler number i, in order of creation, held until it is released; NULL: there is none.  Any thread. */
gh_sched *gh_hold(int i, int *n_schedulers);
void gh_release(gh_sched *s);

/* The graph that a held scheduler was asked for last, and its plan, borrowed: in *shown as an allocator's, backends for
 * arenas, whose `facts` there are [n_backends].  NULL: it was asked for none. */
const gh_prepared *gh_show(const gh_sched *s, gh_known *shown, gh_arena_facts *facts);

#endif
