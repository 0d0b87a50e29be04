/* ggml_sched/plan.h -- the input of planning, gs_request, and its result, gs_plan.
 *
 * Plain structs.  Ids below n_tensors are the graph's tensors, then come the copies, then the further copy slots of
 * copies that have several.  Backends are indices, best first; -1 is none.  Sizes and offsets are bytes.
 */
#ifndef GGML_SCHED_PLAN_H
#define GGML_SCHED_PLAN_H

#include <stdint.h>
#include "ggml_sched/graph.h"
#include "ggml_sched/policy.h"

/* -- requests ------------------------------------------------------------------------------------------------- */

/* The most bytes of one chunk of an arena, so that the offsets of many chunks stay below 2**63. */
#define GS_MAX_CHUNK ((int64_t)1 << 48)

/* Everything that a plan depends on. */
typedef struct gs_request {
    const gs_graph *g;
    gs_policy policy;
    int32_t n_backends;
    const int64_t *alignment;   /* [n_backends]                                                                 */
    const int64_t *max_buffer;  /* [n_backends], 0: no bound                                                    */
    const uint64_t *inplace;    /* [n_backends][GS_N_OPS]: bit k: source k may be the destination               */
    int32_t *resident;          /* of each root: backend of its buffer; -1: not resident, placed by the plan    */
    unsigned char *usage;       /* GS_USAGE_* of that buffer                                                    */
    int32_t *user;              /* [n_tensors]: assignment by the caller, -1 for none; NULL: no assignments     */
    unsigned char *supports;    /* [n_backends][n_tensors], NULL: everything is supported                       */
    unsigned char *offloads;    /* [n_backends][n_tensors], NULL: nothing is offloaded                          */
    unsigned char *reads;       /* [n_backends][n_backends]: b may read memory of c without a copy              */
    int64_t *nbytes;            /* [n_backends][n_tensors] sizes to allocate, NULL: the tensor's own byte size  */
    int32_t *buffer;            /* of each resident root: index of its buffer                                   */
    int32_t n_buffers;
    unsigned char *reads_buffer; /* [n_backends][n_buffers]: b may read that buffer without a copy              */
    int32_t shares;             /* whether any backend can read a buffer or memory of another backend           */
    int32_t n_groups;           /* fusion groups that backends offer, by first member; if 0, the arrays are NULL */
    int32_t *group_backend;     /* [n_groups]                                                                   */
    int32_t *group_begin;       /* [n_groups + 1], into group_member                                            */
    int32_t *group_member;      /* positions in the graph's node order, ascending in each group                 */
} gs_request;

/* -- plans ---------------------------------------------------------------------------------------------------- */

/* Owns its arrays (gs_plan_free).  Positions (birth, death, trimmed) are indices into `seq`. */
typedef struct gs_plan {
    int32_t n_backends;
    int32_t n_tensors;
    int32_t n_copies;
    int32_t n_places;           /* further copy slots: all slots beyond the first of each copy       */
    int32_t n;                  /* ids: n_tensors + n_copies + n_places                              */
    int32_t n_seq;
    int32_t n_splits;
    int32_t n_inputs;
    int32_t n_write_backs;
    int32_t n_chunks;
    int32_t n_groups;
    int32_t failed;             /* after a failure: the id that caused it, -1 for none               */
    /* Of each graph tensor: */
    int32_t *assign;            /* its backend, -1 for an unused leaf                                */
    unsigned char *reason;      /* GS_REASON_*                                                       */
    /* Of each split: */
    int32_t *split_backend;
    int32_t *split_start;       /* positions in the graph's node order                               */
    int32_t *split_stop;
    int32_t *split_inputs;      /* one past its last entry in `inputs`                               */
    int32_t *inputs;            /* copies in the order in which they are made; a copy may recur      */
    /* Of each copy: */
    int32_t *copy_like;         /* graph tensor with the copy's layout                               */
    int32_t *copy_from;         /* graph tensor that must exist before the copy is made              */
    int32_t *copy_backend;
    int32_t *copy_kept;         /* 1: an unchanged weight, copied once and kept for the next compute */
    int32_t *place_copy;        /* of each further copy slot: index of its copy, ascending           */
    /* Of each write-back: */
    int32_t *back_node;         /* a node that computes into a copy of memory of another backend     */
    int32_t *back_copy;         /* that copy                                                         */
    /* Of each id: */
    int32_t *like;              /* the graph tensor with the id's layout, op and flags               */
    int32_t *home;              /* the backend whose arena holds it, -1: memory outside the plan     */
    int32_t *root;              /* the id whose memory it shares, as a view or by in-place reuse; -1 */
    int32_t *birth;             /* position at which its memory is allocated; -1                     */
    int32_t *death;             /* position after which its memory is freed; n_seq if never          */
    int32_t *trimmed;           /* position at which the memory's tail is freed, where rest < size   */
    int32_t *src_begin;         /* ids that it reads: src[src_begin[i] .. src_begin[i+1])            */
    int32_t *src;               /* a copy in place of each source that is read through a copy        */
    int64_t *size;              /* bytes, rounded up to the alignment                                */
    int64_t *view_offs;         /* bytes from the start of the root's memory                         */
    int64_t *offset;            /* bytes from the start of its home's arena; -1 outside the plan     */
    int64_t *rest;              /* bytes that stay allocated once the tail is freed                  */
    unsigned char *op;
    unsigned char *flags;
    unsigned char *state;       /* GS_STATE_*                                                        */
    int32_t *seq;               /* ids in execution order, copies before the nodes of their split    */
    /* Of each backend: */
    gs_arena_result *arena;
    int64_t *chunk_nbytes;      /* [n_chunks]: the bytes of each buffer                              */
    /* Fusion groups, each computed at the position of its last member; NULL where there are none: */
    int32_t *group_begin;       /* [n_groups + 1], into group_member                                 */
    int32_t *group_member;      /* positions in the graph's node order, ascending in each group      */
    void *memory[4];            /* the blocks that hold the arrays                                   */
} gs_plan;

#endif
