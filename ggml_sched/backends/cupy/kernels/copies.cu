// Moving data.
#include "common.cuh"

template <class T>
__device__ __forceinline__ void move_as(const char* from, char* to) {
    *(T*)to = *(const T*)from;
}

// d = a, which repeats to the extents of d; elements of `size` bytes, whatever they mean.
extern "C" __global__ void __launch_bounds__(256) move(View a, View d, int64_t n, int size) {
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
