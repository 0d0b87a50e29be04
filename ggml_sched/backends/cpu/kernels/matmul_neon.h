/* matmul_neon.h -- matrix products for aarch64: one source, compiled with and without its dot product of bytes.
 *
 * Included once by a file that has chosen a target and defined DOTPROD (1: with it, 0: without).  Callers pass `type`
 * as a constant, and all is inlined: the compiler makes one function for each type and number of columns, without
 * branches on these.
 *
 * A level is the integer q of a quantised weight (blocks.h), as a signed byte; no type needs an offset.
 */
#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include "floats.h"
#include "product.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#include "block_traits.h"
#include "neon_decode.h"
#include "neon_vector.h"
#include "neon_few_q.h"

/* -- activations -------------------------------------------------------------------------------------------------- */

static void quantize(const float *x, int32_t offset, gs_cell_q *cell) {
    float32x4_t v[8];
    int32x4_t q[8];
    uint32x4_t most = vdupq_n_u32(0), magnitude = vdupq_n_u32(0x7fffffff);
    (void)offset;
    memset(cell, 0, sizeof(*cell));
    for (int i = 0; i < 8; i++) {
        v[i] = vld1q_f32(x + 4 * i);
        most = vmaxq_u32(most, vandq_u32(vreinterpretq_u32_f32(v[i]), magnitude));
    }
    uint32_t bits = vmaxvq_u32(most);
    if (bits >= 0x7f800000u) { /* an element is inf or NaN */
        cell->d = cell->sum_low = cell->sum_high = cell->sum_both = NAN;
        return;
    }
    if (bits < GS_LEAST_BITS)
        return;
    float largest = gs_f32_of_bits(bits), d = largest / 127.0f;
    float32x4_t inverse = vdupq_n_f32(127.0f / largest);
    for (int i = 0; i < 8; i++)
        q[i] = vcvtnq_s32_f32(vmulq_f32(v[i], inverse));
    int sums[2];
    for (int h = 0; h < 2; h++) {
        int16x8_t a = vcombine_s16(vmovn_s32(q[4 * h]), vmovn_s32(q[4 * h + 1]));
        int16x8_t b = vcombine_s16(vmovn_s32(q[4 * h + 2]), vmovn_s32(q[4 * h + 3]));
        vst1q_s8(cell->q + 16 * h, vcombine_s8(vmovn_s16(a), vmovn_s16(b)));
        sums[h] = vaddvq_s16(vaddq_s16(a, b));
    }
    cell->d = d;
    cell->sum_low = d * (float)sums[0];
    cell->sum_high = d * (float)sums[1];
    cell->sum_both = d * (float)(sums[0] + sums[1]);
}

#include "product_loops.h"
