// ARGSORT and TOP_K: the indices of a row's elements, in the order of the elements; alone, or with the soft max before
// them and the weights of the chosen experts after them.  A bitonic sort.
//
// An element and its index become one 64-bit key, so that no two keys are equal: the order is unique, equal elements
// keep their order, and NaNs come last.  Rows of up to CHUNK keys are sorted by one block in shared memory.  The keys
// of longer rows are in scratch memory, padded to a power of two; exchanges over a distance of CHUNK keys or more are
// launches of their own.
#include "common.cuh"

enum { CHUNK = 4096 };

__device__ __forceinline__ uint64_t key_of(float x, int64_t i, int descending) {
    if (descending) x = -x;
    const uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);
    const uint32_t order = x != x ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)order << 32 | (uint32_t)i;
}

__device__ __forceinline__ uint64_t key_at(const char* row, int64_t i, const View& a, int descending) {
    return i < a.ne[0] ? key_of(*(const float*)(row + i * a.nb[0]), i, descending) : ~0ull;
}

// Puts two keys in ascending order where i & size is 0, else in descending order.  i: the index of key x in its row.
__device__ __forceinline__ void exchange(uint64_t* x, uint64_t* y, int64_t i, int64_t size) {
    const uint64_t p = *x, q = *y;
    if ((p > q) == ((i & size) == 0)) {
        *x = q;
        *y = p;
    }
}

// Merges sorted sequences into sequences of `size` keys: the exchanges over distances `far`, far / 2, .. 1, among n
// keys in shared memory.  `first`: the index in the row of the first of these keys.
__device__ __forceinline__ void merge(uint64_t* keys, int n, int far, int64_t size, int64_t first) {
    for (int step = far; step > 0; step >>= 1) {
        __syncthreads();
        for (int t = threadIdx.x; t < n / 2; t += blockDim.x) {
            const int i = 2 * t - (t & (step - 1));
            exchange(keys + i, keys + i + step, first + i, size);
        }
    }
}

// Sorts rows and writes the first d.ne[0] indices of each; n: the row's length padded to a power of two, at most CHUNK.
extern "C" __global__ void __launch_bounds__(1024) sort_rows(View a, View d, int64_t rows, int n, int descending) {
    await_inputs();
    DYNAMIC_SHARED(uint64_t, keys);
    FOR_EACH_ROW(r, rows) {
        const Index k = split_row(a, r);
        const char* row = at(a, k);
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x) keys[i] = key_at(row, i, a, descending);
        for (int size = 2; size <= n; size *= 2) merge(keys, n, size / 2, size, 0);
        __syncthreads();
        for (int64_t i = threadIdx.x; i < d.ne[0]; i += blockDim.x)
            *(int32_t*)at(d, i, k.i1, k.i2, k.i3) = (int32_t)(uint32_t)keys[i];
    }
}

// The experts of each token, by its scores: p = soft_max(scores * scale).  `order` gets the indices of all experts by
// falling p, `weights` the p of the first weights.ne[0]; if `normalised`, divided by their sum, which is limited to
// `least` .. `most`.  One block for each token; n: the number of experts padded to a power of two.
extern "C" __global__ void __launch_bounds__(1024) choose_experts(View scores, View order, View weights, int64_t tokens,
                                                                 int n, float scale, int normalised, float least,
                                                                 float most) {
    await_inputs();
    __shared__ float part[32];
    DYNAMIC_SHARED(uint64_t, keys);
    float* const p = (float*)(keys + n);
    const int n_experts = (int)scores.ne[0], used = (int)weights.ne[0];
    FOR_EACH_ROW(t, tokens) {
        const char* x = at(scores, 0, t, 0, 0);
        float top = -INFINITY, sum = 0.0f, total = 0.0f;
        for (int i = threadIdx.x; i < n_experts; i += blockDim.x) {
            p[i] = *(const float*)(x + i * scores.nb[0]) * scale;
            top = max_nan(top, p[i]);
        }
        top = block_reduce<Max>(top, part);
        for (int i = threadIdx.x; i < n_experts; i += blockDim.x) {
            p[i] = expf(p[i] - top);
            sum += p[i];
        }
        sum = block_reduce<Sum>(sum, part);
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            if (i < n_experts) p[i] /= sum;
            keys[i] = i < n_experts ? key_of(p[i], i, 1) : ~0ull;
        }
        for (int size = 2; size <= n; size *= 2) merge(keys, n, size / 2, size, 0);
        __syncthreads();
        for (int i = threadIdx.x; i < n_experts; i += blockDim.x)
            *(int32_t*)at(order, i, t, 0, 0) = (int32_t)(uint32_t)keys[i];
        for (int i = threadIdx.x; i < used; i += blockDim.x) total += p[(uint32_t)keys[i]];
        total = block_reduce<Sum>(total, part);
        total = max_nan(min_nan(total, most), least);
        for (int i = threadIdx.x; i < used; i += blockDim.x) {
            const float w = p[(uint32_t)keys[i]];
            *(float*)at(weights, i, t, 0, 0) = normalised ? w / total : w;
        }
        __syncthreads();                   // before the next token's keys overwrite these
    }
}

// Writes the keys of each row to scratch memory, n for a row, in sorted chunks: ascending and descending in turn, as
// the merges need them.
extern "C" __global__ void __launch_bounds__(1024) sort_chunks(View a, uint64_t* scratch, int64_t rows, int64_t n,
                                                               int descending) {
    await_inputs();
    DYNAMIC_SHARED(uint64_t, keys);
    FOR_EACH_ROW(c, rows * (n / CHUNK)) {
        const int64_t first = c % (n / CHUNK) * CHUNK;
        const char* row = at(a, split_row(a, c / (n / CHUNK)));
        __syncthreads();
        for (int i = threadIdx.x; i < CHUNK; i += blockDim.x) keys[i] = key_at(row, first + i, a, descending);
        for (int size = 2; size <= CHUNK; size *= 2) merge(keys, CHUNK, size / 2, size, first);
        __syncthreads();
        for (int i = threadIdx.x; i < CHUNK; i += blockDim.x) scratch[c * CHUNK + i] = keys[i];
    }
}

// The exchanges over one distance, `far` >= CHUNK, of the merge into sequences of `size` keys.  `pairs`: how many; n:
// keys of a row.
extern "C" __global__ void __launch_bounds__(256) exchange_far(uint64_t* scratch, int64_t pairs, int64_t n, int64_t far,
                                                               int64_t size) {
    await_inputs();
    FOR_EACH(t, pairs) {
        const int64_t i = 2 * t - (t & (far - 1));
        exchange(scratch + i, scratch + i + far, i & (n - 1), size);
    }
}

// The exchanges over distances below CHUNK of the merge into sequences of `size` keys, each chunk in shared memory.
extern "C" __global__ void __launch_bounds__(1024) merge_chunks(uint64_t* scratch, int64_t rows, int64_t n,
                                                                int64_t size) {
    await_inputs();
    DYNAMIC_SHARED(uint64_t, keys);
    FOR_EACH_ROW(c, rows * (n / CHUNK)) {
        __syncthreads();
        for (int i = threadIdx.x; i < CHUNK; i += blockDim.x) keys[i] = scratch[c * CHUNK + i];
        merge(keys, CHUNK, CHUNK / 2, size, c % (n / CHUNK) * CHUNK);
        __syncthreads();
        for (int i = threadIdx.x; i < CHUNK; i += blockDim.x) scratch[c * CHUNK + i] = keys[i];
    }
}

// Writes the indices that the sorted keys contain to d, of `count` elements; n: keys of a row.
extern "C" __global__ void __launch_bounds__(256) take_indices(const uint64_t* scratch, View d, int64_t count,
                                                               int64_t n) {
    await_inputs();
    FOR_EACH(i, count) {
        const Index k = split(d, i);
        *(int32_t*)at(d, k) = (int32_t)(uint32_t)scratch[i / d.ne[0] * n + k.i0];
    }
}
