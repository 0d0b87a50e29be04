// Converts the columns of matrix products (the activations, by which weights are multiplied): to dense f32 or f16, or
// rounded to 8 bits (rounded.cuh).
#include "rounded.cuh"

// Rounds columns x to levels q, and writes scales and sums to `runs`.  A thread rounds four neighbouring elements, n
// threads in all; eight threads share a scale.  x.ne[0] is a multiple of 32.
extern "C" __global__ void __launch_bounds__(256) quantize(View x, int8_t* RESTRICT q, float2* RESTRICT runs,
                                                          int64_t n, int kind) {
    await_inputs();
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    // All lanes of a warp stay in the loop, because they exchange values.
    for (int64_t start = (int64_t)blockIdx.x * blockDim.x; start < n; start += step) {
        const int64_t i = start + threadIdx.x;
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        float largest = 0.0f;
        if (i < n) {
            const Index k = split(x, 4 * i);
            const char* p = at(x, k);
            UNROLL
            for (int j = 0; j < 4; ++j) {
                v[j] = load_plain(p + j * x.nb[0], kind);
                largest = larger(largest, magnitude_of(v[j]));
            }
        }
        UNROLL
        for (int m = 4; m > 0; m >>= 1) largest = larger(largest, __shfl_xor_sync(ALL_LANES, largest, m));
        const Rounding r = rounding_of(largest);
        int sum = 0;
        uint32_t word = 0;
        UNROLL
        for (int j = 0; j < 4; ++j) {
            const int level = level_of(r, v[j]);
            sum += level;
            word |= (uint32_t)(level & 255) << 8 * j;
        }
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        if (i < n) {
            ((uint32_t*)q)[i] = word;
            if ((threadIdx.x & 3) == 0) runs[i >> 2] = run_of(r, sum);
        }
    }
}

// Converts columns to dense f32, for kernels that take no other type.
extern "C" __global__ void __launch_bounds__(256) to_f32(View x, float* RESTRICT out, int64_t n, int kind) {
    await_inputs();
    FOR_EACH(i, n) out[i] = load_plain(at(x, split(x, i)), kind);
}

// Converts columns to dense f16; values beyond the range of f16 become infinite.
extern "C" __global__ void __launch_bounds__(256) to_f16(View x, uint16_t* RESTRICT out, int64_t n, int kind) {
    await_inputs();
    FOR_EACH(i, n) out[i] = __float_to_half_bits(load_plain(at(x, split(x, i)), kind));
}

// Converts columns to dense f16, for the device's library of matrix products.  A column with magnitudes beyond the
// range of f16 is divided by a power of two, scales[column], that brings them into it; the scale is 1 for all other
// columns, and for columns with an element that is not finite.  One block for each column.
extern "C" __global__ void __launch_bounds__(1024) to_scaled_f16(View x, uint16_t* RESTRICT out, float* scales,
                                                                int64_t columns, int kind) {
    await_inputs();
    __shared__ float part[32];
    FOR_EACH_ROW(c, columns) {
        const char* p = at(x, split_row(x, c));
        float largest = 0.0f;
        for (int64_t i = threadIdx.x; i < x.ne[0]; i += blockDim.x)
            largest = max_nan(largest, fabsf(load_plain(p + i * x.nb[0], kind)));
        largest = block_reduce<Max>(largest, part);
        int shift = 0;
        if (largest > 65504.0f && largest < INFINITY) shift = (int)(__float_as_uint(largest) >> 23) - 127 - 14;
        const float down = __uint_as_float((uint32_t)(127 - shift) << 23);
        for (int64_t i = threadIdx.x; i < x.ne[0]; i += blockDim.x)
            out[c * x.ne[0] + i] = __float_to_half_bits(load_plain(p + i * x.nb[0], kind) * down);
        if (threadIdx.x == 0) scales[c] = __uint_as_float((uint32_t)(127 + shift) << 23);
    }
}

// Multiplies each column of a product by its scale, by which to_scaled_f16 has divided.  One block for each column.
extern "C" __global__ void __launch_bounds__(1024) scale_columns(View d, const float* RESTRICT scales,
                                                                int64_t columns) {
    await_inputs();
    FOR_EACH_ROW(c, columns) {
        const float scale = scales[c];
        if (scale == 1.0f) continue;
        char* p = at(d, split_row(d, c));
        for (int64_t i = threadIdx.x; i < d.ne[0]; i += blockDim.x) *(float*)(p + i * d.nb[0]) *= scale;
    }
}
