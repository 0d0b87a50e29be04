// The arguments of the attention kernels, and how they load keys and values from a KV cache in f32, f16, bf16, q8_0 or
// q4_0.  A `cell` is a slot of the cache: the key and the value of one token.
#pragma once

#include "units.cuh"

struct Attention {
    int64_t q1, q2, q3, k1, k2, k3, v1, v2, v3, m1, m2, m3, d1, d2, d3;    // strides nb[1 .. 3] in bytes of queries,
                                               // keys, values, mask and result (d1: from head to head)
    int64_t heads_of_mask, batches_of_mask;    // ne[2], ne[3] of the mask, which repeats
    int32_t d, dv, cells, rows, group, heads;  // elements of a key, of a value; cells; query rows; query heads that
                                               // share a key head; key heads
    int32_t matrices, shares, share;           // key heads of all batches; shares of the cells; cells of a share
    int32_t k_kind, v_kind, mask_kind;         // types; mask_kind < 0: no mask
    int32_t q0, k0, v0;                        // bytes from element to element
    int32_t k_wide, v_wide;                    // whether loads of 16 bytes of K, of 4 or 8 bytes of V, are aligned
    float scale, softcap, max_bias;            // as ggml's parameters
    int32_t whole, chunk;                      // the largest power of two up to the number of heads (ALiBi); cells that
                                               // a warp takes at once: 16 or 32
    int32_t m_wide, unused;                    // whether the mask is f16, aligned for loads of 16 bytes
};

// -- caches -----------------------------------------------------------------------------------------------------------

// Loads eight elements of a key as f32, from number e on, a multiple of 8; zeros after the last element.
__device__ __forceinline__ void load_key(const Attention& a, const char* row, int e, float* v) {
    if (a.k_kind == Q8_0) {
        const uint16_t* b = (const uint16_t*)(row + (e >> 5) * 34);
        const float d = __half_bits_to_float(load_input(b));
        UNROLL
        for (int j = 0; j < 4; ++j) {
            const uint32_t w = load_input(b + 1 + (e & 31) / 2 + j);
            v[2 * j] = d * level(w, 0);
            v[2 * j + 1] = d * level(w, 1);
        }
    } else if (a.k_kind == Q4_0) {
        const uint16_t* b = (const uint16_t*)(row + (e >> 5) * 18);
        const float d = __half_bits_to_float(load_input(b));
        const int shift = e & 16 ? 4 : 0;
        UNROLL
        for (int j = 0; j < 4; ++j) {
            const uint32_t w = (uint32_t)load_input(b + 1 + (e & 15) / 2 + j) >> shift;
            v[2 * j] = d * (float)((int)(w & 15) - 8);
            v[2 * j + 1] = d * (float)((int)(w >> 8 & 15) - 8);
        }
    } else if (a.k_kind == F32 && a.k_wide && e + 8 <= a.d) {
        load_eight<F32>(row + e * 4, v);
    } else {
        UNROLL
        for (int j = 0; j < 8; ++j) v[j] = e + j < a.d ? load_plain(row + (int64_t)(e + j) * a.k0, a.k_kind) : 0.0f;
    }
}

// Loads elements e and e + 1 of a value as f32; e is even.
__device__ __forceinline__ float2 load_value(const Attention& a, const char* row, int e) {
    float2 v;
    if (a.v_kind == Q8_0) {
        const uint16_t* b = (const uint16_t*)(row + (e >> 5) * 34);
        const float d = __half_bits_to_float(load_input(b));
        const uint32_t w = load_input(b + 1 + (e & 31) / 2);
        v.x = d * level(w, 0);
        v.y = d * level(w, 1);
    } else if (a.v_kind == Q4_0) {
        const uint16_t* b = (const uint16_t*)(row + (e >> 5) * 18);
        const float d = __half_bits_to_float(load_input(b));
        const uint32_t w = (uint32_t)load_input(b + 1 + (e & 15) / 2) >> (e & 16 ? 4 : 0);
        v.x = d * (float)((int)(w & 15) - 8);
        v.y = d * (float)((int)(w >> 8 & 15) - 8);
    } else if (a.v_kind == F32 && a.v_wide) {
        v = load_input((const float2*)(row + e * 4));
    } else {
        v.x = load_plain(row + (int64_t)e * a.v0, a.v_kind);
        v.y = e + 1 < a.dv ? load_plain(row + (int64_t)(e + 1) * a.v0, a.v_kind) : 0.0f;
    }
    return v;
}

// Eight neighbouring elements of a key (Key), and two of a value (Value).  HALVES: the cache is f16, its rows aligned
// for loads of 16 bytes; then `load` only loads, and the elements are converted when they are used, so that several
// loads are in flight.
template <bool HALVES>
struct Key {
    float v[8];
    __device__ __forceinline__ void load(const Attention& a, const char* row, int e) { load_key(a, row, e, v); }
    __device__ __forceinline__ float at(int i) const { return v[i]; }
};

template <>
struct Key<true> {
    uint32_t w[4];
    __device__ __forceinline__ void load(const Attention&, const char* row, int e) {
        load_words<4, 16>((const uint8_t*)row + e * 2, w);
    }
    __device__ __forceinline__ float at(int i) const {
        return __half_bits_to_float((uint16_t)(w[i >> 1] >> 16 * (i & 1)));
    }
};

template <bool HALVES>
struct Value {
    float2 v;
    __device__ __forceinline__ void load(const Attention& a, const char* row, int e) { v = load_value(a, row, e); }
    __device__ __forceinline__ float first() const { return v.x; }
    __device__ __forceinline__ float second() const { return v.y; }
};

template <>
struct Value<true> {
    uint32_t w;
    __device__ __forceinline__ void load(const Attention&, const char* row, int e) {
        w = load_input((const uint32_t*)(row + e * 2));
    }
    __device__ __forceinline__ float first() const { return __half_bits_to_float((uint16_t)w); }
    __device__ __forceinline__ float second() const { return __half_bits_to_float((uint16_t)(w >> 16)); }
};
