// Rotary position embedding, alone or with the write of its rows to a cache.
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

// Writes the rotated heads of each token of a side by side into row ids[token] of d, in the type of d: ROPE and the
// SET_ROWS of its result in one kernel.  One block for each token.
extern "C" __global__ void __launch_bounds__(1024) rope_set_rows(View a, View positions, View factors, View ids, View d,
                                                                 int half, int neox, int has_factors, float magnitude,
                                                                 int kind, int wide, Fault* word, int position,
                                                                 Angles angles) {
    __shared__ int part[32];
    const int64_t width = a.ne[0];
    const int slots = (int)width - half, items = slots * (int)a.ne[1];      // a slot: a pair, or an element not rotated
    FOR_EACH_ROW(token, a.ne[2]) {
        const int64_t row = number_at(ids, token, wide);
        int again = 0;
        for (int64_t j = token + 1 + threadIdx.x; j < a.ne[2]; j += blockDim.x) again |= number_at(ids, j, wide) == row;
        again = block_reduce<Any>(again, part);
        if (row < 0 || row >= d.ne[1]) {
            if (threadIdx.x == 0) fault(word, position, 1, row, d.ne[1]);
            continue;
        }
        if (again) continue;                // of several rows with one id the last is written
        const int64_t at_position = *(const int32_t*)at(positions, split(positions, token));
        for (int i = threadIdx.x; i < items; i += blockDim.x) {
            const int64_t slot = i % slots, head = i / slots;
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
