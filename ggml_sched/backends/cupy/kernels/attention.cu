// attention.cuh by head size: _64, _128, ... elements of a value at most; and how many columns a block takes.
// half_: K and V are f16; any_: they are f32, f16, bf16, q8_0 or q4_0, in any strides that rows of these may have.
#include "attention.cuh"

#define ATTENTION                                                                                                   \
    Attention a, const char *__restrict__ q, const char *__restrict__ k, const char *__restrict__ v,                 \
        const char *__restrict__ mask, const float *__restrict__ sinks, char *__restrict__ dst,                      \
        float *__restrict__ partial
#define ATTENTION_ARGS a, q, k, v, mask, sinks, dst, partial

extern "C" __global__ void __launch_bounds__(128) half_64_1(ATTENTION) {
    attend<true, 1, 1>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128) half_64_8(ATTENTION) {
    attend<true, 1, 8>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128) half_128_1(ATTENTION) {
    attend<true, 2, 1>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128) half_128_8(ATTENTION) {
    attend<true, 2, 8>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128) half_256_1(ATTENTION) {
    attend<true, 4, 1>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128) half_256_8(ATTENTION) {
    attend<true, 4, 8>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128) half_512_1(ATTENTION) {
    attend<true, 8, 1>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128) half_512_4(ATTENTION) {
    attend<true, 8, 4>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128) any_64_1(ATTENTION) {
    attend<false, 1, 1>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128) any_64_8(ATTENTION) {
    attend<false, 1, 8>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128) any_128_1(ATTENTION) {
    attend<false, 2, 1>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128) any_128_8(ATTENTION) {
    attend<false, 2, 8>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128) any_256_1(ATTENTION) {
    attend<false, 4, 1>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128) any_256_8(ATTENTION) {
    attend<false, 4, 8>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128) any_512_1(ATTENTION) {
    attend<false, 8, 1>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128) any_512_4(ATTENTION) {
    attend<false, 8, 4>(ATTENTION_ARGS);
}

extern "C" __global__ void __launch_bounds__(128) combine(Attention a, const float* __restrict__ sinks,
                                                         char* __restrict__ dst, const float* __restrict__ partial) {
    combine_splits(a, sinks, dst, partial);
}
