/* matmul_x86.h -- matrix products for x86: one source, compiled for AVX2, for AVX-VNNI, and for AVX-512 with VNNI.
 *
 * Included once by a file that has chosen a target and defined WIDE (1: vectors of 512 bits, 0: of 256) and VNNI (1:
 * with the dot product of bytes).  Callers pass `type` as a constant, and all is inlined: the compiler makes one
 * function for each type and number of columns, without branches on these.
 *
 * A level is the integer q of a quantised weight (blocks.h).  The instructions that multiply bytes want one side
 * unsigned, so levels become unsigned bytes, q + offset.  This adds offset times the sum of the activations to a
 * product.  To take it off again, the sum of products begins at minus that number (gs_cell_q), or the number is treated
 * as a minimum (gs_strip).  Without VNNI, types that would need an offset of 128 stay signed, because sums of two
 * products would not fit 16 bits: their levels are replaced by the absolute values, and each activation gets the sign
 * of its level (dot4).
 */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "floats.h"
#include "product.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
/* Keeps a vector in a register: compilers would read it from memory for each use, and be limited by these reads. */
#define VEC_KEEP(v) __asm__("" : "+v"(v))

#include "block_traits.h"
#include "x86_decode.h"
#include "x86_vector.h"
#include "x86_few_q.h"

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
        if (bits >= 0x7f800000u) /* an element is inf or NaN */
            cell->d = cell->sum_low = cell->sum_high = cell->sum_both = NAN;
        return;
    }
    float largest = gs_f32_of_bits(bits);
    __m256 inverse = _mm256_set1_ps(127.0f / largest);
    for (int i = 0; i < 4; i++)
        q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    /* The pack instructions work on each 128-bit half alone: the permutation brings groups of four bytes into order. */
    __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(bytes(1), packed), _mm256_set1_epi16(1));
    int low = sum_of(_mm256_castsi256_si128(sums)), high = sum_of(_mm256_extracti128_si256(sums, 1));
    float d = largest / 127.0f;
    _mm256_storeu_si256((__m256i *)cell->q, packed);
    cell->low = -offset * low;
    cell->high = -offset * high;
    cell->both = offset != 0 ? -offset * (low + high) : (int32_t)((uint32_t)high << 16 | (low & 0xffff));
    cell->d = d;
    cell->sum_low = d * (float)low;
    cell->sum_high = d * (float)high;
    cell->sum_both = d * (float)(low + high);
    cell->zero = 0;
}

#include "product_loops.h"
