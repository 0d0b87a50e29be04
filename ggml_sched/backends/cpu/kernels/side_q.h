/* side_q.h -- quantised weights times a few columns, 2 .. most_columns(type): rows side by side.
 *
 * Included by product_loops.h.  A vector has the levels of eight neighbouring elements of SIDE rows, so each row has
 * two lanes of 32 bits.  A step (32 elements) is four such vectors; their products are added in integers, then scaled
 * once for all rows.  Blocks are decoded once for all columns, and not stored.  For a single column a row at a time is
 * faster (few_q.h): memory is then read in one stream.
 */
#define SIDE (WIDE ? 8 : 4)

/* -- lanes of rows: each row has a lower and an upper one ---------------------------------------------------------- */

#if WIDE
#define TWICE _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7)
INLINE __m512 in_both_lanes(__m256 v) {
    return _mm512_permutexvar_ps(TWICE, _mm512_castps256_ps512(v));
}

INLINE __m512i words_in_both_lanes(__m256i v) {
    return _mm512_permutexvar_epi32(TWICE, _mm512_castsi256_si512(v));
}

INLINE __m512i in_lower_lanes(int32_t value) {
    return _mm512_maskz_set1_epi32(0x5555, value);
}

INLINE __m512 powers_of_rows(const uint8_t *const *p) {
    return in_both_lanes(powers(_mm256_setr_epi32(*p[0], *p[1], *p[2], *p[3], *p[4], *p[5], *p[6], *p[7])));
}

/* Writes the sums of both lanes of each row, of which there are `rows`, if fewer than SIDE. */
INLINE void store_side(float *to, int64_t rows, __m512 v) {
    v = _mm512_maskz_compress_ps(0x5555, _mm512_add_ps(v, _mm512_permute_ps(v, 0xb1)));
    _mm512_mask_storeu_ps(to, present(rows < SIDE ? rows : SIDE, 0), v);
}
#else
#define TWICE _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)
INLINE __m256i words_in_both_lanes(__m256i v) {
    return _mm256_permutevar8x32_epi32(v, TWICE);
}

INLINE __m256i in_lower_lanes(int32_t value) {
    return _mm256_and_si256(_mm256_set1_epi32(value), _mm256_set1_epi64x(0xffffffff));
}

INLINE __m256 powers_of_rows(const uint8_t *const *p) {
    return powers(_mm256_setr_epi32(*p[0], *p[0], *p[1], *p[1], *p[2], *p[2], *p[3], *p[3]));
}

INLINE void store_side(float *to, int64_t rows, __m256 v) {
    float room[8];
    v = _mm256_add_ps(v, _mm256_permute_ps(v, 0xb1));
    v = _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
    if (rows >= SIDE) {
        _mm_storeu_ps(to, _mm256_castps256_ps128(v));
    } else {
        _mm256_storeu_ps(room, v);
        memcpy(to, room, (size_t)rows * sizeof(float));
    }
}
#endif

/* Of the four bytes in both lanes of each row, byte i eight times. */
INLINE ivec byte_of_words(const int i) {
    return IVEC_SET1_128(_mm_set_epi64x(0x0101010101010101ll * (8 + i), 0x0101010101010101ll * i));
}

/* -- bytes of rows ------------------------------------------------------------------------------------------------- */

/* 16 bytes of each row, those from `at` on: the first eight of each, and the others. */
INLINE void gather(const uint8_t *const *p, const int at, ivec *first, ivec *second) {
#define ROW(r) _mm_loadu_si128((const __m128i *)(p[r] + at))
#if WIDE
    ivec even = _mm512_castsi128_si512(ROW(0)), odd = _mm512_castsi128_si512(ROW(1));
    even = _mm512_inserti32x4(_mm512_inserti32x4(_mm512_inserti32x4(even, ROW(2), 1), ROW(4), 2), ROW(6), 3);
    odd = _mm512_inserti32x4(_mm512_inserti32x4(_mm512_inserti32x4(odd, ROW(3), 1), ROW(5), 2), ROW(7), 3);
#else
    ivec even = _mm256_inserti128_si256(_mm256_castsi128_si256(ROW(0)), ROW(2), 1);
    ivec odd = _mm256_inserti128_si256(_mm256_castsi128_si256(ROW(1)), ROW(3), 1);
#endif
#undef ROW
    *first = IVEC_FIRST(even, odd);
    *second = IVEC_SECOND(even, odd);
}

/* The f16 number at `at` of each row, in both lanes of the row.  `ends`: whether the block ends with it. */
INLINE vec halves_at(const uint8_t *const *p, const int at, const int ends) {
#define ROW(r) _mm_cvtsi32_si128(ends ? gs_load_u16(p[r] + at) : (int)gs_load_u32(p[r] + at))
    __m128i words = _mm_unpacklo_epi32(_mm_unpacklo_epi16(ROW(0), ROW(1)), _mm_unpacklo_epi16(ROW(2), ROW(3)));
#if WIDE
    __m128i more = _mm_unpacklo_epi32(_mm_unpacklo_epi16(ROW(4), ROW(5)), _mm_unpacklo_epi16(ROW(6), ROW(7)));
    return in_both_lanes(_mm256_cvtph_ps(_mm_unpacklo_epi64(words, more)));
#else
    return _mm256_cvtph_ps(_mm_unpacklo_epi16(words, words));
#endif
#undef ROW
}

/* The 32 bits at `at` of each row. */
INLINE __m256i words_at(const uint8_t *const *p, const int at) {
#define ROW(r) _mm_cvtsi32_si128((int)gs_load_u32(p[r] + at))
#define FOUR(r) _mm_unpacklo_epi64(_mm_unpacklo_epi32(ROW(r), ROW(r + 1)), _mm_unpacklo_epi32(ROW(r + 2), ROW(r + 3)))
    __m128i others = SIDE == 8 ? FOUR(SIDE - 4) : _mm_setzero_si128();
    return _mm256_inserti128_si256(_mm256_castsi128_si256(FOUR(0)), others, 1);
#undef FOUR
#undef ROW
}

/* Two f16 numbers from `at` on of each row: the first in both lanes of the row, the second in the lower one alone. */
INLINE vec pairs_at(const uint8_t *const *p, const int at, vec *second) {
#if WIDE
    __m512 pairs = _mm512_cvtph_ps(words_at(p, at));
    *second = _mm512_maskz_movehdup_ps(0x5555, pairs);
    return _mm512_moveldup_ps(pairs);
#else
    __m256 pairs = _mm256_cvtph_ps(_mm256_castsi256_si128(words_at(p, at)));
    *second = _mm256_blend_ps(_mm256_setzero_ps(), _mm256_movehdup_ps(pairs), 0x55);
    return _mm256_moveldup_ps(pairs);
#endif
}

/* -- levels -------------------------------------------------------------------------------------------------------- */

/* Adds 16 to the bytes of v where a bit is set: of the 32 bits at `at` of each row, v[i] has bits 8 i .. 8 i + 7. */
INLINE void add_fifths(const uint8_t *const *p, const int at, ivec v[4]) {
    const ivec bit = IVEC_SET1_64(0x8040201008040201u);
    ivec words = words_in_both_lanes(words_at(p, at));
    UNROLL for (int i = 0; i < 4; i++) {
        ivec spread = IVEC_SHUFFLE(words, byte_of_words(i));
#if WIDE
        v[i] = _mm512_mask_add_epi8(v[i], _mm512_test_epi8_mask(spread, bit), v[i], IVEC_SET1_8(16));
#else
        ivec is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
        v[i] = _mm256_or_si256(v[i], _mm256_and_si256(is_set, IVEC_SET1_8(16)));
#endif
    }
}

INLINE ivec shifted(ivec v, const int left) {
    return left > 0 ? IVEC_LEFT(v, left) : left < 0 ? IVEC_RIGHT(v, -left) : v;
}

/* The levels of step j of the rows' blocks: elements 8 i .. 8 i + 7 in v[i]. */
INLINE void levels_of(const int type, const uint8_t *const *p, const int j, ivec v[4]) {
    const int is_k = units_of(type) == 8 && type != GS_TYPE_IQ4_XS;
    const int at = type == GS_TYPE_Q8_0 ? 2 : type == GS_TYPE_IQ4_XS ? 8 + 16 * j : !is_k ? bytes_of(type) - 16
        : type == GS_TYPE_Q2_K ? 16 + j / 4 * 32 : type == GS_TYPE_Q3_K ? 32 + j / 4 * 32
        : type == GS_TYPE_Q4_K ? 16 + j / 2 * 32 : type == GS_TYPE_Q5_K ? 48 + j / 2 * 32 : j / 4 * 64 + j % 2 * 32;
    ivec high[4];
    gather(p, at, &v[0], &v[1]);
    if (is_k || type == GS_TYPE_Q8_0)
        gather(p, at + 16, &v[2], &v[3]);
    switch (type) {
    case GS_TYPE_Q8_0:
        UNROLL for (int i = 0; i < 4; i++)
            v[i] = is_signed(type) ? v[i] : IVEC_XOR(v[i], IVEC_SET1_8(128));
        return;
    case GS_TYPE_Q2_K: case GS_TYPE_Q3_K:
        UNROLL for (int i = 0; i < 4; i++)
            v[i] = IVEC_AND(shifted(v[i], -(j % 4 * 2)), IVEC_SET1_8(3));
        break;
    case GS_TYPE_Q4_K: case GS_TYPE_Q5_K:
        UNROLL for (int i = 0; i < 4; i++)
            v[i] = IVEC_AND(shifted(v[i], -(j % 2 * 4)), IVEC_SET1_8(15));
        break;
    case GS_TYPE_Q6_K:
        UNROLL for (int i = 0; i < 4; i++)
            v[i] = IVEC_AND(shifted(v[i], -(j % 4 / 2 * 4)), IVEC_SET1_8(15));
        break;
    default:
        v[2] = IVEC_AND(IVEC_RIGHT(v[0], 4), IVEC_SET1_8(15));
        v[3] = IVEC_AND(IVEC_RIGHT(v[1], 4), IVEC_SET1_8(15));
        v[0] = IVEC_AND(v[0], IVEC_SET1_8(15));
        v[1] = IVEC_AND(v[1], IVEC_SET1_8(15));
    }
    switch (type) {
    case GS_TYPE_Q5_0: add_fifths(p, 2, v); return;
    case GS_TYPE_Q5_1: add_fifths(p, 4, v); return;
    case GS_TYPE_IQ4_NL: case GS_TYPE_IQ4_XS: case GS_TYPE_MXFP4: {
        const int8_t *table = type == GS_TYPE_MXFP4 ? gs_mxfp4_levels : gs_iq4_levels;
        const int offset = is_signed(type) ? 0 : type == GS_TYPE_MXFP4 ? 12 : 128;
        __m128i levels = _mm_add_epi8(_mm_loadu_si128((const __m128i *)table), _mm_set1_epi8((char)offset));
        UNROLL for (int i = 0; i < 4; i++)
            v[i] = IVEC_SHUFFLE(IVEC_SET1_128(levels), v[i]);
        return;
    }
    case GS_TYPE_Q3_K: case GS_TYPE_Q5_K: case GS_TYPE_Q6_K: {
        const int from = type == GS_TYPE_Q3_K ? 0 : type == GS_TYPE_Q5_K ? 16 : 128 + j / 4 * 32;
        const int left = type == GS_TYPE_Q3_K ? 2 - j : type == GS_TYPE_Q5_K ? 4 - j : 4 - j % 4 * 2;
        const int mask = type == GS_TYPE_Q3_K ? 4 : type == GS_TYPE_Q5_K ? 16 : 48;
        gather(p, from, &high[0], &high[1]);
        gather(p, from + 16, &high[2], &high[3]);
        UNROLL for (int i = 0; i < 4; i++)
            v[i] = IVEC_OR_AND(v[i], shifted(high[i], left), IVEC_SET1_8(mask));
    }
    }
}

/* -- scales -------------------------------------------------------------------------------------------------------- */

/* The integer scales and minima of the rows' blocks of 256 elements, each twice, for both lanes of a row; and what they
 * are multiplied by, dmin in the lower lane alone. */
typedef struct side_scales {
    uint8_t scale[16][2 * SIDE], least[16][2 * SIDE];
    vec d, dmin;
} side_scales;

INLINE int has_signed_scales(const int type) {
    return type == GS_TYPE_Q3_K || type == GS_TYPE_Q6_K || type == GS_TYPE_IQ4_XS;
}

/* Transposes 16 bytes of SIDE rows; each byte is written twice. */
INLINE void transpose_bytes(const __m128i *row, uint8_t to[16][2 * SIDE]) {
    __m128i two[SIDE], four[SIDE];
    UNROLL for (int r = 0; r < SIDE; r += 2) {
        two[r] = _mm_unpacklo_epi8(row[r], row[r + 1]);
        two[r + 1] = _mm_unpackhi_epi8(row[r], row[r + 1]);
    }
    UNROLL for (int r = 0; r < SIDE; r += 4) {
        UNROLL for (int h = 0; h < 2; h++) {
            four[r + 2 * h] = _mm_unpacklo_epi16(two[r + h], two[r + 2 + h]);
            four[r + 2 * h + 1] = _mm_unpackhi_epi16(two[r + h], two[r + 2 + h]);
        }
    }
    UNROLL for (int i = 0; i < 4; i++) {
        UNROLL for (int h = 0; h < SIDE / 4; h++) {
            __m128i v = SIDE == 4 ? four[i] : h ? _mm_unpackhi_epi32(four[i], four[SIDE - 4 + i])
                                                : _mm_unpacklo_epi32(four[i], four[SIDE - 4 + i]);
            _mm_storeu_si128((__m128i *)(to[4 * i] + 32 * h), _mm_unpacklo_epi8(v, v));
            _mm_storeu_si128((__m128i *)(to[4 * i] + 32 * h + 16), _mm_unpackhi_epi8(v, v));
        }
    }
    __asm__("" : "+m"(*(uint8_t (*)[16][2 * SIDE])to));   /* to load them is cheaper than what compilers do instead */
}

/* Decodes what the eight steps of the rows' blocks share. */
INLINE void begin_block(const int type, const uint8_t *const *p, side_scales *of) {
    __m128i row[SIDE], least[SIDE], nibble = _mm_set1_epi8(15);
    UNROLL for (int r = 0; r < SIDE; r++) {
        switch (type) {
        case GS_TYPE_Q2_K:
            row[r] = _mm_loadu_si128((const __m128i *)p[r]);
            least[r] = _mm_and_si128(_mm_srli_epi16(row[r], 4), nibble);
            row[r] = _mm_and_si128(row[r], nibble);
            break;
        case GS_TYPE_Q3_K: row[r] = factors_of_q3_k(p[r]); break;
        case GS_TYPE_Q6_K: row[r] = _mm_loadu_si128((const __m128i *)(p[r] + 192)); break;
        case GS_TYPE_IQ4_XS: row[r] = factors_of_iq4_xs(p[r]); break;
        default: row[r] = six_bits(p[r]);       /* the minima follow eight scales */
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

INLINE vec bytes_as_f32(const uint8_t *at, const int have_signs) {
#if WIDE
    __m128i v = _mm_loadu_si128((const __m128i *)at);
    return _mm512_cvtepi32_ps(have_signs ? _mm512_cvtepi8_epi32(v) : _mm512_cvtepu8_epi32(v));
#else
    __m128i v = _mm_loadl_epi64((const __m128i *)at);
    return _mm256_cvtepi32_ps(have_signs ? _mm256_cvtepi8_epi32(v) : _mm256_cvtepu8_epi32(v));
#endif
}

/* The scales of step j in both lanes of each row, half by half if there are two, and its minima, without the minus of
 * types with 256 elements in a block, in the lower lane. */
INLINE void scales_of_step(const int type, const uint8_t *const *p, const int j, const side_scales *of, vec s[2],
                           vec m[2]) {
    switch (type) {
    case GS_TYPE_Q4_1: case GS_TYPE_Q5_1: s[0] = pairs_at(p, 0, m); return;
    case GS_TYPE_MXFP4: s[0] = powers_of_rows(p); return;
    case GS_TYPE_Q4_0: case GS_TYPE_Q5_0: case GS_TYPE_Q8_0: case GS_TYPE_IQ4_NL: s[0] = halves_at(p, 0, 0); return;
    }
    UNROLL for (int h = 0; h < halves_of(type); h++) {
        const int at = j * halves_of(type) + h;
        s[h] = VEC_MUL(of->d, bytes_as_f32(of->scale[at], has_signed_scales(type)));
        if (has_min(type))
            m[h] = VEC_MUL(of->dmin, bytes_as_f32(type == GS_TYPE_Q2_K ? of->least[at] : of->scale[8 + at], 0));
    }
}

/* -- products ------------------------------------------------------------------------------------------------------ */

/* start + the products of n vectors of levels with the activations at q. */
INLINE ivec dots(const int type, ivec start, const ivec *v, const int8_t *q, const int n) {
#if VNNI
    UNROLL for (int i = 0; i < n; i++)
        start = dot4_vec(type, start, v[i], IVEC_SET1_64(gs_load_u64(q + 8 * i)));
    return start;
#else
    if (is_signed(type)) {
        UNROLL for (int i = 0; i < n; i++)
            start = dot4(type, start, v[i], IVEC_SET1_64(gs_load_u64(q + 8 * i)));
        return start;
    }
    ivec sum = dot2(v[0], IVEC_SET1_64(gs_load_u64(q)));
    UNROLL for (int i = 1; i < n; i++)
        sum = add_16(sum, dot2(v[i], IVEC_SET1_64(gs_load_u64(q + 8 * i))));
    return add_pairs(start, sum);
#endif
}

/* Multiplies with all columns of a group, of which there are at most N: more than N - 2, so that those beyond the last,
 * which repeat the last one and are not stored, are few. */
INLINE void side_q(const int type, const int N, const gs_product *of, const char *shared, int64_t group, int64_t row0,
                   int64_t row1) {
    const int units = units_of(type), size = bytes_of(type), halves = halves_of(type), part = SIDE * size / units;
    const int64_t columns = N > 4 ? gs_columns_of(of, shared, group) : N;
    const int64_t width = gs_width_of(of, columns, 0), width_1 = N > GS_TILE_Q ? columns - width : 0;
    const gs_cell_q *tile = (const gs_cell_q *)gs_tile_of(of, shared, group, 0);
    const gs_cell_q *tile_1 = width_1 > 0 ? (const gs_cell_q *)gs_tile_of(of, shared, group, 1) : NULL;
    const char *a = gs_weights_of(of, shared, group);
    int64_t stride = of->node->src[0]->layout.nb[1];
    float *out[GS_SIDE_Q];
    for (int64_t c = 0; c < columns; c++)
        out[c] = gs_result_at(of, shared, group, c);
    for (int64_t row = row0; row < row1; row += SIDE) {
        const gs_cell_q *y = tile, *y_1 = tile_1;       /* of the first tile of columns, and of the second */
        const char *ahead = a + (row + SIDE) * stride;
        const uint8_t *p[SIDE];
        vec acc[GS_SIDE_Q];
        for (int r = 0; r < SIDE; r++)
            p[r] = (const uint8_t *)a + (row + r < row1 ? row + r : row1 - 1) * stride;
        UNROLL for (int c = 0; c < N; c++)
            acc[c] = VEC_ZERO;
        for (int64_t step = 0; step < of->steps; step += units) {
            side_scales held;
            if (units == 8)
                begin_block(type, p, &held);
            UNROLL for (int j = 0; j < units; j++, y += width, y_1 += width_1, ahead += part) {
                ivec v[4];
                vec s[2], m[2];
                UNROLL for (int line = 0; line < part; line += 64) {
                    PREFETCH_LATER(ahead + AHEAD + line);
                    PREFETCH(ahead + line);
                }
                levels_of(type, p, j, v);
                scales_of_step(type, p, j, &held, s, m);
                UNROLL for (int c = 0; c < N; c++) {
                    const int64_t here = N % 2 == 0 && c == N - 1 ? columns - 1 : c;
                    const gs_cell_q *cell = c < GS_TILE_Q ? y + here : y_1 + (here - GS_TILE_Q);
                    vec d = VEC_SET1(cell->d);
                    UNROLL for (int h = 0; h < halves; h++) {
                        ivec dot = !has_offset(type) ? IVEC_ZERO : halves == 1 ? IVEC_SET1_64(gs_load_u64(&cell->both))
                            : in_lower_lanes(h ? cell->high : cell->low);
                        dot = dots(type, dot, v + 2 * h, cell->q + 16 * h, 4 / halves);
                        acc[c] = VEC_FMA(VEC_OF_INT(dot), VEC_MUL(s[h], d), acc[c]);
                        if (has_min(type)) {
                            vec both = VEC_SET1(halves == 1 ? cell->sum_both : h ? cell->sum_high : cell->sum_low);
                            acc[c] = units == 8 ? VEC_FNMA(m[h], both, acc[c]) : VEC_FMA(m[h], both, acc[c]);
                        }
                    }
                }
            }
            UNROLL for (int r = 0; r < SIDE; r++)
                p[r] += size;
        }
        UNROLL for (int c = 0; c < N; c++)
            if (c < columns)
                store_side(out[c] + row, row1 - row, acc[c]);
    }
}

/* The most columns: for types with 256 elements in a block, whose eight steps are separate code, fewer. */
INLINE int most_columns(const int type) {
    return units_of(type) == 8 ? 8 : GS_SIDE_Q;
}

static int32_t few_columns(const gs_block_kind *kind) {
    return most_columns(kind->type);
}

/* Seven columns take as long as eight would, and so on. */
#define SIDE_Q(type, N) \
    if (most_columns(type) >= N) \
        side_q(type, N, of, shared, group, row0, row1)
#define FEW_Q(TYPE, type) \
    static void few_##type(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1) { \
        switch (gs_columns_of(of, shared, group)) { \
        case 1: few_q(GS_TYPE_##TYPE, 1, of, shared, group, row0, row1); return; \
        case 2: SIDE_Q(GS_TYPE_##TYPE, 2); return; \
        case 3: SIDE_Q(GS_TYPE_##TYPE, 3); return; \
        case 4: SIDE_Q(GS_TYPE_##TYPE, 4); return; \
        case 5: case 6: SIDE_Q(GS_TYPE_##TYPE, 6); return; \
        case 7: case 8: SIDE_Q(GS_TYPE_##TYPE, 8); return; \
        case 9: case 10: SIDE_Q(GS_TYPE_##TYPE, 10); return; \
        default: SIDE_Q(GS_TYPE_##TYPE, 12); \
        } \
    }

GS_QUANTISED(FEW_Q)
