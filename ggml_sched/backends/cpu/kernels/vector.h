/* vector.h -- vectors of f32 of the width of the instruction set being compiled for, and functions of them.
 *
 * Included once for each instruction set, with GS_LEVEL set to its value of enum gs_isa.  The vector types of GCC and
 * Clang let the same source become SSE2 or NEON, AVX2, and AVX-512.  Errors are at most 2 ulp unless a function says
 * otherwise.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if GS_LEVEL > 0
#include <immintrin.h>
#include "x86_totals.h"
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if GS_LEVEL == 2
#define V 16
#elif GS_LEVEL == 1
#define V 8
#else
#define V 4
#endif

typedef float vf __attribute__((vector_size(V * 4), may_alias));
typedef int32_t vi __attribute__((vector_size(V * 4), may_alias));
typedef uint32_t vu __attribute__((vector_size(V * 4), may_alias));
typedef uint16_t vh __attribute__((vector_size(V * 2), may_alias));
typedef float vf_any __attribute__((vector_size(V * 4), aligned(4), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(V * 2), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline, unused))
#define HELPER static __attribute__((unused))

INLINE vf vload(const float *p) { return *(const vf_any *)p; }
INLINE void vstore(float *p, vf x) { *(vf_any *)p = x; }
INLINE vf vset(float x) { return x - (vf){0}; } /* minus, because -0 + 0 would be 0 */

/* a * b + c; rounded once where the instruction set has a fused multiply-add, else twice. */
INLINE vf vfma(vf a, vf b, vf c) {
#if GS_LEVEL == 2
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif GS_LEVEL == 1
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vf vpick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* The larger of a and b; b where either is NaN. */
INLINE vf vmax(vf a, vf b) {
#if GS_LEVEL == 2
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif GS_LEVEL == 1
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vpick(a > b, a, b);
#endif
}

/* The smaller of a and b; b where either is NaN. */
INLINE vf vmin(vf a, vf b) {
#if GS_LEVEL == 2
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif GS_LEVEL == 1
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return vpick(a < b, a, b);
#endif
}

INLINE float vsum(vf x) {
#if GS_LEVEL == 2
    return _mm512_reduce_add_ps((__m512)x);
#else
    float t[V];
    vstore(t, x);
    for (int w = V / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++)
            t[i] += t[i + w];
    return t[0];
#endif
}

/* vsum of four vectors, to to[0 .. 3]: the same bits. */
INLINE void vsums(vf a, vf b, vf c, vf d, float *to) {
#if GS_LEVEL == 1
    gs_totals_256((__m256)a, (__m256)b, (__m256)c, (__m256)d, to);
#elif GS_LEVEL == 2
    gs_totals_512((__m512)a, (__m512)b, (__m512)c, (__m512)d, to);
#else
    to[0] = vsum(a);
    to[1] = vsum(b);
    to[2] = vsum(c);
    to[3] = vsum(d);
#endif
}

/* Writes the transpose of 4 x 4 floats; `apart` and `to_apart`: floats from one row to the next. */
INLINE void transpose_4(const float *from, int64_t apart, float *to, int64_t to_apart) {
#if GS_LEVEL > 0
    __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + apart);
    __m128 c = _mm_loadu_ps(from + 2 * apart), d = _mm_loadu_ps(from + 3 * apart);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to, a);
    _mm_storeu_ps(to + to_apart, b);
    _mm_storeu_ps(to + 2 * to_apart, c);
    _mm_storeu_ps(to + 3 * to_apart, d);
#else
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 4; k++)
            to[k * to_apart + i] = from[i * apart + k];
#endif
}

INLINE float vlargest(vf x) {
    float t[V], top;
    vstore(t, x);
    top = t[0];
    for (int i = 1; i < V; i++)
        top = t[i] > top ? t[i] : top;
    return top;
}

INLINE vf vabs(vf x) { return (vf)((vi)x & 0x7fffffff); }
INLINE vf vsign_of(vf sign, vf x) { return (vf)(((vi)x & 0x7fffffff) | ((vi)sign & (int32_t)0x80000000)); }

/* -- f16 and bf16 ---------------------------------------------------------------------------------- */

INLINE vf vfrom_f16(const uint16_t *p) {
#if GS_LEVEL == 2
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif GS_LEVEL == 1
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    vu h = __builtin_convertvector(*(const vh_any *)p, vu);
    vu sign = (h & 0x8000) << 16, rest = h & 0x7fff;
    /* Multiplying by 2^112 corrects the exponent, whose bias is 15 in f16, 127 in f32; exact, also for subnormals. */
    vf value = (vf)(rest << 13) * vset(gs_f32_of_bits(0x77800000));
    vu special = (vu)(rest >= 0x7c00);
    vu wide = (special & (rest << 13 | 0x7f800000)) | (~special & (vu)value);
    return (vf)(sign | wide | (special & (vu)(rest > 0x7c00) & 0x400000));
#endif
}

INLINE void vto_f16(uint16_t *p, vf x) {
#if GS_LEVEL == 2
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif GS_LEVEL == 1
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
#else
    vu bits = (vu)x, sign = bits & 0x80000000u, rest = bits & 0x7fffffff;
    /* `small`: the bits of an f16 subnormal, which are, rounded, the low bits of value + 0.5.  `normal`: the bits of
     * any other f16, the mantissa rounded to nearest, ties to even. */
    vu small = (vu)((vf)rest + vset(0.5f)) - 0x3f000000;
    vu normal = (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
    vu is_small = (vu)((vi)rest < (113 << 23)), is_big = (vu)((vi)rest >= 0x477ff000);
    vu is_nan = (vu)((vi)rest > 0x7f800000);
    vu h = (is_small & small) | (~is_small & normal);
    h = (is_big & 0x7c00) | (~is_big & h);
    h = (is_nan & (0x7e00 | (rest >> 13 & 0x3ff))) | (~is_nan & h);
    *(vh_any *)p = __builtin_convertvector(h | sign >> 16, vh);
#endif
}

INLINE vf vfrom_bf16(const uint16_t *p) {
    return (vf)(__builtin_convertvector(*(const vh_any *)p, vu) << 16);
}

INLINE void vto_bf16(uint16_t *p, vf x) {
    vu bits = (vu)x, high = bits >> 16;
    vu rounded = (bits + (high & 1) + 0x7fff) >> 16;
    vu is_nan = (vu)((vi)(bits & 0x7fffffff) > 0x7f800000);
    *(vh_any *)p = __builtin_convertvector((is_nan & (high | 64)) | (~is_nan & rounded), vh);
}

/* -- functions ------------------------------------------------------------------------------------- */

/* 2^n, for n in -126 .. 127. */
INLINE vf vpow2(vi n) { return (vf)((n + 127) << 23); }

/* p * 2^n, rounded once, for p in 0.5 .. 2 and n in -160 .. 160; `whole` is n as f32. */
INLINE vf vscaled(vf p, vi n, vf whole) {
#if GS_LEVEL == 2
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    /* In two steps: n is outside the range of vpow2 where the result is subnormal or infinite. */
    vi half = n >> 1;
    return p * vpow2(half) * vpow2(n - half);
#endif
}

INLINE vf vexp(vf x) {
    const float magic = 12582912.0f;        /* 1.5 * 2^23: adding it rounds to a whole number */
    vf inside = vmin(vset(89.0f), vmax(vset(-104.5f), x));
    vf t = inside * 1.44269504f + magic;
    vi n = (vi)t - (vi)vset(magic);
    vf whole = t - magic;
    vf r = inside - whole * 0.693359375f + whole * 2.12194440e-4f;
    vf p = vset(1.395060030e-03f);
    p = vfma(p, r, vset(8.368953708e-03f));
    p = vfma(p, r, vset(4.166620417e-02f));
    p = vfma(p, r, vset(1.666651830e-01f));
    p = vfma(p, r, vset(5.000000096e-01f));
    p = vfma(p, r * r, r) + 1.0f;
    return vscaled(p, n, whole);
}

INLINE vf vtanh(vf x) {
    vf a = vabs(x), u = x * x;
    vf p = vset(-5.717036562e-03f);
    p = vfma(p, u, vset(2.065057900e-02f));
    p = vfma(p, u, vset(-5.374349526e-02f));
    p = vfma(p, u, vset(1.333149125e-01f));
    p = vfma(p, u, vset(-3.333328392e-01f));
    vf near = vfma(p * u, a, a);
    vf far = 1.0f - 2.0f / (vexp(a + a) + 1.0f);
    return vsign_of(x, vpick(a < 0.625f, near, far));
}

/* erfc(a) for a >= 0; beyond a = 4 with a relative error of up to 1e-5. */
INLINE vf verfc_positive(vf a) {
    vf u = a * a;
    vf p = vset(7.889119527e-05f);
    p = vfma(p, u, vset(-8.020841279e-04f));
    p = vfma(p, u, vset(5.189535339e-03f));
    p = vfma(p, u, vset(-2.685444459e-02f));
    p = vfma(p, u, vset(1.128360018e-01f));
    p = vfma(p, u, vset(-3.761262714e-01f));
    p = vfma(p, u, vset(1.128379166e+00f));
    vf near = 1.0f - p * a;
    vf m = vset(1.417076002e-06f);
    m = vfma(m, a, vset(-4.226764445e-05f));
    m = vfma(m, a, vset(5.690921433e-04f));
    m = vfma(m, a, vset(-4.647247775e-03f));
    m = vfma(m, a, vset(2.614484620e-02f));
    m = vfma(m, a, vset(-1.096577471e-01f));
    m = vfma(m, a, vset(-6.322182836e-01f));
    m = vfma(m, a, vset(-1.130030862e+00f));
    m = vfma(m, a, vset(2.755413084e-04f));
    vf b = vmin(vset(10.0f), a);
    vf f = vset(1.219938917e-06f);
    f = vfma(f, b, vset(-6.206336545e-05f));
    f = vfma(f, b, vset(1.359834231e-03f));
    f = vfma(f, b, vset(-1.689046959e-02f));
    f = vfma(f, b, vset(-8.665186511e-01f));
    f = vfma(f, b, vset(-7.695730711e-01f));
    f = vfma(f, b, vset(-2.537637034e-01f));
    vf far = vexp(vpick(a < 4.0f, m, f));
    return vpick(a < 1.0f, near, far);
}

/* Natural logarithm of 1 + x, x >= 0. */
INLINE vf vlog1p_positive(vf x) {
    vf u = 1.0f + x;
    vi bits = (vi)u - 0x3f3504f3;           /* the bits of sqrt(1/2) */
    vi e = bits >> 23;
    vf m = (vf)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
    /* Corrects the logarithm for the part of x that is lost when 1 + x is rounded to u; 0 where u is so large that this
     * part does not matter. */
    vf lost = vpick(u < 16777216.0f, (x - (u - 1.0f)) / u, vset(0.0f));
    vf p = vset(6.921794964e-02f);
    p = vfma(p, m, vset(-1.180588048e-01f));
    p = vfma(p, m, vset(1.187870595e-01f));
    p = vfma(p, m, vset(-1.238219777e-01f));
    p = vfma(p, m, vset(1.421765631e-01f));
    p = vfma(p, m, vset(-1.666933196e-01f));
    p = vfma(p, m, vset(2.000227538e-01f));
    p = vfma(p, m, vset(-2.499998582e-01f));
    p = vfma(p, m, vset(3.333330978e-01f));
    vf ef = __builtin_convertvector(e, vf);
    vf y = m * m * (m * p - 0.5f) + ef * -2.12194440e-4f + lost + m + ef * 0.693359375f;
    return vpick(x <= 3.4e38f, y, x);       /* infinity and NaN are returned unchanged */
}
