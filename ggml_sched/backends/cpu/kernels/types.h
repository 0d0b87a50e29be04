/* types.h -- the numbers of ggml's element types, and reading single values of plain types. */
#ifndef GGML_SCHED_KERNELS_TYPES_H
#define GGML_SCHED_KERNELS_TYPES_H

#include <stdint.h>
#include <string.h>

enum {
    GS_T_F32 = 0, GS_T_F16 = 1, GS_T_Q4_0 = 2, GS_T_Q4_1 = 3, GS_T_Q5_0 = 6, GS_T_Q5_1 = 7, GS_T_Q8_0 = 8,
    GS_T_I8 = 24, GS_T_I16 = 25, GS_T_I32 = 26, GS_T_I64 = 27, GS_T_F64 = 28, GS_T_BF16 = 30
};

/* Bytes of an element of a plain type; 0 for block types and unknown ones. */
static inline int gs_plain_size(int type) {
    switch (type) {
    case GS_T_F32: case GS_T_I32: return 4;
    case GS_T_F16: case GS_T_BF16: case GS_T_I16: return 2;
    case GS_T_I8: return 1;
    case GS_T_I64: case GS_T_F64: return 8;
    default: return 0;
    }
}

static inline int gs_is_float(int type) {
    return type == GS_T_F32 || type == GS_T_F16 || type == GS_T_BF16;
}

static inline float gs_float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t gs_bits_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float gs_param_f32(const int32_t *params, int i) {
    return gs_float_of_bits((uint32_t)params[i]);
}

#endif
