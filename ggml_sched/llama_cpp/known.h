/* ggml_sched/llama_cpp/known.h -- a graph that was planned: what it looked like, its plan, the addresses that follow.
 *
 * `matches` is the quick way: the same tensors, byte for byte in all that a plan depends on, need no planning and no
 * reading.  Only what stands in `image` is compared, and all of it: a graph that differs in wiring alone is another.
 * Invariant: the graph, its arrays, the plan and the names do not change while somebody else holds a reference.
 */
#ifndef GGML_SCHED_LLAMA_CPP_KNOWN_H
#define GGML_SCHED_LLAMA_CPP_KNOWN_H

#include <stdatomic.h>
#include "arena.h"
#include "differ.h"
#include "fused.h"
#include "read.h"

/* What a plan depends on of one tensor. */
typedef struct gh_image {
    int64_t shape[8];   /* ne, nb                                           */
    uint64_t links[12]; /* src, view_src, view_offs                         */
    int32_t type;
    int32_t op;
    int32_t flags;
    int32_t has;        /* bit 0: data, bit 1: a buffer                     */
    int32_t sub;        /* op_params[0]: which of a family of ops ...       */
    int32_t sub_mask;   /* ... where it is one: all bits                    */
} gh_image;

static inline int32_t gh_has_memory(const gx_tensor *t)
{
    return (t->data != NULL ? 1 : 0) | (t->buffer != NULL ? 2 : 0);
}

static inline void gh_take_image(gh_image *image, const gx_tensor *t, int32_t sub_mask)
{
    memcpy(image->shape, t->ne, sizeof image->shape);
    memcpy(image->links, t->src, sizeof image->links);
    image->type = t->type;
    image->op = t->op;
    image->flags = t->flags;
    image->has = gh_has_memory(t);
    image->sub = t->op_params[0];
    image->sub_mask = sub_mask;
}

_Static_assert(offsetof(gx_tensor, nb) == offsetof(gx_tensor, ne) + 32, "ne and nb are one run of 64 bytes");
_Static_assert(offsetof(gx_tensor, view_offs) == offsetof(gx_tensor, src) + 88, "sources and root are one of 96");

static inline bool gh_looks_like_image(const gh_image *image, const gx_tensor *t)
{
    const gh_pair found = gh_differing(image->shape, t->ne, 4) | gh_differing(image->links, t->src, 6);
    const int32_t differs = (image->type ^ t->type) | (image->op ^ t->op) | (image->flags ^ t->flags)
                          | (image->has ^ gh_has_memory(t)) | ((image->sub ^ t->op_params[0]) & image->sub_mask);
    return ((uint64_t)(uint32_t)differs | found[0] | found[1]) == 0;
}

typedef struct gh_slot {
    void *buffer;
    void *data;
    int32_t id;
} gh_slot;

typedef struct gh_known {
    atomic_int refs;
    /* What it looked like. */
    int32_t n_nodes;
    int32_t n_leafs;
    int32_t n;                  /* tensors                                                  */
    int32_t n_all;              /* ids                                                      */
    gx_tensor **nodes;
    gx_tensor **leafs;
    int32_t *node_arena;        /* [n_nodes] where the caller wants nodes; -1               */
    int32_t *leaf_arena;        /* [n_leafs]                                                */
    gx_tensor **tensor;         /* [n]                                                      */
    gh_image *image;            /* [n]                                                      */
    char (*name)[64];           /* [n_named]                                                */
    int32_t n_named;
    gs_graph_size size;         /* of the planner's graph                                   */
    /* What the planner was told. */
    int32_t *resident;          /* [n_all]                                                  */
    int32_t *assigned;          /* [n_all]                                                  */
    int64_t *nbytes;            /* [n_arenas][n_all]                                        */
    int32_t n_arenas;
    bool some_larger;           /* nbytes says something                                    */
    gh_keeps keeps;
    gs_api_graph *graph;
    gs_graph_arrays arrays;
    bool drawn;                 /* graph and arrays are those of this graph                 */
    bool plain;                 /* as the reading said: it can be followed                  */
    bool followed;              /* found to be wired as its lender, tensor by tensor        */
    gh_risks risks;             /* what its plan overlaps, should layouts be others         */
    /* What it said. */
    gs_api_plan *plan;          /* NULL where the plan is another's                         */
    struct gh_known *lender;    /* whose plan serves: a reference                           */
    gs_plan_arrays view;        /* of either                                                */
    bool planned;
    bool replayed;              /* made for a larger graph                                  */
    /* What follows. */
    gh_slot *slot;
    int32_t n_slots;
    int32_t *viewer;            /* [n_viewers] ids                                          */
    int32_t n_viewers;
    uint64_t generation;        /* of the arenas that the slots' addresses are in; 0: none  */
    int32_t room;
    int32_t room_listed;
    int64_t room_nbytes;
} gh_known;

gh_known *gh_known_new(void);

/* Give back one reference; the last frees. */
void gh_known_drop(gh_known *k);

/* The name of an id, NULL for one that only planning knows; how many nodes and leafs the planner's graph has. */
static inline const char *gh_known_name(const gh_known *k, int32_t id)
{
    return id < k->n_named ? k->name[id] : NULL;
}

static inline int32_t gh_known_n_nodes(const gh_known *k)
{
    return k->size.n_nodes;
}

static inline int32_t gh_known_n_leafs(const gh_known *k)
{
    return k->size.n_leafs;
}

/* Whether a graph is this one: the same tensors, with the same bytes, wanted in the same arenas. */
bool gh_known_matches(const gh_known *k, const gh_ggml *lib, void *graph, const int32_t *node_arena,
                      const int32_t *leaf_arena);

/* Let it have no plan, and lend from nobody. */
void gh_known_forget(gh_known *k);

/* Room for a graph; false without memory. */
bool gh_known_make_room(gh_known *k, int32_t n_all, int32_t listed, int32_t n_arenas);

/* What a graph that was read looks like, and what the planner is to be told; the graph is not made, nor planned. */
int gh_known_take(gh_known *k, const gh_reading *r, const int32_t *node_arena, const int32_t *leaf_arena,
                  int32_t n_arenas);

/* The names of its tensors: those of a graph whose plan is lent are the lender's. */
void gh_known_take_names(gh_known *k, const gh_reading *r);

/* The bytes that tensors take in their arenas, once k->graph is made. */
void gh_known_measure(gh_known *k, const gh_reading *r, const gh_arena *arenas);

/* Whether two were told the same besides their graphs; `sizes`: bytes included. */
bool gh_known_same_problem(const gh_known *a, const gh_known *b, bool sizes);

/* Whether the plan of `lender` serves `k`, of the same wiring and problem, as it is: nothing larger, and whatever took
 * over memory finds it where it was.  What is not found to serve may still be replayed. */
bool gh_known_serves(const gh_known *lender, const gh_known *k);

/* Let it. */
void gh_known_borrow(gh_known *k, gh_known *lender);

/* Let `k` have a plan of its own, which says the same. */
void gh_known_own(gh_known *k, gs_api_plan *plan);

/* Let `k`, whose plan serves, stand for the graph whose tensors and images `other` has, id by id. */
void gh_known_move(gh_known *k, gh_known *other);

/* Make the planner's graph of one that was followed: nobody needs it before somebody looks.  GS_OK or an error. */
int gh_known_draw(gh_known *k, gs_error *error);

/* Let `k`, whose plan serves, stand for the graph that `other` has taken.  Both go on working. */
void gh_known_rebind(gh_known *k, gh_known *other);

/* The addresses of its tensors in these arenas; false where there is none for one of them. */
bool gh_known_resolve(gh_known *k, const gh_arena *arenas, uint64_t generation);

/* Write them into the tensors. */
void gh_known_commit(const gh_known *k, const gh_ggml *lib);

#endif
