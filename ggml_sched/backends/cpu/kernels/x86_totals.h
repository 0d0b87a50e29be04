/* x86_totals.h -- the totals of four vectors at once, with a third of the instructions of four totals.
 *
 * Included by vector.h and x86_vector.h.  The floats of a vector are added as one total adds them, half to half, so
 * that the bits are the same.
 */
#ifndef GGML_SCHED_KERNELS_X86_TOTALS_H
#define GGML_SCHED_KERNELS_X86_TOTALS_H

#include <immintrin.h>

/* For pragmas that choose a target Clang, unlike GCC, does not define __AVX512F__. */
#if (defined(GS_LEVEL) && GS_LEVEL == 2) || (defined(WIDE) && WIDE)
static inline __attribute__((always_inline, unused)) __m512 gs_halves_512(__m512 x, __m512 y, const int halves) {
    if (halves)     /* of 512 bits: those of x, then those of y */
        return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}

static inline __attribute__((always_inline, unused)) void gs_totals_512(__m512 a, __m512 b, __m512 c, __m512 d,
                                                                        float *to) {
    __m512 v = gs_halves_512(gs_halves_512(a, b, 1), gs_halves_512(c, d, 1), 0);    /* four floats of each vector */
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4e));
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xb1));
    v = _mm512_permutexvar_ps(_mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12)), v);
    _mm_storeu_ps(to, _mm512_castps512_ps128(v));
}
#endif

static inline __attribute__((always_inline, unused)) __m128 gs_halves_256(__m256 x) {
    return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}

static inline __attribute__((always_inline, unused)) void gs_totals_256(__m256 a, __m256 b, __m256 c, __m256 d,
                                                                        float *to) {
    __m128 e = gs_halves_256(a), f = gs_halves_256(b), g = gs_halves_256(c), h = gs_halves_256(d);
    e = _mm_add_ps(_mm_movelh_ps(e, f), _mm_movehl_ps(f, e));
    g = _mm_add_ps(_mm_movelh_ps(g, h), _mm_movehl_ps(h, g));
    _mm_storeu_ps(to, _mm_add_ps(_mm_shuffle_ps(e, g, 0x88), _mm_shuffle_ps(e, g, 0xdd)));
}

#endif
