// mma.cuh for blocks of 32 elements with one scale: q4_0 q4_1 q5_0 q5_1 q8_0.
#include "mma.cuh"

PLAIN_PACKED(TENSOR_KERNELS)
