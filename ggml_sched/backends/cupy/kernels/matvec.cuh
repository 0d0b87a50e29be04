// Weights times few columns (tokens).  Such a product takes as long as reading the weights, so they are read once.
//
// A warp computes two rows of the result; or, with a second matrix of weights, the same row of both products, from
// which it computes one row of a gated unit.  Each lane takes every 32nd unit of the rows (units.cuh); sums are added
// in a fixed order.  Where rows are too few for the device, the warps of a block share two rows, each a part of k, and
// the first warp adds up their sums.  blockIdx.y counts the matrices of a batch, or (MUL_MAT_ID) the pairs of a token
// and a chosen expert.  A launch may compute up to three products of the same columns, each in blocks of its own.
// Columns are rounded to 8 bits, and 16 products at a time are summed as integers; `exact` kernels take f32 columns and
// multiply in f32.  A gated unit may also be written rounded to 8 bits, for the next product: of the blocks with the
// same 32 rows, the one that ends last does it.  That block may also compute a norm that follows the product, except
// for the division by the root of the mean square: the products after the norm divide their sums by this root.
// Invariant: an expert id out of range sets the error word, and nothing is written for it.
#pragma once

#include "blocks.cuh"
#include "rounded.cuh"

// A further product of a launch, with the same columns and other weights of the same type.  `first`: the number of the
// first of its blocks; 0: there is no such product.  `bias`: f32, added to each column of the result; null: none.
struct Part {
    const uint8_t* w;
    char* d;
    const float* bias;
    int64_t rows, w1, d1, first;           // rows, w1, d1: as in Product
};

// The sizes and strides of a product of weights w [k, rows] and columns x [k, columns] to d [rows, columns].
struct Product {
    int64_t k, rows, columns, matrices;    // matrices: of the result; with ids, pairs of a token and a chosen expert
    int64_t w1, w2, w3;                    // strides nb[1 .. 3] of the weights, bytes
    int64_t x1, x2, x3;                    // strides of the columns: bytes where they are f32, else counted in columns
    int64_t d1, d2, d3;                    // strides of the result, bytes
    int64_t n2, r2, r3;                    // ne[2] of the result; its matrices for each matrix of w, along axes 2, 3
    int64_t id0, id1, n_used, n_slots, n_experts; // strides of ids, bytes; experts and columns of a token; all experts
    int32_t gate;                          // enum Gate: the function of a gated unit, where there is a second matrix
    int32_t wide;                          // for f32, f16, bf16 weights: whether loads of 16 bytes are aligned
    int32_t packed;                        // whether repack.py rearranged the weights; used by kernels for both orders
    int32_t w0;                            // bytes from element to element of f32, f16 or bf16 weights
    int32_t part;                          // elements of k that a warp takes, where a block's warps share rows; else 0
    int32_t unused;
    const float* bias;                     // as in Part
    Part more[2];                          // a second only where there is a first
};

enum Gate { SILU = 0, GELU = 1, RELU = 2 };

enum Role { NORM_BEHIND = 1, NORM_BEFORE = 2 };

// An RMS norm of a row of f32 between products with one column.  In the product before the norm (role NORM_BEHIND) the
// row is x plus the product; in the products after the norm (role NORM_BEFORE) it is x (+ y, if that is not null).
struct Norm {
    const float *x, *y, *factor;
    float* kept;                           // NORM_BEHIND: where the row is written; null: nowhere
    float* out;                            // NORM_BEFORE: where the norm's result is written; null: another launch does
    int32_t n;                             // elements, a multiple of 128
    float eps;
    int32_t role, unused;                  // role 0: there is no norm
};

#define PRODUCT                                                                                                   \
    Product a, const uint8_t *RESTRICT w, const uint8_t *RESTRICT second, const char *RESTRICT x,                  \
        const float2 *RESTRICT runs, const char *RESTRICT ids, char *RESTRICT d, Fault *RESTRICT word, int position
#define PRODUCT_ARGS a, w, second, x, runs, ids, d, word, position
// Kernels of few columns take more parameters.  `rounded`, `rounded_runs`: where the result of a gated unit, or of a
// norm after the product, is also written rounded to 8 bits (levels; scales and sums); null: nowhere.  `counters`: for
// each 32 rows of each matrix of the batch, how many blocks are done with these rows: the last one rounds them
// (round_rows).  `norm`; and `squares`, the sum of the squares of each 32 elements of the norm's row.
#define FEW                                                                                                  \
    PRODUCT, int8_t *RESTRICT rounded, float2 *RESTRICT rounded_runs, unsigned *RESTRICT counters, Norm norm, \
        float *squares
#define FEW_ARGS PRODUCT_ARGS, rounded, rounded_runs, counters, norm, squares

// Rounds to f16 and back, except beyond the range of f16.  ggml computes GELU by a table of f16 values, and so does the
// oracle: argument and result are rounded.
__device__ __forceinline__ float through_half(float v) {
    return fabsf(v) <= 65504.0f ? __half_bits_to_float(__float_to_half_bits(v)) : v;
}

__device__ __forceinline__ float gated(int gate, float x, float up) {
    if (gate == SILU) return x / (1.0f + expf(-x)) * up;
    if (gate == RELU) return (x > 0.0f || x != x ? x : 0.0f) * up;
    const float v = through_half(x);
    const float t = tanhf((v * v * 0.044715f + 1.0f) * v * 0.79788456080286535588f);
    return through_half((t + 1.0f) * 0.5f * v) * up;
}

// The offsets of the weights, the columns and the result of one product of the batch, in the units of `Product`.
struct Pair {
    int64_t w, x, d;
};

// Sets p for product number i of the batch.  Returns false, and notes a fault, if an id names no expert.
__device__ __forceinline__ bool find_pair(const Product& a, const char* ids, int64_t i, Fault* word, int position,
                                          Pair& p) {
    if (ids == nullptr && i == 0) {        // the usual case, without divisions
        p.w = p.x = p.d = 0;
        return true;
    }
    if (ids == nullptr) {
        const uint32_t n2 = (uint32_t)a.n2, i3 = (uint32_t)i / n2, i2 = (uint32_t)i - i3 * n2;
        p.w = i3 / (uint32_t)a.r3 * a.w3 + i2 / (uint32_t)a.r2 * a.w2;
        p.x = i3 * a.x3 + i2 * a.x2;
        p.d = i3 * a.d3 + i2 * a.d2;
        return true;
    }
    const uint32_t used = (uint32_t)a.n_used, token = (uint32_t)i / used, slot = (uint32_t)i - token * used;
    const int64_t id = *(const int32_t*)(ids + slot * a.id0 + token * a.id1);
    if (id < 0 || id >= a.n_experts) {
        if (blockIdx.x == 0 && threadIdx.x == 0) fault(word, position, 2, id, a.n_experts);
        return false;
    }
    p.w = id * a.w2;
    p.x = token * a.x2 + slot % (uint32_t)a.n_slots * a.x1;
    p.d = token * a.d2 + slot * a.d1;
    return true;
}

// The product that this block computes; its `first` is then the number of this block among the product's blocks.
__device__ __forceinline__ Part own_part(const Product& a, const uint8_t* w, char* d) {
    Part p;
    const int64_t block = blockIdx.x;
    if (a.more[0].first == 0 || block < a.more[0].first) {
        p.w = w;
        p.d = d;
        p.bias = a.bias;
        p.rows = a.rows;
        p.w1 = a.w1;
        p.d1 = a.d1;
        p.first = block;
    } else if (a.more[1].first == 0 || block < a.more[1].first) {
        p = a.more[0];
        p.first = block - a.more[0].first;
    } else {
        p = a.more[1];
        p.first = block - a.more[1].first;
    }
    return p;
}

enum { WEIGHT_ROWS = 2, FEW_WARPS = 4 };     // rows of weights of a warp; warps of a block

// The addresses of the warp's two rows of weights: row `row` of both matrices, or rows `row` and `row` + 1 of one.  If
// row `row` + 1 does not exist, `row` takes its place, so that loads stay inside; that result is not written.
__device__ __forceinline__ void weight_rows(const Part& own, const uint8_t* w, const uint8_t* second, int64_t row,
                                            const uint8_t** at) {
    at[0] = w + row * own.w1;
    at[1] = second != nullptr ? second + row * own.w1 : w + (row + 1 < own.rows ? row + 1 : row) * own.w1;
}

// The number of the first row that the warp computes of the product `own`.  It computes WEIGHT_ROWS rows, or one if
// there is a second matrix of weights (`both`).
__device__ __forceinline__ int64_t first_row(const Product& a, const Part& own, bool both) {
    if (a.part) return own.first * WEIGHT_ROWS;
    return (own.first * (blockDim.x >> 5) + (threadIdx.x >> 5)) * (both ? 1 : WEIGHT_ROWS);
}

// The elements of k that the warp takes: begin .. end - 1.
struct Stretch {
    int begin, end;
};

__device__ __forceinline__ Stretch own_stretch(const Product& a) {
    const int k = (int)a.k;
    Stretch s = {0, k};
    if (a.part) {
        const int64_t begin = (int64_t)(threadIdx.x >> 5) * a.part;
        s.begin = begin < k ? (int)begin : k;
        s.end = begin + a.part < k ? (int)begin + a.part : k;
    }
    return s;
}

// Bytes of a row of weights; 0 where its elements are not neighbours.
template <int KIND>
__device__ __forceinline__ int64_t bytes_of_row(const Product& a) {
    if constexpr (KIND == F32 || KIND == F16 || KIND == BF16) {
        const int size = KIND == F32 ? 4 : 2;
        return a.w0 == size ? a.k * size : 0;
    } else {
        return a.k / Blocks<KIND>::ELEMENTS * Blocks<KIND>::BYTES;
    }
}

// Prefetches the warp's rows of weights before await_inputs(), at most the first 16 lines of 128 bytes of each: each
// lane one line.  With ids it prefetches nothing: earlier launches may still write them.  `bytes`: bytes of a row.
__device__ __forceinline__ void read_rows_ahead(const Product& a, const uint8_t* w, const uint8_t* second,
                                                const char* ids, int64_t bytes) {
    if (!OVERLAPS || ids != nullptr) return;
    const Part own = own_part(a, w, nullptr);
    const int64_t row = first_row(a, own, second != nullptr);
    const int lane = threadIdx.x & 31, lines = 128 * (lane & 15);
    // Of a row that several warps share, each warp prefetches about the beginning of its part.
    const int64_t line = a.part ? lines + bytes * (threadIdx.x >> 5) * a.part / a.k : lines;
    if (row >= own.rows || line >= bytes) return;
    Pair pair;
    find_pair(a, nullptr, blockIdx.y, nullptr, 0, pair);
    const uint8_t* weights[WEIGHT_ROWS];
    weight_rows(own, own.w + pair.w, second != nullptr ? second + pair.w : nullptr, row, weights);
    read_ahead((lane < 16 ? weights[0] : weights[1]) + line);
}

// Adds up the sums of the lanes, and of warps that share rows, and writes the result: two rows, or with `both` matrices
// one row of their gated unit.  `root`: the number by which the sums are divided (root_before).
template <int COLUMNS>
__device__ __forceinline__ void store_rows(const Product& a, const Part& own, bool both, int64_t row, int64_t column,
                                           char* d, float root, float (&sum)[WEIGHT_ROWS][COLUMNS]) {
    __shared__ float sums[WEIGHT_ROWS][COLUMNS][FEW_WARPS];
    if (a.part) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        __syncthreads();                   // the sums of the previous product have been read
        UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            UNROLL
            for (int r = 0; r < WEIGHT_ROWS; ++r) {
                const float v = warp_reduce<Sum>(sum[r][c]);
                if (lane == 0) sums[r][c][warp] = v;
            }
        }
        __syncthreads();
        if (warp != 0) return;
        UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            UNROLL
            for (int r = 0; r < WEIGHT_ROWS; ++r) sum[r][c] = lane < FEW_WARPS ? sums[r][c][lane] : 0.0f;
        }
    }
    UNROLL
    for (int c = 0; c < COLUMNS; ++c) {
        if (column + c >= a.columns) break;
        float v0 = warp_reduce<Sum>(sum[0][c]), v1 = warp_reduce<Sum>(sum[1][c]);
        if ((threadIdx.x & 31) != 0) continue;
        if (COLUMNS == 1) {
            v0 /= root;
            v1 /= root;
        }
        float* out = (float*)(d + (column + c) * own.d1) + row;
        if (both) {
            *out = gated(a.gate, v0, v1);
        } else {
            out[0] = own.bias != nullptr ? v0 + own.bias[row] : v0;
            if (row + 1 < own.rows) out[1] = own.bias != nullptr ? v1 + own.bias[row + 1] : v1;
        }
    }
}

// Rounds the result of product number i of the batch to 8 bits.  Each 32 rows are rounded by one block: of those that
// compute them, the one that ends last.  The number of rows is a multiple of 32.  `block`: the number of this block
// among those of the product.  Counters are 0 before and after.
__device__ __forceinline__ void round_rows(const Product& a, int64_t i, int64_t block, const char* d, int8_t* q,
                                           float2* runs, unsigned* counters) {
    __shared__ int is_last;
    const int warps = blockDim.x >> 5, lane = threadIdx.x & 31;
    const unsigned others = 32 / warps - 1;
    const int64_t group = block * warps >> 5;
    __threadfence();                       // other blocks must see each warp's row before the block is counted
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicInc(&counters[i * (a.rows >> 5) + group], others) == others;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    UNROLL_BY(1)
    for (int64_t c = threadIdx.x >> 5; c < a.columns; c += warps) {
        const float v = ((const volatile float*)(d + c * a.d1))[group * 32 + lane];
        store_rounded(v, (i * a.columns + c) * a.rows + group * 32 + lane, q, runs);
    }
}

// -- norms ------------------------------------------------------------------------------------------------------------

// Computes the norm that follows a product of one column, except for the division by the root: like round_rows, but
// before it rounds, the last block adds x, writes the row and its sums of squares, and multiplies by the factors.
__device__ __forceinline__ void norm_rows_behind(const Product& a, const Norm& norm, const char* d, int8_t* q,
                                                 float2* runs, float* squares, unsigned* counters) {
    __shared__ int is_last;
    const int each = a.part ? (int)WEIGHT_ROWS : (int)WEIGHT_ROWS * FEW_WARPS;
    const unsigned others = 32 / each - 1;
    const int group = (int)blockIdx.x * each >> 5, i = group * 32 + (int)(threadIdx.x & 31);
    // Loaded before the block knows whether it is the last, so that the last one does not wait for them.
    const float x = norm.x[i], factor = norm.factor[i];
    __threadfence();                       // other blocks must see each warp's rows before the block is counted
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicInc(&counters[group], others) == others;
    __syncthreads();
    if (!is_last || threadIdx.x >= 32) return;
    __threadfence();
    const float v = ((const volatile float*)d)[i] + x, square = warp_reduce<Sum>(v * v);
    if (norm.kept != nullptr) norm.kept[i] = v;
    store_rounded(v * factor, i, q, runs);
    if (threadIdx.x == 0) squares[group] = square;
}

// The lane's first four sums of squares, if a norm comes before the product; else 0.  Loaded before the weights.
__device__ __forceinline__ float4 first_squares(const Norm& norm, const float* squares) {
    const int lane = threadIdx.x & 31;
    return norm.role == NORM_BEFORE && lane < norm.n / 128 ? load_input((const float4*)squares + lane) : float4{};
}

// The root of the mean square, if a norm comes before the product; else 1.  `first`: from first_squares.
__device__ __forceinline__ float root_before(const Norm& norm, const float* squares, const float4& first) {
    if (norm.role != NORM_BEFORE) return 1.0f;
    float sum = (first.x + first.y) + (first.z + first.w);
    UNROLL_BY(1)
    for (int i = 32 + (int)(threadIdx.x & 31); i < norm.n / 128; i += 32) {
        const float4 v = load_input((const float4*)squares + i);
        sum += (v.x + v.y) + (v.z + v.w);
    }
    return sqrtf(warp_reduce<Sum>(sum) / (float)norm.n + norm.eps);
}

// Writes the result of the norm before the product to norm.out, unless that is null.  The blocks of the first matrix
// and columns divide this work.
__device__ __forceinline__ void store_normed(const Norm& norm, float root) {
    if (norm.out == nullptr || blockIdx.y + blockIdx.z != 0) return;
    UNROLL_BY(1)
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < norm.n; i += gridDim.x * blockDim.x) {
        const float v = norm.y != nullptr ? norm.x[i] + norm.y[i] : norm.x[i];
        norm.out[i] = v / root * norm.factor[i];
    }
}

// The body of all kernels here: for each product of the batch, finds its matrices, runs WORK, and stores the sums.
// WORK uses the locals `weights`, `pair`, `column` and `sum`, and adds to `sum`.
#define FOR_EACH_PRODUCT(COLUMNS, WORK)                                                                          \
    const bool both = second != nullptr;                                                                         \
    const Part own = own_part(a, w, d);                                                                          \
    const int64_t row = first_row(a, own, both);                                                                 \
    const int64_t column = (int64_t)blockIdx.z * (COLUMNS);                                                      \
    if (row >= own.rows) return;                                                                                 \
    for (int64_t i = blockIdx.y; i < a.matrices; i += gridDim.y) {                                               \
        Pair pair;                                                                                               \
        if (!find_pair(a, ids, i, word, position, pair)) continue;                                               \
        const uint8_t* weights[WEIGHT_ROWS];                                                                     \
        weight_rows(own, own.w + pair.w, both ? second + pair.w : nullptr, row, weights);                        \
        float sum[WEIGHT_ROWS][COLUMNS];                                                                         \
        UNROLL                                                                                                   \
        for (int c = 0; c < (COLUMNS); ++c) sum[0][c] = sum[1][c] = 0.0f;                                        \
        float4 first = {};                                                                                       \
        if ((COLUMNS) == 1) first = first_squares(norm, squares);                                                \
        WORK;                                                                                                    \
        const float root = (COLUMNS) == 1 ? root_before(norm, squares, first) : 1.0f;                            \
        store_rows<COLUMNS>(a, own, both, row, column, own.d + pair.d, root, sum);                               \
        if ((COLUMNS) == 1 && norm.role == NORM_BEFORE) store_normed(norm, root);                                \
        if (rounded == nullptr) continue;                                                                        \
        if ((COLUMNS) == 1 && norm.role == NORM_BEHIND)                                                          \
            norm_rows_behind(a, norm, d, rounded, rounded_runs, squares, counters);                              \
        else                                                                                                     \
            round_rows(a, i, blockIdx.x, d + pair.d, rounded, rounded_runs, counters);                           \
    }

// -- blocks times 8-bit columns ---------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ float unit_times_runs(const Unit& w, const Run& x0, const Run& x1) {
    const int t0 = dot_run(w.q, x0.q), t1 = dot_run(w.q + 4, x1.q);
    if (T::ONE_SCALE) return w.s[0] * (x0.scale * (float)(t0 + t1)) + w.m[0] * (x0.sum + x1.sum);
    return w.s[0] * (x0.scale * (float)t0) + w.m[0] * x0.sum + (w.s[1] * (x1.scale * (float)t1) + w.m[1] * x1.sum);
}

__device__ __forceinline__ Run load_run(const char* q, const float2* runs, int64_t element) {
    Run r;
    r.q = load_input((const int4*)(q + element));
    const float2 v = load_input(runs + (element >> 4));
    r.scale = v.x;
    r.sum = v.y;
    return r;
}

template <int KIND, bool PACKED, int COLUMNS>
__device__ __forceinline__ void rows_times_8_bits(const Product& a, const uint8_t* const* weights, const char* x,
                                                  const float2* runs, int64_t first, int64_t column,
                                                  float (&sum)[WEIGHT_ROWS][COLUMNS]) {
    typedef Blocks<KIND> T;
    const Stretch s = own_stretch(a);
    const int units = s.end >> 5;
    // Unrolled twice, this would spill registers for q3_K and q6_K in ggml's order, and for q5_K where launches
    // overlap.
    UNROLL_BY(COLUMNS == 1 && (PACKED || (KIND != Q3_K && KIND != Q6_K && (KIND != Q5_K || !OVERLAPS))) ? 2 : 1)
    for (int u = (s.begin >> 5) + (threadIdx.x & 31); u < units; u += 32) {
        Unit w[WEIGHT_ROWS];
        UNROLL
        for (int r = 0; r < WEIGHT_ROWS; ++r) T::template load<PACKED>(weights[r], u, w[r]);
        UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            if (COLUMNS > 1 && column + c >= a.columns) break;
            const int64_t start = (first + (column + c) * a.x1) * a.k;
            const Run x0 = load_run(x, runs, start + first_of<T>(u)), x1 = load_run(x, runs, start + second_of<T>(u));
            UNROLL
            for (int r = 0; r < WEIGHT_ROWS; ++r) sum[r][c] += unit_times_runs<T>(w[r], x0, x1);
        }
    }
}

template <int KIND, bool PACKED, int COLUMNS>
__device__ __forceinline__ void few(FEW) {
    FOR_EACH_PRODUCT(COLUMNS, (rows_times_8_bits<KIND, PACKED, COLUMNS>(a, weights, x, runs, pair.x, column, sum)))
}

// -- blocks times f32 -------------------------------------------------------------------------------------------------

template <int KIND>
__device__ __forceinline__ void rows_times_floats(const Product& a, const uint8_t* const* weights, const char* x,
                                                  float (&sum)[WEIGHT_ROWS][1]) {
    typedef Blocks<KIND> T;
    const Stretch s = own_stretch(a);
    const int units = s.end >> 5;
    UNROLL_BY(1)
    for (int u = (s.begin >> 5) + (threadIdx.x & 31); u < units; u += 32) {
        Unit w[WEIGHT_ROWS];
        UNROLL
        for (int r = 0; r < WEIGHT_ROWS; ++r) {
            if (a.packed) T::template load<true>(weights[r], u, w[r]);
            else T::template load<false>(weights[r], u, w[r]);
        }
        UNROLL
        for (int h = 0; h < 2; ++h) {
            const float* v = (const float*)x + (h ? second_of<T>(u) : first_of<T>(u));
            for (int j = 0; j < 16; ++j) {
                const float e = v[j];
                UNROLL
                for (int r = 0; r < WEIGHT_ROWS; ++r)
                    sum[r][0] += (w[r].s[h] * level(w[r].q[4 * h + (j >> 2)], j & 3) + w[r].m[h]) * e;
            }
        }
    }
}

template <int KIND>
__device__ __forceinline__ void few_exact(FEW) {
    (void)runs;
    FOR_EACH_PRODUCT(1, (rows_times_floats<KIND>(a, weights, x + pair.x + column * a.x1, sum)))
}

// -- types without blocks ---------------------------------------------------------------------------------------------

template <int KIND, int COLUMNS>
__device__ __forceinline__ void plain_rows(const Product& a, const uint8_t* const* weights, const char* x,
                                           int64_t column, float (&sum)[WEIGHT_ROWS][COLUMNS]) {
    const int lane = threadIdx.x & 31;
    const Stretch s = own_stretch(a);
    int done = s.begin;
    if (a.wide) {
        const int size = KIND == F32 ? 4 : 2, eights = s.end >> 3;
        done = s.begin < 8 * eights ? 8 * eights : s.begin;
        UNROLL_BY(COLUMNS == 1 ? 2 : 1)
        for (int u = (s.begin >> 3) + lane; u < eights; u += 32) {
            float v[WEIGHT_ROWS][8];
            UNROLL
            for (int r = 0; r < WEIGHT_ROWS; ++r)
                load_eight<KIND>((const char*)weights[r] + (int64_t)u * 8 * size, v[r]);
            UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                if (COLUMNS > 1 && column + c >= a.columns) break;
                float e[8];
                load_eight<F32>(x + (column + c) * a.x1 + (int64_t)u * 32, e);
                UNROLL
                for (int r = 0; r < WEIGHT_ROWS; ++r) {
                    UNROLL
                    for (int j = 0; j < 8; ++j) sum[r][c] += v[r][j] * e[j];
                }
            }
        }
    }
    UNROLL_BY(1)
    for (int64_t j = (int64_t)done + lane; j < s.end; j += 32) {
        float v[WEIGHT_ROWS];
        UNROLL
        for (int r = 0; r < WEIGHT_ROWS; ++r) v[r] = load_plain((const char*)weights[r] + j * a.w0, KIND);
        UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            if (COLUMNS > 1 && column + c >= a.columns) break;
            const float e = *(const float*)(x + (column + c) * a.x1 + j * 4);
            UNROLL
            for (int r = 0; r < WEIGHT_ROWS; ++r) sum[r][c] += v[r] * e;
        }
    }
}

template <int KIND, int COLUMNS>
__device__ __forceinline__ void few_plain(FEW) {
    (void)runs;
    FOR_EACH_PRODUCT(COLUMNS, (plain_rows<KIND, COLUMNS>(a, weights, x + pair.x, column, sum)))
}

// -- kernels ----------------------------------------------------------------------------------------------------------

// Kernels NAME_1 and NAME_8: for one column, and for up to eight.  PER_SM: blocks that must fit on a multiprocessor.
#define FEW_KERNEL(NAME, KIND, PER_SM, ...)                                          \
    extern "C" __global__ void __launch_bounds__(32 * FEW_WARPS, PER_SM) NAME(FEW) { \
        read_rows_ahead(a, w, second, ids, bytes_of_row<KIND>(a));                   \
        await_inputs();                                                              \
        __VA_ARGS__(FEW_ARGS);                                                       \
    }
#define FEW_PLAIN(NAME, KIND)                                   \
    FEW_KERNEL(NAME##_1, KIND, 4, few_plain<KIND, 1>)           \
    FEW_KERNEL(NAME##_8, KIND, 3, few_plain<KIND, 8>)
// Kernels NAME_1 and NAME_8, and kernel exact_NAME, for one column in f32.
#define FEW_BLOCKS(NAME, KIND)                                  \
    FEW_KERNEL(NAME##_1, KIND, 4, few<KIND, false, 1>)          \
    FEW_KERNEL(NAME##_8, KIND, 3, few<KIND, false, 8>)          \
    FEW_KERNEL(exact_##NAME, KIND, 4, few_exact<KIND>)
// Also kernels packed_NAME_1 and packed_NAME_8, for weights that repack.py has rearranged.  With six blocks on a
// multiprocessor a lane has 80 registers: enough, for q4_0, to load the data of two rounds of the loop before it uses
// them.  With eight blocks it would have 64, and load a quarter of these data ahead.
#define FEW_PACKED_BLOCKS(NAME, KIND)                                               \
    FEW_BLOCKS(NAME, KIND)                                                          \
    FEW_KERNEL(packed_##NAME##_1, KIND, KIND == Q4_0 ? 6 : 4, few<KIND, true, 1>)   \
    FEW_KERNEL(packed_##NAME##_8, KIND, 3, few<KIND, true, 8>)
