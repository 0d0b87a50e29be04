// matvec.cuh for levels from a table: iq4_nl iq4_xs mxfp4.
#include "matvec.cuh"

TABLE_PACKED(FEW_PACKED_BLOCKS)
TABLE_OTHERS(FEW_BLOCKS)
