// attention_mma.cuh: K and V are f16, and their rows multiples of 16 bytes, at such addresses.
#include "attention_mma.cuh"

TILED_SIZES(TILED_KERNEL)
