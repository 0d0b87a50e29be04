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
    int32_t reuse;              /* GS_REUSE_*: the highest mode tried; an arena uses the one that makes it smallest */
    int32_t leafs_first;        /* leafs are allocated from the start, not from their first use               */
    int32_t stream;             /* copies of weights share memory, one after the other; none is kept          */
    int32_t n_copies;           /* copy slots of each copy that every compute makes again, as in ggml         */
} gs_policy;

/* What the buffer of a resident tensor is used for: gs_problem.usage.  Nodes are placed where their weights are. */
#define GS_USAGE_ANY 0
#define GS_USAGE_WEIGHTS 1

/* -- codes of a plan ------------------------------------------------------------------------------------------ */

/* Reasons: the rule that chose a tensor's backend: X(name, number, the reason's name in messages) */
#define GS_REASONS(X) \
    X(NOTHING, 0, "nothing")          \
    X(USER, 1, "user")                \
    X(RESIDENT, 2, "resident")        \
    X(WEIGHT, 3, "weight")            \
    X(SOURCE, 4, "source")            \
    X(CONSUMER, 5, "consumer")        \
    X(ROOT, 6, "root")                \
    X(FIRST, 7, "first")              \
    X(UNSUPPORTED, 8, "unsupported")  \
    X(INPUT, 9, "input")              \
    X(OFFLOAD, 10, "offload")         \
    X(NEIGHBOUR, 11, "neighbour")     \
    X(UPGRADE, 12, "upgrade")         \
    X(MOST_INPUTS, 13, "most inputs") \
    X(BOUNDARY, 14, "boundary")

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
#define GS_STATE_LATE 4       /* a leaf whose memory held another tensor before: loaded at its birth  */
#define GS_STATE_FREED 8      /* its memory is freed before the compute ends                          */
#define GS_STATE_EXCLUSIVE 16 /* no other tensor ever has its memory, and no node writes to it        */
#define GS_STATE_WRITTEN 32   /* nodes write to it through views                                      */
#define GS_STATE_DEPENDS 64   /* a node with alloc dependencies                                       */
#define GS_STATE_INNER 128    /* an inner member of a fusion group: its result is never written       */

/* How an arena's offsets were chosen: gs_arena_result.method. */
#define GS_METHOD_BEST_FIT 0  /* best fit: by the policy, for chunks, or to use freed tails */
#define GS_METHOD_PACKED 1    /* packing; the number of the packing method is added        */
#define GS_METHOD_REPLAYED -1 /* from a reserved plan                                      */

typedef struct gs_arena_result {
    int64_t nbytes;             /* bytes of all its chunks                                           */
    int64_t live_bytes;         /* the most bytes alive at one position                              */
    int64_t stride;             /* bytes from one chunk's start to the next's in `offset`; 0: it has one chunk */
    int32_t method;             /* GS_METHOD_*                                                       */
    int32_t first_chunk;        /* its chunks: gs_plan.chunk_nbytes[first_chunk .. + n_chunks)       */
    int32_t n_chunks;
} gs_arena_result;

#endif
