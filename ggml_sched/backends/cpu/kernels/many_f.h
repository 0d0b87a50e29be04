/* many_f.h -- rows of f32, f16 and bf16 times many columns: panels of rows, as f32, times tiles of columns.
 *
 * Included by product_loops.h.
 */
/* Repacks the k elements from number `from` on of a panel of rows as f32: element 0 of every row, then element 1 of
 * every row, and so on, with zeros up to a multiple of 8 elements.  If only `rows` rows of the panel are left, the last
 * row fills the others. */
INLINE void pack_f(const int type, const char *a, int64_t stride, int64_t rows, int64_t from, int64_t k, float *panel) {
    const int element = type == GS_TYPE_F32 ? 4 : 2;
    for (int64_t at = 0; at < k; at += 8, panel += 8 * PANEL)
        for (int i = 0; i < PANEL; i += 8) {
            v32 v[8];
            for (int r = 0; r < 8; r++) {
                const char *p = a + (i + r < rows ? i + r : rows - 1) * stride + (from + at) * element;
                char room[8 * sizeof(float)] = {0};
                if ((from + at) * element % 64 == 0) /* prefetch the next panel, each cache line once */
                    PREFETCH_LATER(p + PANEL * stride);
                if (k - at < 8) {
                    memcpy(room, p, (size_t)(k - at) * element);
                    p = room;
                }
                v[r] = eight_f(type, p);
            }
            transpose(v);
            for (int g = 0; g < 8; g++)
                store32(panel + g * PANEL + i, v[g]);
        }
}

INLINE void run_tile_f(const int N, const float *panel, int64_t k, const float *y, int64_t width, float *const out[],
                       int64_t rows, int more) {
    vec acc[2][TILE_F];
    UNROLL for (int c = 0; c < N; c++) {
        acc[0][c] = more ? load_rows(out[c], rows, 0) : VEC_ZERO;
        acc[1][c] = more ? load_rows(out[c], rows, ROWS) : VEC_ZERO;
    }
    for (; k > 0; k -= 16, y += 16 * width)
        for (int64_t i = 0; i < (k < 16 ? k : 16); i++, panel += PANEL) {
            vec w0 = VEC_LOAD(panel), w1 = VEC_LOAD(panel + ROWS);
            UNROLL for (int c = 0; c < N; c++) {
                vec one = VEC_SET1(y[16 * c + i]);
                acc[0][c] = VEC_FMA(w0, one, acc[0][c]);
                acc[1][c] = VEC_FMA(w1, one, acc[1][c]);
            }
        }
    UNROLL for (int c = 0; c < N; c++) {
        store_rows(out[c], rows, 0, acc[0][c]);
        store_rows(out[c], rows, ROWS, acc[1][c]);
    }
}

#define TILE_F_OF(n) case n: run_tile_f(n, panel, k, y, width, out, rows, more); return;

static void tiles_f(int64_t n, const float *panel, int64_t k, const float *y, int64_t width, float *const out[],
                    int64_t rows, int more) {
    switch (n) {
#if TILE_F == 12
    TILE_F_OF(12) TILE_F_OF(11) TILE_F_OF(10) TILE_F_OF(9) TILE_F_OF(8) TILE_F_OF(7)
#endif
    TILE_F_OF(6) TILE_F_OF(5) TILE_F_OF(4) TILE_F_OF(3) TILE_F_OF(2)
    default: run_tile_f(1, panel, k, y, width, out, rows, more);
    }
}

INLINE void many_f(const int type, const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1,
                   int64_t column0, int64_t column1, char *scratch) {
    int64_t stride = of->node->src[0]->layout.nb[1], columns = gs_columns_of(of, shared, group);
    const char *a = gs_weights_of(of, shared, group);
    float *panel = (float *)scratch;
    for (int64_t row = row0; row < row1; row += PANEL) {
        int64_t rows = row1 - row < PANEL ? row1 - row : PANEL;
        for (int64_t step = 0; step < of->steps; step += DEPTH_F) {
            int64_t k = of->k - 16 * step < 16 * DEPTH_F ? of->k - 16 * step : 16 * DEPTH_F;
            pack_f(type, a + row * stride, stride, rows, 16 * step, k, panel);
            for (int64_t column = column0; column < column1; column += GS_TILE_F) {
                int64_t tile = column / GS_TILE_F, width = gs_width_of(of, columns, tile);
                const float *y = (const float *)gs_tile_of(of, shared, group, tile) + 16 * step * width;
                float *out[GS_TILE_F];
                for (int64_t c = 0; c < width; c++)
                    out[c] = gs_result_at(of, shared, group, column + c) + row;
                for (int64_t c = 0; c < width; c += TILE_F)
                    tiles_f(width - c < TILE_F ? width - c : TILE_F, panel, k, y + 16 * c, width, out + c, rows,
                            step > 0);
            }
        }
    }
}
