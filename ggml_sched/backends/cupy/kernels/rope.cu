// Rotary position embedding, alone or with the write of its rows to a cache; and for queries, keys and values at once,
// with the norm of each head before it.
//
// Angles are f64 until whole turns are subtracted, because positions are large; the rotation is f32.  The frequency of
// each pair (radians per position) and the magnitude, which depend on the node alone, are computed by the host and
// passed as arguments.  The result may be the memory of the source: a thread reads and writes only its own pair.
#include "common.cuh"

enum { PAIRS = 128 };

struct Angles {
    double per_position[PAIRS];
};

// Sine and cosine of an angle given in turns, between -1/2 and 1/2.  On a GPU sincospif needs none of the local memory
// that sincosf takes for large angles.
__device__ __forceinline__ void sincos_of_turns(float turns, float* s, float* c) {
#ifdef HOST_CUDA
    *s = (float)sin((double)turns * 6.283185307179586);
    *c = (float)cos((double)turns * 6.283185307179586);
#else
    sincospif(2.0f * turns, s, c);
#endif
}

__device__ __forceinline__ void turn(int64_t position, double per_position, float magnitude, float* c, float* s) {
    const double turns = (double)position * per_position * 0.15915494309189535;
    sincos_of_turns((float)(turns - rint(turns)), s, c);
    *c *= magnitude;
    *s *= magnitude;
}

// Rotates pairs first .. first + pairs - 1 of each head.  A pair is elements i and i + half where `neox`, else two
// neighbours; half = n_dims / 2.
extern "C" __global__ void __launch_bounds__(256) rope(View a, View positions, View factors, View d, int64_t n,
                                                       int first, int pairs, int half, int neox, int has_factors,
                                                       float magnitude, int kind, Angles angles) {
    await_inputs();
    View shape = d;
    shape.ne[0] = pairs;
    FOR_EACH(i, n) {
        const Index k = split(shape, i);
        const int64_t pair = first + k.i0, i0 = neox ? pair : 2 * pair, i1 = neox ? pair + half : i0 + 1;
        double per_position = angles.per_position[k.i0];
        if (has_factors) per_position /= (double)*(const float*)at(factors, pair, 0, 0, 0);
        float c, s;
        turn(*(const int32_t*)at(positions, split(positions, k.i2)), per_position, magnitude, &c, &s);
        const float x = load_plain(at(a, i0, k.i1, k.i2, k.i3), kind);
        const float y = load_plain(at(a, i1, k.i1, k.i2, k.i3), kind);
        store_plain(at(d, i0, k.i1, k.i2, k.i3), kind, x * c - y * s);
        store_plain(at(d, i1, k.i1, k.i2, k.i3), kind, x * s + y * c);
    }
}

__device__ __forceinline__ int64_t number_at(const View& ids, int64_t i, int wide) {
    return wide ? *(const int64_t*)at(ids, i, 0, 0, 0) : (int64_t)*(const int32_t*)at(ids, i, 0, 0, 0);
}

// What `turn_heads` does with the heads of `a`, [width, heads, tokens]: d = rope(norm(a) * factor).
struct Heads {
    View a, d, ids;
    const float* factor;                   // of an RMS norm of each head; null: there is no norm
    int32_t heads;                         // how many; 0: nothing to do
    int32_t half;                          // pairs that are rotated; 0: none
    int32_t written;                       // 0: d has the extents of a; else heads lie side by side in row ids[token]
    int32_t wide;                          // whether ids are i64, else i32
    int32_t kind;                          // the type of d
    int32_t position;                      // the number of the node that writes rows, for the error word
    float eps;
    int32_t unused;
};

// How heads are rotated, as in `rope`.
struct Turns {
    View positions, factors;
    int32_t neox, has_factors;
    float magnitude;
    int32_t unused;
    double per_position[PAIRS];
};

// Computes head number `head` of every token.  Of several tokens with the same id only the last is written.
__device__ __forceinline__ void turn_head(const Heads& h, const Turns& t, int64_t head, Fault* word, int* found,
                                          float* sums) {
    const int width = (int)h.a.ne[0], slots = width - h.half;   // a slot: a pair, or an element that is not rotated
    FOR_EACH_ROW(token, h.a.ne[2]) {
        char* to = at(h.d, 0, head, token, 0);
        if (h.written) {
            const int64_t row = number_at(h.ids, token, h.wide);
            int again = 0;
            for (int64_t j = token + 1 + threadIdx.x; j < h.a.ne[2]; j += blockDim.x)
                again |= number_at(h.ids, j, h.wide) == row;
            again = block_reduce<Any>(again, found);
            if (row < 0 || row >= h.d.ne[1]) {
                if (threadIdx.x == 0) fault(word, h.position, 1, row, h.d.ne[1]);
                continue;
            }
            if (again) continue;
            to = at(h.d, head * width, row, 0, 0);
        }
        const char* const from = at(h.a, 0, head, token, 0);
        float root = 1.0f;
        if (h.factor != nullptr) {
            float sum = 0.0f;
            for (int i = threadIdx.x; i < width; i += blockDim.x) {
                const float v = *(const float*)(from + i * h.a.nb[0]);
                sum += v * v;
            }
            root = sqrtf(block_reduce<Sum>(sum, sums) / (float)width + h.eps);
        }
        // d may be the memory of a: a thread reads its slot before it writes it, and the norm has read the head before.
        for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
            const bool turned = slot < h.half;
            const int i0 = !turned ? slot + h.half : t.neox ? slot : 2 * slot;
            float x = *(const float*)(from + i0 * h.a.nb[0]);
            if (h.factor != nullptr) x = x / root * h.factor[i0];
            if (!turned) {
                store_plain(to + i0 * h.d.nb[0], h.kind, x);
                continue;
            }
            const int i1 = t.neox ? slot + h.half : i0 + 1;
            float y = *(const float*)(from + i1 * h.a.nb[0]);
            if (h.factor != nullptr) y = y / root * h.factor[i1];
            double per_position = t.per_position[slot];
            if (t.has_factors) per_position /= (double)*(const float*)at(t.factors, slot, 0, 0, 0);
            float c, s;
            turn(*(const int32_t*)at(t.positions, split(t.positions, token)), per_position, t.magnitude, &c, &s);
            store_plain(to + i0 * h.d.nb[0], h.kind, x * c - y * s);
            store_plain(to + i1 * h.d.nb[0], h.kind, x * s + y * c);
        }
    }
}

// Queries, keys and values: norms, ropes and writes to the caches in one launch.  Each token and head has a block: f64
// is slow on most GPUs, and one block for all heads would take long to compute the angles.
extern "C" __global__ void __launch_bounds__(1024) turn_heads(Heads q, Heads k, Heads v, Turns t, Fault* word) {
    await_inputs();
    __shared__ int found[32];
    __shared__ float sums[32];
    const int block = blockIdx.y;
    if (block < q.heads) turn_head(q, t, block, word, found, sums);
    else if (block < q.heads + k.heads) turn_head(k, t, block - q.heads, word, found, sums);
    else turn_head(v, t, block - q.heads - k.heads, word, found, sums);
}

// Writes the rotated heads of each token of a side by side into row ids[token] of d, in the type of d: ROPE and the
// SET_ROWS of its result in one kernel.  Each token and head has a block: f64 is slow on most GPUs, and one block for
// all heads would take long to compute the angles.
extern "C" __global__ void __launch_bounds__(1024) rope_set_rows(View a, View positions, View factors, View ids, View d,
                                                                 int half, int neox, int has_factors, float magnitude,
                                                                 int kind, int wide, Fault* word, int position,
                                                                 Angles angles) {
    await_inputs();
    __shared__ int part[32];
    const int64_t width = a.ne[0];
    const int slots = (int)width - half;        // a slot: a pair, or an element that is not rotated
    const int64_t head = blockIdx.y;
    FOR_EACH_ROW(token, a.ne[2]) {
        const int64_t row = number_at(ids, token, wide);
        int again = 0;
        for (int64_t j = token + 1 + threadIdx.x; j < a.ne[2]; j += blockDim.x) again |= number_at(ids, j, wide) == row;
        again = block_reduce<Any>(again, part);
        if (row < 0 || row >= d.ne[1]) {
            if (threadIdx.x == 0) fault(word, position, 1, row, d.ne[1]);
            continue;
        }
        if (again) continue;                // of several rows with the same id only the last is written
        const int64_t at_position = *(const int32_t*)at(positions, split(positions, token));
        for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
            char* const to = at(d, head * width, row, 0, 0);
            if (slot >= half) {
                const int64_t i0 = slot + half;
                store_plain(to + i0 * d.nb[0], kind, *(const float*)at(a, i0, head, token, 0));
                continue;
            }
            const int64_t i0 = neox ? slot : 2 * slot, i1 = neox ? slot + half : i0 + 1;
            double per_position = angles.per_position[slot];
            if (has_factors) per_position /= (double)*(const float*)at(factors, slot, 0, 0, 0);
            float c, s;
            turn(at_position, per_position, magnitude, &c, &s);
            const float x = *(const float*)at(a, i0, head, token, 0), y = *(const float*)at(a, i1, head, token, 0);
            store_plain(to + i0 * d.nb[0], kind, x * c - y * s);
            store_plain(to + i1 * d.nb[0], kind, x * s + y * c);
        }
    }
}
