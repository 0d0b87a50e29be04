// The kernels of attention.cuh for K or V in another type (f32, bf16, q8_0, q4_0), or f16 not aligned for wide loads.
#include "attention.cuh"

#define ANY(NAME, SIZE, COLUMNS) ATTEND(any_##NAME, false, SIZE, COLUMNS)
ATTEND_SIZES(ANY)
