/* build.h -- turns each node that has a compiled kernel into calls, and keeps what several nodes share. */
#ifndef GGML_SCHED_KERNELS_BUILD_H
#define GGML_SCHED_KERNELS_BUILD_H

#include "call.h"

#define GS_MAX_TABLES 8

/* A table that one call computes and many nodes read: the sines and cosines for ROPE, which are equal in every layer of
 * a model.  The table is valid until a node writes to the memory of `positions` or `factors`. */
typedef struct gs_table {
    const gs_node *positions;   /* source 1 of ROPE                              */
    const gs_node *factors;     /* frequency factors (source 2 of ROPE), or NULL */
    int32_t params[GS_MAX_OP_PARAMS]; /* of the nodes that read the table        */
    void *of;                   /* describes the table, in memory from gs_keep   */
    int64_t end;                /* bytes of work memory up to the table's end    */
} gs_table;

/* What calls share that run one after another with the same work memory.  All zeros: nothing. */
typedef struct gs_tables {
    int32_t n;
    gs_table table[GS_MAX_TABLES];  /* in the order of their ends */
    /* The last matrix product, as long as its converted columns are in `shared` and the memory that they were converted
     * from is unchanged; else NULL.  A later product of the same columns uses them, too (matmul.c). */
    struct gs_product *product;
    int32_t multiply;               /* index of the call that computes `product` */
    /* The interleaved form of source 0 of the node that is built (interleave.h), whose rows follow one another; NULL:
     * none.  It must stay as it is as long as the calls are used. */
    const char *interleaved;
} gs_tables;

/* What describes the table that was added with these sources and parameters, or NULL if there is none. */
void *gs_find_table(const gs_tables *in, const gs_node *positions, const gs_node *factors, const int32_t *params);
void gs_add_table(gs_tables *to, const gs_node *positions, const gs_node *factors, const int32_t *params, void *of,
                  int64_t end);

/* Where a table can begin in the work memory: at the end of the last one. */
int64_t gs_end_of_tables(const gs_tables *in);

/* Removes the tables and the converted columns that were computed from memory that `node` writes: their values would be
 * outdated. */
void gs_forget_tables(gs_tables *in, const gs_node *node);

/* Gives the first `size` bytes of `shared` to calls that are appended next; they overwrite what earlier calls left. */
void gs_use_shared(gs_calls *to, gs_tables *tables, int64_t size);

/* Appends the calls of a node; the caller has checked that its memory lies within buffers.  Returns GS_OK,
 * GS_UNSUPPORTED_OP (nothing was appended) or GS_NO_HOST_MEMORY.  If a source overlaps the result, and the kernel would
 * overwrite the source's values before it has read them, the first call copies the source to other memory. */
int gs_build_node(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables);

/* The part of gs_build_node for one instruction set (kernels_*.c): appends the calls of a node of any op but the matrix
 * products.  op_rules.h admits the node, and its result is not empty; what else its kernel needs is checked here. */
int gs_build_portable(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables);
int gs_build_avx2(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables);
int gs_build_avx512(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables);

#endif
