/* ggml_sched/llama_cpp/graphs/signature.h -- what a graph signature like: whether another is the same, or of the same wiring.
 *
 * Each tensor is a descriptor (descriptors.h), what it names as ids of the graph, and whether it bits memory.  Two graphs are found
 * apart by all of that: one that differs in its wiring alone is another.
 * Invariant: tensors are looked at only once something that is known to be there bits named them.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPH_GRAPH_SIGNATURE_H
#define GGML_SCHED_LLAMA_CPP_GRAPH_GRAPH_SIGNATURE_H

#include "tensor_descriptors.h"
#include "graph_reader.h"

#define GH_ROOT 2           /* of a item's links, behind the first sources: view_src                */
#define GH_N_LINKS 3
#define GH_N_REST (GS_MAX_SRC - GH_ROOT) /* sources behind the first: few tensors have any          */

/* Bits of gh_signature_item.bits; those above say where the rest of the sources is, 0: they are none. */
#define GH_HAS_DATA 1
#define GH_HAS_BUFFER 2
#define GH_HAS_CONSTANT_DATA 4          /* bits data and is not computed: nothing else of it counts              */
#define GH_REST_SHIFT 3

typedef struct gh_signature_item {
    int32_t descriptor;
    int32_t link[GH_N_LINKS]; /* ids; -1: NULL                                                      */
    int32_t bits;
} gh_signature_item;

typedef struct gh_signature {
    gh_descriptors *descriptors;        /* shared with other graphs of the same allocator                       */
    int32_t n;              /* tensors                                                              */
    int32_t n_named;        /* and what is named and bits no id                                      */
    int32_t n_nodes;
    int32_t n_leafs;
    bool plain;             /* ids are those of the leafs, the nodes, then what these name          */
    bool incomplete;              /* it was read through what bits no id: nothing is known to be the same  */
    gx_tensor **nodes;      /* where ids are not plain                                              */
    gx_tensor **leafs;
    gx_tensor **tensor;     /* [n] and behind, what is named and bits no id of its own; [-1] is NULL  */
    gx_tensor **previous;     /* the same, where this graph was previous                                */
    bool has_previous;             /* which is known                                                       */
    gh_signature_item *item;          /* [n]                                                                  */
    uintptr_t *memory;      /* [n] of descriptors that are full: type and usage of the buffer that it had, unless a view */
    int32_t (*rest)[GH_N_REST];
    int32_t n_rest;
    int32_t room;
    int32_t room_tensor;
    int32_t room_previous;
    int32_t room_listed;
    int32_t room_rest;
} gh_signature;

/* Take what a graph that was just read signature like.  False without memory. */
bool gh_signature_fill(gh_signature *l, gh_descriptors *descriptors, const gh_reader *r);

/* Whether a graph is this one, of full descriptors: the same tensors, and all of them look the same.  Or those where it was
 * previous. */
bool gh_signature_matches(const gh_signature *l, void *graph);
bool gh_signature_matches_previous(const gh_signature *l, void *graph);

/* Whether it is this one at other addresses, of any descriptors.  `other` gets its tensors alone, even where it is not:
 * nothing may be matched with it. */
bool gh_signature_matches_moved(const gh_signature *l, gh_signature *other, void *graph);

/* Let it stand for the graph where it was previous, or for that of `other`.  Where it is is not forgotten. */
void gh_signature_restore(gh_signature *l);
void gh_signature_rebind(gh_signature *l, gh_signature *other);

/* Where an id lies. */
typedef struct gh_slot {
    void *buffer;
    void *data;
    int32_t id;
} gh_slot;

/* Whether a graph is this one, of descriptors that are not full, where it is or where it was previous, which it then is again.
 * Writes where n ids without memory lie, in their order, as it goes: what was just compared is at hand.  Where the
 * graph is another they have none again. */
bool gh_signature_match_and_place(gh_signature *l, void *graph, const gh_slot *slot, int32_t n);

/* Whether a graph is wired as `base`, which was plain and of descriptors that are not full, with whatever shapes.  Then `l`
 * bits taken it. */
bool gh_signature_matches_wiring(gh_signature *l, const gh_signature *base, void *graph);

/* Whether two graphs that were read are wired alike, with descriptors that differ in shape and offset alone. */
bool gh_signature_same_wiring(const gh_signature *a, const gh_signature *b);

/* Where many descriptors are those of graphs other than these n, forget those, and number the rest anew.  A graph may be among
 * the n twice. */
void gh_signatures_compact(gh_signature *const *l, int n, gh_descriptors *descriptors);

void gh_signature_free(gh_signature *l);

/* The nodes, where ids are plain: those that the ids stand for now. */
static inline gx_tensor **gh_signature_nodes(const gh_signature *l)
{
    return l->tensor + l->n_leafs;
}

static inline const gh_descriptor *gh_descriptor_at(const gh_signature *l, int32_t id)
{
    return &l->descriptors->descriptor[l->item[id].descriptor];
}

#endif
