/* avx512_few_q.h -- add_steps (x86_few_q.h) in vectors of 512 bits.
 *
 * Included by x86_few_q.h.
 */
INLINE __m512 widened(__m256 v) {
    return _mm512_castps256_ps512(v);
}

INLINE __m512 upper_half(__m512 v) {
    return widened(_mm512_extractf32x8_ps(v, 1));
}

/* 16 signed bytes, times the f16 value at p. */
INLINE __m512 scaled_bytes(__m128i v, const uint8_t *p) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(v)), _mm512_set1_ps(half(p)));
}

/* The scales of eight steps (32 elements each): 8 in the lower half of a vector, or 16.  `times`: by what the strip's
 * sums are multiplied: the minima of types that have them, without their minus where subtracts_minima(type); else the
 * scales.  With has_halved_strips(type), only the first n steps are read; the other scales and minima are finite. */
INLINE __m512 strip_scales(const int type, const uint8_t *p, const int n, __m512 *times) {
    __m512 s;
    __m128i v;
    switch (type) {
    case GS_TYPE_Q4_0: case GS_TYPE_Q4_1: case GS_TYPE_Q5_0: case GS_TYPE_Q5_1: case GS_TYPE_IQ4_NL:
        s = _mm512_cvtph_ps(scale_words(type, p, n));
        *times = has_min(type) ? upper_half(s) : s;
        return s;
    case GS_TYPE_MXFP4: return *times = widened(eight_powers(p, n));
    case GS_TYPE_Q4_K: case GS_TYPE_Q5_K:
        s = six_bit_scales(p);
        *times = upper_half(s);
        return s;
    case GS_TYPE_Q6_K:
        v = _mm_loadu_si128((const __m128i *)(p + 192));
        return *times = scaled_bytes(v, p + 208);
    case GS_TYPE_IQ4_XS: return *times = widened(scales_of_iq4_xs(p));
    default: return *times = widened(eight_floats(p, 34));
    }
}

/* Adds the products of eight steps to acc[column]; `scaled`: products of the weights' scales and those of a strip. */
INLINE void add_whole(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at,
                      const __m512 *scaled, vec acc[][2]) {
    UNROLL for (int j = 0; j < 8; j += 2) {
        __m512i v = lanes_of_two(type, p, j);
        __m512i place = halves_of(type) == 2
            ? _mm512_setr_epi32(2 * j, 2 * j, 2 * j, 2 * j, 2 * j + 1, 2 * j + 1, 2 * j + 1, 2 * j + 1,
                                2 * j + 2, 2 * j + 2, 2 * j + 2, 2 * j + 2, 2 * j + 3, 2 * j + 3, 2 * j + 3, 2 * j + 3)
            : _mm512_setr_epi32(j, j, j, j, j, j, j, j, j + 1, j + 1, j + 1, j + 1, j + 1, j + 1, j + 1, j + 1);
        UNROLL for (int c = 0; c < N; c++) {
            __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), v, _mm512_loadu_si512(y[c][at].q + 32 * j));
            vec *sum = &acc[c][j / 2 % 2];
            *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(place, scaled[c]), *sum);
        }
    }
}

/* The same for strips in halves: 128 elements are scaled together, not 64.  Of the eight steps the row has n; the
 * strips' scales of the others are 0. */
INLINE void add_halved(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at,
                       const int n, const __m512 *scaled, vec acc[][2]) {
    UNROLL for (int j = 0; j < 8; j += 4) {
        if (j >= n)
            break;
        const uint8_t *block[4];
        __m512i low, high, place = _mm512_setr_epi32(j, j, j, j, j + 1, j + 1, j + 1, j + 1,
                                                     j + 2, j + 2, j + 2, j + 2, j + 3, j + 3, j + 3, j + 3);
        if (units_of(type) == 8) {
            lanes_of_nibbles(type, _mm512_loadu_si512(p + 8 + 16 * j), &low, &high);
        } else {
            UNROLL for (int i = 0; i < 4; i++)
                block[i] = p + (j + i < n ? j + i : n - 1) * bytes_of(type);
            lanes_of_four(type, block, &low, &high);
        }
        UNROLL for (int c = 0; c < N; c++) {
            const int8_t *q = y[c][at].q + 32 * j;
            __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), low, _mm512_loadu_si512(q));
            dot = _mm512_dpbusd_epi32(dot, high, _mm512_loadu_si512(q + 64));
            acc[c][j / 4] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(place, scaled[c]),
                                            acc[c][j / 4]);
        }
    }
}

/* -- spread strips (gs_strip): four neighbouring lanes have four scales -------------------------------------------- */

/* For each lane the one of a block's 16 bytes of scales that is its own, alone in the lane. */
INLINE __m512i spread_bytes(__m512i v) {
    const __m512i place = _mm512_setr_epi32(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return _mm512_shuffle_epi8(v, _mm512_or_si512(place, _mm512_set1_epi32((int)0x80808000)));
}

/* The scales of a Q2_K block, and its minima. */
INLINE __m512i spread_q2_k(const uint8_t *p, __m512i *minima) {
    __m512i v = spread_bytes(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)));
    *minima = _mm512_srli_epi32(v, 4);
    return _mm512_and_si512(v, _mm512_set1_epi32(15));
}

/* The scales of a Q3_K block, whose 12 bytes are the last before its factor: of scale n the lower four bits are in byte
 * n % 8, the others in byte 8 + n % 4.  Most is done in ordinary registers, for which there are other units. */
INLINE __m512i spread_q3_k(const uint8_t *p) {
    uint64_t low = gs_load_u64(p + 96), high = gs_load_u32(p + 104), scales[2];
    high |= high << 30;         /* the upper bits of scales 0 .. 7, and of the others four bits higher */
    scales[0] = (low & 0x0f0f0f0f0f0f0f0f) | (high << 4 & 0x3030303030303030);
    scales[1] = (low >> 4 & 0x0f0f0f0f0f0f0f0f) | (high & 0x3030303030303030);
    __asm__("" : "+m"(scales));
    __m512i v = _mm512_mask_set1_epi64(_mm512_set1_epi64((long long)scales[0]), 0xaa, (long long)scales[1]);
    return _mm512_sub_epi32(spread_bytes(v), _mm512_set1_epi32(32));
}

/* Of part j the levels, times 2^(bits * j), of a block's `low` bits and of the bits with the value 4. */
INLINE __m512i spread_levels(const int type, __m512i low, __m512i high, const int j) {
    if (type == GS_TYPE_Q2_K)
        return _mm512_and_si512(low, wide_bytes(3 << 2 * j));
    low = _mm512_and_si512(j ? _mm512_srli_epi16(low, j) : low, wide_bytes(3 << j));
    return IVEC_OR_AND(low, high, wide_bytes(4 << j));
}

INLINE void add_spread(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at,
                       vec acc[][2]) {
    const int is_q2 = type == GS_TYPE_Q2_K;
    const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i minima = _mm512_setzero_si512(), high = _mm512_setzero_si512();
    __m512i scales = is_q2 ? spread_q2_k(p, &minima) : spread_q3_k(p);
    __m512i low = _mm512_permutexvar_epi32(lanes, _mm512_loadu_si512(p + (is_q2 ? 16 : 32)));
    if (!is_q2) {
        /* Bit j of a byte is of step j.  Those of parts 0 .. 3 come to bits 2 .. 5. */
        high = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 0, 4, 1, 5, 1, 5, 2, 6, 2, 6, 3, 7, 3, 7),
                                        _mm512_loadu_si512(p));
        high = _mm512_rolv_epi32(high, _mm512_broadcast_i32x4(_mm_setr_epi32(2, 2, 30, 30)));
    }
    /* Loads spread floats over lanes without work for the unit that shuffles; compilers would rather have that. */
    struct { _Alignas(64) float at[16]; } scaled;
    struct { _Alignas(32) float at[8]; } ends;          /* the last is d, or dmin after d */
    _mm256_store_ps(ends.at, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + bytes_of(type) - 16))));
    __m512 s = _mm512_cvtepi32_ps(scales);
    UNROLL for (int c = 0; c < N; c++) {
        const gs_strip *strip = y[c] + at;
        __m512 sum = _mm512_loadu_ps(strip->sum), part = is_q2 ? VEC_ZERO : _mm512_mul_ps(s, sum);
        _mm512_store_ps(scaled.at, _mm512_mul_ps(s, _mm512_loadu_ps(strip->d)));
        __asm__("" : "+m"(scaled), "+m"(ends));
        if (is_q2)
            acc[c][1] = _mm512_fnmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(minima), sum), _mm512_set1_ps(ends.at[7]),
                                         acc[c][1]);
        UNROLL for (int j = 0; j < 4; j++) {
            __m512i v = spread_levels(type, low, high, j);
            __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), v, _mm512_loadu_si512(strip->q + 64 * j));
            __m512 times = _mm512_broadcast_f32x4(_mm_load_ps(scaled.at + 4 * j));
            part = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), times, part);
        }
        acc[c][0] = _mm512_fmadd_ps(part, _mm512_set1_ps(ends.at[is_q2 ? 6 : 7]), acc[c][0]);
    }
}

/* Adds the products of the first n of eight steps, all if the type's strips are whole. */
INLINE void add_steps(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at,
                      const int n, vec acc[][2], __m256 low[]) {
    if (has_spread_strips(type)) {
        add_spread(type, N, p, y, at, acc);
        return;
    }
    __m512 times, s = strip_scales(type, p, n, &times), scaled[GS_FEW_Q];
    UNROLL for (int c = 0; c < N; c++) {
        const gs_strip *strip = y[c] + at;
        scaled[c] = halves_of(type) == 2 ? _mm512_mul_ps(s, _mm512_loadu_ps(strip->d))
            : _mm512_castps256_ps512(_mm256_mul_ps(_mm512_castps512_ps256(s), _mm256_loadu_ps(strip->d)));
        UNROLL for (int h = 0; h < halves_of(type); h++) {
            __m256 t = _mm512_castps512_ps256(h ? upper_half(times) : times), sum = _mm256_loadu_ps(strip->sum + 8 * h);
            low[c] = subtracts_minima(type) ? _mm256_fnmadd_ps(t, sum, low[c]) : _mm256_fmadd_ps(t, sum, low[c]);
        }
    }
    if (has_halved_strips(type))
        add_halved(type, N, p, y, at, n, scaled, acc);
    else
        add_whole(type, N, p, y, at, scaled, acc);
}
