/* ggml_sched/llama_cpp/differ.h -- whether tensors look as they did: bytes compared, all of them.
 *
 * Most graphs that are compared are the same, so that looking on costs less than asking at every word.
 */
#ifndef GGML_SCHED_LLAMA_CPP_DIFFER_H
#define GGML_SCHED_LLAMA_CPP_DIFFER_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "abi.h"

/* Two words at once, as every processor that ggml runs on has them. */
typedef uint64_t gh_pair __attribute__((vector_size(16)));

/* The bits that differ in n pairs. */
static inline gh_pair gh_differing(const void *a, const void *b, int n)
{
    gh_pair found = {0, 0};
    for (int i = 0; i < n; i++) {
        gh_pair x, y;
        memcpy(&x, (const char *)a + 16 * i, 16);
        memcpy(&y, (const char *)b + 16 * i, 16);
        found |= x ^ y;
    }
    return found;
}

/* Have the lines of a tensor that is soon compared at hand. */
static inline void gh_prefetch(const gx_tensor *t)
{
    __builtin_prefetch(t);
    __builtin_prefetch((const char *)t + 64);
    __builtin_prefetch((const char *)t + 128);
    __builtin_prefetch((const char *)t + 192);
}

#endif
