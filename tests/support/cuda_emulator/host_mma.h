// Products of matrices by a warp on the host: mma.sync.aligned.m16n8k32 and m16n8k16 .row.col.s32.s8.s8.s32 of 8-bit
// integers, and m16n8k16.row.col.f32.f16.f16.f32.
//
// Which elements a lane has is as PTX documents it for these instructions ("Matrix fragments"), written as functions of
// the lane and of the element's number, i.  Every lane stores its registers, and after all 32 have, computes its own
// four elements from theirs.  Invariant: a lane is at most one instruction ahead of the others, so two copies do.
// PTX leaves the order of f32 sums open, and permits more precision; here products, which are exact, are added to the
// sum one after the other, by ascending k.
#pragma once
#include "host_math.h"
#include "host_warp.h"

namespace host_cuda {

struct Registers { uint32_t a[4], b[2]; };
static Registers registers[32][2][32];      // of a warp, by turn and lane

struct Place { int row, column; };

// Element i of lane `lane` of a (16 x k), of b (k x 8), of c and d (16 x 8); eight-bit elements, four to a register.
static inline Place place_in_a(int lane, int i) {
    return {lane / 4 + (i / 4 % 2 ? 8 : 0), lane % 4 * 4 + i % 4 + (i < 8 ? 0 : 16)};
}
static inline Place place_in_b(int lane, int i) { return {lane % 4 * 4 + i % 4 + (i < 4 ? 0 : 16), lane / 4}; }
static inline Place place_in_d(int lane, int i) { return {lane / 4 + (i < 2 ? 0 : 8), lane % 4 * 2 + i % 2}; }

static inline int byte_of(const uint32_t* words, int i) {
    return static_cast<int>(static_cast<int8_t>(words[i / 4] >> 8 * (i % 4)));
}

// Which of its two copies a warp's product uses, for this lane.
static inline unsigned begin_mma() { return warps[current / 32].turn[current % 32]++ & 1; }

static inline void wait_mma(int line) {
    wait_warp(0xffffffffu, line, 0);
    if (warps[current / 32].members[current % 32] != 0xffffffffu)
        stop("mma.sync.aligned without all lanes of a warp");
}

// d += a b, where a has `depth` columns, 16 or 32.
static inline void mma(int (&d)[4], const Registers& mine, int depth, int line) {
    const int me = current % 32;
    Registers(&all)[32] = registers[current / 32][begin_mma()];
    all[me] = mine;
    wait_mma(line);
    int a[16][32], b[32][8];
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < depth / 2; ++i) {
            const Place at = place_in_a(lane, i);
            a[at.row][at.column] = byte_of(all[lane].a, i);
        }
        for (int i = 0; i < depth / 4; ++i) {
            const Place at = place_in_b(lane, i);
            b[at.row][at.column] = byte_of(all[lane].b, i);
        }
    }
    for (int i = 0; i < 4; ++i) {
        const Place at = place_in_d(me, i);
        unsigned sum = static_cast<unsigned>(d[i]);
        for (int k = 0; k < depth; ++k) sum += static_cast<unsigned>(a[at.row][k] * b[k][at.column]);
        d[i] = static_cast<int>(sum);
    }
}

// Of f16: element i of lane `lane` of a (16 x 16) and of b (16 x 8), two to a register; d as above.
static inline Place half_in_a(int lane, int i) {
    return {lane / 4 + (i / 2 % 2 ? 8 : 0), lane % 4 * 2 + i % 2 + (i < 4 ? 0 : 8)};
}
static inline Place half_in_b(int lane, int i) { return {lane % 4 * 2 + i % 2 + (i < 2 ? 0 : 8), lane / 4}; }

static inline float half_of(const uint32_t* words, int i) {
    return __half_bits_to_float(static_cast<unsigned short>(words[i / 2] >> 16 * (i % 2)));
}

struct Halves { float a[16][16], b[16][8]; };
static Halves halves[32][2];                // of a warp, by turn

static inline void mma_of_halves(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], int line) {
    const int me = current % 32;
    Halves& all = halves[current / 32][begin_mma()];
    for (int i = 0; i < 8; ++i) {
        const Place at = half_in_a(me, i);
        all.a[at.row][at.column] = half_of(a, i);
    }
    for (int i = 0; i < 4; ++i) {
        const Place at = half_in_b(me, i);
        all.b[at.row][at.column] = half_of(b, i);
    }
    wait_mma(line);
    for (int i = 0; i < 4; ++i) {
        const Place at = place_in_d(me, i);
        for (int k = 0; k < 16; ++k) d[i] += all.a[at.row][k] * all.b[k][at.column];
    }
}

}  // namespace host_cuda

static inline void mma_halves(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              int line = __builtin_LINE()) {
    host_cuda::mma_of_halves(d, a, b, line);
}
// cvt.rn.f16x2.f32: `low` in the low half.
static inline uint32_t pack_halves(float low, float high) {
    return __float_to_half_bits(low) | static_cast<uint32_t>(__float_to_half_bits(high)) << 16;
}
static inline void mma_16_8_32(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                               int line = __builtin_LINE()) {
    host_cuda::mma(d, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, 32, line);
}
static inline void mma_16_8_16(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, int line = __builtin_LINE()) {
    host_cuda::mma(d, {{a0, a1, 0, 0}, {b, 0}}, 16, line);
}
