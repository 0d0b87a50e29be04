// How each quantised type of weights is decoded, a unit (32 elements, units.cuh) at a time.
//
// `first(u)` and `second(u)`: at which element of a block the first and the second run of unit u start.  The bytes of a
// row are in ggml's order (ggml-common.h), or PACKED, rearranged by repack.py: of each TOGETHER consecutive blocks, the
// first field of every block comes first, then the second field of every block, and so on, so that fields start at
// multiples of 16 bytes.
#pragma once

#include "units.cuh"

// A field of the blocks of type T, SIZE bytes at OFFSET of each block in ggml's order: its address, and loads from it.
template <class T, bool PACKED, int OFFSET, int SIZE>
struct Field {
    static constexpr int ALIGN = PACKED ? power_of_two_in(SIZE)
                                        : lesser(power_of_two_in(T::BYTES), power_of_two_in(OFFSET));
    static __device__ __forceinline__ const uint8_t* at(const uint8_t* row, int block) {
        if (PACKED)
            return row + (int64_t)(block / T::TOGETHER) * (T::TOGETHER * T::BYTES) + T::TOGETHER * OFFSET
                 + block % T::TOGETHER * SIZE;
        return row + (int64_t)block * T::BYTES + OFFSET;
    }
    // Loads WORDS words of 32 bits of the field, from its byte `skip` on, which is a multiple of 4 * WORDS.
    template <int WORDS>
    static __device__ __forceinline__ void load(const uint8_t* row, int block, int skip, uint32_t* w) {
        load_words<WORDS, lesser(ALIGN, 4 * WORDS > 16 ? 16 : 4 * WORDS)>(at(row, block) + skip, w);
    }
};

// -- types ------------------------------------------------------------------------------------------------------------

template <int KIND>
struct Blocks;

// What types with blocks of 32 elements have in common: a unit is a block, and both runs have one scale.
template <int SIZE, int N = 8>
struct Plain {
    static constexpr int ELEMENTS = 32, BYTES = SIZE, TOGETHER = N;
    static constexpr bool ONE_SCALE = true;
    static __device__ __forceinline__ int first(int u) { return 32 * u; }
    static __device__ __forceinline__ int second(int u) { return 32 * u + 16; }
};

__device__ __forceinline__ void set_scale(Unit& x, float s, float m) {
    x.s[0] = x.s[1] = s;
    x.m[0] = x.m[1] = m;
}

template <>
struct Blocks<Q4_0> : Plain<18> {
    template <bool PACKED>
    static __device__ __forceinline__ void load(const uint8_t* row, int u, Unit& x) {
        uint32_t w[4];
        Field<Blocks, PACKED, 2, 16>::template load<4>(row, u, 0, w);
        const float d = load_half(Field<Blocks, PACKED, 0, 2>::at(row, u));
        split_nibbles(w, x.q);
        set_scale(x, d, -8.0f * d);
    }
};

template <>
struct Blocks<Q4_1> : Plain<20> {
    template <bool PACKED>
    static __device__ __forceinline__ void load(const uint8_t* row, int u, Unit& x) {
        uint32_t w[4];
        Field<Blocks, PACKED, 4, 16>::template load<4>(row, u, 0, w);
        split_nibbles(w, x.q);
        const float d = load_half(Field<Blocks, PACKED, 0, 2>::at(row, u));
        set_scale(x, d, load_half(Field<Blocks, PACKED, 2, 2>::at(row, u)));
    }
};

__device__ __forceinline__ void add_fifth_bits(uint32_t bits, uint32_t* q) {
    UNROLL
    for (int i = 0; i < 8; ++i) q[i] |= fifth_bits(bits >> 4 * i);
}

template <>
struct Blocks<Q5_0> : Plain<22> {
    template <bool PACKED>
    static __device__ __forceinline__ void load(const uint8_t* row, int u, Unit& x) {
        uint32_t w[4], bits;
        Field<Blocks, PACKED, 6, 16>::template load<4>(row, u, 0, w);
        Field<Blocks, PACKED, 2, 4>::template load<1>(row, u, 0, &bits);
        const float d = load_half(Field<Blocks, PACKED, 0, 2>::at(row, u));
        split_nibbles(w, x.q);
        add_fifth_bits(bits, x.q);
        set_scale(x, d, -16.0f * d);
    }
};

template <>
struct Blocks<Q5_1> : Plain<24> {
    template <bool PACKED>
    static __device__ __forceinline__ void load(const uint8_t* row, int u, Unit& x) {
        uint32_t w[4], bits;
        Field<Blocks, PACKED, 8, 16>::template load<4>(row, u, 0, w);
        Field<Blocks, PACKED, 4, 4>::template load<1>(row, u, 0, &bits);
        split_nibbles(w, x.q);
        add_fifth_bits(bits, x.q);
        const float d = load_half(Field<Blocks, PACKED, 0, 2>::at(row, u));
        set_scale(x, d, load_half(Field<Blocks, PACKED, 2, 2>::at(row, u)));
    }
};

template <>
struct Blocks<Q8_0> : Plain<34> {
    template <bool PACKED>
    static __device__ __forceinline__ void load(const uint8_t* row, int u, Unit& x) {
        Field<Blocks, PACKED, 2, 32>::template load<8>(row, u, 0, x.q);
        set_scale(x, load_half(Field<Blocks, PACKED, 0, 2>::at(row, u)), 0.0f);
    }
};

template <>
struct Blocks<IQ4_NL> : Plain<18> {
    template <bool PACKED>
    static __device__ __forceinline__ void load(const uint8_t* row, int u, Unit& x) {
        uint32_t w[4];
        Field<Blocks, PACKED, 2, 16>::template load<4>(row, u, 0, w);
        look_up<Uneven>(w, x.q);
        set_scale(x, load_half(Field<Blocks, PACKED, 0, 2>::at(row, u)), 0.0f);
    }
};

// Half of mxfp4's scale 2^(e - 127), because the table has its levels doubled.  For e = 0 and e = 1 the result is a
// subnormal f32 (see elements.cuh).
__device__ __forceinline__ float half_power(uint32_t e) {
    return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

template <>
struct Blocks<MXFP4> : Plain<17, 16> {
    template <bool PACKED>
    static __device__ __forceinline__ void load(const uint8_t* row, int u, Unit& x) {
        uint32_t w[4];
        Field<Blocks, PACKED, 1, 16>::template load<4>(row, u, 0, w);
        look_up<Fp4>(w, x.q);
        set_scale(x, half_power(load_input(Field<Blocks, PACKED, 0, 1>::at(row, u))), 0.0f);
    }
};

// What types with blocks of 256 elements have in common: a block is eight units.
template <int SIZE>
struct Super {
    static constexpr int ELEMENTS = 256, BYTES = SIZE, TOGETHER = 8;
    static constexpr bool ONE_SCALE = false;
};

// Two-bit levels: of each byte, bits `shift` and `shift` + 1 go to run 0, the two bits above them to run 1.
__device__ __forceinline__ void split_pairs(const uint32_t* w, int shift, uint32_t* q) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
        q[i] = w[i] >> shift & 0x03030303u;
        q[4 + i] = w[i] >> (shift + 2) & 0x03030303u;
    }
}

// In q2_K and q3_K, sixteen bytes hold the levels of four runs, which are 32 elements apart; a unit is two of them.
template <int SIZE>
struct TwoBits : Super<SIZE> {
    static __device__ __forceinline__ int first(int u) { return 128 * (u >> 2) + 64 * (u >> 1 & 1) + 16 * (u & 1); }
    static __device__ __forceinline__ int second(int u) { return first(u) + 32; }
};

template <>
struct Blocks<Q2_K> : TwoBits<84> {
    template <bool PACKED>
    static __device__ __forceinline__ void load(const uint8_t* row, int unit, Unit& x) {
        const int block = unit >> 3, u = unit & 7, part = first(u) >> 4;
        uint32_t w[4];
        Field<Blocks, PACKED, 16, 64>::template load<4>(row, block, 32 * (u >> 2) + 16 * (u & 1), w);
        const uint8_t* scales = Field<Blocks, PACKED, 0, 16>::at(row, block) + part;
        const float d = load_half(Field<Blocks, PACKED, 80, 2>::at(row, block));
        const float low = load_half(Field<Blocks, PACKED, 82, 2>::at(row, block));
        split_pairs(w, 4 * (u >> 1 & 1), x.q);
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const uint32_t both = load_input(scales + 2 * r);
            x.s[r] = d * (float)(both & 15);
            x.m[r] = -low * (float)(both >> 4);
        }
    }
};

template <>
struct Blocks<Q3_K> : TwoBits<110> {
    template <bool PACKED>
    static __device__ __forceinline__ void load(const uint8_t* row, int unit, Unit& x) {
        const int block = unit >> 3, u = unit & 7, part = first(u) >> 4, bit = part >> 1;
        uint32_t w[4], high[4];
        Field<Blocks, PACKED, 32, 64>::template load<4>(row, block, 32 * (u >> 2) + 16 * (u & 1), w);
        Field<Blocks, PACKED, 0, 32>::template load<4>(row, block, 16 * (u & 1), high);
        const uint8_t* scales = Field<Blocks, PACKED, 96, 12>::at(row, block);
        const float d = load_half(Field<Blocks, PACKED, 108, 2>::at(row, block));
        split_pairs(w, 4 * (u >> 1 & 1), x.q);
        UNROLL
        for (int i = 0; i < 8; ++i) x.q[i] |= (high[i & 3] >> (bit + (i >> 2)) & 0x01010101u) << 2;
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int p = part + 2 * r;
            const uint32_t low = load_input(scales + (p & 7)) >> 4 * (p >> 3) & 15;
            const uint32_t top = load_input(scales + 8 + (p & 3)) >> 2 * (p >> 2) & 3;
            x.s[r] = d * (float)((int)(low | top << 4) - 32);
            x.m[r] = -4.0f * x.s[r];
        }
    }
};

// In q4_K and q5_K, sixteen bytes hold the levels of two runs, which are 32 elements apart; scales and minima have 6
// bits.
template <int SIZE>
struct SixBitScales : Super<SIZE> {
    static __device__ __forceinline__ int first(int u) { return 64 * (u >> 1) + 16 * (u & 1); }
    static __device__ __forceinline__ int second(int u) { return first(u) + 32; }
    // Sets the scales and minima of unit u.  `h`: the block's d and dmin, then three words of scales and minima.
    static __device__ __forceinline__ void scale(const uint32_t* h, int u, Unit& x) {
        const float d = __half_bits_to_float((uint16_t)h[0]), low = __half_bits_to_float((uint16_t)(h[0] >> 16));
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int part = 2 * (u >> 1) + r, shift = 8 * (part & 3);
            uint32_t s = h[1] >> shift, m = h[2] >> shift;
            if (part < 4) {
                s &= 63;
                m &= 63;
            } else {
                const uint32_t rest = h[3] >> shift;
                s = (rest & 15) | (s >> 6 & 3) << 4;
                m = (rest >> 4 & 15) | (m >> 6 & 3) << 4;
            }
            x.s[r] = d * (float)s;
            x.m[r] = -low * (float)m;
        }
    }
};

template <>
struct Blocks<Q4_K> : SixBitScales<144> {
    template <bool PACKED>
    static __device__ __forceinline__ void load(const uint8_t* row, int unit, Unit& x) {
        const int block = unit >> 3, u = unit & 7;
        uint32_t w[4], h[4];
        Field<Blocks, false, 16, 128>::template load<4>(row, block, 16 * u, w);
        Field<Blocks, false, 0, 16>::template load<4>(row, block, 0, h);
        split_nibbles(w, x.q);
        scale(h, u, x);
    }
};

template <>
struct Blocks<Q5_K> : SixBitScales<176> {
    template <bool PACKED>
    static __device__ __forceinline__ void load(const uint8_t* row, int unit, Unit& x) {
        const int block = unit >> 3, u = unit & 7, bit = 2 * (u >> 1);
        uint32_t w[4], h[4], high[4];
        Field<Blocks, false, 48, 128>::template load<4>(row, block, 16 * u, w);
        Field<Blocks, false, 16, 32>::template load<4>(row, block, 16 * (u & 1), high);
        Field<Blocks, false, 0, 16>::template load<4>(row, block, 0, h);
        split_nibbles(w, x.q);
        UNROLL
        for (int i = 0; i < 8; ++i) x.q[i] |= (high[i & 3] >> (bit + (i >> 2)) & 0x01010101u) << 4;
        scale(h, u, x);
    }
};

template <>
struct Blocks<Q6_K> : Super<210> {
    static __device__ __forceinline__ int first(int u) { return 128 * (u >> 2) + 16 * (u & 3); }
    static __device__ __forceinline__ int second(int u) { return first(u) + 64; }
    template <bool PACKED>
    static __device__ __forceinline__ void load(const uint8_t* row, int unit, Unit& x) {
        const int block = unit >> 3, u = unit & 7, part = first(u) >> 4, shift = u & 2;
        uint32_t w[4], high[4];
        Field<Blocks, PACKED, 0, 128>::template load<4>(row, block, 16 * u, w);
        Field<Blocks, PACKED, 128, 64>::template load<4>(row, block, 32 * (u >> 2) + 16 * (u & 1), high);
        const uint8_t* scales = Field<Blocks, PACKED, 192, 16>::at(row, block) + part;
        const float d = load_half(Field<Blocks, PACKED, 208, 2>::at(row, block));
        split_nibbles(w, x.q);
        UNROLL
        for (int i = 0; i < 8; ++i) x.q[i] |= (high[i & 3] >> (shift + 4 * (i >> 2)) & 0x03030303u) << 4;
        UNROLL
        for (int r = 0; r < 2; ++r) {
            x.s[r] = d * (float)(int8_t)load_input(scales + 4 * r);
            x.m[r] = -32.0f * x.s[r];
        }
    }
};

template <>
struct Blocks<IQ4_XS> : Super<136> {
    static __device__ __forceinline__ int first(int u) { return 32 * u; }
    static __device__ __forceinline__ int second(int u) { return 32 * u + 16; }
    template <bool PACKED>
    static __device__ __forceinline__ void load(const uint8_t* row, int unit, Unit& x) {
        const int block = unit >> 3, u = unit & 7;
        uint32_t w[4], h[2];
        Field<Blocks, false, 8, 128>::template load<4>(row, block, 16 * u, w);
        Field<Blocks, false, 0, 8>::template load<2>(row, block, 0, h);
        look_up<Uneven>(w, x.q);
        const uint32_t step = (h[1] >> 4 * u & 15) | (h[0] >> (16 + 2 * u) & 3) << 4;
        set_scale(x, __half_bits_to_float((uint16_t)h[0]) * (float)((int)step - 32), 0.0f);
    }
};

// At which element of a row the first (second_of: the second) run of the row's unit `u` starts.
template <class T>
__device__ __forceinline__ int first_of(int u) {
    return T::ELEMENTS == 32 ? T::first(u) : (u >> 3) * 256 + T::first(u & 7);
}
template <class T>
__device__ __forceinline__ int second_of(int u) {
    return T::ELEMENTS == 32 ? T::second(u) : (u >> 3) * 256 + T::second(u & 7);
}

// -- lists of types ---------------------------------------------------------------------------------------------------

// X(NAME, KIND) for each type of a family, NAME as in kernels' names: *_PACKED has the types that repack.py rearranges,
// *_OTHERS the rest.
#define PLAIN_PACKED(X) X(q4_0, Q4_0) X(q4_1, Q4_1) X(q5_0, Q5_0) X(q5_1, Q5_1) X(q8_0, Q8_0)
#define K_PACKED(X) X(q2_k, Q2_K) X(q3_k, Q3_K) X(q6_k, Q6_K)
#define K_OTHERS(X) X(q4_k, Q4_K) X(q5_k, Q5_K)
#define TABLE_PACKED(X) X(iq4_nl, IQ4_NL) X(mxfp4, MXFP4)
#define TABLE_OTHERS(X) X(iq4_xs, IQ4_XS)
#define ALL_PACKED(X) PLAIN_PACKED(X) K_PACKED(X) TABLE_PACKED(X)
