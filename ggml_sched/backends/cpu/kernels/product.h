/* product.h -- the data of a matrix product, shared by the builders (matmul.c) and the kernels of each ISA.
 *
 * Source 0 (a) has m rows of weights, source 1 (b) rows of activations, here called columns; both are k elements long.
 * A product consists of groups.  A group is one matrix of weights and the columns to multiply with it: for
 * MUL_MAT those of all batches that share the matrix, for MUL_MAT_ID those of the tokens that chose this expert.
 *
 * Columns are first converted to activation cells of 64 bytes.  A cell holds one step along k: 32 elements of a column
 * where the weights are quantised, else 16.  The columns of a group form tiles of GS_TILE_Q or GS_TILE_F columns (the
 * last one may be narrower), which kernels multiply together; so for each step the cells of a tile are neighbours:
 *
 *     tile 0                                     tile 1
 *     step 0: c0 c1 .. | step 1: c0 c1 .. | ..   step 0: ...
 *
 * Kernels for many columns repack the rows of weights a panel at a time: a panel is 8, 16 or 32 neighbouring rows.
 */
#ifndef GGML_SCHED_KERNELS_PRODUCT_H
#define GGML_SCHED_KERNELS_PRODUCT_H

#include <stdint.h>
#include "blocks.h"
#include "call.h"
#include "interleave.h"

#define GS_CELL 64
#define GS_TILE_Q 6
#define GS_TILE_F 12
#define GS_FEW_Q 4             /* most columns with which quantised weights are multiplied row by row */
#define GS_SIDE_Q 16           /* most columns with which rows of them are multiplied side by side, not by panels */
#define GS_SIDE_ROWS 16        /* most rows side by side */
#define GS_FEW_F 16            /* most columns with which float weights are not repacked: that would take longer   */
#define GS_STEP_Q 32           /* elements of a cell that meets quantised weights                                 */
#define GS_STEP_F 16           /* elements of a cell that meets float weights                                    */
#define GS_LEAST_BITS 0x03800000u /* 2^-120: cells of smaller values become zero, so that 127 / largest is finite */

/* An activation cell of 32 elements, as 8-bit integers: x = d * q.  Kernels add `offset` to the integers of weights, to
 * make them unsigned.  To take off what this adds to a product, the sum of products begins at -offset * (sum of q):
 * `low` for the first 16 elements, `high` for the second 16, `both` for all 32.  sum_low, sum_high and sum_both are d *
 * (sum of q), by which the minima of weights are multiplied.  If an element is inf or NaN, all q are 0, and d and these
 * three are NaN.  Where matmul_x86.h makes cells for an offset of 0, `both` has the sums of q instead: that of the
 * first 16 in its lower 16 bits, that of the others in its upper ones (add_halves_of). */
typedef struct gs_cell_q {
    int8_t q[32];
    int32_t both, zero;         /* read as one number by kernels that have two lanes for a row */
    int32_t low, high;
    float d, sum_low, sum_high, sum_both;
} gs_cell_q;

/* Eight steps of a column, in the form that kernels for few columns and quantised weights read: one vector holds the
 * scales of all eight steps.  d and sum have an element for each scale of the weights in these steps, 8 or 16.  `sum`
 * is multiplied by the weights' minima; for a type without minima, it includes the factor -offset and is multiplied by
 * the weights' scales.  Their order is that of the steps, or of each eight scales first those with even numbers
 * (`evens_first`).  A column is repeated for each of `strip_rows` rows; where that is no whole number of strips, the
 * last one has zeros, too (`joins_rows`).  The order of q is of n steps the first 16 elements each, then the others,
 * and so for the next n steps; n is the product's `strip_order`, 1, 2 or 4. */
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
    /* The most columns of these weights for `few`, at most GS_SIDE_Q. */
    int32_t (*few_columns)(const gs_block_kind *kind);
    /* Of at most so many columns, at most GS_FEW_Q, `few` takes strips where `strip_order` is not 0; else cells. */
    int32_t strip_columns;
    /* The order of these strips, for rows, or joined rows, of `steps` steps; 0: `few` takes none. */
    int32_t (*strip_order)(const gs_block_kind *kind, int64_t steps);
    /* What `few` does where `steps` is no multiple of eight.  0: the last strip of a row begins with the steps that are
     * left.  1: rows that follow one another may be joined, so that a strip may have steps of two (`strip_rows`); where
     * they are not, the steps that are left are the last ones of a strip, after zeros in place of steps that are in the
     * strip before, too. */
    int32_t joins_rows;
    /* Whether of each eight scales of a strip those with even numbers come first. */
    int32_t evens_first;
    int32_t few_rows;           /* rows that meet a strip together */
    /* What the kernels add to a type's integers to make them unsigned; 0 where they multiply signed ones. */
    int32_t (*offset)(const gs_block_kind *kind);
    /* Makes the cell of 32 f32 activations. */
    void (*quantize)(const float *x, int32_t offset, gs_cell_q *cell);
    /* `few` and `many` compute rows row0 .. row1 - 1 of the result of a group: `few` in all columns of the group,
     * `many` in its columns column0 .. column1 - 1. */
    void (*few)(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1,
                char *scratch);
    void (*many)(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1, int64_t column0,
                 int64_t column1, char *scratch);
    int64_t (*scratch)(const gs_product *of);   /* bytes of scratch that `few` and `many` need  */
    /* The same for interleaved rows (interleave.h); row0 and row1 are multiples of GS_BAND.  few_bands: the most
     * columns of these weights for `few_interleaved`, which takes cells; 0: they are not interleaved.  NULL: none are.
     */
    int32_t (*few_bands)(const gs_block_kind *kind);
    void (*few_interleaved)(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1,
                            char *scratch);
    void (*many_interleaved)(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1,
                             int64_t column0, int64_t column1, char *scratch);
} gs_product_kernels;

struct gs_product {
    const gs_node *node;
    const gs_product_kernels *kernels;
    const gs_block_kind *kind;  /* of the weights; NULL: f32, f16, bf16 */
    int32_t type;               /* of the weights                                        */
    int32_t is_interleaved;     /* whether `weights` are                                 */
    const char *weights;        /* source 0, or its interleaved form                     */
    int64_t k, m;               /* length of a row of weights, and their number          */
    int32_t strip_order;        /* the order of strips, for a group of few columns; 0: none */
    int32_t strip_rows;         /* rows that are joined: together they are whole strips; 1: none are */
    int32_t reads_ahead;        /* gs_reads_ahead                                        */
    int64_t steps;              /* activation cells of a column                          */
    int64_t column_bytes;       /* bytes of a converted column, enough for `steps` cells or for its strips (gs_strip) */
    int64_t tile;               /* columns of a tile                                     */
    int64_t few;                /* the most columns of a group for the kernel `few`      */
    int64_t groups;             /* how many groups; MUL_MAT_ID: the most experts that can be chosen */
    int64_t columns;            /* columns of a group; MUL_MAT_ID, whose groups differ: of all groups together */
    int64_t r2, r3;             /* MUL_MAT: how many matrices of b share one of a, along dimensions 2 and 3 */
    int64_t cells;              /* offset in `shared`: where converted columns begin     */
    int64_t row_step;           /* rows of weights in an item of work (matmul.c)         */
    int64_t row_items;          /* how many ranges of row_step rows a group has          */
    int64_t column_step;        /* columns of an item of work: all, or a multiple of `tile` */
    int64_t column_items;       /* how many ranges of column_step columns a group has    */
    int64_t together;           /* how many items of work a part computes                */
    int64_t prepared;           /* columns that a part of the call `prepare` converts    */
    int32_t n_parts;            /* parts of the call `multiply` that compute this product */
    gs_product *next;           /* the product that the next parts of the same call compute; NULL: none */
};

/* MUL_MAT_ID: the pairs of a token and one of the experts that it chose, sorted by expert.  The pair of a token and
 * expert i of those that it chose has the number token * (experts for each token) + i.  This struct is at the beginning
 * of `shared`, before int32 arrays: expert[groups], the ids of the experts that were chosen, ascending;
 * start[groups + 1], where the pairs of each expert begin in `pair`; and pair[columns], the numbers of pairs. */
typedef struct gs_chosen {
    int64_t n_experts;
} gs_chosen;

extern const gs_product_kernels gs_product_portable;
#if defined(__x86_64__) && defined(__GNUC__)
extern const gs_product_kernels gs_product_avx2;
extern const gs_product_kernels gs_product_avxvnni;
extern const gs_product_kernels gs_product_avx512;
#elif defined(__aarch64__) && defined(__GNUC__)
extern const gs_product_kernels gs_product_neon;
extern const gs_product_kernels gs_product_dotprod;
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
    if (gs_is_id(of))
        return of->weights + gs_experts(shared)[group] * a->layout.nb[2];
    return of->weights + group % a->layout.ne[2] * a->layout.nb[2] + group / a->layout.ne[2] * a->layout.nb[3];
}

/* Whether the converted columns of a product depend on the memory that `node` writes (matmul.c). */
int gs_columns_depend_on(const gs_product *of, const gs_node *node);

/* Where the activation cells of a tile of a group begin. */
static inline char *gs_tile_of(const gs_product *of, const char *shared, int64_t group, int64_t tile) {
    int64_t before = gs_is_id(of) ? gs_starts(of, shared)[group] : group * of->columns;
    return (char *)(uintptr_t)shared + of->cells + (before + tile * of->tile) * of->column_bytes;
}

/* The strips of a column, for kernels that take strips. */
static inline gs_strip *gs_strips_of(const gs_product *of, const char *shared, int64_t group, int64_t column) {
    return (gs_strip *)(gs_tile_of(of, shared, group, 0) + column * of->column_bytes);
}

static inline int64_t gs_width_of(const gs_product *of, int64_t columns, int64_t tile) {
    int64_t left = columns - tile * of->tile;
    return left < of->tile ? left : of->tile;
}

/* Where the elements of a column of a group begin: in b if in_b, else in the result. */
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
