// matvec.cuh for plain types: f32 f16 bf16.  _1, _8: that many columns at most.
#include "matvec.cuh"

extern "C" __global__ void __launch_bounds__(128, 4) f32_1(PRODUCT) { few_plain<F32, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) f32_8(PRODUCT) { few_plain<F32, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) f16_1(PRODUCT) { few_plain<F16, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) f16_8(PRODUCT) { few_plain<F16, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) bf16_1(PRODUCT) { few_plain<BF16, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) bf16_8(PRODUCT) { few_plain<BF16, 8>(PRODUCT_ARGS); }
