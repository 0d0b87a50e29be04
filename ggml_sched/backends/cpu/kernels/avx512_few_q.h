/* avx512_few_q.h -- add_strip (x86_few_q.h) in vectors of 512 bits.
 *
 * Included by x86_few_q.h.  Of types with minima a block has 32 elements here (takes_strips).
 */
#define HAS_ENDS 0              /* see gs_product_kernels */

INLINE __m512 widened(__m256 v) {
    return _mm512_castps256_ps512(v);
}

/* The scales of eight blocks that are read as words, from header_words, in the lower half of a vector.  `times`: by
 * what the strip's sums are multiplied: the minima of types that have them; else the scales. */
INLINE __m512 scales_of_header(const int type, __m512i words, __m512 *times) {
    __m256i v = _mm512_castsi512_si256(words);
    __m512 s = widened(_mm256_cvtph_ps(_mm256_castsi256_si128(v)));
    *times = has_min(type) ? widened(_mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))) : s;
    return s;
}

/* The same for eight steps (32 elements each) of other types; of Q6_K 16 scales. */
INLINE __m512 strip_scales(const int type, const uint8_t *p, __m512 *times) {
    __m512i v;
    switch (type) {
    case GS_TYPE_MXFP4: return *times = widened(eight_powers(p));
    case GS_TYPE_Q6_K:
        v = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + 192)));
        return *times = _mm512_mul_ps(_mm512_cvtepi32_ps(v), _mm512_set1_ps(half(p + 208)));
    case GS_TYPE_IQ4_XS: return *times = widened(scales_of_iq4_xs(p));
    default: return *times = widened(eight_floats(p, bytes_of(type)));
    }
}

/* Adds the products of eight steps to acc[column]; `scaled`: products of the weights' scales and those of a strip. */
INLINE void add_whole(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at,
                      const __m512 *scaled, vec acc[][2]) {
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
}

/* The nibbles of steps 4 i to 4 i + 3 of a strip in halves. */
INLINE __m512i strip_nibbles(const int type, const uint8_t *p, const block_words *words, const int i) {
    if (reads_words(type))
        return nibbles_of_four(type, words, i);
    return type == GS_TYPE_MXFP4 ? nibbles_of_mxfp4(p + 4 * i * bytes_of(type)) : read_once(p + 8 + 64 * i);
}

/* add_whole for strips in halves: 128 elements are scaled together, not 64. */
INLINE void add_halved(const int type, const int N, const uint8_t *p, const block_words *words, const uint64_t *fifths,
                       const gs_strip *const y[], int64_t at, const __m512 *scaled, vec acc[][2]) {
    UNROLL for (int i = 0; i < 2; i++) {
        const int j = 4 * i;
        __m512i low, high, place = _mm512_setr_epi32(j, j, j, j, j + 1, j + 1, j + 1, j + 1,
                                                     j + 2, j + 2, j + 2, j + 2, j + 3, j + 3, j + 3, j + 3);
        lanes_of_nibbles(type, strip_nibbles(type, p, words, i), &low, &high);
        if (has_fifths(type)) {
            low = with_fifths(low, fifths[2 * i]);
            high = with_fifths(high, fifths[2 * i + 1]);
        }
        UNROLL for (int c = 0; c < N; c++) {
            const int8_t *q = y[c][at].q + 128 * i;
            __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), low, _mm512_loadu_si512(q));
            dot = _mm512_dpbusd_epi32(dot, high, _mm512_loadu_si512(q + 64));
            acc[c][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(place, scaled[c]), acc[c][i]);
        }
    }
}

INLINE void add_strip(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at,
                      vec acc[][2], __m256 low[]) {
    __m512 times, s, scaled[GS_FEW_Q];
    block_words words;
    uint64_t fifths[4];
    if (reads_words(type)) {
        words = words_from(p, bytes_of(type));
        __m512i header = header_words(type, &words);
        s = scales_of_header(type, header, &times);
        if (has_fifths(type))
            _mm256_storeu_si256((__m256i *)fifths, _mm512_extracti64x4_epi64(header, 1));
    } else {
        s = strip_scales(type, p, &times);
    }
    UNROLL for (int c = 0; c < N; c++) {
        const gs_strip *strip = y[c] + at;
        scaled[c] = halves_of(type) == 2 ? _mm512_mul_ps(s, _mm512_loadu_ps(strip->d))
            : widened(_mm256_mul_ps(_mm512_castps512_ps256(s), _mm256_loadu_ps(strip->d)));
        UNROLL for (int h = 0; h < halves_of(type); h++)
            low[c] = _mm256_fmadd_ps(h ? _mm512_extractf32x8_ps(times, 1) : _mm512_castps512_ps256(times),
                                     _mm256_loadu_ps(strip->sum + 8 * h), low[c]);
    }
    if (has_halved_strips(type))
        add_halved(type, N, p, &words, fifths, y, at, scaled, acc);
    else
        add_whole(type, N, p, y, at, scaled, acc);
}
