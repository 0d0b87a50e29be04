/* ggml_sched/policy.h -- policies of planning, and the codes that describe a plan.
 *
 * Numbers and plain structs of the planner and of the C API.  A number never changes its meaning.
 */
#ifndef GGML_SCHED_POLICY_H
#define GGML_SCHED_POLICY_H

#include <stddef.h>
#include <stdint.h>

/* -- policies ------------------------------------------------------------------------------------------------- */

/* How nodes are placed on backends. */
enum gs_placement {
    GS_PLACEMENT_DEFAULT = 0,   /* by weights, then neighbours, then bytes copied at split boundaries */
    GS_PLACEMENT_SEED = 1       /* the passes of ggml's first generation                              */
};

/* How offsets are chosen. */
enum gs_offsets {
    GS_OFFSETS_PACKED = 0,      /* packing: all lifetimes of an arena together                  */
    GS_OFFSETS_BEST_FIT = 1     /* best fit, in execution order, as ggml's first generation     */
};

/* In-place reuse: which part of a source's memory a node may reuse for its result.  The tail is what lies after the
 * reused part. */
enum gs_reuse {
    GS_REUSE_FIRST = 0,         /* as ggml's first generation: the front; the tail stays allocated */
    GS_REUSE_WHOLE = 1,         /* the whole memory, if the result has the same size               */
    GS_REUSE_FRONT = 2,         /* the front; the tail is freed                                    */
    GS_REUSE_ALL = 3            /* as FRONT; also a part at an offset, when the source is a view   */
};

typedef struct gs_policy {
    int32_t placement;          /* GS_PLACEMENT_*                                                             */
    int32_t offsets;            /* GS_OFFSETS_*                                                               */
    int32_t reuse;              /* GS_REUSE_*: the highest mode tried; each arena keeps its smallest result */
    int32_t leafs_first;        /* 1: leafs are allocated from the start; 0: from their first use             */
    int32_t stream;             /* 1: copies of weights share memory in turn; each compute makes them anew    */
    int32_t n_copies;           /* number of copy slots of a copy that every compute makes again, as in ggml  */
} gs_policy;

/* Values of gs_problem.usage: what the buffer of a resident tensor is used for.  Nodes are placed where their weights
 * are. */
#define GS_USAGE_ANY 0
#define GS_USAGE_WEIGHTS 1

/* -- codes of a plan ------------------------------------------------------------------------------------------ */

/* Reasons: which rule chose a tensor's backend.  X(name, number, the reason's name in messages) */
#define GS_REASONS(X) \
    X(NOTHING, 0, "nothing")                  \
    X(USER, 1, "user")                        \
    X(RESIDENT, 2, "resident")                \
    X(WEIGHT, 3, "weight")                    \
    X(SOURCE, 4, "source")                    \
    X(CONSUMER, 5, "consumer")                \
    X(ROOT, 6, "root")                        \
    X(FIRST, 7, "first")                      \
    X(UNSUPPORTED, 8, "unsupported")          \
    X(INPUT, 9, "input")                      \
    X(OFFLOAD, 10, "offload")                 \
    X(NEIGHBOUR, 11, "neighbour")             \
    X(UPGRADE, 12, "upgrade")                 \
    X(MOST_INPUTS, 13, "most inputs")         \
    X(BOUNDARY, 14, "boundary")               \
    X(USER_UNSUPPORTED, 15, "user unsupported")

enum gs_reason {
#define GS_X(name, number, called) GS_REASON_##name = number,
    GS_REASONS(GS_X)
#undef GS_X
    GS_N_REASONS
};

/* The name of a reason, NULL for an unknown number. */
static inline const char *gs_reason_name(int reason) {
    switch (reason) {
#define GS_X(name, number, called) case number: return called;
    GS_REASONS(GS_X)
#undef GS_X
    default: return NULL;
    }
}

/* States of an id's memory: bits of gs_plan.state. */
#define GS_STATE_ADDRESSED 1  /* has an address                                                       */
#define GS_STATE_INPLACE 2    /* shares its root's memory by in-place reuse                           */
#define GS_STATE_LATE 4       /* a leaf in memory that another tensor may have had: loaded at birth    */
#define GS_STATE_FREED 8      /* its memory is freed before the compute ends                          */
#define GS_STATE_EXCLUSIVE 16 /* a leaf or copy: no other tensor has its memory, no node writes to it  */
#define GS_STATE_WRITTEN 32   /* a root to whose memory nodes write: CPY, SET_ROWS, or in place        */
#define GS_STATE_DEPENDS 64   /* a node with alloc dependencies                                       */
#define GS_STATE_INNER 128    /* an inner member of a fusion group: its result is never written       */

/* How an arena's offsets were chosen: gs_arena_result.method. */
#define GS_METHOD_BEST_FIT 0  /* best fit: of the policy, or for chunks or freed tails   */
#define GS_METHOD_PACKED 1    /* packing: plus the number of the packing method          */
#define GS_METHOD_REPLAYED -1 /* replay of a reserved plan                               */

typedef struct gs_arena_result {
    int64_t nbytes;             /* bytes of all its chunks                                           */
    int64_t live_bytes;         /* the most bytes alive at one position                              */
    int64_t stride;             /* in gs_plan.offset, bytes from one chunk's start to the next's; 0: one chunk */
    int32_t method;             /* GS_METHOD_*                                                       */
    int32_t first_chunk;        /* its chunks: gs_plan.chunk_nbytes[first_chunk .. + n_chunks)       */
    int32_t n_chunks;
} gs_arena_result;

#endif
