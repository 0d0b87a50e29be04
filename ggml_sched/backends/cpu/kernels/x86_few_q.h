/* x86_few_q.h -- a strip of a row of quantised weights, decoded from its blocks, times at most GS_FEW_Q columns.
 *
 * Included by matmul_x86.h.
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
