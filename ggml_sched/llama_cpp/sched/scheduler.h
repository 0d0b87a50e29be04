/* ggml_sched/llama_cpp/sched/scheduler.h -- a scheduler of ggml's on our planner (ggml_backend_sched).
 *
 *     scheduler.c  ggml's functions: what a client calls, in ggml's order and with its answers
 *     prepare.c    graphs with their plans: found again, or read, planned, shown to backends that reorder them
 *     again.c      whether a graph is one that was planned
 *     shelves.c    what is kept of a scheduler for the next
 *     ask.c        what backends, buffers and the client say of a graph: the planner's problem
 *     planning.c   the plan of a graph that was read: another's, or a new one
 *     pools.c      where in which buffers the ids of a plan lie
 *     bind.c       addresses, copies and parts: what a graph needs to be computed
 *     compute.c    computing it
 *     experts.c    copying the used experts of weights on the host
 *     listed.c     the schedulers of the process, for those who look at their plans
 *
 * A scheduler is one thread's at a time, as ggml's are; different ones are independent.
 * Invariant: what a client sees of its graph is as with ggml: after an allocation, nodes name the copies that they
 * read among their sources.  A graph that comes again gets its own sources back first, where it is one of the last two
 * that its plan was bound to: a client that builds its graphs anew has no older ones.
 */
#ifndef GGML_SCHED_LLAMA_CPP_SCHED_SCHEDULER_H
#define GGML_SCHED_LLAMA_CPP_SCHED_SCHEDULER_H

#include <pthread.h>
#include <string.h>
#include "arena.h"
#include "arrays.h"
#include "counts.h"
#include "fused.h"
#include "looks.h"
#include "names.h"
#include "runtime.h"

#define GH_MAX_BACKENDS 16
#define GH_MAX_PLACES 4     /* of each copy, where computes overlap: ggml's number                     */
#define GH_N_PREPARED 24    /* graphs that are remembered                                              */
#define GH_N_REPLAYED 4     /* of them, those that have a reserved one's plan                          */
#define GH_SCHED_MAGIC UINT64_C(0x6768736368656431) /* ggml's own begin with small numbers             */

/* What tensors somebody chose a backend for, in the order in which it was said first. */
typedef struct gh_choices {
    int32_t n;
    int32_t room;
    const gx_tensor **tensor;
    int32_t *backend;
    uint32_t *place;        /* an open-addressing table of index + 1, `mask` + 1 places                */
    uint32_t mask;
} gh_choices;

void gh_choices_clear(gh_choices *c);
bool gh_choices_set(gh_choices *c, const gx_tensor *tensor, int32_t backend);
int32_t gh_choices_get(const gh_choices *c, const gx_tensor *tensor); /* -1 */
void gh_choices_free(gh_choices *c);

/* Where an id lies: in which buffer of which pool. */
typedef struct gh_spot {
    int32_t pool;           /* -1: nowhere                                                             */
    int32_t chunk;
    int64_t offset;
} gh_spot;

/* The address of a tensor in the buffers that there are. */
typedef struct gh_slot_at {
    gx_tensor *tensor;
    void *buffer;
    void *data;
} gh_slot_at;

/* The copies that nodes of an allocated graph read.  They stay while other graphs are allocated: nodes name them. */
typedef struct gh_copies {
    int32_t n;
    int32_t room;
    gx_tensor *tensor;      /* [n] the plan's, then views of some                                       */
    gx_tensor **of;         /* [n] what each stands for                                                 */
    gx_tensor **was;        /* [n] and where the graph was bound before                                 */
    gx_tensor **nodes;      /* [n_nodes] of the graph that `of` is for                                  */
    gx_tensor **were;       /* [n_were] and `was`                                                       */
    int32_t n_nodes;
    int32_t n_were;
    int32_t room_nodes;
    int32_t *n_reads;       /* [n] sources of nodes that are it, or a view of it                        */
} gh_copies;

/* A graph that was planned. */
typedef struct gh_prepared {
    uint64_t used;          /* when, in steps of the scheduler's clock; 0: never                        */
    bool reserved;          /* measured by the client: its plan is repeated for smaller graphs          */
    bool replayed;          /* its plan was made for a larger graph                                     */
    gh_reading reading;
    gh_looks looks;         /* before backends reorder it                                               */
    gx_tensor **ordered;    /* [looks.n_nodes] nodes in the order in which backends left them           */
    gh_names names;
    gx_tensor **dep;        /* [2 * n_deps] what backends want kept, each followed by until when        */
    int32_t n_deps;
    const gx_tensor **chosen; /* [n_chosen] what the client chose then                                  */
    int32_t *chosen_backend;
    int32_t n_chosen;
    /* What the planner was told, by id. */
    int32_t *resident;
    int32_t *buffer;
    int32_t *assigned;
    unsigned char *usage;
    unsigned char *supports;
    unsigned char *offloads;
    int64_t *nbytes;
    bool some_larger;
    bool some_chosen;
    int32_t n_buffers;
    unsigned char *reads_buffer;
    gh_keeps keeps;
    gs_api_graph *graph;
    gs_graph_arrays arrays;
    /* What it said. */
    gs_api_plan *plan;
    gs_plan_arrays view;
    int32_t *cut;           /* [view.n_splits + 1] positions among ggml's nodes at which splits begin    */
    int32_t n_splits;       /* that are not empty                                                       */
    gh_spot *spot;          /* [view.n]                                                                 */
    int32_t *home;          /* [view.n] the same as the planner would say it: pools for backends, ...    */
    int64_t *offset;        /* [view.n] ... and chunks far apart                                        */
    int64_t *need;          /* bytes of each chunk, pool by pool                                        */
    int32_t need_begin[GH_MAX_BACKENDS + 1];
    gh_slot_at *slot;       /* [n_slots] addresses of what is placed, and views, which get theirs from their roots */
    gx_tensor **viewer;     /* [n_viewers]                                                              */
    int32_t n_slots;
    int32_t n_viewers;
    int32_t room_slots;
    uint64_t generation;    /* of the buffers that the addresses are in; 0: none are known              */
    gh_copies copies;
    bool waits;             /* a split reads another backend's memory: backends wait for each other     */
    int32_t room_ids;
    int32_t room_ordered;
    int32_t room_answers;
    int32_t room_spots;
    int32_t room_need;
    int32_t room_chosen;
    int32_t room_buffers;
    int32_t room_deps;
    int32_t room_cuts;
} gh_prepared;

/* What plans depend on of a scheduler: all that the planner is told but for the graph. */
typedef struct gh_terms {
    const gh_runtime *rt;
    int n_backends;
    int n_places;
    bool offload;
    bool overlaps;
    bool some_optimize;
    void *device[GH_MAX_BACKENDS];
    gh_arena type[GH_MAX_BACKENDS]; /* of no chunks                                                     */
    unsigned char reads[GH_MAX_BACKENDS * GH_MAX_BACKENDS];
} gh_terms;

typedef struct gh_sched {
    uint64_t magic;
    struct gh_sched *next;  /* among all of the process, the newest first                               */
    pthread_mutex_t lock;   /* held while plans change, for the sake of those who look at them          */
    const gh_runtime *rt;
    const gh_ggml *lib;
    int n_backends;
    void *backend[GH_MAX_BACKENDS];
    void *buft[GH_MAX_BACKENDS];
    gs_backend_info info[GH_MAX_BACKENDS];
    gh_optimize optimize[GH_MAX_BACKENDS];
    bool some_optimize;
    unsigned char reads[GH_MAX_BACKENDS * GH_MAX_BACKENDS];
    bool offload;
    int n_places;
    int place;              /* of copies that the graph which is allocated uses                         */
    int next_place;
    void *event[GH_MAX_BACKENDS][GH_MAX_PLACES];
    bool overlaps;          /* computes may overlap: some backend has events                            */
    gh_eval_callback callback;
    void *callback_user;

    int n_pools;
    int pool_of[GH_MAX_BACKENDS];
    int first_of[GH_MAX_BACKENDS]; /* of a pool: the backend that its bytes are told of                 */
    gh_arena pool[GH_MAX_BACKENDS];
    uint64_t generation;    /* changes with any buffer; never 0                                         */

    gh_terms terms;
    gh_forms forms;
    gh_looks elsewhere;     /* of a graph that is looked for                                            */
    gh_prepared asked;      /* what devices say now of a graph that is one of a scheduler before this   */
    gh_choices choices;
    gh_prepared prepared[GH_N_PREPARED];
    gh_prepared *now;       /* what the answers are about; NULL after a reset                           */
    bool is_allocated;
    int n_splits;           /* of the last graph that was split                                         */
    uint64_t clock;
    uint64_t born;          /* graphs that were used by then are those of a scheduler before this       */

    /* What a graph that is allocated is computed with. */
    gh_part *part;          /* [n_splits]                                                               */
    int32_t room_part;
    bool dirty[GH_MAX_BACKENDS]; /* it may still be at work                                               */
    int32_t *ids;           /* of experts                                                               */
    unsigned char *is_used; /* [experts]                                                                */
    size_t room_ids;
    size_t room_experts;
    gx_tensor **dep;        /* [2 * n_deps] what backends want kept, each followed by until when        */
    int32_t n_deps;
    int32_t room_deps;
    bool dep_failed;
    gh_choices kept_choices; /* where everything is, while a graph that was reordered is planned again   */
} gh_sched;

/* -- ask.c: fill what the planner is told of p->reading's graph, where somebody chose so.  GS_OK or an error. */
int gh_ask(gh_sched *s, gh_prepared *p, const gh_choices *choices, gs_error *error);

/* -- again.c: whether the plan of a graph may be that of the same one; whether a graph is that, at the same addresses,
 * with the same choices; how one looks that was read; one at other addresses, which are those of the
 * graph from then on. */
bool gh_may_serve(const gh_sched *s, const gh_prepared *p);
/* Whether devices say of a graph of a scheduler before this what they said then. */
bool gh_is_asked_alike(gh_sched *s, const gh_prepared *p);
bool gh_looks_like(const gh_sched *s, const gh_prepared *p, void *graph);
bool gh_take_looks(gh_sched *s, gh_prepared *p);
gh_prepared *gh_find_elsewhere(gh_sched *s, void *graph);

/* -- shelves.c: keep the graphs of a scheduler that is freed; let a new one have those of one like it. */
void gh_shelve(gh_sched *s);
void gh_unshelve(gh_sched *s);

/* -- planning.c: whether the planner was told the same of two graphs besides what they look like; a plan for
 * p->reading's graph, with what somebody chose.  An error was logged. */
bool gh_same_problem(const gh_sched *s, const gh_prepared *a, const gh_prepared *b);
int gh_plan(gh_sched *s, gh_prepared *p, const gh_choices *choices);

/* -- prepare.c: a graph with its plan, found or made; NULL: an error was logged.  `reserves`: others will repeat it. */
gh_prepared *gh_prepare(gh_sched *s, void *graph, bool reserves);
/* Forget the forms of graphs that are no longer known, where they are many. */
void gh_compact_graphs(gh_sched *s);
void gh_prepared_free(gh_prepared *p);

/* -- pools.c */
bool gh_pools_locate(gh_sched *s, gh_prepared *p);
bool gh_pools_fit(const gh_sched *s, const gh_prepared *p);
/* Let the buffers be as large as a plan needs them; false where a device refuses. */
bool gh_pools_grow(gh_sched *s, const gh_prepared *p);
bool gh_pools_own(const gh_sched *s, const void *buffer);

/* -- bind.c: undo what a bind did to the tensors of a graph that comes again, and do it. */
void gh_unbind(gh_sched *s, void *graph);
bool gh_bind(gh_sched *s, gh_prepared *p, void *graph);

/* -- scheduler.c: whether schedulers made from now on are ours; otherwise they are ggml's own. */
void gh_set_schedules(bool on);

/* -- experts.c: bring copy view.inputs[input] of a split by its used experts.  False: copy everything. */
bool gh_copy_experts(gh_sched *s, const gh_prepared *p, int32_t split, int32_t input);

/* -- compute.c: a ggml_status */
int gh_compute(gh_sched *s);
void gh_synchronize(gh_sched *s);

#endif
