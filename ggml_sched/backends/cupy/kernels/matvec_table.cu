// matvec.cuh for types whose levels are looked up in a table: iq4_nl iq4_xs mxfp4.
#include "matvec.cuh"

TABLE_PACKED(FEW_PACKED_BLOCKS)
TABLE_OTHERS(FEW_BLOCKS)
