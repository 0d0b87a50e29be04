// matvec.cuh for blocks of 32: q4_0 q4_1 q5_0 q5_1 q8_0.
// _1, _8: that many columns at most; packed_: rows as repack.py leaves them.
#include "matvec.cuh"

extern "C" __global__ void __launch_bounds__(128, 4) q4_0_1(PRODUCT) { few<Q4_0, false, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) q4_0_8(PRODUCT) { few<Q4_0, false, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) packed_q4_0_1(PRODUCT) { few<Q4_0, true, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) packed_q4_0_8(PRODUCT) { few<Q4_0, true, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) exact_q4_0(PRODUCT) { few_exact<Q4_0>(PRODUCT_ARGS); }

extern "C" __global__ void __launch_bounds__(128, 4) q4_1_1(PRODUCT) { few<Q4_1, false, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) q4_1_8(PRODUCT) { few<Q4_1, false, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) packed_q4_1_1(PRODUCT) { few<Q4_1, true, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) packed_q4_1_8(PRODUCT) { few<Q4_1, true, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) exact_q4_1(PRODUCT) { few_exact<Q4_1>(PRODUCT_ARGS); }

extern "C" __global__ void __launch_bounds__(128, 4) q5_0_1(PRODUCT) { few<Q5_0, false, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) q5_0_8(PRODUCT) { few<Q5_0, false, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) packed_q5_0_1(PRODUCT) { few<Q5_0, true, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) packed_q5_0_8(PRODUCT) { few<Q5_0, true, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) exact_q5_0(PRODUCT) { few_exact<Q5_0>(PRODUCT_ARGS); }

extern "C" __global__ void __launch_bounds__(128, 4) q5_1_1(PRODUCT) { few<Q5_1, false, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) q5_1_8(PRODUCT) { few<Q5_1, false, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) packed_q5_1_1(PRODUCT) { few<Q5_1, true, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) packed_q5_1_8(PRODUCT) { few<Q5_1, true, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) exact_q5_1(PRODUCT) { few_exact<Q5_1>(PRODUCT_ARGS); }

extern "C" __global__ void __launch_bounds__(128, 4) q8_0_1(PRODUCT) { few<Q8_0, false, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) q8_0_8(PRODUCT) { few<Q8_0, false, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) packed_q8_0_1(PRODUCT) { few<Q8_0, true, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) packed_q8_0_8(PRODUCT) { few<Q8_0, true, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) exact_q8_0(PRODUCT) { few_exact<Q8_0>(PRODUCT_ARGS); }
