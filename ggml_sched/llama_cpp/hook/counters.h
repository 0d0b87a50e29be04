/* ggml_sched/llama_cpp/hook/counters.h -- counts of what the hook did in this process, and its last failure.  Any
 * thread may call these functions. */
#ifndef GGML_SCHED_LLAMA_CPP_HOOK_COUNTERS_H
#define GGML_SCHED_LLAMA_CPP_HOOK_COUNTERS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include "ggml_sched/api.h"
#include "ggml_sched/clock.h"

enum gh_counter {
    GH_COUNT_RESERVE,       /* calls of ggml_gallocr_reserve_n                      */
    GH_COUNT_RESERVE_NS,    /* nanoseconds inside them                              */
    GH_COUNT_ALLOC,         /* calls of ggml_gallocr_alloc_graph                    */
    GH_COUNT_ALLOC_NS,
    GH_COUNT_SPLIT,         /* calls of ggml_backend_sched_split_graph              */
    GH_COUNT_SPLIT_NS,
    GH_COUNT_SCHED_RESERVE, /* calls of ggml_backend_sched_reserve                  */
    GH_COUNT_SCHED_RESERVE_NS,
    GH_COUNT_SCHED_ALLOC,   /* calls of ggml_backend_sched_alloc_graph              */
    GH_COUNT_SCHED_ALLOC_NS,
    GH_COUNT_NEW,           /* allocators and schedulers made                       */
    GH_COUNT_SAME,          /* graphs of the same tensors as a cached graph         */
    GH_COUNT_EQUAL,         /* graphs of other tensors, equal to a cached graph     */
    GH_COUNT_REPLAYED,      /* graphs that got the plan of a larger graph           */
    GH_COUNT_PLANNED,       /* graphs that were planned                             */
    GH_COUNT_GROWN,         /* buffers allocated or grown                           */
    GH_COUNT_FAILED,        /* calls that failed                                    */
    GH_COUNT_STOCK,         /* allocators made that are ggml's own                  */
    GH_COUNT_SYNCHRONISED,  /* times that all devices were synchronised because buffers change, by the scheduler or
                             * by the client of an allocator that returned false */
    GH_N_COUNTS
};

extern atomic_llong gh_counters[GH_N_COUNTS];

static inline void gh_count_one(enum gh_counter what)
{
    atomic_fetch_add_explicit(&gh_counters[what], 1, memory_order_relaxed);
}

/* GH_TIMED(what), among the declarations of a function, counts a call of it, and the nanoseconds until it returns. */
typedef struct gh_timer {
    enum gh_counter what;
    long long began;
} gh_timer;

static inline void gh_stop_timer(const gh_timer *timer)
{
    gh_count_one(timer->what);
    atomic_fetch_add_explicit(&gh_counters[timer->what + 1], gs_now() - timer->began, memory_order_relaxed);
}

#define GH_TIMED(what) __attribute__((cleanup(gh_stop_timer))) const gh_timer timer = {what, gs_now()}

/* Whether new allocators are ggml's own, for comparison: calls for them are passed on, and timed here. */
extern atomic_bool gh_pass_through;

/* Store and count a failure; returns false. */
bool gh_failed(const gs_error *error);

/* Store and count a failure of this status and message; returns false. */
bool gh_failed_with(int status, const char *message);

/* Store why a library is not supported, unless a reason was stored before; `why` must stay valid. */
void gh_note_unsupported(const char *why);

/* The last failure of the process; false: there was none. */
bool gh_last_error(gs_error *error);

/* The reason that gh_note_unsupported stored first; NULL: every library was supported. */
const char *gh_unsupported(void);

#endif
