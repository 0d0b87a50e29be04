/* neon_vector.h -- names for vectors of NEON, and functions of them, for product_loops.h.
 *
 * Included by matmul_neon.h.
 */
typedef float32x4_t vec;
typedef int32x4_t ivec;
#define STEP_VECS 4
#define LANES 4
#define ROWS 4
#define TILE_Q 6
#define TILE_F 6
#define VEC_ZERO vdupq_n_f32(0)
#define VEC_SET1 vdupq_n_f32
#define VEC_LOAD vld1q_f32
#define VEC_STORE vst1q_f32
#define VEC_FMA(a, b, c) vfmaq_f32(c, a, b)
#define VEC_ADD vaddq_f32
#define VEC_MUL vmulq_f32
#define VEC_TOTAL vaddvq_f32
#define VEC_KEEP(v) __asm__("" : "+w"(v))
#define VEC_OF_INT vcvtq_f32_s32
#define VEC_WEIGHTS load_f
#define IVEC_LOAD(at) vreinterpretq_s32_u8(vld1q_u8((const uint8_t *)(at)))
#define IVEC_SET1 vdupq_n_s32

#define SUMS_16 0
#define STRIP_COLUMNS GS_FEW_Q
#define FOLDS 1

/* The totals of four vectors. */
INLINE void four_totals(vec a, vec b, vec c, vec d, float *to) {
    vst1q_f32(to, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}
#define FOUR_TOTALS four_totals

/* Sums of minima, and of what a row has beyond its last whole strip. */
typedef float32x4_t vec_low;
#define LOW_ZERO VEC_ZERO
#define VEC_TOTAL_WITH(v, low) vaddvq_f32(vaddq_f32(v, low))

/* In each 32-bit lane: start + the sum of the four products levels * y of the lane's bytes.  Without the instruction
 * for it, two products are added in 16 bits: each is at most 128 * 127. */
INLINE int32x4_t dot4(int32x4_t start, int8x16_t levels, int8x16_t y) {
#if DOTPROD
    return vdotq_s32(start, levels, y);
#else
    int16x8_t low = vmull_s8(vget_low_s8(levels), vget_low_s8(y)), high = vmull_high_s8(levels, y);
    return vpadalq_s16(start, vpaddq_s16(low, high));
#endif
}

INLINE ivec dot4_vec(const int type, ivec start, ivec levels, ivec y) {
    (void)type;
    return dot4(start, vreinterpretq_s8_s32(levels), vreinterpretq_s8_s32(y));
}

/* 4 weights of a float type as f32. */
INLINE float32x4_t load_f(const int type, const char *at) {
    uint16x4_t v;
    if (type == GS_TYPE_F32)
        return vreinterpretq_f32_u8(vld1q_u8((const uint8_t *)at));
    v = vreinterpret_u16_u8(vld1_u8((const uint8_t *)at));
    if (type == GS_TYPE_F16)
        return vcvt_f32_f16(vreinterpret_f16_u16(v));
    return vreinterpretq_f32_u32(vshll_n_u16(v, 16));
}

/* 8 weights of a float type. */
INLINE v32 eight_f(const int type, const char *at) {
    float32x4_t low = load_f(type, at), high = load_f(type, at + (type == GS_TYPE_F32 ? 16 : 8));
    return both(vreinterpretq_u8_f32(low), vreinterpretq_u8_f32(high));
}

INLINE void store32(void *to, v32 v) {
    vst1q_u8(to, v.val[0]);
    vst1q_u8((uint8_t *)to + 16, v.val[1]);
}

/* Transposes four rows of four 32-bit values: half `from` of r[0 .. 3] becomes half `into` of to[0 .. 3]. */
INLINE void transpose4(const v32 *r, const int from, v32 *to, const int into) {
    uint32x4x2_t a = vtrnq_u32(vreinterpretq_u32_u8(r[0].val[from]), vreinterpretq_u32_u8(r[1].val[from]));
    uint32x4x2_t b = vtrnq_u32(vreinterpretq_u32_u8(r[2].val[from]), vreinterpretq_u32_u8(r[3].val[from]));
    UNROLL for (int i = 0; i < 2; i++) {
        to[i].val[into] = vreinterpretq_u8_u32(vcombine_u32(vget_low_u32(a.val[i]), vget_low_u32(b.val[i])));
        to[i + 2].val[into] = vreinterpretq_u8_u32(vcombine_u32(vget_high_u32(a.val[i]), vget_high_u32(b.val[i])));
    }
}

/* Transposes eight rows of eight 32-bit values. */
INLINE void transpose(v32 r[8]) {
    v32 t[8];
    transpose4(r, 0, t, 0);
    transpose4(r + 4, 0, t, 1);
    transpose4(r, 1, t + 4, 0);
    transpose4(r + 4, 1, t + 4, 1);
    UNROLL for (int i = 0; i < 8; i++)
        r[i] = t[i];
}

/* load_rows and store_rows: one vector of a column of the result, of the ROWS rows from row `at` on; a panel has two
 * such vectors.  Rows from `rows` on do not exist: they are neither read nor written. */
INLINE vec load_rows(const float *from, int64_t rows, int at) {
    float room[ROWS] = {0};
    if (rows >= at + ROWS)
        return VEC_LOAD(from + at);
    if (rows > at)
        memcpy(room, from + at, (size_t)(rows - at) * sizeof(float));
    return VEC_LOAD(room);
}

INLINE void store_rows(float *to, int64_t rows, int at, vec v) {
    float room[ROWS];
    if (rows >= at + ROWS) {
        VEC_STORE(to + at, v);
    } else if (rows > at) {
        VEC_STORE(room, v);
        memcpy(to + at, room, (size_t)(rows - at) * sizeof(float));
    }
}
