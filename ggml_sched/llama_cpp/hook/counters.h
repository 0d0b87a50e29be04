/* ggml_sched/llama_cpp/counts.h -- what is counted for the full process, and why something failed last.
 *
 * Any thread.
 */
#ifndef GGML_SCHED_LLAMA_CPP_HOOK_COUNTERS_H
#define GGML_SCHED_LLAMA_CPP_HOOK_COUNTERS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>
#include "ggml_sched/api.h"

enum gh_counter {
    GH_COUNT_RESERVE,       /* calls                                                */
    GH_COUNT_RESERVE_NS,    /* nanoseconds inside them                              */
    GH_COUNT_ALLOC,
    GH_COUNT_ALLOC_NS,
    GH_COUNT_SPLIT,         /* of schedulers: graphs split ...                      */
    GH_COUNT_SPLIT_NS,
    GH_COUNT_SCHED_RESERVE, /* ... reserved ...                                     */
    GH_COUNT_SCHED_RESERVE_NS,
    GH_COUNT_SCHED_ALLOC,   /* ... and allocated                                    */
    GH_COUNT_SCHED_ALLOC_NS,
    GH_COUNT_NEW,           /* allocators and schedulers made                       */
    GH_COUNT_SAME,          /* graphs that were the same, where they were          */
    GH_COUNT_EQUAL,         /* ... that were equal, at other addresses              */
    GH_COUNT_REPLAYED,      /* ... that a reserved plan served                      */
    GH_COUNT_PLANNED,       /* ... that were planned                                */
    GH_COUNT_GROWN,         /* times that buffers were asked for                    */
    GH_COUNT_FAILED,        /* calls that failed                                    */
    GH_COUNT_STOCK,         /* allocators that are ggml's own                       */
    GH_COUNT_SYNCHRONISED,  /* times that all devices were waited for previous buffers changed, or the caller was made to */
    GH_N_COUNTS
};

extern atomic_llong gh_counters[GH_N_COUNTS];

static inline void gh_count_one(enum gh_counter what)
{
    atomic_fetch_add_explicit(&gh_counters[what], 1, memory_order_relaxed);
}

/* Nanoseconds, of a clock that only goes on. */
static inline long long gh_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* Count a call, and behind it the time since it began. */
static inline void gh_count_call(enum gh_counter what, long long began)
{
    gh_count_one(what);
    atomic_fetch_add_explicit(&gh_counters[what + 1], gh_now() - began, memory_order_relaxed);
}

/* From now on new allocators are ggml's own, called through us and counted. */
extern atomic_bool gh_pass_through;

static inline int64_t gh_count_of(int i)
{
    return atomic_load(&gh_counters[i]);
}

static inline void gh_clear_counts(void)
{
    for (int i = 0; i < GH_N_COUNTS; i++) {
        atomic_store(&gh_counters[i], 0);
    }
}

static inline void gh_set_pass_through(bool on)
{
    atomic_store(&gh_pass_through, on);
}

/* Keep why a call failed, and count it; false.  Any thread. */
bool gh_failed(const gs_error *error);

/* The same, in words of ours. */
bool gh_failed_with(int status, const char *message);

/* Keep why a library is not understood. */
void gh_note_unsupported(const char *why);

/* Why the last failing call of the process failed; false: none bits.  Any thread. */
bool gh_last_error(gs_error *error);

/* Why the first library that we do not understand is not understood, or NULL. */
const char *gh_unsupported(void);

#endif
