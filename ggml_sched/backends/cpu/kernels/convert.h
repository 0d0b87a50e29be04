/* convert.h -- the element or block size of each type, and to which types blocks.h encodes. */
#ifndef GGML_SCHED_KERNELS_CONVERT_H
#define GGML_SCHED_KERNELS_CONVERT_H

#include "blocks.h"
#include "floats.h"

/* Bytes of an element of a type that is not quantised; 0 for quantised and unknown types. */
static inline int gs_plain_size(int type) {
    switch (type) {
    case GS_TYPE_F32: case GS_TYPE_I32: return 4;
    case GS_TYPE_F16: case GS_TYPE_BF16: case GS_TYPE_I16: return 2;
    case GS_TYPE_I8: return 1;
    case GS_TYPE_I64: case GS_TYPE_F64: return 8;
    default: return 0;
    }
}

static inline int gs_is_float(int type) {
    return type == GS_TYPE_F32 || type == GS_TYPE_F16 || type == GS_TYPE_BF16;
}

static inline float gs_param_f32(const int32_t *params, int i) {
    return gs_f32_of_bits((uint32_t)params[i]);
}

/* gs_block_elements and gs_block_bytes: elements and bytes of a block of the type.  A type that is not quantised counts
 * as blocks of one element; both are 0 for a quantised type that blocks.h does not decode. */
static inline int gs_block_elements(int type) {
    const gs_block_kind *kind = gs_plain_size(type) ? NULL : gs_block_kind_of(type);
    return gs_plain_size(type) ? 1 : kind != NULL ? kind->elements : 0;
}

static inline int gs_block_bytes(int type) {
    const gs_block_kind *kind = gs_plain_size(type) ? NULL : gs_block_kind_of(type);
    return kind != NULL ? kind->bytes : gs_plain_size(type);
}

/* Whether f32 is converted to the type: to all float types, and to those quantised types that KV caches use. */
static inline int gs_encodes(int type) {
    return gs_is_float(type) || type == GS_TYPE_Q8_0 || type == GS_TYPE_Q4_0 || type == GS_TYPE_Q4_1
           || type == GS_TYPE_Q5_0 || type == GS_TYPE_Q5_1;
}

#endif
