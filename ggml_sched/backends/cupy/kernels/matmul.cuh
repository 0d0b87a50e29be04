// Weights times many columns, in tiles of 64 rows and 64 columns.
//
// The sum over k goes piece by piece: shared memory has the elements of one piece of k for all rows and columns of the
// tile, ordered by runs (units.cuh), so that threads read neighbouring words; meanwhile the next piece is loaded from
// global memory.  Quantised weights are multiplied with 8-bit columns by dp4a (four integer products at once); weights
// in f32, f16 and bf16, and all weights in exact products, with f32 columns.  For MUL_MAT_ID experts.cu makes a list of
// the (token, slot) pairs of each expert and a table of tiles: the columns of a tile are then pairs of one expert.
// Invariant: the order in which an element of the result is added up does not depend on its position in a tile.
#pragma once

#include "matvec.cuh"

// PITCH: the length of rows in shared memory, one more than a tile's, so that threads hit different banks.  STEP: units
// in a piece of k.
enum { TILE = 64, PITCH = TILE + 1, STEP = 4 };

// The columns of one tile of MUL_MAT_ID: pairs[first] .. pairs[end - 1] of one expert; expert < 0: an unused entry.
struct Group {
    int32_t expert, first, end, nothing;
};

#define TILED PRODUCT, const int32_t *RESTRICT pairs, const Group *RESTRICT groups
#define TILED_ARGS PRODUCT_ARGS, pairs, groups

// Which columns a tile has, and in which matrices.
struct Span {
    int64_t w, x, d;                       // offsets of the weights, the columns, the result
    int64_t first, end;                    // the tile's first column, and where the matrix's or the expert's columns
                                           // end: numbers of columns, or positions in the list of pairs
};

// Sets s for this block's tile of product number `matrix`; returns false if the tile has no columns.  SIZE: columns of
// a tile.
template <int SIZE>
__device__ __forceinline__ bool find_span(const Product& a, const Group* groups, int64_t matrix, Span& s) {
    if (groups != nullptr) {
        const Group g = groups[blockIdx.y];
        if (g.expert < 0) return false;
        s.w = g.expert * a.w2;
        s.x = s.d = 0;
        s.first = g.first;
        s.end = g.end;
        return true;
    }
    Pair p;
    find_pair(a, nullptr, matrix, nullptr, 0, p);
    s.w = p.w;
    s.x = p.x;
    s.d = p.d;
    s.first = (int64_t)blockIdx.y * SIZE;
    s.end = a.columns;
    return true;
}

// The offsets of column `c` of a span in x and in the result.  For c beyond the span's end they are those of the last
// column, so that loads stay inside.
__device__ __forceinline__ void find_column(const Product& a, const int32_t* pairs, const Span& s, int64_t c,
                                            int64_t& x, int64_t& d) {
    c = c < s.end ? c : s.end - 1;
    if (pairs == nullptr) {
        x = s.x + c * a.x1;
        d = s.d + c * a.d1;
        return;
    }
    const uint32_t pair = (uint32_t)pairs[c], used = (uint32_t)a.n_used;
    const uint32_t token = pair / used, slot = pair - token * used;
    x = token * a.x2 + slot % (uint32_t)a.n_slots * a.x1;
    d = token * a.d2 + slot * a.d1;
}

// Writes a thread's 4 x 4 elements of the tile.  They are 16 rows and columns apart, so that neighbouring threads write
// neighbouring rows.
__device__ __forceinline__ void store_tile(const Product& a, const int32_t* pairs, const Span& s, int64_t row,
                                           char* d, const float (&sum)[4][4]) {
    UNROLL
    for (int j = 0; j < 4; ++j) {
        const int64_t c = s.first + threadIdx.x / 16 + 16 * j;
        if (c >= s.end) break;
        int64_t from, to;
        find_column(a, pairs, s, c, from, to);
        UNROLL
        for (int i = 0; i < 4; ++i) {
            const int64_t r = row + threadIdx.x % 16 + 16 * i;
            if (r < a.rows) ((float*)(d + to))[r] = sum[i][j];
        }
    }
}

__device__ __forceinline__ const uint8_t* tile_row(const Product& a, const uint8_t* w, const Span& s, int64_t row) {
    return w + s.w + (row < a.rows ? row : a.rows - 1) * a.w1;
}

// -- blocks times 8-bit columns ---------------------------------------------------------------------------------------

// A piece of k in shared memory, indexed by run (two for each unit) and by row of weights (w) or column (x): integers
// (q), and in s the scale of each run with its minimum (of weights) or its sum (of columns): see units.cuh.
struct Rounded {
    int4 wq[2 * STEP][PITCH], xq[2 * STEP][PITCH];
    float2 ws[2 * STEP][PITCH], xs[2 * STEP][PITCH];
};

template <int KIND>
__device__ __forceinline__ void load_unit(const Product& a, const uint8_t* row, int u, int units, Unit& x) {
    if (u >= units) {
        UNROLL
        for (int i = 0; i < 8; ++i) x.q[i] = 0;
        set_scale(x, 0.0f, 0.0f);
    } else if (a.packed) {
        Blocks<KIND>::template load<true>(row, u, x);
    } else {
        Blocks<KIND>::template load<false>(row, u, x);
    }
}

__device__ __forceinline__ Run no_run() {
    Run r;
    r.q.x = r.q.y = r.q.z = r.q.w = 0;
    r.scale = r.sum = 0.0f;
    return r;
}

__device__ __forceinline__ void multiply_runs(const Rounded& t, int run, float (&sum)[4][4]) {
    const int row = threadIdx.x % 16, column = threadIdx.x / 16;
    int4 x[4];
    float2 xs[4];
    UNROLL
    for (int j = 0; j < 4; ++j) {
        x[j] = t.xq[run][column + 16 * j];
        xs[j] = t.xs[run][column + 16 * j];
    }
    UNROLL
    for (int i = 0; i < 4; ++i) {
        const int4 w = t.wq[run][row + 16 * i];
        const float2 ws = t.ws[run][row + 16 * i];
        const uint32_t words[4] = {(uint32_t)w.x, (uint32_t)w.y, (uint32_t)w.z, (uint32_t)w.w};
        UNROLL
        for (int j = 0; j < 4; ++j)
            sum[i][j] += ws.x * (xs[j].x * (float)dot_run(words, x[j])) + ws.y * xs[j].y;
    }
}

template <int KIND>
__device__ __forceinline__ void many(TILED) {
    typedef Blocks<KIND> T;
    (void)ids, (void)second, (void)word, (void)position;
    DYNAMIC_SHARED(Rounded, t);
    const int units = (int)(a.k >> 5), part = threadIdx.x % STEP, line = threadIdx.x / STEP;
    const int64_t row = (int64_t)blockIdx.x * TILE;
    for (int64_t matrix = blockIdx.z; matrix < a.matrices; matrix += gridDim.z) {
        Span s;
        if (!find_span<TILE>(a, groups, matrix, s)) return;
        const uint8_t* weights = tile_row(a, w, s, row + line);
        int64_t column, to;
        find_column(a, pairs, s, s.first + line, column, to);
        Unit unit;
        Run x0 = no_run(), x1 = no_run();
        float sum[4][4] = {};
        for (int u = part - STEP; u < units + part; u += STEP) {
            const int next = u + STEP;
            if (u >= part) {
                __syncthreads();           // all threads have read the previous piece
                UNROLL
                for (int r = 0; r < 2; ++r) {
                    int4 q;
                    q.x = (int)unit.q[4 * r];
                    q.y = (int)unit.q[4 * r + 1];
                    q.z = (int)unit.q[4 * r + 2];
                    q.w = (int)unit.q[4 * r + 3];
                    float2 ws, xs;
                    ws.x = unit.s[r];
                    ws.y = unit.m[r];
                    xs.x = r ? x1.scale : x0.scale;
                    xs.y = r ? x1.sum : x0.sum;
                    t->wq[2 * part + r][line] = q;
                    t->ws[2 * part + r][line] = ws;
                    t->xq[2 * part + r][line] = r ? x1.q : x0.q;
                    t->xs[2 * part + r][line] = xs;
                }
                __syncthreads();
            }
            load_unit<KIND>(a, weights, next, units, unit);
            x0 = next < units ? load_run(x, runs, column * a.k + first_of<T>(next)) : no_run();
            x1 = next < units ? load_run(x, runs, column * a.k + second_of<T>(next)) : no_run();
            if (u >= part) {
                UNROLL
                for (int r = 0; r < 2 * STEP; ++r) multiply_runs(*t, r, sum);
            }
        }
        store_tile(a, pairs, s, row, d, sum);
    }
}

// -- anything times f32 -----------------------------------------------------------------------------------------------

struct Floats {
    float w[32][PITCH], x[32][PITCH];
};

// Loads a quarter of unit u of a row, number `part` (0 .. 3), eight elements, as f32; zeros beyond the row's end.
template <int KIND>
__device__ __forceinline__ void load_part(const Product& a, const uint8_t* row, int u, int part, float* v) {
    if constexpr (KIND == F32 || KIND == F16 || KIND == BF16) {
        const int64_t start = (int64_t)u * 32 + part * 8;
        if (a.wide && start + 8 <= a.k) {
            load_eight<KIND>((const char*)row + start * (KIND == F32 ? 4 : 2), v);
        } else {
            UNROLL
            for (int j = 0; j < 8; ++j)
                v[j] = start + j < a.k ? load_plain((const char*)row + (start + j) * a.w0, KIND) : 0.0f;
        }
    } else {
        Unit unit;
        load_unit<KIND>(a, row, u, (int)(a.k >> 5), unit);
        uint32_t low = 0, high = 0;
        float scale = 0.0f, minimum = 0.0f;
        UNROLL
        for (int i = 0; i < 4; ++i) {      // constant indices: with variable ones the array would be in local memory
            if (i == part) {
                low = unit.q[2 * i];
                high = unit.q[2 * i + 1];
                scale = unit.s[i >> 1];
                minimum = unit.m[i >> 1];
            }
        }
        UNROLL
        for (int j = 0; j < 8; ++j) v[j] = scale * level(j < 4 ? low : high, j & 3) + minimum;
    }
}

template <int KIND>
__device__ __forceinline__ int64_t place_of_part(int u, int part) {
    if constexpr (KIND == F32 || KIND == F16 || KIND == BF16) return (int64_t)u * 32 + part * 8;
    else return (part < 2 ? first_of<Blocks<KIND>>(u) : second_of<Blocks<KIND>>(u)) + (part & 1) * 8;
}

template <int KIND>
__device__ __forceinline__ void many_exact(TILED) {
    (void)ids, (void)second, (void)word, (void)position, (void)runs;
    DYNAMIC_SHARED(Floats, t);
    const int units = (int)((a.k + 31) >> 5), part = threadIdx.x % 4, line = threadIdx.x / 4;
    const int64_t row = (int64_t)blockIdx.x * TILE;
    for (int64_t matrix = blockIdx.z; matrix < a.matrices; matrix += gridDim.z) {
        Span s;
        if (!find_span<TILE>(a, groups, matrix, s)) return;
        const uint8_t* weights = tile_row(a, w, s, row + line);
        int64_t column, to;
        find_column(a, pairs, s, s.first + line, column, to);
        const float* values = (const float*)(x + column);
        float sum[4][4] = {};
        for (int u = 0; u < units; ++u) {
            float v[8];
            load_part<KIND>(a, weights, u, part, v);
            const int64_t start = place_of_part<KIND>(u, part);
            __syncthreads();               // all threads have read the previous piece
            UNROLL
            for (int j = 0; j < 8; ++j) {
                t->w[part * 8 + j][line] = v[j];
                t->x[part * 8 + j][line] = start + j < a.k ? values[start + j] : 0.0f;
            }
            __syncthreads();
            UNROLL_BY(4)
            for (int e = 0; e < 32; ++e) {
                float c[4];
                UNROLL
                for (int j = 0; j < 4; ++j) c[j] = t->x[e][threadIdx.x / 16 + 16 * j];
                UNROLL
                for (int i = 0; i < 4; ++i) {
                    const float v0 = t->w[e][threadIdx.x % 16 + 16 * i];
                    UNROLL
                    for (int j = 0; j < 4; ++j) sum[i][j] += v0 * c[j];
                }
            }
        }
        store_tile(a, pairs, s, row, d, sum);
    }
}

// -- kernels ----------------------------------------------------------------------------------------------------------

#define MANY_KERNEL(NAME, WORK)                                     \
    extern "C" __global__ void __launch_bounds__(256) NAME(TILED) { \
        await_inputs();                                             \
        WORK(TILED_ARGS);                                           \
    }
// Kernels NAME, for columns rounded to 8 bits, and exact_NAME, for f32 columns.
#define MANY_BLOCKS(NAME, KIND)   \
    MANY_KERNEL(NAME, many<KIND>) \
    MANY_KERNEL(exact_##NAME, many_exact<KIND>)
