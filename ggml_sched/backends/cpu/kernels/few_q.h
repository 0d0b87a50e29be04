/* few_q.h -- quantised weights times one column, with NEON at most GS_FEW_Q: decoded from blocks, a row at a time.
 *
 * Included by product_loops.h.  With so few columns each block is used a few times.  Memory bandwidth alone limits the
 * speed only if little is computed for each block; therefore a strip's eight steps share one vector of scales.
 */
INLINE void few_q(const int type, const int N, const gs_product *of, const char *shared, int64_t group, int64_t row0,
                  int64_t row1) {
    const int size = bytes_of(type) * (8 / units_of(type)), prefetches = must_prefetch(of, type, N);
    const char *a = gs_weights_of(of, shared, group);
    int64_t stride = of->node->src[0]->layout.nb[1], strips = of->steps / GS_STRIP_STEPS;
    const gs_strip *y[GS_FEW_Q];
    float *out[GS_FEW_Q];
    for (int c = 0; c < N; c++) {
        y[c] = gs_strips_of(of, shared, group, c);
        out[c] = gs_result_at(of, shared, group, c);
    }
    for (int64_t row = row0; row < row1; row++) {
        const uint8_t *p = (const uint8_t *)a + row * stride;
        vec acc[GS_FEW_Q][2];
        vec_low low[GS_FEW_Q], rest[GS_FEW_Q];
        float sum[GS_FEW_Q] = {0};
        UNROLL for (int c = 0; c < N; c++) {
            acc[c][0] = acc[c][1] = VEC_ZERO;
            low[c] = rest[c] = LOW_ZERO;
        }
        for (int64_t at = 0; at < strips; at++, p += size) {
            if (prefetches)
                UNROLL for (int line = 0; line < size; line += 64)
                    PREFETCH_STREAM((const char *)p + line);
            add_strip(type, N, p, y, at, acc, low);
        }
        const int over = (int)(of->steps % GS_STRIP_STEPS);
        if (units_of(type) == 1 && over > 0) {
#if JOINS_ROWS
            add_strip(type, N, p - (GS_STRIP_STEPS - over) * bytes_of(type), y, strips, acc, low);
#else
            add_end(type, N, p, y, strips, over, acc, low, rest, sum);
#endif
        }
        UNROLL for (int c = 0; c < N; c++)
            out[c][row] = VEC_TOTAL_WITH(VEC_ADD(acc[c][0], acc[c][1]), LOW_ADD(low[c], rest[c])) + sum[c];
    }
}
