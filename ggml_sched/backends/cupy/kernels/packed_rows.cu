// GET_ROWS of a quantised table whose blocks repack.py has rearranged, such as that of a model's embeddings.
#include "blocks.cuh"

// d[row] = a[ids[row]] as f32.  Each thread decodes one unit (32 elements of a row, see units.cuh); n is the number of
// units of d.
template <int KIND>
__device__ __forceinline__ void get(const View& a, const View& ids, const View& d, int64_t n, Fault* word,
                                    int position) {
    typedef Blocks<KIND> T;
    View units = d;
    units.ne[0] = d.ne[0] / 32;
    FOR_EACH(i, n) {
        const Index k = split(units, i);
        const int64_t row = *(const int32_t*)at(ids, k.i1, k.i2, k.i3, 0);
        if (row < 0 || row >= a.ne[1]) {
            if (k.i0 == 0) fault(word, position, 1, row, a.ne[1]);
            continue;
        }
        Unit x;
        const int u = (int)k.i0;
        T::template load<true>((const uint8_t*)at(a, 0, row, k.i2, k.i3), u, x);
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int first = r ? second_of<T>(u) : first_of<T>(u);
            UNROLL
            for (int j = 0; j < 16; ++j)
                *(float*)at(d, first + j, k.i1, k.i2, k.i3) = x.s[r] * level(x.q[4 * r + (j >> 2)], j & 3) + x.m[r];
        }
    }
}

#define GET(NAME, KIND)                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) NAME(View a, View ids, View d, int64_t n, Fault* word, \
                                                           int position) {                              \
        await_inputs();                                                                                 \
        get<KIND>(a, ids, d, n, word, position);                                                        \
    }

ALL_PACKED(GET)
