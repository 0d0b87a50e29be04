// matvec.cuh for levels from a table: iq4_nl iq4_xs mxfp4.
// _1, _8: that many columns at most; packed_: rows as repack.py leaves them.
#include "matvec.cuh"

extern "C" __global__ void __launch_bounds__(128, 4) iq4_nl_1(PRODUCT) { few<IQ4_NL, false, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) iq4_nl_8(PRODUCT) { few<IQ4_NL, false, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) packed_iq4_nl_1(PRODUCT) { few<IQ4_NL, true, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) packed_iq4_nl_8(PRODUCT) { few<IQ4_NL, true, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) exact_iq4_nl(PRODUCT) { few_exact<IQ4_NL>(PRODUCT_ARGS); }

extern "C" __global__ void __launch_bounds__(128, 4) iq4_xs_1(PRODUCT) { few<IQ4_XS, false, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) iq4_xs_8(PRODUCT) { few<IQ4_XS, false, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) exact_iq4_xs(PRODUCT) { few_exact<IQ4_XS>(PRODUCT_ARGS); }

extern "C" __global__ void __launch_bounds__(128, 4) mxfp4_1(PRODUCT) { few<MXFP4, false, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) mxfp4_8(PRODUCT) { few<MXFP4, false, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) packed_mxfp4_1(PRODUCT) { few<MXFP4, true, 1>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 3) packed_mxfp4_8(PRODUCT) { few<MXFP4, true, 8>(PRODUCT_ARGS); }
extern "C" __global__ void __launch_bounds__(128, 4) exact_mxfp4(PRODUCT) { few_exact<MXFP4>(PRODUCT_ARGS); }
