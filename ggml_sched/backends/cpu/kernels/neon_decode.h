/* neon_decode.h -- decodes quantised blocks to vectors: the levels of 32 elements as bytes, scales and minima as f32.
 *
 * Included by matmul_neon.h, which says what a level is.
 */
/* Whether the levels of a type are signed: those of types with minima are not negative. */
INLINE int is_signed(const int type) {
    return !has_min(type);
}

/* 32 bytes: the levels of 32 elements, or 8 weights as f32. */
typedef uint8x16x2_t v32;

INLINE v32 load32(const void *at) {
    return (v32){{vld1q_u8(at), vld1q_u8((const uint8_t *)at + 16)}};
}

INLINE v32 both(uint8x16_t low, uint8x16_t high) {
    return (v32){{low, high}};
}

/* Shifts right by n bits, and keeps the bits of `mask`; a negative n shifts left. */
INLINE v32 bits_of(v32 v, const int n, const int mask) {
    int8x16_t by = vdupq_n_s8((int8_t)-n);
    uint8x16_t kept = vdupq_n_u8((uint8_t)mask);
    return both(vandq_u8(vshlq_u8(v.val[0], by), kept), vandq_u8(vshlq_u8(v.val[1], by), kept));
}

INLINE v32 either(v32 a, v32 b) {
    return both(vorrq_u8(a.val[0], b.val[0]), vorrq_u8(a.val[1], b.val[1]));
}

INLINE v32 minus(v32 v, const int offset) {
    uint8x16_t all = vdupq_n_u8((uint8_t)offset);
    return both(vsubq_u8(v.val[0], all), vsubq_u8(v.val[1], all));
}

/* The 32 nibbles of 16 bytes: all low ones, then all high ones. */
INLINE v32 nibbles(const uint8_t *at) {
    uint8x16_t v = vld1q_u8(at);
    return both(vandq_u8(v, vdupq_n_u8(15)), vshrq_n_u8(v, 4));
}

/* The fifth bits of 32 levels, from the 32 bits at `at`: byte i is 16 where bit i is set, else 0. */
INLINE v32 fifths(const uint8_t *at) {
    uint8x8_t bit = vcreate_u8(UINT64_C(0x8040201008040201));
    uint8x16_t bits = vcombine_u8(bit, bit), sixteen = vdupq_n_u8(16);
    uint8x16_t low = vcombine_u8(vdup_n_u8(at[0]), vdup_n_u8(at[1]));
    uint8x16_t high = vcombine_u8(vdup_n_u8(at[2]), vdup_n_u8(at[3]));
    return both(vandq_u8(vtstq_u8(low, bits), sixteen), vandq_u8(vtstq_u8(high, bits), sixteen));
}

INLINE v32 looked_up(const uint8_t *at, const int8_t *table) {
    v32 places = nibbles(at);
    uint8x16_t levels = vreinterpretq_u8_s8(vld1q_s8(table));
    return both(vqtbl1q_u8(levels, places.val[0]), vqtbl1q_u8(levels, places.val[1]));
}

/* The levels of elements 32 j .. 32 j + 31 of the block at p. */
INLINE v32 lanes(const int type, const uint8_t *p, const int j) {
    switch (type) {
    case GS_TYPE_Q4_0: return minus(nibbles(p + 2), 8);
    case GS_TYPE_Q4_1: return nibbles(p + 4);
    case GS_TYPE_Q5_0: return minus(either(nibbles(p + 6), fifths(p + 2)), 16);
    case GS_TYPE_Q5_1: return either(nibbles(p + 8), fifths(p + 4));
    case GS_TYPE_Q8_0: return load32(p + 2);
    case GS_TYPE_Q2_K: return bits_of(load32(p + 16 + j / 4 * 32), j % 4 * 2, 3);
    case GS_TYPE_Q3_K:
        return minus(either(bits_of(load32(p + 32 + j / 4 * 32), j % 4 * 2, 3), bits_of(load32(p), j - 2, 4)), 4);
    case GS_TYPE_Q4_K: return bits_of(load32(p + 16 + j / 2 * 32), j % 2 * 4, 15);
    case GS_TYPE_Q5_K:
        return either(bits_of(load32(p + 48 + j / 2 * 32), j % 2 * 4, 15), bits_of(load32(p + 16), j - 4, 16));
    case GS_TYPE_Q6_K:
        return minus(either(bits_of(load32(p + j / 4 * 64 + j % 2 * 32), j % 4 / 2 * 4, 15),
                            bits_of(load32(p + 128 + j / 4 * 32), j % 4 * 2 - 4, 48)), 32);
    case GS_TYPE_IQ4_NL: return looked_up(p + 2, gs_iq4_levels);
    case GS_TYPE_IQ4_XS: return looked_up(p + 8 + 16 * j, gs_iq4_levels);
    default: return looked_up(p + 1, gs_mxfp4_levels);
    }
}

/* The levels of elements 32 j .. 32 j + 31 of the block at p, multiplied by the factors of both halves: `products` has
 * the products of each factor and the levels 0 .. 7; those of Q3_K, plus 128. */
INLINE v32 folded(const int type, const uint8_t *p, const int j, const uint64_t products[2]) {
    v32 at = type == GS_TYPE_Q3_K ? minus(lanes(type, p, j), -4) : lanes(type, p, j);
    uint8x16_t low = vqtbl1q_u8(vreinterpretq_u8_u64(vdupq_n_u64(products[0])), at.val[0]);
    uint8x16_t high = vqtbl1q_u8(vreinterpretq_u8_u64(vdupq_n_u64(products[1])), at.val[1]);
    return type == GS_TYPE_Q3_K ? minus(both(low, high), 128) : both(low, high);
}

/* The factor of each 16 elements of a block (folded_q.h); those of Q3_K plus 32. */
INLINE void factors_of(const int type, const uint8_t *p, uint8_t factors[16]) {
    for (int i = 0; i < 16; i++) {
        if (type == GS_TYPE_Q2_K)
            factors[i] = p[i] & 15;
        else
            factors[i] = (uint8_t)((p[96 + i % 8] >> i / 8 * 4 & 15) | (p[104 + i % 4] >> i / 4 * 2 & 3) << 4);
    }
}

INLINE float half(const uint8_t *at) {
    __fp16 value;
    memcpy(&value, at, sizeof(value));
    return (float)value;
}

/* Decodes the scales of the block at p to s and, where its type has minima, the minima to m: units_of(type) *
 * halves_of(type) numbers each. */
INLINE void scales(const int type, const uint8_t *p, float *s, float *m) {
    uint8_t factors[16];
    float d, low;
    switch (type) {
    case GS_TYPE_Q4_1:
    case GS_TYPE_Q5_1:
        s[0] = half(p);
        m[0] = half(p + 2);
        return;
    case GS_TYPE_Q2_K:
        d = half(p + 80);
        low = -half(p + 82);
        for (int i = 0; i < 16; i++) {
            s[i] = (float)(p[i] & 15) * d;
            m[i] = (float)(p[i] >> 4) * low;
        }
        return;
    case GS_TYPE_Q3_K:
        d = half(p + 108);
        factors_of(type, p, factors);
        for (int i = 0; i < 16; i++)
            s[i] = (float)(factors[i] - 32) * d;
        return;
    case GS_TYPE_Q4_K:
    case GS_TYPE_Q5_K:
        d = half(p);
        low = -half(p + 2);
        for (int i = 0; i < 4; i++) {
            s[i] = (float)(p[4 + i] & 63) * d;
            m[i] = (float)(p[8 + i] & 63) * low;
            s[i + 4] = (float)((p[12 + i] & 15) | p[4 + i] >> 6 << 4) * d;
            m[i + 4] = (float)(p[12 + i] >> 4 | p[8 + i] >> 6 << 4) * low;
        }
        return;
    case GS_TYPE_Q6_K:
        d = half(p + 208);
        for (int i = 0; i < 16; i++)
            s[i] = (float)(int8_t)p[192 + i] * d;
        return;
    case GS_TYPE_IQ4_XS:
        d = half(p);
        for (int i = 0; i < 8; i++) {
            int four = p[4 + i / 2] >> i % 2 * 4 & 15, two = gs_load_u16(p + 2) >> 2 * i & 3;
            s[i] = (float)((four | two << 4) - 32) * d;
        }
        return;
    case GS_TYPE_MXFP4:
        s[0] = gs_scale_of_e8m0(p[0]);
        return;
    default:
        s[0] = half(p);
    }
}
