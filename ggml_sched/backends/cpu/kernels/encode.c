/* encode.c -- encodes rows of f32 as quantised blocks, rounded like ggml's reference (quantize_row_*_ref).
 *
 * A value is limited to the range of the block's integers before it is cast to an integer, and a NaN becomes the
 * largest of them: in C, a cast of inf, NaN or a number out of range is undefined.
 */
#include "blocks.h"
#include "floats.h"

#include <math.h>

static void put_half(uint8_t *at, float value) {
    uint16_t bits = gs_f16_of_f32(value);
    memcpy(at, &bits, sizeof(bits));
}

/* q limited to low .. high, with its fraction cut off; `high` if q is a NaN. */
static int limited(float q, float low, float high) {
    q = q <= high ? q : high;
    return (int)(q >= low ? q : low);
}

/* Writes the lower four bits of 32 integers of 0 .. 31 to the 16 bytes at `at`; returns their fifth bits. */
static uint32_t put_nibbles(uint8_t *at, const int *level) {
    uint32_t fifth = 0;
    for (int i = 0; i < 16; i++) {
        at[i] = (uint8_t)((level[i] & 15) | (level[i + 16] & 15) << 4);
        fifth |= (uint32_t)(level[i] >> 4) << i | (uint32_t)(level[i + 16] >> 4) << (i + 16);
    }
    return fifth;
}

/* Encodes a block of q4_0 (offset 8) or q5_0 (16).  The element furthest from zero becomes the lowest integer, 0, which
 * stands for -offset times the scale; so the scale has the opposite sign of that element.  A NaN counts as furthest
 * from zero, as in NumPy's argmax. */
static void encode_signed(const float *x, uint8_t *block, int offset) {
    float most = 0, at_most = 0;
    int level[32];
    for (int i = 0; i < 32; i++) {
        float size = fabsf(x[i]);
        if (size > most || (size != size && most == most)) {
            most = size;
            at_most = x[i];
        }
    }
    float d = at_most / (float)-offset, inverse = d != 0 ? 1.0f / d : 0.0f;
    for (int i = 0; i < 32; i++)
        level[i] = limited(x[i] * inverse + ((float)offset + 0.5f), 0, (float)(2 * offset - 1));
    put_half(block, d);
    uint32_t fifth = put_nibbles(block + (offset == 16 ? 6 : 2), level);
    if (offset == 16)
        memcpy(block + 2, &fifth, sizeof(fifth));
}

/* Encodes a block of q4_1 (top 15) or q5_1 (31): the smallest element becomes the integer 0, the largest `top`. */
static void encode_between(const float *x, uint8_t *block, int top) {
    float low = x[0], high = x[0];
    int level[32];
    for (int i = 1; i < 32; i++) {
        low = x[i] < low || x[i] != x[i] ? x[i] : low;
        high = x[i] > high || x[i] != x[i] ? x[i] : high;
    }
    float d = (high - low) / (float)top, inverse = d != 0 ? 1.0f / d : 0.0f;
    for (int i = 0; i < 32; i++)
        level[i] = limited((x[i] - low) * inverse + 0.5f, 0, (float)top);
    put_half(block, d);
    put_half(block + 2, low);
    uint32_t fifth = put_nibbles(block + (top == 31 ? 8 : 4), level);
    if (top == 31)
        memcpy(block + 4, &fifth, sizeof(fifth));
}

static void encode_q8_0(const float *x, uint8_t *block) {
    float most = 0;
    for (int i = 0; i < 32; i++) {
        float size = fabsf(x[i]);
        most = size > most || size != size ? size : most;
    }
    float d = most / 127.0f, inverse = d != 0 ? 1.0f / d : 0.0f;
    put_half(block, d);
    for (int i = 0; i < 32; i++)
        block[2 + i] = (uint8_t)(int8_t)limited(roundf(x[i] * inverse), -128, 127);
}

int gs_quantize_row(int type, const float *src, void *dst, int64_t n) {
    uint8_t *to = dst;
    const gs_block_kind *kind = gs_block_kind_of(type);
    switch (type) {
    case GS_TYPE_Q8_0:
    case GS_TYPE_Q4_0:
    case GS_TYPE_Q4_1:
    case GS_TYPE_Q5_0:
    case GS_TYPE_Q5_1:
        break;
    default:
        return -1;
    }
    for (int64_t i = 0; i + 32 <= n; i += 32, to += kind->bytes) {
        if (type == GS_TYPE_Q8_0)
            encode_q8_0(src + i, to);
        else if (type == GS_TYPE_Q4_0 || type == GS_TYPE_Q5_0)
            encode_signed(src + i, to, kind->offset);
        else
            encode_between(src + i, to, type == GS_TYPE_Q4_1 ? 15 : 31);
    }
    return 0;
}
