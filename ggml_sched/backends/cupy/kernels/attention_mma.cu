// The kernels of attention_mma.cuh, for K and V in f16: lengths and addresses of rows are multiples of 16 bytes.
#include "attention_mma.cuh"

TILED_SIZES(TILED_KERNEL)
