/* product_loops.h -- matrix products of one instruction set: rows and panels of weights times columns.
 *
 * Included by matmul_x86.h and matmul_neon.h, which define the vectors and decode blocks to them.  FLOATS, where it is
 * defined: the kernels of an instruction set with the same vectors, whose products of rows of floats are used.
 */
#define AHEAD 8192             /* how many bytes before their use weights are prefetched to L2                      */
#define SOON 2048              /* and from there to L1, which waits for fewer lines at once                         */
#define PREFETCH(at) __builtin_prefetch(at, 0, 3)
#define PREFETCH_LATER(at) __builtin_prefetch(at, 0, 2)
#define PREFETCH_STREAM(at) (PREFETCH_LATER((at) + AHEAD), PREFETCH((at) + SOON))
#define PANEL (2 * ROWS)
#define DEPTH_Q 128            /* steps of k that a packed panel of quantised rows holds: 4096 elements */
#define DEPTH_F 64             /* steps of k that a panel of float rows holds: 1024 elements            */

/* Whether loops that multiply one row of weights after another with N columns prefetch them.  Loops that are much
 * faster than memory leave it to a processor that reads ahead; slower ones are faster with prefetches everywhere. */
INLINE int must_prefetch(const gs_product *of, const int type, const int N) {
    const int is_fast = type == GS_TYPE_F32 ? N < 4
                        : N == 1 && (type == GS_TYPE_F16 || type == GS_TYPE_BF16 || type == GS_TYPE_Q8_0);
    return !is_fast || !of->reads_ahead;
}

/* Whether kernels add an offset to a type's levels. */
INLINE int has_offset(const int type) {
    return !has_min(type) && !is_signed(type);
}

static int32_t offset_of(const gs_block_kind *kind) {
    return is_signed(kind->type) ? 0 : kind->offset;
}

static int32_t strip_order_of(const gs_block_kind *kind, int64_t steps) {
    return takes_strips(kind->type, steps) ? strip_order(kind->type) : 0;
}

#include "few_q.h"
#if STRIP_COLUMNS == 1
#if JOINS_ROWS
#include "joined_q.h"
#endif
#include "side_q.h"
#else
#define FEW_Q(TYPE, type) \
    static void few_##type(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1) { \
        switch (gs_columns_of(of, shared, group)) { \
        case 1: few_q(GS_TYPE_##TYPE, 1, of, shared, group, row0, row1); return; \
        case 2: few_q(GS_TYPE_##TYPE, 2, of, shared, group, row0, row1); return; \
        case 3: few_q(GS_TYPE_##TYPE, 3, of, shared, group, row0, row1); return; \
        default: few_q(GS_TYPE_##TYPE, 4, of, shared, group, row0, row1); \
        } \
    }

GS_QUANTISED(FEW_Q)

static int32_t few_columns(const gs_block_kind *kind) {
    (void)kind;
    return GS_FEW_Q;
}
#endif
#include "many_q.h"
#ifndef FLOATS
#include "few_f.h"
#include "many_f.h"
#endif
#if STRIP_COLUMNS == 1
#include "bands_q.h"
#endif

static void few(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1, char *scratch) {
    switch (of->type) {
#ifdef FLOATS
    case GS_TYPE_F32: case GS_TYPE_F16: case GS_TYPE_BF16: FLOATS.few(of, shared, group, row0, row1, scratch); return;
#else
    case GS_TYPE_F32: few_f32(of, shared, group, row0, row1); return;
    case GS_TYPE_F16: few_f16(of, shared, group, row0, row1); return;
    case GS_TYPE_BF16: few_bf16(of, shared, group, row0, row1); return;
#endif
#define RUN(TYPE, type) case GS_TYPE_##TYPE: few_##type(of, shared, group, row0, row1); return;
    GS_QUANTISED(RUN)
#undef RUN
    }
}

static void many(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1, int64_t column0,
                 int64_t column1, char *scratch) {
    switch (of->type) {
#ifdef FLOATS
    case GS_TYPE_F32: case GS_TYPE_F16: case GS_TYPE_BF16:
        FLOATS.many(of, shared, group, row0, row1, column0, column1, scratch);
        return;
#else
#define RUN(TYPE) \
    case GS_TYPE_##TYPE: many_f(GS_TYPE_##TYPE, of, shared, group, row0, row1, column0, column1, scratch); return;
    RUN(F32) RUN(F16) RUN(BF16)
#undef RUN
#endif
#define RUN(TYPE, type) \
    case GS_TYPE_##TYPE: many_##type(of, shared, group, row0, row1, column0, column1, scratch); return;
    GS_QUANTISED(RUN)
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
