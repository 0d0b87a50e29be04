// What kernels need of sm_80 and later: products of matrices by a warp on tensor cores, and copies to shared memory
// that go on while their thread computes.
#pragma once

#include "common.cuh"

// A warp computes d += a b: a has 16 rows of 32 (mma_16_8_16: 16) 8-bit integers, b 8 columns, d is 16 x 8.  Lane l
// holds words l % 4 (of 32 integers also 4 + l % 4) of rows l / 4 and l / 4 + 8 of a; the same words of column l / 4 of
// b; and columns 2 (l % 4) and 2 (l % 4) + 1 of these two rows of d.
#ifndef HOST_CUDA
__device__ __forceinline__ void mma_16_8_32(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_16_8_16(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// d += a b for f16, two to a word, with sums in f32: a has 16 rows of 16 elements, b 8 columns.  Lane l holds of a the
// words l % 4 of rows l / 4 and l / 4 + 8, then the words 4 + l % 4 of these rows; of b both words of column l / 4; of
// d what mma_16_8_32 has.
__device__ __forceinline__ void mma_halves(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two f32 as f16, `low` in the low half of the word.
__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
    uint32_t w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    return w;
}

// Begins to copy 16 bytes to shared memory, past the registers; if not `whole`, 16 zeros.  The thread sees the copied
// bytes after wait_copies(), other threads after a barrier that follows.
__device__ __forceinline__ void copy_16(void* shared, const void* from, bool whole = true) {
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(whole ? 16 : 0) : "memory");
}
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif
