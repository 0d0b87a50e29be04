/* matmul_portable.c -- matrix products in portable C, for every processor; compilers vectorise the loops.
 *
 * A row of weights is decoded once, to integers and scales (quantised types) or to f32 (float types), and then
 * multiplied with all columns of its group.
 */
#include <math.h>
#include <string.h>

#include "floats.h"
#include "product.h"

#define LANES 16

/* Adding this number to a value rounds it to the nearest integer, ties to even: the sum has no bits for a fraction. */
#define ROUNDER 12582912.0f /* 1.5 * 2^23 */

static int32_t few_columns(const gs_block_kind *kind) {
    (void)kind;
    return GS_FEW_Q;
}

static int32_t no_strips(const gs_block_kind *kind, int64_t steps) {
    (void)kind, (void)steps;
    return 0;
}

static int32_t no_offset(const gs_block_kind *kind) {
    (void)kind;
    return 0;
}

static void quantize(const float *x, int32_t offset, gs_cell_q *cell) {
    uint32_t most = 0;
    int32_t low = 0, high = 0;
    for (int i = 0; i < 32; i++) {
        uint32_t size = gs_bits_of_f32(x[i]) & 0x7fffffffu;
        most = size > most ? size : most;
    }
    memset(cell, 0, sizeof(*cell));
    if (most >= 0x7f800000u) { /* an element is inf or NaN */
        cell->d = cell->sum_low = cell->sum_high = cell->sum_both = NAN;
        return;
    }
    if (most < GS_LEAST_BITS)
        return;
    float largest = gs_f32_of_bits(most), inverse = 127.0f / largest;
    for (int i = 0; i < 32; i++) {
        float rounded = x[i] * inverse + ROUNDER;
        cell->q[i] = (int8_t)(gs_bits_of_f32(rounded) - 0x4b400000u);
    }
    for (int i = 0; i < 16; i++) {
        low += cell->q[i];
        high += cell->q[i + 16];
    }
    cell->d = largest / 127.0f;
    cell->low = -offset * low;
    cell->high = -offset * high;
    cell->both = -offset * (low + high);
    cell->sum_low = cell->d * (float)low;
    cell->sum_high = cell->d * (float)high;
    cell->sum_both = cell->d * (float)(low + high);
}

/* The product of a decoded row of quantised weights (integers q, scales s, minima m) and a column, whose first cell is
 * `cell`.  `width`: columns of the tile; the column's next cell is so many cells further on. */
static float dot_q(const gs_product *of, const int8_t *q, const float *s, const float *m, const gs_cell_q *cell,
                   int64_t width) {
    float sum = 0;
    for (int64_t step = 0; step < of->steps; step++, q += 32, cell += width) {
        int32_t low = 0, high = 0;
        for (int i = 0; i < 16; i++)
            low += q[i] * cell->q[i];
        for (int i = 16; i < 32; i++)
            high += q[i] * cell->q[i];
        if (of->kind->group == 32) {
            sum += s[step] * cell->d * (float)(low + high);
            if (of->kind->has_min)
                sum += m[step] * cell->sum_both;
        } else {
            sum += s[2 * step] * cell->d * (float)low + s[2 * step + 1] * cell->d * (float)high;
            if (of->kind->has_min)
                sum += m[2 * step] * cell->sum_low + m[2 * step + 1] * cell->sum_high;
        }
    }
    return sum;
}

static float dot_f(const gs_product *of, const float *w, const char *cell, int64_t width) {
    float sum[LANES] = {0};
    for (int64_t step = 0; step < of->steps; step++, w += LANES, cell += width * GS_CELL)
        for (int i = 0; i < LANES; i++)
            sum[i] += w[i] * ((const float *)cell)[i];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            sum[i] += sum[i + half];
    return sum[0];
}

/* Bytes of scratch for one decoded row: its f32 values or, of a quantised type, all its 8-bit integers, then the
 * scales, then the minima. */
static int64_t room_for_row(const gs_product *of) {
    return of->steps * (of->kind != NULL ? 32 + 4 * (int64_t)sizeof(float) : GS_STEP_F * (int64_t)sizeof(float));
}

static void decode_row(const gs_product *of, const char *row, char *room) {
    if (of->kind == NULL) {
        memset(room + (of->steps - 1) * GS_CELL, 0, GS_CELL);
        gs_dequantize_row(of->type, row, (float *)room, of->k);
        return;
    }
    int8_t *q = (int8_t *)room;
    float *s = (float *)(room + of->k), *m = s + 2 * of->steps;
    int groups = of->kind->elements / of->kind->group;
    for (int64_t i = 0; i < of->k; i += of->kind->elements, row += of->kind->bytes, s += groups, m += groups)
        of->kind->decode((const uint8_t *)row, q + i, s, m);
}

static void many(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1, int64_t column0,
                 int64_t column1, char *scratch) {
    const char *a = gs_weights_of(of, shared, group);
    int64_t columns = gs_columns_of(of, shared, group);
    const float *s = (const float *)(scratch + of->k), *m = s + 2 * of->steps;
    for (int64_t row = row0; row < row1; row++) {
        decode_row(of, a + row * of->node->src[0]->layout.nb[1], scratch);
        for (int64_t column = column0; column < column1; column++) {
            int64_t tile = column / of->tile, width = gs_width_of(of, columns, tile);
            const char *cell = gs_tile_of(of, shared, group, tile) + column % of->tile * GS_CELL;
            gs_result_at(of, shared, group, column)[row] =
                of->kind != NULL ? dot_q(of, (const int8_t *)scratch, s, m, (const gs_cell_q *)cell, width)
                                 : dot_f(of, (const float *)scratch, cell, width);
        }
    }
}

static void few(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1, char *scratch) {
    many(of, shared, group, row0, row1, 0, gs_columns_of(of, shared, group), scratch);
}

const gs_product_kernels gs_product_portable = {16, few_columns, 0, no_strips, 0, 0, 1, no_offset,
                                                quantize, few, many, room_for_row};
