// attention.cuh where K or V are of another type: f32, bf16, q8_0, q4_0, or f16 whose strides forbid wide loads.
#include "attention.cuh"

#define ANY(NAME, SIZE, COLUMNS) ATTEND(any_##NAME, false, SIZE, COLUMNS)
ATTEND_SIZES(ANY)
