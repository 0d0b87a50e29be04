// Rounds activations to 8 bits, for products with quantised weights.
//
// 32 neighbouring elements share a scale, their largest magnitude / 127.  For each 16 of them the scale is stored, and
// the scale times the sum of their levels: products need it for weights with a minimum (units.cuh).  If one of the 32
// elements is not finite, their scale is NaN, and so are all results of that column.
#pragma once

#include "common.cuh"

// The magnitude of an element; infinity, also for NaN, if it is not finite, so that `larger` compares no NaN.
__device__ __forceinline__ float magnitude_of(float v) {
    const float size = fabsf(v);
    return size <= 3.4028234e38f ? size : INFINITY;
}

__device__ __forceinline__ float larger(float a, float b) { return b > a ? b : a; }

// How 32 elements are rounded: `scale` is that of their levels, `inverse` 1 / scale, or 0 where all levels are 0.
struct Rounding {
    float scale, inverse;
};

__device__ __forceinline__ Rounding rounding_of(float largest) {
    Rounding r;
    const bool finite = largest < INFINITY;
    r.scale = finite ? largest / 127.0f : __uint_as_float(0x7fc00000u);
    // For a smaller scale, 1 / scale might leave the range of f32: then all levels are 0.
    r.inverse = finite && r.scale > 1e-37f ? 1.0f / r.scale : 0.0f;
    return r;
}

__device__ __forceinline__ int level_of(const Rounding& r, float v) {
    return r.inverse > 0.0f ? __float2int_rn(v * r.inverse) : 0;
}

__device__ __forceinline__ float2 run_of(const Rounding& r, int sum) {
    float2 run;
    run.x = r.scale;
    run.y = r.scale * (float)sum;
    return run;
}

// Rounds 32 neighbouring elements, one in each lane of a warp, to levels q, and writes their scales and sums to `runs`.
// i: the number of this lane's element; that of lane 0 is a multiple of 32.
__device__ __forceinline__ void store_rounded(float v, int64_t i, int8_t* q, float2* runs) {
    float largest = magnitude_of(v);
    UNROLL
    for (int m = 16; m > 0; m >>= 1) largest = larger(largest, __shfl_xor_sync(ALL_LANES, largest, m));
    const Rounding r = rounding_of(largest);
    const int level = level_of(r, v);
    int sum = level;
    UNROLL
    for (int m = 8; m > 0; m >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, m);
    q[i] = (int8_t)level;
    if ((threadIdx.x & 15) == 0) runs[i >> 4] = run_of(r, sum);
}
