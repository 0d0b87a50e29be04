// attention.cuh where K or V are something else: f32, bf16, q8_0, q4_0, or f16 in strides without wide loads.
#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(128, 2) any_64_1(ATTENTION) {
    attend<false, 1, 1>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) any_64_4(ATTENTION) {
    attend<false, 1, 4>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) any_64_8(ATTENTION) {
    attend<false, 1, 8>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) any_128_1(ATTENTION) {
    attend<false, 2, 1>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) any_128_4(ATTENTION) {
    attend<false, 2, 4>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) any_128_8(ATTENTION) {
    attend<false, 2, 8>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) any_256_1(ATTENTION) {
    attend<false, 4, 1>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) any_256_4(ATTENTION) {
    attend<false, 4, 4>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) any_256_8(ATTENTION) {
    attend<false, 4, 8>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) any_512_1(ATTENTION) {
    attend<false, 8, 1>(ATTENTION_ARGS);
}
extern "C" __global__ void __launch_bounds__(128, 2) any_512_4(ATTENTION) {
    attend<false, 8, 4>(ATTENTION_ARGS);
}
