// matmul.cuh for levels from a table: iq4_nl iq4_xs mxfp4.
#include "matmul.cuh"

extern "C" __global__ void __launch_bounds__(256) iq4_nl(TILED) { many<IQ4_NL>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) exact_iq4_nl(TILED) { many_exact<IQ4_NL>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) iq4_xs(TILED) { many<IQ4_XS>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) exact_iq4_xs(TILED) { many_exact<IQ4_XS>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) mxfp4(TILED) { many<MXFP4>(TILED_ARGS); }
extern "C" __global__ void __launch_bounds__(256) exact_mxfp4(TILED) { many_exact<MXFP4>(TILED_ARGS); }
