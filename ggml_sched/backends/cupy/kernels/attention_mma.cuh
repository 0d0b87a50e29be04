// FLASH_ATTN_EXT of many columns, of prompts or of query heads that share a key head, over caches in f16, on tensor
// cores (from sm_80 on); after Dao, "FlashAttention-2" (2023).
//
// A block computes COLUMNS columns over one share of the cells, a tile of cells at a time, and leaves out tiles whose
// cells are masked for all of its columns.  Keys and values of a tile are copied to shared memory: the values while
// scores are computed, the keys of the next tile while values are added up.  A warp has 16 columns.  Queries, times a
// power of two, and weights of cells are rounded to f16; scores, soft max and sums are f32.  A lane, with t = lane % 4,
// holds two columns of each product (tensor.cuh), lane / 4 and lane / 4 + 8: of scores the cells 8 j + 2 t and
// 8 j + 2 t + 1, j = 0, 1, ...; of results the elements 16 t .. 16 t + 15 of each 64.  A sum over elements may take
// them in any order, so a lane loads 8 neighbours (16 bytes) at once.
// Invariant: no result depends on the contents of a masked cell, NaN included.
#pragma once

#include "attention_common.cuh"
#include "tensor.cuh"

// How a block divides its work among its warps, for values of up to SIZE elements: by columns, by the cells of a tile,
// or by the elements of values (then each warp computes all scores).
template <int SIZE, int COLUMNS>
struct Shares {
    static constexpr bool HELD = SIZE <= 128;  // whether queries stay in registers
    static constexpr int TILE = SIZE <= 128 || (SIZE == 256 && COLUMNS == 16) ? 64 : 32;
    static constexpr int COLUMN_WARPS = COLUMNS / 16, VALUE_WARPS = SIZE == 512 ? 4 : 1;
    static constexpr int CELL_WARPS = A_WARPS / (COLUMN_WARPS * VALUE_WARPS);
    static constexpr int OWN = TILE / CELL_WARPS, WIDTH = SIZE / VALUE_WARPS;  // a warp's cells; elements of its values
    static constexpr int VALUE_PITCH = 2 * SIZE + 16;  // bytes from row to row of values in shared memory
    static constexpr int PITCH = SIZE + 4;     // numbers from column to column of results in shared memory
};

// Shared memory has the warps' largest scores and totals (RESULTS of each), WEIGHTS numbers for each warp, and a bit
// for each tile of a batch; then keys, values and, unless HELD, queries, over which results are written in the end.
// ops/attention.py computes its size.  STEP_CELLS: cells whose values are added up at once.
enum { RESULTS = 64, STEP_CELLS = 16, WEIGHTS = 16 * STEP_CELLS, BATCH = 32 * A_WARPS };

// Bytes from row to row of keys and queries in shared memory, for rows of d elements: an odd multiple of 64 bytes (32
// elements), so that lanes read from different banks.
__device__ __forceinline__ int key_pitch(int d) {
    const int bytes = (d + 31) / 32 * 64;
    return bytes & 64 ? bytes : bytes + 64;
}

// -- masks ------------------------------------------------------------------------------------------------------------

// The number that a row of the mask has for a cell: 0 without a mask (`row` null), -inf for cells from `end` on.
__device__ __forceinline__ float mask_at(const Attention& a, const char* row, int cell, int end) {
    if (cell >= end) return -INFINITY;
    return row == nullptr ? 0.0f : load_plain(row + (int64_t)cell * (a.mask_kind == F32 ? 4 : 2), a.mask_kind);
}

// Returns which of the 32 tiles from cell `begin` on have a cell that is not masked for all columns of the block: bit i
// is tile i.  `first`: the block's first column.  Each lane reads the masks of eight cells.
template <int TILE, int COLUMNS>
__device__ __forceinline__ unsigned live_tiles(const Attention& a, const char* mask, int matrix, int first, int begin,
                                               int end) {
    enum { LANES = TILE / 8, AT_ONCE = 32 / LANES, ROWS = 4 };
    const int n_columns = a.group * a.rows, lane = threadIdx.x & 31;
    const int last = first + COLUMNS < n_columns ? first + COLUMNS - 1 : n_columns - 1;
    // If all heads have the same mask, the columns of a query row share a row of it: one of them is checked.
    const int each = a.heads_of_mask == 1 ? a.group : 1, lowest = first / each;
    unsigned found = 0;
    UNROLL_BY(1)
    for (int i = 0; i < 32 && begin + i * TILE < end; i += AT_ONCE) {
        const int cell = begin + i * TILE + lane * 8;
        bool sees = mask == nullptr && cell < end, every = false;
        // From the last row back: under a causal mask it attends to the most cells, so the loop mostly ends after one
        // round.
        UNROLL_BY(1)
        for (int n = last / each; mask != nullptr && n >= lowest && !every; n -= ROWS) {
            const char* rows[ROWS];
            UNROLL
            for (int j = 0; j < ROWS; ++j) rows[j] = mask_of(a, mask, matrix, (n - j > lowest ? n - j : lowest) * each);
            if (a.m_wide && cell + 8 <= end) {
                UNROLL
                for (int j = 0; j < ROWS; ++j) {
                    const uint4 w = load_input((const uint4*)(rows[j] + 2 * (int64_t)cell));
                    sees |= w.x != 0xfc00fc00u || w.y != 0xfc00fc00u || w.z != 0xfc00fc00u || w.w != 0xfc00fc00u;
                }
            } else {
                UNROLL_BY(1)
                for (int c = cell; c < end && c < cell + 8; ++c) {
                    UNROLL
                    for (int j = 0; j < ROWS; ++j) sees |= mask_at(a, rows[j], c, end) != -INFINITY;
                }
            }
            every = true;
            const unsigned all = __ballot_sync(ALL_LANES, sees);
            UNROLL
            for (int j = 0; j < AT_ONCE; ++j) every = every && (all >> j * LANES & ((1u << LANES) - 1)) != 0;
        }
        const unsigned all = __ballot_sync(ALL_LANES, sees);
        UNROLL
        for (int j = 0; j < AT_ONCE; ++j)
            if (all >> j * LANES & ((1u << LANES) - 1)) found |= 1u << (i + j);
    }
    return found;
}

// The number of the next tile after `tile` (-1: from the start) in a batch of tiles whose bit is set in `live`; BATCH
// if there is none.
__device__ __forceinline__ int next_tile(const unsigned* live, int tile) {
    UNROLL_BY(1)
    for (int word = (tile + 1) / 32; word < A_WARPS; ++word) {
        const unsigned left = live[word] & (word == (tile + 1) / 32 ? ~0u << (tile + 1) % 32 : ~0u);
        if (left) return 32 * word + __popc((left & (0u - left)) - 1);
    }
    return BATCH;
}

// -- queries ----------------------------------------------------------------------------------------------------------

// `there`: the power of two by which a query is multiplied before it is rounded to f16.  Then its largest element, and
// those up to 2^24 times smaller, keep all digits of f16.  `back`: 1 / there.  Both are 1 if an element is infinite.
struct Power {
    float there, back;
};

__device__ __forceinline__ Power power_of(float largest) {
    Power p;
    int shift = 0;
    if (largest > 0.0f && largest <= 3.4028234e38f) shift = 10 + 127 - (int)(__float_as_uint(largest) >> 23);
    shift = shift < -126 ? -126 : shift > 126 ? 126 : shift;
    p.there = __uint_as_float((uint32_t)(127 + shift) << 23);
    p.back = __uint_as_float((uint32_t)(127 - shift) << 23);
    return p;
}

// Loads eight elements of a query from number e on, times the scale of attention; zeros after the last element, and for
// a column that does not exist (`row` null).
__device__ __forceinline__ void load_query(const Attention& a, const char* row, int e, float* v) {
    UNROLL
    for (int j = 0; j < 8; ++j)
        v[j] = row != nullptr && e < a.d ? *(const float*)(row + (int64_t)(e + j) * a.q0) * a.scale : 0.0f;
}

// The largest magnitude of a query's elements, without NaNs; the four lanes that share the query all get it.
__device__ __forceinline__ float largest_of(const Attention& a, const char* row) {
    float largest = 0.0f;
    UNROLL_BY(1)
    for (int e = 8 * (threadIdx.x & 3); e < a.d; e += 32) {
        float v[8];
        load_query(a, row, e, v);
        UNROLL
        for (int j = 0; j < 8; ++j) largest = larger(largest, fabsf(v[j]));
    }
    largest = larger(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
    return larger(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
}

// The eight elements that load_query loads, times `power`, as f16.
__device__ __forceinline__ uint4 query_words(const Attention& a, const char* row, int e, float power) {
    float v[8];
    load_query(a, row, e, v);
    uint4 w;
    w.x = pack_halves(v[0] * power, v[1] * power);
    w.y = pack_halves(v[2] * power, v[3] * power);
    w.z = pack_halves(v[4] * power, v[5] * power);
    w.w = pack_halves(v[6] * power, v[7] * power);
    return w;
}

// -- tiles ------------------------------------------------------------------------------------------------------------

// Begins to copy the first `bytes` bytes, a multiple of 16, of each cell's row to shared memory, for the tile of cells
// from `cell0` on; rows of cells from `end` on become 0.
template <int TILE>
__device__ __forceinline__ void copy_rows(char* to, int pitch, const char* from, int64_t stride, int bytes, int cell0,
                                          int end) {
    const int part = 16 * (threadIdx.x & 7);
    UNROLL_BY(1)
    for (int i = threadIdx.x >> 3; i < TILE; i += 4 * A_WARPS) {
        const bool whole = cell0 + i < end;
        const char* row = from + (cell0 + (whole ? i : 0)) * stride;
        UNROLL_BY(1)
        for (int at = part; at < bytes; at += 128) copy_16(to + i * pitch + at, row + at, whole);
    }
}

// Adds the products of the warp's 16 queries and N times 8 keys, over 32 neighbouring elements, to a lane's scores.
// x0, x1: the lane's eight elements of its two queries; `keys`: those of its key among the first eight keys.
template <int N>
__device__ __forceinline__ void multiply_keys(const uint4& x0, const uint4& x1, const char* keys, int pitch,
                                              float (&scores)[N][4]) {
    const uint32_t low[4] = {x0.x, x1.x, x0.y, x1.y}, high[4] = {x0.z, x1.z, x0.w, x1.w};
    UNROLL
    for (int j = 0; j < N; ++j) {
        const uint4 y = *(const uint4*)(keys + 8 * j * pitch);
        const uint32_t first[2] = {y.x, y.y}, second[2] = {y.z, y.w};
        mma_halves(scores[j], low, first);
        mma_halves(scores[j], high, second);
    }
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Adds 64 neighbouring elements of the values of 16 cells, times the cells' weights, to a lane's sums.  `values`: the
// lane's eight elements of cell 2 t; the lane also loads its elements of cells 2 t + 1, 2 t + 8 and 2 t + 9.
__device__ __forceinline__ void add_values(const uint32_t (&weights)[4], const char* values, int pitch,
                                           float (&sums)[8][4]) {
    const uint4 x0 = *(const uint4*)values, x1 = *(const uint4*)(values + pitch);
    const uint4 x8 = *(const uint4*)(values + 8 * pitch), x9 = *(const uint4*)(values + 9 * pitch);
    UNROLL
    for (int j = 0; j < 8; ++j) {
        const uint32_t which = j & 1 ? 0x7632u : 0x5410u;
        const uint32_t y[2] = {__byte_perm(word_of(x0, j / 2), word_of(x1, j / 2), which),
                               __byte_perm(word_of(x8, j / 2), word_of(x9, j / 2), which)};
        mma_halves(sums[j], weights, y);
    }
}

// Whether the values of `cells` cells, each `bytes` bytes long, have an element that is not finite; all lanes of the
// warp get the result.
__device__ __forceinline__ bool has_infinite(const char* values, int pitch, int cells, int bytes) {
    bool found = false;
    UNROLL_BY(1)
    for (int i = (threadIdx.x & 31) >> 3; i < cells; i += 4) {
        UNROLL_BY(1)
        for (int at = 16 * (threadIdx.x & 7); at < bytes; at += 128) {
            const uint4 v = *(const uint4*)(values + i * pitch + at);
            UNROLL
            for (int j = 0; j < 4; ++j) {
                const uint32_t w = word_of(v, j);
                found |= (w & 0x7c00u) == 0x7c00u || (w & 0x7c000000u) == 0x7c000000u;
            }
        }
    }
    return __ballot_sync(ALL_LANES, found) != 0;
}

// Does what add_values does, element by element, and skips masked cells, because their values may be infinite or NaN.
// `weights`: [16][STEP_CELLS] in shared memory, the weights of the warp's columns in f16, negative where a cell is
// masked for a column; `values`: of the first cell's 64 elements the 16 that the lane adds.
__device__ __forceinline__ void add_seen_values(const uint16_t* weights, const char* values, int pitch,
                                                float (&sums)[8][4]) {
    const uint16_t* own = weights + ((threadIdx.x & 31) >> 2) * STEP_CELLS;
    UNROLL_BY(1)
    for (int i = 0; i < STEP_CELLS; ++i) {
        const float w0 = __half_bits_to_float(own[i]), w1 = __half_bits_to_float(own[8 * STEP_CELLS + i]);
        UNROLL
        for (int h = 0; h < 2; ++h) {
            const uint4 v = *(const uint4*)(values + i * pitch + 16 * h);
            UNROLL
            for (int j = 0; j < 8; ++j) {
                const float x = __half_bits_to_float((uint16_t)(word_of(v, j / 2) >> 16 * (j % 2)));
                if (!(w0 < 0.0f)) sums[j][h] += w0 * x;
                if (!(w1 < 0.0f)) sums[j][2 + h] += w1 * x;
            }
        }
    }
}

// -- one block --------------------------------------------------------------------------------------------------------

// The soft max so far, for the lane's two columns: the largest score (top), the total of the weights of the lane's
// cells, Power::back of the query, ALiBi's factor (slope), and the row of the mask (null: none).
struct Soft {
    float top[2], total[2], back[2], slope[2];
    const char* masks[2];
};

// Replaces a lane's scores `s` of N times 8 cells, from cell `base` on, by the cells' weights.  Returns a bit for each
// weight: whether its cell is not masked.  The caller multiplies the sums so far of its two columns by `factor`.
template <int N>
__device__ __forceinline__ uint32_t soften(const Attention& a, float (&s)[N][4], int base, int end, Soft& soft,
                                           float (&factor)[2]) {
    const int cell = base + 2 * (threadIdx.x & 3);
    UNROLL
    for (int j = 0; j < 4 * N; ++j) s[j / 4][j % 4] *= soft.back[j / 2 % 2];
    if (a.softcap != 0.0f) {
        UNROLL
        for (int j = 0; j < 4 * N; ++j) {
            float& x = s[j / 4][j % 4];    // becomes softcap * tanh(x)
            x = a.softcap - 2.0f * a.softcap / (expf(2.0f * x) + 1.0f);
        }
    }
    uint32_t seen = (uint32_t)((1ull << 4 * N) - 1);
    const bool whole = base + 8 * N <= end;
    if (whole && a.m_wide) {
        UNROLL
        for (int j = 0; j < 2 * N; ++j) {
            float* const x = &s[j / 2][2 * (j % 2)];
            const uint32_t w = load_input((const uint32_t*)(soft.masks[j % 2] + 2 * ((int64_t)cell + j / 2 * 8)));
            if ((w & 0xffffu) == 0xfc00u) seen &= ~(1u << 2 * j);
            if (w >> 16 == 0xfc00u) seen &= ~(2u << 2 * j);
            x[0] += __half_bits_to_float((uint16_t)w) * soft.slope[j % 2];
            x[1] += __half_bits_to_float((uint16_t)(w >> 16)) * soft.slope[j % 2];
        }
    } else if (!whole || soft.masks[0] != nullptr) {
        UNROLL
        for (int j = 0; j < 4 * N; ++j) {
            const float bias = mask_at(a, soft.masks[j / 2 % 2], cell + j / 4 * 8 + j % 2, end);
            if (bias == -INFINITY) seen &= ~(1u << j);
            s[j / 4][j % 4] += bias * soft.slope[j / 2 % 2];
        }
    }
    UNROLL
    for (int r = 0; r < 2; ++r) {
        float highest = -INFINITY;
        UNROLL
        for (int j = 0; j < 2 * N; ++j) {
            const int l = 4 * (j / 2) + 2 * r + j % 2;
            if (seen >> l & 1) highest = Largest::of(highest, s[l / 4][l % 4]);
        }
        highest = Largest::of(highest, __shfl_xor_sync(ALL_LANES, highest, 1));
        highest = Largest::of(highest, __shfl_xor_sync(ALL_LANES, highest, 2));
        const float to = highest > soft.top[r] ? highest : soft.top[r];
        factor[r] = carry(soft.top[r], to);
        soft.top[r] = to;
        float sum = 0.0f;
        UNROLL
        for (int j = 0; j < 2 * N; ++j) {
            const int l = 4 * (j / 2) + 2 * r + j % 2;
            const float w = seen >> l & 1 ? expf(s[l / 4][l % 4] - to) : 0.0f;
            s[l / 4][l % 4] = w;
            sum += w;
        }
        soft.total[r] = soft.total[r] * factor[r] + sum;
    }
    return seen;
}

template <int SIZE, int COLUMNS>
__device__ __forceinline__ void attend_in_tiles(ATTENTION) {
    typedef Shares<SIZE, COLUMNS> S;
    enum { N = S::OWN / 8, PARTS = S::WIDTH / 64, CHUNKS = S::HELD ? SIZE / 32 : 1 };
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, line = lane >> 2, t = lane & 3;
    const int column_warp = S::COLUMN_WARPS > 1 ? warp : 0, cell_warp = S::CELL_WARPS > 1 ? warp : 0;
    const int value_warp = S::VALUE_WARPS > 1 ? warp : 0;
    const int pitch = key_pitch(a.d), n_columns = a.group * a.rows;
    // The blocks that start first take the last columns, which see the most cells under a causal mask.
    const int first = ((int)gridDim.x - 1 - (int)blockIdx.x) * COLUMNS, begin = blockIdx.y * a.share;
    const int end = begin + a.share < a.cells ? begin + a.share : a.cells;
    DYNAMIC_SHARED(char, memory);
    float* const tops = (float*)memory;                            // [CELL_WARPS][COLUMNS]
    float* const totals = tops + RESULTS;                          // [CELL_WARPS][COLUMNS]
    uint16_t* const marked = (uint16_t*)(totals + RESULTS) + warp * WEIGHTS;       // of this warp: [16][STEP_CELLS]
    unsigned* const live = (unsigned*)((uint16_t*)(totals + RESULTS) + A_WARPS * WEIGHTS);   // [A_WARPS]
    char* const keys = (char*)(live + A_WARPS);                    // [TILE][pitch]
    char* const values = keys + S::TILE * pitch;                   // [TILE][VALUE_PITCH]
    char* const queries = values + S::TILE * S::VALUE_PITCH;       // [COLUMNS][pitch]
    float* const joined = (float*)keys;                            // [COLUMNS][PITCH]
    for (int matrix = blockIdx.z; matrix < a.matrices; matrix += gridDim.z) {
        const int64_t batch = matrix / a.heads, kv = matrix % a.heads;
        const char* const all_keys = k + kv * a.k2 + batch * a.k3;
        const char* const all_values = v + kv * a.v2 + batch * a.v3;
        __syncthreads();                   // all threads are done with the shared memory of the previous matrix
        Soft soft;
        uint4 held[2][CHUNKS];
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int own = 16 * column_warp + line + 8 * r, c = first + own;
            const Column at = column_of(a, matrix, c < n_columns ? c : n_columns - 1);
            const char* const row = c < n_columns ? q + at.row * a.q1 + at.head * a.q2 + batch * a.q3 : nullptr;
            const Power power = power_of(largest_of(a, row));
            if (S::HELD) {
                UNROLL
                for (int i = 0; i < CHUNKS; ++i) held[r][i] = query_words(a, row, 32 * i + 8 * t, power.there);
            } else if (cell_warp + value_warp == 0) {
                UNROLL_BY(1)
                for (int e = 8 * t; e < (a.d + 31) / 32 * 32; e += 32)
                    *(uint4*)(queries + own * pitch + 2 * e) = query_words(a, row, e, power.there);
            }
            soft.back[r] = power.back;
            soft.slope[r] = slope_of(a, at.head);
            soft.masks[r] = mask_of(a, mask, matrix, c < n_columns ? c : n_columns - 1);
            soft.top[r] = -INFINITY;
            soft.total[r] = 0.0f;
        }
        // Keys are padded with zeros to a multiple of 32 elements, as queries are; copy_rows never writes there.
        UNROLL_BY(1)
        for (int i = threadIdx.x; a.d % 32 != 0 && i < S::TILE; i += blockDim.x) {
            UNROLL_BY(1)
            for (int e = a.d; e % 32 != 0; e += 8) *(uint4*)(keys + i * pitch + 2 * e) = {};
        }
        float sum[PARTS][8][4] = {};
        for (int batch = begin; batch < end; batch += BATCH * S::TILE) {
            const unsigned found = live_tiles<S::TILE, COLUMNS>(a, mask, matrix, first,
                                                                batch + 32 * warp * S::TILE, end);
            __syncthreads();               // all warps are done with the previous batch of tiles
            if (lane == 0) live[warp] = found;
            __syncthreads();
            int tile = next_tile(live, -1);
            if (tile < BATCH) copy_rows<S::TILE>(keys, pitch, all_keys, a.k1, 2 * a.d, batch + tile * S::TILE, end);
            while (tile < BATCH) {
                const int cell0 = batch + tile * S::TILE, next = next_tile(live, tile);
                wait_copies();
                __syncthreads();           // the keys have arrived; all warps are done with the previous values
                copy_rows<S::TILE>(values, S::VALUE_PITCH, all_values, a.v1, 2 * a.dv, cell0, end);
                float s[N][4] = {};
                const char* const own_keys = keys + (cell_warp * S::OWN + line) * pitch + 16 * t;
                if (S::HELD) {
                    UNROLL
                    for (int i = 0; i < CHUNKS; ++i)
                        if (32 * i < a.d) multiply_keys(held[0][i], held[1][i], own_keys + 64 * i, pitch, s);
                } else {
                    const char* const own = queries + (16 * column_warp + line) * pitch + 16 * t;
                    UNROLL_BY(1)
                    for (int i = 0; 32 * i < a.d; ++i)
                        multiply_keys(*(const uint4*)(own + 64 * i), *(const uint4*)(own + 8 * pitch + 64 * i),
                                      own_keys + 64 * i, pitch, s);
                }
                float factor[2];
                const uint32_t seen = soften(a, s, cell0 + cell_warp * S::OWN, end, soft, factor);
                // Whether the warp's columns see any of its cells, and whether all.  A bit of `seen`: an unmasked cell.
                const bool any_seen = __ballot_sync(ALL_LANES, seen != 0) != 0;
                const bool all_seen = __ballot_sync(ALL_LANES, seen != (uint32_t)((1ull << 4 * N) - 1)) == 0;
                UNROLL
                for (int i = 0; i < PARTS; ++i) {
                    UNROLL
                    for (int j = 0; j < 8; ++j) {
                        UNROLL
                        for (int l = 0; l < 4; ++l) sum[i][j][l] *= factor[l >> 1];
                    }
                }
                wait_copies();
                __syncthreads();           // the values have arrived; all warps are done with the keys
                if (next < BATCH)
                    copy_rows<S::TILE>(keys, pitch, all_keys, a.k1, 2 * a.d, batch + next * S::TILE, end);
                tile = next;
                if (!any_seen) continue;
                const int offset = value_warp * S::WIDTH;
                const char* const own_values = values + cell_warp * S::OWN * S::VALUE_PITCH + 2 * offset;
                const int width = a.dv - offset < S::WIDTH ? a.dv - offset : S::WIDTH;
                const bool by_element = !all_seen && has_infinite(own_values, S::VALUE_PITCH, S::OWN, 2 * width);
                UNROLL
                for (int step = 0; step < N / 2; ++step) {
                    const float(&low)[4] = s[2 * step], (&high)[4] = s[2 * step + 1];
                    const uint32_t w[4] = {pack_halves(low[0], low[1]), pack_halves(low[2], low[3]),
                                           pack_halves(high[0], high[1]), pack_halves(high[2], high[3])};
                    const char* const of_step = own_values + step * STEP_CELLS * S::VALUE_PITCH;
                    if (by_element) {
                        __syncwarp();
                        UNROLL
                        for (int i = 0; i < 8; ++i) {
                            const uint16_t weight = (uint16_t)(w[i >> 1] >> 16 * (i & 1));
                            // Where a lane's element i of the operand `a` lies: see tensor.cuh.  -1 marks a masked
                            // cell.
                            marked[(line + (i & 2) * 4) * STEP_CELLS + 2 * t + (i & 1) + (i & 4) * 2] =
                                seen >> (8 * step + i) & 1 ? weight : 0xbc00;
                        }
                        __syncwarp();
                    }
                    UNROLL
                    for (int i = 0; i < PARTS; ++i) {
                        if (64 * i >= width) continue;
                        if (by_element)
                            add_seen_values(marked, of_step + 128 * i + 32 * t, S::VALUE_PITCH, sum[i]);
                        else
                            add_values(w, of_step + 128 * i + 2 * t * S::VALUE_PITCH + 16 * line, S::VALUE_PITCH,
                                       sum[i]);
                    }
                }
            }
        }
        // Join the warps' results, one after the other.
        UNROLL
        for (int r = 0; r < 2; ++r) {
            soft.total[r] += __shfl_xor_sync(ALL_LANES, soft.total[r], 1);
            soft.total[r] += __shfl_xor_sync(ALL_LANES, soft.total[r], 2);
            const int at = cell_warp * COLUMNS + 16 * column_warp + line + 8 * r;
            if (t == 0 && value_warp == 0) {
                tops[at] = soft.top[r];
                totals[at] = soft.total[r];
            }
        }
        __syncthreads();                   // all warps are also done with keys, values and queries
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int own = 16 * column_warp + line + 8 * r;
            float to = -INFINITY;
            UNROLL
            for (int i = 0; i < S::CELL_WARPS; ++i) to = tops[i * COLUMNS + own] > to ? tops[i * COLUMNS + own] : to;
            const float factor = S::CELL_WARPS > 1 ? carry(soft.top[r], to) : 1.0f;
            UNROLL
            for (int i = 0; i < PARTS; ++i) {
                UNROLL
                for (int j = 0; j < 8; ++j) {
                    sum[i][j][2 * r] *= factor;
                    sum[i][j][2 * r + 1] *= factor;
                }
            }
        }
        UNROLL_BY(1)
        for (int turn = 0; turn < S::CELL_WARPS; ++turn) {
            if (turn == cell_warp) {
                UNROLL
                for (int i = 0; i < PARTS; ++i) {
                    UNROLL
                    for (int l = 0; l < 4; ++l) {
                        float4* const to = (float4*)(joined + (16 * column_warp + line + 4 * (l & 2)) * S::PITCH
                                                     + value_warp * S::WIDTH + 64 * i + 16 * t + 8 * (l & 1));
                        UNROLL
                        for (int h = 0; h < 2; ++h) {
                            float4 x = turn ? to[h] : float4{};
                            x.x += sum[i][4 * h][l];
                            x.y += sum[i][4 * h + 1][l];
                            x.z += sum[i][4 * h + 2][l];
                            x.w += sum[i][4 * h + 3][l];
                            to[h] = x;
                        }
                    }
                }
            }
            __syncthreads();
        }
        store_results<S::CELL_WARPS, COLUMNS>(a, matrix, first, joined, S::PITCH, tops, totals, joined, sinks, dst,
                                              partial, counters, rounded, runs);
    }
}

// -- kernels ----------------------------------------------------------------------------------------------------------

// X(NAME, SIZE, COLUMNS, PER_SM) for each kernel tiles_NAME: for values (up to SIZE 128 also keys) of up to SIZE
// elements, with COLUMNS columns in a block.  PER_SM: how many blocks must fit on a multiprocessor at once.
#define TILED_SIZES(X)                                     \
    X(64_64, 64, 64, 3) X(64_16, 64, 16, 4)                \
    X(128_64, 128, 64, 2) X(128_16, 128, 16, 2)            \
    X(256_64, 256, 64, 2) X(256_16, 256, 16, 2)            \
    X(512_16, 512, 16, 2)

#define TILED_KERNEL(NAME, SIZE, COLUMNS, PER_SM)                                          \
    extern "C" __global__ void __launch_bounds__(32 * A_WARPS, PER_SM) tiles_##NAME(ATTENTION) { \
        read_cells_ahead(a, k, v);                                                          \
        await_inputs();                                                                     \
        attend_in_tiles<SIZE, COLUMNS>(ATTENTION_ARGS);                                     \
    }
