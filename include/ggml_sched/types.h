/* ggml_sched/types.h -- element types: ggml's numbers and names, and the sizes of their blocks.
 *
 * All code of the package uses this table.  A number never changes its meaning.  Corresponds to ggml's type_traits.
 */
#ifndef GGML_SCHED_TYPES_H
#define GGML_SCHED_TYPES_H

#include <stddef.h>
#include "ggml_sched/structs.h"

/* X(name, number, ggml's name, elements of a block, bytes of a block) */
#define GS_TYPES(X) \
    X(F32, 0, "f32", 1, 4)             \
    X(F16, 1, "f16", 1, 2)             \
    X(Q4_0, 2, "q4_0", 32, 18)         \
    X(Q4_1, 3, "q4_1", 32, 20)         \
    X(Q5_0, 6, "q5_0", 32, 22)         \
    X(Q5_1, 7, "q5_1", 32, 24)         \
    X(Q8_0, 8, "q8_0", 32, 34)         \
    X(Q8_1, 9, "q8_1", 32, 36)         \
    X(Q2_K, 10, "q2_K", 256, 84)       \
    X(Q3_K, 11, "q3_K", 256, 110)      \
    X(Q4_K, 12, "q4_K", 256, 144)      \
    X(Q5_K, 13, "q5_K", 256, 176)      \
    X(Q6_K, 14, "q6_K", 256, 210)      \
    X(Q8_K, 15, "q8_K", 256, 292)      \
    X(IQ2_XXS, 16, "iq2_xxs", 256, 66) \
    X(IQ2_XS, 17, "iq2_xs", 256, 74)   \
    X(IQ3_XXS, 18, "iq3_xxs", 256, 98) \
    X(IQ1_S, 19, "iq1_s", 256, 50)     \
    X(IQ4_NL, 20, "iq4_nl", 32, 18)    \
    X(IQ3_S, 21, "iq3_s", 256, 110)    \
    X(IQ2_S, 22, "iq2_s", 256, 82)     \
    X(IQ4_XS, 23, "iq4_xs", 256, 136)  \
    X(I8, 24, "i8", 1, 1)              \
    X(I16, 25, "i16", 1, 2)            \
    X(I32, 26, "i32", 1, 4)            \
    X(I64, 27, "i64", 1, 8)            \
    X(F64, 28, "f64", 1, 8)            \
    X(IQ1_M, 29, "iq1_m", 256, 56)     \
    X(BF16, 30, "bf16", 1, 2)          \
    X(TQ1_0, 34, "tq1_0", 256, 54)     \
    X(TQ2_0, 35, "tq2_0", 256, 66)     \
    X(MXFP4, 39, "mxfp4", 32, 17)

enum gs_type {
#define GS_X(name, number, called, block, size) GS_TYPE_##name = number,
    GS_TYPES(GS_X)
#undef GS_X
    GS_N_TYPES = 64 /* every number is below it */
};

/* ggml's name of a type, NULL for an unknown number. */
static inline const char *gs_type_name(int type) {
    switch (type) {
#define GS_X(name, number, called, block, size) case number: return called;
    GS_TYPES(GS_X)
#undef GS_X
    default: return NULL;
    }
}

/* Elements and bytes of a block of a type, zeros for an unknown number. */
static inline gs_type_traits gs_traits_of_type(int type) {
    gs_type_traits traits = {0, 0};
    switch (type) {
#define GS_X(name, number, called, block, size) \
    case number: \
        traits.block_size = block; \
        traits.type_size = size; \
        break;
    GS_TYPES(GS_X)
#undef GS_X
    default: break;
    }
    return traits;
}

#endif
