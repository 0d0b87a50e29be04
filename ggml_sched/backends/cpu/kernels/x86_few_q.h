/* x86_few_q.h -- a strip of R neighbouring rows of quantised weights, decoded from their blocks, times N columns: here
 * always one.
 *
 * Included by matmul_x86.h.  add_strip and, with AVX2 at the end of rows, add_end add the products of the rows' blocks,
 * which begin at p and then each `stride` bytes, with strip number `at` of the column: the scaled sums of products to
 * acc[row], and the contribution of minima, or of the offset, to low[row]; of two rows that share vectors to the halves
 * of acc[0] and low[0] (takes_two_rows).
 */
/* 2^(e - 128), the scales of MXFP4; below e = 2 a subnormal number. */
INLINE __m256 powers(__m256i e) {
    __m256i bits = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);        /* negative if e = 0 */
    __m256i least = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), _mm256_min_epi32(e, _mm256_set1_epi32(2)));
    return _mm256_castsi256_ps(_mm256_max_epi32(bits, least));
}

#define EVENS_FIRST !WIDE       /* see gs_product_kernels */

/* Where step j of a strip has its scale.  A macro, because compilers want constants for blends. */
#define PLACE_OF(j) (EVENS_FIRST ? (j) / 2 + (j) % 2 * 4 : (j))

/* The words with which the first n of eight blocks begin, in the order of a strip's scales; those beyond repeat the
 * last one.  Blends, unlike inserts, need no unit that shuffles. */
INLINE __m128i eight_words(const uint8_t *p, const int size, const int n) {
#if EVENS_FIRST
    if (size == 18 && n == 8) { /* of 32 bytes from 32 i on, scale 2 i is word 2 i, and scale 2 i + 1 word 9 + 2 i */
        __m256i words = load32(p);
        words = _mm256_blend_epi16(words, load32(p + 32), 0x0c);
        words = _mm256_blend_epi16(words, load32(p + 64), 0x30);
        words = _mm256_blend_epi16(words, load32(p + 96), 0xc0);
        words = _mm256_shuffle_epi8(words, _mm256_setr_epi64x(0x0d0c090805040100, 0, 0x0f0e0b0a07060302, 0));
        return _mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0x08));
    }
#endif
    __m128i words = _mm_loadu_si128((const __m128i *)p);
#define ADD(j) words = _mm_blend_epi16(words, _mm_loadu_si128( \
        (const __m128i *)(p + ((j) < n ? (j) : n - 1) * size - 2 * PLACE_OF(j))), 1 << PLACE_OF(j))
    ADD(1), ADD(2), ADD(3), ADD(4), ADD(5), ADD(6), ADD(7);
#undef ADD
    return words;
}

/* The scales of the first n of eight blocks of MXFP4, as eight_words. */
INLINE __m256 eight_powers(const uint8_t *p, const int n) {
#define STEP(place) (EVENS_FIRST ? 2 * (place) % 8 + (place) / 4 : (place))
#define BYTE(place) p[17 * (STEP(place) < n ? STEP(place) : n - 1)]
    return powers(_mm256_setr_epi32(BYTE(0), BYTE(1), BYTE(2), BYTE(3), BYTE(4), BYTE(5), BYTE(6), BYTE(7)));
#undef BYTE
#undef STEP
}

/* Whether a vector has levels of two rows. */
INLINE int takes_two_rows(const int type) {
    return !WIDE && (type == GS_TYPE_Q4_K || type == GS_TYPE_Q5_K);
}

/* The order of a strip (gs_strip): of how many steps the first halves lie together, where a vector has bytes of as many
 * blocks. */
INLINE int strip_order(const int type) {
    if (type == GS_TYPE_Q8_0 || halves_of(type) == 2 || takes_two_rows(type))
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

#if WIDE
#include "avx512_few_q.h"
#else
#include "avx2_few_q.h"
#endif
