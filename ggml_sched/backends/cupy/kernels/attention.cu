// The kernels of attention.cuh for K and V in f16, aligned for wide loads.
#include "attention.cuh"

#define HALF(NAME, SIZE, COLUMNS) ATTEND(half_##NAME, true, SIZE, COLUMNS)
ATTEND_SIZES(HALF)
