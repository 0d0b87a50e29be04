/* interleave.h -- interleaved rows of quantised weights: the form that kernels read fastest.
 *
 * A band is GS_BAND neighbouring rows.  An interleaved band has the bytes of these rows, block by block and field by
 * field: each field of all rows, row after row.  So a vector has the same field of neighbouring rows, and each of its
 * lanes gives the result of one row: nothing is gathered, and no sum is taken over a vector.  The head of a block is
 * its fields of one or two bytes: scales and minima that are f16, or MXFP4's exponent.  The heads of one, two or four
 * blocks (gs_head_group) come together, in 64 bytes, before the other fields of these blocks, so that those are
 * aligned.
 *
 * The fields of four bytes are levels of four elements, or four integer scales.  Single bits of levels, eight to a
 * byte, are stored in another order than in a block, so that one shift by a constant gives those of four elements:
 *   Q5_0 and Q5_1, 4 bytes    bit i of byte k is that of element 4 i + k;
 *   Q3_K and Q5_K, 32 bytes   in a block, bit j of byte i is that of element i of step j (32 elements).  Here byte i,
 *                             for i < 16, has the bits of steps 0 to 3: those of element i in its lower half, those of
 *                             element 16 + i in its upper half.  Byte 16 + i has the bits of steps 4 to 7 likewise.
 */
#ifndef GGML_SCHED_KERNELS_INTERLEAVE_H
#define GGML_SCHED_KERNELS_INTERLEAVE_H

#include <stdint.h>

#define GS_BAND 16

/* How many blocks have their heads together, with heads of so many bytes; the last ones of a row may be fewer. */
static inline int gs_head_group(int head_bytes) {
    return 4 / head_bytes;
}

/* Of Q3_K and Q5_K the integer scales come first, then, for each half of the block, its fields with lower bits of
 * levels and its four with upper ones: which of those of a half number n is.  They come in the order in which kernels
 * read them, because processors read ahead in one direction. */
static inline int gs_place_of_lower(int n) {
    return n < 4 ? 2 * n : n + 4;
}

static inline int gs_place_of_upper(int n) {
    return 2 * n + 1;
}

/* Whether there are kernels here for interleaved rows of a type. */
int gs_interleaves(int type);

/* Interleaves `rows` rows of `row_bytes` bytes each, which follow one another at `from`, to `to`; `rows` is a multiple
 * of GS_BAND, and row_bytes one of the type's blocks. */
void gs_interleave(int type, const char *from, int64_t rows, int64_t row_bytes, char *to);

#endif
