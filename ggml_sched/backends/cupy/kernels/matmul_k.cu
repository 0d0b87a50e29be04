// matmul.cuh for blocks of 256 with scales of scales: q2_K to q6_K.
#include "matmul.cuh"

K_PACKED(MANY_BLOCKS)
K_OTHERS(MANY_BLOCKS)
