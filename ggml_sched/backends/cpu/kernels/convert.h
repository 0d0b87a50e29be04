/* convert.h -- which types rows are read from and written to, on top of blocks.h. */
#ifndef GGML_SCHED_KERNELS_CONVERT_H
#define GGML_SCHED_KERNELS_CONVERT_H

#include "blocks.h"
#include "types.h"

/* Whether gs_dequantize_row decodes the blocks of a type. */
static inline int gs_decodes(int type) { return gs_block_kind_of(type) != NULL; }

/* Whether gs_quantize_row makes blocks of a type: those that KV caches use. */
static inline int gs_quantizes(int type) {
    return type == GS_T_Q8_0 || type == GS_T_Q4_0 || type == GS_T_Q4_1 || type == GS_T_Q5_0 || type == GS_T_Q5_1;
}

/* Elements and bytes of a block; 1 and the element's size for plain types, 0 for what is unknown. */
static inline int gs_block_elements(int type) {
    const gs_block_kind *kind = gs_plain_size(type) ? NULL : gs_block_kind_of(type);
    return gs_plain_size(type) ? 1 : kind != NULL ? kind->elements : 0;
}

static inline int gs_block_bytes(int type) {
    const gs_block_kind *kind = gs_plain_size(type) ? NULL : gs_block_kind_of(type);
    return kind != NULL ? kind->bytes : gs_plain_size(type);
}

#endif
