/* matmul_avx512.c -- matrix products with AVX-512 (F, BW, DQ, VL) and VNNI. */
#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif
#define WIDE 1
#define VNNI 1
#include "matmul_x86.h"

const gs_product_kernels gs_product_avx512 = {PANEL, few_columns, STRIP_COLUMNS, strip_order_of, JOINS_ROWS,
    EVENS_FIRST, FEW_ROWS, offset_of, quantize, few, many, scratch_of, few_bands, few_interleaved, many_interleaved};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int gs_no_avx512; /* C has no empty files */
#endif
