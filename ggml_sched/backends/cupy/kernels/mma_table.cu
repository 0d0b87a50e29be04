// mma.cuh for types whose levels are looked up in a table: iq4_nl iq4_xs mxfp4.
#include "mma.cuh"

TABLE_PACKED(TENSOR_KERNELS)
TABLE_OTHERS(TENSOR_KERNELS)
