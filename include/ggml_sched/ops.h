/* ggml_sched/ops.h -- the ops that a graph may hold: stable numbers, ggml's names, in-place rules.
 *
 * A number never changes its meaning, and new ops get new numbers.  The list has all ops of ggml, also those that no
 * backend of this package computes, so that any graph can be planned.  UNARY and GLU are families with sub-ops: the
 * number of such an op is the family's plus the sub-op's, and its name has the form "UNARY:SILU".
 */
#ifndef GGML_SCHED_OPS_H
#define GGML_SCHED_OPS_H

#include <stddef.h>

/* In-place rules: the generations of ggml that compute an op in place. */
#define GS_INPLACE_FIRST 1 /* the first generation, and every later one */
#define GS_INPLACE_LATER 2 /* only later generations                    */

/* clang-format off */

/* X(name, number, in-place rule) */
#define GS_OPS(X) \
    X(NONE, 0, 0)                          \
    X(VIEW, 1, 0)                          \
    X(RESHAPE, 2, 0)                       \
    X(PERMUTE, 3, 0)                       \
    X(TRANSPOSE, 4, 0)                     \
    X(SCALE, 5, GS_INPLACE_FIRST)          \
    X(DIAG_MASK_ZERO, 6, GS_INPLACE_FIRST) \
    X(DIAG_MASK_INF, 7, GS_INPLACE_FIRST)  \
    X(ADD, 8, GS_INPLACE_FIRST)            \
    X(ADD1, 9, GS_INPLACE_FIRST)           \
    X(SUB, 10, GS_INPLACE_FIRST)           \
    X(MUL, 11, GS_INPLACE_FIRST)           \
    X(DIV, 12, GS_INPLACE_FIRST)           \
    X(SQR, 13, GS_INPLACE_FIRST)           \
    X(SQRT, 14, GS_INPLACE_FIRST)          \
    X(LOG, 15, GS_INPLACE_FIRST)           \
    X(ROPE, 16, GS_INPLACE_FIRST)          \
    X(RMS_NORM, 17, GS_INPLACE_FIRST)      \
    X(SOFT_MAX, 18, GS_INPLACE_FIRST)      \
    X(FILL, 19, GS_INPLACE_LATER)          \
    X(ADD_ID, 20, GS_INPLACE_LATER)        \
    X(ROPE_BACK, 21, GS_INPLACE_LATER)     \
    X(SILU_BACK, 22, GS_INPLACE_LATER)     \
    X(RMS_NORM_BACK, 23, GS_INPLACE_LATER) \
    X(CLAMP, 24, GS_INPLACE_LATER)         \
    X(SOFT_MAX_BACK, 25, GS_INPLACE_LATER) \
    X(DUP, 26, 0)                          \
    X(ACC, 27, 0)                          \
    X(SUM, 28, 0)                          \
    X(SUM_ROWS, 29, 0)                     \
    X(CUMSUM, 30, 0)                       \
    X(MEAN, 31, 0)                         \
    X(ARGMAX, 32, 0)                       \
    X(COUNT_EQUAL, 33, 0)                  \
    X(REPEAT, 34, 0)                       \
    X(REPEAT_BACK, 35, 0)                  \
    X(CONCAT, 36, 0)                       \
    X(NORM, 37, 0)                         \
    X(GROUP_NORM, 38, 0)                   \
    X(L2_NORM, 39, 0)                      \
    X(MUL_MAT, 40, 0)                      \
    X(MUL_MAT_ID, 41, 0)                   \
    X(OUT_PROD, 42, 0)                     \
    X(SET, 43, 0)                          \
    X(CPY, 44, 0)                          \
    X(CONT, 45, 0)                         \
    X(GET_ROWS, 46, 0)                     \
    X(GET_ROWS_BACK, 47, 0)                \
    X(SET_ROWS, 48, 0)                     \
    X(DIAG, 49, 0)                         \
    X(SIN, 50, 0)                          \
    X(COS, 51, 0)                          \
    X(CONV_TRANSPOSE_1D, 52, 0)            \
    X(IM2COL, 53, 0)                       \
    X(IM2COL_BACK, 54, 0)                  \
    X(IM2COL_3D, 55, 0)                    \
    X(CONV_2D, 56, 0)                      \
    X(CONV_3D, 57, 0)                      \
    X(CONV_2D_DW, 58, 0)                   \
    X(CONV_TRANSPOSE_2D, 59, 0)            \
    X(POOL_1D, 60, 0)                      \
    X(POOL_2D, 61, 0)                      \
    X(POOL_2D_BACK, 62, 0)                 \
    X(UPSCALE, 63, 0)                      \
    X(PAD, 64, 0)                          \
    X(PAD_REFLECT_1D, 65, 0)               \
    X(ROLL, 66, 0)                         \
    X(ARANGE, 67, 0)                       \
    X(TIMESTEP_EMBEDDING, 68, 0)           \
    X(ARGSORT, 69, 0)                      \
    X(TOP_K, 70, 0)                        \
    X(LEAKY_RELU, 71, 0)                   \
    X(TRI, 72, 0)                          \
    X(FLASH_ATTN_EXT, 73, 0)               \
    X(FLASH_ATTN_BACK, 74, 0)              \
    X(SSM_CONV, 75, 0)                     \
    X(SSM_SCAN, 76, 0)                     \
    X(WIN_PART, 77, 0)                     \
    X(WIN_UNPART, 78, 0)                   \
    X(GET_REL_POS, 79, 0)                  \
    X(ADD_REL_POS, 80, 0)                  \
    X(RWKV_WKV6, 81, 0)                    \
    X(GATED_LINEAR_ATTN, 82, 0)            \
    X(RWKV_WKV7, 83, 0)                    \
    X(SOLVE_TRI, 84, 0)                    \
    X(GATED_DELTA_NET, 85, 0)              \
    X(MAP_CUSTOM1, 86, 0)                  \
    X(MAP_CUSTOM2, 87, 0)                  \
    X(MAP_CUSTOM3, 88, 0)                  \
    X(CUSTOM, 89, 0)                       \
    X(CROSS_ENTROPY_LOSS, 90, 0)           \
    X(CROSS_ENTROPY_LOSS_BACK, 91, 0)      \
    X(OPT_STEP_ADAMW, 92, 0)               \
    X(OPT_STEP_SGD, 93, 0)

/* X(name, sub-op) */
#define GS_UNARY_OPS(X) \
    X(ABS, 0)          \
    X(SGN, 1)          \
    X(NEG, 2)          \
    X(STEP, 3)         \
    X(TANH, 4)         \
    X(ELU, 5)          \
    X(RELU, 6)         \
    X(SIGMOID, 7)      \
    X(GELU, 8)         \
    X(GELU_QUICK, 9)   \
    X(SILU, 10)        \
    X(HARDSWISH, 11)   \
    X(HARDSIGMOID, 12) \
    X(EXP, 13)         \
    X(GELU_ERF, 14)    \
    X(XIELU, 15)       \
    X(FLOOR, 16)       \
    X(CEIL, 17)        \
    X(ROUND, 18)       \
    X(TRUNC, 19)       \
    X(EXPM1, 20)       \
    X(SOFTPLUS, 21)

#define GS_GLU_OPS(X) \
    X(REGLU, 0)       \
    X(GEGLU, 1)       \
    X(SWIGLU, 2)      \
    X(SWIGLU_OAI, 3)  \
    X(GEGLU_ERF, 4)   \
    X(GEGLU_QUICK, 5)

/* clang-format on */

enum gs_op {
#define GS_X(name, number, inplace) GS_OP_##name = number,
    GS_OPS(GS_X)
#undef GS_X
    GS_OP_UNARY = 128,
    GS_OP_GLU = 192,
    GS_N_OPS = 256 /* every number is below it */
};

enum gs_unary_op {
#define GS_X(name, number) GS_UNARY_##name = number,
    GS_UNARY_OPS(GS_X)
#undef GS_X
    GS_N_UNARY_OPS
};

enum gs_glu_op {
#define GS_X(name, number) GS_GLU_##name = number,
    GS_GLU_OPS(GS_X)
#undef GS_X
    GS_N_GLU_OPS
};

/* ggml's name of an op, NULL for an unknown number. */
static inline const char *gs_op_name(int op) {
    switch (op) {
#define GS_X(name, number, inplace) case number: return #name;
    GS_OPS(GS_X)
#undef GS_X
#define GS_X(name, number) case GS_OP_UNARY + number: return "UNARY:" #name;
    GS_UNARY_OPS(GS_X)
#undef GS_X
#define GS_X(name, number) case GS_OP_GLU + number: return "GLU:" #name;
    GS_GLU_OPS(GS_X)
#undef GS_X
    default: return NULL;
    }
}

/* The in-place rule of an op: GS_INPLACE_*, or 0 for an op that ggml never computes in place. */
static inline int gs_op_inplace(int op) {
    switch (op) {
#define GS_X(name, number, inplace) case number: return inplace;
    GS_OPS(GS_X)
#undef GS_X
    default: return op >= GS_OP_UNARY && op < GS_OP_UNARY + GS_N_UNARY_OPS ? GS_INPLACE_FIRST : 0;
    }
}

/* The family of an op that has sub-ops (GS_OP_UNARY, GS_OP_GLU); any other op itself. */
static inline int gs_op_family(int op) {
    return op >= GS_OP_GLU ? GS_OP_GLU : op >= GS_OP_UNARY ? GS_OP_UNARY : op;
}

#endif
