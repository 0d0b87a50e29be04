/* ggml_sched/clock.h -- the clock of all compiled code. */
#ifndef GGML_SCHED_CLOCK_H
#define GGML_SCHED_CLOCK_H

/* Compilers in a strict mode (-std=c11) declare clock_gettime only with this macro. */
#if defined(__STRICT_ANSI__) && !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 199309L
#endif

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
