// matvec.cuh for blocks of 256 elements whose scales are quantised, too: q2_K to q6_K.
#include "matvec.cuh"

K_PACKED(FEW_PACKED_BLOCKS)
K_OTHERS(FEW_BLOCKS)
