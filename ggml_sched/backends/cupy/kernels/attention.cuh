// Attention over a KV cache without storing the scores of all cells: FLASH_ATTN_EXT, in f32.
//
// A block computes some columns over one share of the cells (attention_common.cuh).  Its four warps take 16 or 32 cells
// (a.chunk) each in turn.  A warp first reads the mask, and skips cells that are masked for all columns.  For scores
// eight lanes share a cell; for the soft max a lane has one cell, with all columns; for values a lane has two
// neighbouring elements of each 64.  Invariant: no result depends on the contents of a masked cell, NaN included.
#pragma once

#include "attention_common.cuh"

enum { CELLS = 32 };

// Adds up a value for each of COLUMNS columns over the eight lanes that share a cell.  Lane `part` (0 .. 7) returns the
// sum of column part / (8 / COLUMNS): in each round it gives half of its columns away, while it has several.
template <int COLUMNS>
__device__ __forceinline__ float sum_of_eight(float (&v)[COLUMNS], int part) {
    UNROLL
    for (int m = 4; m > 0; m >>= 1) {
        const int half = COLUMNS * m / 8;
        if (half == 0) v[0] += __shfl_xor_sync(ALL_LANES, v[0], m);
        UNROLL
        for (int c = 0; c < half; ++c) {
            const float kept = part & m ? v[c + half] : v[c], given = part & m ? v[c] : v[c + half];
            v[c] = kept + __shfl_xor_sync(ALL_LANES, given, m);
        }
    }
    return v[0];
}

// The body of the kernels.  PAIRS: pairs of neighbouring elements of a value that a lane has, so dv <= 64 * PAIRS.
// COLUMNS: columns of a block, at most 8.  HALVES: K and V are f16, aligned for wide loads, and have multiples of eight
// elements.
template <bool HALVES, int PAIRS, int COLUMNS>
__device__ __forceinline__ void attend(const Attention& a, const char* q, const char* k, const char* v,
                                       const char* mask, const float* sinks, char* dst, float* partial,
                                       unsigned* counters, int8_t* rounded, float2* runs) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int padded = (a.d + 63) / 64 * 64, n_columns = a.group * a.rows;
    const int first = blockIdx.x * COLUMNS, begin = blockIdx.y * a.share;
    const int end = begin + a.share < a.cells ? begin + a.share : a.cells;
    DYNAMIC_SHARED(float, memory);
    float* queries = memory;                                       // [COLUMNS][padded]
    float* factors = queries + COLUMNS * padded;                   // of all warps: [A_WARPS][COLUMNS][CELLS]
    float* weights = factors + warp * COLUMNS * CELLS;             // of this warp: [COLUMNS][CELLS]
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
            const int number = first + c < n_columns ? first + c : n_columns - 1;
            slope[c] = slope_of(a, column_of(a, matrix, number).head);
            masks[c] = mask_of(a, mask, matrix, number);
            UNROLL
            for (int j = 0; j < PAIRS; ++j) sum[c][j].x = sum[c][j].y = 0.0f;
        }
        UNROLL_BY(1)
        for (int cell0 = begin + warp * a.chunk; cell0 < end; cell0 += A_WARPS * a.chunk) {
            const int cell = cell0 + lane;
            float bias[COLUMNS];
            unsigned mine = 0;             // bit c: whether column c sees this lane's cell
            UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                bias[c] = 0.0f;
                if (lane >= a.chunk || cell >= end || first + c >= n_columns) continue;
                if (mask != nullptr)
                    bias[c] = load_plain(masks[c] + (int64_t)cell * (a.mask_kind == F32 ? 4 : 2), a.mask_kind);
                if (bias[c] != -INFINITY) mine |= 1u << c;
                bias[c] *= slope[c];
            }
            const unsigned live = __ballot_sync(ALL_LANES, mine != 0);
            if (live == 0) continue;
            // Scores of four cells at once, each by eight lanes; the keys of PASSES times four cells are loaded
            // together.  In place of a cell that no column sees, one that is seen is loaded, and its score not used.
            enum { PASSES = 4 };
            const int part = lane & 7, lowest = __popc((live - 1) & ~live);
            UNROLL_BY(1)
            for (int here = lane >> 3; here < a.chunk; here += 4 * PASSES) {
                float dot[PASSES][COLUMNS];
                const char* row[PASSES];
                UNROLL
                for (int i = 0; i < PASSES; ++i) {
                    row[i] = keys + (cell0 + (live >> (here + 4 * i) & 1 ? here + 4 * i : lowest)) * a.k1;
                    UNROLL
                    for (int c = 0; c < COLUMNS; ++c) dot[i][c] = 0.0f;
                }
                UNROLL_BY(HALVES && COLUMNS < 8 ? 2 : 1)
                for (int e = part * 8; e < a.d; e += 64) {
                    Key<HALVES> x[PASSES];
                    UNROLL
                    for (int i = 0; i < PASSES; ++i) x[i].load(a, row[i], e);
                    UNROLL
                    for (int c = 0; c < COLUMNS; ++c) {
                        const float4* y = (const float4*)(queries + c * padded + e);
                        const float4 y0 = y[0], y1 = y[1];
                        UNROLL
                        for (int i = 0; i < PASSES; ++i)
                            dot[i][c] += x[i].at(0) * y0.x + x[i].at(1) * y0.y + x[i].at(2) * y0.z + x[i].at(3) * y0.w
                                       + x[i].at(4) * y1.x + x[i].at(5) * y1.y + x[i].at(6) * y1.z + x[i].at(7) * y1.w;
                    }
                }
                UNROLL
                for (int i = 0; i < PASSES; ++i) {
                    const float s = sum_of_eight<COLUMNS>(dot[i], part);
                    if (part % (8 / COLUMNS) == 0) weights[part / (8 / COLUMNS) * CELLS + here + 4 * i] = s;
                }
            }
            __syncwarp();
            // The soft max: each lane has one cell.  Weight -1 marks a cell that is masked for a column.
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
            // AHEAD: of how many cells the values are loaded before they are used.
            enum {
                LOADS = (HALVES && COLUMNS == 1 ? 32 : HALVES || COLUMNS == 1 ? 16 : 8) / PAIRS,
                AHEAD = LOADS < 2 ? 2 : LOADS > 16 ? 16 : LOADS
            };
            UNROLL_BY(1)
            for (int here = 0; here < a.chunk; here += AHEAD) {
                if ((live >> here & ((1u << AHEAD) - 1)) == 0) continue;
                Value<HALVES> x[AHEAD][PAIRS];
                UNROLL
                for (int i = 0; i < AHEAD; ++i) {
                    const char* row = values + (cell0 + (live >> (here + i) & 1 ? here + i : lowest)) * a.v1;
                    UNROLL
                    for (int j = 0; j < PAIRS; ++j) {
                        const int e = 2 * lane + 64 * j;
                        x[i][j].load(a, row, e < a.dv ? e : 0);
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
                            sum[c][j].x += w * x[i][j].first();
                            sum[c][j].y += w * x[i][j].second();
                        }
                    }
                }
            }
            __syncwarp();                  // before the next cells' weights overwrite these
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
        store_results<A_WARPS, COLUMNS>(a, matrix, first, joined, 64 * PAIRS, tops, totals, factors, sinks, dst,
                                        partial, counters, rounded, runs);
    }
}

// -- kernels ----------------------------------------------------------------------------------------------------------

// X(NAME, SIZE, COLUMNS) for each kernel, half_NAME or any_NAME: for values of up to SIZE elements, with COLUMNS
// columns in a block.
#define ATTEND_SIZES(X)                                          \
    X(64_1, 64, 1) X(64_4, 64, 4) X(64_8, 64, 8)                 \
    X(128_1, 128, 1) X(128_4, 128, 4) X(128_8, 128, 8)           \
    X(256_1, 256, 1) X(256_4, 256, 4) X(256_8, 256, 8)           \
    X(512_1, 512, 1) X(512_4, 512, 4)

#define ATTEND(NAME, HALVES, SIZE, COLUMNS)                                   \
    extern "C" __global__ void __launch_bounds__(128, 2) NAME(ATTENTION) {    \
        read_cells_ahead(a, k, v);                                            \
        await_inputs();                                                       \
        attend<HALVES, SIZE / 64, COLUMNS>(ATTENTION_ARGS);                   \
    }
