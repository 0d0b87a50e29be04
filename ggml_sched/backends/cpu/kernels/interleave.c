/* interleave.c -- see interleave.h. */
#include "interleave.h"

#include <string.h>

#include "blocks.h"
#include "floats.h"

/* A run of fields of one size, in bytes. */
typedef struct fields {
    int32_t size, count;
} fields;

#define MOST_RUNS 4

/* The fields of a type's block, in their order; a run of size 0 ends them. */
static void fields_of(int type, fields of[MOST_RUNS]) {
#define ARE(...) memcpy(of, (fields[MOST_RUNS]){__VA_ARGS__}, MOST_RUNS * sizeof(fields)); return
    switch (type) {
    case GS_TYPE_Q4_0: case GS_TYPE_IQ4_NL: ARE({2, 1}, {4, 4});
    case GS_TYPE_Q4_1: ARE({2, 2}, {4, 4});
    case GS_TYPE_Q5_0: ARE({2, 1}, {4, 5});
    case GS_TYPE_Q5_1: ARE({2, 2}, {4, 5});
    case GS_TYPE_Q2_K: ARE({4, 20}, {2, 2});
    case GS_TYPE_Q3_K: ARE({4, 27}, {2, 1});
    case GS_TYPE_Q4_K: ARE({2, 2}, {4, 35});
    case GS_TYPE_Q5_K: ARE({2, 2}, {4, 43});
    case GS_TYPE_IQ4_XS: ARE({2, 2}, {4, 33});
    default: ARE({1, 1}, {4, 4});       /* MXFP4 */
    }
#undef ARE
}

/* Which of the fields of four bytes of a block in a band is field number i of a block in a file. */
static int32_t place_of(int type, int32_t i) {
    const int is_q3_k = type == GS_TYPE_Q3_K;
    if (!is_q3_k && type != GS_TYPE_Q5_K)
        return i;
    /* In a file: where scales and the fields with upper and lower bits begin; how many of the last half a block has. */
    const int32_t scales = is_q3_k ? 24 : 0, uppers = is_q3_k ? 0 : 3, lowers = uppers + 8, half = is_q3_k ? 8 : 16;
    if (i >= scales && i < scales + 3)
        return i - scales;
    return i < lowers ? 3 + (i - uppers) / 4 * (half + 4) + gs_place_of_upper((i - uppers) % 4)
                      : 3 + (i - lowers) / half * (half + 4) + gs_place_of_lower((i - lowers) % half);
}

/* Reorders the bits of elements 0 .. 31: byte k of the result has those of elements k, 4 + k, ..., 28 + k. */
static uint32_t by_four(uint32_t bits) {
    uint32_t found = 0;
    for (int k = 0; k < 4; k++) {
        uint32_t each = bits >> k & 0x11111111u;                /* bit 4 i: that of element 4 i + k */
        each = (each | each >> 3) & 0x03030303u;
        each = (each | each >> 6) & 0x000f000fu;
        found |= ((each | each >> 12) & 0xffu) << 8 * k;
    }
    return found;
}

/* Returns bytes 4 i .. 4 i + 3 of the 32 reordered bytes with the bits of eight steps (interleave.h); `bytes`: the 32
 * bytes in the block. */
static uint32_t by_steps(const char *bytes, int32_t i) {
    uint32_t one = gs_load_u32(bytes + 4 * (i % 4)), other = gs_load_u32(bytes + 16 + 4 * (i % 4));
    return i < 4 ? (one & 0x0f0f0f0fu) | (other & 0x0f0f0f0fu) << 4 : (one >> 4 & 0x0f0f0f0fu) | (other & 0xf0f0f0f0u);
}

void gs_interleave(int type, const char *from, int64_t rows, int64_t row_bytes, char *to) {
    const int64_t size = gs_block_kind_of(type)->bytes;
    const int has_fifths = type == GS_TYPE_Q5_0 || type == GS_TYPE_Q5_1;
    const int first_step = type == GS_TYPE_Q3_K ? 0 : type == GS_TYPE_Q5_K ? 3 : INT32_MAX;     /* a field */
    const int64_t blocks = row_bytes / size;
    fields runs[MOST_RUNS];
    int head_bytes = 0;
    fields_of(type, runs);
    for (const fields *run = runs; run < runs + MOST_RUNS; run++)
        head_bytes += run->size < 4 ? run->size * run->count : 0;
    const int group = gs_head_group(head_bytes);
    for (int64_t row = 0; row < rows; row += GS_BAND, from += GS_BAND * row_bytes) {
        char *head = to, *rest = to;
        for (int64_t block = 0; block < blocks; block++) {
            const char *p = from + block * size;
            if (block % group == 0) {
                head = rest;
                rest += GS_BAND * head_bytes * (group < blocks - block ? group : blocks - block);
            }
            for (const fields *run = runs; run < runs + MOST_RUNS && run->size > 0; run++) {
                char **begin = run->size < 4 ? &head : &rest;
                for (int32_t i = 0; i < run->count; i++, p += run->size) {
                    const int32_t step = i - first_step;
                    char *at = *begin + GS_BAND * run->size * (run->size < 4 ? i : place_of(type, i));
                    for (int r = 0; r < GS_BAND; r++) {
                        const char *field = p + r * row_bytes;
                        uint32_t four;
                        if (run->size < 4) {
                            memcpy(at + run->size * r, field, (size_t)run->size);
                            continue;
                        }
                        four = gs_load_u32(field);
                        if (has_fifths && i == 0)
                            four = by_four(four);
                        else if (step >= 0 && step < 8)
                            four = by_steps(field - 4 * step, step);
                        memcpy(at + 4 * r, &four, 4);
                    }
                }
                *begin += GS_BAND * run->size * run->count;
            }
        }
        to = rest;
    }
}
