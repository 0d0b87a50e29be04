// Decodes rows of quantised blocks to dense f32 or f16, for the device's library of matrix products, and for kernels
// that do not read the type.
#include "blocks.cuh"

// Each thread decodes one of n units (units.cuh); `out` receives the rows of w without gaps, as type `to`.  `packed`:
// whether repack.py has rearranged w.
template <int KIND>
__device__ __forceinline__ void decode(const View& w, char* out, int64_t n, int to, int packed) {
    typedef Blocks<KIND> T;
    View units = w;
    units.ne[0] = w.ne[0] / 32;
    FOR_EACH(i, n) {
        const Index k = split(units, i);
        const uint8_t* row = (const uint8_t*)w.p + k.i1 * w.nb[1] + k.i2 * w.nb[2] + k.i3 * w.nb[3];
        const int u = (int)k.i0;
        Unit x;
        if (packed) T::template load<true>(row, u, x);
        else T::template load<false>(row, u, x);
        const int64_t start = i / units.ne[0] * w.ne[0];
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int64_t first = start + (r ? second_of<T>(u) : first_of<T>(u));
            float v[16];
            UNROLL
            for (int j = 0; j < 16; ++j) v[j] = x.s[r] * level(x.q[4 * r + (j >> 2)], j & 3) + x.m[r];
            if (to == F32) {
                UNROLL
                for (int j = 0; j < 4; ++j) {
                    float4 f;
                    f.x = v[4 * j];
                    f.y = v[4 * j + 1];
                    f.z = v[4 * j + 2];
                    f.w = v[4 * j + 3];
                    ((float4*)(out + first * 4))[j] = f;
                }
            } else {
                uint32_t h[8];
                UNROLL
                for (int j = 0; j < 8; ++j)
                    h[j] = __float_to_half_bits(v[2 * j]) | (uint32_t)__float_to_half_bits(v[2 * j + 1]) << 16;
                UNROLL
                for (int j = 0; j < 2; ++j) {
                    uint4 f;
                    f.x = h[4 * j];
                    f.y = h[4 * j + 1];
                    f.z = h[4 * j + 2];
                    f.w = h[4 * j + 3];
                    ((uint4*)(out + first * 2))[j] = f;
                }
            }
        }
    }
}

#define DECODE(NAME, KIND)                                                                              \
    extern "C" __global__ void __launch_bounds__(256) NAME(View w, char* RESTRICT out, int64_t n,       \
                                                           int to, int packed) {                        \
        await_inputs();                                                                                 \
        decode<KIND>(w, out, n, to, packed);                                                            \
    }

ALL_PACKED(DECODE)
K_OTHERS(DECODE)
TABLE_OTHERS(DECODE)
