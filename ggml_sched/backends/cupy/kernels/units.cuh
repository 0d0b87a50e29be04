// How matrix products read weights: units of 32 elements, loads of whole words, and dot products.
//
// A `Unit` is 32 elements of a row, decoded as far as products need: two runs of 16 neighbouring elements, as small
// integers q, four to a word of 32 bits, and for each run a scale s and a minimum m: element = s * q + m.  Which 32
// elements make a unit differs by type (blocks.cuh), so that a thread loads whole words and uses all of their bits.
// Invariant: every load is at an address that is a multiple of its width.
#pragma once

#include "common.cuh"

// UNROLL_BY(n) before a loop: the compiler unrolls it n times; 1: not at all.  n is a constant.
#ifndef HOST_CUDA
#define PRAGMA(text) _Pragma(#text)
#define UNROLL_BY(n) PRAGMA(unroll (n))
#else
#define UNROLL_BY(n)
#endif

struct Unit {
    uint32_t q[8];
    float s[2], m[2];
};

// -- loads ------------------------------------------------------------------------------------------------------------

// The largest power of two, up to 16, that n is a multiple of.
__device__ constexpr int power_of_two_in(int n) {
    return n % 16 == 0 ? 16 : n % 8 == 0 ? 8 : n % 4 == 0 ? 4 : n % 2 == 0 ? 2 : 1;
}

__device__ constexpr int lesser(int a, int b) { return a < b ? a : b; }

// Loads WORDS words of 32 bits from address p, a multiple of ALIGN, by loads of up to 16 bytes.
template <int WORDS, int ALIGN>
__device__ __forceinline__ void load_words(const uint8_t* p, uint32_t* w) {
    if constexpr (ALIGN >= 16 && WORDS % 4 == 0) {
        UNROLL
        for (int i = 0; i < WORDS / 4; ++i) {
            const uint4 v = load_input((const uint4*)p + i);
            w[4 * i] = v.x;
            w[4 * i + 1] = v.y;
            w[4 * i + 2] = v.z;
            w[4 * i + 3] = v.w;
        }
    } else if constexpr (ALIGN >= 8 && WORDS % 2 == 0) {
        UNROLL
        for (int i = 0; i < WORDS / 2; ++i) {
            const uint2 v = load_input((const uint2*)p + i);
            w[2 * i] = v.x;
            w[2 * i + 1] = v.y;
        }
    } else if constexpr (ALIGN >= 4) {
        UNROLL
        for (int i = 0; i < WORDS; ++i) w[i] = load_input((const uint32_t*)p + i);
    } else if constexpr (ALIGN >= 2) {
        UNROLL
        for (int i = 0; i < WORDS; ++i)
            w[i] = load_input((const uint16_t*)p + 2 * i)
                 | (uint32_t)load_input((const uint16_t*)p + 2 * i + 1) << 16;
    } else {
        UNROLL
        for (int i = 0; i < WORDS; ++i)
            w[i] = load_input(p + 4 * i) | (uint32_t)load_input(p + 4 * i + 1) << 8
                 | (uint32_t)load_input(p + 4 * i + 2) << 16 | (uint32_t)load_input(p + 4 * i + 3) << 24;
    }
}

__device__ __forceinline__ float load_half(const uint8_t* p) {
    return __half_bits_to_float(load_input((const uint16_t*)p));
}

// -- bits -------------------------------------------------------------------------------------------------------------

// Four words of levels of four bits: the low nibbles of their bytes become q of run 0, the high nibbles that of run 1.
__device__ __forceinline__ void split_nibbles(const uint32_t* w, uint32_t* q) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
        q[i] = w[i] & 0x0f0f0f0fu;
        q[4 + i] = w[i] >> 4 & 0x0f0f0f0fu;
    }
}

// Bit i of `bits` (i = 0 .. 3) becomes bit 4 of byte i of the result: the fifth bit of a level.
__device__ __forceinline__ uint32_t fifth_bits(uint32_t bits) {
    return ((bits & 15u) * 0x00204081u & 0x01010101u) << 4;
}

// Byte i of the result is that byte of (low, high) which nibble i of `which` names, 0 .. 7.
__device__ __forceinline__ uint32_t pick(uint32_t low, uint32_t high, uint32_t which) {
    return __byte_perm(low, high, which);
}

// The 16 levels that four bits stand for, as signed bytes in four words: of iq4_nl and iq4_xs, and of mxfp4 (the 4-bit
// floats e2m1, doubled so that they are integers).
struct Uneven {
    static constexpr uint32_t A = 0xbfad9881u, B = 0xf6eaddcfu, C = 0x26190d01u, D = 0x71594535u;
};
struct Fp4 {
    static constexpr uint32_t A = 0x03020100u, B = 0x0c080604u, C = 0xfdfeff00u, D = 0xf4f8fafcu;
};

// Replaces each of the four nibbles in the low half of x by its level of the table T.  One instruction picks among 8
// bytes, so both halves of the table are looked up, and bit 3 of a nibble selects the half.
template <class T>
__device__ __forceinline__ uint32_t four_levels(uint32_t x) {
    const uint32_t place = x & 0x7777u;
    return pick(pick(T::A, T::B, place), pick(T::C, T::D, place), 0x3210u | (x & 0x8888u) >> 1);
}

// Splits nibbles as split_nibbles does, and replaces each by its level in table T.
template <class T>
__device__ __forceinline__ void look_up(const uint32_t* w, uint32_t* q) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
        const uint32_t a = four_levels<T>(w[i]), b = four_levels<T>(w[i] >> 16);
        q[i] = pick(a, b, 0x6420u);
        q[4 + i] = pick(a, b, 0x7531u);
    }
}

// -- products ---------------------------------------------------------------------------------------------------------

// 16 neighbouring activations, rounded to 8 bits: element = scale * q.  `sum`: the sum of the 16 elements, for weights
// s * q + m with a minimum m, whose product with the run contains m * sum.
struct Run {
    int4 q;
    float scale, sum;
};

// The sum of 16 products of 8-bit integers.
__device__ __forceinline__ int dot_run(const uint32_t* w, const int4& q) {
    int t = __dp4a((int)w[0], q.x, 0);
    t = __dp4a((int)w[1], q.y, t);
    t = __dp4a((int)w[2], q.z, t);
    return __dp4a((int)w[3], q.w, t);
}

// Byte i (0 .. 3) of a word of quantised elements, as f32.
__device__ __forceinline__ float level(uint32_t w, int i) { return (float)(int8_t)(w >> 8 * i); }

// Loads eight neighbouring elements of f32, f16 or bf16 as f32; p is a multiple of 16.
template <int KIND>
__device__ __forceinline__ void load_eight(const char* p, float* v) {
    uint32_t w[8];
    if constexpr (KIND == F32) {
        load_words<8, 16>((const uint8_t*)p, w);
        UNROLL
        for (int i = 0; i < 8; ++i) v[i] = __uint_as_float(w[i]);
    } else {
        load_words<4, 16>((const uint8_t*)p, w);
        UNROLL
        for (int i = 0; i < 8; ++i) {
            const uint16_t bits = (uint16_t)(w[i >> 1] >> 16 * (i & 1));
            v[i] = KIND == F16 ? __half_bits_to_float(bits) : bf16_to_float(bits);
        }
    }
}
