// Converts the columns of matrix products (the activations, by which weights are multiplied): to dense f32 or f16, or
// rounded to 8 bits.
//
// Rounded: 32 neighbouring elements share a scale, their largest magnitude / 127; for each 16 of them (scale, scale *
// their sum) is stored: for weights with a minimum (units.cuh) products need the sum.  Where one of the 32 is not
// finite their scale is NaN, and so are all results of that column.
#include "common.cuh"

// A thread rounds four neighbouring elements, eight threads share a scale; n is the number of groups of four elements;
// x.ne[0] is a multiple of 32.
extern "C" __global__ void __launch_bounds__(256) quantize(View x, int8_t* __restrict__ q, float2* __restrict__ runs,
                                                          int64_t n, int kind) {
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    // All lanes of a warp stay: they exchange values.
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
                const float size = fabsf(v[j]);
                largest = size <= largest ? largest : size <= 3.4028234e38f ? size : INFINITY;
            }
        }
        UNROLL
        for (int m = 4; m > 0; m >>= 1) {
            const float other = __shfl_xor_sync(ALL_LANES, largest, m);
            largest = other > largest ? other : largest;
        }
        const bool finite = largest < INFINITY;
        const float scale = largest / 127.0f;
        // 1 / scale of a smaller scale may leave the range of f32: such elements are rounded to 0.
        const float inverse = finite && scale > 1e-37f ? 1.0f / scale : 0.0f;
        int sum = 0;
        uint32_t word = 0;
        UNROLL
        for (int j = 0; j < 4; ++j) {
            const int level = inverse > 0.0f ? __float2int_rn(v[j] * inverse) : 0;
            sum += level;
            word |= (uint32_t)(level & 255) << 8 * j;
        }
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        if (i < n) {
            ((uint32_t*)q)[i] = word;
            if ((threadIdx.x & 3) == 0) {
                float2 run;
                run.x = finite ? scale : __uint_as_float(0x7fc00000u);
                run.y = run.x * (float)sum;
                runs[i >> 2] = run;
            }
        }
    }
}

// Converts to dense f32, for kernels that take only that.
extern "C" __global__ void __launch_bounds__(256) to_f32(View x, float* __restrict__ out, int64_t n, int kind) {
    FOR_EACH(i, n) out[i] = load_plain(at(x, split(x, i)), kind);
}

// Converts to dense f16, for the device's library; values beyond the range of f16 become infinite.
extern "C" __global__ void __launch_bounds__(256) to_f16(View x, uint16_t* __restrict__ out, int64_t n, int kind) {
    FOR_EACH(i, n) out[i] = __float_to_half_bits(load_plain(at(x, split(x, i)), kind));
}
