/* call.h -- calls of compiled kernels; a plan is a list of them.
 *
 * A node becomes one call or a few; a call is cut into parts of a fixed size, which threads take in any order; no part
 * writes memory that another part reads or writes.  A barrier separates two calls.  Results depend on values,
 * shapes and strides, never on addresses, on the thread that runs a part, or on the number of threads.
 */
#ifndef GGML_SCHED_KERNELS_CALL_H
#define GGML_SCHED_KERNELS_CALL_H

#include <stdint.h>
#include "ggml_sched/graph.h"
#include "ggml_sched/status.h"

#define GS_MAX_ARGS 8

typedef struct gs_call gs_call;

/* Computes a part; 0, or a GS_FAULT_* with details in `fault`. */
typedef struct gs_fault {
    int32_t kind;               /* GS_FAULT_*                                   */
    int32_t source;             /* which source of the node holds a wrong value */
    int64_t value;
    int64_t limit;              /* the value should be in 0 .. limit - 1        */
} gs_fault;

#define GS_FAULT_NONE 0
#define GS_FAULT_ID 1           /* a row or expert id out of range              */

typedef void (*gs_run)(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault);

struct gs_call {
    gs_run run;
    const gs_node *node;
    int32_t n_parts;
    int32_t position;           /* of the node among those of the plan          */
    int64_t arg[GS_MAX_ARGS];   /* the kernel's arguments                       */
};

/* A growing list of calls.  All calls of one node share `shared` bytes, each thread has `scratch` bytes, both at a
 * multiple of 64; the sizes are the largest that a node needs. */
typedef struct gs_calls {
    gs_call *call;
    int32_t n;
    int32_t room;
    int64_t shared;
    int64_t scratch;
    void *kept;                 /* blocks of gs_keep                            */
} gs_calls;

/* Appends a copy; GS_OK or GS_NO_HOST_MEMORY. */
int gs_add_call(gs_calls *to, const gs_call *call);

/* Memory at a multiple of 64, at a fixed address until the calls are freed; NULL without memory. */
void *gs_keep(gs_calls *to, int64_t size);

/* Frees the calls and the memory of gs_keep; the list is empty then. */
void gs_free_calls(gs_calls *of);

/* Which instructions kernels may use here. */
enum gs_isa { GS_ISA_PORTABLE = 0, GS_ISA_AVX2 = 1, GS_ISA_AVX512 = 2 /* F BW DQ VL VNNI */ };
int gs_isa(void);

#endif
