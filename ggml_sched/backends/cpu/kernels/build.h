/* build.h -- turns nodes into calls: the nodes with a compiled kernel, and the tables that their calls share. */
#ifndef GGML_SCHED_KERNELS_BUILD_H
#define GGML_SCHED_KERNELS_BUILD_H

#include "call.h"

#define GS_MAX_TABLES 8

/* A table that is computed from a leaf once and read by many nodes (the sines of positions), until the leaf changes. */
typedef struct gs_table {
    const gs_node *positions;
    const gs_node *factors;     /* or NULL */
    int32_t params[GS_MAX_OP_PARAMS];
    void *of;
} gs_table;

typedef struct gs_tables {
    int32_t n;
    gs_table table[GS_MAX_TABLES];
} gs_tables;

/* The table of the same leafs and parameters, or NULL. */
void *gs_find_table(const gs_tables *in, const gs_node *positions, const gs_node *factors, const int32_t *params);
void gs_add_table(gs_tables *to, const gs_node *positions, const gs_node *factors, const int32_t *params, void *of);

/* Removes tables computed from memory that a node writes. */
void gs_forget_tables(gs_tables *in, const gs_node *node);

/* Appends the calls of a node whose memory was checked.  GS_OK; GS_UNSUPPORTED_OP, then nothing was appended;
 * GS_NO_HOST_MEMORY.  A source that the kernel must not overwrite and that overlaps the result is copied first. */
int gs_build_node(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables);

/* One for each instruction set: kernels_*.c. */
int gs_build_portable(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables);
int gs_build_avx2(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables);
int gs_build_avx512(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables);

#endif
