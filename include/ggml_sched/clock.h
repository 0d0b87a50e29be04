/* ggml_sched/clock.h -- the one clock of compiled code. */
#ifndef GGML_SCHED_CLOCK_H
#define GGML_SCHED_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Nanoseconds of a monotonic clock. */
static inline int64_t gs_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#endif
