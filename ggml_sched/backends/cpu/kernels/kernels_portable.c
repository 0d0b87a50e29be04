/* kernels_portable.c -- every kernel but matrix products, in portable C: SSE2 on x86, NEON on ARM. */
#define GS_LEVEL 0
#define GS_ENTRY gs_build_portable
#include "kernels.h"
