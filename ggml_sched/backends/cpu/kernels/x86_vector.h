/* x86_vector.h -- names for the widest vectors of a target, and functions of them, for product_loops.h.
 *
 * Included by matmul_x86.h.
 */
#include "x86_totals.h"

INLINE float total(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* A sum.  Sums are added in the order of the source: compilers would regroup them, and keep all addends in memory. */
INLINE __m256i in_order(__m256i sum) {
    __asm__("" : "+x"(sum));
    return sum;
}

/* In each 32-bit lane: start + the sum of the four products levels * y of the lane's bytes. */
INLINE __m256i dot4(const int type, __m256i start, __m256i levels, __m256i y) {
#if WIDE
    (void)type;
    return _mm256_dpbusd_epi32(start, levels, y);
#elif VNNI
    (void)type;
    return _mm256_dpbusd_avx_epi32(start, levels, y);
#else
    if (is_signed(type)) {
        y = _mm256_sign_epi8(y, levels);
        levels = _mm256_abs_epi8(levels);
    }
    __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(levels, y), _mm256_set1_epi16(1));
    return in_order(_mm256_add_epi32(start, sums));
#endif
}

#if !VNNI
#define SUMS_16 1
/* In each 16-bit lane: the sum of the two products levels * y of the lane's bytes; levels are unsigned. */
INLINE __m256i dot2(__m256i levels, __m256i y) {
    return _mm256_maddubs_epi16(levels, y);
}

INLINE __m256i add_16(__m256i a, __m256i b) {
    return in_order(_mm256_add_epi16(a, b));
}

/* In each 32-bit lane: start + the two 16-bit lanes of sums. */
INLINE __m256i add_pairs(__m256i start, __m256i sums) {
    return _mm256_add_epi32(start, _mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
}

/* How many results of dot2 can be added in 16 bits, of this type's levels and those of types that pack alike. */
INLINE int in_16_bits(const int type) {
    return is_signed(type) ? 1 : type == GS_TYPE_Q6_K ? 2 : 4;
}
#else
#define SUMS_16 0
#endif

/* 8 weights of a float type as f32. */
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
#define HALVED(v) _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1))
#define VEC_TOTAL(v) total(HALVED(v))
#define VEC_TOTAL_WITH(v, low) total(_mm256_add_ps(HALVED(v), low))
#define VEC_WEIGHTS load_wide
#define FOUR_TOTALS gs_totals_512
#else
typedef __m256 vec;
#define STEP_VECS 2
#define VEC_ZERO _mm256_setzero_ps()
#define VEC_FMA _mm256_fmadd_ps
#define VEC_ADD _mm256_add_ps
#define VEC_LOAD _mm256_loadu_ps
#define VEC_TOTAL total
#define VEC_TOTAL_WITH(v, low) total(_mm256_add_ps(v, low))
#define VEC_WEIGHTS load_f
#define FOUR_TOTALS gs_totals_256
#endif
#define LANES (16 / STEP_VECS)
#define STRIP_COLUMNS 1
#define FOLDS VNNI             /* without VNNI sums of folded levels do not fit 16 bits */

#if WIDE
#define ROWS 16
typedef __m512i ivec;
#define IVEC_LOAD(p) _mm512_loadu_si512(p)
#define IVEC_SET1(x) _mm512_set1_epi32(x)
#define VEC_SET1(x) _mm512_set1_ps(x)
#define VEC_STORE _mm512_storeu_ps
#define VEC_MUL _mm512_mul_ps
#define VEC_OF_INT _mm512_cvtepi32_ps
#define VEC_FNMA _mm512_fnmadd_ps
#define IVEC_ZERO _mm512_setzero_si512()
#define IVEC_AND _mm512_and_si512
#define IVEC_XOR _mm512_xor_si512
#define IVEC_OR_AND(a, b, c) _mm512_ternarylogic_epi64(a, b, c, 0xf8)   /* a | (b & c) */
#define IVEC_LEFT _mm512_slli_epi16
#define IVEC_RIGHT _mm512_srli_epi16
#define IVEC_SHUFFLE _mm512_shuffle_epi8
#define IVEC_SET1_8(x) _mm512_set1_epi8((char)(x))
#define IVEC_SET1_128 _mm512_broadcast_i32x4
#define IVEC_OR _mm512_or_si512
#define IVEC_STORE(p, v) _mm512_storeu_si512(p, v)
#define IVEC_PAIRS(a, b) _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_slli_epi32(b, 16))   /* their lower words */
#define IVEC_WHERE(v, bit, of) _mm512_maskz_mov_epi8(_mm512_test_epi8_mask(v, IVEC_SET1_8(bit)), of)
#define IVEC_ADD_8 _mm512_add_epi8
#define IVEC_SUB_8 _mm512_sub_epi8
#define IVEC_ADD _mm512_add_epi32
#define IVEC_SUB _mm512_sub_epi32
#define IVEC_MUL _mm512_mullo_epi32
#define IVEC_MADD _mm512_madd_epi16
#define IVEC_LEFT_32 _mm512_slli_epi32
#define IVEC_RIGHT_32 _mm512_srli_epi32
#define IVEC_RIGHT_SIGNED _mm512_srai_epi32
#define IVEC_RIGHT_BY(v, n) _mm512_srl_epi32(v, _mm_cvtsi32_si128(n))
#define IVEC_OF_BYTES(p) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define IVEC_OF_WORDS(p) _mm512_cvtepu16_epi32(load32(p))
#define VEC_OF_HALVES(p) _mm512_cvtph_ps(load32(p))
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
#define VEC_FNMA _mm256_fnmadd_ps
#define IVEC_ZERO _mm256_setzero_si256()
#define IVEC_AND _mm256_and_si256
#define IVEC_XOR _mm256_xor_si256
#define IVEC_OR_AND(a, b, c) _mm256_or_si256(a, _mm256_and_si256(b, c))
#define IVEC_LEFT _mm256_slli_epi16
#define IVEC_RIGHT _mm256_srli_epi16
#define IVEC_SHUFFLE _mm256_shuffle_epi8
#define IVEC_SET1_8(x) _mm256_set1_epi8((char)(x))
#define IVEC_SET1_64(x) _mm256_set1_epi64x((long long)(x))
#define IVEC_SET1_128 _mm256_broadcastsi128_si256
#define IVEC_OR _mm256_or_si256
#define IVEC_STORE(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#define IVEC_PAIRS(a, b) _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa)
#define IVEC_WHERE(v, bit, of) \
    _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(v, IVEC_SET1_8(bit)), IVEC_SET1_8(bit)), of)
#define IVEC_ADD_8 _mm256_add_epi8
#define IVEC_SUB_8 _mm256_sub_epi8
#define IVEC_ADD _mm256_add_epi32
#define IVEC_SUB _mm256_sub_epi32
#define IVEC_MUL _mm256_mullo_epi32
#define IVEC_MADD _mm256_madd_epi16
#define IVEC_LEFT_32 _mm256_slli_epi32
#define IVEC_RIGHT_32 _mm256_srli_epi32
#define IVEC_RIGHT_SIGNED _mm256_srai_epi32
#define IVEC_RIGHT_BY(v, n) _mm256_srl_epi32(v, _mm_cvtsi32_si128(n))
#define IVEC_OF_BYTES(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define IVEC_OF_WORDS(p) _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define VEC_OF_HALVES(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define TILE_Q 3
#define TILE_F 6
#endif

/* In each 32-bit lane: start + the sum of the four products levels * y of the lane's bytes. */
INLINE ivec dot4_vec(const int type, ivec start, ivec levels, ivec y) {
#if WIDE
    (void)type;
    return _mm512_dpbusd_epi32(start, levels, y);
#else
    return dot4(type, start, levels, y);
#endif
}

/* Sums of minima, and of what a row has beyond its last whole strip. */
typedef __m256 vec_low;
#define LOW_ZERO _mm256_setzero_ps()
#define LOW_ADD _mm256_add_ps

/* 32 bytes: the levels of 32 elements, or 8 weights as f32. */
typedef __m256i v32;

INLINE void store32(void *to, v32 v) {
    _mm256_storeu_si256((__m256i *)to, v);
}

/* 8 weights of a float type. */
INLINE v32 eight_f(const int type, const char *at) {
    return _mm256_castps_si256(load_f(type, at));
}

/* Transposes eight rows of eight 32-bit values. */
INLINE void transpose(v32 r[8]) {
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

#if WIDE
/* A mask of the 16 rows from row `at` on: bit i is set where row at + i is below `rows`. */
INLINE __mmask16 present(int64_t rows, int at) {
    return rows >= at + 16 ? 0xffff : rows > at ? (__mmask16)((1u << (rows - at)) - 1) : 0;
}
#endif

/* load_rows and store_rows: one vector of a column of the result, of the ROWS rows from row `at` on; a panel has two
 * such vectors.  Rows from `rows` on do not exist: they are neither read nor written. */
INLINE vec load_rows(const float *from, int64_t rows, int at) {
#if WIDE
    return _mm512_maskz_loadu_ps(present(rows, at), from + at);
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
    _mm512_mask_storeu_ps(to + at, present(rows, at), v);
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
