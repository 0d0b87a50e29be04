/* blocks.h -- ggml's element types: the contents of a block, and conversion of rows from f32 to blocks and back.
 *
 * All quantised types decode to the same things: a small signed integer q for each element and, for each group of 16 or
 * 32 neighbouring elements, a scale s and in some types a minimum m.  An element is s * q, or s * q + m, each operation
 * rounded by itself; so decoded rows are bit-equal to those of ggml's dequantize_row_* and of the gguf package.
 * The layouts are ggml's (ggml-common.h).
 */
#ifndef GGML_SCHED_KERNELS_BLOCKS_H
#define GGML_SCHED_KERNELS_BLOCKS_H

#include <stdint.h>
#include "ggml_sched/types.h"

/* The quantised types: X(name in capitals, name). */
#define GS_QUANTISED(X) \
    X(Q4_0, q4_0) X(Q4_1, q4_1) X(Q5_0, q5_0) X(Q5_1, q5_1) X(Q8_0, q8_0) X(Q2_K, q2_k) X(Q3_K, q3_k) X(Q4_K, q4_k) \
    X(Q5_K, q5_k) X(Q6_K, q6_k) X(IQ4_NL, iq4_nl) X(IQ4_XS, iq4_xs) X(MXFP4, mxfp4)

#define GS_MAX_BLOCK 256       /* elements of the largest block */
#define GS_MAX_GROUPS 16       /* most groups of a block        */

typedef struct gs_block_kind {
    int32_t type;              /* enum gs_type                                        */
    int32_t elements;          /* of a block: 32 or 256                               */
    int32_t bytes;             /* of a block                                          */
    int32_t group;             /* elements that share a scale: 16 or 32               */
    int32_t has_min;           /* whether each group has a minimum m                  */
    int32_t offset;            /* to make q unsigned: q + offset is in 0 .. 255       */
    /* Decodes one block to q[elements], s[elements / group] and, where has_min, m[elements / group]. */
    void (*decode)(const uint8_t *block, int8_t *q, float *s, float *m);
} gs_block_kind;

/* The description of a quantised type's blocks; NULL for any other type. */
const gs_block_kind *gs_block_kind_of(int type);

/* The integers q that 4-bit indices stand for: gs_iq4_levels in iq4_nl and iq4_xs, gs_mxfp4_levels in mxfp4 (the values
 * of e2m1, doubled). */
extern const int8_t gs_iq4_levels[16];
extern const int8_t gs_mxfp4_levels[16];

/* The scale of an mxfp4 block with exponent byte e: half of 2^(e - 127), because gs_mxfp4_levels are doubled. */
float gs_scale_of_e8m0(uint8_t e);

/* Decodes n elements of a row of `type` to f32; n is a multiple of the block's elements.  Returns 0, or -1 if `type` is
 * neither f32, f16, bf16 nor one of the quantised types above. */
int gs_dequantize_row(int type, const void *src, float *dst, int64_t n);

/* Converts n elements of f32 to `type`: q8_0, q4_0, q4_1, q5_0 or q5_1, rounded like ggml's reference.  Returns 0, or
 * -1 for another type. */
int gs_quantize_row(int type, const float *src, void *dst, int64_t n);

#endif
