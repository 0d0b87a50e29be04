/* ggml_sched/llama_cpp/hook/scheduler.h -- ggml's scheduler (ggml_backend_sched) on our planner.
 *
 *     scheduler.c        ggml's functions, as clients call them
 *     sched_problem.c    the planner's problem: what the client assigned, and what backends and buffers answer
 *     reordering.c       graphs whose nodes backends reorder
 *     binding.c          binding a client's graph to its plan: addresses, copies, splits
 *     compute.c          computing the graph that is bound
 *     experts.c          copying, of a weight of many experts in the host's memory, only those that are used
 *
 * A scheduler is used by one thread at a time, as ggml's are; different ones are independent.
 * Invariant: a client sees its graph as with ggml's scheduler: after an allocation, nodes name as sources the copies
 * that they read.  A graph that is allocated again gets its original sources back first, if it is one of the last two
 * graphs to which its entry was bound: a client that builds its graphs anew has no older ones.
 */
#ifndef GGML_SCHED_LLAMA_CPP_HOOK_SCHEDULER_H
#define GGML_SCHED_LLAMA_CPP_HOOK_SCHEDULER_H

#include "plan_cache.h"

#define GH_MAX_COPIES 4     /* copy slots, where computes may overlap: as many as ggml has                 */
#define GH_SCHED_MAGIC UINT64_C(0x6768736368656431) /* first word of ours; ggml's begin with small numbers  */

/* Tensors that were assigned a backend, in the order in which they were assigned first. */
typedef struct gh_assignments {
    int32_t n;
    int32_t room;
    const gx_tensor **tensor;
    int32_t *backend;       /* [n] the backend of each                                                      */
    gs_index index;         /* hash table from a tensor to 1 + its index in `tensor`                        */
} gh_assignments;

void gh_assignments_clear(gh_assignments *a);
bool gh_assignments_set(gh_assignments *a, const gx_tensor *tensor, int32_t backend);
int32_t gh_assignments_get(const gh_assignments *a, const gx_tensor *tensor); /* -1: none was assigned */
void gh_assignments_free(gh_assignments *a);

/* Pairs of tensors: the first one's memory is kept until the second is computed. */
typedef struct gh_tensor_pairs {
    gx_tensor *(*pair)[2];  /* [n]                                                                          */
    int32_t n;
    int32_t room;
} gh_tensor_pairs;

typedef struct gh_sched {
    uint64_t magic;
    const gh_ggml *lib;
    gh_plan_cache *cache;
    int n_backends;
    void *backend[GH_MAX_BACKENDS];
    void *buft[GH_MAX_BACKENDS];
    gh_optimize optimize[GH_MAX_BACKENDS];
    int n_copies;
    int cur_copy;           /* copy slot that the allocated graph uses                                      */
    int next_copy;          /* copy slot of the next allocation                                             */
    void *event[GH_MAX_BACKENDS][GH_MAX_COPIES]; /* by backend and copy slot; NULL: no event was made       */
    gh_eval_callback callback;
    void *callback_user;
    gh_assignments assignments;
    const gh_plan *first;   /* while a reordered graph is planned again: its first plan, whose placement counts
                             * instead of `assignments`; else NULL                                          */
    gh_plan_entry *current; /* the entry of the last graph, which the client's queries are about; NULL after a reset */
    bool is_allocated;      /* the graph of `current` has its addresses and copies, and may be computed     */
    int n_splits;           /* how many splits the graph has that was split last                            */
    /* What the allocated graph is computed with: */
    gh_part *part;          /* [n_splits] the nodes of each split, as a graph                               */
    int32_t room_part;
    bool busy[GH_MAX_BACKENDS]; /* the backend may still compute                                            */
    gx_tensor **original;   /* [n_originals] scratch of binding.c: the tensors of the bound graph that are copied */
    int32_t n_originals;
    int32_t room_original;
    int32_t *ids;           /* scratch of experts.c: the ids of experts that tokens chose                   */
    unsigned char *is_used; /* [experts] scratch of experts.c: whether some token chose the expert          */
    int32_t room_ids;       /* bytes of `ids`                                                               */
    int32_t room_experts;
    gh_tensor_pairs deps;   /* pairs that backends named in the graph that they reordered last              */
    bool dep_failed;        /* a pair could not be stored: no memory                                        */
} gh_sched;

/* A copy's padding holds its mark: its own address xor this number.  By the mark a source of a node is recognised as a
 * copy. */
#define GH_COPY_MARK UINT64_C(0x6768636f70793130)

static inline uint64_t gh_copy_mark(const gx_tensor *t)
{
    return (uint64_t)(uintptr_t)t ^ GH_COPY_MARK;
}

static inline void gh_mark_copy(gx_tensor *t)
{
    const uint64_t mark = gh_copy_mark(t);
    memcpy(t->padding, &mark, sizeof mark);
}

/* The copy that t is; NULL: t is no copy, or NULL. */
static inline gh_copied *gh_copy_of(gx_tensor *t)
{
    uint64_t mark = 0;
    if (t != NULL && t->op == 0) {
        memcpy(&mark, t->padding, sizeof mark);
    }
    return mark != 0 && mark == gh_copy_mark(t) ? (gh_copied *)(void *)t : NULL;
}

/* -- sched_problem.c */
extern const gh_cache_level gh_sched_level;

/* -- reordering.c: two functions of gh_sched_level; gh_cache_level says what they do */
bool gh_sched_reorder(void *owner, const gh_plan_entry *e, void *graph, bool *same);
int gh_sched_plan_reordered(void *owner, gh_plan_entry *e, void *graph, gs_error *error);

/* -- binding.c: gh_bind binds a graph to the entry that was found for it; gh_unbind gives the nodes of a graph their
 * original sources back, and removes addresses in our buffers. */
void gh_unbind(gh_sched *s, void *graph);
bool gh_bind(gh_sched *s, gh_plan_entry *e, void *graph);
/* Fill p->split_at, n_splits, read and waits, unless that was done before.  False without memory. */
bool gh_plan_find_splits(const gh_sched *s, gh_plan *p);

/* -- experts.c: copy, of the weight that is input number `input` of the plan, only the experts that the split uses.
 * False: nothing was copied, and the caller copies the whole weight. */
bool gh_copy_experts(gh_sched *s, const gh_plan_entry *e, int32_t split, int32_t input);

/* -- compute.c: gh_compute computes the allocated graph and returns one of ggml's status codes; gh_synchronize waits
 * until all backends are done. */
int gh_compute(gh_sched *s);
void gh_synchronize(gh_sched *s);

/* -- scheduler.c: choose whether schedulers made from now on are ours; otherwise they are ggml's own. */
void gh_set_schedules(bool on);

#endif
