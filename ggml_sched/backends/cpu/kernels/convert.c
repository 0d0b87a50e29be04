/* convert.c -- blocks of 32 elements from f32 and back: q4_0 q4_1 q5_0 q5_1 q8_0.
 *
 * Bit for bit what ggml_sched.quants computes, so without fused multiply-adds.  Layouts stand there.
 */
#include "convert.h"
#include "types.h"

#include <math.h>
#include <string.h>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#define BLOCK 32

uint16_t gs_f16_of(float x) {
    uint32_t bits = gs_bits_of_float(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000)
        return (uint16_t)(sign | 0x7c00);
    if (rest < 113u << 23)
        return (uint16_t)(sign | (gs_bits_of_float(gs_float_of_bits(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13);
}

float gs_of_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00)
        return gs_float_of_bits(sign | 0x7f800000 | rest << 13 | (rest > 0x7c00 ? 0x400000 : 0));
    float value = gs_float_of_bits(rest << 13) * gs_float_of_bits(0x77800000);
    return gs_float_of_bits(sign | gs_bits_of_float(value));
}

int gs_block_elements(int type) {
    switch (type) {
    case GS_T_Q4_0: case GS_T_Q4_1: case GS_T_Q5_0: case GS_T_Q5_1: case GS_T_Q8_0: return BLOCK;
    default: return gs_plain_size(type) ? 1 : 0;
    }
}

int gs_block_bytes(int type) {
    switch (type) {
    case GS_T_Q4_0: return 18;
    case GS_T_Q4_1: return 20;
    case GS_T_Q5_0: return 22;
    case GS_T_Q5_1: return 24;
    case GS_T_Q8_0: return 34;
    default: return gs_plain_size(type);
    }
}

int gs_quantizes(int type) { return gs_block_elements(type) == BLOCK; }
int gs_decodes(int type) { return gs_block_elements(type) == BLOCK; }

static void put_f16(uint8_t *to, float x) {
    uint16_t h = gs_f16_of(x);
    memcpy(to, &h, 2);
}

static float get_f16(const uint8_t *from) {
    uint16_t h;
    memcpy(&h, from, 2);
    return gs_of_f16(h);
}

/* q within low .. high, `high` for NaN. */
static float limited(float q, float low, float high) {
    q = q < high ? q : high;
    return q > low ? q : low;
}

static void put_levels(const uint8_t *q, uint8_t *to, uint8_t *fifth) {
    uint32_t bits = 0;
    for (int j = 0; j < BLOCK / 2; j++) {
        to[j] = (uint8_t)((q[j] & 15) | (q[j + 16] & 15) << 4);
        bits |= (uint32_t)(q[j] >> 4) << j | (uint32_t)(q[j + 16] >> 4) << (j + 16);
    }
    if (fifth != NULL)
        for (int j = 0; j < 4; j++)
            fifth[j] = (uint8_t)(bits >> 8 * j);
}

static void block_q8_0(const float *x, uint8_t *to) {
    float top = 0;
    for (int j = 0; j < BLOCK; j++) {
        float a = fabsf(x[j]);
        top = a > top || a != a ? a : top;
        if (top != top)
            break;
    }
    float d = top / 127.0f, inverse = d != 0 ? 1.0f / d : 0.0f;
    put_f16(to, d);
    for (int j = 0; j < BLOCK; j++) {
        float q = x[j] * inverse, whole = truncf(q);
        whole += copysignf(fabsf(q - whole) >= 0.5f ? 1.0f : 0.0f, q);
        to[2 + j] = (uint8_t)(int8_t)limited(whole, -128.0f, 127.0f);
    }
}

static void block_signed(const float *x, uint8_t *to, int offset) {
    uint8_t level[BLOCK];
    int at = 0;
    for (int j = 1; j < BLOCK && x[at] == x[at]; j++)
        if (fabsf(x[j]) > fabsf(x[at]) || x[j] != x[j])
            at = j;
    float d = (x[at] + 0.0f) / (float)-offset, inverse = d != 0 ? 1.0f / d : 0.0f;
    put_f16(to, d);
    for (int j = 0; j < BLOCK; j++)
        level[j] = (uint8_t)limited(x[j] * inverse + ((float)offset + 0.5f), 0.0f, (float)(2 * offset - 1));
    put_levels(level, offset == 8 ? to + 2 : to + 6, offset == 8 ? NULL : to + 2);
}

static void block_with_minimum(const float *x, uint8_t *to, int levels) {
    uint8_t level[BLOCK];
    float low = x[0], high = x[0];
    for (int j = 1; j < BLOCK; j++) {
        low = x[j] < low || x[j] != x[j] ? x[j] : low;
        high = x[j] > high || x[j] != x[j] ? x[j] : high;
        if (low != low)
            break;
    }
    float d = (high - low) / (float)levels, inverse = d != 0 ? 1.0f / d : 0.0f;
    put_f16(to, d);
    put_f16(to + 2, low);
    for (int j = 0; j < BLOCK; j++)
        level[j] = (uint8_t)limited((x[j] - low) * inverse + 0.5f, 0.0f, (float)levels);
    put_levels(level, levels == 15 ? to + 4 : to + 8, levels == 15 ? NULL : to + 4);
}

void gs_quantize_row(int type, const float *from, void *to, int64_t n) {
    uint8_t *out = to;
    for (int64_t i = 0; i + BLOCK <= n; i += BLOCK, out += gs_block_bytes(type)) {
        if (type == GS_T_Q8_0)
            block_q8_0(from + i, out);
        else if (type == GS_T_Q4_0 || type == GS_T_Q5_0)
            block_signed(from + i, out, type == GS_T_Q4_0 ? 8 : 16);
        else
            block_with_minimum(from + i, out, type == GS_T_Q4_1 ? 15 : 31);
    }
}

static void decode_block(int type, const uint8_t *from, float *x) {
    float d = get_f16(from), low = 0;
    uint32_t fifth = 0;
    int with_minimum = type == GS_T_Q4_1 || type == GS_T_Q5_1, offset = 0;
    const uint8_t *q = from + (with_minimum ? 4 : 2);
    if (type == GS_T_Q8_0) {
        for (int j = 0; j < BLOCK; j++)
            x[j] = (float)(int8_t)q[j] * d;
        return;
    }
    if (with_minimum)
        low = get_f16(from + 2);
    else
        offset = type == GS_T_Q4_0 ? 8 : 16;
    if (type == GS_T_Q5_0 || type == GS_T_Q5_1) {
        fifth = q[0] | (uint32_t)q[1] << 8 | (uint32_t)q[2] << 16 | (uint32_t)q[3] << 24;
        q += 4;
    }
    for (int j = 0; j < BLOCK / 2; j++) {
        int a = (q[j] & 15) | (int)(fifth >> j & 1) << 4, b = q[j] >> 4 | (int)(fifth >> (j + 16) & 1) << 4;
        x[j] = (float)(a - offset) * d;
        x[j + 16] = (float)(b - offset) * d;
        if (with_minimum) {
            x[j] += low;
            x[j + 16] += low;
        }
    }
}

void gs_decode_row(int type, const void *from, float *to, int64_t n) {
    const uint8_t *block = from;
    for (int64_t i = 0; i + BLOCK <= n; i += BLOCK, block += gs_block_bytes(type))
        decode_block(type, block, to + i);
}
