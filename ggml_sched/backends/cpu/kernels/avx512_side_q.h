/* avx512_side_q.h -- rows side by side (side_q.h) in vectors of 512 bits: a row is one lane of 32 bits.
 *
 * Included by side_q.h.
 */
#define SIDE 16                 /* rows                                            */
#define LEVELS 8                /* vectors with 32 elements of each row: four each */
#define TOGETHER 4              /* columns                                         */

/* In each lane of 128 bits: dwords 0 of the four rows, then dwords 1, and so on. */
INLINE void transpose_dwords(const __m512i rows[4], __m512i v[4]) {
    __m512i a = _mm512_unpacklo_epi32(rows[0], rows[1]), b = _mm512_unpackhi_epi32(rows[0], rows[1]);
    __m512i c = _mm512_unpacklo_epi32(rows[2], rows[3]), d = _mm512_unpackhi_epi32(rows[2], rows[3]);
    v[0] = _mm512_unpacklo_epi64(a, c);
    v[1] = _mm512_unpackhi_epi64(a, c);
    v[2] = _mm512_unpacklo_epi64(b, d);
    v[3] = _mm512_unpackhi_epi64(b, d);
}

/* 16 bytes of each row, those from `at` on: four of them in each vector. */
INLINE void gather(const side_rows *p, const int64_t at, __m512i v[4]) {
#define ROW(r) _mm_loadu_si128((const __m128i *)byte_of(p, r, at))
    __m512i rows[4];            /* rows i, i + 4, i + 8 and i + 12 */
    UNROLL for (int i = 0; i < 4; i++) {
        rows[i] = _mm512_inserti32x4(_mm512_castsi128_si512(ROW(i)), ROW(i + 4), 1);
        rows[i] = _mm512_inserti32x4(_mm512_inserti32x4(rows[i], ROW(i + 8), 2), ROW(i + 12), 3);
    }
#undef ROW
    transpose_dwords(rows, v);
}

/* 32 bytes of each row, those from `at` on.  This takes fewer loads and inserts than two calls of gather. */
INLINE void gather_32(const side_rows *p, const int64_t at, __m512i v[LEVELS]) {
    __m512i part[2][4];         /* of rows 0 .. 7 and 8 .. 15: in lanes 0 and 2 dwords i, in lanes 1 and 3 i + 4 */
    UNROLL for (int half = 0; half < 2; half++) {
        __m512i rows[4];        /* rows i and i + 4 */
        UNROLL for (int i = 0; i < 4; i++)
            rows[i] = load_two_32(byte_of(p, 8 * half + i, at), byte_of(p, 8 * half + i + 4, at));
        transpose_dwords(rows, part[half]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        v[i] = _mm512_shuffle_i32x4(part[0][i], part[1][i], 0x88);
        v[i + 4] = _mm512_shuffle_i32x4(part[0][i], part[1][i], 0xdd);
    }
}

/* The 32 bits at `at` of each row; 16 bytes from there on are read. */
INLINE __m512i words_at(const side_rows *p, const int at) {
    __m512i v[4];
    gather(p, at, v);
    return v[0];
}

/* The f16 number in the lower half of each lane. */
INLINE __m512 lower_half_of(__m512i v) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v));
}

/* The f16 number in the upper half of each lane. */
INLINE __m512 upper_half_of(__m512i v) {
    return lower_half_of(_mm512_srli_epi32(v, 16));
}

/* The f16 number with which each row's block begins. */
INLINE __m512 first_half(const side_rows *p) {
    return lower_half_of(words_at(p, 0));
}

/* The two f16 numbers with which each row's block begins. */
INLINE __m512 first_halves(const side_rows *p, __m512 *second) {
    __m512i words = words_at(p, 0);
    *second = upper_half_of(words);
    return lower_half_of(words);
}

/* `powers` of 16 exponents. */
INLINE __m512 powers_of_lanes(__m512i e) {
    __m256 low = powers(_mm512_castsi512_si256(e)), high = powers(_mm512_extracti32x8_epi32(e, 1));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

INLINE __m512 powers_of_rows(const side_rows *p) {
    return powers_of_lanes(_mm512_and_si512(words_at(p, 0), _mm512_set1_epi32(255)));
}

/* Adds 16 to the bytes of v where a bit is set: of the 32 bits at `at` of each row, v[i] has bits 4 i .. 4 i + 3. */
INLINE void add_fifths(const side_rows *p, const int at, __m512i v[LEVELS]) {
    __m512i words = words_at(p, at);
    UNROLL for (int i = 0; i < LEVELS; i++) {
        const int n = i / 2 * 0x01010101;       /* of a lane's four bytes the one with these bits, four times */
        __m512i place = _mm512_broadcast_i32x4(_mm_setr_epi32(n, n + 0x04040404, n + 0x08080808, n + 0x0c0c0c0c));
        __m512i bit = _mm512_set1_epi32((int)(i % 2 ? 0x80402010 : 0x08040201));
        __mmask64 is_set = _mm512_test_epi8_mask(_mm512_shuffle_epi8(words, place), bit);
        v[i] = with_fifths(v[i], is_set);
    }
}

/* The integer scales and minima of the rows' blocks of 256 elements, four to a lane, and what they are multiplied by.
 * Those of IQ4_XS are as they are in blocks: their lower four bits, and then two bits of each.  Those of types whose
 * halves are scaled together are multiplied as the upper bytes of words, so that d and dmin are divided by 256. */
typedef struct side_scales {
    __m512i scale[4], least[4];
    __m512 d, dmin;
} side_scales;

/* Of each byte, the bits of `mask` after a shift to the right. */
INLINE __m512i bits_at(__m512i v, const int right, const int mask) {
    return _mm512_and_si512(right ? _mm512_srli_epi32(v, right) : v, wide_bytes(mask));
}

/* Decodes what the eight steps of the rows' blocks share. */
INLINE void begin_block(const int type, const side_rows *p, side_scales *of) {
    __m512i v[4];
    switch (type) {
    case GS_TYPE_Q2_K:
        gather(p, 0, v);
        UNROLL for (int i = 0; i < 4; i++) {
            of->scale[i] = bits_at(v[i], 0, 15);
            of->least[i] = bits_at(v[i], 4, 15);
        }
        gather(p, 68, v);
        of->d = _mm512_mul_ps(lower_half_of(v[3]), _mm512_set1_ps(1.0f / 256));
        of->dmin = _mm512_mul_ps(upper_half_of(v[3]), _mm512_set1_ps(1.0f / 256));
        return;
    case GS_TYPE_Q3_K:
        gather(p, 92, v);
        UNROLL for (int i = 0; i < 4; i++) {
            __m512i high = bits_at(v[3], 2 * i, 3);
            __m512i s = _mm512_or_si512(bits_at(v[1 + i % 2], i / 2 * 4, 15), _mm512_slli_epi32(high, 4));
            of->scale[i] = _mm512_sub_epi8(s, wide_bytes(32));
        }
        gather(p, 94, v);
        of->d = _mm512_mul_ps(upper_half_of(v[3]), _mm512_set1_ps(1.0f / 256));
        return;
    case GS_TYPE_Q6_K:
        gather(p, 192, of->scale);
        gather(p, 194, v);
        of->d = upper_half_of(v[3]);
        return;
    case GS_TYPE_IQ4_XS:
        gather(p, 0, v);
        of->scale[0] = v[1];
        of->scale[1] = _mm512_srli_epi32(v[0], 16);
        of->d = lower_half_of(v[0]);
        return;
    default:
        gather(p, 0, v);
        of->d = lower_half_of(v[0]);
        of->dmin = upper_half_of(v[0]);
        of->scale[0] = bits_at(v[1], 0, 63);
        of->least[0] = bits_at(v[2], 0, 63);
        of->scale[1] = _mm512_or_si512(bits_at(v[3], 0, 15), bits_at(v[1], 2, 48));
        of->least[1] = _mm512_or_si512(bits_at(v[3], 4, 15), bits_at(v[2], 2, 48));
    }
}

/* Of each lane, the byte whose bits begin at `shift`, with its sign or without. */
INLINE __m512 byte_of_lanes(__m512i v, const int shift, const int has_sign) {
    if (has_sign)
        v = _mm512_srai_epi32(_mm512_slli_epi32(v, 24 - shift), 24);
    else
        v = _mm512_and_si512(shift ? _mm512_srli_epi32(v, shift) : v, _mm512_set1_epi32(255));
    return _mm512_cvtepi32_ps(v);
}

/* Of the rows' scales or minima, four to a lane of each vector, number `at` of those from step `first` on. */
INLINE __m512 scale_byte(const int type, const __m512i of[4], int64_t first, const int at) {
    return byte_of_lanes(of[first / 4 * halves_of(type) + at / 4], at % 4 * 8, !has_min(type));
}

/* Scale number `at` of the rows' blocks, of those from step `first` on; not where halves are scaled together. */
INLINE __m512 block_scale(const int type, const side_scales *of, int64_t first, const int at) {
    if (type != GS_TYPE_IQ4_XS)
        return _mm512_mul_ps(of->d, scale_byte(type, of->scale, first, at));
    __m512i low = _mm512_srlv_epi32(of->scale[0], _mm512_set1_epi32(4 * (int)first));
    __m512i high = _mm512_srlv_epi32(of->scale[1], _mm512_set1_epi32(2 * (int)first));
    low = _mm512_and_si512(_mm512_srli_epi32(low, 4 * at), _mm512_set1_epi32(15));
    high = _mm512_and_si512(_mm512_srli_epi32(high, 2 * at), _mm512_set1_epi32(3));
    low = _mm512_sub_epi32(_mm512_or_si512(low, _mm512_slli_epi32(high, 4)), _mm512_set1_epi32(32));
    return _mm512_mul_ps(of->d, _mm512_cvtepi32_ps(low));
}

/* Minimum number `at` of those from step `first` on, without its minus. */
INLINE __m512 block_minimum(const int type, const side_scales *of, int64_t first, const int at) {
    return _mm512_mul_ps(of->dmin, scale_byte(type, of->least, first, at));
}

/* Where the sums of products of a half of 32 activations begin, or of all 32. */
INLINE __m512i first_sum(const int type, const gs_cell_q *cell, const int half) {
    if (!has_offset(type))
        return IVEC_ZERO;
    return _mm512_set1_epi32(halves_of(type) == 1 ? cell->both : half ? cell->high : cell->low);
}

/* Adds the products of the levels of a half of 32 elements, or of all, with n columns to dot.  Each sum waits for the
 * one before, so that the columns' are computed in turns. */
INLINE void add_dots(const int type, const int n, const gs_cell_q *const *cell, const int half, const __m512i *v,
                     __m512i *dot) {
    UNROLL for (int i = 0; i < LEVELS / halves_of(type); i++) {
        UNROLL for (int c = 0; c < n; c++)
            dot[c] = _mm512_dpbusd_epi32(dot[c], v[i],
                                         _mm512_set1_epi32((int)gs_load_u32(cell[c]->q + 16 * half + 4 * i)));
    }
}

/* The sums of products of the levels of a half of 32 elements, or of all, with n columns. */
INLINE void dots(const int type, const int n, const gs_cell_q *const *cell, const int half, const __m512i *v,
                 __m512i *dot) {
    UNROLL for (int c = 0; c < n; c++)
        dot[c] = first_sum(type, cell[c], half);
    add_dots(type, n, cell, half, v, dot);
}

/* Adds the products of step first + j of the rows' blocks with n columns to acc: the sums of both halves, 16 bits each,
 * are multiplied with their scales at once (scales_halves_together). */
INLINE void add_halves_of(const int type, const int n, const gs_cell_q *const *cell, const __m512i *v,
                          const side_scales *of, int64_t first, const int j, __m512 *acc) {
    const int left = left_of(type, j), at = j % 2 * 2;
    const int two = 0x01800080 + at * 0x01000100;       /* both bytes of a lane, each as the upper one of a word */
    __m512i place = _mm512_broadcast_i32x4(_mm_setr_epi32(two, two + 0x04000400, two + 0x08000800, two + 0x0c000c00));
    __m512i scale = _mm512_shuffle_epi8(of->scale[first / 2 + j / 2], place), least, dot[2][TOGETHER];
    __m512 d = left > 0 ? _mm512_mul_ps(of->d, _mm512_set1_ps(1.0f / (1 << left))) : of->d;
    if (has_min(type))
        least = _mm512_shuffle_epi8(of->least[first / 2 + j / 2], place);
    UNROLL for (int h = 0; h < 2; h++) {
        UNROLL for (int c = 0; c < n; c++)
            dot[h][c] = _mm512_slli_epi32(first_sum(type, cell[c], h), left);
        add_dots(type, n, cell, h, v + LEVELS / 2 * h, dot[h]);
    }
    UNROLL for (int c = 0; c < n; c++) {
        __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaa, dot[0][c], _mm512_slli_epi32(dot[1][c], 16));
        __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_madd_epi16(both, scale)), d);
        if (has_min(type)) {
            __m512i sums = _mm512_madd_epi16(least, _mm512_set1_epi32(cell[c]->both));
            sum = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(sums), of->dmin, sum);
        }
        acc[c] = _mm512_fmadd_ps(sum, _mm512_set1_ps(cell[c]->d), acc[c]);
    }
}

/* Writes the sums of rows from .. to - 1. */
INLINE void store_side(float *at, int64_t from, int64_t to, __m512 v) {
    _mm512_mask_storeu_ps(at, present(to, 0) & ~present(from, 0), v);
}
