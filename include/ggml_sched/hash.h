/* ggml_sched/hash.h -- the one hash of this package (fingerprints of graphs, keys of requests, seeds of searches),
 * and an index of pointers. */
#ifndef GGML_SCHED_HASH_H
#define GGML_SCHED_HASH_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* One step of a 64-bit multiply-and-shift hash. */
static inline uint64_t gs_mix(uint64_t h, uint64_t x) {
    h = (h ^ x) * UINT64_C(0x9E3779B97F4A7C15);
    return h ^ (h >> 29);
}

/* One step of a second hash; both hashes of the same input together have 128 bits. */
static inline uint64_t gs_mix_other(uint64_t h, uint64_t x) {
    h = (h ^ x) * UINT64_C(0xC2B2AE3D27D4EB4F);
    return h ^ (h >> 32);
}

/* A hash table from pointers to their positions in an array of the caller: open addressing, at least half of it
 * empty. */
typedef struct gs_index {
    int32_t *slot;              /* [mask + 1] a pointer's position + 1; 0: an empty slot; the caller frees the array */
    uint32_t mask;
    int64_t room;               /* how many slots are allocated; the table uses the first mask + 1 of them */
} gs_index;

/* Empty the index, and make a table for n pointers.  False if calloc fails; the index is then unchanged. */
static inline bool gs_index_reset(gs_index *index, int64_t n) {
    int64_t size = 64;
    while (size < 2 * n) size *= 2;
    if (size > index->room) {
        int32_t *slot = (int32_t *)calloc((size_t)size, sizeof(int32_t));
        if (slot == NULL) return false;
        free(index->slot);
        index->slot = slot;
        index->room = size;
    } else {
        memset(index->slot, 0, (size_t)size * sizeof(int32_t));
    }
    index->mask = (uint32_t)size - 1;
    return true;
}

/* How many pointers the table has room for. */
static inline int64_t gs_index_capacity(const gs_index *index) {
    return ((int64_t)index->mask + 1) / 2;
}

/* The slot of a pointer, or the empty slot where the caller may enter it.  `pointers` is the caller's array; its items
 * are `stride` bytes and begin with a pointer. */
static inline int32_t *gs_index_find(const gs_index *index, const void *pointers, size_t stride, const void *pointer) {
    uint32_t at = (uint32_t)((((uint64_t)(uintptr_t)pointer >> 4) * UINT64_C(0x9E3779B97F4A7C15)) >> 32) & index->mask;
    while (index->slot[at] != 0
           && *(const void *const *)((const char *)pointers + (size_t)(index->slot[at] - 1) * stride) != pointer) {
        at = (at + 1) & index->mask;
    }
    return &index->slot[at];
}

#endif
