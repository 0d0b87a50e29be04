/* ggml_sched/llama_cpp/hook/plan_cache.h -- the plan cache, which graph allocators and schedulers have in common.
 *
 * Glossary:
 *     wiring     which tensor reads which, with ops and types, whatever the shapes
 *     signature  a graph's wiring and shapes, and which of its tensors have memory (graph_signature.h)
 *     plan       a planned wiring: the planner's graph, its problem, the plan, and where every tensor lies
 *     entry      a graph that the client gave: its signature and tensors, with the plan that serves it
 *     reuse      an entry has the plan of a larger graph of its wiring
 *     pinned     an entry that the client reserved: evicted after all others
 *     released   a cache whose allocator or scheduler was freed; the next one with the same key continues with it
 *
 * Files:
 *     plan_cache.c    lookup, insertion and eviction
 *     plan_entry.c    memory of entries and plans; an entry for other tensors
 *     plan_reuse.c    whether a larger graph's plan serves
 *     planning.c      plans of graphs that were read: another's, replayed, or new
 *     size_hints.c    the sizes for which a new plan makes room
 *     locations.c     in which buffer of which pool every id lies; buffers that grow; addresses for tensors
 *     registry.c      all caches of the process; released caches
 *
 * A cache belongs to one allocator or scheduler and is used by one thread at a time.  Its lock is held while entries
 * change, because any thread may look at plans.
 * Invariant: a plan that was made for a larger graph serves only where the buffers already hold it.
 */
#ifndef GGML_SCHED_LLAMA_CPP_HOOK_PLAN_CACHE_H
#define GGML_SCHED_LLAMA_CPP_HOOK_PLAN_CACHE_H

#include <pthread.h>
#include "arena.h"
#include "arrays.h"
#include "counters.h"
#include "fusion.h"
#include "graph_signature.h"

#define GH_EXPORT __attribute__((visibility("default")))
#define GH_CALLER __builtin_return_address(0)

/* In an exported function: pass the call on, unless the object is ours, to the library that it came from; the result is
 * `none` where that has no such function. */
#define GH_PASS_ON(is_ours, none, function, object, ...)                                                      \
    if (!(is_ours)) {                                                                                         \
        const gh_ggml *stock = (object) != NULL ? gh_ggml_of_caller(GH_CALLER) : NULL;                        \
        return stock != NULL && stock->function != NULL ? stock->function(object, ##__VA_ARGS__) : (none);    \
    }

#define GH_MAX_BACKENDS 16  /* ggml's own number                                                            */
#define GH_N_ENTRIES 24     /* of a cache: one for each wiring that a client builds, and some that reuse    */
#define GH_N_REUSING 4      /* of these, entries that have another's plan                                   */

typedef struct gh_plan_cache gh_plan_cache;
typedef struct gh_plan_entry gh_plan_entry;

/* What the planner is given besides a graph: placements, sizes, device answers, by id.  A gh_problem is filled again
 * and again: its arrays grow. */
typedef struct gh_problem {
    int32_t n;              /* ids                                                                  */
    int32_t n_backends;
    int32_t *resident;      /* [n] backend whose memory holds the tensor; -1: the planner places it  */
    int32_t *assigned;      /* [n] backend that the client chose; -1: none                          */
    int64_t *nbytes;        /* [n_backends][n] bytes that the tensor takes there                    */
    bool some_larger;       /* some tensor takes more than its own bytes: nbytes counts             */
    bool some_assigned;
    /* Of schedulers only: */
    bool has_answers;
    int32_t *buffer;        /* [n] index of the kind of buffer that holds a resident tensor         */
    unsigned char *usage;   /* [n] GS_USAGE_*                                                       */
    unsigned char *supports; /* [n_backends][n]                                                     */
    unsigned char *offloads; /* [n_backends][n]                                                     */
    unsigned char *reads_buffer; /* [n_backends][n_buffers]                                         */
    int32_t n_buffers;
    int32_t room;
    int32_t room_backends;
    int32_t room_buffers;
} gh_problem;

/* Where an id lies: `offset` bytes into a buffer of a pool. */
typedef struct gh_location {
    int32_t pool;           /* -1: outside of the plan                                                      */
    int32_t chunk;
    int64_t offset;
} gh_location;

/* A planned wiring.  Entries hold references to it. */
typedef struct gh_plan {
    int32_t refs;
    /* Of the graph that was read: */
    int32_t n;              /* ids of tensors                                                               */
    int32_t n_all;          /* and ids of the planner's graph alone                                         */
    int32_t n_nodes;        /* of ggml's graph                                                              */
    unsigned char *role;    /* [n] gh_role                                                                  */
    int32_t *node;          /* [n] position among ggml's nodes, or GH_NOWHERE                               */
    int32_t *input_of;      /* [n_all - n] node whose memory this planner's leaf is; -1                     */
    gs_graph_size size;     /* of the planner's graph                                                       */
    gs_api_graph *graph;
    gs_graph_arrays arrays;
    int32_t *name_at;       /* [n] where each tensor's name begins in `names`                               */
    char *names;            /* each with its end                                                            */
    gh_alloc_deps deps;     /* pairs that the planner keeps apart                                           */
    gh_problem problem;     /* nbytes are those that the plan has room for                                  */
    int64_t max_size[GH_MAX_BACKENDS]; /* of buffers, as planned                                            */
    bool is_replayed;       /* it repeats the plan of a larger graph                                        */
    gs_api_plan *plan;
    gs_plan view;
    gh_fusion_hazards hazards;
    gh_location *location;  /* [view.n]                                                                     */
    bool is_repacked;       /* locations are others than the planner's                                      */
    int64_t *need;          /* bytes of each chunk, pool by pool                                            */
    int32_t need_begin[GH_MAX_BACKENDS + 1];
    gh_slot *slot;          /* [n_slots] of tensors that are placed, then of the plan's copies              */
    int32_t n_slots;
    int32_t *viewer;        /* [n_viewers] ids of views and aliases                                         */
    int32_t n_viewers;
    /* Of schedulers: */
    int32_t *split_at;      /* [view.n_splits + 1] position among ggml's nodes where each split begins      */
    int32_t n_splits;       /* splits that are not empty                                                    */
    bool waits;             /* a split reads another backend's memory: backends wait for each other         */
} gh_plan;

/* What the client demanded of a graph, besides the graph itself.  An allocator with several buffer types: the arena of
 * each node and then of each leaf, -1: none.  A scheduler: the ids of the tensors that were assigned, -1: not in the
 * graph, and then the backend of each. */
typedef struct gh_demand {
    int32_t *value;         /* [n]                                                                          */
    int32_t n;
    int32_t room;
} gh_demand;

/* Copies of an allocated graph's tensors in other backends' memory.  They stay while other graphs are allocated,
 * because the nodes of this graph name them as sources. */
typedef struct gh_copies {
    int32_t n;
    int32_t room;
    gx_tensor *tensor;      /* [n] the plan's copies, then views of some                                    */
    gx_tensor **original;   /* [n] what each is a copy of                                                   */
    gx_tensor **previous;   /* [n] the same for the graph that was bound before                             */
    gx_tensor **nodes;      /* [n_nodes] of the graph that `original` is for                                */
    gx_tensor **previous_nodes;
    int32_t n_nodes;
    int32_t n_previous;
    int32_t room_nodes;
    int32_t *n_reads;       /* [n] sources of nodes that are this copy, or a view of it                     */
} gh_copies;

/* Pairs of tensors: the first one's memory is kept until the second is computed. */
typedef struct gh_tensor_pairs {
    gx_tensor *(*pair)[2];  /* [n]                                                                          */
    int32_t n;
    int32_t room;
} gh_tensor_pairs;

struct gh_plan_entry {
    uint64_t used;          /* time of the last use, of the cache's clock                                   */
    bool is_pinned;
    bool reuses;            /* the plan was made for another entry                                          */
    gh_signature signature;
    gh_demand demand;
    gh_plan *plan;
    bool is_compact;        /* it reuses a plan and lies at the low end of the buffers, as `compact` says   */
    gh_slot *compact;       /* as plan->slot                                                                */
    /* Of schedulers: */
    gh_copies copies;
    gx_tensor **reordered;  /* [plan->n] tensors by id, where backends reordered the graph; else NULL       */
    gx_tensor **order;      /* [n_nodes] nodes as the backends left them                                    */
    gh_tensor_pairs deps;   /* that backends keep apart                                                     */
};

/* Everything that plans depend on besides graph and problem: a released cache serves the same key. */
typedef struct gh_cache_key {
    const gh_ggml *lib;
    bool is_scheduler;
    bool offloads;
    bool overlaps;          /* computes may overlap: pools are not shared                                   */
    bool reorders;          /* some backend reorders nodes                                                  */
    int n_backends;
    int n_copies;           /* of each copied tensor                                                        */
    void *device[GH_MAX_BACKENDS];
    gh_arena type[GH_MAX_BACKENDS]; /* without chunks                                                       */
    unsigned char reads[GH_MAX_BACKENDS * GH_MAX_BACKENDS];
} gh_cache_key;

/* What allocators and schedulers do differently. */
typedef struct gh_cache_level {
    /* Whether the client demands the same of an entry's tensors as when it was planned. */
    bool (*same_demand)(const void *owner, const gh_plan_entry *e, gx_tensor *const *tensors);
    /* Take the demand for an entry whose signature is filled; r is NULL where no backend reorders nodes. */
    bool (*take_demand)(const void *owner, gh_plan_entry *e, const gh_reader *r);
    /* The problem of these tensors, which `plan` has the roles of.  GS_OK or an error. */
    int (*collect)(void *owner, const gh_plan *plan, const gh_plan_entry *e, gh_problem *problem, gs_error *error);
    /* Let backends reorder a graph that was found or planned; NULL where none does.  *same: nothing changed. */
    bool (*reorder)(void *owner, const gh_plan_entry *e, void *graph, bool *same);
    /* Plan again after reordering. */
    int (*plan_reordered)(void *owner, gh_plan_entry *e, void *graph, gs_error *error);
    bool writes_addresses;  /* a lookup may write the addresses of a cached graph at once                    */
} gh_cache_level;

struct gh_plan_cache {
    gh_plan_cache *next;    /* in the registry, the newest first                                            */
    pthread_mutex_t lock;
    const gh_cache_level *level;
    void *owner;            /* the allocator or scheduler                                                   */
    gh_cache_key key;
    const gh_ggml *lib;
    int n_backends;         /* of an allocator: its arenas                                                  */
    const char *name[GH_MAX_BACKENDS];
    gs_policy policy;
    int n_pools;
    int pool_of[GH_MAX_BACKENDS];
    int first_of[GH_MAX_BACKENDS]; /* of a pool: its first backend                                          */
    gh_arena pool[GH_MAX_BACKENDS];
    gh_descriptors descriptors;
    gh_reader reader;       /* of the graph that was read last                                              */
    gh_signature moved;     /* scratch: tensors of a graph at other addresses                               */
    gh_problem problem;     /* scratch                                                                      */
    gh_plan_entry *entry[GH_N_ENTRIES];
    int n_entries;
    gh_plan_entry *spare[GH_N_ENTRIES + 1]; /* evicted: a client's graph may still name the copies of one   */
    int n_spare;
    gh_plan_entry *scratch; /* the next entry                                                               */
    uint64_t clock;
    uint64_t born;          /* entries used until then are from before the cache was released               */
};

/* -- plan_cache.c */

enum gh_lookup {
    GH_PIN = 1,             /* the client reserves this graph                                               */
    GH_REUSE = 2,           /* another graph's plan may serve                                               */
    GH_HINTS = 4            /* a new plan makes room for larger graphs of its wiring                        */
};

/* The entry of a graph with its plan: cached, reused or planned now; NULL: *error says why.  Where *placed becomes
 * true the tensors have their addresses already; placed may be NULL. */
gh_plan_entry *gh_plan_cache_get(gh_plan_cache *c, void *graph, int flags, bool *placed, gs_error *error);

/* The same, with buffers that hold its plan; `wait` is called before a buffer is freed, and may be NULL. */
gh_plan_entry *gh_plan_cache_get_backed(gh_plan_cache *c, void *graph, int flags, bool *placed,
                                        void (*wait)(void *owner), gs_error *error);

/* The entry that was used last since the cache has its owner; NULL: none. */
gh_plan_entry *gh_plan_cache_last(const gh_plan_cache *c);

/* Forget the descriptors of evicted entries, where they are many. */
void gh_plan_cache_compact(gh_plan_cache *c);

/* Evict entry number i; the last one takes its position. */
void gh_plan_cache_evict(gh_plan_cache *c, int i);

/* -- registry.c */

/* A cache of this key: a released one or a new one, not yet visible to other threads; NULL: no memory. */
gh_plan_cache *gh_plan_cache_acquire(const gh_cache_key *key, const gh_cache_level *level, void *owner);

/* Let other threads see a cache, once its owner is complete. */
void gh_plan_cache_publish(gh_plan_cache *c);

/* Free the buffers of a cache; its plans are kept for the next owner with the same key. */
void gh_plan_cache_release(gh_plan_cache *c);

/* The cache number i in order of creation, locked until gh_plan_cache_unlock; NULL: none.  *n: how many.  Any
 * thread. */
gh_plan_cache *gh_plan_cache_lock(int i, int *n);
void gh_plan_cache_unlock(gh_plan_cache *c);

/* -- plan_entry.c */

/* Make room for n ids, with or without the arrays of device answers.  False without memory. */
bool gh_problem_make_room(gh_problem *p, int32_t n, int32_t n_backends, bool has_answers);

/* Whether two problems are the same, sizes aside; or sizes and assignments aside. */
bool gh_problem_same(const gh_problem *a, const gh_problem *b);
bool gh_problem_same_answers(const gh_problem *a, const gh_problem *b);

void gh_problem_free(gh_problem *p);

gh_plan_entry *gh_plan_entry_new(void);
void gh_plan_entry_free(gh_plan_entry *e);
gh_plan *gh_plan_new(void);
void gh_plan_drop(gh_plan *p);

/* Forget what an entry was; its memory stays. */
void gh_plan_entry_clear(gh_plan_entry *e);

bool gh_demand_set(gh_demand *demand, const int32_t *value, int32_t n);

/* Take from a graph that was read what a plan needs; and the tensors' names: a plan outlives its graph. */
bool gh_plan_take_graph(gh_plan *p, const gh_reader *r);
bool gh_plan_take_names(gh_plan *p, const gh_reader *r);

/* The name of a tensor; NULL for an id that only the planner has. */
static inline const char *gh_plan_name(const gh_plan *p, int32_t id)
{
    return id < p->n ? p->names + p->name_at[id] : NULL;
}

static inline const gh_slot *gh_entry_slots(const gh_plan_entry *e)
{
    return e->is_compact ? e->compact : e->plan->slot;
}

/* The tensor of an id below plan->n; the id of a tensor, or -1. */
gx_tensor *gh_entry_tensor(const gh_plan_entry *e, int32_t id);
int32_t gh_entry_id(const gh_plan_entry *e, const gx_tensor *tensor);

/* Fill the bytes of a problem: of each id on each backend. */
void gh_collect_sizes(const gh_plan_cache *c, const gh_plan *p, const gh_plan_entry *e, gh_problem *q);

/* The tensor whose shape an id of the planner's graph has; NULL where it has no bytes. */
gx_tensor *gh_shape_of(const gh_plan *p, const gh_plan_entry *e, int32_t id);

/* -- plan_reuse.c: whether a plan has room for a problem that is otherwise its own; whether it serves entry e, whose
 * signature is of the same wiring. */
bool gh_plan_has_room(const gh_plan *plan, const gh_problem *problem);
bool gh_plan_serves(const gh_plan_cache *c, const gh_plan *plan, gh_plan_entry *e, const gh_problem *problem);

/* The first hazard, number `from` or later, of nodes that may be fused so that one overwrites what it reads, where ids
 * have these sizes, compact offsets and the shapes of a signature (NULL: those that were planned); -1: none. */
int32_t gh_plan_find_conflict(const gh_plan *plan, const gh_signature *s, const gh_ggml *lib, const int64_t *offset,
                              const int64_t *size, int32_t from);

/* -- planning.c: the plan of the graph that e and the reader have; GS_OK or an error.  `flags` as in
 * gh_plan_cache_get. */
int gh_plan_graph(gh_plan_cache *c, gh_plan_entry *e, int flags, gs_error *error);

/* What the planner is given for a plan; info is [n_backends]. */
gs_problem gh_planner_problem(const gh_plan_cache *c, const gh_plan *p, gs_backend_info *info);

/* -- size_hints.c: raise the bytes in e's problem to those of cached graphs that it resembles. */
void gh_size_hints_raise(const gh_plan_cache *c, gh_plan_entry *e);
/* Raise the bytes of nodes that gather rows to those of all rows that they may gather; whether some had fewer. */
bool gh_size_hints_raise_rows(gh_plan_entry *e);

/* -- locations.c */

bool gh_plan_locate(const gh_plan_cache *c, gh_plan *p, const gh_reader *r);
bool gh_pools_fit(const gh_plan_cache *c, const gh_plan *p);
/* Grow the buffers to what a plan needs; `wait` is called before a buffer is freed.  False: a device refused. */
bool gh_pools_grow(gh_plan_cache *c, const gh_plan *p, void (*wait)(void *owner), gs_error *error);
bool gh_pools_own(const gh_plan_cache *c, const void *buffer);
/* Bytes that a plan needs of a pool. */
size_t gh_plan_nbytes(const gh_plan *p, int pool);

/* Give an entry's tensors their addresses, unless they are `placed`; call init_tensor of buffers that have it; place
 * views.  The buffers hold the plan. */
void gh_place_tensors(const gh_plan_cache *c, const gh_plan_entry *e, bool placed);

#endif
