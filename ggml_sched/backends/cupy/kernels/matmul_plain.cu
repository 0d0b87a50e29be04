// matmul.cuh for blocks of 32: q4_0 q4_1 q5_0 q5_1 q8_0.
#include "matmul.cuh"

extern "C" __global__ void __launch_bounds__(256) q4_0(TILED) { many<Q4_0>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) exact_q4_0(TILED) { many_exact<Q4_0>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) q4_1(TILED) { many<Q4_1>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) exact_q4_1(TILED) { many_exact<Q4_1>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) q5_0(TILED) { many<Q5_0>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) exact_q5_0(TILED) { many_exact<Q5_0>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) q5_1(TILED) { many<Q5_1>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) exact_q5_1(TILED) { many_exact<Q5_1>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) q8_0(TILED) { many<Q8_0>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) exact_q8_0(TILED) { many_exact<Q8_0>(TILED_ARGS); }
