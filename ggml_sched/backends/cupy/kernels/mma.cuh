// Quantised weights times many 8-bit columns on tensor cores: tiles of ROWS rows and COLS columns, from sm_80 on.
//
// The sum over k goes piece by piece (128 elements) through shared memory, where the elements of each row of weights
// and each column lie in order; meanwhile the next piece is loaded from global memory.  A warp multiplies 16 rows and 8
// columns over 32 elements (16 for types with a scale for each 16) as integers, multiplies the products by their scales
// and adds them to its f32 sums.  Offsets of levels, such as q4_0's 8, are subtracted before, so that only types with
// minima need the sums of columns.  Where tiles are too few for the device, k is divided into parts (consecutive
// pieces), each for a block: the block of a tile that ends last adds up the sums of the parts in a fixed order.
// Invariant: the order in which an element of the result is added up does not depend on its position in a tile.
#pragma once

#include "matmul.cuh"
#include "tensor.cuh"

// Properties of a type's levels.  OFFSET: the number that is subtracted from each level, in place of a minimum;
// MINIMA: whether the type has minima; SCALES: the number of scales (and of minima) for each piece of a row.
template <int KIND>
struct Levels {
    static constexpr int OFFSET = KIND == Q4_0 ? 8 : KIND == Q5_0 ? 16 : KIND == Q3_K ? 4 : KIND == Q6_K ? 32 : 0;
    static constexpr bool MINIMA = KIND == Q4_1 || KIND == Q5_1 || KIND == Q2_K || KIND == Q4_K || KIND == Q5_K;
    static constexpr int SCALES = KIND == Q2_K || KIND == Q3_K || KIND == Q6_K ? 8 : 4;
};

// WORDS: words of a piece of a row; WORD_PITCH: the same with padding, so that the lanes of a warp read from different
// banks.
enum { WORDS = 8 * STEP, WORD_PITCH = WORDS + 4, RUNS = 2 * STEP };

// A piece of k of a tile in shared memory: integers (w), scales and minima of the weights; integers (x), scales (one
// for each 32 elements) and sums of the columns.
template <int KIND, int ROWS, int COLS>
struct __align__(16) Piece {
    uint32_t w[ROWS][WORD_PITCH], x[COLS][WORD_PITCH];
    float scales[Levels<KIND>::SCALES][ROWS], minima[Levels<KIND>::MINIMA ? Levels<KIND>::SCALES : 1][ROWS];
    float x_scales[STEP][COLS], x_sums[Levels<KIND>::MINIMA ? RUNS : 1][COLS];
};

// The f32 MIDDLE, 1.5 * 2^23, and its bits, of which the last is worth 1: adding an integer of magnitude below 2^22 to
// the bits gives those of the f32 MIDDLE + integer.  So one subtraction converts an integer sum to f32 (as_integer).
enum { BITS_OF_MIDDLE = 0x4b400000 };
#define MIDDLE 12582912.0f

__device__ __forceinline__ float as_integer(int bits) { return __uint_as_float((uint32_t)bits) - MIDDLE; }

// Subtracts OFFSET from each of the four bytes of q, all less than 128.
template <int OFFSET>
__device__ __forceinline__ uint32_t less(uint32_t q) {
    return OFFSET ? ((q | 0x80808080u) - OFFSET * 0x01010101u) ^ 0x80808080u : q;
}

// Stores a unit of weights in shared memory: number `part` of the piece, of the tile's row `line`.
template <int KIND, int ROWS, int COLS>
__device__ __forceinline__ void store_unit(Piece<KIND, ROWS, COLS>& t, const Unit& unit, int part, int line) {
    typedef Levels<KIND> L;
    UNROLL
    for (int r = 0; r < 2; ++r) {
        const int start = (r ? second_of<Blocks<KIND>>(part) : first_of<Blocks<KIND>>(part)) % (32 * STEP);
        uint4 q;
        q.x = less<L::OFFSET>(unit.q[4 * r]);
        q.y = less<L::OFFSET>(unit.q[4 * r + 1]);
        q.z = less<L::OFFSET>(unit.q[4 * r + 2]);
        q.w = less<L::OFFSET>(unit.q[4 * r + 3]);
        *(uint4*)&t.w[line][start / 4] = q;
        if (L::SCALES == STEP && start % 32 != 0) continue;
        t.scales[start * L::SCALES / (32 * STEP)][line] = unit.s[r];
        if (L::MINIMA) t.minima[start * L::SCALES / (32 * STEP)][line] = unit.m[r];
    }
}

template <int KIND, int ROWS, int COLS>
__device__ __forceinline__ void store_run(Piece<KIND, ROWS, COLS>& t, const Run& run, int part, int line) {
    *(int4*)&t.x[line][4 * part] = run.q;
    if (part % 2 == 0) t.x_scales[part / 2][line] = run.scale;
    if (Levels<KIND>::MINIMA) t.x_sums[part][line] = run.sum;
}

// A lane's sums for a warp's M times 16 rows and N times 8 columns; v[i][j] is laid out as `d` of mma_16_8_32.
template <int M, int N>
struct Sums {
    float v[M][N][4];
};

// Adds to `sums` the products over elements 32 g .. 32 g + 31 of a piece.  `row`, `column`: the warp's first row
// and column in the tile.
template <int KIND, int ROWS, int COLS, int M, int N>
__device__ __forceinline__ void multiply_group(const Piece<KIND, ROWS, COLS>& t, int g, int row, int column,
                                               Sums<M, N>& sums) {
    typedef Levels<KIND> L;
    enum { EACH = L::SCALES / STEP };      // scales of a row for 32 elements
    const int line = (threadIdx.x & 31) >> 2, word = threadIdx.x & 3;
    uint32_t a[M][4];
    float s[M][EACH][2], m[M][EACH][2];
    UNROLL
    for (int i = 0; i < M; ++i) {
        const int r = row + 16 * i + line;
        a[i][0] = t.w[r][8 * g + word];
        a[i][1] = t.w[r + 8][8 * g + word];
        a[i][2] = t.w[r][8 * g + 4 + word];
        a[i][3] = t.w[r + 8][8 * g + 4 + word];
        UNROLL
        for (int e = 0; e < EACH; ++e) {
            UNROLL
            for (int h = 0; h < 2; ++h) {
                s[i][e][h] = t.scales[EACH * g + e][r + 8 * h];
                m[i][e][h] = L::MINIMA ? t.minima[EACH * g + e][r + 8 * h] : 0.0f;
            }
        }
    }
    UNROLL
    for (int j = 0; j < N; ++j) {
        const int c = column + 8 * j;
        const uint32_t b[2] = {t.x[c + line][8 * g + word], t.x[c + line][8 * g + 4 + word]};
        float scale[2], sum[2][2];         // of the lane's two columns (h); sums of both runs (r)
        UNROLL
        for (int h = 0; h < 2; ++h) {
            scale[h] = t.x_scales[g][c + 2 * word + h];
            UNROLL
            for (int r = 0; r < 2; ++r) sum[r][h] = L::MINIMA ? t.x_sums[2 * g + r][c + 2 * word + h] : 0.0f;
        }
        UNROLL
        for (int i = 0; i < M; ++i) {
            UNROLL
            for (int e = 0; e < EACH; ++e) {
                int d[4] = {BITS_OF_MIDDLE, BITS_OF_MIDDLE, BITS_OF_MIDDLE, BITS_OF_MIDDLE};
                if constexpr (EACH == 1) mma_16_8_32(d, a[i], b);
                else mma_16_8_16(d, a[i][2 * e], a[i][2 * e + 1], b[e]);
                UNROLL
                for (int l = 0; l < 4; ++l) {
                    float& v = sums.v[i][j][l];
                    v += s[i][e][l >> 1] * (scale[l & 1] * as_integer(d[l]));
                    if (L::MINIMA) v += m[i][e][l >> 1] * (EACH == 1 ? sum[0][l & 1] + sum[1][l & 1] : sum[e][l & 1]);
                }
            }
        }
    }
}

// Stores the block's sums in `partial`, [tile][part of k][element of a thread's sums][thread].  Returns true in the
// block of a tile that ends last, whose `sums` are then those over all parts of k; else false.
template <int THREADS, int M, int N>
__device__ __forceinline__ bool join_tiles(Sums<M, N>& sums, float* partial, unsigned* counters) {
    __shared__ int is_last;
    enum { SIZE = 4 * M * N };
    const int64_t tile = blockIdx.y * (int64_t)gridDim.x + blockIdx.x;
    volatile float* all = partial + tile * gridDim.z * (SIZE * THREADS) + threadIdx.x;
    volatile float* own = all + (int64_t)blockIdx.z * (SIZE * THREADS);
    UNROLL
    for (int i = 0; i < SIZE; ++i) own[i * THREADS] = sums.v[i / (4 * N)][i / 4 % N][i % 4];
    __threadfence();                       // other blocks must see each thread's sums before the block is counted
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicInc(&counters[tile], gridDim.z - 1) == gridDim.z - 1;
    __syncthreads();
    if (!is_last) return false;
    __threadfence();
    sums = {};
    UNROLL_BY(1)
    for (int s = 0; s < (int)gridDim.z; ++s) {
        UNROLL
        for (int i = 0; i < SIZE; ++i) sums.v[i / (4 * N)][i / 4 % N][i % 4] += all[i * THREADS];
        all += SIZE * THREADS;
    }
    return true;
}

// The arguments of these kernels.  `pieces`: how many pieces a part of k has, and blockIdx.z counts parts of one
// matrix; 0: k is not divided, and blockIdx.z counts matrices.
#define TENSOR TILED, float *RESTRICT partial, unsigned *RESTRICT counters, int pieces
#define TENSOR_ARGS TILED_ARGS, partial, counters, pieces

// The body of the kernels.  WARP_ROWS, WARP_COLS: by how many warps the rows, and the columns, of a tile are divided.
template <int KIND, int ROWS, int COLS, int WARP_ROWS, int WARP_COLS>
__device__ __forceinline__ void tensor_tiles(TENSOR) {
    enum {
        THREADS = 32 * WARP_ROWS * WARP_COLS, M = ROWS / WARP_ROWS / 16, N = COLS / WARP_COLS / 8,
        UNITS = ROWS * STEP / THREADS,     // units of weights of a piece that a thread loads
        PARTS = COLS * RUNS / THREADS,     // runs of columns of a piece that a thread loads
        W_LINES = THREADS / STEP, X_LINES = THREADS / RUNS
    };
    (void)ids, (void)second, (void)word, (void)position;
    __shared__ Piece<KIND, ROWS, COLS> t;
    const int units = (int)(a.k >> 5), warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int w_part = threadIdx.x % STEP, w_line = threadIdx.x / STEP;
    const int x_part = threadIdx.x % RUNS, x_line = threadIdx.x / RUNS;
    const int first_row = warp % WARP_ROWS * (16 * M), first_column = warp / WARP_ROWS * (8 * N);
    const int64_t row = (int64_t)blockIdx.x * ROWS;
    const int begin = pieces ? blockIdx.z * pieces * STEP : 0;
    const int end = pieces && begin + pieces * STEP < units ? begin + pieces * STEP : units;
    for (int64_t matrix = pieces ? 0 : blockIdx.z; matrix < a.matrices; matrix += gridDim.z) {
        Span s;
        if (!find_span<COLS>(a, groups, matrix, s)) return;
        const uint8_t* weights[UNITS];
        int64_t columns[PARTS];
        UNROLL
        for (int i = 0; i < UNITS; ++i) weights[i] = tile_row(a, w, s, row + w_line + i * W_LINES);
        UNROLL
        for (int i = 0; i < PARTS; ++i) {
            int64_t to;
            find_column(a, pairs, s, s.first + x_line + i * X_LINES, columns[i], to);
            columns[i] *= a.k;
        }
        Unit unit[UNITS];
        Run run[PARTS];
        Sums<M, N> sums = {};
        for (int u = begin - STEP; u < end; u += STEP) {
            const int next = u + STEP;
            if (u >= begin) {
                __syncthreads();           // all threads have read the previous piece
                UNROLL
                for (int i = 0; i < UNITS; ++i) store_unit(t, unit[i], w_part, w_line + i * W_LINES);
                UNROLL
                for (int i = 0; i < PARTS; ++i) store_run(t, run[i], x_part, x_line + i * X_LINES);
                __syncthreads();
            }
            if (next < end) {
                UNROLL
                for (int i = 0; i < UNITS; ++i) load_unit<KIND>(a, weights[i], next + w_part, units, unit[i]);
                const int64_t e = (int64_t)next * 32 + 16 * x_part;
                UNROLL
                for (int i = 0; i < PARTS; ++i) run[i] = e < a.k ? load_run(x, runs, columns[i] + e) : no_run();
            }
            if (u >= begin) {
                UNROLL_BY(1)
                for (int g = 0; g < STEP; ++g) multiply_group(t, g, first_row, first_column, sums);
            }
        }
        if (pieces && !join_tiles<THREADS>(sums, partial, counters)) return;
        UNROLL
        for (int j = 0; j < N; ++j) {
            UNROLL
            for (int h = 0; h < 2; ++h) {
                const int64_t c = s.first + first_column + 8 * j + 2 * (lane & 3) + h;
                if (c >= s.end) continue;
                int64_t from, to;
                find_column(a, pairs, s, c, from, to);
                UNROLL
                for (int i = 0; i < 2 * M; ++i) {
                    const int64_t r = row + first_row + 8 * i + (lane >> 2);
                    if (r < a.rows) ((float*)(d + to))[r] = sums.v[i / 2][j][2 * (i % 2) + h];
                }
            }
        }
    }
}

// Kernels NAME_64, of tiles of 64 rows and 64 columns, and NAME_16, of 64 rows and 16 columns.
#define TENSOR_KERNELS(NAME, KIND)                                                          \
    extern "C" __global__ void __launch_bounds__(256, 2) NAME##_64(TENSOR) {                \
        await_inputs();                                                                     \
        tensor_tiles<KIND, 64, 64, 2, 4>(TENSOR_ARGS);                                      \
    }                                                                                       \
    extern "C" __global__ void __launch_bounds__(128, 4) NAME##_16(TENSOR) {                \
        await_inputs();                                                                     \
        tensor_tiles<KIND, 64, 16, 4, 1>(TENSOR_ARGS);                                      \
    }
