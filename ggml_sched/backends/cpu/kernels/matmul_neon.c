/* matmul_neon.c -- matrix products with NEON, which every aarch64 has. */
#if defined(__aarch64__) && defined(__GNUC__)
#define DOTPROD 0
#include "matmul_neon.h"

const gs_product_kernels gs_product_neon = {PANEL, few_columns, STRIP_COLUMNS, strip_order_of, JOINS_ROWS,
    EVENS_FIRST, FEW_ROWS, offset_of, quantize, few, many, scratch_of};
#else
typedef int gs_no_neon; /* C has no empty files */
#endif
