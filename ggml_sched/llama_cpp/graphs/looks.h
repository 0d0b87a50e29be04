/* ggml_sched/llama_cpp/graphs/looks.h -- what a graph looks like: whether another is the same, or of the same wiring.
 *
 * Each tensor is a form (forms.h), what it names as ids of the graph, and whether it has memory.  Two graphs are told
 * apart by all of that: one that differs in its wiring alone is another.
 * Invariant: tensors are looked at only once something that is known to be there has named them.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPHS_LOOKS_H
#define GGML_SCHED_LLAMA_CPP_GRAPHS_LOOKS_H

#include "forms.h"
#include "read.h"

#define GH_ROOT 2           /* of a mark's links, behind the first sources: view_src                */
#define GH_N_LINKS 3
#define GH_N_REST (GS_MAX_SRC - GH_ROOT) /* sources behind the first: few tensors have any          */

/* Bits of gh_mark.has; those above say where the rest of the sources is, 0: they are none. */
#define GH_HAS_DATA 1
#define GH_HAS_BUFFER 2
#define GH_STILL 4          /* has data and is not computed: nothing else of it counts              */
#define GH_REST_SHIFT 3

typedef struct gh_mark {
    int32_t form;
    int32_t link[GH_N_LINKS]; /* ids; -1: NULL                                                      */
    int32_t has;
} gh_mark;

typedef struct gh_looks {
    gh_forms *forms;        /* shared with other graphs of the same allocator                       */
    int32_t n;              /* tensors                                                              */
    int32_t n_named;        /* and what is named and has no id                                      */
    int32_t n_nodes;
    int32_t n_leafs;
    bool plain;             /* ids are those of the leafs, the nodes, then what these name          */
    bool open;              /* it was read through what has no id: nothing is known to be the same  */
    gx_tensor **nodes;      /* where ids are not plain                                              */
    gx_tensor **leafs;
    gx_tensor **tensor;     /* [n] and behind, what is named and has no id of its own; [-1] is NULL  */
    gx_tensor **before;     /* the same, where this graph was before                                */
    bool moved;             /* which is known                                                       */
    gh_mark *mark;          /* [n]                                                                  */
    uintptr_t *memory;      /* [n] of forms that are whole: type and usage of the buffer that it had, unless a view */
    int32_t (*rest)[GH_N_REST];
    int32_t n_rest;
    int32_t room;
    int32_t room_tensor;
    int32_t room_before;
    int32_t room_listed;
    int32_t room_rest;
} gh_looks;

/* Take what a graph that was just read looks like.  False without memory. */
bool gh_looks_take(gh_looks *l, gh_forms *forms, const gh_reading *r);

/* Whether a graph is this one, of whole forms: the same tensors, and all of them look the same.  Or those where it was
 * before. */
bool gh_looks_match(const gh_looks *l, void *graph);
bool gh_looks_match_before(const gh_looks *l, void *graph);

/* Whether it is this one at other addresses, of any forms.  `other` gets its tensors alone, even where it is not:
 * nothing may be matched with it. */
bool gh_looks_match_elsewhere(const gh_looks *l, gh_looks *other, void *graph);

/* Let it stand for the graph where it was before, or for that of `other`.  Where it is is not forgotten. */
void gh_looks_return(gh_looks *l);
void gh_looks_move(gh_looks *l, gh_looks *other);

/* Where an id lies. */
typedef struct gh_slot {
    void *buffer;
    void *data;
    int32_t id;
} gh_slot;

/* Whether a graph is this one, of forms that are not whole, where it is or where it was before, which it then is again.
 * Writes where n ids without memory lie, in their order, as it goes: what was just compared is at hand.  Where the
 * graph is another they have none again. */
bool gh_looks_place(gh_looks *l, void *graph, const gh_slot *slot, int32_t n);

/* Whether a graph is wired as `base`, which was plain and of forms that are not whole, with whatever shapes.  Then `l`
 * has taken it. */
bool gh_looks_follow(gh_looks *l, const gh_looks *base, void *graph);

/* Whether two graphs that were read are wired alike, with forms that differ in shape and offset alone. */
bool gh_looks_same_wiring(const gh_looks *a, const gh_looks *b);

/* Where many forms are those of graphs other than these n, forget those, and number the rest anew.  A graph may be
 * among the n twice. */
void gh_looks_compact(gh_looks *const *l, int n, gh_forms *forms);

void gh_looks_free(gh_looks *l);

/* The nodes, where ids are plain: those that the ids stand for now. */
static inline gx_tensor **gh_looks_nodes(const gh_looks *l)
{
    return l->tensor + l->n_leafs;
}

static inline const gh_form *gh_form_at(const gh_looks *l, int32_t id)
{
    return &l->forms->form[l->mark[id].form];
}

#endif
