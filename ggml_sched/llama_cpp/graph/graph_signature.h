/* ggml_sched/llama_cpp/graph/graph_signature.h -- tells whether a graph is one that was read before.
 *
 * A signature has for each tensor its descriptor (tensor_descriptors.h), the ids of the tensors that it names as
 * sources and root, and whether it has memory.  Graphs that differ in any of these differ.  Matching a graph with a
 * signature reads no more than the tensors: it is many times faster than reading the graph.
 * Invariant: a tensor is dereferenced only after the graph, or a tensor of the graph, has named it.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPH_GRAPH_SIGNATURE_H
#define GGML_SCHED_LLAMA_CPP_GRAPH_GRAPH_SIGNATURE_H

#include "graph_reader.h"
#include "tensor_descriptors.h"

#define GH_ROOT 2           /* index of view_src among an item's links, behind the first sources    */
#define GH_N_LINKS 3
#define GH_N_REST (GS_MAX_SRC - GH_ROOT) /* further sources, which few tensors have                  */

/* Bits of gh_signature_item.bits.  The bits above are the index + 1 of the item's further sources, 0: it has none. */
#define GH_HAS_DATA 1
#define GH_HAS_BUFFER 2
#define GH_HAS_CONSTANT_DATA 4 /* it has data and is not computed: nothing else of it is compared   */
#define GH_REST_SHIFT 3

typedef struct gh_signature_item {
    int32_t descriptor;
    int32_t link[GH_N_LINKS]; /* ids; -1: NULL                                                      */
    int32_t bits;
} gh_signature_item;

typedef struct gh_signature {
    gh_descriptors *descriptors; /* shared by all signatures of a cache                             */
    int32_t n;              /* tensors with an id                                                   */
    int32_t n_named;        /* and tensors that are named but have none                             */
    int32_t n_nodes;
    int32_t n_leafs;
    bool plain;             /* id = position: leafs, then nodes, then others (gh_reader.plain)      */
    bool incomplete;        /* a view without an id was followed: no graph matches this signature   */
    gx_tensor **nodes;      /* the graph's lists, where it is not plain                             */
    gx_tensor **leafs;
    gx_tensor **tensor;     /* [n_named] by id; [-1] is NULL                                        */
    gx_tensor **previous;   /* [n_named] the tensors before the last rebind                         */
    bool has_previous;
    gh_signature_item *item; /* [n]                                                                 */
    uintptr_t *memory;      /* [n] kind of the tensor's buffer, with full descriptors               */
    int32_t (*rest)[GH_N_REST]; /* [n_rest] ids of further sources                                  */
    int32_t n_rest;
    int32_t room;
    int32_t room_tensor;
    int32_t room_previous;
    int32_t room_listed;
    int32_t room_rest;
} gh_signature;

/* The address of a placed tensor. */
typedef struct gh_slot {
    void *buffer;
    void *data;
    int32_t id;
} gh_slot;

/* Fill a signature with the graph that was just read.  False without memory. */
bool gh_signature_fill(gh_signature *l, gh_descriptors *descriptors, const gh_reader *r);

/* Whether a graph has the same tensors, unchanged; or the tensors before the last rebind.  For full descriptors. */
bool gh_signature_matches(const gh_signature *l, void *graph);
bool gh_signature_matches_previous(const gh_signature *l, void *graph);

/* The same for descriptors that are not full; where the previous tensors match, they become the present ones.
 * Meanwhile the addresses of n slots, ascending by id, are written into the tensors: these are in the processor's cache
 * now.  If the graph does not match, they are removed again. */
bool gh_signature_match_and_place(gh_signature *l, void *graph, const gh_slot *slot, int32_t n);

/* Whether a graph of other tensors has this signature.  Only the tensors of `other` are filled, even at false. */
bool gh_signature_matches_moved(const gh_signature *l, gh_signature *other, void *graph);

/* Let a signature be of its previous tensors, or of those of `other`.  The present ones become the previous ones. */
void gh_signature_restore(gh_signature *l);
void gh_signature_rebind(gh_signature *l, gh_signature *other);

/* Whether a graph has the wiring of `base`, which is plain, with any shapes: then `l` is its signature. */
bool gh_signature_matches_wiring(gh_signature *l, const gh_signature *base, void *graph);

/* Whether two signatures are of the same wiring. */
bool gh_signature_same_wiring(const gh_signature *a, const gh_signature *b);

/* Where there are many descriptors that none of these n signatures has, remove those and renumber the rest. */
void gh_signatures_compact(gh_signature *const *l, int n, gh_descriptors *descriptors);

void gh_signature_free(gh_signature *l);

static inline const gh_descriptor *gh_descriptor_at(const gh_signature *l, int32_t id)
{
    return &l->descriptors->descriptor[l->item[id].descriptor];
}

#endif
