/* avx512_decode.h -- decodes quantised blocks to vectors of 512 bits: levels of 64 elements, and scales.
 *
 * Included by x86_decode.h.
 */
/* 64 bytes, read once for all uses: such a load mostly crosses a cache line and takes two turns of the unit that
 * loads. */
INLINE __m512i read_once(const void *at) {
    __m512i v = _mm512_loadu_si512(at);
    VEC_KEEP(v);
    return v;
}

/* A vector of two loads of 32 bytes: from a in the lower half, from b in the upper. */
INLINE __m512i load_two_32(const void *a, const void *b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load32(a)), load32(b), 1);
}

INLINE __m512i load_32_twice(const void *at) {
    return _mm512_broadcast_i64x4(load32(at));
}

INLINE __m512i wide_bytes(int value) {
    return _mm512_set1_epi8((char)value);
}

/* -- eight blocks of 32 elements, by words of 16 bits -------------------------------------------------------------- */

/* Whether eight blocks of a type are read as words: blocks of 32 elements, of an even size, whose last 16 bytes are
 * nibbles. */
INLINE int reads_words(const int type) {
    return type == GS_TYPE_Q4_0 || type == GS_TYPE_Q4_1 || type == GS_TYPE_Q5_0 || type == GS_TYPE_Q5_1
        || type == GS_TYPE_IQ4_NL;
}

/* Eight blocks, as three vectors of 32 words: from byte 0, from byte 64, and the last 64 bytes. */
typedef struct block_words {
    __m512i first, second, last;
} block_words;

INLINE block_words words_from(const uint8_t *p, const int size) {
    return (block_words){read_once(p), read_once(p + 64), read_once(p + 8 * size - 64)};
}

#define OF_32(F) _mm512_set_epi16(F(31), F(30), F(29), F(28), F(27), F(26), F(25), F(24), F(23), F(22), F(21), F(20), \
                                  F(19), F(18), F(17), F(16), F(15), F(14), F(13), F(12), F(11), F(10), F(9), F(8), \
                                  F(7), F(6), F(5), F(4), F(3), F(2), F(1), F(0))

/* The nibbles of blocks 4 i to 4 i + 3: 16 bytes of each. */
INLINE __m512i nibbles_of_four(const int type, const block_words *of, const int i) {
    const int size = bytes_of(type), begin = 64 * i, next = i ? 8 * size - 64 : 64; /* bytes where two vectors begin */
#define BYTE(k) ((4 * i + (k) / 8) * size + size - 16 + (k) % 8 * 2)
#define PLACE(k) (short)(BYTE(k) < begin + 64 ? (BYTE(k) - begin) / 2 : 32 + (BYTE(k) - next) / 2)
    return i ? _mm512_permutex2var_epi16(of->second, OF_32(PLACE), of->last)
             : _mm512_permutex2var_epi16(of->first, OF_32(PLACE), of->second);
#undef PLACE
#undef BYTE
}

/* Where word k of header_words lies in eight blocks.  Words 0 .. 7 are the scales, 8 .. 15 the minima, 16 .. 31 the
 * fifth bits: of blocks 0 .. 3 those of the first 16 elements, then of the others; then the same of blocks 4 .. 7.
 * Words that a type lacks are not used. */
INLINE int header_byte(const int type, const int k) {
    const int size = bytes_of(type), fifths = has_min(type) ? 4 : 2;
    return k < 8 ? k * size : k < 16 ? (k - 8) * size + (has_min(type) ? 2 : 0)
        : (k % 4 + (k - 16) / 8 * 4) * size + fifths + k / 4 % 2 * 2;
}

INLINE __m512i header_words(const int type, const block_words *of) {
    const int size = bytes_of(type);
#define BYTE(k) header_byte(type, k)
#define PLACE(k) (short)((BYTE(k) < 128 ? BYTE(k) : BYTE(k) - (8 * size - 64)) / 2)
    const __m512i at = OF_32(PLACE);
    const __m512i words = _mm512_permutex2var_epi16(of->first, at, of->second);
    __mmask32 beyond = 0;       /* the words that only `last` has: of blocks of 18 bytes none */
    _Pragma("GCC unroll 32") for (int k = 0; k < 32; k++)
        beyond |= (__mmask32)(BYTE(k) >= 128) << k;
    return size == 18 ? words : _mm512_mask_permutexvar_epi16(words, beyond, at, of->last);
#undef PLACE
#undef BYTE
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

/* The nibbles of four blocks of MXFP4.  A block has 17 bytes: nibbles of blocks 0 and 2 begin at odd bytes, at words of
 * the load from byte 1; those of 1 and 3 at even bytes, at words of the load from byte 4. */
INLINE __m512i nibbles_of_mxfp4(const uint8_t *p) {
    const int first_word[4] = {0, 32 + 7, 17, 32 + 24};         /* from 32 on, of the second load */
#define PLACE(k) (short)(first_word[(k) / 8] + (k) % 8)
    return _mm512_permutex2var_epi16(read_once(p + 1), OF_32(PLACE), read_once(p + 4));
#undef PLACE
}

/* Adds the fifth bit: 16 where a bit is set. */
INLINE __m512i with_fifths(__m512i v, __mmask64 bits) {
    return _mm512_mask_add_epi8(v, bits, v, wide_bytes(16));
}

/* The levels of steps j and j + 1 of the eight that begin at p, of Q6_K and Q8_0. */
INLINE __m512i lanes_of_two(const int type, const uint8_t *p, const int j) {
    if (type == GS_TYPE_Q8_0)
        return _mm512_xor_si512(load_two_32(p + j * 34 + 2, p + (j + 1) * 34 + 2), wide_bytes(128));
    __m512i v = read_once(p + j / 4 * 64), high = load_32_twice(p + 128 + j / 4 * 32);
    v = _mm512_and_si512(j % 4 ? _mm512_srli_epi16(v, 4) : v, wide_bytes(15));
    high = j % 4 ? right_by(high, 0, 2) : left_by(high, 4, 2);
    return _mm512_or_si512(v, _mm512_and_si512(high, wide_bytes(48)));
}
