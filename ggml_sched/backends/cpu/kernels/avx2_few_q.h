/* avx2_few_q.h -- strips and ends of neighbouring rows (x86_few_q.h) in vectors of 256 bits.
 *
 * Included by x86_few_q.h.  The halves of a vector are of two blocks, of two rows, or of the halves of a step.  The
 * sums of four such vectors are brought into one (`sums_of_four`), in the order of the scales.  Without VNNI products
 * of bytes (maddubs) leave a sum of two in each 16-bit lane.  Several such sums of small levels still fit there: they
 * are added as 16 bits, before they are widened.
 */
#define JOINS_ROWS 0
#define FEW_ROWS 2

/* Whether two rows that meet a strip together take less time than one after the other. */
INLINE int shares_strips(const int type) {
    return type != GS_TYPE_Q6_K && type != GS_TYPE_Q8_0;
}

/* -- sums ---------------------------------------------------------------------------------------------------------- */

/* How many results of maddubs with levels of a type can be added in 16 bits; 0 where sums have 32 bits. */
INLINE int fit_16_bits(const int type) {
    if (VNNI || is_signed(type))
        return 0;
    switch (type) {
    case GS_TYPE_Q6_K: return 2;
    case GS_TYPE_Q5_0: case GS_TYPE_Q5_1: case GS_TYPE_Q5_K: case GS_TYPE_MXFP4: return 4;
    default: return 8;          /* of levels to 15 */
    }
}

/* start + the products of levels v with activations q: in 16 bits those of two bytes, or in 32 those of four. */
INLINE __m256i sums_of(const int type, __m256i start, __m256i v, __m256i q) {
    return fit_16_bits(type) ? _mm256_add_epi16(start, _mm256_maddubs_epi16(v, q)) : dot4(type, start, v, q);
}

INLINE __m256i added(__m256i a, __m256i b, const int of_16_bits) {
    return of_16_bits ? _mm256_add_epi16(a, b) : _mm256_add_epi32(a, b);
}

/* In each half of the vector the four sums of the lanes of v[0], of v[1], and so on.  A lane of v is the sum of `each`
 * results of maddubs.  `factors`: 1 in all 16-bit lanes, or, where all is added in 16 bits, by what the sums are
 * multiplied, twice in each 32-bit lane. */
INLINE __m256i sums_of_four(const int type, const int each, const __m256i v[4], __m256i factors) {
    int of_16_bits = fit_16_bits(type) > 0;
    __m256i pairs[2];
    UNROLL for (int i = 0; i < 2; i++) {
        pairs[i] = added(_mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]),
                         of_16_bits);
        if (of_16_bits && fit_16_bits(type) < 4 * each)
            pairs[i] = _mm256_madd_epi16(pairs[i], _mm256_set1_epi16(1));
    }
    of_16_bits = fit_16_bits(type) >= 4 * each;
    __m256i sums = added(_mm256_unpacklo_epi64(pairs[0], pairs[1]), _mm256_unpackhi_epi64(pairs[0], pairs[1]),
                         of_16_bits);
    return of_16_bits ? _mm256_madd_epi16(sums, factors) : sums;
}

INLINE __m256 add_scaled(__m256 acc, __m256i dot, __m256 scales) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scales, acc);
}

/* In the 32-bit lanes of each half bytes of this half of v: in the lower half those from `low` on, each second one, in
 * the upper half those from `high` on.  `none`: a lane that is zero where its bytes have their highest bit; `one`: a
 * lane with 1 where the byte shall be.  So 0x80808000 and 1 make integers of bytes, 0x80008000 and 0x00010001 two of
 * 16 bits in each lane. */
INLINE __m256i each_second(__m256i v, const int low, const int high, const int none, const int one) {
    return _mm256_shuffle_epi8(v, _mm256_setr_epi32(
        none + low * one, none + (low + 2) * one, none + (low + 4) * one, none + (low + 6) * one,
        none + high * one, none + (high + 2) * one, none + (high + 4) * one, none + (high + 6) * one));
}

INLINE __m256 bytes_as_floats(__m256i v, const int low, const int high) {
    return _mm256_cvtepi32_ps(each_second(v, low, high, (int)0x80808000, 1));
}

/* -- nibbles in blocks of one step: two steps a vector ------------------------------------------------------------- */

/* The scales and minima (f16) with which the first n of eight blocks begin; those beyond repeat the last one. */
INLINE __m256 scales_and_minima(const uint8_t *p, const int size, const int n, __m256 *minima) {
#define AT(j, place) _mm_loadu_si128((const __m128i *)(p + ((j) < n ? (j) : n - 1) * size - 4 * (place)))
#define FOUR(i, j, k, l) _mm256_cvtph_ps(_mm_blend_epi32( \
        _mm_blend_epi32(AT(i, 0), AT(j, 1), 2), _mm_blend_epi32(AT(k, 2), AT(l, 3), 8), 12))
    __m256 a = FOUR(0, 2, 1, 3), b = FOUR(4, 6, 5, 7);
#undef FOUR
#undef AT
    *minima = _mm256_shuffle_ps(a, b, 0xdd);
    return _mm256_shuffle_ps(a, b, 0x88);
}

/* The scales of the first n of eight steps; those beyond repeat the last one: there a strip has zeros.
 * `times`: by what the strip's sums are multiplied. */
INLINE __m256 scales_of_steps(const int type, const uint8_t *p, const int n, __m256 *times) {
    switch (type) {
    case GS_TYPE_Q4_1: case GS_TYPE_Q5_1: return scales_and_minima(p, bytes_of(type), n, times);
    case GS_TYPE_IQ4_XS: return *times = scales_of_iq4_xs(p, 1);
    case GS_TYPE_MXFP4: return *times = eight_powers(p, n);
    default: return *times = _mm256_cvtph_ps(eight_words(p, bytes_of(type), n));
    }
}

/* The first n of eight steps of one row. */
INLINE void add_nibbles(const int type, const uint8_t *p, const gs_strip *y, const int n, vec acc[2], __m256 *low) {
    __m256 times, s = scales_of_steps(type, p, n, &times);
    __m256i sums[4];
    if (!is_signed(type))
        *low = _mm256_fmadd_ps(times, _mm256_loadu_ps(y->sum), *low);
    s = _mm256_mul_ps(s, _mm256_loadu_ps(y->d));
    UNROLL for (int k = 0; k < 4; k++) {
        __m256i v[2];
        sums[k] = _mm256_setzero_si256();
        if (2 * k < n) {
            lanes_of_pair(type, p, 2 * k, 2 * k + 1 < n ? 2 * k + 1 : 2 * k, v);
            UNROLL for (int h = 0; h < 2; h++)
                sums[k] = sums_of(type, sums[k], v[h], load32(y->q + 64 * k + 32 * h));
        }
    }
    acc[0] = add_scaled(acc[0], sums_of_four(type, 2, sums, _mm256_set1_epi16(1)), s);
}

/* -- Q4_K and Q5_K: two rows a vector ------------------------------------------------------------------------------ */

/* The sums of the eight steps of rows a and b: of even ones, and of odd ones. */
INLINE void sums_of_rows(const int type, const uint8_t *a, const uint8_t *b, const gs_strip *y, __m256i sums[2][4]) {
    const int from = type == GS_TYPE_Q5_K ? 48 : 16;
    __m256i bits[2] = {load_two(a + 16, b + 16), load_two(a + 32, b + 32)};
    UNROLL for (int k = 0; k < 4; k++) {        /* 32 bytes have a step in low nibbles, the next one in high ones */
        const int at = from + 32 * k;
        __m256i v[2] = {load_two(a + at, b + at), load_two(a + at + 16, b + at + 16)};
        UNROLL for (int odd = 0; odd < 2; odd++) {
            const int8_t *q = y->q + 64 * k + 32 * odd;
            sums[odd][k] = _mm256_setzero_si256();
            UNROLL for (int h = 0; h < 2; h++) {
                __m256i levels = nibbles_of(type, v[h], odd);
                if (type == GS_TYPE_Q5_K)
                    levels = _mm256_or_si256(levels, fifths_of_k(bits[h], 2 * k + odd));
                __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(q + 16 * h)));
                sums[odd][k] = sums_of(type, sums[odd][k], levels, both);
            }
        }
    }
}

/* Four numbers of a strip, in both halves. */
INLINE __m256 four_of(const float *at) {
    return _mm256_broadcast_ps((const __m128 *)at);
}

/* What row a adds is in the lower halves of `acc` and `low`, what row b adds in the upper ones. */
INLINE void add_two_rows(const int type, const uint8_t *a, const uint8_t *b, const gs_strip *y, __m256 *acc,
                         __m256 *low) {
    __m256 dots[2];
    __m256i sums[2][4];
    sums_of_rows(type, a, b, y, sums);
    UNROLL for (int odd = 0; odd < 2; odd++)
        dots[odd] = _mm256_cvtepi32_ps(sums_of_four(type, 2, sums[odd], _mm256_set1_epi16(1)));
    __m256i factors = six_bits(a, b);           /* eight of scales, then eight of minima */
    __m128i heads = _mm_unpacklo_epi32(_mm_cvtsi32_si128((int)gs_load_u32(a)), _mm_cvtsi32_si128((int)gs_load_u32(b)));
    __m256 d = _mm256_castps128_ps256(_mm_cvtph_ps(heads));
    __m256 dmin = _mm256_permutevar8x32_ps(d, _mm256_setr_epi32(1, 1, 1, 1, 3, 3, 3, 3));
    d = _mm256_permutevar8x32_ps(d, _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2));
    /* Scales of blocks come first: sums without them may overflow. */
    UNROLL for (int odd = 0; odd < 2; odd++) {
        __m256 s = _mm256_mul_ps(bytes_as_floats(factors, odd, odd), d);
        __m256 m = _mm256_mul_ps(bytes_as_floats(factors, 8 + odd, 8 + odd), dmin);
        *acc = _mm256_fmadd_ps(dots[odd], _mm256_mul_ps(s, four_of(y->d + 4 * odd)), *acc);
        *low = _mm256_fnmadd_ps(m, four_of(y->sum + 4 * odd), *low);
    }
}

/* -- two scales in 32 elements: a step a vector -------------------------------------------------------------------- */

/* The sums of the halves of four steps, from 4 i on. */
INLINE void sums_of_halves(const int type, const uint8_t *p, const gs_strip *y, const int i, __m256i sums[4]) {
    UNROLL for (int j = 0; j < 4; j++)
        sums[j] = sums_of(type, _mm256_setzero_si256(), lanes(type, p, 4 * i + j), load32(y->q + 128 * i + 32 * j));
}

/* Q3_K and Q6_K. */
INLINE void add_of_two_scales(const int type, const uint8_t *p, const gs_strip *y, vec acc[2], __m256 *low) {
    __m128i v = type == GS_TYPE_Q3_K ? factors_of_q3_k(p) : _mm_loadu_si128((const __m128i *)(p + 192));
    const __m256 d = _mm256_set1_ps(half(p + (type == GS_TYPE_Q3_K ? 108 : 208)));
    v = _mm_shuffle_epi8(v, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    UNROLL for (int i = 0; i < 2; i++, v = _mm_srli_si128(v, 8)) {
        __m256 s = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)), d);
        __m256i sums[4];
        *low = _mm256_fmadd_ps(s, _mm256_loadu_ps(y->sum + 8 * i), *low);
        sums_of_halves(type, p, y, i, sums);
        acc[i] = add_scaled(acc[i], sums_of_four(type, 1, sums, _mm256_set1_epi16(1)),
                            _mm256_mul_ps(s, _mm256_loadu_ps(y->d + 8 * i)));
    }
}

/* Q2_K, whose sums of products are multiplied by the scales' integers where they become 32 bits. */
INLINE void add_q2_k(const uint8_t *p, const gs_strip *y, vec acc[2], __m256 *low) {
    __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    __m256i factors = _mm256_and_si256(v, bytes(15)), least = _mm256_and_si256(right(v, 4), bytes(15)), sums[4];
    __m128 pair = _mm_cvtph_ps(_mm_cvtsi32_si128((int)gs_load_u32(p + 80)));
    const __m256 d = _mm256_broadcastss_ps(pair), dmin = _mm256_broadcastss_ps(_mm_movehdup_ps(pair));
    UNROLL for (int i = 0; i < 2; i++) {
        sums_of_halves(GS_TYPE_Q2_K, p, y, i, sums);
#if VNNI
        __m256i dot = sums_of_four(GS_TYPE_Q2_K, 1, sums, factors);
        dot = _mm256_mullo_epi32(dot, each_second(factors, 8 * i, 8 * i + 1, (int)0x80808000, 1));
#else
        __m256i dot = sums_of_four(GS_TYPE_Q2_K, 1, sums,
                                   each_second(factors, 8 * i, 8 * i + 1, (int)0x80008000, 0x00010001));
#endif
        /* The scale of the block comes first: sums without it may overflow. */
        __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(y->d + 8 * i), d);
        __m256 least_scale = _mm256_mul_ps(bytes_as_floats(least, 8 * i, 8 * i + 1), dmin);
        acc[i] = add_scaled(acc[i], dot, scale);
        *low = _mm256_fnmadd_ps(least_scale, _mm256_loadu_ps(y->sum + 8 * i), *low);
    }
}

/* -- any type ------------------------------------------------------------------------------------------------------ */

/* Q8_0, whose blocks are whole vectors. */
INLINE void add_q8_0(const uint8_t *p, const gs_strip *y, vec acc[2], __m256 *low) {
    const int type = GS_TYPE_Q8_0, size = bytes_of(type);
    /* A load from memory spreads a scale over a vector without work for the units that shuffle. */
    float spread[8];
    __m256 s = _mm256_cvtph_ps(eight_words(p, size, 8));
    if (!is_signed(type))
        *low = _mm256_fmadd_ps(s, _mm256_loadu_ps(y->sum), *low);
    _mm256_storeu_ps(spread, _mm256_mul_ps(s, _mm256_loadu_ps(y->d)));
    UNROLL for (int j = 0; j < 8; j++) {
        __m256i v = lanes(type, p + j * size, 0);
        VEC_KEEP(v);
        __m256i dot = dot4(type, _mm256_setzero_si256(), v, load32(y->q + 32 * j));
        acc[j % 2] = add_scaled(acc[j % 2], dot, _mm256_broadcast_ss(&spread[PLACE_OF(j)]));
    }
}

INLINE void add_strip(const int type, const int N, const int R, const uint8_t *p, int64_t stride,
                      const gs_strip *const y[], int64_t at, vec acc[][2], __m256 low[]) {
    (void)N;
    if (takes_two_rows(type)) {
        add_two_rows(type, p, p + stride, y[0] + at, &acc[0][0], &low[0]);
        return;
    }
    UNROLL for (int r = 0; r < R; r++, p += stride) {
        if (type == GS_TYPE_Q8_0)
            add_q8_0(p, y[0] + at, acc[r], &low[r]);
        else if (type == GS_TYPE_Q2_K)
            add_q2_k(p, y[0] + at, acc[r], &low[r]);
        else if (halves_of(type) == 2)
            add_of_two_scales(type, p, y[0] + at, acc[r], &low[r]);
        else
            add_nibbles(type, p, y[0] + at, GS_STRIP_STEPS, acc[r], &low[r]);
    }
}

/* The 32 activations of step j of a strip. */
INLINE __m256i step_of(const int type, const gs_strip *strip, int j) {
    const int order = strip_order(type);
    const int8_t *q = strip->q + 32 * (j - j % order) + 16 * (j % order);
    return load_two((const uint8_t *)q, (const uint8_t *)q + 16 * order);
}

/* Adds the product of one block of 32 elements of a row, step j of the last strip. */
INLINE void add_block(const int type, const uint8_t *p, const gs_strip *y, int j, __m256 *low) {
    float s[16], m[16];
    scales(type, p, s, m);
    __m256i dot = dot4(type, _mm256_setzero_si256(), lanes(type, p, 0), step_of(type, y, j));
    *low = add_scaled(*low, dot, _mm256_set1_ps(s[0] * y->d[PLACE_OF(j)]));
    if (!is_signed(type)) {
        float least = (has_min(type) ? m[0] : s[0]) * y->sum[PLACE_OF(j)];
        *low = _mm256_add_ps(*low, _mm256_castps128_ps256(_mm_set_ss(least)));
    }
}

/* Adds the products of the n blocks of 32 elements with which rows end that are less than a strip. */
INLINE void add_end(const int type, const int N, const int R, const uint8_t *p, int64_t stride,
                    const gs_strip *const y[], int64_t at, int n, vec acc[][2], __m256 low[]) {
    (void)N;
    UNROLL for (int r = 0; r < R; r++, p += stride) {
        if (type != GS_TYPE_Q8_0 && at > 0) {   /* reads bytes before the blocks */
            add_nibbles(type, p, y[0] + at, n, acc[r], &low[r]);
            continue;
        }
        for (int j = 0; j < n; j++)
            add_block(type, p + j * bytes_of(type), y[0] + at, j, &low[r]);
    }
}

/* The totals of two rows that share vectors. */
INLINE void totals_of_two(__m256 acc, __m256 low, float to[2]) {
    __m256 v = _mm256_add_ps(acc, low);
    v = _mm256_add_ps(v, _mm256_permute_ps(v, 0x4e));
    v = _mm256_add_ps(v, _mm256_permute_ps(v, 0xb1));
    to[0] = _mm256_cvtss_f32(v);
    to[1] = _mm_cvtss_f32(_mm256_extractf128_ps(v, 1));
}
