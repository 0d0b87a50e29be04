// Norms of rows and of groups of channels.  A norm of rows may also add another row before, multiply by factors and add
// terms after, and round its result to 8 bits for products that read it.
//
// One block for each row; sums are added in a fixed tree.  The result may be the memory of a source of the same layout:
// a thread reads an element for the last time before it writes there.
#include "rounded.cuh"

enum Mode { RMS, CENTRED, L2 };
enum Around { ADDED = 1, KEPT = 2, SCALED = 4, SHIFTED = 8 };

__device__ __forceinline__ float& f32_at(char* row, int64_t i, int64_t stride) { return *(float*)(row + i * stride); }

__device__ __forceinline__ char* row_of(const View& t, const Index& k) { return at(t, 0, k.i1, k.i2, k.i3); }

enum { HELD = 16 };                        // elements of a row that a thread can keep in registers

// Addresses of one row: operands `x` and `y`, their sum (`kept`, written where a node needs it), factors, terms, and
// the result.
struct Row {
    char *x, *y, *kept, *factor, *term, *out;
};

__device__ __forceinline__ float root_of(float sum, int mode, float eps, int64_t n) {
    return mode == L2 ? max_nan(sqrtf(sum), eps) : sqrtf(sum / (float)n + eps);
}

// The norm of row number `number`, which fits into the registers of a block: every source is read once, before the
// first barrier.
__device__ __forceinline__ void norm_held(const Row& row, const View& a, const View& b, const View& s, const View& w,
                                          const View& shift, const View& d, int8_t* q, float2* runs, int64_t number,
                                          int mode, float eps, int around, float* part) {
    const int n = (int)d.ne[0];
    float v[HELD], f[HELD], t[HELD];
    float sum = 0.0f;
    UNROLL
    for (int j = 0; j < HELD; ++j) {
        const int i = threadIdx.x + j * blockDim.x;
        v[j] = f[j] = t[j] = 0.0f;
        if (i >= n) continue;
        v[j] = f32_at(row.x, i, a.nb[0]);
        if (around & ADDED) v[j] += f32_at(row.y, i, b.nb[0]);
        if (around & SCALED) f[j] = f32_at(row.factor, i, w.nb[0]);
        if (around & SHIFTED) t[j] = f32_at(row.term, i, shift.nb[0]);
        if (around & KEPT) f32_at(row.kept, i, s.nb[0]) = v[j];
        sum += mode == CENTRED ? v[j] : v[j] * v[j];
    }
    sum = block_reduce<Sum>(sum, part);
    float mean = 0.0f;
    if (mode == CENTRED) {
        mean = sum / (float)n;
        sum = 0.0f;
        UNROLL
        for (int j = 0; j < HELD; ++j)
            if ((int)(threadIdx.x + j * blockDim.x) < n) sum += (v[j] - mean) * (v[j] - mean);
        sum = block_reduce<Sum>(sum, part);
    }
    const float root = root_of(sum, mode, eps, n);
    UNROLL
    for (int j = 0; j < HELD; ++j) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i >= n) continue;
        float r = (v[j] - mean) / root;
        if (around & SCALED) r *= f[j];
        if (around & SHIFTED) r += t[j];
        f32_at(row.out, i, d.nb[0]) = r;
        v[j] = r;
    }
    if (q == nullptr) return;
    UNROLL
    for (int j = 0; j < HELD; ++j) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i < n) store_rounded(v[j], number * n + i, q, runs);
    }
}

// The norm of a longer row, which is read again for each pass.  If the sum is written (KEPT) it may overwrite a or b,
// so later passes read the sum instead.
__device__ __forceinline__ void norm_long(const Row& row, const View& a, const View& b, const View& s, const View& w,
                                          const View& shift, const View& d, int8_t* q, float2* runs, int64_t number,
                                          int mode, float eps, int around, float* part) {
    const int64_t n = d.ne[0];
    char* const again = around & KEPT ? row.kept : row.x;
    const int64_t again_nb = around & KEPT ? s.nb[0] : a.nb[0];
    const bool add_again = (around & ADDED) && !(around & KEPT);
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
        float v = f32_at(row.x, i, a.nb[0]);
        if (around & ADDED) v += f32_at(row.y, i, b.nb[0]);
        if (around & KEPT) f32_at(row.kept, i, s.nb[0]) = v;
        sum += mode == CENTRED ? v : v * v;
    }
    sum = block_reduce<Sum>(sum, part);
    float mean = 0.0f;
    if (mode == CENTRED) {
        mean = sum / (float)n;
        sum = 0.0f;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            float v = f32_at(again, i, again_nb);
            if (add_again) v += f32_at(row.y, i, b.nb[0]);
            sum += (v - mean) * (v - mean);
        }
        sum = block_reduce<Sum>(sum, part);
    }
    const float root = root_of(sum, mode, eps, n);
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
        float v = f32_at(again, i, again_nb);
        if (add_again) v += f32_at(row.y, i, b.nb[0]);
        v = (v - mean) / root;
        if (around & SCALED) v *= f32_at(row.factor, i, w.nb[0]);
        if (around & SHIFTED) v += f32_at(row.term, i, shift.nb[0]);
        f32_at(row.out, i, d.nb[0]) = v;
    }
    if (q == nullptr) return;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
        store_rounded(f32_at(row.out, i, d.nb[0]), number * n + i, q, runs);
}

// x = a (ADDED: a + b; KEPT: x is also written to s); d = norm(x) (SCALED: times w; SHIFTED: plus shift); b, w and
// shift repeat.  `around`: bits of enum Around.  If `q` and `runs` are not null, d is also written there, rounded to 8
// bits; the length of rows is then a multiple of 32.
extern "C" __global__ void __launch_bounds__(512) norm_rows(View a, View b, View s, View w, View shift, View d,
                                                            int8_t* RESTRICT q, float2* RESTRICT runs,
                                                            int64_t rows, int mode, float eps, int around) {
    await_inputs();
    __shared__ float part[32];
    FOR_EACH_ROW(r, rows) {
        const Index k = split_row(d, r);
        const Row row = {row_of(a, k), row_of(b, wrap(k, b)), row_of(s, k), row_of(w, wrap(k, w)),
                         row_of(shift, wrap(k, shift)), row_of(d, k)};
        if (d.ne[0] <= (int64_t)HELD * blockDim.x)
            norm_held(row, a, b, s, w, shift, d, q, runs, r, mode, eps, around, part);
        else
            norm_long(row, a, b, s, w, shift, d, q, runs, r, mode, eps, around, part);
    }
}

// Normalises groups of `width` channels (ne[2]); the last group may be smaller.  One block for each group.
extern "C" __global__ void __launch_bounds__(1024) group_norm(View a, View d, int64_t groups, int64_t width,
                                                              float eps) {
    await_inputs();
    __shared__ float part[32];
    FOR_EACH_ROW(g, groups * d.ne[3]) {
        const int64_t first = g % groups * width;
        View x = a, y = d;
        x.p = at(a, 0, 0, first, g / groups);
        y.p = at(d, 0, 0, first, g / groups);
        x.ne[2] = d.ne[2] - first < width ? d.ne[2] - first : width;
        x.ne[3] = 1;
        const int64_t n = elements(x);
        float sum = 0.0f;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += *(const float*)at(x, split(x, i));
        const float mean = block_reduce<Sum>(sum, part) / (float)n;
        sum = 0.0f;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            const float v = *(const float*)at(x, split(x, i)) - mean;
            sum += v * v;
        }
        const float root = sqrtf(block_reduce<Sum>(sum, part) / (float)n + eps);
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            const Index k = split(x, i);
            *(float*)at(y, k) = (*(const float*)at(x, k) - mean) / root;
        }
    }
}
