// matvec.cuh for types without blocks: f32 f16 bf16.
#include "matvec.cuh"

FEW_PLAIN(f32, F32)
FEW_PLAIN(f16, F16)
FEW_PLAIN(bf16, BF16)
