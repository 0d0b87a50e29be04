/* ggml_sched/llama_cpp/graph/arrays.h -- helpers for arrays: growing, copying, comparing, swapping. */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPH_ARRAYS_H
#define GGML_SCHED_LLAMA_CPP_GRAPH_ARRAYS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "ggml_sched/hash.h"

/* Reallocate the array whose pointer is stored at `field` to `n` items of `item` bytes; its contents stay.  False
 * without memory: the array is unchanged then. */
static inline bool gh_grow(void *field, size_t item, int64_t n)
{
    void *old, *found;
    memcpy(&old, field, sizeof old);
    found = realloc(old, item * (size_t)(n > 0 ? n : 1));
    if (found == NULL) {
        return false;
    }
    memcpy(field, &found, sizeof found);
    return true;
}

/* Let an array have room for at least n items: if *room, its present capacity in items, is less, it grows to a quarter
 * more than n, so that repeated appending copies little.  False without memory. */
static inline bool gh_make_room(void *field, size_t item, int32_t *room, int64_t n)
{
    if (n > *room) {
        if (!gh_grow(field, item, n + n / 4 + 16)) {
            return false;
        }
        *room = (int32_t)(n + n / 4 + 16);
    }
    return true;
}

#define GH_SWAP(type, a, b) do { type gh_kept = (a); (a) = (b); (b) = gh_kept; } while (0)

/* Copy n items of `item` bytes.  memcpy must not be given NULL; here the arrays may be NULL where n is 0. */
static inline void gh_copy(void *to, const void *from, int64_t n, size_t item)
{
    if (n > 0) {
        memcpy(to, from, (size_t)n * item);
    }
}

/* Whether two arrays hold the same n items of `item` bytes; the arrays may be NULL where n is 0. */
static inline bool gh_same(const void *a, const void *b, int64_t n, size_t item)
{
    return n == 0 || memcmp(a, b, (size_t)n * item) == 0;
}

#endif
