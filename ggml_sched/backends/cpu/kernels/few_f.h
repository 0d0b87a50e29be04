/* few_f.h -- weights of f32, f16 and bf16 times at most GS_FEW_F columns, without repacking them.
 *
 * Included by product_loops.h.  Up to four columns that fit into L1 are multiplied with one row of weights at a time:
 * memory is then read in one stream.  With others a few rows are taken together, because reading the columns again for
 * each row would take longer than multiplying.
 */
#define SUMS_F (2 * TILE_F)    /* sums, each a vector, for which there are registers            */
#define MOST_BESIDE 4          /* rows that are taken together                                  */
#define COLUMN_BYTES 32768     /* of columns that stay in L1 while rows are multiplied with them */

/* Some columns of a tile. */
typedef struct columns_f {
    const float *cells;         /* of 16 elements; those of the next 16 come 16 * width floats later */
    int64_t width;              /* how many columns the whole tile has */
    float *out[GS_TILE_F];      /* the results */
} columns_f;

/* The columns from number `column` of a tile on. */
INLINE columns_f columns_from(const gs_product *of, const char *shared, int64_t group, int64_t tile, int64_t column) {
    columns_f y = {(const float *)gs_tile_of(of, shared, group, tile) + 16 * column,
                   gs_width_of(of, gs_columns_of(of, shared, group), tile), {NULL}};
    for (int64_t c = column; c < y.width; c++)
        y.out[c - column] = gs_result_at(of, shared, group, tile * GS_TILE_F + c);
    return y;
}

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

/* Multiplies rows row0 .. row1 - 1 of `a` with N columns, at most 4. */
INLINE void few_f(const int type, const int N, const gs_product *of, const char *a, const columns_f *columns,
                  int64_t row0, int64_t row1) {
    const int element = type == GS_TYPE_F32 ? 4 : 2, n_acc = N == 1 ? 4 : 2, together = element == 2 ? 8 : 4;
    const int prefetches = must_prefetch(of, type, N);
    int64_t stride = of->node->src[0]->layout.nb[1], whole = of->k / 16, rest = of->k % 16, width = columns->width;
    for (int64_t row = row0; row < row1; row++) {
        const char *p = a + row * stride;
        const float *y = columns->cells;
        vec acc[4][4];
        int64_t b = 0;
        UNROLL for (int c = 0; c < N; c++)
            UNROLL for (int i = 0; i < n_acc; i++)
                acc[c][i] = VEC_ZERO;
        for (; b + together <= whole; b += together) {
            if (prefetches)
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
            columns->out[c][row] = VEC_TOTAL(sum);
        }
    }
}

/* Adds the products of 16 elements of R rows with N columns, of which the last is column number `last`, and moves p to
 * the next elements. */
INLINE void add_beside(const int type, const int R, const int N, const char **p, const float *y, int64_t last,
                       vec acc[][GS_TILE_F]) {
    const int element = type == GS_TYPE_F32 ? 4 : 2;
    UNROLL for (int h = 0; h < STEP_VECS; h++) {
        vec w[MOST_BESIDE];
        UNROLL for (int r = 0; r < R; r++)
            w[r] = VEC_WEIGHTS(type, p[r] + h * LANES * element);
        UNROLL for (int c = 0; c < N; c++) {
            vec x = VEC_LOAD(y + (c == N - 1 ? last : c) * 16 + h * LANES);
            VEC_KEEP(x);
            UNROLL for (int r = 0; r < R; r++)
                acc[r][c] = VEC_FMA(w[r], x, acc[r][c]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        p[r] += 16 * element;
}

/* The same as few_f for more columns: N, or N - 1, of which the last is then computed twice. */
INLINE void beside_f(const int type, const int N, const gs_product *of, const char *a, const columns_f *columns,
                     int64_t n, int64_t row0, int64_t row1) {
    const int element = type == GS_TYPE_F32 ? 4 : 2, R = SUMS_F / N < MOST_BESIDE ? SUMS_F / N : MOST_BESIDE;
    const int in_line = 64 / (16 * element);    /* steps of a cache line of weights */
    int64_t stride = of->node->src[0]->layout.nb[1], whole = of->k / 16, rest = of->k % 16;
    /* How many bytes ahead each row is prefetched, at most its own; and from behind a row to the row R later. */
    const int64_t size = of->k * element, to_next = R * stride - size;
    const int64_t to_l1 = SOON / R < size ? SOON / R : size, to_l2 = AHEAD / R < size ? AHEAD / R : size;
    for (int64_t row = row0; row < row1; row += R) {
        const char *p[MOST_BESIDE];
        const float *y = columns->cells;
        vec acc[MOST_BESIDE][GS_TILE_F];
        UNROLL for (int r = 0; r < R; r++) {
            p[r] = a + (row + r < row1 ? row + r : row1 - 1) * stride;
            UNROLL for (int c = 0; c < N; c++)
                acc[r][c] = VEC_ZERO;
        }
        int64_t b = 0;
        for (; b + in_line <= whole; b += in_line) {
            const int64_t left = size - b * 16 * element;
            UNROLL for (int r = 0; r < R; r++) {
                PREFETCH(p[r] + to_l1 + (to_l1 < left ? 0 : to_next));
                PREFETCH_LATER(p[r] + to_l2 + (to_l2 < left ? 0 : to_next));
            }
            UNROLL for (int u = 0; u < in_line; u++, y += 16 * columns->width)
                add_beside(type, R, N, p, y, n - 1, acc);
        }
        for (; b < whole; b++, y += 16 * columns->width)
            add_beside(type, R, N, p, y, n - 1, acc);
        if (rest) {
            char room[MOST_BESIDE][16 * sizeof(float)] = {{0}};
            UNROLL for (int r = 0; r < R; r++) {
                memcpy(room[r], p[r], (size_t)rest * element);
                p[r] = room[r];
            }
            add_beside(type, R, N, p, y, n - 1, acc);
        }
        UNROLL for (int r = 0; r < R; r++) {
            float sums[GS_TILE_F];
            UNROLL for (int c = 0; c + 4 <= N; c += 4)
                FOUR_TOTALS(acc[r][c], acc[r][c + 1], acc[r][c + 2], acc[r][c + 3], sums + c);
            UNROLL for (int c = N / 4 * 4; c < N; c++)
                sums[c] = VEC_TOTAL(acc[r][c]);
            for (int64_t c = 0; c < n && row + r < row1; c++)
                columns->out[c][row + r] = sums[c];
        }
    }
}

/* Multiplies rows with n columns, at most TILE_F. */
INLINE void rows_times(const int type, const gs_product *of, const char *a, const columns_f *columns, int64_t n,
                       int64_t row0, int64_t row1) {
    if (n > 2 && n <= 4 && n * of->k * (int64_t)sizeof(float) > COLUMN_BYTES) {
        beside_f(type, 4, of, a, columns, n, row0, row1);
        return;
    }
    switch (n) {
    case 1: few_f(type, 1, of, a, columns, row0, row1); return;
    case 2: few_f(type, 2, of, a, columns, row0, row1); return;
    case 3: few_f(type, 3, of, a, columns, row0, row1); return;
    case 4: few_f(type, 4, of, a, columns, row0, row1); return;
#if TILE_F == 12
    case 7: case 8: beside_f(type, 8, of, a, columns, n, row0, row1); return;
    case 9: case 10: beside_f(type, 10, of, a, columns, n, row0, row1); return;
    case 11: case 12: beside_f(type, 12, of, a, columns, n, row0, row1); return;
#endif
    default: beside_f(type, 6, of, a, columns, n, row0, row1);
    }
}

/* Where columns are multiplied one part after another, twelve rows are taken at a time, so that these are still in the
 * cache for the next part. */
#define FEW_F(TYPE, type) \
    static void few_##type(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1) { \
        const char *a = gs_weights_of(of, shared, group); \
        int64_t n = gs_columns_of(of, shared, group), some = n <= TILE_F ? row1 - row0 : 12; \
        for (int64_t row = row0; row < row1; row += some) \
            for (int64_t from = 0, now; from < n; from += now) { \
                columns_f columns = columns_from(of, shared, group, from / GS_TILE_F, from % GS_TILE_F); \
                now = n - from < TILE_F ? n - from : TILE_F; \
                rows_times(GS_TYPE_##TYPE, of, a, &columns, now, row, row1 - row < some ? row1 : row + some); \
            } \
    }

FEW_F(F32, f32)
FEW_F(F16, f16)
FEW_F(BF16, bf16)
#undef FEW_F
