/* ggml_sched/program.h -- programs, and the backends that run them.
 *
 * gs_program is a Program of ggml_sched/planning/program.py as arrays: the steps of a compute in the order in which
 * they are issued.  The steps of one backend's queue run one after the other; waits alone order steps of different
 * queues.  gs_backend is a backend as a table of functions.  Sizes and offsets are bytes; ids are those of gs_plan.
 *
 * A GS_RENAMED gives a field two names: the second is a former one, valid for one more release.
 */
#ifndef GGML_SCHED_PROGRAM_H
#define GGML_SCHED_PROGRAM_H

#include <stddef.h>
#include <stdint.h>
#include "ggml_sched/graph.h"
#include "ggml_sched/status.h"

/* An unnamed union, which C99 lacks. */
#ifdef __GNUC__
#define GS_RENAMED __extension__ union
#else
#define GS_RENAMED union
#endif

/* -- programs ------------------------------------------------------------------------------------------------- */

typedef enum gs_step_kind {
    GS_STEP_LOAD = 0,         /* write the data that was set for a leaf to the step's location      */
    GS_STEP_COPY = 1,         /* copy a tensor to another backend                                   */
    GS_STEP_COPY_EXPERTS = 2, /* copy the experts of a weight whose numbers are in the tensor `ids` */
    GS_STEP_RUN = 3,          /* compute the nodes at positions first .. last                       */
    GS_STEP_WRITE_BACK = 4    /* copy from the step's location to the memory of a node              */
} gs_step_kind;

/* The location of a tensor or a copy slot: bytes from the start of buffer `chunk` of a backend's arena. */
typedef struct gs_location {
    int32_t id;
    int32_t backend;
    int32_t chunk;
    int64_t offset;
} gs_location;

typedef gs_location gs_place;   /* the former name */

/* A wait for step number `step` of the compute that was `back` computes before this one; back 0: of this compute. */
typedef struct gs_wait {
    int32_t step;
    int32_t back;
} gs_wait;

/* The node at `position` reads a copy instead of its source in `slot`. */
typedef struct gs_read {
    int32_t position;
    int32_t slot;
    GS_RENAMED { int32_t location, place; }; /* index in `locations` of the copy's first slot            */
    int32_t n_slots;
} gs_read;

typedef struct gs_step {
    int32_t kind;               /* GS_STEP_*                                                        */
    int32_t backend;            /* the backend in whose queue the step is                           */
    int32_t tensor;             /* id of the tensor whose data moves; -1 for a run                  */
    int32_t ids;                /* of COPY_EXPERTS: the tensor with the experts' numbers; else -1   */
    int32_t first;              /* of a run: positions in the graph's node order; else -1           */
    int32_t last;
    GS_RENAMED { int32_t location, place; }; /* index in `locations` of the data's destination; of a write-back: of its
                                 * source; of a run: of the copy into which the last node computes  */
    int32_t n_slots;            /* compute number k uses location + k % n_slots; 0: a run whose nodes compute into
                                 * their own memory                                                 */
    int32_t read;               /* of a run: index in `reads` of its first gs_read                  */
    int32_t n_reads;
    int32_t wait;               /* index in `waits` of its first gs_wait                            */
    int32_t n_waits;
    GS_RENAMED { int32_t if_changed, keeps; }; /* 1: a compute leaves the step out if its data has not changed */
    int32_t awaited;            /* 1: other steps may wait for it: an event is recorded at its end  */
    int64_t start;              /* of a load: the first byte of the leaf that is loaded             */
    int64_t nbytes;             /* of a load: how many bytes of the leaf are loaded                 */
} gs_step;

/* The arrays of a program: memory of the program, valid until program_free. */
typedef struct gs_program {
    int32_t n_steps;
    int32_t n_slots;            /* entries of `locations`                                           */
    int32_t n_reads;
    int32_t n_waits;
    int32_t n_inputs;
    int32_t n_ids;              /* ids of the plan: gs_plan.n                                       */
    GS_RENAMED { int32_t copy_slots, turns; }; /* the most slots of a copy, used by consecutive computes in turn */
    int32_t reach;              /* the largest gs_wait.back                                         */
    const gs_step *steps;
    GS_RENAMED { const gs_location *locations, *places; };
    const gs_read *reads;
    const gs_wait *waits;
    const int32_t *inputs;      /* leafs that the caller must set                                   */
    void *const *address;       /* [n_ids] address of each id's first byte; NULL: it has no memory  */
} gs_program;

/* -- backends ------------------------------------------------------------------------------------------------- */

/* A backend's function returns this, in place of GS_OK or an error, if it cannot do what the call is for; it has then
 * done nothing. */
#define GS_NOT_DONE 1

/* The nodes of one run, for gs_backend.run and for backends that are compiled with Cython.  All pointers are valid
 * until program_free, and equal in each compute that has the same `step` and `turn`. */
typedef struct gs_run_nodes {
    int32_t n_nodes;
    int32_t step;               /* number of the step in the program                                */
    int32_t turn;               /* which slot the nodes use of copies that have several             */
    int32_t n_groups;           /* fusion groups                                                    */
    const gs_node *const *nodes; /* nodes that compute, in order, with addresses                    */
    const int32_t *ids;         /* the nodes' ids in the graph; NULL where a Scheduler computes     */
    const int32_t *group_begin; /* [n_groups + 1] index in group_member of each group's first member, and the end */
    const int32_t *group_member; /* ascending indices in `nodes`                                    */
    const unsigned char *needed; /* [n_nodes] 0: a member of a group whose result, which only this group reads, need
                                 * not be written; NULL: all results are needed                     */
} gs_run_nodes;

/* A backend.  `context` is the first argument of each function.  A function returns GS_OK or a negative gs_status.
 * Before it returns a failure it may write a line about that to error->message, which is empty; the caller fills in all
 * other fields of *error.  No C++ exception may leave a function.
 *
 * A backend whose functions return when their work is done has no queue: `synchronize` and the event functions are
 * NULL.  A backend with a queue executes all calls in order, and must have `synchronize`.  It has all event functions,
 * or none: then `synchronize` is called where an event would be recorded. */
typedef struct gs_backend {
    void *context;
    const char *name;           /* for messages; may be NULL                                        */
    int32_t concurrent_copies;  /* 1: other queues may write and read its memory while it computes  */
    /* Allocate at least nbytes > 0 of memory whose address is a multiple of the backend's alignment.  Tensors in it
     * have the address `*memory` plus their offset, which need not be an address of the host. */
    int (*alloc)(void *context, int64_t nbytes, void **memory, gs_error *error);
    void (*free)(void *context, void *memory, int64_t nbytes);
    /* Copy host memory to the backend's memory, in its queue.  `from` is read before the function returns. */
    int (*write)(void *context, void *to, const void *from, int64_t nbytes, gs_error *error);
    /* Copy the backend's memory to host memory, after all work that is queued; complete on return. */
    int (*read)(void *context, void *to, const void *from, int64_t nbytes, gs_error *error);
    /* Copy from one backend's memory to another's, as work of this backend's queue; this backend is one of the two.
     * May be NULL, or return GS_NOT_DONE: the data then goes through host memory. */
    int (*copy)(void *context, const struct gs_backend *to_backend, void *to, const struct gs_backend *from_backend,
                const void *from, int64_t nbytes, gs_error *error);
    /* Compute nodes, in order; all of them and their sources are in memory that this backend reads. */
    int (*run)(void *context, const gs_run_nodes *run, gs_error *error);
    /* Wait on the host until the queue is empty; returns the first error of work that was queued. */
    int (*synchronize)(void *context, gs_error *error);
    /* Events.  Recording an event again moves it to the new point in the queue; a wait that was issued before stays a
     * wait for the old point. */
    int (*event_new)(void *context, void **event, gs_error *error);
    void (*event_free)(void *context, void *event);
    int (*event_record)(void *context, void *event, gs_error *error);
    /* Let the work that is queued on this backend from now on wait for an event of the backend `of`.  May be NULL, even
     * where the other event functions are given, or return GS_NOT_DONE: the host then waits. */
    int (*event_wait)(void *context, const struct gs_backend *of, void *event, gs_error *error);
    int (*event_synchronize)(void *context, void *event, gs_error *error); /* wait on the host */
} gs_backend;

#endif
