// Sums, means, the index of the largest element, and ranges of numbers.
//
// `sum` adds in f64, in two launches: a part for each block, then the parts.  The order of additions is fixed.
#include "common.cuh"

// parts[i] = the sum of the elements of a that block i takes; n: elements of a.
extern "C" __global__ void __launch_bounds__(1024) sum_parts(View a, double* parts, int64_t n, int kind) {
    await_inputs();
    __shared__ double part[32];
    double sum = 0.0;
    FOR_EACH(i, n) sum += (double)load_plain(at(a, split(a, i)), kind);
    sum = block_reduce<SumDouble>(sum, part);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// d = the sum of the n parts; launched with one block.
extern "C" __global__ void __launch_bounds__(1024) sum_of_parts(const double* parts, int n, View d, int kind) {
    await_inputs();
    __shared__ double part[32];
    double sum = 0.0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += parts[i];
    sum = block_reduce<SumDouble>(sum, part);
    if (threadIdx.x == 0) store_plain(d.p, kind, (float)sum);
}

// d[row] = the sum of a's row, divided by `divisor` (1: SUM_ROWS, the row's length: MEAN).  One block for each row.
extern "C" __global__ void __launch_bounds__(1024) sum_rows(View a, View d, int64_t rows, float divisor) {
    await_inputs();
    __shared__ float part[32];
    FOR_EACH_ROW(r, rows) {
        const Index k = split_row(a, r);
        const char* x = at(a, k);
        float sum = 0.0f;
        for (int64_t i = threadIdx.x; i < a.ne[0]; i += blockDim.x) sum += *(const float*)(x + i * a.nb[0]);
        sum = block_reduce<Sum>(sum, part);
        if (threadIdx.x == 0) *(float*)at(d, k) = sum / divisor;
    }
}

// For argmax an element and its index become one number (rank_of), and the largest number wins: a NaN before all
// others, then the larger element, and of equal elements the first.
struct MostBits {
    static __device__ __forceinline__ uint64_t of(uint64_t a, uint64_t b) { return a > b ? a : b; }
    static __device__ __forceinline__ uint64_t none() { return 0; }
};

__device__ __forceinline__ uint64_t rank_of(float x, int64_t i) {
    const uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);
    const uint32_t key = x != x ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)key << 32 | (uint32_t)~(uint32_t)i;
}

// d[row] = the index of the largest element of a's row.  One block for each row.
extern "C" __global__ void __launch_bounds__(1024) argmax(View a, View d, int64_t rows) {
    await_inputs();
    __shared__ uint64_t part[32];
    FOR_EACH_ROW(r, rows) {
        const char* x = at(a, 0, r, 0, 0);
        uint64_t best = 0;
        for (int64_t i = threadIdx.x; i < a.ne[0]; i += blockDim.x)
            best = MostBits::of(best, rank_of(*(const float*)(x + i * a.nb[0]), i));
        best = block_reduce<MostBits>(best, part);
        if (threadIdx.x == 0) *(int32_t*)at(d, r, 0, 0, 0) = (int32_t)~(uint32_t)best;
    }
}

// d[i] = start + step * i.
extern "C" __global__ void __launch_bounds__(256) arange(View d, int64_t n, float start, float step) {
    await_inputs();
    FOR_EACH(i, n) *(float*)at(d, i, 0, 0, 0) = add_rn(start, mul_rn(step, (float)i));
}
