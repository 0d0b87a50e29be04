// attention.cuh where K and V are f16, by head size: half_64, half_128, ... elements of a value at most; _1, _4, _8:
// that many columns in a block.  And what joins splits, for caches of any type.
#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(128, 2) half_64_1(ATTENTION) {
    attend<true, 1, 1>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) half_64_4(ATTENTION) {
    attend<true, 1, 4>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) half_64_8(ATTENTION) {
    attend<true, 1, 8>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) half_128_1(ATTENTION) {
    attend<true, 2, 1>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) half_128_4(ATTENTION) {
    attend<true, 2, 4>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) half_128_8(ATTENTION) {
    attend<true, 2, 8>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) half_256_1(ATTENTION) {
    attend<true, 4, 1>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) half_256_4(ATTENTION) {
    attend<true, 4, 4>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) half_256_8(ATTENTION) {
    attend<true, 4, 8>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) half_512_1(ATTENTION) {
    attend<true, 8, 1>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) half_512_4(ATTENTION) {
    attend<true, 8, 4>(ATTENTION_ARGS);
}

extern "C" __global__ void __launch_bounds__(128) combine(Attention a, const float* __restrict__ sinks,
                                                         char* __restrict__ dst, const float* __restrict__ partial) {
    combine_splits(a, sinks, dst, partial);
}
