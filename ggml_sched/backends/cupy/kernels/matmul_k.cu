// matmul.cuh for blocks of 256 with scales of scales: q2_K to q6_K.
#include "matmul.cuh"

extern "C" __global__ void __launch_bounds__(256) q2_k(TILED) { many<Q2_K>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) exact_q2_k(TILED) { many_exact<Q2_K>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) q3_k(TILED) { many<Q3_K>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) exact_q3_k(TILED) { many_exact<Q3_K>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) q4_k(TILED) { many<Q4_K>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) exact_q4_k(TILED) { many_exact<Q4_K>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) q5_k(TILED) { many<Q5_K>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) exact_q5_k(TILED) { many_exact<Q5_K>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) q6_k(TILED) { many<Q6_K>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) exact_q6_k(TILED) { many_exact<Q6_K>(TILED_ARGS); }
