/* folded_q.h -- Q2_K and Q3_K rows times many columns: panels of levels that are multiplied by their integer factors.
 *
 * Included by many_q.h.  These types have an integer factor for each 16 elements, and one scale for the 256 of a block.
 * A level times its factor fits a byte, so a panel holds these products: a dot product is added in integers over the 32
 * elements of a step, not over 16, and is multiplied by one scale, that of the block.
 *
 * For each block of a panel's rows the panel holds the scale of every row; the 16 minima of every row if the type has
 * minima; then the products as bytes: the first four of every row, then the next four of every row, and so on.
 */
#define FOLDED_OFFSET 128       /* what is added to products that may be negative, to make them unsigned */

/* Bytes of the scales and minima of a block of a packed panel. */
INLINE int64_t folded_head(const int type) {
    return 4 * PANEL * (has_min(type) ? 17 : 1);
}

/* The products of a factor (factors_of) and the levels 0 .. 7 (0 .. 3 for Q2_K), a byte each, the first one lowest.
 * Those of Q3_K are negative, -(level - 4) * (factor - 32), because 128 would not fit a byte; FOLDED_OFFSET is added.
 * That is 4 * factor + level * (32 - factor), in 0 .. 252. */
INLINE uint64_t products_of(const int type, uint64_t factor) {
    const uint64_t levels = UINT64_C(0x0706050403020100), each = UINT64_C(0x0101010101010101);
    if (type == GS_TYPE_Q2_K)
        return factor * (levels & 0xffffffffu);
    return factor * (4 * each - levels) + 32 * levels;
}

/* Decodes what all elements of a row's block share: returns its scale, and writes its factors and, if it has any, its
 * minima. */
INLINE float shared_of_block(const int type, const uint8_t *p, uint8_t factors[16], float m[16]) {
    float s[16];
    factors_of(type, p, factors);
    if (has_min(type))
        scales(type, p, s, m);
    return type == GS_TYPE_Q2_K ? half(p + 80) : -half(p + 108);
}

/* Repacks `steps` steps from step0 on of a panel of rows to `panel`.  If only `rows` rows are left, the last one fills
 * the rest of the panel, for which no results are stored. */
INLINE void pack_folded(const int type, const char *a, int64_t stride, int64_t rows, int64_t step0, int64_t steps,
                        char *panel) {
    const int64_t size = bytes_of(type);
    const char *blocks = a + step0 / 8 * size;
    for (int64_t step = 0; step < steps; step += 8, blocks += size, panel += folded_head(type) + 256 * PANEL) {
        uint64_t products[PANEL][16];
        for (int i = 0; i < PANEL; i++) {
            const uint8_t *p = (const uint8_t *)blocks + (i < rows ? i : rows - 1) * stride;
            uint8_t factors[16];
            float m[16], scale = shared_of_block(type, p, factors, m);
            UNROLL for (int line = 0; line < size; line += 64) /* prefetch the next panel */
                PREFETCH_LATER((const char *)p + PANEL * stride + line);
            memcpy(panel + 4 * i, &scale, sizeof(float));
            UNROLL for (int g = 0; g < 16; g++) {
                products[i][g] = products_of(type, factors[g]);
                if (has_min(type))
                    memcpy(panel + 4 * (PANEL * (1 + g) + i), &m[g], sizeof(float));
            }
        }
        for (int i = 0; i < PANEL; i += 8) {
            const uint8_t *p[8];
            for (int r = 0; r < 8; r++)
                p[r] = (const uint8_t *)blocks + (i + r < rows ? i + r : rows - 1) * stride;
            UNROLL for (int j = 0; j < 8; j++) {
                v32 v[8];
                char *to = panel + folded_head(type) + 32 * PANEL * j + 4 * i;
                UNROLL for (int r = 0; r < 8; r++)
                    v[r] = folded(type, p[r], j, &products[i + r][2 * j]);
                transpose(v);
                UNROLL for (int g = 0; g < 8; g++)
                    store32(to + g * 4 * PANEL, v[g]);
            }
        }
    }
}

/* Where the sums of a step's products with a column begin: at minus what FOLDED_OFFSET adds to them.  The cell has
 * minus the sum of the column's integers times the offset of Q3_K's levels, 4. */
INLINE ivec folded_start(const int type, const gs_cell_q *cell) {
    return has_offset(type) ? IVEC_SET1(FOLDED_OFFSET / 4 * cell->both) : IVEC_SET1(0);
}

/* Adds the products of a packed panel with N columns, whose cells begin at y (`width` cells a step), to acc. */
INLINE void tile_folded(const int type, const int N, const char *panel, int64_t steps, const gs_cell_q *y,
                        int64_t width, vec acc[2][TILE_Q]) {
    for (int64_t step = 0; step < steps; step += 8) {
        const float *of_rows = (const float *)panel;    /* the scales, then one minimum after another */
        vec scale[2] = {VEC_LOAD(of_rows), VEC_LOAD(of_rows + ROWS)};
        panel += folded_head(type);
        for (int j = 0; j < 8; j++, y += width) {
            ivec dot[2][TILE_Q];
            UNROLL for (int c = 0; c < N; c++)
                dot[0][c] = dot[1][c] = folded_start(type, &y[c]);
            UNROLL for (int g = 0; g < 8; g++, panel += 4 * PANEL)
                add_group(type, N, panel, y, g, dot);
            UNROLL for (int c = 0; c < N; c++) {
                vec d = VEC_SET1(y[c].d);
                acc[0][c] = VEC_FMA(VEC_OF_INT(dot[0][c]), VEC_MUL(scale[0], d), acc[0][c]);
                acc[1][c] = VEC_FMA(VEC_OF_INT(dot[1][c]), VEC_MUL(scale[1], d), acc[1][c]);
            }
            if (!has_min(type))
                continue;
            UNROLL for (int h = 0; h < 2; h++) {
                of_rows += PANEL;
                vec low[2] = {VEC_LOAD(of_rows), VEC_LOAD(of_rows + ROWS)};
                UNROLL for (int c = 0; c < N; c++) {
                    vec sum = VEC_SET1(h ? y[c].sum_high : y[c].sum_low);
                    acc[0][c] = VEC_FMA(low[0], sum, acc[0][c]);
                    acc[1][c] = VEC_FMA(low[1], sum, acc[1][c]);
                }
            }
        }
    }
}
