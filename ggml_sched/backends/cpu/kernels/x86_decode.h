/* x86_decode.h -- decodes quantised blocks to vectors: levels of 32 or 64 elements as bytes, scales and minima as f32.
 *
 * Included by matmul_x86.h, which says what a level is.  Levels are unsigned, q + offset, unless is_signed(type).
 */
/* Whether the levels of a type stay signed. */
INLINE int is_signed(const int type) {
    return !WIDE && (type == GS_TYPE_Q8_0 || type == GS_TYPE_IQ4_NL || type == GS_TYPE_IQ4_XS);
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

/* The 16 signed bytes by which a Q3_K block's scale is multiplied. */
INLINE __m128i factors_of_q3_k(const uint8_t *p) {
    __m128i v = _mm_loadl_epi64((const __m128i *)(p + 96));
    v = _mm_and_si128(_mm_unpacklo_epi64(v, _mm_srli_epi16(v, 4)), _mm_set1_epi8(15));
    __m128i high = _mm_srlv_epi32(_mm_set1_epi32((int)gs_load_u32(p + 104)), _mm_setr_epi32(0, 2, 4, 6));
    high = _mm_slli_epi16(_mm_and_si128(high, _mm_set1_epi8(3)), 4);
    return _mm_sub_epi8(_mm_or_si128(v, high), _mm_set1_epi8(32));
}

INLINE __m256 scales_of_iq4_xs(const uint8_t *p) {
    __m256i low = _mm256_srlv_epi32(_mm256_set1_epi32((int)gs_load_u32(p + 4)),
                                    _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(gs_load_u16(p + 2)),
                                     _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
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
        _mm256_storeu_ps(s, scales_of_iq4_xs(p));
        return;
    case GS_TYPE_MXFP4:
        s[0] = gs_f32_of_bits(p[0] < 2 ? 0x00200000u << p[0] : (uint32_t)(p[0] - 1) << 23);
        return;
    default:
        s[0] = half(p);
    }
}

#if WIDE
/* A vector of two loads of 32 bytes: from a in the lower half, from b in the upper. */
INLINE __m512i two(const void *a, const void *b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load32(a)), load32(b), 1);
}

INLINE __m512i twice(const void *at) {
    return _mm512_broadcast_i64x4(load32(at));
}

INLINE __m512i wide_bytes(int value) {
    return _mm512_set1_epi8((char)value);
}

INLINE __m512i two_nibbles(const uint8_t *a, const uint8_t *b) {
    __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)a));
    __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)b));
    __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    return _mm512_and_si512(_mm512_srlv_epi64(both, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4)), wide_bytes(15));
}

/* n * size bytes at p, at most 64 of them; the rest of the vector is zeros, or bytes that follow. */
INLINE __m512i first_bytes(const uint8_t *p, const int size, const int n) {
    return n <= 0 ? _mm512_setzero_si512() : n * size >= 64 ? _mm512_loadu_si512(p)
         : _mm512_maskz_loadu_epi8(((uint64_t)1 << n * size) - 1, p);
}

/* The words (16 bits) in which the scales of the n blocks from p on lie, at most 8, zeros for other blocks; where the
 * type has minima, then their words. */
INLINE __m256i scale_words(const int type, const uint8_t *p, const int n) {
    const int size = bytes_of(type), each = 3 * size + 4 <= 64 ? 4 : 3;     /* blocks whose scales a vector holds */
    __m512i a = first_bytes(p, size, n), b = first_bytes(p + each * size, size, n - each);
    /* The place of a block's word; from 32 on in b. */
#define PLACE(j) (short)(j / each % 2 * 32 + j % each * size / 2)
    __m256i at = _mm256_setr_epi16(PLACE(0), PLACE(1), PLACE(2), PLACE(3), PLACE(4), PLACE(5), PLACE(6), PLACE(7),
                                   PLACE(0) + 1, PLACE(1) + 1, PLACE(2) + 1, PLACE(3) + 1, PLACE(4) + 1, PLACE(5) + 1,
                                   PLACE(6) + 1, PLACE(7) + 1);
#undef PLACE
    __m512i words = _mm512_permutex2var_epi16(a, _mm512_castsi256_si512(at), b);
    if (each == 3)
        words = _mm512_mask_permutexvar_epi16(words, 0xc0c0, _mm512_castsi256_si512(at),
                                              first_bytes(p + 6 * size, size, n - 6));
    return _mm512_castsi512_si256(words);
}

/* The eight scales and then the eight minima, without their minus, of a Q4_K or Q5_K block. */
INLINE __m512 six_bit_scales(const uint8_t *p) {
    __m128i head = _mm_loadu_si128((const __m128i *)p);     /* 32 bits each: d and dmin, then a, b, c as in `scales` */
    __m128i v = _mm_srlv_epi32(_mm_shuffle_epi32(head, _MM_SHUFFLE(3, 2, 3, 1)), _mm_setr_epi32(0, 0, 0, 4));
    __m128i high = _mm_srli_epi32(_mm_shuffle_epi32(head, _MM_SHUFFLE(2, 1, 1, 0)), 2);
    v = _mm_and_si128(v, _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f));
    v = _mm_or_si128(v, _mm_and_si128(high, _mm_setr_epi32(0, 0x30303030, 0, 0x30303030)));
    __m512 d = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
                                     _mm512_castps128_ps512(_mm_cvtph_ps(head)));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(v)), d);
}

/* Each 16-bit lane shifted right: those of the lower half of v by a bits, those of the upper by b. */
INLINE __m512i right_by(__m512i v, const int a, const int b) {
    return _mm512_srlv_epi16(v, _mm512_inserti64x4(_mm512_set1_epi16((short)a), _mm256_set1_epi16((short)b), 1));
}

INLINE __m512i left_by(__m512i v, const int a, const int b) {
    return _mm512_sllv_epi16(v, _mm512_inserti64x4(_mm512_set1_epi16((short)a), _mm256_set1_epi16((short)b), 1));
}

/* Adds `value` to each byte of v where the byte of `bits` at the same place has a certain bit set: bit j for bytes in
 * the lower half of v, bit j + 1 in the upper half. */
INLINE __m512i where_bit(__m512i v, __m512i bits, const int j, const int value) {
    __m512i bit = _mm512_inserti64x4(wide_bytes(1 << j), bytes(2 << j), 1);
    return _mm512_or_si512(v, _mm512_maskz_mov_epi8(_mm512_test_epi8_mask(bits, bit), wide_bytes(value)));
}

INLINE __m512i wide_levels(__m512i places, const int8_t *table, const int offset) {
    __m128i levels = _mm_add_epi8(_mm_loadu_si128((const __m128i *)table), _mm_set1_epi8((char)offset));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(levels), places);
}

/* The 16 bits at `from` of each block, those of the first block lowest. */
INLINE __mmask64 bits_of_four(const uint8_t *const *block, const int from) {
    return gs_load_u16(block[0] + from) | (uint64_t)gs_load_u16(block[1] + from) << 16
           | (uint64_t)gs_load_u16(block[2] + from) << 32 | (uint64_t)gs_load_u16(block[3] + from) << 48;
}

/* The levels of four blocks of a type with halved strips: of the first 16 elements of each block, and of the others. */
INLINE void lanes_of_four(const int type, const uint8_t *const *block, __m512i *low, __m512i *high) {
    const int from = bytes_of(type) - 16, fifths = type == GS_TYPE_Q5_0 ? 2 : 4;
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(block[0] + from)));
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(block[1] + from)), 1);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(block[2] + from)), 2);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(block[3] + from)), 3);
    *low = _mm512_and_si512(v, wide_bytes(15));
    *high = _mm512_and_si512(_mm512_srli_epi16(v, 4), wide_bytes(15));
    switch (type) {
    case GS_TYPE_Q5_0: case GS_TYPE_Q5_1:
        *low = _mm512_or_si512(*low, _mm512_maskz_mov_epi8(bits_of_four(block, fifths), wide_bytes(16)));
        *high = _mm512_or_si512(*high, _mm512_maskz_mov_epi8(bits_of_four(block, fifths + 2), wide_bytes(16)));
        return;
    case GS_TYPE_IQ4_NL:
        *low = wide_levels(*low, gs_iq4_levels, 128);
        *high = wide_levels(*high, gs_iq4_levels, 128);
        return;
    case GS_TYPE_MXFP4:
        *low = wide_levels(*low, gs_mxfp4_levels, 12);
        *high = wide_levels(*high, gs_mxfp4_levels, 12);
        return;
    }
}

/* The levels of steps j and j + 1 of the eight that begin at p, of other types. */
INLINE __m512i lanes_of_two(const int type, const uint8_t *p, const int j) {
    __m512i v;
    switch (type) {
    case GS_TYPE_Q2_K:
        return _mm512_and_si512(right_by(twice(p + 16 + j / 4 * 32), j % 4 * 2, j % 4 * 2 + 2), wide_bytes(3));
    case GS_TYPE_Q3_K:
        v = _mm512_and_si512(right_by(twice(p + 32 + j / 4 * 32), j % 4 * 2, j % 4 * 2 + 2), wide_bytes(3));
        return where_bit(v, twice(p), j, 4);
    case GS_TYPE_Q4_K: return _mm512_and_si512(right_by(twice(p + 16 + j / 2 * 32), 0, 4), wide_bytes(15));
    case GS_TYPE_Q5_K:
        v = _mm512_and_si512(right_by(twice(p + 48 + j / 2 * 32), 0, 4), wide_bytes(15));
        return where_bit(v, twice(p + 16), j, 16);
    case GS_TYPE_Q6_K:
        v = _mm512_loadu_si512(p + j / 4 * 64);
        v = _mm512_and_si512(j % 4 ? _mm512_srli_epi16(v, 4) : v, wide_bytes(15));
        return _mm512_or_si512(v, _mm512_and_si512(j % 4 ? right_by(twice(p + 128 + j / 4 * 32), 0, 2)
                                                         : left_by(twice(p + 128 + j / 4 * 32), 4, 2), wide_bytes(48)));
    case GS_TYPE_IQ4_XS: return wide_levels(two_nibbles(p + 8 + 16 * j, p + 24 + 16 * j), gs_iq4_levels, 128);
    default: return _mm512_xor_si512(two(p + j * 34 + 2, p + (j + 1) * 34 + 2), wide_bytes(128));
    }
}
#endif
