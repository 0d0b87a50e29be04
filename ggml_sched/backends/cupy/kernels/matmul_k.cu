// matmul.cuh for blocks of 256 elements whose scales are quantised, too: q2_K to q6_K.
#include "matmul.cuh"

K_PACKED(MANY_BLOCKS)
K_OTHERS(MANY_BLOCKS)
