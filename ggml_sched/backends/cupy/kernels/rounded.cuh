// Rounds activations to 8 bits, for products with quantised weights.
//
// 32 neighbouring elements share a scale, their largest magnitude / 127; for each 16 of them (scale, scale * their sum)
// is stored: for weights with a minimum (units.cuh) products need the sum.  Where one of the 32 is not finite their
// scale is NaN, and so are all results of that column.
#pragma once

#include "common.cuh"

// A magnitude that `larger` compares: infinite where the element is not finite.
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
    // 1 / scale of a smaller scale may leave the range of f32: such elements are rounded to 0.
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

// Rounds the elements that the lanes of a whole warp hold, neighbours from a multiple of 32 on; i: that of this lane.
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
