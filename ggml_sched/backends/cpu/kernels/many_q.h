/* many_q.h -- quantised rows times many columns.
 *
 * Included by product_loops.h.  A panel of rows is repacked so that one vector holds elements at the same k of
 * neighbouring rows; the panel is then multiplied with tiles of columns.  Products of the 32 elements of a step (of 16,
 * for types with two scales, unless they are folded) are summed in integers, exactly; each such sum is then scaled and
 * added in f32.
 */
/* Whether the levels of a type are multiplied by their factors before they are packed (folded_q.h). */
INLINE int folds(const int type) {
    return FOLDS && (type == GS_TYPE_Q2_K || type == GS_TYPE_Q3_K);
}

/* Bytes of a step (32 elements of k) of a packed panel.  For each of the step's scales it holds: the scale of every
 * row, the minimum of every row if the type has minima, then the levels: the first four of every row, then the next
 * four of every row, and so on. */
INLINE int64_t step_bytes(const int type) {
    return PANEL * (32 + 4 * halves_of(type) * (1 + has_min(type)));
}

/* Repacks `steps` steps from step0 on of a panel of rows to `panel`.  If only `rows` rows are left, the last one fills
 * the rest of the panel, for which no results are stored. */
INLINE void pack_q(const int type, const char *a, int64_t stride, int64_t rows, int64_t step0, int64_t steps,
                   char *panel) {
    const int units = units_of(type), halves = halves_of(type), n_scales = units * halves;
    const int64_t half_bytes = step_bytes(type) / halves, head = 4 * PANEL * (1 + has_min(type));
    for (int64_t step = 0; step < steps; step += units, panel += units * step_bytes(type)) {
        const int64_t at = (step0 + step) / units * bytes_of(type);
        const char *block = a + at;
        for (int i = 0; i < PANEL; i++) {
            const uint8_t *p = (const uint8_t *)block + (i < rows ? i : rows - 1) * stride;
            if (bytes_of(type) >= 64 || at % 64 < bytes_of(type)) /* prefetch the next panel, each cache line once */
                UNROLL for (int line = 0; line < bytes_of(type); line += 64)
                    PREFETCH_LATER((const char *)p + PANEL * stride + line);
            float s[16], m[16];
            scales(type, p, s, m);
            UNROLL for (int g = 0; g < n_scales; g++) {
                memcpy(panel + g * half_bytes + 4 * i, &s[g], sizeof(float));
                if (has_min(type))
                    memcpy(panel + g * half_bytes + 4 * (PANEL + i), &m[g], sizeof(float));
            }
        }
        for (int i = 0; i < PANEL; i += 8) {
            const uint8_t *p[8];
            for (int r = 0; r < 8; r++)
                p[r] = (const uint8_t *)block + (i + r < rows ? i + r : rows - 1) * stride;
            UNROLL for (int j = 0; j < units; j++) {
                v32 v[8];
                char *to = panel + j * step_bytes(type) + head + 4 * i;
                UNROLL for (int r = 0; r < 8; r++)
                    v[r] = lanes(type, p[r], j);
                transpose(v);
                UNROLL for (int g = 0; g < 8; g++)
                    store32(to + (g < 8 / halves ? 0 : head) + g * 4 * PANEL, v[g]);
            }
        }
    }
}

/* Adds the products of a group of four elements, number g of a step, to dot. */
INLINE void add_group(const int type, const int N, const char *panel, const gs_cell_q *y, int g, ivec dot[2][TILE_Q]) {
    ivec w0 = IVEC_LOAD(panel), w1 = IVEC_LOAD(panel + 4 * ROWS);
    UNROLL for (int c = 0; c < N; c++) {
        ivec four = IVEC_SET1((int)gs_load_u32(y[c].q + 4 * g));
        dot[0][c] = dot4_vec(type, dot[0][c], w0, four);
        dot[1][c] = dot4_vec(type, dot[1][c], w1, four);
    }
}

#if SUMS_16
/* Adds the products of in_16_bits(type) groups of four elements, from group g on, to dot; among themselves, in 16
 * bits. */
INLINE void add_groups(const int type, const int N, const char *panel, const gs_cell_q *y, int g,
                       ivec dot[2][TILE_Q]) {
    ivec sum[2][TILE_Q];
    if (is_signed(type)) {
        add_group(type, N, panel, y, g, dot);
        return;
    }
    UNROLL for (int i = 0; i < in_16_bits(type); i++, panel += 4 * PANEL) {
        ivec w0 = IVEC_LOAD(panel), w1 = IVEC_LOAD(panel + 4 * ROWS);
        UNROLL for (int c = 0; c < N; c++) {
            ivec four = IVEC_SET1((int)gs_load_u32(y[c].q + 4 * (g + i))), a = dot2(w0, four), b = dot2(w1, four);
            sum[0][c] = i > 0 ? add_16(sum[0][c], a) : a;
            sum[1][c] = i > 0 ? add_16(sum[1][c], b) : b;
        }
    }
    UNROLL for (int c = 0; c < N; c++) {
        dot[0][c] = add_pairs(dot[0][c], sum[0][c]);
        dot[1][c] = add_pairs(dot[1][c], sum[1][c]);
    }
}
#else
#define in_16_bits(type) 1
#define add_groups add_group
#endif

/* Adds the products of a packed panel with N columns, whose cells begin at y (`width` cells a step), to acc.  `type`
 * need not be the packed type, but must agree with it in the number of scales, in having minima or not, and in having
 * signed levels or not: packed panels of such types are alike. */
INLINE void tile_q(const int type, const int N, const char *panel, int64_t steps, const gs_cell_q *y, int64_t width,
                   vec acc[2][TILE_Q]) {
    const int halves = halves_of(type), groups = 8 / halves;
    for (int64_t step = 0; step < steps; step++, y += width) {
        UNROLL for (int h = 0; h < halves; h++) {
            vec scale[2] = {VEC_LOAD((const float *)panel), VEC_LOAD((const float *)panel + ROWS)};
            vec low[2];
            ivec dot[2][TILE_Q];
            panel += 4 * PANEL;
            if (has_min(type)) {
                low[0] = VEC_LOAD((const float *)panel);
                low[1] = VEC_LOAD((const float *)panel + ROWS);
                panel += 4 * PANEL;
            }
            UNROLL for (int c = 0; c < N; c++)
                dot[0][c] = dot[1][c] = has_offset(type)
                    ? IVEC_SET1(halves == 1 ? y[c].both : h ? y[c].high : y[c].low) : IVEC_SET1(0);
            UNROLL for (int g = 0; g < groups; g += in_16_bits(type), panel += 4 * PANEL * in_16_bits(type))
                add_groups(type, N, panel, y, h * groups + g, dot);
            UNROLL for (int c = 0; c < N; c++) {
                vec d = VEC_SET1(y[c].d), sum;
                acc[0][c] = VEC_FMA(VEC_OF_INT(dot[0][c]), VEC_MUL(scale[0], d), acc[0][c]);
                acc[1][c] = VEC_FMA(VEC_OF_INT(dot[1][c]), VEC_MUL(scale[1], d), acc[1][c]);
                if (has_min(type)) {
                    sum = VEC_SET1(halves == 1 ? y[c].sum_both : h ? y[c].sum_high : y[c].sum_low);
                    acc[0][c] = VEC_FMA(low[0], sum, acc[0][c]);
                    acc[1][c] = VEC_FMA(low[1], sum, acc[1][c]);
                }
            }
        }
    }
}

#include "folded_q.h"

/* The tile of N columns at `out`: its sums begin at what is there if `more`. */
INLINE void run_tile_q(const int type, const int N, const char *panel, int64_t steps, const gs_cell_q *y, int64_t width,
                       float *const out[], int64_t rows, int more) {
    vec acc[2][TILE_Q];
    UNROLL for (int c = 0; c < N; c++) {
        acc[0][c] = more ? load_rows(out[c], rows, 0) : VEC_ZERO;
        acc[1][c] = more ? load_rows(out[c], rows, ROWS) : VEC_ZERO;
    }
    if (folds(type))
        tile_folded(type, N, panel, steps, y, width, acc);
    else
        tile_q(type, N, panel, steps, y, width, acc);
    UNROLL for (int c = 0; c < N; c++) {
        store_rows(out[c], rows, 0, acc[0][c]);
        store_rows(out[c], rows, ROWS, acc[1][c]);
    }
}

#if TILE_Q == 6
#define TILES_Q(type) \
    case 6: run_tile_q(type, 6, panel, steps, y, width, out, rows, more); return; \
    case 5: run_tile_q(type, 5, panel, steps, y, width, out, rows, more); return; \
    case 4: run_tile_q(type, 4, panel, steps, y, width, out, rows, more); return; \
    case 3: run_tile_q(type, 3, panel, steps, y, width, out, rows, more); return; \
    case 2: run_tile_q(type, 2, panel, steps, y, width, out, rows, more); return;
#elif TILE_Q == 3
#define TILES_Q(type) \
    case 3: run_tile_q(type, 3, panel, steps, y, width, out, rows, more); return; \
    case 2: run_tile_q(type, 2, panel, steps, y, width, out, rows, more); return;
#else
#define TILES_Q(type) case 2: run_tile_q(type, 2, panel, steps, y, width, out, rows, more); return;
#endif
#define TILE(name, type) \
    static void name(int64_t n, const char *panel, int64_t steps, const gs_cell_q *y, int64_t width, \
                     float *const out[], int64_t rows, int more) { \
        switch (n) { \
        TILES_Q(type) \
        default: run_tile_q(type, 1, panel, steps, y, width, out, rows, more); \
        } \
    }

TILE(tiles_plain, GS_TYPE_Q4_0)
TILE(tiles_min, GS_TYPE_Q4_K)
TILE(tiles_of_q6_k, GS_TYPE_Q6_K)
TILE(tiles_of_q2_k, GS_TYPE_Q2_K)
TILE(tiles_of_q3_k, GS_TYPE_Q3_K)
TILE(tiles_signed, GS_TYPE_Q8_0)

typedef void (*tiles_fn)(int64_t, const char *, int64_t, const gs_cell_q *, int64_t, float *const[], int64_t, int);

/* The function for panels of a type. */
INLINE tiles_fn tiles_for(const int type) {
    switch (type) {
    case GS_TYPE_Q2_K: return tiles_of_q2_k;
    case GS_TYPE_Q3_K: return tiles_of_q3_k;
    case GS_TYPE_Q6_K: return tiles_of_q6_k;
    default: return has_min(type) ? tiles_min : is_signed(type) ? tiles_signed : tiles_plain;
    }
}

/* Repacks some steps of a panel of rows: pack_q and the like, of one type. */
typedef void (*pack_fn)(const char *a, int64_t stride, int64_t rows, int64_t step0, int64_t steps, char *panel);

/* Multiplies the rows row0 .. row1 - 1 of a group with its columns column0 .. column1 - 1, a panel after the other. */
static void panels_q(const pack_fn pack, const tiles_fn tiles, const gs_product *of, const char *shared, int64_t group,
                     int64_t row0, int64_t row1, int64_t column0, int64_t column1, char *scratch) {
    int64_t stride = of->node->src[0]->layout.nb[1], columns = gs_columns_of(of, shared, group);
    const char *a = gs_weights_of(of, shared, group);
    for (int64_t row = row0; row < row1; row += PANEL) {
        int64_t rows = row1 - row < PANEL ? row1 - row : PANEL;
        for (int64_t step = 0; step < of->steps; step += DEPTH_Q) {
            int64_t steps = of->steps - step < DEPTH_Q ? of->steps - step : DEPTH_Q;
            pack(a + row * stride, stride, rows, step, steps, scratch);
            for (int64_t column = column0; column < column1; column += GS_TILE_Q) {
                int64_t tile = column / GS_TILE_Q, width = gs_width_of(of, columns, tile);
                const gs_cell_q *y = (const gs_cell_q *)gs_tile_of(of, shared, group, tile) + step * width;
                float *out[GS_TILE_Q];
                for (int64_t c = 0; c < width; c++)
                    out[c] = gs_result_at(of, shared, group, column + c) + row;
                for (int64_t c = 0; c < width; c += TILE_Q)
                    tiles(width - c < TILE_Q ? width - c : TILE_Q, scratch, steps, y + c, width, out + c, rows,
                          step > 0);
            }
        }
    }
}

#define MANY_Q(TYPE, type) \
    static void pack_##type(const char *a, int64_t stride, int64_t rows, int64_t step0, int64_t steps, char *panel) { \
        if (folds(GS_TYPE_##TYPE)) \
            pack_folded(GS_TYPE_##TYPE, a, stride, rows, step0, steps, panel); \
        else \
            pack_q(GS_TYPE_##TYPE, a, stride, rows, step0, steps, panel); \
    } \
    static void many_##type(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1, \
                            int64_t column0, int64_t column1, char *scratch) { \
        panels_q(pack_##type, tiles_for(GS_TYPE_##TYPE), of, shared, group, row0, row1, column0, column1, scratch); \
    }

GS_QUANTISED(MANY_Q)
