/* ggml_sched/policy.h -- how a plan is made, and the words of its answer.
 *
 * Numbers and plain structs that planning inside the package and the C API share: a number never changes its meaning.
 */
#ifndef GGML_SCHED_POLICY_H
#define GGML_SCHED_POLICY_H

#include <stddef.h>
#include <stdint.h>

/* -- how to decide -------------------------------------------------------------------------------------------- */

enum gs_placement {
    GS_PLACEMENT_DEFAULT = 0,   /* weights, neighbours, boundaries             */
    GS_PLACEMENT_SEED = 1       /* the passes of ggml's first generation       */
};

enum gs_offsets {
    GS_OFFSETS_PACKED = 0,      /* all lifetimes seen together                 */
    GS_OFFSETS_BEST_FIT = 1     /* one after the other, as the first generation */
};

/* In-place reuse: which part of another tensor's memory a node may take over. */
enum gs_reuse {
    GS_REUSE_FIRST = 0,         /* as the first generation: the front, whose tail stays taken */
    GS_REUSE_WHOLE = 1,         /* only memory that it fills                                  */
    GS_REUSE_FRONT = 2,         /* the front, the tail given back                             */
    GS_REUSE_ALL = 3            /* any part, by a view                                        */
};

typedef struct gs_policy {
    int32_t placement;          /* GS_PLACEMENT_*                                                             */
    int32_t offsets;            /* GS_OFFSETS_*                                                               */
    int32_t reuse;              /* GS_REUSE_*: the most that is tried; less where that makes an arena smaller */
    int32_t leafs_first;        /* leafs and kept copies are there from the start, not from their first use   */
    int32_t stream;             /* weights of other backends take turns in one place; none is kept            */
    int32_t n_places;           /* of each copy that every compute makes anew                                 */
} gs_policy;

#define GS_USAGE_ANY 0
#define GS_USAGE_WEIGHTS 1

/* -- what was decided ----------------------------------------------------------------------------------------- */

/* Why a tensor is where it is, one code for each rule: X(name, number, what people call it) */
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

/* What people call a rule, NULL for a number that none has. */
static inline const char *gs_reason_name(int reason) {
    switch (reason) {
#define GS_X(name, number, called) case number: return called;
    GS_REASONS(GS_X)
#undef GS_X
    default: return NULL;
    }
}

/* What an id is to its memory: bits of gs_plan.state. */
#define GS_STATE_ADDRESSED 1  /* has an address                                                      */
#define GS_STATE_TOOK_OVER 2  /* shares its root's memory by in-place reuse                          */
#define GS_STATE_LATE 4       /* a leaf born where something else has lived before                   */
#define GS_STATE_FREED 8      /* its memory was given back before the end                            */
#define GS_STATE_EXCLUSIVE 16 /* nothing else ever lives in its memory, and no node writes to it     */
#define GS_STATE_WRITTEN 32   /* nodes write to it by the names of its views                         */
#define GS_STATE_DEPENDS 64   /* a node that keeps tensors until it is done                          */
#define GS_STATE_INNER 128    /* computed inside a group that alone reads it: its data is nowhere    */

/* How an arena's offsets were chosen: gs_arena_result.method. */
#define GS_METHOD_BEST_FIT 0  /* on the way, in chunks, or because of tails given back */
#define GS_METHOD_PACKED 1    /* plus the method of the packing                        */
#define GS_METHOD_REPLAYED -1 /* those of a reserved plan                              */

typedef struct gs_arena_result {
    int64_t nbytes;             /* of all its chunks                                                 */
    int64_t live_bytes;         /* the largest sum of live bytes at any position                     */
    int64_t stride;             /* distance of the chunks in `offset`; 0: one chunk                  */
    int32_t method;             /* GS_METHOD_*                                                       */
    int32_t first_chunk;        /* its chunks: gs_plan.chunk_nbytes[first_chunk .. + n_chunks)       */
    int32_t n_chunks;
} gs_arena_result;

#endif
