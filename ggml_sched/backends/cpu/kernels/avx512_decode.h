/* avx512_decode.h -- decodes quantised blocks to vectors of 512 bits: levels of 64 elements, eight scales or 16.
 *
 * Included by x86_decode.h.
 */
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
    __m128i head = _mm_loadu_si128((const __m128i *)p), v = six_bits(p);
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

/* The levels of 64 bytes: those in the lower four bits, and the others. */
INLINE void lanes_of_nibbles(const int type, __m512i v, __m512i *low, __m512i *high) {
    *low = _mm512_and_si512(v, wide_bytes(15));
    *high = _mm512_and_si512(_mm512_srli_epi16(v, 4), wide_bytes(15));
    if (type == GS_TYPE_IQ4_NL || type == GS_TYPE_IQ4_XS || type == GS_TYPE_MXFP4) {
        const int8_t *table = type == GS_TYPE_MXFP4 ? gs_mxfp4_levels : gs_iq4_levels;
        *low = wide_levels(*low, table, type == GS_TYPE_MXFP4 ? 12 : 128);
        *high = wide_levels(*high, table, type == GS_TYPE_MXFP4 ? 12 : 128);
    }
}

/* The levels of four blocks of a type with halved strips: of the first 16 elements of each block, and of the others. */
INLINE void lanes_of_four(const int type, const uint8_t *const *block, __m512i *low, __m512i *high) {
    const int from = bytes_of(type) - 16, fifths = type == GS_TYPE_Q5_0 ? 2 : 4;
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(block[0] + from)));
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(block[1] + from)), 1);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(block[2] + from)), 2);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(block[3] + from)), 3);
    lanes_of_nibbles(type, v, low, high);
    if (type == GS_TYPE_Q5_0 || type == GS_TYPE_Q5_1) {
        *low = _mm512_or_si512(*low, _mm512_maskz_mov_epi8(bits_of_four(block, fifths), wide_bytes(16)));
        *high = _mm512_or_si512(*high, _mm512_maskz_mov_epi8(bits_of_four(block, fifths + 2), wide_bytes(16)));
    }
}

/* The levels of steps j and j + 1 of the eight that begin at p, of other types. */
INLINE __m512i lanes_of_two(const int type, const uint8_t *p, const int j) {
    __m512i v;
    switch (type) {
    case GS_TYPE_Q4_K: return _mm512_and_si512(right_by(twice(p + 16 + j / 2 * 32), 0, 4), wide_bytes(15));
    case GS_TYPE_Q5_K:
        v = _mm512_and_si512(right_by(twice(p + 48 + j / 2 * 32), 0, 4), wide_bytes(15));
        return where_bit(v, twice(p + 16), j, 16);
    case GS_TYPE_Q6_K:
        v = _mm512_loadu_si512(p + j / 4 * 64);
        v = _mm512_and_si512(j % 4 ? _mm512_srli_epi16(v, 4) : v, wide_bytes(15));
        return _mm512_or_si512(v, _mm512_and_si512(j % 4 ? right_by(twice(p + 128 + j / 4 * 32), 0, 2)
                                                         : left_by(twice(p + 128 + j / 4 * 32), 4, 2), wide_bytes(48)));
    default: return _mm512_xor_si512(two(p + j * 34 + 2, p + (j + 1) * 34 + 2), wide_bytes(128));
    }
}
