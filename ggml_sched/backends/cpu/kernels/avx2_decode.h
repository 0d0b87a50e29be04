/* avx2_decode.h -- decodes two blocks of quantised weights at once: of one row, or of two.
 *
 * Included by x86_decode.h.
 */
/* The eight signed bytes by which an IQ4_XS block's scale is multiplied. */
INLINE __m128i factors_of_iq4_xs(const uint8_t *p) {
    __m128i v = _mm_cvtsi32_si128((int)gs_load_u32(p + 4));
    uint64_t high = gs_load_u16(p + 2);         /* two bits each: into bytes of their own */
    high = (high | high << 24) & 0x000000ff000000ffu;
    high = (high | high << 12) & 0x000f000f000f000fu;
    high = (high | high << 6) & 0x0303030303030303u;
    v = _mm_and_si128(_mm_unpacklo_epi8(v, _mm_srli_epi16(v, 4)), _mm_set1_epi8(15));
    return _mm_sub_epi8(_mm_or_si128(v, _mm_cvtsi64_si128((long long)(high << 4))), _mm_set1_epi8(32));
}

/* 16 bytes at a, and those at b. */
INLINE __m256i load_two(const uint8_t *a, const uint8_t *b) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)a)),
                                   _mm_loadu_si128((const __m128i *)b), 1);
}

/* The eight scales and then the eight minima of two Q4_K or Q5_K blocks, as integers. */
INLINE __m256i six_bits(const uint8_t *a, const uint8_t *b) {
    __m256i head = load_two(a, b);      /* 32 bits each: d and dmin, then a, b, c as in `scales` */
    __m256i v = _mm256_srlv_epi32(_mm256_shuffle_epi32(head, _MM_SHUFFLE(3, 2, 3, 1)),
                                  _mm256_setr_epi32(0, 0, 0, 4, 0, 0, 0, 4));
    __m256i high = _mm256_srli_epi32(_mm256_shuffle_epi32(head, _MM_SHUFFLE(2, 1, 1, 0)), 2);
    const long long low_bits = 0x0f0f0f0f3f3f3f3f, high_bits = 0x3030303000000000;
    return _mm256_or_si256(_mm256_and_si256(v, _mm256_set1_epi64x(low_bits)),
                           _mm256_and_si256(high, _mm256_set1_epi64x(high_bits)));
}

/* Of the 32 bits at a and at b, those of bytes `from` and from + 1: byte i of the lower half of the result is 16 where
 * bit i of a's is set, else 0; the upper half is b's. */
INLINE __m256i fifths_of_two(const uint8_t *a, const uint8_t *b, const int from) {
    __m256i words = _mm256_inserti128_si256(_mm256_set1_epi32((int)gs_load_u32(a)),
                                            _mm_set1_epi32((int)gs_load_u32(b)), 1);
    const long long one = 0x0101010101010101ll * from, next = 0x0101010101010101ll * (from + 1);
    __m256i spread = _mm256_shuffle_epi8(words, _mm256_setr_epi64x(one, next, one, next));
    __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit), bytes(16));
}

/* Bit j of each byte, as 16 or 0. */
INLINE __m256i fifths_of_k(__m256i v, const int j) {
    return _mm256_and_si256(j < 4 ? left(v, 4 - j) : right(v, j - 4), bytes(16));
}

/* The levels of the low or of the high nibbles of v; of types with five bits without the fifth. */
INLINE __m256i nibbles_of(const int type, __m256i v, const int high) {
    v = _mm256_and_si256(high ? right(v, 4) : v, bytes(15));
    if (type == GS_TYPE_MXFP4 || type == GS_TYPE_IQ4_NL || type == GS_TYPE_IQ4_XS) {
        const int8_t *table = type == GS_TYPE_MXFP4 ? gs_mxfp4_levels : gs_iq4_levels;
        __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
        if (!is_signed(type))
            levels = _mm256_add_epi8(levels, bytes(type == GS_TYPE_MXFP4 ? 12 : 128));
        v = _mm256_shuffle_epi8(levels, v);
    }
    return v;
}

/* The levels of steps i and j of the eight that begin at p, of a type whose steps are 16 bytes of nibbles each: of the
 * first 16 elements of both, and of the others. */
INLINE void lanes_of_pair(const int type, const uint8_t *p, const int i, const int j, __m256i v[2]) {
    const int size = bytes_of(type), from = size - 16, fifths = type == GS_TYPE_Q5_0 ? 2 : 4;
    const uint8_t *a = p + i * size, *b = p + j * size;
    __m256i both = type == GS_TYPE_IQ4_XS ? load32(p + 8 + 16 * i) : load_two(a + from, b + from);
    UNROLL for (int h = 0; h < 2; h++) {
        v[h] = nibbles_of(type, both, h);
        if (has_fifths(type))
            v[h] = _mm256_or_si256(v[h], fifths_of_two(a + fifths, b + fifths, 2 * h));
    }
}
