// mma.cuh for blocks of 256 elements whose scales are quantised, too: q2_K to q6_K.
#include "mma.cuh"

K_PACKED(TENSOR_KERNELS)
K_OTHERS(TENSOR_KERNELS)
