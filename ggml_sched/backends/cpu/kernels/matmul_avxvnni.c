/* matmul_avxvnni.c -- matrix products with AVX2, FMA, F16C and the dot product of bytes (AVX-VNNI). */
#include "call.h"

#if GS_HAS_AVXVNNI
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
#define WIDE 0
#define VNNI 1
#define FLOATS gs_product_avx2
#include "matmul_x86.h"

const gs_product_kernels gs_product_avxvnni = {PANEL, few_columns, STRIP_COLUMNS, strip_order_of, JOINS_ROWS,
    EVENS_FIRST, FEW_ROWS, offset_of, quantize, few, many, scratch_of, few_bands, few_interleaved, many_interleaved};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int gs_no_avxvnni; /* C has no empty files */
#endif
