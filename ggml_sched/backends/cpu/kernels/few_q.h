/* few_q.h -- quantised weights times one column, with NEON at most GS_FEW_Q: blocks of one or two rows, decoded once.
 *
 * Included by product_loops.h.  With so few columns each block is used a few times.  Memory bandwidth alone limits the
 * speed only if little is computed for each block; therefore a strip's eight steps share one vector of scales.
 */
#define SHORT 4096              /* rows of so many bytes, or fewer, meet a strip together: longer ones are read faster
                                 * one by one */

/* few_q with R rows at a time. */
INLINE void few_rows_q(const int type, const int N, const int R, const gs_product *of, const char *shared,
                       int64_t group, int64_t row0, int64_t row1) {
    const int size = bytes_of(type) * (8 / units_of(type)), prefetches = must_prefetch(of, type, N);
    const char *a = gs_weights_of(of, shared, group);
    int64_t stride = of->node->src[0]->layout.nb[1], strips = of->steps / GS_STRIP_STEPS;
    const gs_strip *y[GS_FEW_Q];
    float *out[GS_FEW_Q];
    for (int c = 0; c < N; c++) {
        y[c] = gs_strips_of(of, shared, group, c);
        out[c] = gs_result_at(of, shared, group, c);
    }
    /* Where the last rows are fewer than R, some before them are computed again; a single row is computed R times. */
    const int64_t apart = row1 - row0 < R ? 0 : stride, rows = row1 - row0 < R ? 1 : R, skipped = (R - 1) * apart;
    for (int64_t row = row0; row < row1; row += rows) {
        const int64_t first = row1 - row < rows ? row1 - rows : row;
        const uint8_t *p = (const uint8_t *)a + first * stride;
        vec acc[FEW_ROWS * GS_FEW_Q][2];
        vec_low low[FEW_ROWS * GS_FEW_Q];
        float totals[FEW_ROWS * GS_FEW_Q];
        UNROLL for (int i = 0; i < R * N; i++) {
            acc[i][0] = acc[i][1] = VEC_ZERO;
            low[i] = LOW_ZERO;
        }
        for (int64_t at = 0; at < strips; at++, p += size) {
            if (prefetches) {
                /* What follows the end of a row here is a row that is read already, but for the last one. */
                const char *later = (const char *)p + AHEAD + (at * size + AHEAD < stride ? 0 : skipped);
                const char *soon = (const char *)p + SOON + (at * size + SOON < stride ? 0 : skipped);
                UNROLL for (int r = 0; r < R; r++) {
                    UNROLL for (int line = 0; line < size; line += 64) {
                        PREFETCH_LATER(later + r * apart + line);
                        PREFETCH(soon + r * apart + line);
                    }
                }
            }
            add_strip(type, N, R, p, apart, y, at, acc, low);
        }
        const int over = (int)(of->steps % GS_STRIP_STEPS);
        if (units_of(type) == 1 && over > 0) {
#if JOINS_ROWS
            add_strip(type, N, R, p - (GS_STRIP_STEPS - over) * bytes_of(type), apart, y, strips, acc, low);
#else
            add_end(type, N, R, p, apart, y, strips, over, acc, low);
#endif
        }
        UNROLL for (int i = 0; i < R * N; i++)
            totals[i] = VEC_TOTAL_WITH(VEC_ADD(acc[i][0], acc[i][1]), low[i]);
#if FEW_ROWS > 1
        if (takes_two_rows(type))
            totals_of_two(acc[0][0], low[0], totals);
#endif
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int c = 0; c < N; c++)
                out[c][first + (rows == 1 ? 0 : r)] = totals[r * N + c];
    }
}

INLINE void few_q(const int type, const int N, const gs_product *of, const char *shared, int64_t group, int64_t row0,
                  int64_t row1) {
#if FEW_ROWS > 1
    if (takes_two_rows(type) || (shares_strips(type) && of->node->src[0]->layout.nb[1] <= SHORT)) {
        few_rows_q(type, N, FEW_ROWS, of, shared, group, row0, row1);
        return;
    }
#endif
    few_rows_q(type, N, 1, of, shared, group, row0, row1);
}
