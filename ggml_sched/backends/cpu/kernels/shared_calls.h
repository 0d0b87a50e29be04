/* shared_calls.h -- runs calls on the threads of another library's thread pool, such as ggml's.
 *
 * All threads of that pool enter gs_run_parts for each call, one call after the other, with the pool's barrier between
 * two calls.  A thread claims parts until none is left, so that a late thread delays no other.
 */
#ifndef GGML_SCHED_KERNELS_SHARED_CALLS_H
#define GGML_SCHED_KERNELS_SHARED_CALLS_H

#include <stdatomic.h>
#include "pool.h"

typedef struct gs_shared_call {
    _Atomic int32_t next;       /* the first part that no thread has claimed; 0 before a run */
    const gs_call *call;
    const gs_work *work;
    char padding[104];          /* makes it 128 bytes: no two calls have counters in one cache line   */
} gs_shared_call;

/* Computes parts of a call until none is left.  Only for kernels that report no fault, as any fault is dropped.
 * `thread` is the caller's number, below work->n_threads and different for each thread: it chooses the scratch. */
static inline void gs_run_parts(gs_shared_call *shared, int32_t thread) {
    const gs_call *call = shared->call;
    const gs_work *work = shared->work;
    char *scratch = work->memory + work->shared + (int64_t)thread * work->scratch;
    gs_fault fault = {0};
    for (;;) {
        int32_t part = atomic_fetch_add_explicit(&shared->next, 1, memory_order_relaxed);
        if (part >= call->n_parts)
            return;
        call->run(call, part, work->memory, scratch, &fault);
    }
}

#endif
