/* matmul.h -- MUL_MAT and MUL_MAT_ID as calls.
 *
 * Each function appends the calls of a node: for MUL_MAT_ID a call that sorts tokens by expert; a call that converts
 * the activations to 8-bit integers (quantised weights) or to f32 (other weights); and a call that multiplies.
 * Products of the same activations, such as query, key and value, share the first two; where no node between them
 * depends on it, one call multiplies for all of them.  Both functions return GS_OK, GS_UNSUPPORTED_OP (nothing was
 * appended) or GS_NO_HOST_MEMORY.  An expert id out of range is a GS_FAULT_ID of source 2, found before the result is
 * written; its node is the first of those that share the ids.
 */
#ifndef GGML_SCHED_KERNELS_MATMUL_H
#define GGML_SCHED_KERNELS_MATMUL_H

#include "build.h"

int gs_build_mul_mat(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables);
int gs_build_mul_mat_id(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables);

#endif
