// Attention over a KV cache without storing the scores of all cells: FLASH_ATTN_EXT.
//
// A `column` is one query: a row of queries in one of the heads that share a key head.  A `split` is a part of the
// cells.  A block computes some columns over one split; its four warps take 32 cells each in turn.  A warp reads the
// mask first and skips cells that no column sees.  For scores eight lanes share a cell; for the soft max every lane has
// one cell of each column; for values every lane has two neighbouring elements of each 64.  The results of warps, and
// then of splits (kernel `combine`), are combined in a fixed order. Invariant: no result depends on the contents of a
// masked cell, NaN included; a column without any cell is 0.
#pragma once

#include "caches.cuh"

enum { A_WARPS = 4, CELLS = 32 };

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

// -- one split --------------------------------------------------------------------------------------------------------

// One query, a column: its row of queries, and its query head, one of those that share a key head.
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

// Sums of weights exp(score - top) are kept relative to the largest score so far, `top`.  Returns the factor by which
// such a sum is multiplied when `top` changes from `from` to `to`: exp(from - to); both may be -inf.
__device__ __forceinline__ float carry(float from, float to) { return from == to ? 1.0f : expf(from - to); }

// The weighted sum of values divided by the total of the weights; 0 where there was no cell.
__device__ __forceinline__ float finished(float sum, float total) {
    return total != 0.0f || total != total ? sum / total : 0.0f;
}

// A sink is one more score of a head that has a weight and no value.  Adds it to a column's total, and returns the
// factor for the column's sums so far.
__device__ __forceinline__ float with_sink(const float* sinks, int head, float top, float& total) {
    if (sinks == nullptr) return 1.0f;
    const float sink = sinks[head], to = sink > top ? sink : top, factor = carry(top, to);
    total = total * factor + carry(sink, to);
    return factor;
}

#define ATTENTION                                                                                                   \
    Attention a, const char *__restrict__ q, const char *__restrict__ k, const char *__restrict__ v,                 \
        const char *__restrict__ mask, const float *__restrict__ sinks, char *__restrict__ dst,                      \
        float *__restrict__ partial
#define ATTENTION_ARGS a, q, k, v, mask, sinks, dst, partial

// PAIRS: pairs of elements of a value that a lane has, so that dv <= 64 * PAIRS.  COLUMNS: columns of a block, at most
// 8. HALVES: K and V are f16, aligned for wide loads, and their rows are multiples of eight elements.
template <bool HALVES, int PAIRS, int COLUMNS>
__device__ __forceinline__ void attend(const Attention& a, const char* q, const char* k, const char* v,
                                       const char* mask, const float* sinks, char* dst, float* partial) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int padded = (a.d + 63) / 64 * 64, n_columns = a.group * a.rows;
    const int first = blockIdx.x * COLUMNS, begin = blockIdx.y * a.split;
    const int end = begin + a.split < a.cells ? begin + a.split : a.cells;
    DYNAMIC_SHARED(float, memory);
    float* queries = memory;                                       // [COLUMNS][padded]
    float* weights = queries + COLUMNS * padded + warp * COLUMNS * CELLS;   // of this warp: [COLUMNS][CELLS]
    float* joined = queries + COLUMNS * padded + A_WARPS * COLUMNS * CELLS; // [COLUMNS][64 * PAIRS]
    float* tops = joined + COLUMNS * 64 * PAIRS;                   // [A_WARPS][COLUMNS]
    float* totals = tops + A_WARPS * COLUMNS;                      // [A_WARPS][COLUMNS]
    for (int matrix = blockIdx.z; matrix < a.matrices; matrix += gridDim.z) {
        const int64_t batch = matrix / a.heads, kv = matrix % a.heads;
        const char* keys = k + kv * a.k2 + batch * a.k3;
        const char* values = v + kv * a.v2 + batch * a.v3;
        __syncthreads();
        UNROLL_BY(1)
        for (int i = threadIdx.x; i < COLUMNS * padded; i += blockDim.x) {
            const int c = first + i / padded, e = i % padded;
            float x = 0.0f;
            if (c < n_columns && e < a.d) {
                const Column at = column_of(a, matrix, c);
                x = *(const float*)(q + at.row * a.q1 + at.head * a.q2 + batch * a.q3 + (int64_t)e * a.q0) * a.scale;
            }
            queries[i] = x;
        }
        __syncthreads();
        float2 sum[COLUMNS][PAIRS];
        float top[COLUMNS], total[COLUMNS], slope[COLUMNS];
        const char* masks[COLUMNS];
        UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            top[c] = -INFINITY;
            total[c] = 0.0f;
            const Column at = column_of(a, matrix, first + c < n_columns ? first + c : n_columns - 1);
            slope[c] = slope_of(a, at.head);
            masks[c] = mask == nullptr ? nullptr
                     : mask + at.row * a.m1 + at.head % a.heads_of_mask * a.m2 + batch % a.batches_of_mask * a.m3;
            UNROLL
            for (int j = 0; j < PAIRS; ++j) sum[c][j].x = sum[c][j].y = 0.0f;
        }
        UNROLL_BY(1)
        for (int cell0 = begin + warp * CELLS; cell0 < end; cell0 += A_WARPS * CELLS) {
            const int cell = cell0 + lane;
            float bias[COLUMNS];
            unsigned mine = 0;             // columns that see this lane's cell
            UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                bias[c] = 0.0f;
                if (cell >= end || first + c >= n_columns) continue;
                if (mask != nullptr)
                    bias[c] = load_plain(masks[c] + (int64_t)cell * (a.mask_kind == F32 ? 4 : 2), a.mask_kind);
                if (bias[c] != -INFINITY) mine |= 1u << c;
                bias[c] *= slope[c];
            }
            const unsigned live = __ballot_sync(ALL_LANES, mine != 0);
            if (live == 0) continue;
            // Scores: of four cells at once, each by eight lanes.
            const int part = lane & 7;
            UNROLL_BY(COLUMNS == 1 && HALVES ? 4 : 1)
            for (int pass = 0; pass < CELLS / 4; ++pass) {
                const int here = pass * 4 + (lane >> 3);
                float dot[COLUMNS];
                UNROLL
                for (int c = 0; c < COLUMNS; ++c) dot[c] = 0.0f;
                if (live >> here & 1) {
                    const char* row = keys + (cell0 + here) * a.k1;
                    UNROLL_BY(COLUMNS == 1 && HALVES ? 2 : 1)
                    for (int e = part * 8; e < a.d; e += 64) {
                        float x[8];
                        load_key<HALVES>(a, row, e, x);
                        UNROLL
                        for (int c = 0; c < COLUMNS; ++c) {
                            const float4* y = (const float4*)(queries + c * padded + e);
                            const float4 y0 = y[0], y1 = y[1];
                            dot[c] += x[0] * y0.x + x[1] * y0.y + x[2] * y0.z + x[3] * y0.w
                                    + x[4] * y1.x + x[5] * y1.y + x[6] * y1.z + x[7] * y1.w;
                        }
                    }
                }
                UNROLL
                for (int c = 0; c < COLUMNS; ++c) {
                    float s = dot[c];
                    UNROLL
                    for (int m = 4; m > 0; m >>= 1) s += __shfl_xor_sync(ALL_LANES, s, m);
                    if (part == c) weights[c * CELLS + here] = s;
                }
            }
            __syncwarp();
            // The soft max: each lane has one cell.  A cell that a column does not see gets a negative weight as a
            // mark.
            UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                const bool seen = mine >> c & 1;
                float s = weights[c * CELLS + lane];
                if (a.softcap != 0.0f) s = tanhf(s) * a.softcap;
                s += bias[c];
                const float highest = warp_reduce<Largest>(seen ? s : -INFINITY);
                const float to = highest > top[c] ? highest : top[c];
                const float factor = carry(top[c], to), w = seen ? expf(s - to) : 0.0f;
                total[c] = total[c] * factor + warp_reduce<Sum>(w);
                top[c] = to;
                weights[c * CELLS + lane] = seen ? w : -1.0f;
                UNROLL
                for (int j = 0; j < PAIRS; ++j) {
                    sum[c][j].x *= factor;
                    sum[c][j].y *= factor;
                }
            }
            __syncwarp();
            // How many cells' values are loaded before they are used: more with one column, which needs fewer
            // registers.
            enum { AHEAD = (COLUMNS == 1 ? 16 : 8) / PAIRS < 2 ? 2 : (COLUMNS == 1 ? 16 : 8) / PAIRS };
            UNROLL_BY(1)
            for (int here = 0; here < CELLS; here += AHEAD) {
                if ((live >> here & ((1u << AHEAD) - 1)) == 0) continue;
                float2 x[AHEAD][PAIRS];
                UNROLL
                for (int i = 0; i < AHEAD; ++i) {
                    UNROLL
                    for (int j = 0; j < PAIRS; ++j) {
                        const int e = 2 * lane + 64 * j;
                        x[i][j].x = x[i][j].y = 0.0f;
                        if ((live >> (here + i) & 1) && e < a.dv)
                            x[i][j] = load_value<HALVES>(a, values + (cell0 + here + i) * a.v1, e);
                    }
                }
                UNROLL
                for (int c = 0; c < COLUMNS; ++c) {
                    UNROLL
                    for (int i = 0; i < AHEAD; ++i) {
                        const float w = weights[c * CELLS + here + i];
                        if (w < 0.0f) continue;
                        UNROLL
                        for (int j = 0; j < PAIRS; ++j) {
                            sum[c][j].x += w * x[i][j].x;
                            sum[c][j].y += w * x[i][j].y;
                        }
                    }
                }
            }
            __syncwarp();                  // the next cells' weights go where these were
        }
        // Combine the warps' results, one after the other.
        if (lane == 0) {
            UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                tops[warp * COLUMNS + c] = top[c];
                totals[warp * COLUMNS + c] = total[c];
            }
        }
        __syncthreads();
        UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            float to = -INFINITY;
            for (int i = 0; i < A_WARPS; ++i) to = tops[i * COLUMNS + c] > to ? tops[i * COLUMNS + c] : to;
            const float factor = carry(top[c], to);
            UNROLL
            for (int j = 0; j < PAIRS; ++j) {
                sum[c][j].x *= factor;
                sum[c][j].y *= factor;
            }
        }
        UNROLL_BY(1)
        for (int i = 0; i < A_WARPS; ++i) {
            if (i == warp) {
                UNROLL
                for (int c = 0; c < COLUMNS; ++c) {
                    UNROLL
                    for (int j = 0; j < PAIRS; ++j) {
                        float* to = joined + c * 64 * PAIRS + 2 * lane + 64 * j;
                        to[0] = i ? to[0] + sum[c][j].x : sum[c][j].x;
                        to[1] = i ? to[1] + sum[c][j].y : sum[c][j].y;
                    }
                }
            }
            __syncthreads();
        }
        UNROLL_BY(1)
        for (int i = threadIdx.x; i < COLUMNS * a.dv; i += blockDim.x) {
            const int c = i / a.dv, e = i % a.dv;
            if (first + c >= n_columns) continue;
            float to = -INFINITY, all = 0.0f;
            for (int w = 0; w < A_WARPS; ++w) to = tops[w * COLUMNS + c] > to ? tops[w * COLUMNS + c] : to;
            for (int w = 0; w < A_WARPS; ++w) all += totals[w * COLUMNS + c] * carry(tops[w * COLUMNS + c], to);
            const float x = joined[c * 64 * PAIRS + e];
            const Column at = column_of(a, matrix, first + c);
            if (a.splits == 1) {
                const float factor = with_sink(sinks, at.head, to, all);
                ((float*)(dst + at.head * a.d1 + at.row * a.d2 + batch * a.d3))[e] = finished(x * factor, all);
                continue;
            }
            float* out = partial + (((int64_t)matrix * n_columns + first + c) * a.splits + blockIdx.y) * (a.dv + 2);
            out[e + 2] = x;
            if (e == 0) {
                out[0] = to;
                out[1] = all;
            }
        }
    }
}

// Combines the results of all splits, which `attend` left in `partial`; a block for each column.
__device__ __forceinline__ void combine_splits(const Attention& a, const float* sinks, char* dst,
                                               const float* partial) {
    const int n_columns = a.group * a.rows;
    FOR_EACH_ROW(i, (int64_t)a.matrices * n_columns) {
        const int matrix = (int)(i / n_columns);
        const Column at = column_of(a, matrix, (int)(i % n_columns));
        const float* from = partial + i * a.splits * (a.dv + 2);
        float to = -INFINITY, all = 0.0f;
        for (int s = 0; s < a.splits; ++s) to = from[s * (a.dv + 2)] > to ? from[s * (a.dv + 2)] : to;
        for (int s = 0; s < a.splits; ++s) all += from[s * (a.dv + 2) + 1] * carry(from[s * (a.dv + 2)], to);
        const float factor = with_sink(sinks, at.head, to, all);
        for (int e = threadIdx.x; e < a.dv; e += blockDim.x) {
            float x = 0.0f;
            for (int s = 0; s < a.splits; ++s) x += from[s * (a.dv + 2) + 2 + e] * carry(from[s * (a.dv + 2)], to);
            ((float*)(dst + at.head * a.d1 + at.row * a.d2 + matrix / a.heads * a.d3))[e] = finished(x * factor, all);
        }
    }
}

// -- kernels ----------------------------------------------------------------------------------------------------------

// Kernels NAME_SIZE_COLUMNS: for values of up to SIZE elements, with COLUMNS columns in a block.
#define ATTEND(NAME, HALVES, SIZE, COLUMNS)                                                      \
    extern "C" __global__ void __launch_bounds__(128, 2) NAME##_##SIZE##_##COLUMNS(ATTENTION) { \
        attend<HALVES, SIZE / 64, COLUMNS>(ATTENTION_ARGS);                                      \
    }
#define ATTEND_SIZE(NAME, HALVES, SIZE) \
    ATTEND(NAME, HALVES, SIZE, 1)       \
    ATTEND(NAME, HALVES, SIZE, 4)       \
    ATTEND(NAME, HALVES, SIZE, 8)
#define ATTEND_SIZES(NAME, HALVES)  \
    ATTEND_SIZE(NAME, HALVES, 64)   \
    ATTEND_SIZE(NAME, HALVES, 128)  \
    ATTEND_SIZE(NAME, HALVES, 256)  \
    ATTEND(NAME, HALVES, 512, 1)    \
    ATTEND(NAME, HALVES, 512, 4)
