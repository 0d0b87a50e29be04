/* ggml_sched/structs.h -- the plain structs that the core shares with C.
 *
 * No algorithms, no Python.h, no mutable statics.  All sizes and offsets are
 * bytes; `ne` is elements and `nb` byte strides, innermost dimension first, as
 * in ggml.
 */
#ifndef GGML_SCHED_STRUCTS_H
#define GGML_SCHED_STRUCTS_H

#include <stdint.h>

#define GS_MAX_DIMS 4
#define GS_MAX_SRC 10
#define GS_MAX_OP_PARAMS 16

/* Tensor flags. */
#define GS_FLAG_INPUT 1
#define GS_FLAG_OUTPUT 2

/* A tensor apart from its wiring: extents (elements), strides, bytes, GS_TYPE_* and GS_OP_*. */
typedef struct gs_layout {
    int64_t ne[GS_MAX_DIMS];
    int64_t nb[GS_MAX_DIMS];
    int64_t nbytes;
    int32_t type;
    int32_t op;
} gs_layout;

/* One free range of an arena; `offset` counts from the arena's first aligned address. */
typedef struct gs_block {
    int64_t offset;
    int64_t size;
} gs_block;

/* The sizes of an element type, quantised in blocks or not. */
typedef struct gs_type_traits {
    int32_t block_size;   /* elements per block; 1: not quantised   */
    int32_t type_size;    /* bytes per block                        */
} gs_type_traits;

#endif
