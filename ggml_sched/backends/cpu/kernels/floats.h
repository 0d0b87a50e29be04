/* floats.h -- conversions between f16, bf16 and f32, in integer arithmetic on their bits: equal on every machine.
 *
 * Values may lie at unaligned addresses, so they are moved with memcpy.  In ggml: GGML_FP16_TO_FP32 and its like.
 */
#ifndef GGML_SCHED_KERNELS_FLOATS_H
#define GGML_SCHED_KERNELS_FLOATS_H

#include <stdint.h>
#include <string.h>

static inline float gs_f32_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t gs_bits_of_f32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline uint16_t gs_load_u16(const void *at) {
    uint16_t value;
    memcpy(&value, at, sizeof(value));
    return value;
}

static inline uint32_t gs_load_u32(const void *at) {
    uint32_t value;
    memcpy(&value, at, sizeof(value));
    return value;
}

static inline uint64_t gs_load_u64(const void *at) {
    uint64_t value;
    memcpy(&value, at, sizeof(value));
    return value;
}

static inline float gs_load_f32(const void *at) {
    return gs_f32_of_bits(gs_load_u32(at));
}

/* The f32 of an f16, exact; a signalling NaN becomes a quiet one, as the instructions of F16C do it. */
static inline float gs_f32_of_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7fffu;
    if (rest >= 0x7c00u)
        return gs_f32_of_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13 | (rest > 0x7c00u ? 0x400000u : 0));
    if (rest >= 0x400u)
        return gs_f32_of_bits(sign | ((rest << 13) + (112u << 23)));
    float magnitude = (float)rest * 0x1p-24f; /* subnormal or zero */
    return gs_f32_of_bits(sign | gs_bits_of_f32(magnitude));
}

/* The nearest f16, ties to even; values beyond its range become inf. */
static inline uint16_t gs_f16_of_f32(float value) {
    uint32_t bits = gs_bits_of_f32(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
    if (rest >= 0x477ff000u) /* 65520: rounds to 65536 */
        return (uint16_t)(sign | 0x7c00u);
    if (rest < 0x38800000u) { /* subnormal in f16: value + 0.5 has the nearest multiple of 2^-24 in its bits */
        float shifted = gs_f32_of_bits(rest) + 0.5f;
        return (uint16_t)(sign | (gs_bits_of_f32(shifted) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13));
}

static inline float gs_f32_of_bf16(uint16_t bits) {
    return gs_f32_of_bits((uint32_t)bits << 16);
}

/* The nearest bf16, ties to even; a NaN stays a NaN, a quiet one. */
static inline uint16_t gs_bf16_of_f32(float value) {
    uint32_t bits = gs_bits_of_f32(value), high = bits >> 16;
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(high | 64u);
    return (uint16_t)((bits + 0x7fffu + (high & 1u)) >> 16);
}

#endif
