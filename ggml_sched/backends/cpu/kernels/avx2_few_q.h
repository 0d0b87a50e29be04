/* avx2_few_q.h -- strips and ends of rows (x86_few_q.h) in vectors of 256 bits.
 *
 * Included by x86_few_q.h.  Without VNNI the product of bytes (maddubs) leaves a sum of two products in each 16-bit
 * lane, and of levels below 64 two such sums still fit there.  So sums with the same scales are added as 16 bits,
 * before they are widened and scaled.
 */
/* The scales and minima (f16) with which eight blocks begin. */
INLINE __m256 scales_and_minima(const uint8_t *p, const int size, __m256 *minima) {
#define AT(j, place) _mm_loadu_si128((const __m128i *)(p + (j) * size - 4 * (place)))
#define FOUR(i, j, k, l) _mm256_cvtph_ps(_mm_blend_epi32( \
        _mm_blend_epi32(AT(i, 0), AT(j, 1), 2), _mm_blend_epi32(AT(k, 2), AT(l, 3), 8), 12))
    __m256 a = FOUR(0, 1, 4, 5), b = FOUR(2, 3, 6, 7);
#undef FOUR
#undef AT
    *minima = _mm256_shuffle_ps(a, b, 0xdd);
    return _mm256_shuffle_ps(a, b, 0x88);
}

/* The eight scales of steps with one scale each; `times`: by what the strip's sums are multiplied. */
INLINE __m256 strip_scales(const int type, const uint8_t *p, __m256 *times) {
    switch (type) {
    case GS_TYPE_Q4_1: case GS_TYPE_Q5_1: return scales_and_minima(p, bytes_of(type), times);
    case GS_TYPE_Q4_K: case GS_TYPE_Q5_K: return six_bit_scales(p, times);
    case GS_TYPE_IQ4_XS: return *times = scales_of_iq4_xs(p);
    case GS_TYPE_MXFP4: return *times = eight_powers(p);
    default: return *times = eight_floats(p, bytes_of(type));
    }
}

/* The same of n blocks that follow at least 8 - n others, whose scales are those of further steps: there a strip has
 * zeros. */
INLINE __m256 last_scales(const int type, const uint8_t *p, const int n, __m256 *times) {
    __m256i place = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(8 - n));
    __m256 s = strip_scales(type, p - (8 - n) * bytes_of(type), times);
    *times = _mm256_permutevar8x32_ps(*times, place);
    return _mm256_permutevar8x32_ps(s, place);
}

/* In each 32-bit lane: the sum of eight products, of four bytes of v with those at q, and of w at q + 32. */
INLINE __m256i dot8(__m256i v, __m256i w, const int8_t *q) {
#if VNNI
    return dot4(GS_TYPE_Q4_0, dot4(GS_TYPE_Q4_0, _mm256_setzero_si256(), v, load32(q)), w, load32(q + 32));
#else
    __m256i sums = _mm256_add_epi16(_mm256_maddubs_epi16(v, load32(q)), _mm256_maddubs_epi16(w, load32(q + 32)));
    return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
#endif
}

/* The sums of eight neighbouring products, in the order of hadd: of bytes 0 .. 7 and 8 .. 15 of v, then of w, and in
 * the upper half of the vector those of bytes 16 .. 31. */
INLINE __m256i two_dots(__m256i v, __m256i w, const int8_t *q) {
#if VNNI
    v = dot4(GS_TYPE_Q6_K, _mm256_setzero_si256(), v, load32(q));
    w = dot4(GS_TYPE_Q6_K, _mm256_setzero_si256(), w, load32(q + 32));
    return _mm256_hadd_epi32(v, w);
#else
    v = _mm256_hadd_epi16(_mm256_maddubs_epi16(v, load32(q)), _mm256_maddubs_epi16(w, load32(q + 32)));
    return _mm256_madd_epi16(v, _mm256_set1_epi16(1));
#endif
}

INLINE __m256 add_scaled(__m256 acc, __m256i dot, __m256 scales, __m256i place) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_permutevar8x32_ps(scales, place), acc);
}

/* Whether `times` of strip_scales lacks the minus of the minima. */
INLINE int subtracts_minima(const int type) {
    return units_of(type) == 8 && has_min(type);
}

/* Strips in halves: the first n of eight steps. */
INLINE void add_halved(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at,
                       const int n, vec acc[][2], __m256 low[]) {
    __m256 times, s = n < 8 ? last_scales(type, p, n, &times) : strip_scales(type, p, &times), scaled[GS_FEW_Q];
    UNROLL for (int c = 0; c < N; c++) {
        __m256 sum = _mm256_loadu_ps(y[c][at].sum);
        low[c] = subtracts_minima(type) ? _mm256_fnmadd_ps(times, sum, low[c]) : _mm256_fmadd_ps(times, sum, low[c]);
        scaled[c] = _mm256_mul_ps(s, _mm256_loadu_ps(y[c][at].d));
    }
    UNROLL for (int j = 0; j < 8; j += 2) {
        if (j >= n)
            break;
        __m256i v, w, place = _mm256_setr_epi32(j, j, j, j, j + 1, j + 1, j + 1, j + 1);
        lanes_of_pair(type, p, j, j + 1 < n ? j + 1 : j, &v, &w);
        UNROLL for (int c = 0; c < N; c++) {
            __m256i dot = dot8(v, w, y[c][at].q + 32 * j);
            acc[c][j / 2 % 2] = add_scaled(acc[c][j / 2 % 2], dot, scaled[c], place);
        }
    }
}

/* Two scales in 32 elements. */
INLINE void add_of_two_scales(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at,
                              vec acc[][2], __m256 low[]) {
    float s[16], m[16], *times = has_min(type) ? m : s;
    __m256 scaled[GS_FEW_Q][2];
    scales(type, p, s, m);
    UNROLL for (int c = 0; c < N; c++) {
        UNROLL for (int h = 0; h < 2; h++) {
            const gs_strip *strip = y[c] + at;
            low[c] = _mm256_fmadd_ps(_mm256_loadu_ps(times + 8 * h), _mm256_loadu_ps(strip->sum + 8 * h), low[c]);
            scaled[c][h] = _mm256_mul_ps(_mm256_loadu_ps(s + 8 * h), _mm256_loadu_ps(strip->d + 8 * h));
        }
    }
    UNROLL for (int j = 0; j < 8; j += 2) {
        const int i = 2 * j % 8;
        __m256i v = lanes(type, p, j), w = lanes(type, p, j + 1);
        __m256i place = _mm256_setr_epi32(i, i, i + 2, i + 2, i + 1, i + 1, i + 3, i + 3);   /* as two_dots */
        UNROLL for (int c = 0; c < N; c++) {
            __m256i dot = two_dots(v, w, y[c][at].q + 32 * j);
            acc[c][j / 2 % 2] = add_scaled(acc[c][j / 2 % 2], dot, scaled[c][j / 4], place);
        }
    }
}

/* Other types: one scale of 32 elements, which are a vector. */
INLINE void add_whole(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at,
                      vec acc[][2], __m256 low[]) {
    /* A load from memory spreads a scale over a vector without work for the units that shuffle. */
    float spread[GS_FEW_Q][8];
    __m256 s = units_of(type) == 8 ? scales_of_iq4_xs(p) : eight_floats(p, bytes_of(type));
    UNROLL for (int c = 0; c < N; c++) {
        if (!is_signed(type))
            low[c] = _mm256_fmadd_ps(s, _mm256_loadu_ps(y[c][at].sum), low[c]);
        _mm256_storeu_ps(spread[c], _mm256_mul_ps(s, _mm256_loadu_ps(y[c][at].d)));
    }
    UNROLL for (int j = 0; j < 8; j++) {
        __m256i v = lanes(type, units_of(type) == 8 ? p : p + j * bytes_of(type), units_of(type) == 8 ? j : 0);
        UNROLL for (int c = 0; c < N; c++) {
            __m256i dot = dot4(type, _mm256_setzero_si256(), v, load32(y[c][at].q + 32 * j));
            __m256 scale = _mm256_broadcast_ss(spread[c] + j);
            acc[c][j % 2] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, acc[c][j % 2]);
        }
    }
}

/* Adds the products of the first n of eight steps, all if the type's strips are whole. */
INLINE void add_steps(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at,
                      const int n, vec acc[][2], __m256 low[]) {
    if (has_halved_strips(type))
        add_halved(type, N, p, y, at, n, acc, low);
    else if (halves_of(type) == 2)
        add_of_two_scales(type, N, p, y, at, acc, low);
    else
        add_whole(type, N, p, y, at, acc, low);
}

INLINE void add_strip(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at,
                      vec acc[][2], __m256 low[]) {
    add_steps(type, N, p, y, at, 8, acc, low);
}

/* -- ends of rows, less than a strip ------------------------------------------------------------------------------- */

#define JOINS_ROWS 0

/* The 32 activations of step j of a strip. */
INLINE __m256i step_of(const int type, const gs_strip *strip, int j) {
    const int order = strip_order(type);
    const int8_t *q = strip->q + 32 * (j - j % order) + 16 * (j % order);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)q)),
                                   _mm_loadu_si128((const __m128i *)(q + 16 * order)), 1);
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
        __m256i dot = dot4(type, _mm256_setzero_si256(), v, step_of(type, strip, j));
        rest[c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(s[0] * strip->d[j]), rest[c]);
        if (!is_signed(type))
            sum[c] = fmaf(has_min(type) ? m[0] : s[0], strip->sum[j], sum[c]);
    }
}

/* n: how many blocks of 32 elements are left, less than a strip. */
INLINE void add_end(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at, int n,
                    vec acc[][2], __m256 low[], __m256 rest[], float sum[]) {
    if (has_halved_strips(type) && at > 0) {
        add_steps(type, N, p, y, at, n, acc, low);
        return;
    }
    for (int j = 0; j < n; j++, p += bytes_of(type))
        add_rest(type, N, p, y, at, j, rest, sum);
}
