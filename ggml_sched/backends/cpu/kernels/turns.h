/* turns.h -- calls that threads of another pool run, such as ggml's.
 *
 * All threads of that pool run each call, one call after the other, with the pool's barrier between two calls; each
 * thread takes parts until none is left, so a late thread delays no other.
 */
#ifndef GGML_SCHED_KERNELS_TURNS_H
#define GGML_SCHED_KERNELS_TURNS_H

#include <stdatomic.h>
#include "pool.h"

/* A call whose turn comes once in a run. */
typedef struct gs_turn {
    _Atomic int32_t next;       /* the first part that no thread has taken; 0 before a run */
    const gs_call *call;
    const gs_work *work;
    char apart[104];            /* each turn on its own cache lines, against false sharing */
} gs_turn;

/* Computes parts of a call whose kernel raises no faults; `thread` < work->n_threads, different for each thread. */
static inline void gs_take_parts(gs_turn *turn, int32_t thread) {
    const gs_call *call = turn->call;
    const gs_work *work = turn->work;
    char *scratch = work->memory + work->shared + (int64_t)thread * work->scratch;
    gs_fault fault = {0};
    for (;;) {
        int32_t part = atomic_fetch_add_explicit(&turn->next, 1, memory_order_relaxed);
        if (part >= call->n_parts)
            return;
        call->run(call, part, work->memory, scratch, &fault);
    }
}

#endif
