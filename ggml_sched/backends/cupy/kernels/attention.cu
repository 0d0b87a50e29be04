// attention.cuh where K and V are f16; and the kernel that combines splits, for caches of any type.
#include "attention.cuh"

ATTEND_SIZES(half, true)

extern "C" __global__ void __launch_bounds__(128) combine(Attention a, const float* __restrict__ sinks,
                                                         char* __restrict__ dst, const float* __restrict__ partial) {
    combine_splits(a, sinks, dst, partial);
}
