/* pool.h -- threads that share the parts of calls; the caller of gs_pool_run is one of them.
 *
 * Each thread claims the parts of its share one at a time, and then those of other threads: so a thread that gets no
 * processor claims none, and the others compute its share.  Threads start with the first call that has several parts;
 * between calls they poll for some microseconds, then sleep.
 * After a fork the child's pool starts anew: it neither waits for the parent's threads nor touches their locks.
 */
#ifndef GGML_SCHED_KERNELS_POOL_H
#define GGML_SCHED_KERNELS_POOL_H

#include "call.h"

typedef struct gs_pool gs_pool;

/* The work memory of a run: tables, then at `memory` `shared` bytes, then `scratch` bytes for each of n_threads; all
 * multiples of 64. */
typedef struct gs_work {
    char *memory;
    int64_t shared;
    int64_t scratch;
    int32_t n_threads;
} gs_work;

/* How long a call took, in nanoseconds.  wall: from its begin to its end; busy: the sum over its parts, on all
 * threads. */
typedef struct gs_time {
    int64_t wall;
    int64_t busy;
} gs_time;

gs_pool *gs_pool_new(void);

/* Sets the largest number of threads of a run, its caller included; ends the running threads if that number changes. */
void gs_pool_resize(gs_pool *pool, int32_t n_threads);

/* Ends the threads; the next gs_pool_run that needs threads starts new ones. */
void gs_pool_stop(gs_pool *pool);
void gs_pool_free(gs_pool *pool);

/* The number of running threads of the pool, without the caller. */
int32_t gs_pool_alive(gs_pool *pool);

/* Runs the n calls in order.  Stops after the first call with a fault and returns its index; -1 if there was none.
 * `times`: an entry for each of the n calls, to which its time is added; NULL: no times. */
int32_t gs_pool_run(gs_pool *pool, const gs_call *calls, int32_t n, const gs_work *work, gs_time *times,
                    gs_fault *fault);

#endif
