/* avx512_few_q.h -- add_strip (x86_few_q.h) in vectors of 512 bits.
 *
 * Included by x86_few_q.h.  Of types with minima a block has 32 elements here (takes_strips).
 */
#define JOINS_ROWS 1            /* see gs_product_kernels */
#define FEW_ROWS 1

INLINE __m512 widened(__m256 v) {
    return _mm512_castps256_ps512(v);
}

INLINE int has_halved_strips(const int type) {
    return strip_order(type) > 1;
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
    case GS_TYPE_MXFP4: return *times = widened(eight_powers(p, 8));
    case GS_TYPE_Q6_K:
        v = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + 192)));
        return *times = _mm512_mul_ps(_mm512_cvtepi32_ps(v), _mm512_set1_ps(half(p + 208)));
    case GS_TYPE_IQ4_XS: return *times = widened(scales_of_iq4_xs(p, 0));
    default: return *times = widened(_mm256_cvtph_ps(eight_words(p, bytes_of(type), 8)));
    }
}

/* Adds the products of eight steps to acc[row] of R rows; scaled[row]: the products of the weights' scales and those of
 * the strip, 0 for steps of another row. */
INLINE void add_whole(const int type, const int R, const uint8_t *p, const gs_strip *y, const __m512 *scaled,
                      vec acc[][2]) {
    UNROLL for (int j = 0; j < 8; j += 2) {
        __m512i v = lanes_of_two(type, p, j);
        __m512i place = halves_of(type) == 2
            ? _mm512_setr_epi32(2 * j, 2 * j, 2 * j, 2 * j, 2 * j + 1, 2 * j + 1, 2 * j + 1, 2 * j + 1,
                                2 * j + 2, 2 * j + 2, 2 * j + 2, 2 * j + 2, 2 * j + 3, 2 * j + 3, 2 * j + 3, 2 * j + 3)
            : _mm512_setr_epi32(j, j, j, j, j, j, j, j, j + 1, j + 1, j + 1, j + 1, j + 1, j + 1, j + 1, j + 1);
        __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), v, _mm512_loadu_si512(y->q + 32 * j));
        UNROLL for (int r = 0; r < R; r++) {
            vec *sum = &acc[r][j / 2 % 2];
            *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(place, scaled[r]), *sum);
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
INLINE void add_halved(const int type, const int R, const uint8_t *p, const block_words *words, const uint64_t *fifths,
                       const gs_strip *y, const __m512 *scaled, vec acc[][2]) {
    UNROLL for (int i = 0; i < 2; i++) {
        const int j = 4 * i;
        __m512i low, high, place = _mm512_setr_epi32(j, j, j, j, j + 1, j + 1, j + 1, j + 1,
                                                     j + 2, j + 2, j + 2, j + 2, j + 3, j + 3, j + 3, j + 3);
        lanes_of_nibbles(type, strip_nibbles(type, p, words, i), &low, &high);
        if (has_fifths(type)) {
            low = with_fifths(low, fifths[2 * i]);
            high = with_fifths(high, fifths[2 * i + 1]);
        }
        __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), low, _mm512_loadu_si512(y->q + 128 * i));
        dot = _mm512_dpbusd_epi32(dot, high, _mm512_loadu_si512(y->q + 128 * i + 64));
        UNROLL for (int r = 0; r < R; r++)
            acc[r][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(place, scaled[r]), acc[r][i]);
    }
}

/* The scales of the strip that begins at p, as strip_scales; and the blocks and their fifth bits, where these are read
 * as words. */
INLINE __m512 read_strip(const int type, const uint8_t *p, __m512 *times, block_words *words, uint64_t fifths[4]) {
    if (!reads_words(type))
        return strip_scales(type, p, times);
    *words = words_from(p, bytes_of(type));
    __m512i header = header_words(type, words);
    if (has_fifths(type))
        _mm256_storeu_si256((__m256i *)fifths, _mm512_extracti64x4_epi64(header, 1));
    return scales_of_header(type, header, times);
}

/* Adds the products of strip y to acc[row] and low[row].  Where R is 2 the strip belongs to two rows: the first n steps
 * to row 0, the others to row 1. */
INLINE void add_to_rows(const int type, const int R, int n, const uint8_t *p, const gs_strip *y, vec acc[][2],
                        __m256 low[]) {
    static const int32_t masks[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    const __m256 first = _mm256_loadu_ps((const float *)masks + 8 - n);
    __m512 times, scaled[2];
    block_words words;
    uint64_t fifths[4];
    __m512 s = read_strip(type, p, &times, &words, fifths);
    scaled[0] = _mm512_mul_ps(s, halves_of(type) == 2 ? _mm512_loadu_ps(y->d) : widened(_mm256_loadu_ps(y->d)));
    if (R == 1) {
        UNROLL for (int h = 0; h < halves_of(type); h++)
            low[0] = _mm256_fmadd_ps(h ? _mm512_extractf32x8_ps(times, 1) : _mm512_castps512_ps256(times),
                                     _mm256_loadu_ps(y->sum + 8 * h), low[0]);
    } else {
        const __m256 all = _mm512_castps512_ps256(scaled[0]), t = _mm512_castps512_ps256(times);
        const __m256 sum = _mm256_loadu_ps(y->sum);
        scaled[0] = widened(_mm256_and_ps(first, all));
        scaled[1] = widened(_mm256_andnot_ps(first, all));
        low[0] = _mm256_fmadd_ps(_mm256_and_ps(first, t), sum, low[0]);
        low[1] = _mm256_fmadd_ps(_mm256_andnot_ps(first, t), sum, low[1]);
    }
    if (has_halved_strips(type))
        add_halved(type, R, p, &words, fifths, y, scaled, acc);
    else
        add_whole(type, R, p, y, scaled, acc);
}

INLINE void add_strip(const int type, const int N, const int R, const uint8_t *p, int64_t stride,
                      const gs_strip *const y[], int64_t at, vec acc[][2], __m256 low[]) {
    (void)N, (void)R, (void)stride;
    add_to_rows(type, 1, GS_STRIP_STEPS, p, y[0] + at, acc, low);
}
