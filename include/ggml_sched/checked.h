/* ggml_sched/checked.h -- arithmetic on sizes and offsets with overflow checks.
 *
 * All arithmetic on sizes and offsets from a file or a user uses these functions.  Values are bytes or elements in
 * int64_t.  A gs_checked_* function stores the result in *out and returns GS_OK.  If the result does not fit, or an
 * argument is negative, it leaves *out unchanged and returns GS_OVERFLOW.
 */
#ifndef GGML_SCHED_CHECKED_H
#define GGML_SCHED_CHECKED_H

#include <stdint.h>
#include "ggml_sched/status.h"

static inline int gs_checked_add(int64_t a, int64_t b, int64_t *out) {
    if (a < 0 || b < 0 || a > INT64_MAX - b) return GS_OVERFLOW;
    *out = a + b;
    return GS_OK;
}

static inline int gs_checked_mul(int64_t a, int64_t b, int64_t *out) {
#if defined(__GNUC__)
    int64_t product; /* no division: this runs about ten times for each tensor */
    if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &product)) return GS_OVERFLOW;
    *out = product;
#else
    if (a < 0 || b < 0 || (b != 0 && a > INT64_MAX / b)) return GS_OVERFLOW;
    *out = a * b;
#endif
    return GS_OK;
}

/* Round a up to a multiple of alignment, which is any positive number. */
static inline int gs_checked_align(int64_t a, int64_t alignment, int64_t *out) {
    int64_t rest;
    if (a < 0 || alignment <= 0) return GS_OVERFLOW;
    rest = a % alignment;
    return rest ? gs_checked_add(a, alignment - rest, out) : (*out = a, GS_OK);
}

/* Does [offset, offset + size) lie inside [0, capacity)? */
static inline int gs_range_fits(int64_t offset, int64_t size, int64_t capacity) {
    return offset >= 0 && size >= 0 && size <= capacity && offset <= capacity - size;
}

#endif
