// matmul.cuh for plain types: f32 f16 bf16.
#include "matmul.cuh"

extern "C" __global__ void __launch_bounds__(256) f32(TILED) { many_exact<F32>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) f16(TILED) { many_exact<F16>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) bf16(TILED) { many_exact<BF16>(TILED_ARGS); }
