/* ggml_sched/llama_cpp/alloc/allocator.h -- a graph allocator of ours: what it holds, and finding the plans of graphs.
 *
 *     alloc.c      ggml's functions: what a client calls, in ggml's order and with its answers
 *     allocators.c the allocators of the process: made, freed, kept for the next, looked at
 *     remember.c   a graph's plan: known, replayed or new
 *     known.c      what was planned of a graph, and the addresses of its tensors
 *     follow.c     plans for graphs that are wired as a planned one
 *     looks.c      whether graphs are the same; alike.c: elsewhere, or wired alike
 *     arena.c      buffers
 *
 * An allocator is one thread's at a time, as ggml's are; different ones are independent.  Its lock is for those who
 * look at its plans meanwhile.
 */
#ifndef GGML_SCHED_LLAMA_CPP_ALLOC_ALLOCATOR_H
#define GGML_SCHED_LLAMA_CPP_ALLOC_ALLOCATOR_H

#include <pthread.h>
#include "alloc.h"
#include "follow.h"

/* Graphs remembered by an allocator, and how many of them may borrow another's plan: the others are one for each wiring
 * that a client builds, so that batches of any order and size plan nothing. */
#define GH_N_KNOWN 24
#define GH_N_BORROWED 4

/* What begins ours.  ggml's own begin with an address, and come here, too: from calls inside its library. */
#define GH_MAGIC UINT64_C(0x67675f736368656c)

struct gh_gallocr {
    uint64_t magic;
    const gh_ggml *lib;
    pthread_mutex_t lock;
    gh_gallocr *next;           /* among all, the newest first; the registry's lock                         */
    int32_t n_bufts;
    int32_t *arena_of;          /* [n_bufts] equal types share one                                          */
    gh_arena *arena;
    int32_t n_arenas;
    uint64_t generation;        /* changes with any buffer; never 0                                         */
    gh_reading reading;
    gh_forms forms;
    gh_known *known[GH_N_KNOWN]; /* the last used first; NULL at the end                                    */
    gh_known *spare;
    uint32_t life;              /* how often it was put back                                                */
    /* Where the caller wanted the nodes and leafs of the last graph that it reserved. */
    int32_t *node_arena;
    int32_t *leaf_arena;
    int32_t n_node_ids;
    int32_t n_leaf_ids;
    int32_t room_ids;
    gs_backend_info *info;      /* [n_arenas]                                                               */
    unsigned char *reads;       /* [n_arenas][n_arenas] all 1: the caller has made the copies               */
};

/* -- remember.c */

/* The graph's plan: known, replayed or new.  `replay`: one that was made for a larger graph may serve.  *placed
 * becomes true where its tensors have got their addresses, too; NULL: they are not to.  NULL: it has no plan, and
 * `error` says why. */
gh_known *gh_remember(gh_gallocr *a, void *graph, bool replay, bool *placed, gs_error *error);

/* Forget the forms of graphs that are no longer known, where they are many. */
void gh_compact_forms(gh_gallocr *a);

/* Whether the buffers that there are hold a plan. */
bool gh_fits(const gh_gallocr *a, const gh_known *k);

/* The bytes of each buffer that a plan asks for of one arena; how many.  None where nothing lies in it. */
int32_t gh_needs(const gh_known *k, int32_t arena, const int64_t **nbytes);

/* A plan of its own for a graph that another's serves: the same decisions, for its own sizes.  False: it has none. */
bool gh_own_plan(gh_gallocr *a, gh_known *k);

/* -- allocators.c */

/* One for these buffer types, as good as new; NULL: no library is found, or no memory. */
gh_gallocr *gh_gallocr_make(const void *caller, void **bufts, int n);

/* Give its buffers back; the rest is kept for a while, for the next that is asked for. */
void gh_gallocr_put_back(gh_gallocr *a);

/* The library whose own allocator this is; NULL: it is ours. */
const gh_ggml *gh_owner_of(const gh_gallocr *a, const void *caller);

#endif
