// Copies, conversions between types, and padding with zeros.  Source and result share no bytes, or are the same memory.
#include "common.cuh"
#include "quantize.cuh"

template <class T>
__device__ __forceinline__ void move_as(const char* from, char* to) {
    *(T*)to = *(const T*)from;
}

// d = a, which repeats to the extents of d; elements of any type, of `size` bytes.
extern "C" __global__ void __launch_bounds__(256) move(View a, View d, int64_t n, int size) {
    await_inputs();
    FOR_EACH(i, n) {
        const Index k = split(d, i);
        const char* from = at(a, wrap(k, a));
        char* to = at(d, k);
        if (size == 16) move_as<uint4>(from, to);
        else if (size == 8) move_as<uint64_t>(from, to);
        else if (size == 4) move_as<uint32_t>(from, to);
        else if (size == 2) move_as<uint16_t>(from, to);
        else for (int j = 0; j < size; ++j) to[j] = from[j];
    }
}

// Converts element number i of a to element number i of d, so that extents may differ.  a may have any type, d any type
// without blocks.
extern "C" __global__ void __launch_bounds__(256) convert(View a, View d, int64_t n, int ka, int kd) {
    await_inputs();
    FOR_EACH(i, n) store_plain(at(d, split(d, i)), kd, load_view(a, ka, split(a, i)));
}

// Copies element (or block) number i of a, of `size` bytes, to number i of d, of the same type and other extents.
extern "C" __global__ void __launch_bounds__(256) reorder(View a, View d, int64_t n, int size) {
    await_inputs();
    FOR_EACH(i, n) {
        const char* from = at(a, split(a, i));
        char* to = at(d, split(d, i));
        for (int j = 0; j < size; ++j) to[j] = from[j];
    }
}

// Quantises the elements of a, in order, to the n blocks of d; d.ne[0] counts the blocks of a row.  A warp makes a
// block.
extern "C" __global__ void __launch_bounds__(256) quantize(View a, View d, int64_t n, int ka, int kd) {
    await_inputs();
    const int lane = threadIdx.x & 31;
    const int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    for (int64_t i = first; i < n; i += (int64_t)gridDim.x * blockDim.x >> 5)
        quantize_block(load_view(a, ka, split(a, i * 32 + lane)), kd, at(d, split(d, i)), lane);
}

struct Before {
    int64_t n[4];
};

// d = a with before.n[axis] zeros in front of it along each axis, and zeros after it up to the extents of d.
extern "C" __global__ void __launch_bounds__(256) pad(View a, View d, int64_t n, Before before) {
    await_inputs();
    FOR_EACH(i, n) {
        const Index k = split(d, i);
        const int64_t i0 = k.i0 - before.n[0], i1 = k.i1 - before.n[1], i2 = k.i2 - before.n[2],
                      i3 = k.i3 - before.n[3];
        const bool inside = i0 >= 0 && i0 < a.ne[0] && i1 >= 0 && i1 < a.ne[1] && i2 >= 0 && i2 < a.ne[2] && i3 >= 0 &&
                            i3 < a.ne[3];
        *(float*)at(d, k) = inside ? *(const float*)at(a, i0, i1, i2, i3) : 0.0f;
    }
}
