/* ggml_sched/plan.h -- the input of planning, gs_problem, and its result, gs_plan.
 *
 * Plain structs of the planner and of the C API.  Backends are indices, best first; the last one is the host.  -1
 * means none.  Sizes and offsets are bytes.
 */
#ifndef GGML_SCHED_PLAN_H
#define GGML_SCHED_PLAN_H

#include <stdint.h>
#include "ggml_sched/policy.h"

/* GS_CONST is `const` for users of the C API, who do not write through these pointers.  The planner, which fills the
 * arrays, defines the macro as nothing. */
#ifndef GS_CONST
#define GS_CONST const
#endif

#define GS_MAX_BACKENDS 256

/* The most bytes of one chunk of an arena, so that the offsets of many chunks stay below 2**63. */
#define GS_MAX_CHUNK ((int64_t)1 << 48)

/* -- problems ------------------------------------------------------------------------------------------------- */

typedef struct gs_backend_info {
    const char *name;           /* for messages; may be NULL                                        */
    int64_t alignment;          /* of every address, in bytes, 1 .. 2**30                           */
    int64_t max_buffer;         /* bytes of the largest buffer; 0: no bound                         */
    const uint64_t *inplace;    /* [GS_N_OPS] bit k: the op may write its result over source k, if both have the same
                                 * layout; NULL: every source of the ops that ggml computes in place */
} gs_backend_info;

/* The inputs of a plan besides the graph.  All fields but `policy`, `n_backends` and `backends` may be zero or NULL.
 * Arrays of unsigned char, except `usage`, hold truth values: 0 is false, any other value true. */
typedef struct gs_problem {
    gs_policy policy;           /* begin with policy_default or policy_seed                         */
    int32_t n_backends;         /* 1 .. GS_MAX_BACKENDS                                             */
    int32_t n_buffers;          /* how many buffers `buffer` numbers; 0: a backend's residents share one buffer */
    int32_t n_groups;           /* fusion groups that backends offer                                */
    const gs_backend_info *backends; /* [n_backends]                                                */
    /* Residents: tensors that have memory before planning.  Entries of views are ignored: those of their roots
     * count. */
    GS_CONST int32_t *resident; /* [n_tensors] the backend that owns the tensor's buffer, or else the first backend that
                                 * reads this buffer; -1: not resident, placed by the plan          */
    GS_CONST unsigned char *usage; /* [n_tensors] GS_USAGE_*; NULL: GS_USAGE_ANY                    */
    GS_CONST int32_t *buffer;   /* [n_tensors] index of the tensor's buffer; NULL where n_buffers is 0 */
    GS_CONST unsigned char *reads_buffer; /* [n_backends][n_buffers] 1: the backend owns or reads the buffer;
                                 * NULL where n_buffers is 0                                        */
    GS_CONST unsigned char *reads; /* [n_backends][n_backends] 1: first reads second's memory; NULL: only its own */
    GS_CONST int32_t *assigned; /* [n_tensors] backend that the caller chose; -1: the planner chooses */
    /* Results of the support queries. */
    GS_CONST unsigned char *supports; /* [n_backends][n_tensors] 1: backend computes node; NULL: each computes all */
    GS_CONST unsigned char *offloads; /* [n_backends][n_tensors] 1: backend offers to compute the node, whose weights
                                 * are on the host; NULL: no backend offers any                     */
    GS_CONST int64_t *nbytes;   /* [n_backends][n_tensors] bytes that the backend allocates for the tensor, at least
                                 * the tensor's own bytes; NULL: the tensor's own bytes             */
    /* Fusion groups: nodes that a backend computes as one kernel; ordered by first member, then backend. */
    GS_CONST int32_t *group_backend; /* [n_groups] the backend that offers the group                */
    GS_CONST int32_t *group_begin; /* [n_groups + 1] index in group_member of each group's first member, and the end */
    GS_CONST int32_t *group_member; /* positions in the graph's node order; each group has two or more, ascending */
} gs_problem;

/* -- plans ---------------------------------------------------------------------------------------------------- */

/* The arrays of a plan: memory of the plan, valid until plan_free.  Ids below n_tensors are the graph's tensors, then
 * come the copies, then the further copy slots of copies that have several.  Positions (birth, death, trimmed) are
 * indices into `seq`.  Where the arena of an id has several chunks, the id is in chunk offset / stride, at
 * offset % stride bytes from the chunk's start. */
typedef struct gs_plan {
    int32_t n_backends;
    int32_t n_tensors;
    int32_t n_copies;
    int32_t n_slots;            /* further copy slots: all slots beyond the first of each copy      */
    int32_t n;                  /* ids: n_tensors + n_copies + n_slots                              */
    int32_t n_seq;              /* ids in `seq`                                                     */
    int32_t n_splits;
    int32_t n_inputs;           /* entries of `inputs`                                              */
    int32_t n_write_backs;
    int32_t n_chunks;           /* chunks of all arenas together                                    */
    int32_t n_groups;
    /* Of each graph tensor: */
    GS_CONST int32_t *assign;   /* its backend; -1: a leaf that nothing uses                        */
    GS_CONST unsigned char *reason; /* GS_REASON_*                                                  */
    /* Of each split: */
    GS_CONST int32_t *split_backend;
    GS_CONST int32_t *split_start; /* position of its first node in the graph's node order          */
    GS_CONST int32_t *split_stop; /* one past the position of its last node                         */
    GS_CONST int32_t *split_inputs; /* one past its last entry in `inputs`, after those of earlier splits */
    GS_CONST int32_t *inputs;   /* [n_inputs] indices of copies, in the order in which they are made; may recur */
    /* Of each copy: */
    GS_CONST int32_t *copy_like; /* graph tensor with the copy's layout                             */
    GS_CONST int32_t *copy_from; /* graph tensor that must have its data before the copy is made    */
    GS_CONST int32_t *copy_backend;
    GS_CONST int32_t *copy_kept; /* 1: of a weight; made once, and used by later computes too       */
    GS_CONST int32_t *slot_copy; /* [n_slots] of each further copy slot: index of its copy, ascending */
    GS_CONST int32_t *back_node; /* [n_write_backs] a node that computes into a copy of another backend's memory */
    GS_CONST int32_t *back_copy; /* [n_write_backs] the copy that back_node computes into, then written back */
    /* Of each id: */
    GS_CONST int32_t *like;     /* the graph tensor with the id's layout, op and flags              */
    GS_CONST int32_t *arena_of; /* the backend whose arena holds it; -1: memory outside the plan    */
    GS_CONST int32_t *root;     /* the id whose memory it shares, as a view or by in-place reuse; -1: its own */
    GS_CONST int32_t *birth;    /* position at which its memory is allocated; -1: never             */
    GS_CONST int32_t *death;    /* position after which its memory is freed; n_seq if never         */
    GS_CONST int32_t *trimmed;  /* position at which its memory's tail is freed, if rest < size     */
    GS_CONST int32_t *src_begin; /* [n + 1] ids that it reads: src[src_begin[i] .. src_begin[i + 1]) */
    GS_CONST int32_t *src;      /* ids; in place of a source of which it reads a copy, the copy     */
    GS_CONST int64_t *size;     /* bytes, rounded up to the alignment                               */
    GS_CONST int64_t *view_offs; /* bytes from the start of the root's memory                       */
    GS_CONST int64_t *offset;   /* bytes from the start of its arena; -1: memory outside the plan   */
    GS_CONST int64_t *rest;     /* bytes that stay allocated once the tail is freed                 */
    GS_CONST unsigned char *op;
    GS_CONST unsigned char *flags;
    GS_CONST unsigned char *state; /* GS_STATE_*; EXCLUSIVE and WRITTEN once plan_find_exclusive was called */
    GS_CONST int32_t *seq;      /* [n_seq] ids in execution order, copies before the nodes of their split */
    /* Of each backend: */
    GS_CONST gs_arena_result *arena;
    GS_CONST int64_t *chunk_nbytes; /* [n_chunks]: the bytes of each buffer to allocate             */
    /* Fusion groups, each computed at the position of its last member; NULL where there are none: */
    GS_CONST int32_t *group_begin; /* [n_groups + 1] index in group_member of each group's first member, and the end */
    GS_CONST int32_t *group_member; /* positions in the graph's node order, ascending in each group */
} gs_plan;

#endif
