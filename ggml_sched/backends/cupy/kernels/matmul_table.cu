// matmul.cuh for types whose levels are looked up in a table: iq4_nl iq4_xs mxfp4.
#include "matmul.cuh"

TABLE_PACKED(MANY_BLOCKS)
TABLE_OTHERS(MANY_BLOCKS)
