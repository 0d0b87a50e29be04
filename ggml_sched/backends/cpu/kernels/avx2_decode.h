/* avx2_decode.h -- decodes two steps of quantised blocks at once, for strips in halves, and their scales.
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

/* The eight scales and then the eight minima of a Q4_K or Q5_K block, as integers. */
INLINE __m128i six_bits(const uint8_t *p) {
    __m128i head = _mm_loadu_si128((const __m128i *)p);     /* 32 bits each: d and dmin, then a, b, c as in `scales` */
    __m128i v = _mm_srlv_epi32(_mm_shuffle_epi32(head, _MM_SHUFFLE(3, 2, 3, 1)), _mm_setr_epi32(0, 0, 0, 4));
    __m128i high = _mm_srli_epi32(_mm_shuffle_epi32(head, _MM_SHUFFLE(2, 1, 1, 0)), 2);
    v = _mm_and_si128(v, _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f));
    return _mm_or_si128(v, _mm_and_si128(high, _mm_setr_epi32(0, 0x30303030, 0, 0x30303030)));
}

/* The eight scales and the eight minima, without their minus, of a Q4_K or Q5_K block. */
INLINE __m256 six_bit_scales(const uint8_t *p, __m256 *minima) {
    __m128i v = six_bits(p);
    __m256 m = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)));
    *minima = _mm256_mul_ps(m, _mm256_set1_ps(half(p + 2)));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v)), _mm256_set1_ps(half(p)));
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

/* Of 16 bytes, bit j of each in the lower half of the result, bit j + 1 in the upper half, as 16 or 0. */
INLINE __m256i fifths_of_k(const uint8_t *at, const int j) {
    __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)at));
    both = j < 4 ? _mm256_sllv_epi64(both, _mm256_setr_epi64x(4 - j, 4 - j, 3 - j, 3 - j))
                 : _mm256_srlv_epi64(both, _mm256_setr_epi64x(j - 4, j - 4, j - 3, j - 3));
    return _mm256_and_si256(both, bytes(16));
}

/* The levels of the low and of the high nibbles of v; of types with five bits without the fifth. */
INLINE void split(const int type, __m256i v, __m256i *low, __m256i *high) {
    *low = _mm256_and_si256(v, bytes(15));
    *high = _mm256_and_si256(right(v, 4), bytes(15));
    if (type == GS_TYPE_MXFP4 || type == GS_TYPE_IQ4_NL || type == GS_TYPE_IQ4_XS) {
        const int8_t *table = type == GS_TYPE_MXFP4 ? gs_mxfp4_levels : gs_iq4_levels;
        __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
        levels = _mm256_add_epi8(levels, bytes(type == GS_TYPE_MXFP4 ? 12 : 128));
        *low = _mm256_shuffle_epi8(levels, *low);
        *high = _mm256_shuffle_epi8(levels, *high);
    }
}

/* The levels of steps i and j of the eight that begin at p, for a type with halved strips: of the first 16 elements of
 * both, and of the others.  Where a block has eight steps, j is i + 1. */
INLINE void lanes_of_pair(const int type, const uint8_t *p, const int i, const int j, __m256i *first,
                          __m256i *second) {
    if (type == GS_TYPE_IQ4_XS) {
        split(type, load32(p + 8 + 16 * i), first, second);
        return;
    }
    if (units_of(type) == 8) {
        const uint8_t *at = p + (type == GS_TYPE_Q5_K ? 48 : 16) + i / 2 * 32;
        *first = nibbles(at);
        *second = nibbles(at + 16);
        if (type == GS_TYPE_Q5_K) {
            *first = _mm256_or_si256(*first, fifths_of_k(p + 16, i));
            *second = _mm256_or_si256(*second, fifths_of_k(p + 32, i));
        }
        return;
    }
    const int size = bytes_of(type), from = size - 16, fifths = type == GS_TYPE_Q5_0 ? 2 : 4;
    const uint8_t *a = p + i * size, *b = p + j * size;
    __m256i v = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(a + from))),
                                        _mm_loadu_si128((const __m128i *)(b + from)), 1);
    split(type, v, first, second);
    if (has_fifths(type)) {
        *first = _mm256_or_si256(*first, fifths_of_two(a + fifths, b + fifths, 0));
        *second = _mm256_or_si256(*second, fifths_of_two(a + fifths, b + fifths, 2));
    }
}
