/* matmul_avx2.c -- matrix products with AVX2, FMA and F16C. */
#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define WIDE 0
#define VNNI 0
#include "matmul_x86.h"

const gs_product_kernels gs_product_avx2 = {PANEL, few_columns, STRIP_COLUMNS, strip_order_of, JOINS_ROWS,
    EVENS_FIRST, FEW_ROWS, offset_of, quantize, few, many, scratch_of, few_bands, few_interleaved, many_interleaved};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int gs_no_avx2; /* C has no empty files */
#endif
