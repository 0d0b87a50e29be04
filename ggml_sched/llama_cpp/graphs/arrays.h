/* ggml_sched/llama_cpp/graphs/arrays.h -- arrays that grow, and arrays that are the same. */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPHS_ARRAYS_H
#define GGML_SCHED_LLAMA_CPP_GRAPHS_ARRAYS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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

/* Whether two arrays hold the same n items. */
static inline bool gh_same(const void *a, const void *b, int64_t n, size_t item)
{
    return n == 0 || memcmp(a, b, (size_t)n * item) == 0;
}

#endif
