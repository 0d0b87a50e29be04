/* few_f.h -- weights of f32, f16 and bf16 times at most GS_FEW_F columns: one row of weights at a time.
 *
 * Included by product_loops.h.
 */
INLINE void add_step(const int type, const int N, const int at, const char *w, const float *y, vec acc[][4]) {
    const int element = type == GS_TYPE_F32 ? 4 : 2, n_acc = N == 1 ? 4 : 2;
    UNROLL for (int h = 0; h < STEP_VECS; h++) {
        vec v = VEC_WEIGHTS(type, w + h * LANES * element);
        UNROLL for (int c = 0; c < N; c++) {
            vec *sum = &acc[c][(at * STEP_VECS + h) % n_acc];
            *sum = VEC_FMA(v, VEC_LOAD(y + c * 16 + h * LANES), *sum);
        }
    }
}

/* Multiplies rows row0 .. row1 - 1 with N columns from `column` on.  The group has `width` columns, all in one tile. */
INLINE void few_f(const int type, const int N, const gs_product *of, const char *shared, int64_t group, int64_t row0,
                  int64_t row1, int64_t column, int64_t width) {
    const int element = type == GS_TYPE_F32 ? 4 : 2, n_acc = N == 1 ? 4 : 2, together = 4;
    const char *a = gs_weights_of(of, shared, group);
    const float *cells = (const float *)gs_tile_of(of, shared, group, 0) + 16 * column;
    int64_t stride = of->node->src[0]->layout.nb[1], whole = of->k / 16, rest = of->k % 16;
    float *out[4];
    for (int c = 0; c < N; c++)
        out[c] = gs_result_at(of, shared, group, column + c);
    for (int64_t row = row0; row < row1; row++) {
        const char *p = a + row * stride;
        const float *y = cells;
        vec acc[4][4];
        int64_t b = 0;
        UNROLL for (int c = 0; c < N; c++)
            UNROLL for (int i = 0; i < n_acc; i++)
                acc[c][i] = VEC_ZERO;
        for (; b + together <= whole; b += together) {
            UNROLL for (int line = 0; line < 16 * element * together; line += 64)
                PREFETCH_STREAM(p + line);
            UNROLL for (int u = 0; u < together; u++, p += 16 * element, y += 16 * width)
                add_step(type, N, u, p, y, acc);
        }
        for (; b < whole; b++, p += 16 * element, y += 16 * width)
            add_step(type, N, 0, p, y, acc);
        if (rest) {
            char room[16 * sizeof(float)] = {0};
            memcpy(room, p, (size_t)rest * element);
            add_step(type, N, 0, room, y, acc);
        }
        UNROLL for (int c = 0; c < N; c++) {
            vec sum = VEC_ADD(acc[c][0], acc[c][1]);
            if (n_acc == 4)
                sum = VEC_ADD(sum, VEC_ADD(acc[c][2], acc[c][3]));
            out[c][row] = VEC_TOTAL(sum);
        }
    }
}

/* At most four columns have registers for their sums.  With more columns, eight rows are taken at a time, so that they
 * are still in the cache when the next four columns are multiplied with them. */
#define FEW_F(TYPE, type) \
    static void few_##type(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1) { \
        int64_t columns = gs_columns_of(of, shared, group), some = columns <= 4 ? row1 - row0 : 8; \
        for (int64_t row = row0; row < row1; row += some) { \
            int64_t end = row1 - row < some ? row1 : row + some, c = 0; \
            for (; c + 4 <= columns; c += 4) \
                few_f(GS_TYPE_##TYPE, 4, of, shared, group, row, end, c, columns); \
            switch (columns - c) { \
            case 3: few_f(GS_TYPE_##TYPE, 3, of, shared, group, row, end, c, columns); break; \
            case 2: few_f(GS_TYPE_##TYPE, 2, of, shared, group, row, end, c, columns); break; \
            case 1: few_f(GS_TYPE_##TYPE, 1, of, shared, group, row, end, c, columns); break; \
            default: break; \
            } \
        } \
    }

FEW_F(F32, f32)
FEW_F(F16, f16)
FEW_F(BF16, bf16)
