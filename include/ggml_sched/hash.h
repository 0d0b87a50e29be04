/* ggml_sched/hash.h -- the one hash of this package: fingerprints of graphs, keys of requests, seeds of searches. */
#ifndef GGML_SCHED_HASH_H
#define GGML_SCHED_HASH_H

#include <stdint.h>

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

#endif
