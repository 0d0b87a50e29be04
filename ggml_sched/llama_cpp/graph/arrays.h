/* ggml_sched/llama_cpp/graph/arrays.h -- helpers for arrays: growing, copying, comparing, swapping. */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPH_ARRAYS_H
#define GGML_SCHED_LLAMA_CPP_GRAPH_ARRAYS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "ggml_sched/hash.h"

/* Make room for `n` items in the array that *field points to; what is there stays.  False without memory. */
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

/* Make room for n items and more where there are fewer: *room is for how many there is.  False without memory. */
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

/* Copy n items; of none, the arrays may be NULL. */
static inline void gh_copy(void *to, const void *from, int64_t n, size_t item)
{
    if (n > 0) {
        memcpy(to, from, (size_t)n * item);
    }
}

/* Whether two arrays hold the same n items. */
static inline bool gh_same(const void *a, const void *b, int64_t n, size_t item)
{
    return n == 0 || memcmp(a, b, (size_t)n * item) == 0;
}

#endif
