// Rows of attention scores: soft_max with scale, mask, slopes and sinks; causal masks.
//
// A row in which every score is -inf gives NaN, by IEEE's rules.  The result may be the memory of the scores: a thread
// only accesses its own elements.
#include "common.cuh"

// The factor by which a head multiplies the mask (ALiBi): with `whole`, the largest power of two up to n_head, head h
// has 2 ** (-max_bias (h + 1) / whole); the heads from `whole` on have the exponents half way between those.
__device__ __forceinline__ float slope_of(int64_t head, int64_t n_head, float max_bias) {
    int64_t whole = 1;
    double share = 1.0;                    // 1 / whole, to the bit: a division in f64 is a call, and costs registers
    while (whole * 2 <= n_head) {
        whole *= 2;
        share *= 0.5;
    }
    const double exponent = head < whole ? (double)(head + 1) * share
                                         : (double)(2 * (head - whole) + 1) * (0.5 * share);
    return (float)exp2(-(double)max_bias * exponent);
}

// d = soft_max(a * scale + slope * mask), with one more score of each head (its sink) that counts in the sum and is not
// part of d.  One block for each row.  The launch bound asks for one block per multiprocessor: with two, ptxas would
// spill registers.
extern "C" __global__ void __launch_bounds__(1024, 1) soft_max(View a, View mask, View sinks, View d, int64_t rows,
                                                            float scale, float max_bias, int mask_kind, int has_sinks) {
    await_inputs();
    __shared__ float part[32];
    const int64_t n = d.ne[0];
    FOR_EACH_ROW(r, rows) {
        const Index k = split_row(d, r);
        const char* x = at(a, 0, k.i1, k.i2, k.i3);
        const char* m = mask_kind < 0 ? nullptr : at(mask, 0, k.i1, wrap(k.i2, mask.ne[2]), wrap(k.i3, mask.ne[3]));
        char* y = at(d, 0, k.i1, k.i2, k.i3);
        const float slope = max_bias > 0.0f ? slope_of(k.i2, d.ne[2], max_bias) : 1.0f;
        float top = -INFINITY;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            float v = *(const float*)(x + i * a.nb[0]) * scale;
            if (m) v += slope * load_plain(m + i * mask.nb[0], mask_kind);
            *(float*)(y + i * d.nb[0]) = v;
            top = max_nan(top, v);
        }
        top = block_reduce<Max>(top, part);
        const float sink = has_sinks ? *(const float*)at(sinks, split(sinks, k.i2)) : 0.0f;
        if (has_sinks) top = max_nan(top, sink);
        float sum = 0.0f;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            float* const v = (float*)(y + i * d.nb[0]);
            *v = expf(*v - top);
            sum += *v;
        }
        sum = block_reduce<Sum>(sum, part);
        if (has_sinks) sum += expf(sink - top);
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) *(float*)(y + i * d.nb[0]) /= sum;
    }
}

// Causal masks: d = a where i0 <= past + i1 (the column is not later than the row's token), `value` elsewhere.
extern "C" __global__ void __launch_bounds__(256) diag_mask(View a, View d, int64_t n, int past, float value) {
    await_inputs();
    FOR_EACH(i, n) {
        const Index k = split(d, i);
        *(float*)at(d, k) = k.i0 > (int64_t)past + k.i1 ? value : *(const float*)at(a, k);
    }
}
