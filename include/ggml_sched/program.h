/* ggml_sched/program.h -- programs, and the backends that run them.
 *
 * gs_program is what ggml_sched/planning/program.py describes, as arrays: the steps of a compute in the order in which
 * they are issued.  The steps of one backend's queue run one after the other; waits alone order steps of different
 * queues.  gs_backend is a backend as a table of functions.  Sizes and offsets are bytes; ids are those of gs_plan.
 *
 * Of the two names in a GS_RENAMED the second is a former one, for one more release.
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
    GS_STEP_LOAD = 0,         /* write the data that the caller set for a leaf to locations[0]      */
    GS_STEP_COPY = 1,         /* copy a tensor to another backend                                   */
    GS_STEP_COPY_EXPERTS = 2, /* copy the experts of a weight whose numbers are in the tensor `ids` */
    GS_STEP_RUN = 3,          /* compute the nodes at positions first .. last                       */
    GS_STEP_WRITE_BACK = 4    /* copy a node's result from locations[0] to the node's own memory    */
} gs_step_kind;

/* The location of a tensor or a copy slot: bytes from the start of buffer `chunk` of a backend's arena. */
typedef struct gs_location {
    int32_t id;
    int32_t backend;
    int32_t chunk;
    int64_t offset;
} gs_location;

typedef gs_location gs_place;   /* the former name */

/* Step `step` of the compute `back` before this one (0: of this one) must be done. */
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
    int32_t tensor;             /* leaf, source, weight or node; -1 for a run                       */
    int32_t ids;                /* of copied experts: the tensor with their numbers; else -1        */
    int32_t first;              /* of a run: positions in the graph's node order; else -1           */
    int32_t last;
    GS_RENAMED { int32_t location, place; }; /* index in `locations` of where data goes, or comes from for a write-back;
                                 * for a run, of the copy into which its last node computes         */
    int32_t n_slots;            /* compute number k uses location + k % n_slots; 0 for a run that computes into the
                                 * nodes' own memory                                                */
    int32_t read;               /* of a run: index in `reads`                                       */
    int32_t n_reads;
    int32_t wait;               /* index in `waits`                                                 */
    int32_t n_waits;
    GS_RENAMED { int32_t if_changed, keeps; }; /* 1: the step is left out of a compute if its data has not changed */
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
    int32_t n_ids;              /* as gs_plan.n                                                     */
    GS_RENAMED { int32_t copy_slots, turns; }; /* the most slots of a copy, used by consecutive computes in turn */
    int32_t reach;              /* the largest gs_wait.back                                         */
    const gs_step *steps;
    GS_RENAMED { const gs_location *locations, *places; };
    const gs_read *reads;
    const gs_wait *waits;
    const int32_t *inputs;      /* leafs that the caller must set                                   */
    void *const *address;       /* [n_ids] the first byte of each id; NULL: it has no memory        */
} gs_program;

/* -- backends ------------------------------------------------------------------------------------------------- */

/* What a backend's function returns beside GS_OK and errors: it can not do this, and has done nothing. */
#define GS_NOT_DONE 1

/* The nodes of one run, for gs_backend.run and for backends that are compiled with Cython.  All pointers are valid
 * until program_free, and equal in each compute that has the same `step` and `turn`. */
typedef struct gs_run_nodes {
    int32_t n_nodes;
    int32_t step;               /* number of the step in the program                                */
    int32_t turn;               /* which slots of copies the nodes use                              */
    int32_t n_groups;           /* fusion groups                                                    */
    const gs_node *const *nodes; /* nodes that compute, in order, with addresses                    */
    const int32_t *ids;         /* their ids in the graph; NULL where the nodes have none           */
    const int32_t *group_begin; /* [n_groups + 1] index in group_member of each group's first member, and the end */
    const int32_t *group_member; /* ascending indices in `nodes`                                    */
    const unsigned char *needed; /* [n_nodes] 0: a result that only its group reads: it need not be written; NULL: all
                                 * results are needed                                               */
} gs_run_nodes;

/* A backend.  `context` is the first argument of each function.  A function returns GS_OK or a negative gs_status.  It
 * may then have written a line about the failure to error->message, which is empty before; the caller fills in all
 * other fields of *error.  No C++ exception may leave a function.
 *
 * Where functions return when their work is done, the functions of queues and events are NULL.  Otherwise all calls
 * are executed in order (the backend's queue), and `synchronize` is required; the event functions are all given, or all
 * NULL: then `synchronize` is called where an event would be recorded. */
typedef struct gs_backend {
    void *context;
    const char *name;           /* for messages; may be NULL                                        */
    int32_t concurrent_copies;  /* 1: other queues may write and read its memory while it computes  */
    /* Allocate at least nbytes > 0 of memory whose address is a multiple of the backend's alignment.  Tensors in it
     * have the address `*memory` plus their offset, which need not be an address of the host. */
    int (*alloc)(void *context, int64_t nbytes, void **memory, gs_error *error);
    void (*free)(void *context, void *memory, int64_t nbytes);
    /* Copy host memory to the backend's memory, in its queue.  `from` is used before the function returns. */
    int (*write)(void *context, void *to, const void *from, int64_t nbytes, gs_error *error);
    /* Copy the backend's memory to host memory after all that is queued; done when the function returns. */
    int (*read)(void *context, void *to, const void *from, int64_t nbytes, gs_error *error);
    /* Copy between the memory of two backends, of which one is this one, in this backend's queue.  GS_NOT_DONE: the
     * data goes through host memory.  May be NULL. */
    int (*copy)(void *context, const struct gs_backend *to_backend, void *to, const struct gs_backend *from_backend,
                const void *from, int64_t nbytes, gs_error *error);
    /* Compute nodes, in order; all of them and their sources are in memory that this backend reads. */
    int (*run)(void *context, const gs_run_nodes *run, gs_error *error);
    /* Wait on the host until the queue is empty; reports errors of work that was queued. */
    int (*synchronize)(void *context, gs_error *error);
    /* Events.  An event that is recorded again stands for the new point in the queue; waits issued before stay as they
     * are. */
    int (*event_new)(void *context, void **event, gs_error *error);
    void (*event_free)(void *context, void *event);
    int (*event_record)(void *context, void *event, gs_error *error);
    /* Let the work queued from now on wait for an event of another backend.  GS_NOT_DONE: the host waits.  May be NULL
     * even where the other functions are given. */
    int (*event_wait)(void *context, const struct gs_backend *of, void *event, gs_error *error);
    int (*event_synchronize)(void *context, void *event, gs_error *error); /* wait on the host */
} gs_backend;

#endif
