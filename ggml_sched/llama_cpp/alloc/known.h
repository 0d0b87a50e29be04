/* ggml_sched/llama_cpp/alloc/known.h -- a graph that was planned: its looks, its plan, the addresses that follow.
 *
 * A graph that looks the same (looks.h) needs no reading and no planning.
 * Invariant: the graph, its arrays, the plan and the names do not change while somebody else holds a reference.
 */
#ifndef GGML_SCHED_LLAMA_CPP_ALLOC_KNOWN_H
#define GGML_SCHED_LLAMA_CPP_ALLOC_KNOWN_H

#include <stdatomic.h>
#include "arena.h"
#include "fused.h"
#include "looks.h"
#include "names.h"

typedef struct gh_known {
    atomic_int refs;
    gh_looks looks;
    int32_t n_all;              /* ids: of its tensors, and those that only planning knows  */
    int32_t *node_arena;        /* [n_nodes] where the caller wants nodes; -1               */
    int32_t *leaf_arena;        /* [n_leafs]                                                */
    gh_names names;
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
    gh_risks risks;             /* what no plan may let overlap, should layouts be others   */
    /* What it said. */
    gs_api_plan *plan;          /* NULL where the plan is another's                         */
    struct gh_known *lender;    /* whose plan serves: a reference                           */
    gs_plan_arrays view;        /* of either                                                */
    int64_t *taken;             /* [n_all] of a lender's plan, what this graph's ids take,  */
    int64_t *offset;            /* [n_all] and where they lie, which `view` says            */
    int32_t room_offsets;
    uint32_t life;              /* of the allocator, in which it was asked for last         */
    bool planned;
    bool replayed;              /* made for a larger graph                                  */
    bool reserved;              /* the client reserved it: it goes last                     */
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

static inline int32_t gh_known_n_listed(const gh_known *k)
{
    return k->looks.n_nodes > k->looks.n_leafs ? k->looks.n_nodes : k->looks.n_leafs;
}

/* Whether a tensor of a graph that was read has no bytes to the planner, whatever it views. */
static inline bool gh_known_is_aside(const gh_known *k, int32_t id)
{
    return k->arrays.layout[id].nbytes == 0 && gh_form_at(&k->looks, id)->nbytes > 0;
}

gh_known *gh_known_new(void);

/* Give back one reference; the last frees. */
void gh_known_drop(gh_known *k);

/* The name of an id, NULL for one that only planning knows; how many nodes and leafs the planner's graph has. */
static inline const char *gh_known_name(const gh_known *k, int32_t id)
{
    return gh_name_of(&k->names, id);
}

static inline int32_t gh_known_n_nodes(const gh_known *k)
{
    return k->size.n_nodes;
}

static inline int32_t gh_known_n_leafs(const gh_known *k)
{
    return k->size.n_leafs;
}

/* Let it have no plan, and lend from nobody. */
void gh_known_forget(gh_known *k);

/* Room for a graph; false without memory. */
bool gh_known_make_room(gh_known *k, int32_t n_all, int32_t listed, int32_t n_arenas);

/* What a graph that was read looks like, and what the planner is to be told; the graph is not made, nor planned. */
int gh_known_take(gh_known *k, gh_forms *forms, const gh_reading *r, const int32_t *node_arena,
                  const int32_t *leaf_arena, int32_t n_arenas);

/* The bytes that tensors take in their arenas, once k->graph is made. */
void gh_known_measure(gh_known *k, const gh_reading *r, const gh_arena *arenas);

/* Whether buffer types ask for the same bytes as when it was planned, for the tensors that its ids are now. */
bool gh_known_measures(const gh_known *k, gx_tensor *const *now, const gh_ggml *lib, const gh_arena *arenas);

/* Whether two were told the same besides their graphs; `sizes`: bytes included. */
bool gh_known_same_problem(const gh_known *a, const gh_known *b, bool sizes);

/* Let `k` have a plan of its own, which says the same.  False without memory: the plan is still the caller's. */
bool gh_known_own(gh_known *k, gs_api_plan *plan);

/* Make the planner's graph of one that was followed: nobody needs it before somebody looks.  GS_OK or an error. */
int gh_known_draw(gh_known *k, gs_error *error);

/* Let `k`, whose plan serves, stand for the graph that `other` has taken.  Both go on working. */
void gh_known_rebind(gh_known *k, gh_known *other);

/* The addresses of its tensors in these arenas; false where there is none for one of them. */
bool gh_known_resolve(gh_known *k, const gh_arena *arenas, uint64_t generation);

/* Write them into the tensors, unless they are placed already; tell buffers, and let views follow. */
void gh_known_commit(const gh_known *k, const gh_ggml *lib, const gh_arena *arenas, bool placed);

#endif
