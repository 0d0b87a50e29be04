// attention.cuh where K and V are f16.
#include "attention.cuh"

#define HALF(NAME, SIZE, COLUMNS) ATTEND(half_##NAME, true, SIZE, COLUMNS)
ATTEND_SIZES(HALF)
