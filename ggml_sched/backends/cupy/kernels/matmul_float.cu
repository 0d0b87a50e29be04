// matmul.cuh for types without blocks: f32 f16 bf16.
#include "matmul.cuh"

MANY_KERNEL(f32, many_exact<F32>)
MANY_KERNEL(f16, many_exact<F16>)
MANY_KERNEL(bf16, many_exact<BF16>)
