// Weights as matrix products see them: rows of blocks, decoded 32 elements at a time.
//
// A `Unit` is 32 elements of a row as two runs of 16 neighbours: small integers, four to a word, and for each run a
// scale and a minimum, element = s * q + m.  Which elements these are differs by type, so that a thread loads whole
// words and uses all of their bits: `first(u)` and `second(u)` say where the runs of unit u lie in the row.  Row bytes
// are ggml's (ggml-common.h), or PACKED: of TOGETHER blocks that follow each other the first field of each, then the
// second of each, ..., so that the bytes of a field start at a multiple of 16 (repack.py does it, in place).
// Invariant: no load is wider than what its address is known to be a multiple of.
#pragma once

#include "common.cuh"

// UNROLL_BY(n): n is a constant; 1: not at all.
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

// WORDS words from p, which is a multiple of ALIGN bytes.
template <int WORDS, int ALIGN>
__device__ __forceinline__ void load_words(const uint8_t* p, uint32_t* w) {
    if constexpr (ALIGN >= 16 && WORDS % 4 == 0) {
        UNROLL
        for (int i = 0; i < WORDS / 4; ++i) {
            const uint4 v = __ldg((const uint4*)p + i);
            w[4 * i] = v.x;
            w[4 * i + 1] = v.y;
            w[4 * i + 2] = v.z;
            w[4 * i + 3] = v.w;
        }
    } else if constexpr (ALIGN >= 8 && WORDS % 2 == 0) {
        UNROLL
        for (int i = 0; i < WORDS / 2; ++i) {
            const uint2 v = __ldg((const uint2*)p + i);
            w[2 * i] = v.x;
            w[2 * i + 1] = v.y;
        }
    } else if constexpr (ALIGN >= 4) {
        UNROLL
        for (int i = 0; i < WORDS; ++i) w[i] = __ldg((const uint32_t*)p + i);
    } else if constexpr (ALIGN >= 2) {
        UNROLL
        for (int i = 0; i < WORDS; ++i)
            w[i] = __ldg((const uint16_t*)p + 2 * i) | (uint32_t)__ldg((const uint16_t*)p + 2 * i + 1) << 16;
    } else {
        UNROLL
        for (int i = 0; i < WORDS; ++i)
            w[i] = __ldg(p + 4 * i) | (uint32_t)__ldg(p + 4 * i + 1) << 8 | (uint32_t)__ldg(p + 4 * i + 2) << 16
                 | (uint32_t)__ldg(p + 4 * i + 3) << 24;
    }
}

__device__ __forceinline__ float load_half(const uint8_t* p) { return __half_bits_to_float(__ldg((const uint16_t*)p)); }

// SIZE bytes at OFFSET of each block of type T.
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
    // WORDS words from byte `skip` of the field on, which is a multiple of 4 * WORDS.
    template <int WORDS>
    static __device__ __forceinline__ void load(const uint8_t* row, int block, int skip, uint32_t* w) {
        load_words<WORDS, lesser(ALIGN, 4 * WORDS > 16 ? 16 : 4 * WORDS)>(at(row, block) + skip, w);
    }
};

// -- bits -------------------------------------------------------------------------------------------------------------

// The words' low nibbles are run 0, their high ones run 1.
__device__ __forceinline__ void split_nibbles(const uint32_t* w, uint32_t* q) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
        q[i] = w[i] & 0x0f0f0f0fu;
        q[4 + i] = w[i] >> 4 & 0x0f0f0f0fu;
    }
}

// Bits 0 .. 3 as bits 4 of four bytes.
__device__ __forceinline__ uint32_t fifth_bits(uint32_t bits) {
    return ((bits & 15u) * 0x00204081u & 0x01010101u) << 4;
}

// Byte i of the result is that byte of (low, high) which nibble i of `which` names, 0 .. 7.
__device__ __forceinline__ uint32_t pick(uint32_t low, uint32_t high, uint32_t which) {
    return __byte_perm(low, high, which);
}

// The levels of iq4_nl and iq4_xs, and of mxfp4 (e2m1, doubled), as bytes.
struct Uneven {
    static constexpr uint32_t A = 0xbfad9881u, B = 0xf6eaddcfu, C = 0x26190d01u, D = 0x71594535u;
};
struct Fp4 {
    static constexpr uint32_t A = 0x03020100u, B = 0x0c080604u, C = 0xfdfeff00u, D = 0xf4f8fafcu;
};

// Four nibbles of the low half of x as bytes of a table: both of its halves are asked, bit 3 decides.
template <class T>
__device__ __forceinline__ uint32_t four_levels(uint32_t x) {
    const uint32_t place = x & 0x7777u;
    return pick(pick(T::A, T::B, place), pick(T::C, T::D, place), 0x3210u | (x & 0x8888u) >> 1);
}

// As split_nibbles, through a table.
template <class T>
__device__ __forceinline__ void look_up(const uint32_t* w, uint32_t* q) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
        const uint32_t a = four_levels<T>(w[i]), b = four_levels<T>(w[i] >> 16);
        q[i] = pick(a, b, 0x6420u);
        q[4 + i] = pick(a, b, 0x7531u);
    }
}

// -- types ------------------------------------------------------------------------------------------------------------

template <int KIND>
struct Blocks;

// Blocks of 32: a unit is a block, one scale for both runs.
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

// Half of 2^(e - 127), subnormal for the two least exponents: the levels are doubled.
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
        set_scale(x, half_power(__ldg(Field<Blocks, PACKED, 0, 1>::at(row, u))), 0.0f);
    }
};

// Blocks of 256: eight units.
template <int SIZE>
struct Super {
    static constexpr int ELEMENTS = 256, BYTES = SIZE, TOGETHER = 8;
    static constexpr bool ONE_SCALE = false;
};

// Two-bit levels: run 0 from bits `shift`, run 1 from the two above.
__device__ __forceinline__ void split_pairs(const uint32_t* w, int shift, uint32_t* q) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
        q[i] = w[i] >> shift & 0x03030303u;
        q[4 + i] = w[i] >> (shift + 2) & 0x03030303u;
    }
}

// Of q2_K and q3_K sixteen bytes hold four runs, 32 elements apart: a unit takes two of them.
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
            const uint32_t both = __ldg(scales + 2 * r);
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
            const uint32_t low = __ldg(scales + (p & 7)) >> 4 * (p >> 3) & 15;
            const uint32_t top = __ldg(scales + 8 + (p & 3)) >> 2 * (p >> 2) & 3;
            x.s[r] = d * (float)((int)(low | top << 4) - 32);
            x.m[r] = -4.0f * x.s[r];
        }
    }
};

// Of q4_K and q5_K sixteen bytes hold runs of two neighbouring parts of 32; scales and minima have 6 bits.
template <int SIZE>
struct SixBitScales : Super<SIZE> {
    static __device__ __forceinline__ int first(int u) { return 64 * (u >> 1) + 16 * (u & 1); }
    static __device__ __forceinline__ int second(int u) { return first(u) + 32; }
    // `h`: d and dmin, then three words of scales.
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
            x.s[r] = d * (float)(int8_t)__ldg(scales + 4 * r);
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

// Where the runs of unit `u`, counted over the whole row, start in it.
template <class T>
__device__ __forceinline__ int first_of(int u) {
    return T::ELEMENTS == 32 ? T::first(u) : (u >> 3) * 256 + T::first(u & 7);
}
template <class T>
__device__ __forceinline__ int second_of(int u) {
    return T::ELEMENTS == 32 ? T::second(u) : (u >> 3) * 256 + T::second(u & 7);
}

// -- products ---------------------------------------------------------------------------------------------------------

// A run of activations, rounded to 8 bits: element = scale * q; `sum` is that of the 16 elements.
struct Run {
    int4 q;
    float scale, sum;
};

__device__ __forceinline__ int dot_run(const uint32_t* w, const int4& q) {
    int t = __dp4a((int)w[0], q.x, 0);
    t = __dp4a((int)w[1], q.y, t);
    t = __dp4a((int)w[2], q.z, t);
    return __dp4a((int)w[3], q.w, t);
}

// Byte i (0 .. 3) of a word of levels, as f32.
__device__ __forceinline__ float level(uint32_t w, int i) { return (float)(int8_t)(w >> 8 * i); }

// Eight neighbouring elements of a plain type from a multiple of 16 bytes.
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
