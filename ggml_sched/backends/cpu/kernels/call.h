/* call.h -- calls of compiled kernels: what a graph becomes when it is compiled for the CPU backend.
 *
 * A node becomes one call or a few, or parts of an earlier node's call (matmul.c).  A call is cut into parts of a fixed
 * size, which threads take in any order; no part writes memory that another part reads or writes.  A barrier separates
 * two calls.  Results depend on values, shapes and strides, never on addresses, on the thread that runs a part, or on
 * the number of threads.
 */
#ifndef GGML_SCHED_KERNELS_CALL_H
#define GGML_SCHED_KERNELS_CALL_H

#include <stdint.h>
#include "ggml_sched/graph.h"
#include "ggml_sched/status.h"

#define GS_MAX_ARGS 8

typedef struct gs_call gs_call;

/* A wrong value in a source, found while a kernel ran.  The Python code raises the error that describes it. */
typedef struct gs_fault {
    int32_t kind;               /* GS_FAULT_*                                   */
    int32_t source;             /* which source of the node holds a wrong value */
    int64_t value;              /* the wrong value                              */
    int64_t limit;              /* the value should be in 0 .. limit - 1        */
} gs_fault;

#define GS_FAULT_NONE 0
#define GS_FAULT_ID 1           /* a row or expert id out of range              */

/* Computes one part of a call.  The tables are the bytes before `shared`.  A kernel that finds a wrong value fills
 * `fault`; its caller has set the kind to GS_FAULT_NONE. */
typedef void (*gs_run)(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault);

/* Computes parts part .. part + n - 1 of a call, any of them, to the same bits as gs_run. */
typedef void (*gs_run_several)(const gs_call *call, int32_t part, int32_t n, char *shared, char *scratch,
                             gs_fault *fault);

struct gs_call {
    gs_run run;
    const gs_node *node;        /* the first one, where the call computes several */
    int32_t n_parts;
    int32_t position;           /* index of `node`, as given to gs_build_node   */
    int64_t arg[GS_MAX_ARGS];   /* numbers and pointers; each kernel has its own meaning for them */
    gs_run_several run_several; /* NULL: as gs_run, one part after the other    */
    int32_t at_once;            /* n > 0: run_several is faster for parts n * i .. n * i + n - 1; 0: for none */
};

/* A growing list of calls.  While calls run, they have three kinds of work memory, all at addresses that are multiples
 * of 64: `tables` bytes in which a call leaves a table for calls of many nodes (build.h), `shared` bytes in which it
 * leaves data for the next calls, of its node or of later ones that need the same, and `scratch` bytes for each thread.
 * `shared` and `scratch` are the largest that any node needs. */
typedef struct gs_calls {
    gs_call *call;
    int32_t n;
    int32_t room;               /* calls for which `call` has memory            */
    int64_t tables;
    int64_t shared;
    int64_t scratch;
    int64_t copied;             /* bytes of tensors that are copied before kernels use them, kept with the calls */
    void *kept;                 /* the newest block of gs_keep; each block points to the one before */
} gs_calls;

/* Appends a copy of `call`; returns GS_OK or GS_NO_HOST_MEMORY. */
int gs_add_call(gs_calls *to, const gs_call *call);

/* Memory for data that calls point to, at an address that is a multiple of 64; valid until gs_free_calls.  NULL if
 * malloc fails. */
void *gs_keep(gs_calls *to, int64_t size);

/* Frees the calls and all memory from gs_keep, and leaves an empty list. */
void gs_free_calls(gs_calls *of);

/* The instruction set that kernels may use on this processor (see isa.c). */
enum gs_isa {
    GS_ISA_PORTABLE = 0,
    GS_ISA_AVX2 = 1,
    GS_ISA_AVXVNNI = 2,         /* AVX2 with the dot product of bytes */
    GS_ISA_AVX512 = 3,          /* F BW DQ VL VNNI */
    GS_ISA_NEON = 4,
    GS_ISA_DOTPROD = 5          /* NEON with the dot product of bytes */
};
int gs_isa(void);

/* Whether the processor reads ahead what fast loops read in order, and prefetches slow these loops down: AMD's with
 * AVX-512.  This was measured on a Zen 4, where one thread reads f16 weights at 34 GB/s without prefetches and at 27
 * with them; on a Xeon loops with prefetches were a tenth faster.  GGML_SCHED_ISA does not change the answer. */
int gs_reads_ahead(void);

/* Whether the compiler has the instructions of AVX-VNNI. */
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : defined(__GNUC__) && __GNUC__ >= 11)
#define GS_HAS_AVXVNNI 1
#else
#define GS_HAS_AVXVNNI 0
#endif

#endif
