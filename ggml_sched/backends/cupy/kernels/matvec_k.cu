// matvec.cuh for blocks of 256 with scales of scales: q2_K to q6_K.
// _1, _8: that many columns at most; packed_: rows as repack.py leaves them.
#include "matvec.cuh"

extern "C" __global__ void __launch_bounds__(128, 4) q2_k_1(PRODUCT) { few<Q2_K, false, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) q2_k_8(PRODUCT) { few<Q2_K, false, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) packed_q2_k_1(PRODUCT) { few<Q2_K, true, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) packed_q2_k_8(PRODUCT) { few<Q2_K, true, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) exact_q2_k(PRODUCT) { few_exact<Q2_K>(PRODUCT_ARGS); }

extern "C" __global__ void __launch_bounds__(128, 4) q3_k_1(PRODUCT) { few<Q3_K, false, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) q3_k_8(PRODUCT) { few<Q3_K, false, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) packed_q3_k_1(PRODUCT) { few<Q3_K, true, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) packed_q3_k_8(PRODUCT) { few<Q3_K, true, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) exact_q3_k(PRODUCT) { few_exact<Q3_K>(PRODUCT_ARGS); }

extern "C" __global__ void __launch_bounds__(128, 4) q4_k_1(PRODUCT) { few<Q4_K, false, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) q4_k_8(PRODUCT) { few<Q4_K, false, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) exact_q4_k(PRODUCT) { few_exact<Q4_K>(PRODUCT_ARGS); }

extern "C" __global__ void __launch_bounds__(128, 4) q5_k_1(PRODUCT) { few<Q5_K, false, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) q5_k_8(PRODUCT) { few<Q5_K, false, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) exact_q5_k(PRODUCT) { few_exact<Q5_K>(PRODUCT_ARGS); }

extern "C" __global__ void __launch_bounds__(128, 4) q6_k_1(PRODUCT) { few<Q6_K, false, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) q6_k_8(PRODUCT) { few<Q6_K, false, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) packed_q6_k_1(PRODUCT) { few<Q6_K, true, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) packed_q6_k_8(PRODUCT) { few<Q6_K, true, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) exact_q6_k(PRODUCT) { few_exact<Q6_K>(PRODUCT_ARGS); }
