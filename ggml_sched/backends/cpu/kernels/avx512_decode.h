/* avx512_decode.h -- decodes quantised blocks to vectors of 512 bits: levels of 64 elements, and scales.
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

/* The words (16 bits) in which the scales of eight blocks lie; where the type has minima, then their words. */
INLINE __m256i scale_words(const int type, const uint8_t *p) {
    const int size = bytes_of(type), each = 3 * size + 4 <= 64 ? 4 : 3;     /* blocks whose scales a vector holds */
    __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + each * size);
    /* The place of a block's word; from 32 on in b. */
#define PLACE(j) (short)(j / each % 2 * 32 + j % each * size / 2)
    __m256i at = _mm256_setr_epi16(PLACE(0), PLACE(1), PLACE(2), PLACE(3), PLACE(4), PLACE(5), PLACE(6), PLACE(7),
                                   PLACE(0) + 1, PLACE(1) + 1, PLACE(2) + 1, PLACE(3) + 1, PLACE(4) + 1, PLACE(5) + 1,
                                   PLACE(6) + 1, PLACE(7) + 1);
#undef PLACE
    __m512i words = _mm512_permutex2var_epi16(a, _mm512_castsi256_si512(at), b);
    if (each == 3)
        words = _mm512_mask_permutexvar_epi16(words, 0xc0c0, _mm512_castsi256_si512(at),
                                              _mm512_maskz_loadu_epi8(((uint64_t)1 << 2 * size) - 1, p + 6 * size));
    return _mm512_castsi512_si256(words);
}

/* Each 16-bit lane shifted right: those of the lower half of v by a bits, those of the upper by b. */
INLINE __m512i right_by(__m512i v, const int a, const int b) {
    return _mm512_srlv_epi16(v, _mm512_inserti64x4(_mm512_set1_epi16((short)a), _mm256_set1_epi16((short)b), 1));
}

INLINE __m512i left_by(__m512i v, const int a, const int b) {
    return _mm512_sllv_epi16(v, _mm512_inserti64x4(_mm512_set1_epi16((short)a), _mm256_set1_epi16((short)b), 1));
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

/* The levels of steps j and j + 1 of the eight that begin at p, of Q6_K and Q8_0. */
INLINE __m512i lanes_of_two(const int type, const uint8_t *p, const int j) {
    if (type == GS_TYPE_Q8_0)
        return _mm512_xor_si512(two(p + j * 34 + 2, p + (j + 1) * 34 + 2), wide_bytes(128));
    __m512i v = _mm512_loadu_si512(p + j / 4 * 64), high = twice(p + 128 + j / 4 * 32);
    v = _mm512_and_si512(j % 4 ? _mm512_srli_epi16(v, 4) : v, wide_bytes(15));
    high = j % 4 ? right_by(high, 0, 2) : left_by(high, 4, 2);
    return _mm512_or_si512(v, _mm512_and_si512(high, wide_bytes(48)));
}
