/* x86_few_q.h -- a strip of a row of quantised weights, decoded from its blocks, times N columns: here always one.
 *
 * Included by matmul_x86.h.  add_strip and, with AVX2 at the end of a row, add_end add the products of a row's blocks,
 * which begin at p, with strip number `at` of each of N columns: the scaled sums of products to acc[column], and the
 * contribution of minima, or of the offset, to low[column].
 */
/* 2^(e - 128), the scales of MXFP4; below e = 2 a subnormal number. */
INLINE __m256 powers(__m256i e) {
    __m256i bits = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);        /* negative if e = 0 */
    __m256i least = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), _mm256_min_epi32(e, _mm256_set1_epi32(2)));
    return _mm256_castsi256_ps(_mm256_max_epi32(bits, least));
}

/* The scales (f16) with which eight blocks begin.  Blends, unlike inserts, need no unit that shuffles. */
INLINE __m256 eight_floats(const uint8_t *p, const int size) {
    __m128i words = _mm_loadu_si128((const __m128i *)p);
#define ADD(j) words = _mm_blend_epi16(words, _mm_loadu_si128((const __m128i *)(p + (j) * (size - 2))), 1 << (j))
    ADD(1), ADD(2), ADD(3), ADD(4), ADD(5), ADD(6), ADD(7);
#undef ADD
    return _mm256_cvtph_ps(words);
}

/* The scales of eight blocks of MXFP4. */
INLINE __m256 eight_powers(const uint8_t *p) {
#define BYTE(j) p[17 * (j)]
    return powers(_mm256_setr_epi32(BYTE(0), BYTE(1), BYTE(2), BYTE(3), BYTE(4), BYTE(5), BYTE(6), BYTE(7)));
#undef BYTE
}

/* The order of a strip (gs_strip): of how many steps the first halves lie together, where a vector has bytes of as many
 * blocks. */
INLINE int strip_order(const int type) {
    if (type == GS_TYPE_Q8_0 || halves_of(type) == 2 || is_signed(type))
        return 1;
    return WIDE ? 4 : 2;
}

/* Whether one column is multiplied row by row.  `steps`: of a row, or of joined rows.  With AVX-512 this was faster,
 * or as fast, for q6_K and iq4_xs; side by side (side_q.h) was faster for the other types with 256 elements in a
 * block, and for short rows of no whole number of strips that are not joined. */
INLINE int takes_strips(const int type, int64_t steps) {
    return !WIDE || type == GS_TYPE_Q6_K || type == GS_TYPE_IQ4_XS
        || (units_of(type) == 1 && (steps % GS_STRIP_STEPS == 0 || steps >= 32));
}

INLINE int has_halved_strips(const int type) {
    return strip_order(type) > 1;
}

#if WIDE
#include "avx512_few_q.h"
#else
#include "avx2_few_q.h"
#endif
