// Code common to the kernels of attention: columns and their masks, sinks, and how results are joined.
//
// A column is one query of one head; it sees a cell unless its mask is -inf there.  A share is a part of the cells.  A
// block computes some columns over one share; its warps take different cells.  The results of the warps are joined in a
// fixed order.  Of the blocks with the same columns, the one that ends last (a counter shows it) joins the results of
// the shares.  Invariants: a column that sees no cell has result 0; a counter is 0 before and after a launch.
#pragma once

#include "caches.cuh"
#include "rounded.cuh"

enum { A_WARPS = 4, MAX_SHARES = 128 };

// The maximum of scores.  A NaN is ignored here; it still reaches the result, through its weight exp(NaN).
struct Largest {
    static __device__ __forceinline__ float of(float a, float b) { return a > b || b != b ? a : b; }
};

// The factor by which a head multiplies the mask: ALiBi (Press et al. 2021).
__device__ __forceinline__ float slope_of(const Attention& a, int head) {
    if (!(a.max_bias > 0.0f)) return 1.0f;
    const float e = head < a.whole ? (float)(head + 1) / (float)a.whole
                                   : (float)(2 * (head - a.whole) + 1) / (float)(2 * a.whole);
    return exp2f(-a.max_bias * e);
}

// A column: the query's row among the queries of a head, and its query head.
struct Column {
    int row, head;
};

// Column number c of a key head; `matrix`: the number of that key head among those of all batches.
__device__ __forceinline__ Column column_of(const Attention& a, int matrix, int c) {
    Column r;
    r.row = c / a.group;
    r.head = matrix % a.heads * a.group + c % a.group;
    return r;
}

// The row of the mask for column number c of key head `matrix`; null without a mask.
__device__ __forceinline__ const char* mask_of(const Attention& a, const char* mask, int matrix, int c) {
    const Column at = column_of(a, matrix, c);
    const uint32_t head = (uint32_t)at.head % (uint32_t)a.heads_of_mask;
    const uint32_t batch = (uint32_t)(matrix / a.heads) % (uint32_t)a.batches_of_mask;
    return mask == nullptr ? nullptr : mask + at.row * a.m1 + head * a.m2 + batch * a.m3;
}

// Sums of weights exp(score - top) are kept relative to the largest score so far, `top`.  Returns the factor by which
// such a sum is multiplied when `top` changes from `from` to `to`: exp(from - to); both may be -inf.
__device__ __forceinline__ float carry(float from, float to) { return from == to ? 1.0f : expf(from - to); }

// The weighted sum of values divided by the total of the weights; 0 if the column saw no cell.
__device__ __forceinline__ float finished(float sum, float total) {
    return total != 0.0f || total != total ? sum / total : 0.0f;
}

// A sink is one more score of a head, which has a weight but no value.  Adds the weight of a column's sink to `total`,
// and returns the factor by which the column's weighted sum is multiplied.  `top`: the largest score without the sink.
__device__ __forceinline__ float with_sink(const float* sinks, int head, float top, float& total) {
    if (sinks == nullptr) return 1.0f;
    const float sink = sinks[head], to = sink > top ? sink : top, factor = carry(top, to);
    total = total * factor + carry(sink, to);
    return factor;
}

#define ATTENTION                                                                                                    \
    Attention a, const char *RESTRICT q, const char *RESTRICT k, const char *RESTRICT v, const char *RESTRICT mask,  \
        const float *RESTRICT sinks, char *RESTRICT dst, float *RESTRICT partial, unsigned *RESTRICT counters,       \
        int8_t *RESTRICT rounded, float2 *RESTRICT runs
#define ATTENTION_ARGS a, q, k, v, mask, sinks, dst, partial, counters, rounded, runs

// Writes element e of a column's result; if `rounded` is not null, also rounded to 8 bits: then all lanes of a warp
// call this together, with 32 neighbouring elements.
__device__ __forceinline__ void store_value(const Attention& a, const Column& at, int batch, int e, float v, char* dst,
                                            int8_t* rounded, float2* runs) {
    const int64_t row = at.head * a.d1 + at.row * a.d2 + batch * a.d3;
    ((float*)(dst + row))[e] = v;
    if (rounded != nullptr) store_rounded(v, (row >> 2) + e, rounded, runs);
}

// The address in `partial` of the results of a column's shares: for each share the largest score, the total of the
// weights, and the weighted sum of values.  They are volatile because other blocks write them during the launch.
__device__ __forceinline__ volatile float* partial_of(const Attention& a, float* partial, int matrix, int column) {
    return partial + ((int64_t)matrix * a.group * a.rows + column) * a.shares * (a.dv + 2);
}

// Joins the results of all shares for the block's columns, and writes the columns' results.  `factors`,
// [COLUMNS][MAX_SHARES], `tops` and `totals`: shared memory to work in.
template <int COLUMNS>
__device__ __forceinline__ void join_shares(const Attention& a, int matrix, int first, float* partial,
                                            const float* sinks, char* dst, float* factors, float* tops,
                                            float* totals, int8_t* rounded, float2* runs) {
    const int n_columns = a.group * a.rows, lane = threadIdx.x & 31;
    UNROLL_BY(1)
    for (int c = threadIdx.x >> 5; c < COLUMNS && first + c < n_columns; c += A_WARPS) {
        const volatile float* from = partial_of(a, partial, matrix, first + c);
        float to = -INFINITY, all = 0.0f;
        UNROLL_BY(1)
        for (int s = lane; s < a.shares; s += 32) {
            const float top = from[s * (a.dv + 2)];
            to = top > to ? top : to;
        }
        to = warp_reduce<Largest>(to);
        UNROLL_BY(1)
        for (int s = lane; s < a.shares; s += 32) {
            const float factor = carry(from[s * (a.dv + 2)], to);
            factors[c * MAX_SHARES + s] = factor;
            all += from[s * (a.dv + 2) + 1] * factor;
        }
        all = warp_reduce<Sum>(all);
        const float factor = with_sink(sinks, column_of(a, matrix, first + c).head, to, all);
        if (lane == 0) {
            tops[c] = factor;
            totals[c] = all;
        }
    }
    __syncthreads();
    UNROLL_BY(1)
    for (int i = threadIdx.x; i < COLUMNS * a.dv; i += blockDim.x) {
        const int c = i / a.dv, e = i % a.dv;
        if (first + c >= n_columns) continue;
        const volatile float* from = partial_of(a, partial, matrix, first + c) + 2 + e;
        float x = 0.0f;
        UNROLL_BY(4)
        for (int s = 0; s < a.shares; ++s) x += from[s * (a.dv + 2)] * factors[c * MAX_SHARES + s];
        const Column at = column_of(a, matrix, first + c);
        store_value(a, at, matrix / a.heads, e, finished(x * tops[c], totals[c]), dst, rounded, runs);
    }
}

// Writes the results of the block's columns; with several shares, writes those of its share to `partial`, and the last
// block of these columns joins all shares.  `tops`, `totals`, [WARPS][COLUMNS]: the largest score of each warp, which
// had cells of its own, and the total of its weights relative to that score.  `joined`, [COLUMNS][pitch]: the weighted
// sums over all warps, relative to the largest score of all.  `factors`, for join_shares, may lie over `joined`.
template <int WARPS, int COLUMNS>
__device__ __forceinline__ void store_results(const Attention& a, int matrix, int first, const float* joined, int pitch,
                                              float* tops, float* totals, float* factors, const float* sinks, char* dst,
                                              float* partial, unsigned* counters, int8_t* rounded, float2* runs) {
    __shared__ int is_last;
    const int n_columns = a.group * a.rows;
    UNROLL_BY(1)
    for (int i = threadIdx.x; i < COLUMNS * a.dv; i += blockDim.x) {
        const int c = i / a.dv, e = i % a.dv;
        if (first + c >= n_columns) continue;
        float to = -INFINITY, all = 0.0f;
        for (int w = 0; w < WARPS; ++w) to = tops[w * COLUMNS + c] > to ? tops[w * COLUMNS + c] : to;
        for (int w = 0; w < WARPS; ++w) all += totals[w * COLUMNS + c] * carry(tops[w * COLUMNS + c], to);
        const float x = joined[c * pitch + e];
        const Column at = column_of(a, matrix, first + c);
        if (a.shares == 1) {
            const float factor = with_sink(sinks, at.head, to, all);
            store_value(a, at, matrix / a.heads, e, finished(x * factor, all), dst, rounded, runs);
            continue;
        }
        volatile float* out = partial_of(a, partial, matrix, first + c) + blockIdx.y * (a.dv + 2);
        out[e + 2] = x;
        if (e == 0) {
            out[0] = to;
            out[1] = all;
        }
    }
    if (a.shares == 1) return;
    __threadfence();                       // other blocks must see each thread's results before the block is counted
    __syncthreads();
    if (threadIdx.x == 0)
        is_last = atomicInc(&counters[matrix * gridDim.x + blockIdx.x], a.shares - 1) == (unsigned)a.shares - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    join_shares<COLUMNS>(a, matrix, first, partial, sinks, dst, factors, tops, totals, rounded, runs);
}

// -- what is read ahead -----------------------------------------------------------------------------------------------

// Prefetches the beginning of a row of `d` elements of a cache, up to four lines of 128 bytes.
__device__ __forceinline__ void read_row_ahead(const char* row, int d, int kind) {
    const int bytes = kind == Q8_0 ? d / 32 * 34 : kind == Q4_0 ? d / 32 * 18 : d * (kind == F32 ? 4 : 2);
    for (int line = 0; line < bytes && line < 512; line += 128) read_ahead(row + line);
}

// Prefetches keys and values of the block's share before await_inputs(): each thread those of one cell.  An earlier
// launch may still write these rows.  That is safe: prefetches fill the L2 cache, and writes go through that cache, so
// loads after await_inputs() read what was written.
__device__ __forceinline__ void read_cells_ahead(const Attention& a, const char* k, const char* v) {
    if (!OVERLAPS) return;
    const int cell = blockIdx.y * a.share + (int)threadIdx.x, matrix = blockIdx.z;
    if ((int)threadIdx.x >= a.share || cell >= a.cells || matrix >= a.matrices) return;
    const int64_t batch = matrix / a.heads, kv = matrix % a.heads;
    read_row_ahead(k + kv * a.k2 + batch * a.k3 + cell * a.k1, a.d, a.k_kind);
    read_row_ahead(v + kv * a.v2 + batch * a.v3 + cell * a.v1, a.dv, a.v_kind);
}
