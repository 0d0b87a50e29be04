/* side_q.h -- quantised weights times a few columns, at most most_columns(type): rows side by side.
 *
 * Included by product_loops.h.  A vector has the levels of neighbouring elements of SIDE rows, of each row the same
 * number.  A step (32 elements) is LEVELS such vectors; their products are added in integers, then scaled once for all
 * rows.  Blocks are decoded once for all columns, and not stored.  A single column meets a row at a time (few_q.h)
 * where that is faster (takes_strips).
 */
#define SIDE_TILES ((GS_SIDE_Q + GS_TILE_Q - 1) / GS_TILE_Q)     /* most tiles of columns */

/* Blocks of neighbouring rows: where those of rows 0 and 8 begin, and multiples of the distance of two rows.  All
 * addresses are sums of two of these six, so that compilers keep them in registers. */
typedef struct side_rows {
    const uint8_t *at[2];
    int64_t one, three, five, seven;
} side_rows;

INLINE side_rows rows_from(const char *at, int64_t stride) {
    side_rows p = {{(const uint8_t *)at, (const uint8_t *)at + 8 * stride}, stride, 3 * stride, 5 * stride, 7 * stride};
    __asm__("" : "+r"(p.three), "+r"(p.five), "+r"(p.seven), "+r"(p.at[1]));     /* not to be computed again */
    return p;
}

/* Byte number n of the block of row r. */
INLINE const uint8_t *byte_of(const side_rows *p, const int r, const int64_t n) {
    const int i = r % 8;
    return p->at[r / 8] + n + (i == 3 ? p->three : i == 5 ? p->five : i == 6 ? 2 * p->three : i == 7 ? p->seven
                               : i * p->one);
}

/* How many steps are straight code: of a block of 256 elements half, whose other half repeats it with other bytes. */
INLINE int straight_steps(const int type) {
    return units_of(type) == 8 ? 4 : 1;
}

/* Whether the sums of a step's halves are scaled and added in integers, as one sum for f32: where they fit 16 bits, the
 * levels of left_of included.  Those of Q3_K are at most 16 * 4 * 127 * 4 = 32512. */
INLINE int scales_halves_together(const int type) {
    return WIDE && (type == GS_TYPE_Q2_K || type == GS_TYPE_Q3_K);
}

/* By how many bits the levels of a step are shifted to the left.  Levels of odd steps stay two bits higher than they
 * need be where that saves shifts: those of step 1 need none, those of step 3 the one of step 2.  The scale is divided
 * by the factor 4. */
INLINE int left_of(const int type, const int j) {
    return scales_halves_together(type) ? j % 2 * 2 : 0;
}

#if WIDE
#include "avx512_side_q.h"
#else
#include "avx2_side_q.h"
#endif

/* -- levels -------------------------------------------------------------------------------------------------------- */

/* Shifted to the left, or to the right where `left` is negative: bits of neighbouring bytes follow. */
INLINE ivec shifted(ivec v, const int left) {
    return left > 0 ? IVEC_LEFT(v, left) : left < 0 ? IVEC_RIGHT(v, -left) : v;
}

/* The levels that 16 indices stand for, in each 128 bits. */
INLINE ivec table_of(const int type) {
    const int8_t *table = type == GS_TYPE_MXFP4 ? gs_mxfp4_levels : gs_iq4_levels;
    const int offset = is_signed(type) ? 0 : type == GS_TYPE_MXFP4 ? 12 : 128;
    return IVEC_SET1_128(_mm_add_epi8(_mm_loadu_si128((const __m128i *)table), _mm_set1_epi8((char)offset)));
}

/* Whether a block has 32 bytes with one bit of each step, the lowest of the first. */
INLINE int has_bits_of_steps(const int type) {
    return type == GS_TYPE_Q3_K || type == GS_TYPE_Q5_K;
}

/* The levels of step first + j of the rows' blocks, in the order of elements; `first` is a multiple of
 * straight_steps(type).  `bits`: the bytes with one bit of each step (has_bits_of_steps), shifted so
 * that the lowest is that of step `first`. */
INLINE void levels_of(const int type, const side_rows *p, const int64_t first, const int j, const ivec *bits,
                      ivec v[LEVELS]) {
    ivec high[LEVELS];
    switch (type) {
    case GS_TYPE_Q8_0:
        gather_32(p, 2, v);
        UNROLL for (int i = 0; i < LEVELS; i++)
            v[i] = is_signed(type) ? v[i] : IVEC_XOR(v[i], IVEC_SET1_8(128));
        return;
    case GS_TYPE_Q2_K: case GS_TYPE_Q3_K:
        gather_32(p, (type == GS_TYPE_Q2_K ? 16 : 32) + 8 * first, v);
        UNROLL for (int i = 0; i < LEVELS; i++)
            v[i] = IVEC_AND(shifted(v[i], left_of(type, j) - 2 * j), IVEC_SET1_8(3 << left_of(type, j)));
        break;
    case GS_TYPE_Q4_K: case GS_TYPE_Q5_K:
        gather_32(p, (type == GS_TYPE_Q4_K ? 16 : 48) + 16 * first + j / 2 * 32, v);
        UNROLL for (int i = 0; i < LEVELS; i++)
            v[i] = IVEC_AND(shifted(v[i], -(j % 2 * 4)), IVEC_SET1_8(15));
        break;
    case GS_TYPE_Q6_K:
        gather_32(p, 16 * first + j % 2 * 32, v);
        UNROLL for (int i = 0; i < LEVELS; i++)
            v[i] = IVEC_AND(shifted(v[i], -(j / 2 * 4)), IVEC_SET1_8(15));
        break;
    default:
        gather(p, type == GS_TYPE_IQ4_XS ? 8 + 16 * (first + j) : bytes_of(type) - 16, v);
        UNROLL for (int i = 0; i < LEVELS / 2; i++) {
            v[i + LEVELS / 2] = IVEC_AND(IVEC_RIGHT(v[i], 4), IVEC_SET1_8(15));
            v[i] = IVEC_AND(v[i], IVEC_SET1_8(15));
        }
    }
    switch (type) {
    case GS_TYPE_Q5_0: add_fifths(p, 2, v); return;
    case GS_TYPE_Q5_1: add_fifths(p, 4, v); return;
    case GS_TYPE_IQ4_NL: case GS_TYPE_IQ4_XS: case GS_TYPE_MXFP4:
        UNROLL for (int i = 0; i < LEVELS; i++)
            v[i] = IVEC_SHUFFLE(table_of(type), v[i]);
        return;
    case GS_TYPE_Q3_K: case GS_TYPE_Q5_K: {
        const int place = (type == GS_TYPE_Q3_K ? 2 : 4) + left_of(type, j);
        UNROLL for (int i = 0; i < LEVELS; i++)
            v[i] = IVEC_OR_AND(v[i], shifted(bits[i], place - j), IVEC_SET1_8(1 << place));
        return;
    }
    case GS_TYPE_Q6_K:
        gather_32(p, 128 + 8 * first, high);
        UNROLL for (int i = 0; i < LEVELS; i++)
            v[i] = IVEC_OR_AND(v[i], shifted(high[i], 4 - 2 * j), IVEC_SET1_8(48));
    }
}

/* The scales of step first + j, half by half if there are two, and its minima, without the minus of types with 256
 * elements in a block. */
INLINE void scales_of_step(const int type, const side_rows *p, int64_t first, const int j, const side_scales *of,
                           vec s[2], vec m[2]) {
    switch (type) {
    case GS_TYPE_Q4_1: case GS_TYPE_Q5_1: s[0] = first_halves(p, m); return;
    case GS_TYPE_MXFP4: s[0] = powers_of_rows(p); return;
    case GS_TYPE_Q4_0: case GS_TYPE_Q5_0: case GS_TYPE_Q8_0: case GS_TYPE_IQ4_NL: s[0] = first_half(p); return;
    }
    UNROLL for (int h = 0; h < halves_of(type); h++) {
        s[h] = block_scale(type, of, first, j * halves_of(type) + h);
        if (has_min(type))
            m[h] = block_minimum(type, of, first, j * halves_of(type) + h);
    }
}

/* -- products ------------------------------------------------------------------------------------------------------ */

/* The most columns: with AVX2 fewer. */
INLINE int most_columns(const int type) {
    return WIDE ? GS_SIDE_Q : units_of(type) == 8 ? 8 : 12;
}

/* Whether a function for N columns is compiled: for one column where not all rows are multiplied one by one; for types
 * with 256 elements in a block nine and ten columns are multiplied as twelve, and so on. */
INLINE int is_compiled(const int type, const int N) {
    return N <= most_columns(type) && (N > 1 || !takes_strips(type, 1))
        && (units_of(type) == 1 || (N != 10 && N != 14));
}

/* Adds the products of step from + j with N columns to acc.  The cells of each tile of columns are at y.  Column `last`
 * and those after it, of which there are at most `beyond`, are read as column `last`. */
INLINE void side_step(const int type, const int N, const int beyond, int64_t last,
                      const gs_cell_q *const y[SIDE_TILES], const ivec v[LEVELS], const side_rows *p, int64_t from,
                      const int j, const side_scales *of, vec acc[]) {
    const int halves = halves_of(type);
    vec s[2], m[2];
    if (!scales_halves_together(type))
        scales_of_step(type, p, from, j, of, s, m);
    UNROLL for (int first = 0; first < N; first += TOGETHER) {
        const int n = N - first < TOGETHER ? N - first : TOGETHER;
        const gs_cell_q *cell[TOGETHER];
        UNROLL for (int i = 0; i < n; i++) {
            const int c = first + i, tile = c / GS_TILE_Q;
            cell[i] = y[tile] + ((c < N - beyond || c < last ? c : last) - GS_TILE_Q * tile);
        }
#if WIDE
        if (scales_halves_together(type)) {
            add_halves_of(type, n, cell, v, of, from, j, acc + first);
            continue;
        }
#endif
        UNROLL for (int h = 0; h < halves; h++) {
            ivec dot[TOGETHER];
            dots(type, n, cell, h, v + LEVELS / 2 * h, dot);
            UNROLL for (int i = 0; i < n; i++) {
                vec *sum = &acc[first + i];
                *sum = VEC_FMA(VEC_OF_INT(dot[i]), VEC_MUL(s[h], VEC_SET1(cell[i]->d)), *sum);
                if (has_min(type)) {
                    vec both = VEC_SET1(halves == 1 ? cell[i]->sum_both : h ? cell[i]->sum_high : cell[i]->sum_low);
                    *sum = units_of(type) == 8 ? VEC_FNMA(m[h], both, *sum) : VEC_FMA(m[h], both, *sum);
                }
            }
        }
    }
}

/* Multiplies with all columns of a group, of which there are at most N, and few less: those beyond the last repeat it,
 * and are not stored. */
INLINE void side_q(const int type, const int N, const gs_product *of, const char *shared, int64_t group, int64_t row0,
                   int64_t row1) {
    const int units = units_of(type), size = bytes_of(type), part = SIDE * size / units;
    const int straight = straight_steps(type);
    int n_steps = units;                        /* of a block; not known to compilers, which would unroll the loop */
    if (straight < units)
        __asm__("" : "+r"(n_steps));
    const int beyond = N <= 4 ? 0 : is_compiled(type, N - 2) ? 1 : 3;       /* how many at most */
    const int64_t columns = N > 4 ? gs_columns_of(of, shared, group) : N;
    const int tiles = (N + GS_TILE_Q - 1) / GS_TILE_Q;
    const gs_cell_q *begin[SIDE_TILES];
    int64_t width[SIDE_TILES];
    const char *a = gs_weights_of(of, shared, group);
    int64_t stride = of->node->src[0]->layout.nb[1];
    float *out[GS_SIDE_Q];
    for (int64_t c = 0; c < columns; c++)
        out[c] = gs_result_at(of, shared, group, c);
    UNROLL for (int t = 0; t < tiles; t++) {
        begin[t] = (const gs_cell_q *)gs_tile_of(of, shared, group, t);
        width[t] = gs_width_of(of, columns, t);
    }
    /* Where the last rows are fewer than SIDE, some before them are computed again, and not stored; of a matrix of
     * fewer rows each one alone. */
    const int64_t apart = row1 < SIDE ? 0 : stride, rows = row1 < SIDE ? 1 : SIDE;
    for (int64_t row = row0; row < row1; row += rows) {
        const int64_t first = row1 - row < rows ? row1 - rows : row;
        const gs_cell_q *y[SIDE_TILES];
        const char *ahead = a + (row + SIDE) * stride;
        side_rows p = rows_from(a + first * stride, apart);
        vec acc[GS_SIDE_Q];
        UNROLL for (int c = 0; c < N; c++)
            acc[c] = VEC_ZERO;
        UNROLL for (int t = 0; t < tiles; t++)
            y[t] = begin[t];
        for (int64_t step = 0; step < of->steps; step += units) {
            side_scales held;
            ivec bits[LEVELS];
            if (units == 8)
                begin_block(type, &p, &held);
            if (has_bits_of_steps(type))
                gather_32(&p, type == GS_TYPE_Q3_K ? 0 : 16, bits);
            for (int64_t k = 0; k < n_steps; k += straight) {
                UNROLL for (int j = 0; j < straight; j++) {
                    ivec v[LEVELS];
                    UNROLL for (int line = 0; line < part; line += 64) {
                        PREFETCH_LATER(ahead + AHEAD + line);
                        PREFETCH(ahead + line);
                    }
                    levels_of(type, &p, k, j, bits, v);
                    side_step(type, N, beyond, columns - 1, y, v, &p, k, j, &held, acc);
                    UNROLL for (int t = 0; t < tiles; t++)
                        y[t] += width[t];
                    ahead += part;
                }
                if (has_bits_of_steps(type))
                    UNROLL for (int i = 0; i < LEVELS; i++)
                        bits[i] = IVEC_RIGHT(bits[i], straight);
            }
            p.at[0] += size;
            p.at[1] += size;
        }
        UNROLL for (int c = 0; c < N; c++)
            if (c < columns)
                store_side(out[c] + first, row - first, rows, acc[c]);
    }
}

static int32_t few_columns(const gs_block_kind *kind) {
    return most_columns(kind->type);
}

/* One column, of which the product has strips. */
INLINE void strips_q(const int type, const gs_product *of, const char *shared, int64_t group, int64_t row0,
                     int64_t row1) {
#if JOINS_ROWS
    if (units_of(type) == 1 && of->strip_rows > 1) {
        joined_q(type, of, shared, group, row0, row1);
        return;
    }
#endif
    few_q(type, 1, of, shared, group, row0, row1);
}

/* A function for each number of columns: compilers need longer for one with all of them.  Seven columns take as long
 * as eight would, and so on. */
#define SIDE_Q(TYPE, type, N) \
    __attribute__((noinline)) static void side_##type##_##N(const gs_product *of, const char *shared, int64_t group, \
                                                            int64_t row0, int64_t row1) { \
        if (is_compiled(GS_TYPE_##TYPE, N)) \
            side_q(GS_TYPE_##TYPE, N, of, shared, group, row0, row1); \
    }
#define FEW_Q(TYPE, type) \
    SIDE_Q(TYPE, type, 1) SIDE_Q(TYPE, type, 2) SIDE_Q(TYPE, type, 3) SIDE_Q(TYPE, type, 4) SIDE_Q(TYPE, type, 6) \
    SIDE_Q(TYPE, type, 8) SIDE_Q(TYPE, type, 10) SIDE_Q(TYPE, type, 12) SIDE_Q(TYPE, type, 14) SIDE_Q(TYPE, type, 16) \
    static void few_##type(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1) { \
        switch (gs_columns_of(of, shared, group)) { \
        case 1: \
            if (of->strip_order > 0 && takes_strips(GS_TYPE_##TYPE, GS_STRIP_STEPS)) \
                strips_q(GS_TYPE_##TYPE, of, shared, group, row0, row1); \
            else \
                side_##type##_1(of, shared, group, row0, row1); \
            return; \
        case 2: side_##type##_2(of, shared, group, row0, row1); return; \
        case 3: side_##type##_3(of, shared, group, row0, row1); return; \
        case 4: side_##type##_4(of, shared, group, row0, row1); return; \
        case 5: case 6: side_##type##_6(of, shared, group, row0, row1); return; \
        case 7: case 8: side_##type##_8(of, shared, group, row0, row1); return; \
        case 9: case 10: \
            if (is_compiled(GS_TYPE_##TYPE, 10)) { \
                side_##type##_10(of, shared, group, row0, row1); \
                return; \
            } /* fallthrough */ \
        case 11: case 12: side_##type##_12(of, shared, group, row0, row1); return; \
        case 13: case 14: \
            if (is_compiled(GS_TYPE_##TYPE, 14)) { \
                side_##type##_14(of, shared, group, row0, row1); \
                return; \
            } /* fallthrough */ \
        default: side_##type##_16(of, shared, group, row0, row1); \
        } \
    }

GS_QUANTISED(FEW_Q)
