/* ggml_sched/llama_cpp/hook/plan_cache.h -- the plan cache, which graph allocators and schedulers have in common.
 *
 * Glossary:
 *     client     llama.cpp, which calls ggml's functions; its allocator or scheduler owns the cache
 *     wiring     which tensor reads or views which; here two wirings are the same only if ops and types are, too
 *     signature  a graph's wiring and shapes, and which of its tensors have memory (graph_signature.h)
 *     plan       gh_plan: what the planner made of a graph, with its graph and problem, and where every tensor lies
 *     entry      a plan entry: a graph that the client gave, its signature and tensors, with the plan that serves it
 *     demand     where the client wants the tensors of a graph to be; the graph's plan respects this (gh_demand)
 *     problem    what the planner is given besides the graph (gh_problem)
 *     reuse      an entry has the plan of a larger graph of its wiring
 *     pool       the buffers of one type, in which the arenas of one or several backends lie (locations.c)
 *     pinned     an entry that the client reserved: evicted after all others
 *     released   a cache whose allocator or scheduler was freed; the next one of the same key takes the cache over
 *
 * Files:
 *     plan_cache.c    lookup, insertion and eviction
 *     plan_entry.c    making and freeing entries, plans and problems; the bytes of tensors
 *     plan_reuse.c    whether a larger graph's plan serves
 *     planning.c      the new plan of a graph that was read
 *     size_hints.c    the sizes for which a new plan makes room
 *     locations.c     in which buffer of which pool every id lies; buffers that grow; addresses for tensors
 *     registry.c      all caches of the process; released caches
 *     comparison.c    what ggml's own allocator would hold
 *
 * A cache belongs to one allocator or scheduler and is used by one thread at a time.  Its lock is held while entries
 * change, because any thread may look at plans.
 * Invariant: a plan that was made for a larger graph serves only if the buffers are already large enough for it, so
 * that reusing a plan never costs memory.
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

/* In an exported function, if an allocator or scheduler is not ours: call the function of the same name in the caller's
 * ggml library and return its result; `none` where that library lacks the function.  Objects that ggml has made arrive
 * here, too, because our functions have ggml's names. */
#define GH_PASS_ON(is_ours, none, function, object, ...)                                                      \
    if (!(is_ours)) {                                                                                         \
        const gh_ggml *stock = (object) != NULL ? gh_ggml_of_caller(GH_CALLER) : NULL;                        \
        return stock != NULL && stock->function != NULL ? stock->function(object, ##__VA_ARGS__) : (none);    \
    }

#define GH_MAX_BACKENDS 16  /* most backends of a scheduler: ggml's own limit                               */
#define GH_MAX_BUFTS 64     /* most buffer types that the resident tensors of a scheduler's graph may have          */
#define GH_N_ENTRIES 24     /* most entries of a cache: room for every wiring that a client builds, and GH_N_REUSING */
#define GH_N_REUSING 4      /* most entries that reuse another entry's plan: one more evicts the oldest             */

typedef struct gh_plan_cache gh_plan_cache;
typedef struct gh_plan_entry gh_plan_entry;

/* What the planner is given besides a graph, for each id: where the tensor is or must be, its bytes, and what backends
 * answered to support queries.  A gh_problem is filled again and again: its memory grows, and gh_problem_free alone
 * frees it.  All arrays lie in `memory`, one after another. */
typedef struct gh_problem {
    int32_t n;              /* how many ids the planner's graph has                                 */
    int32_t n_backends;
    int64_t *nbytes;        /* [n_backends][n] bytes that each tensor takes on each backend         */
    int32_t *assigned;      /* [n] backend that the client chose for the tensor; -1: none           */
    int32_t *resident;      /* [n] backend whose memory holds the tensor; -1: the planner places it  */
    bool some_larger;       /* some tensor takes more than its own bytes; if false, the planner is given no nbytes */
    bool some_assigned;     /* some `assigned` is not -1                                            */
    /* Of schedulers only: */
    bool has_answers;       /* whether the problem has the arrays below                             */
    int32_t *buffer;        /* [n] of a resident tensor: the number of its buffer's type, below n_buffers */
    unsigned char *usage;   /* [n] GS_USAGE_*                                                       */
    unsigned char *supports; /* [n_backends][n] whether the backend computes the node               */
    unsigned char *offloads; /* [n_backends][n] whether it does so although the node's weights are on the host */
    unsigned char *reads_buffer; /* [n_backends][n_buffers] whether the backend reads that type of buffer; then zeros */
    int32_t n_buffers;      /* how many types the buffers of resident tensors have                  */
    int64_t answer_bytes;   /* bytes of `resident` and the arrays after it                          */
    void *memory;
    int64_t room;           /* bytes of `memory`                                                    */
} gh_problem;

/* A source that a node reads through a copy, because the plan says so. */
typedef struct gh_read {
    int32_t id;             /* of the node                                                                  */
    int32_t slot;           /* the index of the source in the src of the node's tensor                      */
    int32_t copy;           /* number of the copy: its id is gs_plan.n_tensors + this                       */
} gh_read;

/* A plan with the graph that it was made for, and with all that entries need to use it.  Counted by references: an
 * entry of a smaller graph of the same wiring shares it. */
typedef struct gh_plan {
    int32_t refs;
    /* ggml's graph, as it was read: */
    int32_t n;              /* how many tensors ggml's graph has: the ids below n                           */
    int32_t n_all;          /* how many ids; those from n on only the planner's graph has                   */
    int32_t n_nodes;        /* how many nodes ggml's graph has                                              */
    unsigned char *role;    /* [n] gh_role                                                                  */
    unsigned char *op;      /* [n_all] GS_OP_*                                                              */
    int32_t *node;          /* [n] position among ggml's nodes, or GH_NOWHERE                               */
    int32_t *input_of;      /* [n_all - n] entry i: the input node for which leaf n + i was added; -1: for none */
    int32_t *order;         /* [n] by id: the tensor's id in the entry's signature; NULL: equal ids, no reordering */
    int32_t (*pair)[2];     /* [n_pairs] ids of the pairs (gh_tensor_pairs) that backends named; -1: not in the graph */
    int32_t n_pairs;
    gs_graph_size size;     /* of the planner's graph                                                       */
    gs_api_graph *graph;
    bool shares_graph;      /* the graph is that of another plan, which frees it                            */
    gs_graph_arrays arrays; /* of `graph`; once the plan is made only those of its wiring: layout is NULL   */
    int32_t *name_at;       /* [n] where each tensor's name begins in `names`                               */
    char *names;            /* the names, one after another, each ending with a zero byte                   */
    gh_alloc_deps deps;     /* the graph's alloc dependencies: for fused kernels, and those that backends named */
    /* The plan: */
    gh_problem problem;     /* its nbytes are those that the plan has room for, perhaps more than this graph needs */
    int64_t max_size[GH_MAX_BACKENDS]; /* by backend: bytes of the largest buffer that the plan may use; 0: any */
    gs_api_plan *plan;
    gs_plan view;
    gh_fusion_hazards hazards;
    gh_places places;       /* [view.n] where each id lies                                                  */
    bool is_repacked;       /* for some id, locations.c chose another offset than the planner               */
    int64_t *need;          /* bytes that each chunk must have, pool by pool                                */
    int32_t need_begin[GH_MAX_BACKENDS + 1]; /* where each pool begins in `need`                            */
    int32_t *viewer;        /* [n_viewers] ids of views and aliases                                         */
    int32_t n_viewers;
    /* Of schedulers: */
    gh_read *read;          /* [n_reads] sources that nodes read through copies, in the order of nodes      */
    int32_t n_reads;
    int32_t *split_at;      /* [view.n_splits + 1] position among ggml's nodes where each split begins      */
    int32_t n_splits;       /* how many splits are not empty                                                */
    bool waits;             /* backends wait for each other (has_shared_reads in binding.c)                 */
} gh_plan;

/* Where the client wants the tensors of a graph to be; a cached plan serves only the same demand.  An allocator with
 * several buffer types stores the arena of each node, then of each leaf, as signed char (-1: no arena of the
 * allocator's).  A scheduler stores the ids of all tensors that the client assigned (-1: not in the graph), then the
 * backend of each, as int32_t. */
typedef struct gh_demand {
    void *value;            /* [n] arenas; or ids, then backends                                            */
    int32_t n;
    int32_t room;
} gh_demand;

/* A copy of a tensor in another backend's memory, or a view of such a copy. */
typedef struct gh_copied {
    gx_tensor tensor;
    gx_tensor *original;    /* the tensor that it copies; of a view of a copy, the view of the copied tensor */
    int32_t n_reads;        /* how many sources of nodes are this copy, or a view of it                     */
} gh_copied;

/* The copies of one graph: the plan's copies, then views of them.  They stay while other graphs are allocated, because
 * the nodes of this graph name them as sources. */
typedef struct gh_copies {
    gh_copied *copy;          /* [n]                                                                          */
    int32_t n;
    int32_t room;
} gh_copies;

struct gh_plan_entry {
    uint64_t used;          /* the cache's clock at the last use                                            */
    bool is_pinned;         /* the client reserved this graph                                               */
    bool reuses;            /* the plan was made for another entry                                          */
    gh_signature signature;
    gh_demand demand;
    gh_plan *plan;
    bool is_compact;        /* it reuses a plan, and its tensors lie at the offsets in `compact`            */
    int64_t *compact;       /* [plan->view.n] offsets at the low end of the buffers, instead of the plan's  */
    gh_copies copies[2];    /* of schedulers: the copies for the graph bound last, and for one bound before */
};

/* Everything that plans depend on besides graph and problem: a released cache may serve an allocator or scheduler of
 * the same key.  Keys are compared as bytes, so a key is zeroed before it is filled. */
typedef struct gh_cache_key {
    const gh_ggml *lib;
    bool is_scheduler;
    bool offloads;          /* backends may offload a node whose weights are on the host                    */
    bool overlaps;          /* computes may overlap in time: backends then share no pool                    */
    bool reorders;          /* some backend reorders nodes                                                  */
    int n_backends;
    int n_copies;           /* how many copy slots each copied tensor has                                   */
    void *device[GH_MAX_BACKENDS];
    gh_arena type[GH_MAX_BACKENDS]; /* the buffer type of each backend, as an arena without chunks          */
    unsigned char reads[GH_MAX_BACKENDS * GH_MAX_BACKENDS]; /* [a][b] whether backend a reads the memory of b */
} gh_cache_key;

/* The functions of a cache in which graph allocators (level alloc) and schedulers (level sched) differ. */
typedef struct gh_cache_level {
    /* Whether the client demands now what the plan of the entry was made for.  `tensors`: by id, the tensors of the
     * graph that is looked up; an allocator does not read them. */
    bool (*same_demand)(const void *owner, const gh_plan_entry *e, gx_tensor *const *tensors);
    /* Store in `e`, whose signature is filled, what the client demands now, so that same_demand can compare it later.
     * False without memory. */
    bool (*take_demand)(const void *owner, gh_plan_entry *e);
    /* Fill `problem` for the graph of `e`.  That graph has the same wiring as the graph that e->plan was made for, so
     * that the plan's gh_role of each tensor holds for it, too.  GS_OK or an error. */
    int (*collect)(void *owner, const gh_plan_entry *e, gh_problem *problem, gs_error *error);
    /* Let backends reorder the nodes of a graph that was found or planned.  *same becomes whether the order of nodes,
     * and the pairs that backends named (gh_tensor_pairs), are those of the plan.  False without memory.  NULL: this
     * level never reorders. */
    bool (*reorder)(void *owner, const gh_plan_entry *e, void *graph, bool *same);
    /* Plan a graph again whose nodes backends have reordered. */
    int (*plan_reordered)(void *owner, gh_plan_entry *e, void *graph, gs_error *error);
    bool writes_addresses;  /* a lookup may write addresses into tensors while it compares them              */
} gh_cache_level;

struct gh_plan_cache {
    gh_plan_cache *next;    /* in the registry, the newest first                                            */
    pthread_mutex_t lock;
    const gh_cache_level *level;
    void *owner;            /* the allocator or scheduler                                                   */
    gh_cache_key key;
    const gh_ggml *lib;
    int n_backends;         /* of an allocator: how many different buffer types it has                      */
    const char *name[GH_MAX_BACKENDS]; /* of each backend; of an allocator: of each buffer type             */
    gs_policy policy;
    int n_pools;
    int pool_of[GH_MAX_BACKENDS]; /* of a backend: the pool in which its arena lies                         */
    int first_of[GH_MAX_BACKENDS]; /* of a pool: its first backend, which reports the pool's bytes          */
    gh_arena pool[GH_MAX_BACKENDS]; /* [n_pools] buffers of one type                                        */
    gh_descriptors descriptors;
    gh_reader reader;       /* of the graph that was read last                                              */
    gh_signature moved;     /* scratch of find_equal: the tensors of the graph that is looked up            */
    gh_problem problem;     /* scratch: the problem of a graph that may reuse a plan                        */
    gh_plan_entry *entry[GH_N_ENTRIES + 1]; /* lookups find the first n_entries.  The next one is being filled.  Those
                             * after it are NULL, or evicted and not freed, because nodes of a client's graph may have
                             * their copies as sources */
    int n_entries;
    uint64_t clock;         /* counts uses of entries                                                       */
    uint64_t born;          /* the clock when the cache was released last; 0: never.  Entries that were not used since
                             * then belong to an earlier owner: support queries are repeated before such an entry
                             * serves */
    void *stock;            /* ggml's own allocator for the same buffer types; NULL: nothing was compared   */
    size_t stock_nbytes[GH_MAX_BACKENDS]; /* by pool, the bytes that `stock` would hold for what was reserved */
};

/* -- plan_cache.c */

enum gh_lookup {
    GH_PIN = 1,             /* the client reserves this graph                                               */
    GH_REUSE = 2,           /* the plan of a larger graph may serve                                         */
    GH_HINTS = 4            /* a new plan makes room for larger graphs of its wiring (size_hints.c)         */
};

/* The entry of a graph with a plan that serves it: cached, reused or planned now.  NULL: *error has the reason.
 * *placed, false at the call, becomes true if the lookup has written the tensors' addresses already.  `placed` may be
 * NULL. */
gh_plan_entry *gh_plan_cache_get(gh_plan_cache *c, void *graph, int flags, bool *placed, gs_error *error);

/* The same as gh_plan_cache_get, and then grow the buffers to what the plan needs.  `wait` is called before a buffer is
 * freed, and returns once no device uses the buffers; it may be NULL. */
gh_plan_entry *gh_plan_cache_get_backed(gh_plan_cache *c, void *graph, int flags, bool *placed,
                                        void (*wait)(void *owner), gs_error *error);

/* Store a failure of a graph (gh_failed), and let the client's library log it; returns false. */
bool gh_log_failure(const gh_ggml *lib, gs_error *error);

/* The entry that the present owner of the cache used last; NULL: none. */
gh_plan_entry *gh_plan_cache_last(const gh_plan_cache *c);

/* The entry whose plan takes the most bytes, of those that the present owner has used and that have a plan of their
 * own; NULL: none. */
gh_plan_entry *gh_plan_cache_largest(const gh_plan_cache *c);

/* Free the descriptors that only evicted entries had, once there are many. */
void gh_plan_cache_compact(gh_plan_cache *c);

/* Evict entry number i, which changes places with the last one. */
void gh_plan_cache_evict(gh_plan_cache *c, int i);

/* -- comparison.c */

/* Choose whether graphs that clients reserve from now on are measured by ggml's own allocator, too. */
void gh_set_compares(bool on);

/* If comparing is on (gh_set_compares), let ggml's own allocator measure a graph that was reserved; its entry is e. */
void gh_compare(gh_plan_cache *c, const gh_plan_entry *e, void *graph);

/* Forget what ggml's own allocator has measured for the owner of the cache. */
void gh_compare_end(gh_plan_cache *c);

/* -- registry.c */

/* A cache for a new owner: a released one of this key, or a new one.  Other threads do not see it before it is
 * published.  NULL: no memory. */
gh_plan_cache *gh_plan_cache_acquire(const gh_cache_key *key, const gh_cache_level *level, void *owner);

/* Let other threads see a cache, once its owner is complete. */
void gh_plan_cache_publish(gh_plan_cache *c);

/* Free the buffers of a cache; its plans are kept for the next owner with the same key. */
void gh_plan_cache_release(gh_plan_cache *c);

/* From now on call `each` with every cache that is released, on the client's thread, while the cache still has its
 * plans and no other thread uses it.  `each` NULL: call nothing any more. */
void gh_watch_releases(void (*each)(gh_plan_cache *c));

/* Lock and return cache number i, oldest first, of those that have an owner; NULL: there are fewer.  *n becomes how
 * many there are.  gh_plan_cache_unlock ends the lock.  Any thread. */
gh_plan_cache *gh_plan_cache_lock(int i, int *n);
void gh_plan_cache_unlock(gh_plan_cache *c);

/* -- plan_entry.c */

/* Make room in a problem for n ids; `has_answers`: also for the arrays of schedulers.  False without memory. */
bool gh_problem_make_room(gh_problem *p, int32_t n, int32_t n_backends, bool has_answers);

/* Whether two problems differ at most in the bytes of tensors; the second function: in bytes and assignments. */
bool gh_problem_same(const gh_problem *a, const gh_problem *b);
bool gh_problem_same_answers(const gh_problem *a, const gh_problem *b);

void gh_problem_free(gh_problem *p);

void gh_plan_entry_free(gh_plan_entry *e);
gh_plan *gh_plan_new(void);
void gh_plan_drop(gh_plan *p);

/* Drop the plan and the signature of an entry, and reset it; its arrays stay allocated for the next use. */
void gh_plan_entry_clear(gh_plan_entry *e);

/* Copy the roles and positions that a plan needs from a graph that was read; the second function copies the tensors'
 * names.  So the client may free the graph, and the plan stays valid.  False without memory. */
bool gh_plan_take_graph(gh_plan *p, const gh_reader *r);
bool gh_plan_take_names(gh_plan *p, const gh_reader *r);

/* The name of a tensor; NULL for an id that only the planner has. */
static inline const char *gh_plan_name(const gh_plan *p, int32_t id)
{
    return id < p->n ? p->names + p->name_at[id] : NULL;
}

/* Where the tensors of an entry lie, and the plan's copies. */
static inline gh_places gh_entry_places(const gh_plan_entry *e)
{
    return (gh_places){e->plan->places.chunk, e->is_compact ? e->compact : e->plan->places.offset};
}

/* The id of ggml's graph whose layout `id` has: `id` itself, or, for a leaf that was added for an input node, that
 * node; -1: a tensor without bytes that only the planner's graph has. */
static inline int32_t gh_layout_id(const gh_plan *p, int32_t id)
{
    return id < p->n ? id : p->input_of[id - p->n];
}

/* The tensor that an id below plan->n has in an entry; the second function returns the tensor's descriptor. */
static inline gx_tensor *gh_entry_tensor(const gh_plan_entry *e, int32_t id)
{
    return e->signature.tensor[e->plan->order != NULL ? e->plan->order[id] : id];
}

static inline const gh_descriptor *gh_entry_descriptor(const gh_plan_entry *e, int32_t id)
{
    return gh_descriptor_at(&e->signature, e->plan->order != NULL ? e->plan->order[id] : id);
}

/* The id of a tensor; -1: the entry's graph does not have it. */
int32_t gh_entry_id(const gh_plan_entry *e, const gx_tensor *tensor);

/* Fill q->nbytes: the bytes that each id of the graph of `e` takes on each backend. */
void gh_collect_sizes(const gh_plan_cache *c, const gh_plan_entry *e, gh_problem *q);

/* The tensor of `e` whose shape an id of the planner's graph has: the id's own tensor, or the input node for which a
 * leaf was added.  NULL: the id has no bytes. */
gx_tensor *gh_shape_of(const gh_plan_entry *e, int32_t id);

/* -- plan_reuse.c
 * gh_plan_has_room: whether every tensor of `problem` fits where the plan put it; support answers must be equal, and
 * assignments equal or what the planner chose itself.
 * gh_plan_serves: whether e, a graph of the wiring for which its plan was made, can use that plan; if so, also chooses
 * where e's tensors lie (e->compact).  Assignments may differ where a cached plan for e's assignments has the same
 * placement. */
bool gh_plan_has_room(const gh_plan *plan, const gh_problem *problem);
bool gh_plan_serves(const gh_plan_cache *c, gh_plan_entry *e, const gh_problem *problem);

/* The number of the first hazard (fusion.h), from number `from` on, by which a fused kernel would overwrite what it
 * reads: the nodes may be fused, and the result overlaps the source; -1: there is none.  `offset`, `size`: bytes, by
 * id.  `s`: the signature with the graph's shapes; NULL: they are those that were planned. */
int32_t gh_plan_find_hazard(const gh_plan *plan, const gh_signature *s, const gh_ggml *lib, const int64_t *offset,
                            const int64_t *size, int32_t from);

/* -- planning.c: plan the graph that was just read into c->reader, and whose signature `e` has; e->plan receives the
 * plan.  GS_OK or an error.  `flags` as in gh_plan_cache_get. */
int gh_plan_graph(gh_plan_cache *c, gh_plan_entry *e, int flags, gs_error *error);

/* The problem of a plan as the planner's C API takes it.  It points into `p`, and into `info` [n_backends], which is
 * filled. */
gs_problem gh_planner_problem(const gh_plan_cache *c, const gh_plan *p, gs_backend_info *info);

/* -- size_hints.c: raise the bytes of tensors in e's problem, before e is planned, to what similar cached graphs need,
 * so that the new plan serves larger graphs, too. */
void gh_size_hints_raise(const gh_plan_cache *c, gh_plan_entry *e);
/* Raise the bytes of nodes that gather rows (GET_ROWS) to those of all rows that they may gather in a graph of this
 * wiring; returns whether some node had fewer. */
bool gh_size_hints_raise_rows(gh_plan_entry *e);

/* -- locations.c */

/* Fill p->places, and p->need, the bytes that each chunk must have.  False without memory. */
bool gh_plan_locate(const gh_plan_cache *c, gh_plan *p, const gh_reader *r);
/* Whether the buffers of the cache's pools are large enough for a plan. */
bool gh_pools_fit(const gh_plan_cache *c, const gh_plan *p);
/* Grow the pools' buffers to what a plan needs; `wait` is called before one is freed.  False: a device refused. */
bool gh_pools_grow(gh_plan_cache *c, const gh_plan *p, void (*wait)(void *owner), gs_error *error);
/* Whether a buffer belongs to one of the cache's pools. */
bool gh_pools_own(const gh_plan_cache *c, const void *buffer);
/* Bytes that a plan needs in pool number `pool`: the sum over the pool's chunks. */
size_t gh_plan_nbytes(const gh_plan *p, int pool);

/* Give an entry's tensors their addresses (`placed`: a lookup has written them already), call init_tensor of buffers
 * that have that function, and give views their addresses.  The buffers must be large enough for the plan. */
void gh_place_tensors(const gh_plan_cache *c, const gh_plan_entry *e, bool placed);

#endif
