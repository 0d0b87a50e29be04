/* x86_few_q.h -- a strip of a row of quantised weights, decoded from its blocks, times N columns: here always one.
 *
 * Included by matmul_x86.h.  add_strip and, at the end of a row, add_end add the products of a row's blocks, which
 * begin at p, with strip number `at` of each of N columns: the scaled sums of products to acc[column], and the
 * contribution of minima, or of the offset, to low[column].
 */
/* 2^(e - 128), the scales of MXFP4; below e = 2 a subnormal number. */
INLINE __m256 powers(__m256i e) {
    __m256i bits = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    __m256i subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(bits, subnormal, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}

/* The scales (f16) with which eight blocks begin.  Blends, unlike inserts, need no unit that shuffles. */
INLINE __m256 eight_floats(const uint8_t *p, const int size) {
    __m128i words = _mm_loadu_si128((const __m128i *)p);
#define ADD(j) words = _mm_blend_epi16(words, _mm_loadu_si128((const __m128i *)(p + (j) * (size - 2))), 1 << (j))
    ADD(1), ADD(2), ADD(3), ADD(4), ADD(5), ADD(6), ADD(7);
#undef ADD
    return _mm256_cvtph_ps(words);
}

/* The scales of n blocks of MXFP4, at most 8, then normal numbers. */
INLINE __m256 eight_powers(const uint8_t *p, const int n) {
#define BYTE(j) (j < n ? p[17 * (j)] : 2)
    return powers(_mm256_setr_epi32(BYTE(0), BYTE(1), BYTE(2), BYTE(3), BYTE(4), BYTE(5), BYTE(6), BYTE(7)));
#undef BYTE
}

/* The order of a strip (gs_strip): of how many steps the first halves lie together, where a vector has bytes of as many
 * blocks; or spread. */
INLINE int strip_order(const int type) {
    if (WIDE && (type == GS_TYPE_Q2_K || type == GS_TYPE_Q3_K))
        return GS_SPREAD + (type == GS_TYPE_Q2_K ? 2 : 1);
    if (type == GS_TYPE_Q8_0 || halves_of(type) == 2 || is_signed(type))
        return 1;
    return !WIDE ? 2 : units_of(type) == 1 || type == GS_TYPE_IQ4_XS ? 4 : 1;
}

INLINE int has_spread_strips(const int type) {
    return strip_order(type) > GS_SPREAD;
}

INLINE int has_halved_strips(const int type) {
    return strip_order(type) > 1 && !has_spread_strips(type);
}

/* Whether `times` of strip_scales lacks the minus of the minima. */
INLINE int subtracts_minima(const int type) {
    return units_of(type) == 8 && has_min(type);
}

#if WIDE
#include "avx512_few_q.h"
#else
#include "avx2_few_q.h"
#endif

INLINE void add_strip(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at,
                      vec acc[][2], __m256 low[]) {
    add_steps(type, N, p, y, at, 8, acc, low);
}

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
    if (has_halved_strips(type) && (WIDE || at > 0)) {
        add_steps(type, N, p, y, at, n, acc, low);
        return;
    }
    for (int j = 0; j < n; j++, p += bytes_of(type))
        add_rest(type, N, p, y, at, j, rest, sum);
}
