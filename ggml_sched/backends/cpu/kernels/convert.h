/* convert.h -- rows of block types from f32, in ggml's reference rounding; see convert.c. */
#ifndef GGML_SCHED_KERNELS_CONVERT_H
#define GGML_SCHED_KERNELS_CONVERT_H

#include <stdint.h>

/* Whether gs_quantize_row knows a type: the 32-element types that KV caches use. */
int gs_quantizes(int type);

/* n elements (whole blocks) of f32 to blocks. */
void gs_quantize_row(int type, const float *from, void *to, int64_t n);

/* Whether gs_decode_row knows a type; n elements (whole blocks) to f32. */
int gs_decodes(int type);
void gs_decode_row(int type, const void *from, float *to, int64_t n);

/* Elements and bytes of a block; 1 and the element's size for plain types, 0 for what is unknown. */
int gs_block_elements(int type);
int gs_block_bytes(int type);

/* A finite or infinite f16 of f32, rounded to even; NaN stays NaN. */
uint16_t gs_f16_of(float x);
float gs_of_f16(uint16_t h);

#endif
