// Quantises blocks of 32 elements, a block a warp, an element a lane: to q4_0 q4_1 q5_0 q5_1 q8_0 with the same bits as
// ggml's reference, and to iq4_nl with the CPU's search for a scale, whose sums are added in another order here.
//
// These are the types that a KV cache may have.  All lanes of a warp call these functions; block addresses are
// multiples of 2.
#pragma once

struct Furthest {                          // the element furthest from zero; of equal ones the first; a NaN wins
    float x;
    int lane;
};

__device__ __forceinline__ Furthest furthest_of(float x, int lane) {
    UNROLL
    for (int m = 16; m > 0; m >>= 1) {
        const float y = __shfl_xor_sync(ALL_LANES, x, m);
        const int other = __shfl_xor_sync(ALL_LANES, lane, m);
        const float p = fabsf(x), q = fabsf(y);
        const bool nan = p != p, other_nan = q != q;
        const bool equal = (nan && other_nan) || p == q;
        if (equal ? other < lane : other_nan || (!nan && q > p)) {
            x = y;
            lane = other;
        }
    }
    return {x, lane};
}

struct Min {
    static __device__ __forceinline__ float of(float a, float b) { return min_nan(a, b); }
};
struct Or {
    static __device__ __forceinline__ uint32_t of(uint32_t a, uint32_t b) { return a | b; }
};

// q limited to low .. high; `high` for NaN.
__device__ __forceinline__ float limited(float q, float low, float high) {
    const float below = q < high ? q : high;
    return below > low ? below : low;
}

__device__ __forceinline__ float inverse_of(float d) { return d != 0.0f ? 1.0f / d : 0.0f; }

__device__ __forceinline__ void put_half(char* p, float v) { *(uint16_t*)p = __float_to_half_bits(v); }

// Writes the low four bits of each lane's q to 16 bytes: byte j has lane j's as low nibble, lane j + 16's as high one.
__device__ __forceinline__ void put_nibbles(char* p, int q, int lane) {
    const int high = __shfl_xor_sync(ALL_LANES, q, 16);
    if (lane < 16) p[lane] = (char)((q & 15) | (high & 15) << 4);
}

// Writes the fifth bit of each lane's q: lane j's becomes bit j of the four bytes at p, a multiple of two.
__device__ __forceinline__ void put_fifth_bits(char* p, int q, int lane) {
    const uint32_t bits = warp_reduce<Or>((uint32_t)(q >> 4 & 1) << lane);
    if (lane < 2) ((uint16_t*)p)[lane] = (uint16_t)(bits >> 16 * lane);
}

// The index of the level in UNEVEN_LEVELS that is nearest to x; of a NaN the last one.
__device__ __forceinline__ int uneven_place(float x) {
    int place = 0;
    UNROLL
    for (int i = 0; i < 15; ++i) place += !(x < 0.5f * (float)(UNEVEN_LEVELS[i] + UNEVEN_LEVELS[i + 1]));
    return place;
}

// The scale (step) of an iq4_nl block.  Tries 15 steps around the one with which the levels just span the block: each
// assigns levels to the elements, and for these levels least squares gives the best step.  Returns the one with the
// smallest squared error.
__device__ __forceinline__ float uneven_step(float x, int lane) {
    const float spanning = furthest_of(x, lane).x / -127.0f;
    float best = 0.0f, step = spanning;
    for (int i = 0; i < 15; ++i) {
        const float tried = spanning * (0.78f + 0.02f * (float)i);
        const float level = (float)UNEVEN_LEVELS[uneven_place(x / tried)];
        const float with_x = warp_reduce<Sum>(level * x), alone = warp_reduce<Sum>(level * level);
        const float gain = with_x * with_x / alone;
        if (gain > best) {
            best = gain;
            step = with_x / alone;
        }
    }
    return step - step == 0.0f ? step : 0.0f;         // a step that is not finite gives zeros
}

__device__ __forceinline__ void quantize_uneven(float x, char* p, int lane) {
    const uint16_t bits = __float_to_half_bits(uneven_step(x, lane));
    const float d = __half_bits_to_float(bits);
    const int q = uneven_place(d != 0.0f ? x / d : 0.0f);
    if (lane == 0) *(uint16_t*)p = bits;
    put_nibbles(p + 2, q, lane);
}

// Quantises 32 elements, of which this lane has number `lane`, x, to a block at address p.
__device__ __forceinline__ void quantize_block(float x, int kind, char* p, int lane) {
    if (kind == IQ4_NL) {
        quantize_uneven(x, p, lane);
        return;
    }
    if (kind == Q8_0) {
        const float d = warp_reduce<Max>(fabsf(x)) / 127.0f;
        p[2 + lane] = (char)(int)limited(roundf(mul_rn(x, inverse_of(d))), -128.0f, 127.0f);
        if (lane == 0) put_half(p, d);
        return;
    }
    const bool five = kind == Q5_0 || kind == Q5_1;
    const int offset = five ? 16 : 8, top = 2 * offset - 1;
    if (kind == Q4_0 || kind == Q5_0) {
        // The element furthest from zero, sign included, becomes the lowest level; + 0 turns -0 into 0.
        const float d = add_rn(furthest_of(x, lane).x, 0.0f) / (float)-offset;
        const int q = (int)limited(add_rn(mul_rn(x, inverse_of(d)), (float)offset + 0.5f), 0.0f, (float)top);
        if (lane == 0) put_half(p, d);
        if (five) put_fifth_bits(p + 2, q, lane);
        put_nibbles(p + (five ? 6 : 2), q, lane);
        return;
    }
    const float low = warp_reduce<Min>(x), d = add_rn(warp_reduce<Max>(x), -low) / (float)top;
    const int q = (int)limited(add_rn(mul_rn(add_rn(x, -low), inverse_of(d)), 0.5f), 0.0f, (float)top);
    if (lane == 0) {
        put_half(p, d);
        put_half(p + 2, low);
    }
    if (five) put_fifth_bits(p + 4, q, lane);
    put_nibbles(p + (five ? 8 : 4), q, lane);
}
