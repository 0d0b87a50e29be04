/* blocks.c -- decodes quantised blocks one at a time, in portable C: what the faster kernels are checked against.
 *
 * Results are bit-equal to ggml's reference.  This needs -ffp-contract=off: with fused multiply-adds, which round once,
 * they would differ.
 */
#include "blocks.h"
#include "floats.h"

#include <stddef.h>

const int8_t gs_iq4_levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
const int8_t gs_mxfp4_levels[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

float gs_scale_of_e8m0(uint8_t e) {
    return gs_f32_of_bits(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23);
}

static float half_at(const uint8_t *at) {
    return gs_f32_of_f16(gs_load_u16(at));
}

/* -- blocks of 32 elements: a scale; in some types a minimum, or a fifth bit of each element; then the elements --- */

static void nibbles(const uint8_t *from, int8_t *q, int offset) {
    for (int i = 0; i < 16; i++) {
        q[i] = (int8_t)((from[i] & 15) - offset);
        q[i + 16] = (int8_t)((from[i] >> 4) - offset);
    }
}

static void fifth_bits(uint32_t bits, const uint8_t *from, int8_t *q, int offset) {
    for (int i = 0; i < 16; i++) {
        q[i] = (int8_t)(((from[i] & 15) | (int)(bits >> i & 1) << 4) - offset);
        q[i + 16] = (int8_t)(((from[i] >> 4) | (int)(bits >> (i + 16) & 1) << 4) - offset);
    }
}

static void levels(const uint8_t *from, int8_t *q, const int8_t *table) {
    for (int i = 0; i < 16; i++) {
        q[i] = table[from[i] & 15];
        q[i + 16] = table[from[i] >> 4];
    }
}

static void decode_q4_0(const uint8_t *block, int8_t *q, float *s, float *m) {
    (void)m;
    s[0] = half_at(block);
    nibbles(block + 2, q, 8);
}

static void decode_q4_1(const uint8_t *block, int8_t *q, float *s, float *m) {
    s[0] = half_at(block);
    m[0] = half_at(block + 2);
    nibbles(block + 4, q, 0);
}

static void decode_q5_0(const uint8_t *block, int8_t *q, float *s, float *m) {
    (void)m;
    s[0] = half_at(block);
    fifth_bits(gs_load_u32(block + 2), block + 6, q, 16);
}

static void decode_q5_1(const uint8_t *block, int8_t *q, float *s, float *m) {
    s[0] = half_at(block);
    m[0] = half_at(block + 2);
    fifth_bits(gs_load_u32(block + 4), block + 8, q, 0);
}

static void decode_q8_0(const uint8_t *block, int8_t *q, float *s, float *m) {
    (void)m;
    s[0] = half_at(block);
    memcpy(q, block + 2, 32);
}

static void decode_iq4_nl(const uint8_t *block, int8_t *q, float *s, float *m) {
    (void)m;
    s[0] = half_at(block);
    levels(block + 2, q, gs_iq4_levels);
}

static void decode_mxfp4(const uint8_t *block, int8_t *q, float *s, float *m) {
    (void)m;
    s[0] = gs_scale_of_e8m0(block[0]);
    levels(block + 1, q, gs_mxfp4_levels);
}

/* -- blocks of 256 elements: 8 or 16 scales, stored as small integers times one f16 (d) --------------------------- */

/* A q2_k block: 16 bytes with a 4-bit scale and a 4-bit minimum each; 64 bytes of 2-bit elements (32 bytes hold 128
 * elements); then d and dmin, the f16 factors of all scales and of all minima. */
static void decode_q2_k(const uint8_t *block, int8_t *q, float *s, float *m) {
    float d = half_at(block + 80), dmin = half_at(block + 82);
    for (int g = 0; g < 16; g++) {
        s[g] = d * (float)(block[g] & 15);
        m[g] = -(dmin * (float)(block[g] >> 4));
    }
    for (int i = 0; i < 256; i++)
        q[i] = (int8_t)(block[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3);
}

/* A q3_k block: 32 bytes with the third bit of each element (4 is subtracted where it is 0), 64 bytes with the lower
 * two bits, 12 bytes with 6-bit scales, then d, the f16 factor of all scales. */
static void decode_q3_k(const uint8_t *block, int8_t *q, float *s, float *m) {
    (void)m;
    const uint8_t *scales = block + 96;
    float d = half_at(block + 108);
    for (int g = 0; g < 16; g++) {
        int low = scales[g % 8] >> (g / 8 * 4) & 15, high = scales[8 + g % 4] >> (g / 4 * 2) & 3;
        s[g] = d * (float)((low | high << 4) - 32);
    }
    for (int i = 0; i < 256; i++) {
        int low = block[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3, high = block[i % 32] >> (i / 32) & 1;
        q[i] = (int8_t)(low + high * 4 - 4);
    }
}

/* Decodes the 6-bit scales and minima of the 8 groups of 32 elements in a q4_k or q5_k block.  They lie in 12 bytes.
 * The lower six bits of the first 8 bytes are those of groups 0 .. 3; the upper two bits belong to groups 4 .. 7, whose
 * lower four bits are in the last 4 bytes. */
static void scales_q4_k(const uint8_t *block, float *s, float *m) {
    const uint8_t *p = block + 4;
    float d = half_at(block), dmin = half_at(block + 2);
    for (int g = 0; g < 4; g++) {
        s[g] = d * (float)(p[g] & 63);
        m[g] = -(dmin * (float)(p[g + 4] & 63));
        s[g + 4] = d * (float)((p[g + 8] & 15) | p[g] >> 6 << 4);
        m[g + 4] = -(dmin * (float)(p[g + 8] >> 4 | p[g + 4] >> 6 << 4));
    }
}

static void decode_q4_k(const uint8_t *block, int8_t *q, float *s, float *m) {
    scales_q4_k(block, s, m);
    for (int i = 0; i < 256; i++)
        q[i] = (int8_t)(block[16 + i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15);
}

static void decode_q5_k(const uint8_t *block, int8_t *q, float *s, float *m) {
    scales_q4_k(block, s, m);
    for (int i = 0; i < 256; i++) {
        int low = block[48 + i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15, high = block[16 + i % 32] >> (i / 32) & 1;
        q[i] = (int8_t)(low | high << 4);
    }
}

/* A q6_k block: 128 bytes with the lower four bits of elements, 64 with the upper two, 16 signed 8-bit scales, then d,
 * the f16 factor of all scales. */
static void decode_q6_k(const uint8_t *block, int8_t *q, float *s, float *m) {
    (void)m;
    float d = half_at(block + 208);
    for (int g = 0; g < 16; g++)
        s[g] = d * (float)(int8_t)block[192 + g];
    for (int i = 0; i < 256; i++) {
        int low = block[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4) & 15;
        int high = block[128 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        q[i] = (int8_t)((low | high << 4) - 32);
    }
}

/* An iq4_xs block: d, the f16 factor of all scales; 2 bytes with the upper two bits of 8 scales, 4 with their lower
 * four bits, then 128 with the 4-bit element indices into gs_iq4_levels. */
static void decode_iq4_xs(const uint8_t *block, int8_t *q, float *s, float *m) {
    (void)m;
    float d = half_at(block);
    int high = gs_load_u16(block + 2);
    for (int g = 0; g < 8; g++) {
        s[g] = d * (float)(((block[4 + g / 2] >> (g % 2 * 4) & 15) | (high >> (2 * g) & 3) << 4) - 32);
        levels(block + 8 + 16 * g, q + 32 * g, gs_iq4_levels);
    }
}

static const gs_block_kind kinds[] = {
    {GS_TYPE_Q4_0, 32, 18, 32, 0, 8, decode_q4_0},      {GS_TYPE_Q4_1, 32, 20, 32, 1, 0, decode_q4_1},
    {GS_TYPE_Q5_0, 32, 22, 32, 0, 16, decode_q5_0},     {GS_TYPE_Q5_1, 32, 24, 32, 1, 0, decode_q5_1},
    {GS_TYPE_Q8_0, 32, 34, 32, 0, 128, decode_q8_0},    {GS_TYPE_Q2_K, 256, 84, 16, 1, 0, decode_q2_k},
    {GS_TYPE_Q3_K, 256, 110, 16, 0, 4, decode_q3_k},    {GS_TYPE_Q4_K, 256, 144, 32, 1, 0, decode_q4_k},
    {GS_TYPE_Q5_K, 256, 176, 32, 1, 0, decode_q5_k},    {GS_TYPE_Q6_K, 256, 210, 16, 0, 32, decode_q6_k},
    {GS_TYPE_IQ4_NL, 32, 18, 32, 0, 128, decode_iq4_nl}, {GS_TYPE_IQ4_XS, 256, 136, 32, 0, 128, decode_iq4_xs},
    {GS_TYPE_MXFP4, 32, 17, 32, 0, 12, decode_mxfp4},
};

const gs_block_kind *gs_block_kind_of(int type) {
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
        if (kinds[i].type == type)
            return &kinds[i];
    return NULL;
}

int gs_dequantize_row(int type, const void *src, float *dst, int64_t n) {
    const uint8_t *from = src;
    const gs_block_kind *kind = gs_block_kind_of(type);
    int8_t q[GS_MAX_BLOCK];
    float s[GS_MAX_GROUPS], m[GS_MAX_GROUPS];
    switch (type) {
    case GS_TYPE_F32:
        memcpy(dst, src, (size_t)n * sizeof(float));
        return 0;
    case GS_TYPE_F16:
        for (int64_t i = 0; i < n; i++)
            dst[i] = gs_f32_of_f16(gs_load_u16(from + 2 * i));
        return 0;
    case GS_TYPE_BF16:
        for (int64_t i = 0; i < n; i++)
            dst[i] = gs_f32_of_bf16(gs_load_u16(from + 2 * i));
        return 0;
    default:
        if (kind == NULL)
            return -1;
    }
    for (; n > 0; n -= kind->elements, from += kind->bytes, dst += kind->elements) {
        kind->decode(from, q, s, m);
        for (int g = 0, i = 0; i < kind->elements; g++)
            for (int end = i + kind->group; i < end; i++)
                dst[i] = kind->has_min ? s[g] * (float)q[i] + m[g] : s[g] * (float)q[i];
    }
    return 0;
}
