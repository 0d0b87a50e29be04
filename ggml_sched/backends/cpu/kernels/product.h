/* product.h -- the data of a matrix product, shared by the builders (matmul.c) and the kernels of each ISA.
 *
 * A product consists of groups.  A group is one matrix of weights and the columns (rows of b) to multiply with it: for
 * MUL_MAT those of all batches that share the matrix, for MUL_MAT_ID those of the tokens that chose this expert.
 *
 * Columns are first converted to cells of 64 bytes, a cell for each 32 (quantised weights) or 16 (others) elements of
 * k.  Columns of a group form tiles of GS_TILE_Q or GS_TILE_F (the last one narrower), whose cells stand next to each
 * other for each step of k:
 *
 *     tile 0                                     tile 1
 *     step 0: c0 c1 .. | step 1: c0 c1 .. | ..   step 0: ...
 *
 * Rows of weights are taken a panel at a time; a panel is a row range and all the columns of a group, or a range.
 */
#ifndef GGML_SCHED_KERNELS_PRODUCT_H
#define GGML_SCHED_KERNELS_PRODUCT_H

#include <stdint.h>
#include "blocks.h"
#include "call.h"

#define GS_CELL 64
#define GS_TILE_Q 6
#define GS_TILE_F 12
#define GS_FEW_Q 2             /* so many columns are multiplied row by row, without repacking the weights: */
#define GS_FEW_F 12            /* never more than a tile                                                    */
#define GS_STEP_Q 32           /* elements of a cell                                                        */
#define GS_STEP_F 16
#define GS_LEAST_BITS 0x03800000u /* 2^-120: a block with nothing above it is zero, as 127 / x must stay finite */

/* 32 activations as 8-bit integers: x = d * q.  low, high and both are -offset * (sum of q) over the first, the second
 * half and all, where `offset` is what the kernel adds to the weights' levels to make them unsigned; sum_* is d times
 * such a sum, for minima.  A block that holds inf or NaN has d and sums NaN and q zero. */
typedef struct gs_cell_q {
    int8_t q[32];
    int32_t low, both;
    float d, sum_low;
    int32_t high;
    float sum_both, sum_high;
    int32_t unused;
} gs_cell_q;

/* The same for quantised weights that meet few columns, eight steps at a time: what belongs to neighbouring steps lies
 * side by side.  d and sum have a place for each scale of the weights, 8 or 16; sum is what the weights' minima, or
 * -offset times their scales, are multiplied by.  Beyond k stand zeros. */
#define GS_STRIP_STEPS 8

typedef struct gs_strip {
    int8_t q[32 * GS_STRIP_STEPS];
    float d[2 * GS_STRIP_STEPS];
    float sum[2 * GS_STRIP_STEPS];
} gs_strip;

typedef struct gs_product gs_product;

/* The kernels of one instruction set. */
typedef struct gs_product_kernels {
    int32_t panel;              /* rows that are repacked together where there are many columns */
    int32_t strips;             /* whether few columns of quantised weights come in strips       */
    int32_t (*offset)(const gs_block_kind *kind);
    /* One cell of 32 elements. */
    void (*quantize)(const float *x, int32_t offset, gs_cell_q *cell);
    /* Rows row0 .. row1 - 1 of a group's weights times its columns. */
    void (*few)(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1,
                char *scratch);
    void (*many)(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1, int64_t column0,
                 int64_t column1, char *scratch);
    int64_t (*scratch)(const gs_product *of);
} gs_product_kernels;

struct gs_product {
    const gs_node *node;
    const gs_product_kernels *kernels;
    const gs_block_kind *kind;  /* NULL: f32, f16, bf16 */
    int32_t type;
    int64_t k, m;
    int64_t steps;              /* cells of a column                                     */
    int64_t column_bytes;       /* of a column of activations, in cells or in strips     */
    int64_t tile;               /* columns of a tile                                     */
    int64_t few;                /* so many columns are few                               */
    int64_t groups;             /* MUL_MAT_ID: at most so many experts are chosen        */
    int64_t columns;            /* of a group; MUL_MAT_ID: of all groups together        */
    int64_t r2, r3;             /* MUL_MAT: matrices of b that share one of a            */
    int64_t cells;              /* offset in `shared`: where the cells begin             */
    int64_t row_step;           /* rows of an item of work                               */
    int64_t row_items;          /* such items of a group                                 */
    int64_t column_step;        /* columns of an item, all or a multiple of the tile     */
    int64_t column_items;
    int64_t together;           /* items of a part                                       */
    int64_t prepared;           /* columns that a part of the first call prepares        */
};

/* MUL_MAT_ID: which (token, slot) pairs go through which expert; lies at the beginning of `shared`, followed by
 * expert[groups], start[groups + 1] (both of chosen experts, in ascending order) and pair[columns]. */
typedef struct gs_chosen {
    int64_t n_experts;
} gs_chosen;

extern const gs_product_kernels gs_product_portable;
#if defined(__x86_64__) && defined(__GNUC__)
extern const gs_product_kernels gs_product_avx2;
extern const gs_product_kernels gs_product_avx512;
#endif

static inline int gs_is_id(const gs_product *of) {
    return of->node->op == GS_OP_MUL_MAT_ID;
}

static inline const int32_t *gs_experts(const char *shared) {
    return (const int32_t *)(shared + sizeof(gs_chosen));
}

static inline const int32_t *gs_starts(const gs_product *of, const char *shared) {
    return gs_experts(shared) + of->groups;
}

static inline const int32_t *gs_pairs(const gs_product *of, const char *shared) {
    return gs_starts(of, shared) + of->groups + 1;
}

static inline int64_t gs_columns_of(const gs_product *of, const char *shared, int64_t group) {
    if (!gs_is_id(of))
        return of->columns;
    if (group >= ((const gs_chosen *)shared)->n_experts)
        return 0;
    return gs_starts(of, shared)[group + 1] - gs_starts(of, shared)[group];
}

static inline const char *gs_weights_of(const gs_product *of, const char *shared, int64_t group) {
    const gs_node *a = of->node->src[0];
    const char *data = a->data;
    if (gs_is_id(of))
        return data + gs_experts(shared)[group] * a->layout.nb[2];
    return data + group % a->layout.ne[2] * a->layout.nb[2] + group / a->layout.ne[2] * a->layout.nb[3];
}

/* Where the cells of a tile begin. */
static inline char *gs_tile_of(const gs_product *of, const char *shared, int64_t group, int64_t tile) {
    int64_t before = gs_is_id(of) ? gs_starts(of, shared)[group] : group * of->columns;
    return (char *)(uintptr_t)shared + of->cells + (before + tile * of->tile) * of->column_bytes;
}

/* A column in strips. */
static inline gs_strip *gs_strips_of(const gs_product *of, const char *shared, int64_t group, int64_t column) {
    return (gs_strip *)(gs_tile_of(of, shared, group, 0) + column * of->column_bytes);
}

static inline int64_t gs_width_of(const gs_product *of, int64_t columns, int64_t tile) {
    int64_t left = columns - tile * of->tile;
    return left < of->tile ? left : of->tile;
}

/* Where the column's values are (in_b) or go to (in the result otherwise). */
static inline char *gs_column_at(const gs_product *of, const char *shared, int64_t group, int64_t column, int in_b) {
    const gs_layout *layout = in_b ? &of->node->src[1]->layout : &of->node->layout;
    char *data = in_b ? of->node->src[1]->data : of->node->data;
    if (gs_is_id(of)) {
        int64_t pair = gs_pairs(of, shared)[gs_starts(of, shared)[group] + column], used = of->node->layout.ne[1];
        int64_t slot = pair % used;
        return data + (in_b ? slot % layout->ne[1] : slot) * layout->nb[1] + pair / used * layout->nb[2];
    }
    int64_t n = layout->ne[1], n2 = of->node->src[0]->layout.ne[2];
    int64_t i2 = group % n2 * of->r2, i3 = group / n2 * of->r3;
    if (column >= n) {
        int64_t matrix = column / n;
        column -= matrix * n;
        i2 += matrix % of->r2;
        i3 += matrix / of->r2;
    }
    return data + column * layout->nb[1] + i2 * layout->nb[2] + i3 * layout->nb[3];
}

static inline float *gs_result_at(const gs_product *of, const char *shared, int64_t group, int64_t column) {
    return (float *)gs_column_at(of, shared, group, column, 0);
}

#endif
