/* avx2_side_q.h -- rows side by side (side_q.h) in vectors of 256 bits: a row has a lower and an upper lane of 32 bits.
 *
 * Included by side_q.h.
 */
#define SIDE 4                  /* rows                                             */
#define LEVELS 4                /* vectors with 32 elements of each row: eight each */
#define TOGETHER 1              /* columns                                          */

INLINE __m256i in_lower_lanes(int32_t value) {
    return _mm256_and_si256(_mm256_set1_epi32(value), _mm256_set1_epi64x(0xffffffff));
}

/* -- bytes of rows ------------------------------------------------------------------------------------------------- */

/* 16 bytes of each row, those from `at` on: the first eight of each, and the others. */
INLINE void gather(const side_rows *p, const int64_t at, __m256i v[2]) {
    __m256i even = load_two(byte_of(p, 0, at), byte_of(p, 2, at)), odd = load_two(byte_of(p, 1, at), byte_of(p, 3, at));
    v[0] = _mm256_unpacklo_epi64(even, odd);
    v[1] = _mm256_unpackhi_epi64(even, odd);
}

/* 32 bytes of each row, those from `at` on. */
INLINE void gather_32(const side_rows *p, const int64_t at, __m256i v[LEVELS]) {
    gather(p, at, v);
    gather(p, at + 16, v + LEVELS / 2);
}

/* The 32 bits at `at` of each row. */
INLINE __m128i words_at(const side_rows *p, const int at) {
#define ROW(r) _mm_cvtsi32_si128((int)gs_load_u32(byte_of(p, r, at)))
    return _mm_unpacklo_epi64(_mm_unpacklo_epi32(ROW(0), ROW(1)), _mm_unpacklo_epi32(ROW(2), ROW(3)));
#undef ROW
}

/* The f16 number at `at` of each row, in both lanes of the row.  `ends`: whether the block ends with it. */
INLINE __m256 halves_at(const side_rows *p, const int at, const int ends) {
#define ROW(r) _mm_cvtsi32_si128(ends ? gs_load_u16(byte_of(p, r, at)) : (int)gs_load_u32(byte_of(p, r, at)))
    __m128i words = _mm_unpacklo_epi32(_mm_unpacklo_epi16(ROW(0), ROW(1)), _mm_unpacklo_epi16(ROW(2), ROW(3)));
#undef ROW
    return _mm256_cvtph_ps(_mm_unpacklo_epi16(words, words));
}

/* Two f16 numbers from `at` on of each row: the first in both lanes of the row, the second in the lower one alone. */
INLINE __m256 pairs_at(const side_rows *p, const int at, __m256 *second) {
    __m256 pairs = _mm256_cvtph_ps(words_at(p, at));
    *second = _mm256_blend_ps(_mm256_setzero_ps(), _mm256_movehdup_ps(pairs), 0x55);
    return _mm256_moveldup_ps(pairs);
}

/* The f16 number with which each row's block begins. */
INLINE __m256 first_half(const side_rows *p) {
    return halves_at(p, 0, 0);
}

/* The two f16 numbers with which each row's block begins. */
INLINE __m256 first_halves(const side_rows *p, __m256 *second) {
    return pairs_at(p, 0, second);
}

#define powers_of_lanes powers      /* as in avx512_side_q.h */

INLINE __m256 powers_of_rows(const side_rows *p) {
#define POWER(r) *byte_of(p, r, 0)
    return powers(_mm256_setr_epi32(POWER(0), POWER(0), POWER(1), POWER(1), POWER(2), POWER(2), POWER(3), POWER(3)));
#undef POWER
}

/* Adds 16 to the bytes of v where a bit is set: of the 32 bits at `at` of each row, v[i] has bits 8 i .. 8 i + 7. */
INLINE void add_fifths(const side_rows *p, const int at, __m256i v[LEVELS]) {
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
    __m256i words = _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(words_at(p, at)),
                                                _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
    UNROLL for (int i = 0; i < LEVELS; i++) {
        /* Of the four bytes in both lanes of each row, byte i eight times. */
        __m128i place = _mm_set_epi64x(0x0101010101010101ll * (8 + i), 0x0101010101010101ll * i);
        __m256i spread = _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(place));
        __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
        v[i] = _mm256_or_si256(v[i], _mm256_and_si256(is_set, bytes(16)));
    }
}

/* -- scales of blocks ---------------------------------------------------------------------------------------------- */

/* The integer scales and minima of the rows' blocks of 256 elements, each twice, for both lanes of a row; and what they
 * are multiplied by, dmin in the lower lane alone. */
typedef struct side_scales {
    uint8_t scale[16][2 * SIDE], least[16][2 * SIDE];
    __m256 d, dmin;
} side_scales;

/* Transposes 16 bytes of four rows; each byte is written twice. */
INLINE void transpose_bytes(const __m128i *row, uint8_t to[16][2 * SIDE]) {
    __m128i two[4] = {_mm_unpacklo_epi8(row[0], row[1]), _mm_unpackhi_epi8(row[0], row[1]),
                      _mm_unpacklo_epi8(row[2], row[3]), _mm_unpackhi_epi8(row[2], row[3])};
    UNROLL for (int i = 0; i < 4; i++) {
        __m128i a = two[i / 2], b = two[2 + i / 2], v = i % 2 ? _mm_unpackhi_epi16(a, b) : _mm_unpacklo_epi16(a, b);
        _mm_storeu_si128((__m128i *)to[4 * i], _mm_unpacklo_epi8(v, v));
        _mm_storeu_si128((__m128i *)to[4 * i + 2], _mm_unpackhi_epi8(v, v));
    }
    __asm__("" : "+m"(*(uint8_t (*)[16][2 * SIDE])to));   /* to load them is cheaper than what compilers do instead */
}

/* Decodes what the eight steps of the rows' blocks share. */
INLINE void begin_block(const int type, const side_rows *p, side_scales *of) {
    __m128i row[SIDE], least[SIDE], nibble = _mm_set1_epi8(15);
    if (type == GS_TYPE_Q4_K || type == GS_TYPE_Q5_K) {         /* the minima follow eight scales */
        UNROLL for (int r = 0; r < SIDE; r += 2) {
            __m256i both = six_bits(byte_of(p, r, 0), byte_of(p, r + 1, 0));
            row[r] = _mm256_castsi256_si128(both);
            row[r + 1] = _mm256_extracti128_si256(both, 1);
        }
    }
    UNROLL for (int r = 0; r < SIDE; r++) {
        switch (type) {
        case GS_TYPE_Q2_K:
            row[r] = _mm_loadu_si128((const __m128i *)byte_of(p, r, 0));
            least[r] = _mm_and_si128(_mm_srli_epi16(row[r], 4), nibble);
            row[r] = _mm_and_si128(row[r], nibble);
            break;
        case GS_TYPE_Q3_K: row[r] = factors_of_q3_k(byte_of(p, r, 0)); break;
        case GS_TYPE_Q6_K: row[r] = _mm_loadu_si128((const __m128i *)byte_of(p, r, 192)); break;
        case GS_TYPE_IQ4_XS: row[r] = factors_of_iq4_xs(byte_of(p, r, 0)); break;
        }
    }
    transpose_bytes(row, of->scale);
    switch (type) {
    case GS_TYPE_Q2_K:
        transpose_bytes(least, of->least);
        of->d = pairs_at(p, 80, &of->dmin);
        return;
    case GS_TYPE_Q3_K: of->d = halves_at(p, 108, 1); return;
    case GS_TYPE_Q6_K: of->d = halves_at(p, 208, 1); return;
    case GS_TYPE_IQ4_XS: of->d = halves_at(p, 0, 0); return;
    default: of->d = pairs_at(p, 0, &of->dmin);
    }
}

INLINE __m256 bytes_as_f32(const uint8_t *at, const int have_signs) {
    __m128i v = _mm_loadl_epi64((const __m128i *)at);
    return _mm256_cvtepi32_ps(have_signs ? _mm256_cvtepi8_epi32(v) : _mm256_cvtepu8_epi32(v));
}

/* Scale number `at` of the rows' blocks, of those from step `first` on. */
INLINE __m256 block_scale(const int type, const side_scales *of, int64_t first, const int at) {
    return _mm256_mul_ps(of->d, bytes_as_f32(of->scale[first * halves_of(type) + at], !has_min(type)));
}

/* Minimum number `at` of those from step `first` on, without its minus. */
INLINE __m256 block_minimum(const int type, const side_scales *of, int64_t first, const int at) {
    const uint8_t *least = type == GS_TYPE_Q2_K ? of->least[2 * first + at] : of->scale[8 + first + at];
    return _mm256_mul_ps(of->dmin, bytes_as_f32(least, 0));
}

/* -- products ------------------------------------------------------------------------------------------------------ */

/* Where the sums of products of a half of 32 activations begin, or of all 32. */
INLINE __m256i first_sum(const int type, const gs_cell_q *cell, const int half) {
    return !has_offset(type) ? IVEC_ZERO : halves_of(type) == 1 ? IVEC_SET1_64(gs_load_u64(&cell->both))
        : in_lower_lanes(half ? cell->high : cell->low);
}

/* The sums of products of the levels of a half of 32 elements, or of all, with a column. */
INLINE void dots(const int type, const int n, const gs_cell_q *const *cell, const int half, const __m256i *v,
                 __m256i *dot) {
    (void)n;
    const int8_t *q = cell[0]->q + 16 * half;
    dot[0] = first_sum(type, cell[0], half);
    if (VNNI || is_signed(type)) {
        UNROLL for (int i = 0; i < LEVELS / halves_of(type); i++)
            dot[0] = dot4(type, dot[0], v[i], IVEC_SET1_64(gs_load_u64(q + 8 * i)));
        return;
    }
#if SUMS_16
    __m256i sum = dot2(v[0], IVEC_SET1_64(gs_load_u64(q)));
    UNROLL for (int i = 1; i < LEVELS / halves_of(type); i++)
        sum = add_16(sum, dot2(v[i], IVEC_SET1_64(gs_load_u64(q + 8 * i))));
    dot[0] = add_pairs(dot[0], sum);
#endif
}

/* Writes the sums of rows from .. to - 1: those of both lanes of each. */
INLINE void store_side(float *at, int64_t from, int64_t to, __m256 v) {
    float room[8];
    v = _mm256_add_ps(v, _mm256_permute_ps(v, 0xb1));
    v = _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
    if (to - from == SIDE) {
        _mm_storeu_ps(at, _mm256_castps256_ps128(v));
    } else {
        _mm256_storeu_ps(room, v);
        memcpy(at + from, room + from, (size_t)(to - from) * sizeof(float));
    }
}
