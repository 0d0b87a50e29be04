/* joined_q.h -- quantised weights times one column, by strips that may have steps of two rows.
 *
 * Included by product_loops.h for AVX-512.  Rows of no whole number of strips follow one another in memory, so
 * of->strip_rows of them are whole strips, and are read as one row.
 */
INLINE void joined_q(const int type, const gs_product *of, const char *shared, int64_t group, int64_t row0,
                     int64_t row1) {
    const int size = GS_STRIP_STEPS * bytes_of(type), prefetches = must_prefetch(of, type, 1);
    const uint8_t *p = (const uint8_t *)gs_weights_of(of, shared, group) + row0 * of->node->src[0]->layout.nb[1];
    const gs_strip *strips = gs_strips_of(of, shared, group, 0), *y = strips;
    float *out = gs_result_at(of, shared, group, 0);
    vec acc[2][2];              /* sums of this row, and of the next one, which the last strip may begin */
    vec_low low[2], sums[4];    /* sums: of the last four rows */
    acc[1][0] = acc[1][1] = VEC_ZERO;
    low[1] = LOW_ZERO;
    for (int64_t row = row0, left = of->steps; row < row1; row++, left += of->steps) {
        acc[0][0] = acc[1][0];
        acc[0][1] = acc[1][1];
        low[0] = low[1];
        acc[1][0] = acc[1][1] = VEC_ZERO;
        low[1] = LOW_ZERO;
        if ((row - row0) % of->strip_rows == 0)
            y = strips;
        for (; left > 0; left -= GS_STRIP_STEPS, p += size, y++) {
            if (prefetches)
                UNROLL for (int line = 0; line < size; line += 64)
                    PREFETCH_STREAM((const char *)p + line);
            if (left >= GS_STRIP_STEPS)
                add_to_rows(type, 1, GS_STRIP_STEPS, p, y, acc, low);
            else
                add_to_rows(type, 2, (int)left, p, y, acc, low);
        }
        sums[(row - row0) % 4] = LOW_ADD(HALVED(VEC_ADD(acc[0][0], acc[0][1])), low[0]);
        if ((row - row0) % 4 == 3)
            gs_totals_256(sums[0], sums[1], sums[2], sums[3], out + row - 3);
    }
    for (int64_t row = row1 - (row1 - row0) % 4; row < row1; row++)
        out[row] = total(sums[(row - row0) % 4]);
}
