/* neon_few_q.h -- a strip of a row of quantised weights, decoded from its blocks, times at most GS_FEW_Q columns.
 *
 * Included by matmul_neon.h.
 */
/* Of how many steps of a strip the first halves lie together (gs_strip). */
INLINE int strip_order(const int type) {
    (void)type;
    return 1;
}

INLINE int takes_strips(const int type, int64_t steps) {
    (void)type, (void)steps;
    return 1;
}

#define JOINS_ROWS 0
#define EVENS_FIRST 0
#define FEW_ROWS 1

/* Decodes the scales of eight steps (32 elements each) to s and, for types with minima, the minima to m. */
INLINE void eight_scales(const int type, const uint8_t *p, float *s, float *m) {
    const int size = bytes_of(type);
    if (units_of(type) == 8) {
        scales(type, p, s, m);
        return;
    }
    UNROLL for (int j = 0; j < 8; j++)
        scales(type, p + j * size, s + j, m + j);
}

/* Multiplies eight steps of a row, whose blocks begin at p, with strip number `at` of each of N columns: adds the
 * scaled sums of products to acc[column], and the contribution of minima to low[column]. */
INLINE void add_strip(const int type, const int N, const int R, const uint8_t *p, int64_t stride,
                      const gs_strip *const y[], int64_t at, vec acc[][2], vec_low low[]) {
    (void)R, (void)stride;
    float s[16], m[16], scaled[GS_FEW_Q][16];
    eight_scales(type, p, s, m);
    UNROLL for (int c = 0; c < N; c++) {
        const gs_strip *strip = y[c] + at;
        UNROLL for (int i = 0; i < 8 * halves_of(type); i += 4) {
            VEC_STORE(scaled[c] + i, VEC_MUL(VEC_LOAD(s + i), VEC_LOAD(strip->d + i)));
            if (has_min(type))
                low[c] = VEC_FMA(VEC_LOAD(m + i), VEC_LOAD(strip->sum + i), low[c]);
        }
    }
    UNROLL for (int j = 0; j < 8; j++) {
        v32 v = lanes(type, units_of(type) == 8 ? p : p + j * bytes_of(type), units_of(type) == 8 ? j : 0);
        UNROLL for (int c = 0; c < N; c++) {
            const int8_t *q = y[c][at].q + 32 * j;
            int32x4_t first = dot4(vdupq_n_s32(0), vreinterpretq_s8_u8(v.val[0]), vld1q_s8(q)), second;
            if (halves_of(type) == 1) {
                first = dot4(first, vreinterpretq_s8_u8(v.val[1]), vld1q_s8(q + 16));
                acc[c][j % 2] = VEC_FMA(vcvtq_f32_s32(first), VEC_SET1(scaled[c][j]), acc[c][j % 2]);
            } else {
                second = dot4(vdupq_n_s32(0), vreinterpretq_s8_u8(v.val[1]), vld1q_s8(q + 16));
                acc[c][0] = VEC_FMA(vcvtq_f32_s32(first), VEC_SET1(scaled[c][2 * j]), acc[c][0]);
                acc[c][1] = VEC_FMA(vcvtq_f32_s32(second), VEC_SET1(scaled[c][2 * j + 1]), acc[c][1]);
            }
        }
    }
}

/* Adds the products of one block of 32 elements, step j of the last strip, where the row ends before all eight steps,
 * to low[column]. */
INLINE void add_rest(const int type, const int N, const uint8_t *p, const gs_strip *const y[], int64_t at, int j,
                     vec_low low[]) {
    float s[16], m[16];
    scales(type, p, s, m);
    v32 v = lanes(type, p, 0);
    UNROLL for (int c = 0; c < N; c++) {
        const gs_strip *strip = y[c] + at;
        int32x4_t dot = dot4(vdupq_n_s32(0), vreinterpretq_s8_u8(v.val[0]), vld1q_s8(strip->q + 32 * j));
        dot = dot4(dot, vreinterpretq_s8_u8(v.val[1]), vld1q_s8(strip->q + 32 * j + 16));
        low[c] = VEC_FMA(vcvtq_f32_s32(dot), VEC_SET1(s[0] * strip->d[j]), low[c]);
        if (has_min(type))
            low[c] = VEC_ADD(low[c], vsetq_lane_f32(m[0] * strip->sum[j], VEC_ZERO, 0));
    }
}

/* Adds the products of the n blocks of 32 elements with which a row ends that are less than a strip, number `at`. */
INLINE void add_end(const int type, const int N, const int R, const uint8_t *p, int64_t stride,
                    const gs_strip *const y[], int64_t at, int n, vec acc[][2], vec_low low[]) {
    (void)R, (void)stride, (void)acc;
    for (int j = 0; j < n; j++, p += bytes_of(type))
        add_rest(type, N, p, y, at, j, low);
}
