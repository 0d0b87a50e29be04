/* matmul_x86.h -- matrix products for x86: one source, compiled for AVX2 and for AVX-512 with VNNI.
 *
 * Included once by a file that has chosen a target and defined WIDE (1: 512 bits).  `type` is a constant wherever it
 * is a parameter here, so each function exists once for each type and number of columns, with nothing left to decide.
 *
 * Levels are unsigned bytes (q + offset), as the instructions want one side unsigned; the sum over the activations,
 * times the offset, is taken off by starting from it (gs_cell_q).  Only AVX2 cannot do that with an offset of 128,
 * whose pairs of products leave 16 bits: there the sign moves to the activation instead.
 */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "floats.h"
#include "product.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#ifndef AHEAD
#define AHEAD 4096             /* bytes that weights are asked for before they are needed */
#endif

/* -- what a type is, as constants --------------------------------------------------------------------------------- */

INLINE int bytes_of(const int type) {
    switch (type) {
    case GS_TYPE_Q4_0: return 18;
    case GS_TYPE_Q4_1: return 20;
    case GS_TYPE_Q5_0: return 22;
    case GS_TYPE_Q5_1: return 24;
    case GS_TYPE_Q8_0: return 34;
    case GS_TYPE_Q2_K: return 84;
    case GS_TYPE_Q3_K: return 110;
    case GS_TYPE_Q4_K: return 144;
    case GS_TYPE_Q5_K: return 176;
    case GS_TYPE_Q6_K: return 210;
    case GS_TYPE_IQ4_NL: return 18;
    case GS_TYPE_IQ4_XS: return 136;
    default: return 17; /* MXFP4 */
    }
}

INLINE int units_of(const int type) { /* cells that a block covers */
    return (type >= GS_TYPE_Q2_K && type <= GS_TYPE_Q6_K) || type == GS_TYPE_IQ4_XS ? 8 : 1;
}

INLINE int halves_of(const int type) { /* scales of a cell */
    return type == GS_TYPE_Q2_K || type == GS_TYPE_Q3_K || type == GS_TYPE_Q6_K ? 2 : 1;
}

INLINE int has_min(const int type) {
    return type == GS_TYPE_Q4_1 || type == GS_TYPE_Q5_1 || type == GS_TYPE_Q2_K || type == GS_TYPE_Q4_K
        || type == GS_TYPE_Q5_K;
}

INLINE int is_signed(const int type) {
    return !WIDE && (type == GS_TYPE_Q8_0 || type == GS_TYPE_IQ4_NL || type == GS_TYPE_IQ4_XS);
}

INLINE int has_offset(const int type) {
    return !has_min(type) && !is_signed(type);
}

static int32_t offset_of(const gs_block_kind *kind) {
    return is_signed(kind->type) ? 0 : kind->offset;
}

/* -- decoding 32 elements ----------------------------------------------------------------------------------------- */

INLINE __m256i bytes(int value) {
    return _mm256_set1_epi8((char)value);
}

INLINE __m256i load32(const void *at) {
    return _mm256_loadu_si256((const __m256i *)at);
}

INLINE __m256i right(__m256i v, const int n) {
    return _mm256_srli_epi16(v, n);
}

INLINE __m256i left(__m256i v, const int n) {
    return _mm256_slli_epi16(v, n);
}

/* 16 bytes: their low nibbles, then their high ones. */
INLINE __m256i nibbles(const uint8_t *at) {
    __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)at));
    return _mm256_and_si256(_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4)), bytes(15));
}

/* 16 where the bit is set, else 0. */
INLINE __m256i fifths(const uint8_t *at) {
#if WIDE
    return _mm256_maskz_mov_epi8(gs_load_u32(at), bytes(16));
#else
    __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32((int)gs_load_u32(at)),
                                         _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                                            0x0303030303030303));
    __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit), bytes(16));
#endif
}

INLINE __m256i looked_up(const uint8_t *at, const int8_t *table) {
    __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return _mm256_shuffle_epi8(levels, nibbles(at));
}

/* Bytes that may be negative, as the kernels here want them. */
INLINE __m256i raised(const int type, __m256i v) {
    return is_signed(type) ? v : _mm256_xor_si256(v, bytes(128));
}

/* The j-th 32 elements of a block. */
INLINE __m256i lanes(const int type, const uint8_t *p, const int j) {
    __m256i low, high;
    switch (type) {
    case GS_TYPE_Q4_0: return nibbles(p + 2);
    case GS_TYPE_Q4_1: return nibbles(p + 4);
    case GS_TYPE_Q5_0: return _mm256_or_si256(nibbles(p + 6), fifths(p + 2));
    case GS_TYPE_Q5_1: return _mm256_or_si256(nibbles(p + 8), fifths(p + 4));
    case GS_TYPE_Q8_0: return raised(type, load32(p + 2));
    case GS_TYPE_Q2_K: return _mm256_and_si256(right(load32(p + 16 + j / 4 * 32), j % 4 * 2), bytes(3));
    case GS_TYPE_Q3_K:
        low = _mm256_and_si256(right(load32(p + 32 + j / 4 * 32), j % 4 * 2), bytes(3));
        high = j < 2 ? left(load32(p), 2 - j) : right(load32(p), j - 2);
        return _mm256_or_si256(low, _mm256_and_si256(high, bytes(4)));
    case GS_TYPE_Q4_K: return _mm256_and_si256(right(load32(p + 16 + j / 2 * 32), j % 2 * 4), bytes(15));
    case GS_TYPE_Q5_K:
        low = _mm256_and_si256(right(load32(p + 48 + j / 2 * 32), j % 2 * 4), bytes(15));
        high = j < 4 ? left(load32(p + 16), 4 - j) : right(load32(p + 16), j - 4);
        return _mm256_or_si256(low, _mm256_and_si256(high, bytes(16)));
    case GS_TYPE_Q6_K:
        low = _mm256_and_si256(right(load32(p + j / 4 * 64 + j % 2 * 32), j % 4 / 2 * 4), bytes(15));
        high = load32(p + 128 + j / 4 * 32);
        high = j % 4 < 2 ? left(high, 4 - j % 4 * 2) : right(high, j % 4 * 2 - 4);
        return _mm256_or_si256(low, _mm256_and_si256(high, bytes(48)));
    case GS_TYPE_IQ4_NL: return raised(type, looked_up(p + 2, gs_iq4_levels));
    case GS_TYPE_IQ4_XS: return raised(type, looked_up(p + 8 + 16 * j, gs_iq4_levels));
    default: return _mm256_add_epi8(looked_up(p + 1, gs_mxfp4_levels), bytes(12));
    }
}

INLINE float half(const uint8_t *at) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(gs_load_u16(at))));
}

/* 8 bytes times a number. */
INLINE void put_unsigned(float *to, __m128i v, float times) {
    _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v)), _mm256_set1_ps(times)));
}

INLINE void put_signed(float *to, __m128i v, float times) {
    _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)), _mm256_set1_ps(times)));
}

/* The scales of a block and, where it has them, its minima. */
INLINE void scales(const int type, const uint8_t *p, float *s, float *m) {
    __m128i v, w, nibble = _mm_set1_epi8(15);
    float d;
    switch (type) {
    case GS_TYPE_Q4_1:
    case GS_TYPE_Q5_1:
        s[0] = half(p);
        m[0] = half(p + 2);
        return;
    case GS_TYPE_Q2_K:
        v = _mm_loadu_si128((const __m128i *)p);
        w = _mm_and_si128(_mm_srli_epi16(v, 4), nibble);
        v = _mm_and_si128(v, nibble);
        d = half(p + 80);
        put_unsigned(s, v, d);
        put_unsigned(s + 8, _mm_srli_si128(v, 8), d);
        d = -half(p + 82);
        put_unsigned(m, w, d);
        put_unsigned(m + 8, _mm_srli_si128(w, 8), d);
        return;
    case GS_TYPE_Q3_K:
        v = _mm_loadl_epi64((const __m128i *)(p + 96));
        v = _mm_and_si128(_mm_unpacklo_epi64(v, _mm_srli_epi16(v, 4)), nibble);
        w = _mm_srlv_epi32(_mm_set1_epi32((int)gs_load_u32(p + 104)), _mm_setr_epi32(0, 2, 4, 6));
        w = _mm_slli_epi16(_mm_and_si128(w, _mm_set1_epi8(3)), 4);
        v = _mm_sub_epi8(_mm_or_si128(v, w), _mm_set1_epi8(32));
        d = half(p + 108);
        put_signed(s, v, d);
        put_signed(s + 8, _mm_srli_si128(v, 8), d);
        return;
    case GS_TYPE_Q4_K:
    case GS_TYPE_Q5_K: {
        uint32_t a = gs_load_u32(p + 4), b = gs_load_u32(p + 8), c = gs_load_u32(p + 12);
        uint32_t s1 = (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u), m1 = (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u);
        v = _mm_setr_epi32((int)(a & 0x3f3f3f3fu), (int)s1, 0, 0);
        w = _mm_setr_epi32((int)(b & 0x3f3f3f3fu), (int)m1, 0, 0);
        put_unsigned(s, v, half(p));
        put_unsigned(m, w, -half(p + 2));
        return;
    }
    case GS_TYPE_Q6_K:
        v = _mm_loadu_si128((const __m128i *)(p + 192));
        d = half(p + 208);
        put_signed(s, v, d);
        put_signed(s + 8, _mm_srli_si128(v, 8), d);
        return;
    case GS_TYPE_IQ4_XS: {
        __m256i low = _mm256_srlv_epi32(_mm256_set1_epi32((int)gs_load_u32(p + 4)),
                                        _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
        __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(gs_load_u16(p + 2)),
                                         _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
        low = _mm256_and_si256(low, _mm256_set1_epi32(15));
        high = _mm256_slli_epi32(_mm256_and_si256(high, _mm256_set1_epi32(3)), 4);
        low = _mm256_sub_epi32(_mm256_or_si256(low, high), _mm256_set1_epi32(32));
        _mm256_storeu_ps(s, _mm256_mul_ps(_mm256_cvtepi32_ps(low), _mm256_set1_ps(half(p))));
        return;
    }
    case GS_TYPE_MXFP4:
        s[0] = gs_f32_of_bits(p[0] < 2 ? 0x00200000u << p[0] : (uint32_t)(p[0] - 1) << 23);
        return;
    default:
        s[0] = half(p);
    }
}

/* -- activations -------------------------------------------------------------------------------------------------- */

INLINE int sum_of(__m128i v) {
    v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}

static void quantize(const float *x, int32_t offset, gs_cell_q *cell) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256 v[4];
    __m256i most = _mm256_setzero_si256(), q[4];
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
    }
    __m128i top = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
    top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1));
    uint32_t bits = (uint32_t)_mm_cvtsi128_si32(top);
    if (bits >= 0x7f800000u || bits < GS_LEAST_BITS) {
        memset(cell, 0, sizeof(*cell));
        if (bits >= 0x7f800000u) /* inf or NaN is among them */
            cell->d = cell->sum_low = cell->sum_high = cell->sum_both = NAN;
        return;
    }
    float largest = gs_f32_of_bits(bits);
    __m256 inverse = _mm256_set1_ps(127.0f / largest);
    for (int i = 0; i < 4; i++)
        q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    /* Packing works within 128 bits: the permutation brings the groups of four back into order. */
    __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(bytes(1), packed), _mm256_set1_epi16(1));
    int low = sum_of(_mm256_castsi256_si128(sums)), high = sum_of(_mm256_extracti128_si256(sums, 1));
    float d = largest / 127.0f;
    _mm256_storeu_si256((__m256i *)cell->q, packed);
    cell->low = -offset * low;
    cell->high = -offset * high;
    cell->both = -offset * (low + high);
    cell->d = d;
    cell->sum_low = d * (float)low;
    cell->sum_high = d * (float)high;
    cell->sum_both = d * (float)(low + high);
    cell->unused = 0;
}

/* -- few columns: row by row, straight from the blocks ------------------------------------------------------------ */

INLINE float total(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* start + sums of four products each. */
INLINE __m256i dot4(const int type, __m256i start, __m256i levels, __m256i y) {
#if WIDE
    (void)type;
    return _mm256_dpbusd_epi32(start, levels, y);
#else
    if (is_signed(type)) {
        y = _mm256_sign_epi8(y, levels);
        levels = _mm256_abs_epi8(levels);
    }
    __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(levels, y), _mm256_set1_epi16(1));
    return _mm256_add_epi32(start, sums);
#endif
}

#if WIDE
/* The j-th and the next 32 elements (j even) of a block, or of two blocks. */
INLINE __m512i two(const void *a, const void *b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load32(a)), load32(b), 1);
}

INLINE __m512i twice(const void *at) {
    return _mm512_broadcast_i64x4(load32(at));
}

INLINE __m512i wide_bytes(int value) {
    return _mm512_set1_epi8((char)value);
}

INLINE __m512i two_nibbles(const uint8_t *a, const uint8_t *b) {
    __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)a));
    __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)b));
    __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    return _mm512_and_si512(_mm512_srlv_epi64(both, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4)), wide_bytes(15));
}

/* The lower half shifted by a, the upper one by b. */
INLINE __m512i right_by(__m512i v, const int a, const int b) {
    return _mm512_srlv_epi16(v, _mm512_inserti64x4(_mm512_set1_epi16((short)a), _mm256_set1_epi16((short)b), 1));
}

INLINE __m512i left_by(__m512i v, const int a, const int b) {
    return _mm512_sllv_epi16(v, _mm512_inserti64x4(_mm512_set1_epi16((short)a), _mm256_set1_epi16((short)b), 1));
}

/* `value` added where bit j (lower half) or j + 1 (upper half) is set. */
INLINE __m512i where_bit(__m512i v, __m512i bits, const int j, const int value) {
    __m512i bit = _mm512_inserti64x4(wide_bytes(1 << j), bytes(2 << j), 1);
    return _mm512_mask_or_epi32(v, 0xffff, v, _mm512_maskz_mov_epi8(_mm512_test_epi8_mask(bits, bit), wide_bytes(value)));
}

INLINE __m512i wide_levels(__m512i places, const int8_t *table, const int offset) {
    __m128i levels = _mm_add_epi8(_mm_loadu_si128((const __m128i *)table), _mm_set1_epi8((char)offset));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(levels), places);
}

INLINE __m512i lanes_of_two(const int type, const uint8_t *p, const int j) {
    const uint8_t *a = p + j * bytes_of(type), *b = a + bytes_of(type);
    __m512i v;
    uint64_t fifth;
    switch (type) {
    case GS_TYPE_Q4_0: return two_nibbles(a + 2, b + 2);
    case GS_TYPE_Q4_1: return two_nibbles(a + 4, b + 4);
    case GS_TYPE_Q5_0:
        fifth = gs_load_u32(a + 2) | (uint64_t)gs_load_u32(b + 2) << 32;
        return _mm512_or_si512(two_nibbles(a + 6, b + 6), _mm512_maskz_mov_epi8(fifth, wide_bytes(16)));
    case GS_TYPE_Q5_1:
        fifth = gs_load_u32(a + 4) | (uint64_t)gs_load_u32(b + 4) << 32;
        return _mm512_or_si512(two_nibbles(a + 8, b + 8), _mm512_maskz_mov_epi8(fifth, wide_bytes(16)));
    case GS_TYPE_Q8_0: return _mm512_xor_si512(two(a + 2, b + 2), wide_bytes(128));
    case GS_TYPE_Q2_K:
        return _mm512_and_si512(right_by(twice(p + 16 + j / 4 * 32), j % 4 * 2, j % 4 * 2 + 2), wide_bytes(3));
    case GS_TYPE_Q3_K:
        v = _mm512_and_si512(right_by(twice(p + 32 + j / 4 * 32), j % 4 * 2, j % 4 * 2 + 2), wide_bytes(3));
        return where_bit(v, twice(p), j, 4);
    case GS_TYPE_Q4_K: return _mm512_and_si512(right_by(twice(p + 16 + j / 2 * 32), 0, 4), wide_bytes(15));
    case GS_TYPE_Q5_K:
        v = _mm512_and_si512(right_by(twice(p + 48 + j / 2 * 32), 0, 4), wide_bytes(15));
        return where_bit(v, twice(p + 16), j, 16);
    case GS_TYPE_Q6_K:
        v = _mm512_loadu_si512(p + j / 4 * 64);
        v = _mm512_and_si512(j % 4 ? _mm512_srli_epi16(v, 4) : v, wide_bytes(15));
        return _mm512_or_si512(v, _mm512_and_si512(j % 4 ? right_by(twice(p + 128 + j / 4 * 32), 0, 2)
                                                         : left_by(twice(p + 128 + j / 4 * 32), 4, 2), wide_bytes(48)));
    case GS_TYPE_IQ4_NL: return wide_levels(two_nibbles(a + 2, b + 2), gs_iq4_levels, 128);
    case GS_TYPE_IQ4_XS: return wide_levels(two_nibbles(p + 8 + 16 * j, p + 24 + 16 * j), gs_iq4_levels, 128);
    default: return wide_levels(two_nibbles(a + 1, b + 1), gs_mxfp4_levels, 12);
    }
}
#endif

/* The scales of eight steps, and what their sums are multiplied by. */
INLINE void eight_scales(const int type, const uint8_t *p, float *s, float *m) {
    const int size = bytes_of(type);
    if (units_of(type) == 8) {
        scales(type, p, s, m);
        return;
    }
    if (type == GS_TYPE_MXFP4) {
        __m256i e = _mm256_setr_epi32(p[0], p[size], p[2 * size], p[3 * size], p[4 * size], p[5 * size], p[6 * size],
                                      p[7 * size]);
        __m256i bits = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
        __m256i subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
        bits = _mm256_blendv_epi8(bits, subnormal, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e));
        _mm256_storeu_ps(s, _mm256_castsi256_ps(bits));
        return;
    }
#define HALF_AT(j) (short)gs_load_u16(p + (j) * size)
    _mm256_storeu_ps(s, _mm256_cvtph_ps(_mm_setr_epi16(HALF_AT(0), HALF_AT(1), HALF_AT(2), HALF_AT(3),
                                                       HALF_AT(4), HALF_AT(5), HALF_AT(6), HALF_AT(7))));
#undef HALF_AT
#define HALF_AT(j) (short)gs_load_u16(p + (j) * size + 2)
    if (has_min(type))
        _mm256_storeu_ps(m, _mm256_cvtph_ps(_mm_setr_epi16(HALF_AT(0), HALF_AT(1), HALF_AT(2), HALF_AT(3),
                                                           HALF_AT(4), HALF_AT(5), HALF_AT(6), HALF_AT(7))));
#undef HALF_AT
}

#if WIDE
typedef __m512 sums;
#define SUMS_ZERO _mm512_setzero_ps()
#define SUMS_ADD _mm512_add_ps
#define SUMS_TOTAL(v) total(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)))
#else
typedef __m256 sums;
#define SUMS_ZERO _mm256_setzero_ps()
#define SUMS_ADD _mm256_add_ps
#define SUMS_TOTAL total
#endif

/* Eight steps of a row times a strip of N columns each. */
INLINE void add_strip(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at,
                      sums acc[][2], __m256 low[]) {
    float s[16], m[16];
    eight_scales(type, p, s, m);
    const float *times = has_min(type) ? m : s;
#if WIDE
    __m512 scaled[2];
    UNROLL for (int c = 0; c < N; c++) {
        const gs_strip *strip = y[c] + at;
        /* Two loads, as two stores wrote the scales: one would wait for both to reach the cache. */
        scaled[c] = halves_of(type) == 2
            ? _mm512_mul_ps(_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(s)), _mm256_loadu_ps(s + 8), 1),
                            _mm512_loadu_ps(strip->d))
            : _mm512_castps256_ps512(_mm256_mul_ps(_mm256_loadu_ps(s), _mm256_loadu_ps(strip->d)));
        low[c] = _mm256_fmadd_ps(_mm256_loadu_ps(times), _mm256_loadu_ps(strip->sum), low[c]);
        if (halves_of(type) == 2)
            low[c] = _mm256_fmadd_ps(_mm256_loadu_ps(times + 8), _mm256_loadu_ps(strip->sum + 8), low[c]);
    }
    UNROLL for (int j = 0; j < 8; j += 2) {
        __m512i v = lanes_of_two(type, p, j);
        __m512i place = halves_of(type) == 2
            ? _mm512_setr_epi32(2 * j, 2 * j, 2 * j, 2 * j, 2 * j + 1, 2 * j + 1, 2 * j + 1, 2 * j + 1,
                                2 * j + 2, 2 * j + 2, 2 * j + 2, 2 * j + 2, 2 * j + 3, 2 * j + 3, 2 * j + 3, 2 * j + 3)
            : _mm512_setr_epi32(j, j, j, j, j, j, j, j, j + 1, j + 1, j + 1, j + 1, j + 1, j + 1, j + 1, j + 1);
        UNROLL for (int c = 0; c < N; c++) {
            __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), v, _mm512_loadu_si512(y[c][at].q + 32 * j));
            sums *sum = &acc[c][j / 2 % 2];
            *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(place, scaled[c]), *sum);
        }
    }
#else
    __m256 scaled[2][2];
    UNROLL for (int c = 0; c < N; c++) {
        const gs_strip *strip = y[c] + at;
        UNROLL for (int h = 0; h < halves_of(type); h++) {
            scaled[c][h] = _mm256_mul_ps(_mm256_loadu_ps(s + 8 * h), _mm256_loadu_ps(strip->d + 8 * h));
            if (!is_signed(type))
                low[c] = _mm256_fmadd_ps(_mm256_loadu_ps(times + 8 * h), _mm256_loadu_ps(strip->sum + 8 * h), low[c]);
        }
    }
    UNROLL for (int j = 0; j < 8; j++) {
        __m256i v = lanes(type, units_of(type) == 8 ? p : p + j * bytes_of(type), units_of(type) == 8 ? j : 0);
        const int first = 2 * j % 8;
        __m256i place = halves_of(type) == 2
            ? _mm256_setr_epi32(first, first, first, first, first + 1, first + 1, first + 1, first + 1)
            : _mm256_set1_epi32(j);
        UNROLL for (int c = 0; c < N; c++) {
            __m256i dot = dot4(type, _mm256_setzero_si256(), v, load32(y[c][at].q + 32 * j));
            __m256 scale = _mm256_permutevar8x32_ps(scaled[c][halves_of(type) == 2 ? j / 4 : 0], place);
            acc[c][j % 2] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, acc[c][j % 2]);
        }
    }
#endif
}

/* One block of 32, of those that do not fill a strip. */
INLINE void add_rest(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at, int j,
                     __m256 rest[], float sum[]) {
    float s[16], m[16];
    scales(type, p, s, m);
    __m256i v = lanes(type, p, 0);
    UNROLL for (int c = 0; c < N; c++) {
        const gs_strip *strip = y[c] + at;
        __m256i dot = dot4(type, _mm256_setzero_si256(), v, load32(strip->q + 32 * j));
        rest[c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(s[0] * strip->d[j]), rest[c]);
        if (!is_signed(type))
            sum[c] = fmaf(has_min(type) ? m[0] : s[0], strip->sum[j], sum[c]);
    }
}

INLINE void few_q(const int type, const int N, const gs_product *of, const char *shared, int64_t group, int64_t row0,
                  int64_t row1) {
    const int size = bytes_of(type) * (8 / units_of(type));
    const char *a = gs_weights_of(of, shared, group);
    int64_t stride = of->node->src[0]->layout.nb[1], strips = of->steps / GS_STRIP_STEPS;
    int over = (int)(of->steps % GS_STRIP_STEPS);
    const gs_strip *y[2];
    float *out[2];
    for (int c = 0; c < N; c++) {
        y[c] = gs_strips_of(of, shared, group, c);
        out[c] = gs_result_at(of, shared, group, c);
    }
    for (int64_t row = row0; row < row1; row++) {
        const uint8_t *p = (const uint8_t *)a + row * stride;
        sums acc[2][2];
        __m256 low[2], rest[2];
        float sum[2] = {0, 0};
        UNROLL for (int c = 0; c < N; c++) {
            acc[c][0] = acc[c][1] = SUMS_ZERO;
            low[c] = rest[c] = _mm256_setzero_ps();
        }
        for (int64_t at = 0; at < strips; at++, p += size) {
            UNROLL for (int line = 0; line < size; line += 64)
                _mm_prefetch((const char *)p + line + AHEAD, _MM_HINT_T0);
            add_strip(type, N, p, y, at, acc, low);
        }
        if (units_of(type) == 1)
            for (int j = 0; j < over; j++, p += bytes_of(type))
                add_rest(type, N, p, y, strips, j, rest, sum);
        UNROLL for (int c = 0; c < N; c++)
            out[c][row] = SUMS_TOTAL(SUMS_ADD(acc[c][0], acc[c][1])) + total(_mm256_add_ps(low[c], rest[c])) + sum[c];
    }
}

#define FEW_Q(name, type) \
    static void name(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1) { \
        switch (gs_columns_of(of, shared, group)) { \
        case 1: few_q(type, 1, of, shared, group, row0, row1); return; \
        default: few_q(type, 2, of, shared, group, row0, row1); \
        } \
    }

FEW_Q(few_q4_0, GS_TYPE_Q4_0)
FEW_Q(few_q4_1, GS_TYPE_Q4_1)
FEW_Q(few_q5_0, GS_TYPE_Q5_0)
FEW_Q(few_q5_1, GS_TYPE_Q5_1)
FEW_Q(few_q8_0, GS_TYPE_Q8_0)
FEW_Q(few_q2_k, GS_TYPE_Q2_K)
FEW_Q(few_q3_k, GS_TYPE_Q3_K)
FEW_Q(few_q4_k, GS_TYPE_Q4_K)
FEW_Q(few_q5_k, GS_TYPE_Q5_K)
FEW_Q(few_q6_k, GS_TYPE_Q6_K)
FEW_Q(few_iq4_nl, GS_TYPE_IQ4_NL)
FEW_Q(few_iq4_xs, GS_TYPE_IQ4_XS)
FEW_Q(few_mxfp4, GS_TYPE_MXFP4)

/* 8 weights as f32. */
INLINE __m256 load_f(const int type, const char *at) {
    if (type == GS_TYPE_F32)
        return _mm256_loadu_ps((const float *)at);
    __m128i v = _mm_loadu_si128((const __m128i *)at);
    if (type == GS_TYPE_F16)
        return _mm256_cvtph_ps(v);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}

#if WIDE
INLINE __m512 load_wide(const int type, const char *at) {
    if (type == GS_TYPE_F32)
        return _mm512_loadu_ps(at);
    __m256i v = load32(at);
    if (type == GS_TYPE_F16)
        return _mm512_cvtph_ps(v);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

typedef __m512 vec;
#define STEP_VECS 1
#define VEC_ZERO _mm512_setzero_ps()
#define VEC_FMA _mm512_fmadd_ps
#define VEC_ADD _mm512_add_ps
#define VEC_LOAD _mm512_loadu_ps
#define VEC_TOTAL(v) total(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)))
#define VEC_WEIGHTS load_wide
#else
typedef __m256 vec;
#define STEP_VECS 2
#define VEC_ZERO _mm256_setzero_ps()
#define VEC_FMA _mm256_fmadd_ps
#define VEC_ADD _mm256_add_ps
#define VEC_LOAD _mm256_loadu_ps
#define VEC_TOTAL total
#define VEC_WEIGHTS load_f
#endif
#define LANES (16 / STEP_VECS)

INLINE void add_step(const int type, const int N, const int at, const char *w, const float *y, vec acc[][4]) {
    const int element = type == GS_TYPE_F32 ? 4 : 2, n_acc = N == 1 ? 4 : 2;
    UNROLL for (int h = 0; h < STEP_VECS; h++) {
        vec v = VEC_WEIGHTS(type, w + h * LANES * element);
        UNROLL for (int c = 0; c < N; c++) {
            vec *sum = &acc[c][(at * STEP_VECS + h) % n_acc];
            *sum = VEC_FMA(v, VEC_LOAD(y + c * 16 + h * LANES), *sum);
        }
    }
}

/* N columns from `column` on, all of the first tile. */
INLINE void few_f(const int type, const int N, const gs_product *of, const char *shared, int64_t group, int64_t row0,
                  int64_t row1, int64_t column, int64_t width) {
    const int element = type == GS_TYPE_F32 ? 4 : 2, n_acc = N == 1 ? 4 : 2, together = 4;
    const char *a = gs_weights_of(of, shared, group);
    const float *cells = (const float *)gs_tile_of(of, shared, group, 0) + 16 * column;
    int64_t stride = of->node->src[0]->layout.nb[1], whole = of->k / 16, rest = of->k % 16;
    float *out[4];
    for (int c = 0; c < N; c++)
        out[c] = gs_result_at(of, shared, group, column + c);
    for (int64_t row = row0; row < row1; row++) {
        const char *p = a + row * stride;
        const float *y = cells;
        vec acc[4][4];
        int64_t b = 0;
        UNROLL for (int c = 0; c < N; c++)
            UNROLL for (int i = 0; i < n_acc; i++)
                acc[c][i] = VEC_ZERO;
        for (; b + together <= whole; b += together) {
            UNROLL for (int line = 0; line < 16 * element * together; line += 64)
                _mm_prefetch(p + line + AHEAD, _MM_HINT_T0);
            UNROLL for (int u = 0; u < together; u++, p += 16 * element, y += 16 * width)
                add_step(type, N, u, p, y, acc);
        }
        for (; b < whole; b++, p += 16 * element, y += 16 * width)
            add_step(type, N, 0, p, y, acc);
        if (rest) {
            char room[16 * sizeof(float)] = {0};
            memcpy(room, p, (size_t)rest * element);
            add_step(type, N, 0, room, y, acc);
        }
        UNROLL for (int c = 0; c < N; c++) {
            vec sum = VEC_ADD(acc[c][0], acc[c][1]);
            if (n_acc == 4)
                sum = VEC_ADD(sum, VEC_ADD(acc[c][2], acc[c][3]));
            out[c][row] = VEC_TOTAL(sum);
        }
    }
}

/* Some rows at a time, which stay in the cache while the next four columns meet them. */
#define FEW_F(name, type) \
    static void name(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1) { \
        int64_t columns = gs_columns_of(of, shared, group), some = columns <= 4 ? row1 - row0 : 8; \
        for (int64_t row = row0; row < row1; row += some) { \
            int64_t end = row1 - row < some ? row1 : row + some, c = 0; \
            for (; c + 4 <= columns; c += 4) \
                few_f(type, 4, of, shared, group, row, end, c, columns); \
            switch (columns - c) { \
            case 3: few_f(type, 3, of, shared, group, row, end, c, columns); break; \
            case 2: few_f(type, 2, of, shared, group, row, end, c, columns); break; \
            case 1: few_f(type, 1, of, shared, group, row, end, c, columns); break; \
            default: break; \
            } \
        } \
    }

FEW_F(few_f32, GS_TYPE_F32)
FEW_F(few_f16, GS_TYPE_F16)
FEW_F(few_bf16, GS_TYPE_BF16)

static void few(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1, char *scratch) {
    (void)scratch;
    switch (of->type) {
    case GS_TYPE_F32: few_f32(of, shared, group, row0, row1); return;
    case GS_TYPE_F16: few_f16(of, shared, group, row0, row1); return;
    case GS_TYPE_BF16: few_bf16(of, shared, group, row0, row1); return;
    case GS_TYPE_Q4_0: few_q4_0(of, shared, group, row0, row1); return;
    case GS_TYPE_Q4_1: few_q4_1(of, shared, group, row0, row1); return;
    case GS_TYPE_Q5_0: few_q5_0(of, shared, group, row0, row1); return;
    case GS_TYPE_Q5_1: few_q5_1(of, shared, group, row0, row1); return;
    case GS_TYPE_Q8_0: few_q8_0(of, shared, group, row0, row1); return;
    case GS_TYPE_Q2_K: few_q2_k(of, shared, group, row0, row1); return;
    case GS_TYPE_Q3_K: few_q3_k(of, shared, group, row0, row1); return;
    case GS_TYPE_Q4_K: few_q4_k(of, shared, group, row0, row1); return;
    case GS_TYPE_Q5_K: few_q5_k(of, shared, group, row0, row1); return;
    case GS_TYPE_Q6_K: few_q6_k(of, shared, group, row0, row1); return;
    case GS_TYPE_IQ4_NL: few_iq4_nl(of, shared, group, row0, row1); return;
    case GS_TYPE_IQ4_XS: few_iq4_xs(of, shared, group, row0, row1); return;
    default: few_mxfp4(of, shared, group, row0, row1);
    }
}

/* -- many columns: panels of rows, repacked so that a vector holds one place of k of neighbouring rows ------------ */

#if WIDE
#define ROWS 16
typedef __m512i ivec;
#define IVEC_LOAD(p) _mm512_loadu_si512(p)
#define IVEC_SET1(x) _mm512_set1_epi32(x)
#define VEC_SET1(x) _mm512_set1_ps(x)
#define VEC_STORE _mm512_storeu_ps
#define VEC_MUL _mm512_mul_ps
#define VEC_OF_INT _mm512_cvtepi32_ps
#define TILE_Q 6
#define TILE_F 12
#else
#define ROWS 8
typedef __m256i ivec;
#define IVEC_LOAD(p) load32(p)
#define IVEC_SET1(x) _mm256_set1_epi32(x)
#define VEC_SET1(x) _mm256_set1_ps(x)
#define VEC_STORE _mm256_storeu_ps
#define VEC_MUL _mm256_mul_ps
#define VEC_OF_INT _mm256_cvtepi32_ps
#define TILE_Q 2
#define TILE_F 6
#endif
#define PANEL (2 * ROWS)
#define DEPTH_Q 128            /* steps of k that a packed panel holds: 4096 elements */
#define DEPTH_F 64             /* .. 1024 elements                                    */

/* Eight rows of eight 32-bit values: rows become columns. */
INLINE void transpose(__m256i r[8]) {
    __m256i t[8], u[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
    }
}

/* A step of a packed panel of quantised rows: for each scale its values for all rows, the minima, then the levels in
 * groups of four neighbours, all rows of a group together. */
INLINE int64_t step_bytes(const int type) {
    return PANEL * (32 + 4 * halves_of(type) * (1 + has_min(type)));
}

/* Rows that are not there are the last one again; nobody stores what comes of them. */
INLINE void pack_q(const int type, const char *a, int64_t stride, int64_t rows, int64_t step0, int64_t steps,
                   char *panel) {
    const int units = units_of(type), halves = halves_of(type), n_scales = units * halves;
    const int64_t half_bytes = step_bytes(type) / halves, head = 4 * PANEL * (1 + has_min(type));
    for (int64_t step = 0; step < steps; step += units, panel += units * step_bytes(type)) {
        const int64_t at = (step0 + step) / units * bytes_of(type);
        const char *block = a + at;
        for (int i = 0; i < PANEL; i++) {
            const uint8_t *p = (const uint8_t *)block + (i < rows ? i : rows - 1) * stride;
            if (bytes_of(type) >= 64 || at % 64 < bytes_of(type)) /* the next panel, a line at a time */
                UNROLL for (int line = 0; line < bytes_of(type); line += 64)
                    _mm_prefetch((const char *)p + PANEL * stride + line, _MM_HINT_T1);
            float s[16], m[16];
            scales(type, p, s, m);
            UNROLL for (int g = 0; g < n_scales; g++) {
                memcpy(panel + g * half_bytes + 4 * i, &s[g], sizeof(float));
                if (has_min(type))
                    memcpy(panel + g * half_bytes + 4 * (PANEL + i), &m[g], sizeof(float));
            }
        }
        for (int i = 0; i < PANEL; i += 8) {
            const uint8_t *p[8];
            for (int r = 0; r < 8; r++)
                p[r] = (const uint8_t *)block + (i + r < rows ? i + r : rows - 1) * stride;
            UNROLL for (int j = 0; j < units; j++) {
                __m256i v[8];
                char *to = panel + j * step_bytes(type) + head + 4 * i;
                UNROLL for (int r = 0; r < 8; r++)
                    v[r] = lanes(type, p[r], j);
                transpose(v);
                UNROLL for (int g = 0; g < 8; g++)
                    _mm256_storeu_si256((__m256i *)(to + (g < 8 / halves ? 0 : head) + g * 4 * PANEL), v[g]);
            }
        }
    }
}

INLINE ivec dot4_wide(const int type, ivec start, ivec levels, ivec y) {
#if WIDE
    (void)type;
    return _mm512_dpbusd_epi32(start, levels, y);
#else
    return dot4(type, start, levels, y);
#endif
}

/* `type` stands for all types with as many scales, with or without minima. */
INLINE void tile_q(const int type, const int N, const char *panel, int64_t steps, const gs_cell_q *y, int64_t width,
                   vec acc[2][TILE_Q]) {
    const int halves = halves_of(type), groups = 8 / halves;
    for (int64_t step = 0; step < steps; step++, y += width) {
        UNROLL for (int h = 0; h < halves; h++) {
            vec scale[2] = {VEC_LOAD((const float *)panel), VEC_LOAD((const float *)panel + ROWS)};
            vec low[2];
            ivec dot[2][TILE_Q];
            panel += 4 * PANEL;
            if (has_min(type)) {
                low[0] = VEC_LOAD((const float *)panel);
                low[1] = VEC_LOAD((const float *)panel + ROWS);
                panel += 4 * PANEL;
            }
            UNROLL for (int c = 0; c < N; c++)
                dot[0][c] = dot[1][c] = has_offset(type)
                    ? IVEC_SET1(halves == 1 ? y[c].both : h ? y[c].high : y[c].low) : IVEC_SET1(0);
            UNROLL for (int g = 0; g < groups; g++, panel += 4 * PANEL) {
                ivec w0 = IVEC_LOAD(panel), w1 = IVEC_LOAD(panel + 4 * ROWS);
                UNROLL for (int c = 0; c < N; c++) {
                    ivec four = IVEC_SET1((int)gs_load_u32(y[c].q + 4 * (h * groups + g)));
                    dot[0][c] = dot4_wide(type, dot[0][c], w0, four);
                    dot[1][c] = dot4_wide(type, dot[1][c], w1, four);
                }
            }
            UNROLL for (int c = 0; c < N; c++) {
                vec d = VEC_SET1(y[c].d), sum;
                acc[0][c] = VEC_FMA(VEC_OF_INT(dot[0][c]), VEC_MUL(scale[0], d), acc[0][c]);
                acc[1][c] = VEC_FMA(VEC_OF_INT(dot[1][c]), VEC_MUL(scale[1], d), acc[1][c]);
                if (has_min(type)) {
                    sum = VEC_SET1(halves == 1 ? y[c].sum_both : h ? y[c].sum_high : y[c].sum_low);
                    acc[0][c] = VEC_FMA(low[0], sum, acc[0][c]);
                    acc[1][c] = VEC_FMA(low[1], sum, acc[1][c]);
                }
            }
        }
    }
}

/* Rows 0 .. rows - 1 of a column, from a pair of vectors and back. */
INLINE vec load_rows(const float *from, int64_t rows, int at) {
#if WIDE
    return _mm512_maskz_loadu_ps(rows >= at + 16 ? 0xffff : rows > at ? (__mmask16)((1u << (rows - at)) - 1) : 0, from + at);
#else
    float room[8] = {0};
    if (rows >= at + 8)
        return VEC_LOAD(from + at);
    if (rows > at)
        memcpy(room, from + at, (size_t)(rows - at) * sizeof(float));
    return VEC_LOAD(room);
#endif
}

INLINE void store_rows(float *to, int64_t rows, int at, vec v) {
#if WIDE
    _mm512_mask_storeu_ps(to + at, rows >= at + 16 ? 0xffff : rows > at ? (__mmask16)((1u << (rows - at)) - 1) : 0, v);
#else
    float room[8];
    if (rows >= at + 8) {
        VEC_STORE(to + at, v);
    } else if (rows > at) {
        VEC_STORE(room, v);
        memcpy(to + at, room, (size_t)(rows - at) * sizeof(float));
    }
#endif
}

INLINE void run_tile_q(const int type, const int N, const char *panel, int64_t steps, const gs_cell_q *y, int64_t width,
                       float *const out[], int64_t rows, int more) {
    vec acc[2][TILE_Q];
    UNROLL for (int c = 0; c < N; c++) {
        acc[0][c] = more ? load_rows(out[c], rows, 0) : VEC_ZERO;
        acc[1][c] = more ? load_rows(out[c], rows, ROWS) : VEC_ZERO;
    }
    tile_q(type, N, panel, steps, y, width, acc);
    UNROLL for (int c = 0; c < N; c++) {
        store_rows(out[c], rows, 0, acc[0][c]);
        store_rows(out[c], rows, ROWS, acc[1][c]);
    }
}

#if WIDE
#define TILES_Q(type) \
    case 6: run_tile_q(type, 6, panel, steps, y, width, out, rows, more); return; \
    case 5: run_tile_q(type, 5, panel, steps, y, width, out, rows, more); return; \
    case 4: run_tile_q(type, 4, panel, steps, y, width, out, rows, more); return; \
    case 3: run_tile_q(type, 3, panel, steps, y, width, out, rows, more); return; \
    case 2: run_tile_q(type, 2, panel, steps, y, width, out, rows, more); return;
#else
#define TILES_Q(type) case 2: run_tile_q(type, 2, panel, steps, y, width, out, rows, more); return;
#endif
#define TILE(name, type) \
    static void name(int64_t n, const char *panel, int64_t steps, const gs_cell_q *y, int64_t width, \
                     float *const out[], int64_t rows, int more) { \
        switch (n) { \
        TILES_Q(type) \
        default: run_tile_q(type, 1, panel, steps, y, width, out, rows, more); \
        } \
    }

TILE(tiles_plain, GS_TYPE_Q4_0)
TILE(tiles_min, GS_TYPE_Q4_K)
TILE(tiles_halves, GS_TYPE_Q6_K)
TILE(tiles_halves_min, GS_TYPE_Q2_K)
#if !WIDE
TILE(tiles_signed, GS_TYPE_Q8_0)
#else
#define tiles_signed tiles_plain
#endif

typedef void (*tiles_fn)(int64_t, const char *, int64_t, const gs_cell_q *, int64_t, float *const[], int64_t, int);

INLINE void many_q(const int type, const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1,
                   int64_t column0, int64_t column1, char *scratch) {
    const tiles_fn tiles = is_signed(type) ? tiles_signed
        : halves_of(type) == 2 ? (has_min(type) ? tiles_halves_min : tiles_halves)
        : has_min(type) ? tiles_min : tiles_plain;
    int64_t stride = of->node->src[0]->layout.nb[1], columns = gs_columns_of(of, shared, group);
    const char *a = gs_weights_of(of, shared, group);
    for (int64_t row = row0; row < row1; row += PANEL) {
        int64_t rows = row1 - row < PANEL ? row1 - row : PANEL;
        for (int64_t step = 0; step < of->steps; step += DEPTH_Q) {
            int64_t steps = of->steps - step < DEPTH_Q ? of->steps - step : DEPTH_Q;
            pack_q(type, a + row * stride, stride, rows, step, steps, scratch);
            for (int64_t column = column0; column < column1; column += GS_TILE_Q) {
                int64_t tile = column / GS_TILE_Q, width = gs_width_of(of, columns, tile);
                const gs_cell_q *y = (const gs_cell_q *)gs_tile_of(of, shared, group, tile) + step * width;
                float *out[GS_TILE_Q];
                for (int64_t c = 0; c < width; c++)
                    out[c] = gs_result_at(of, shared, group, column + c) + row;
                for (int64_t c = 0; c < width; c += TILE_Q)
                    tiles(width - c < TILE_Q ? width - c : TILE_Q, scratch, steps, y + c, width, out + c, rows, step > 0);
            }
        }
    }
}

#define MANY_Q(name, type) \
    static void name(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1, \
                     int64_t column0, int64_t column1, char *scratch) { \
        many_q(type, of, shared, group, row0, row1, column0, column1, scratch); \
    }

MANY_Q(many_q4_0, GS_TYPE_Q4_0)
MANY_Q(many_q4_1, GS_TYPE_Q4_1)
MANY_Q(many_q5_0, GS_TYPE_Q5_0)
MANY_Q(many_q5_1, GS_TYPE_Q5_1)
MANY_Q(many_q8_0, GS_TYPE_Q8_0)
MANY_Q(many_q2_k, GS_TYPE_Q2_K)
MANY_Q(many_q3_k, GS_TYPE_Q3_K)
MANY_Q(many_q4_k, GS_TYPE_Q4_K)
MANY_Q(many_q5_k, GS_TYPE_Q5_K)
MANY_Q(many_q6_k, GS_TYPE_Q6_K)
MANY_Q(many_iq4_nl, GS_TYPE_IQ4_NL)
MANY_Q(many_iq4_xs, GS_TYPE_IQ4_XS)
MANY_Q(many_mxfp4, GS_TYPE_MXFP4)

/* A step of a packed panel of f32: 16 places of k, all rows of a place together; beyond k stand zeros. */
INLINE void pack_f(const int type, const char *a, int64_t stride, int64_t rows, int64_t from, int64_t k, float *panel) {
    const int element = type == GS_TYPE_F32 ? 4 : 2;
    for (int64_t at = 0; at < k; at += 8, panel += 8 * PANEL)
        for (int i = 0; i < PANEL; i += 8) {
            __m256i v[8];
            for (int r = 0; r < 8; r++) {
                const char *p = a + (i + r < rows ? i + r : rows - 1) * stride + (from + at) * element;
                char room[8 * sizeof(float)] = {0};
                if ((from + at) * element % 64 == 0) /* the next panel, a line at a time */
                    _mm_prefetch(p + PANEL * stride, _MM_HINT_T1);
                if (k - at < 8) {
                    memcpy(room, p, (size_t)(k - at) * element);
                    p = room;
                }
                v[r] = _mm256_castps_si256(load_f(type, p));
            }
            transpose(v);
            for (int g = 0; g < 8; g++)
                _mm256_storeu_si256((__m256i *)(panel + g * PANEL + i), v[g]);
        }
}

INLINE void run_tile_f(const int N, const float *panel, int64_t k, const float *y, int64_t width, float *const out[],
                       int64_t rows, int more) {
    vec acc[2][TILE_F];
    UNROLL for (int c = 0; c < N; c++) {
        acc[0][c] = more ? load_rows(out[c], rows, 0) : VEC_ZERO;
        acc[1][c] = more ? load_rows(out[c], rows, ROWS) : VEC_ZERO;
    }
    for (; k > 0; k -= 16, y += 16 * width)
        for (int64_t i = 0; i < (k < 16 ? k : 16); i++, panel += PANEL) {
            vec w0 = VEC_LOAD(panel), w1 = VEC_LOAD(panel + ROWS);
            UNROLL for (int c = 0; c < N; c++) {
                vec one = VEC_SET1(y[16 * c + i]);
                acc[0][c] = VEC_FMA(w0, one, acc[0][c]);
                acc[1][c] = VEC_FMA(w1, one, acc[1][c]);
            }
        }
    UNROLL for (int c = 0; c < N; c++) {
        store_rows(out[c], rows, 0, acc[0][c]);
        store_rows(out[c], rows, ROWS, acc[1][c]);
    }
}

#define TILE_F_OF(n) case n: run_tile_f(n, panel, k, y, width, out, rows, more); return;

static void tiles_f(int64_t n, const float *panel, int64_t k, const float *y, int64_t width, float *const out[],
                    int64_t rows, int more) {
    switch (n) {
#if WIDE
    TILE_F_OF(12) TILE_F_OF(11) TILE_F_OF(10) TILE_F_OF(9) TILE_F_OF(8) TILE_F_OF(7)
#endif
    TILE_F_OF(6) TILE_F_OF(5) TILE_F_OF(4) TILE_F_OF(3) TILE_F_OF(2)
    default: run_tile_f(1, panel, k, y, width, out, rows, more);
    }
}

INLINE void many_f(const int type, const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1,
                   int64_t column0, int64_t column1, char *scratch) {
    int64_t stride = of->node->src[0]->layout.nb[1], columns = gs_columns_of(of, shared, group);
    const char *a = gs_weights_of(of, shared, group);
    float *panel = (float *)scratch;
    for (int64_t row = row0; row < row1; row += PANEL) {
        int64_t rows = row1 - row < PANEL ? row1 - row : PANEL;
        for (int64_t step = 0; step < of->steps; step += DEPTH_F) {
            int64_t k = of->k - 16 * step < 16 * DEPTH_F ? of->k - 16 * step : 16 * DEPTH_F;
            pack_f(type, a + row * stride, stride, rows, 16 * step, k, panel);
            for (int64_t column = column0; column < column1; column += GS_TILE_F) {
                int64_t tile = column / GS_TILE_F, width = gs_width_of(of, columns, tile);
                const float *y = (const float *)gs_tile_of(of, shared, group, tile) + 16 * step * width;
                float *out[GS_TILE_F];
                for (int64_t c = 0; c < width; c++)
                    out[c] = gs_result_at(of, shared, group, column + c) + row;
                for (int64_t c = 0; c < width; c += TILE_F)
                    tiles_f(width - c < TILE_F ? width - c : TILE_F, panel, k, y + 16 * c, width, out + c, rows, step > 0);
            }
        }
    }
}

static void many(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1, int64_t column0,
                 int64_t column1, char *scratch) {
#define RUN(kernel) kernel(of, shared, group, row0, row1, column0, column1, scratch)
    switch (of->type) {
    case GS_TYPE_F32: many_f(GS_TYPE_F32, of, shared, group, row0, row1, column0, column1, scratch); return;
    case GS_TYPE_F16: many_f(GS_TYPE_F16, of, shared, group, row0, row1, column0, column1, scratch); return;
    case GS_TYPE_BF16: many_f(GS_TYPE_BF16, of, shared, group, row0, row1, column0, column1, scratch); return;
    case GS_TYPE_Q4_0: RUN(many_q4_0); return;
    case GS_TYPE_Q4_1: RUN(many_q4_1); return;
    case GS_TYPE_Q5_0: RUN(many_q5_0); return;
    case GS_TYPE_Q5_1: RUN(many_q5_1); return;
    case GS_TYPE_Q8_0: RUN(many_q8_0); return;
    case GS_TYPE_Q2_K: RUN(many_q2_k); return;
    case GS_TYPE_Q3_K: RUN(many_q3_k); return;
    case GS_TYPE_Q4_K: RUN(many_q4_k); return;
    case GS_TYPE_Q5_K: RUN(many_q5_k); return;
    case GS_TYPE_Q6_K: RUN(many_q6_k); return;
    case GS_TYPE_IQ4_NL: RUN(many_iq4_nl); return;
    case GS_TYPE_IQ4_XS: RUN(many_iq4_xs); return;
    default: RUN(many_mxfp4);
    }
#undef RUN
}

static int64_t scratch_of(const gs_product *of) {
    if (of->kind == NULL) {
        int64_t steps = of->steps < DEPTH_F ? of->steps : DEPTH_F;
        return steps * 16 * PANEL * (int64_t)sizeof(float);
    }
    int64_t steps = of->steps < DEPTH_Q ? of->steps : DEPTH_Q;
    return steps * PANEL * (32 + 4 * (32 / of->kind->group) * (1 + of->kind->has_min));
}
