/* x86_decode.h -- decodes quantised blocks to vectors: levels of 32 or 64 elements as bytes, scales and minima as f32.
 *
 * Included by matmul_x86.h, which says what a level is.  Levels are unsigned, q + offset, unless is_signed(type).
 */
/* Whether the levels of a type stay signed. */
INLINE int is_signed(const int type) {
    return !VNNI && (type == GS_TYPE_Q8_0 || type == GS_TYPE_IQ4_NL || type == GS_TYPE_IQ4_XS);
}

/* -- decoding 32 elements ----------------------------------------------------------------------------------------- */

INLINE __m256i bytes(int value) {
    return _mm256_set1_epi8((char)value);
}

INLINE __m256i load32(const void *at) {
    return _mm256_loadu_si256((const __m256i *)at);
}

INLINE __m256i right(__m256i v, const int n) {
    return _mm256_srli_epi16(v, n);
}

INLINE __m256i left(__m256i v, const int n) {
    return _mm256_slli_epi16(v, n);
}

/* The 32 nibbles of 16 bytes: all low ones, then all high ones. */
INLINE __m256i nibbles(const uint8_t *at) {
    __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)at));
    return _mm256_and_si256(_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4)), bytes(15));
}

/* The fifth bits of 32 levels, from the 32 bits at `at`: byte i is 16 where bit i is set, else 0. */
INLINE __m256i fifths(const uint8_t *at) {
#if WIDE
    return _mm256_maskz_mov_epi8(gs_load_u32(at), bytes(16));
#else
    __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32((int)gs_load_u32(at)),
                                         _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                                            0x0303030303030303));
    __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit), bytes(16));
#endif
}

INLINE __m256i looked_up(const uint8_t *at, const int8_t *table) {
    __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return _mm256_shuffle_epi8(levels, nibbles(at));
}

/* Signed bytes as levels: unchanged if is_signed(type), else plus 128 (an xor of the highest bit). */
INLINE __m256i raised(const int type, __m256i v) {
    return is_signed(type) ? v : _mm256_xor_si256(v, bytes(128));
}

/* The levels of elements 32 j .. 32 j + 31 of the block at p. */
INLINE __m256i lanes(const int type, const uint8_t *p, const int j) {
    __m256i low, high;
    switch (type) {
    case GS_TYPE_Q4_0: return nibbles(p + 2);
    case GS_TYPE_Q4_1: return nibbles(p + 4);
    case GS_TYPE_Q5_0: return _mm256_or_si256(nibbles(p + 6), fifths(p + 2));
    case GS_TYPE_Q5_1: return _mm256_or_si256(nibbles(p + 8), fifths(p + 4));
    case GS_TYPE_Q8_0: return raised(type, load32(p + 2));
    case GS_TYPE_Q2_K: return _mm256_and_si256(right(load32(p + 16 + j / 4 * 32), j % 4 * 2), bytes(3));
    case GS_TYPE_Q3_K:
        low = _mm256_and_si256(right(load32(p + 32 + j / 4 * 32), j % 4 * 2), bytes(3));
        high = j < 2 ? left(load32(p), 2 - j) : right(load32(p), j - 2);
        return _mm256_or_si256(low, _mm256_and_si256(high, bytes(4)));
    case GS_TYPE_Q4_K: return _mm256_and_si256(right(load32(p + 16 + j / 2 * 32), j % 2 * 4), bytes(15));
    case GS_TYPE_Q5_K:
        low = _mm256_and_si256(right(load32(p + 48 + j / 2 * 32), j % 2 * 4), bytes(15));
        high = j < 4 ? left(load32(p + 16), 4 - j) : right(load32(p + 16), j - 4);
        return _mm256_or_si256(low, _mm256_and_si256(high, bytes(16)));
    case GS_TYPE_Q6_K:
        low = _mm256_and_si256(right(load32(p + j / 4 * 64 + j % 2 * 32), j % 4 / 2 * 4), bytes(15));
        high = load32(p + 128 + j / 4 * 32);
        high = j % 4 < 2 ? left(high, 4 - j % 4 * 2) : right(high, j % 4 * 2 - 4);
        return _mm256_or_si256(low, _mm256_and_si256(high, bytes(48)));
    case GS_TYPE_IQ4_NL: return raised(type, looked_up(p + 2, gs_iq4_levels));
    case GS_TYPE_IQ4_XS: return raised(type, looked_up(p + 8 + 16 * j, gs_iq4_levels));
    default: return _mm256_add_epi8(looked_up(p + 1, gs_mxfp4_levels), bytes(12));
    }
}

/* The levels of elements 32 j .. 32 j + 31 of the block at p, multiplied by the factors of both halves: `products` has
 * the products of each factor and the levels 0 .. 7. */
INLINE __m256i folded(const int type, const uint8_t *p, const int j, const uint64_t products[2]) {
    __m256i both = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)products));
    return _mm256_shuffle_epi8(_mm256_permute4x64_epi64(both, 0x50), lanes(type, p, j));
}

INLINE float half(const uint8_t *at) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(gs_load_u16(at))));
}

/* Writes 8 unsigned bytes of v to `to`, as f32 multiplied by `times`. */
INLINE void put_unsigned(float *to, __m128i v, float times) {
    _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v)), _mm256_set1_ps(times)));
}

INLINE void put_signed(float *to, __m128i v, float times) {
    _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)), _mm256_set1_ps(times)));
}

/* The 16 factors of a Q3_K block, plus 32. */
INLINE __m128i raised_factors_of_q3_k(const uint8_t *p) {
    __m128i v = _mm_loadl_epi64((const __m128i *)(p + 96));
    v = _mm_and_si128(_mm_unpacklo_epi64(v, _mm_srli_epi16(v, 4)), _mm_set1_epi8(15));
    __m128i high = _mm_srlv_epi32(_mm_set1_epi32((int)gs_load_u32(p + 104)), _mm_setr_epi32(0, 2, 4, 6));
    high = _mm_slli_epi16(_mm_and_si128(high, _mm_set1_epi8(3)), 4);
    return _mm_or_si128(v, high);
}

/* The 16 signed bytes by which a Q3_K block's scale is multiplied. */
INLINE __m128i factors_of_q3_k(const uint8_t *p) {
    return _mm_sub_epi8(raised_factors_of_q3_k(p), _mm_set1_epi8(32));
}

/* The factor of each 16 elements of a block (folded_q.h); those of Q3_K plus 32. */
INLINE void factors_of(const int type, const uint8_t *p, uint8_t factors[16]) {
    __m128i v = type == GS_TYPE_Q2_K ? _mm_and_si128(_mm_loadu_si128((const __m128i *)p), _mm_set1_epi8(15))
                                     : raised_factors_of_q3_k(p);
    _mm_storeu_si128((__m128i *)factors, v);
}

/* The eight scales of an IQ4_XS block, in their order, or those with even numbers first. */
INLINE __m256 scales_of_iq4_xs(const uint8_t *p, const int evens_first) {
    const __m256i shift = evens_first ? _mm256_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14)
                                      : _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    __m256i low = _mm256_srlv_epi32(_mm256_set1_epi32((int)gs_load_u32(p + 4)), _mm256_add_epi32(shift, shift));
    __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(gs_load_u16(p + 2)), shift);
    low = _mm256_and_si256(low, _mm256_set1_epi32(15));
    high = _mm256_slli_epi32(_mm256_and_si256(high, _mm256_set1_epi32(3)), 4);
    low = _mm256_sub_epi32(_mm256_or_si256(low, high), _mm256_set1_epi32(32));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(low), _mm256_set1_ps(half(p)));
}

/* Decodes the scales of the block at p to s and, where its type has minima, the minima to m: units_of(type) *
 * halves_of(type) numbers each. */
INLINE void scales(const int type, const uint8_t *p, float *s, float *m) {
    __m128i v, w, nibble = _mm_set1_epi8(15);
    float d;
    switch (type) {
    case GS_TYPE_Q4_1:
    case GS_TYPE_Q5_1:
        s[0] = half(p);
        m[0] = half(p + 2);
        return;
    case GS_TYPE_Q2_K:
        v = _mm_loadu_si128((const __m128i *)p);
        w = _mm_and_si128(_mm_srli_epi16(v, 4), nibble);
        v = _mm_and_si128(v, nibble);
        d = half(p + 80);
        put_unsigned(s, v, d);
        put_unsigned(s + 8, _mm_srli_si128(v, 8), d);
        d = -half(p + 82);
        put_unsigned(m, w, d);
        put_unsigned(m + 8, _mm_srli_si128(w, 8), d);
        return;
    case GS_TYPE_Q3_K:
        v = factors_of_q3_k(p);
        d = half(p + 108);
        put_signed(s, v, d);
        put_signed(s + 8, _mm_srli_si128(v, 8), d);
        return;
    case GS_TYPE_Q4_K:
    case GS_TYPE_Q5_K: {
        uint32_t a = gs_load_u32(p + 4), b = gs_load_u32(p + 8), c = gs_load_u32(p + 12);
        uint32_t s1 = (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u), m1 = (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u);
        v = _mm_setr_epi32((int)(a & 0x3f3f3f3fu), (int)s1, 0, 0);
        w = _mm_setr_epi32((int)(b & 0x3f3f3f3fu), (int)m1, 0, 0);
        put_unsigned(s, v, half(p));
        put_unsigned(m, w, -half(p + 2));
        return;
    }
    case GS_TYPE_Q6_K:
        v = _mm_loadu_si128((const __m128i *)(p + 192));
        d = half(p + 208);
        put_signed(s, v, d);
        put_signed(s + 8, _mm_srli_si128(v, 8), d);
        return;
    case GS_TYPE_IQ4_XS:
        _mm256_storeu_ps(s, scales_of_iq4_xs(p, 0));
        return;
    case GS_TYPE_MXFP4:
        s[0] = gs_f32_of_bits(p[0] < 2 ? 0x00200000u << p[0] : (uint32_t)(p[0] - 1) << 23);
        return;
    default:
        s[0] = half(p);
    }
}

#if WIDE
#include "avx512_decode.h"
#else
#include "avx2_decode.h"
#endif
