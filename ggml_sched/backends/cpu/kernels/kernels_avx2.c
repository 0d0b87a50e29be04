/* kernels_avx2.c -- every kernel but matrix products, for AVX2, FMA and F16C. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define GS_LEVEL 1
#define GS_ENTRY gs_build_avx2
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int gs_no_avx2_here;
#endif
