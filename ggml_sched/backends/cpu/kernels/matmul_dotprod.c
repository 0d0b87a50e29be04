/* matmul_dotprod.c -- matrix products with NEON and the dot product of bytes (FEAT_DotProd). */
#if defined(__aarch64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define DOTPROD 1
#define FLOATS gs_product_neon
#include "matmul_neon.h"

const gs_product_kernels gs_product_dotprod = {PANEL, few_columns, STRIP_COLUMNS, strip_order_of, JOINS_ROWS,
    EVENS_FIRST, FEW_ROWS, offset_of, quantize, few, many, scratch_of};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int gs_no_dotprod; /* C has no empty files */
#endif
