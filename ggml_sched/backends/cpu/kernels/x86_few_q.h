/* x86_few_q.h -- quantised weights times at most GS_FEW_Q columns: decoded from their blocks, a row at a time.
 *
 * Included by matmul_x86.h.  With so few columns each block is used a few times.  Memory bandwidth alone limits the
 * speed only if little is computed for each block; therefore a strip's eight steps share one vector of scales.
 */
/* Decodes the scales of eight steps (32 elements each) to s and, for types with minima, the minima to m. */
INLINE void eight_scales(const int type, const uint8_t *p, float *s, float *m) {
    const int size = bytes_of(type);
    if (units_of(type) == 8) {
        scales(type, p, s, m);
        return;
    }
    if (type == GS_TYPE_MXFP4) {
        __m256i e = _mm256_setr_epi32(p[0], p[size], p[2 * size], p[3 * size], p[4 * size], p[5 * size], p[6 * size],
                                      p[7 * size]);
        __m256i bits = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
        __m256i subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
        bits = _mm256_blendv_epi8(bits, subnormal, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e));
        _mm256_storeu_ps(s, _mm256_castsi256_ps(bits));
        return;
    }
#define HALF_AT(j) (short)gs_load_u16(p + (j) * size)
    _mm256_storeu_ps(s, _mm256_cvtph_ps(_mm_setr_epi16(HALF_AT(0), HALF_AT(1), HALF_AT(2), HALF_AT(3),
                                                       HALF_AT(4), HALF_AT(5), HALF_AT(6), HALF_AT(7))));
#undef HALF_AT
#define HALF_AT(j) (short)gs_load_u16(p + (j) * size + 2)
    if (has_min(type))
        _mm256_storeu_ps(m, _mm256_cvtph_ps(_mm_setr_epi16(HALF_AT(0), HALF_AT(1), HALF_AT(2), HALF_AT(3),
                                                           HALF_AT(4), HALF_AT(5), HALF_AT(6), HALF_AT(7))));
#undef HALF_AT
}

/* Multiplies eight steps of a row, whose blocks begin at p, with strip number `at` of each of N columns: adds the
 * scaled sums of products to acc[column], and the contribution of minima, or of the offset, to low[column]. */
INLINE void add_strip(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at,
                      vec acc[][2], __m256 low[]) {
    float s[16], m[16];
    eight_scales(type, p, s, m);
    const float *times = has_min(type) ? m : s;
#if WIDE
    __m512 scaled[GS_FEW_Q];
    UNROLL for (int c = 0; c < N; c++) {
        const gs_strip *strip = y[c] + at;
        /* Two stores of 32 bytes wrote the scales.  One load of 64 could not be forwarded from them: it would wait
         * until both stores are in the cache. */
        scaled[c] = halves_of(type) == 2
            ? _mm512_mul_ps(_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(s)), _mm256_loadu_ps(s + 8), 1),
                            _mm512_loadu_ps(strip->d))
            : _mm512_castps256_ps512(_mm256_mul_ps(_mm256_loadu_ps(s), _mm256_loadu_ps(strip->d)));
        low[c] = _mm256_fmadd_ps(_mm256_loadu_ps(times), _mm256_loadu_ps(strip->sum), low[c]);
        if (halves_of(type) == 2)
            low[c] = _mm256_fmadd_ps(_mm256_loadu_ps(times + 8), _mm256_loadu_ps(strip->sum + 8), low[c]);
    }
    UNROLL for (int j = 0; j < 8; j += 2) {
        __m512i v = lanes_of_two(type, p, j);
        __m512i place = halves_of(type) == 2
            ? _mm512_setr_epi32(2 * j, 2 * j, 2 * j, 2 * j, 2 * j + 1, 2 * j + 1, 2 * j + 1, 2 * j + 1,
                                2 * j + 2, 2 * j + 2, 2 * j + 2, 2 * j + 2, 2 * j + 3, 2 * j + 3, 2 * j + 3, 2 * j + 3)
            : _mm512_setr_epi32(j, j, j, j, j, j, j, j, j + 1, j + 1, j + 1, j + 1, j + 1, j + 1, j + 1, j + 1);
        UNROLL for (int c = 0; c < N; c++) {
            __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), v, _mm512_loadu_si512(y[c][at].q + 32 * j));
            vec *sum = &acc[c][j / 2 % 2];
            *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(place, scaled[c]), *sum);
        }
    }
#else
    /* A load from memory spreads a scale over a vector without work for the units that shuffle, the busiest ones. */
    float spread[GS_FEW_Q][8];
    __m256 scaled[GS_FEW_Q][2];
    UNROLL for (int c = 0; c < N; c++) {
        const gs_strip *strip = y[c] + at;
        UNROLL for (int h = 0; h < halves_of(type); h++) {
            scaled[c][h] = _mm256_mul_ps(_mm256_loadu_ps(s + 8 * h), _mm256_loadu_ps(strip->d + 8 * h));
            if (halves_of(type) == 1)
                _mm256_storeu_ps(spread[c], scaled[c][h]);
            if (!is_signed(type))
                low[c] = _mm256_fmadd_ps(_mm256_loadu_ps(times + 8 * h), _mm256_loadu_ps(strip->sum + 8 * h), low[c]);
        }
    }
    UNROLL for (int j = 0; j < 8; j++) {
        __m256i v = lanes(type, units_of(type) == 8 ? p : p + j * bytes_of(type), units_of(type) == 8 ? j : 0);
        const int first = 2 * j % 8;
        __m256i place = _mm256_setr_epi32(first, first, first, first, first + 1, first + 1, first + 1, first + 1);
        UNROLL for (int c = 0; c < N; c++) {
            __m256i dot = dot4(type, _mm256_setzero_si256(), v, load32(y[c][at].q + 32 * j));
            __m256 scale = halves_of(type) == 2 ? _mm256_permutevar8x32_ps(scaled[c][j / 4], place)
                                                : _mm256_broadcast_ss(spread[c] + j);
            acc[c][j % 2] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, acc[c][j % 2]);
        }
    }
#endif
}

/* Adds the products of one block of 32 elements, step j of the last strip, where the row ends before all eight
 * steps. */
INLINE void add_rest(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at, int j,
                     __m256 rest[], float sum[]) {
    float s[16], m[16];
    scales(type, p, s, m);
    __m256i v = lanes(type, p, 0);
    UNROLL for (int c = 0; c < N; c++) {
        const gs_strip *strip = y[c] + at;
        __m256i dot = dot4(type, _mm256_setzero_si256(), v, load32(strip->q + 32 * j));
        rest[c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(s[0] * strip->d[j]), rest[c]);
        if (!is_signed(type))
            sum[c] = fmaf(has_min(type) ? m[0] : s[0], strip->sum[j], sum[c]);
    }
}

INLINE void few_q(const int type, const int N, const gs_product *of, const char *shared, int64_t group, int64_t row0,
                  int64_t row1) {
    const int size = bytes_of(type) * (8 / units_of(type));
    const char *a = gs_weights_of(of, shared, group);
    int64_t stride = of->node->src[0]->layout.nb[1], strips = of->steps / GS_STRIP_STEPS;
    int over = (int)(of->steps % GS_STRIP_STEPS);
    const gs_strip *y[GS_FEW_Q];
    float *out[GS_FEW_Q];
    for (int c = 0; c < N; c++) {
        y[c] = gs_strips_of(of, shared, group, c);
        out[c] = gs_result_at(of, shared, group, c);
    }
    for (int64_t row = row0; row < row1; row++) {
        const uint8_t *p = (const uint8_t *)a + row * stride;
        vec acc[GS_FEW_Q][2];
        __m256 low[GS_FEW_Q], rest[GS_FEW_Q];
        float sum[GS_FEW_Q] = {0};
        UNROLL for (int c = 0; c < N; c++) {
            acc[c][0] = acc[c][1] = VEC_ZERO;
            low[c] = rest[c] = _mm256_setzero_ps();
        }
        for (int64_t at = 0; at < strips; at++, p += size) {
            UNROLL for (int line = 0; line < size; line += 64)
                _mm_prefetch((const char *)p + line + AHEAD, _MM_HINT_T0);
            add_strip(type, N, p, y, at, acc, low);
        }
        if (units_of(type) == 1)
            for (int j = 0; j < over; j++, p += bytes_of(type))
                add_rest(type, N, p, y, strips, j, rest, sum);
        UNROLL for (int c = 0; c < N; c++)
            out[c][row] = VEC_TOTAL(VEC_ADD(acc[c][0], acc[c][1])) + total(_mm256_add_ps(low[c], rest[c])) + sum[c];
    }
}

#define FEW_Q(TYPE, type) \
    static void few_##type(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1) { \
        switch (gs_columns_of(of, shared, group)) { \
        case 1: few_q(GS_TYPE_##TYPE, 1, of, shared, group, row0, row1); return; \
        case 2: few_q(GS_TYPE_##TYPE, 2, of, shared, group, row0, row1); return; \
        case 3: few_q(GS_TYPE_##TYPE, 3, of, shared, group, row0, row1); return; \
        default: few_q(GS_TYPE_##TYPE, 4, of, shared, group, row0, row1); \
        } \
    }

GS_QUANTISED(FEW_Q)
