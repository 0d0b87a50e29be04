/* ggml_sched/llama_cpp/graph/graph_signature.h -- signatures, by which a graph is recognised as equal to one that
 * was read before.
 *
 * A signature has for each tensor its descriptor (tensor_descriptors.h), the ids of the tensors that it names as
 * sources and root, and whether it has memory.  Two graphs are equal if they agree in all of these; then one plan
 * serves both.  Matching a graph with a signature compares its tensors one by one and builds nothing: it is many times
 * faster than reading the graph.  Only plain graphs match (gh_reader.plain): those that ggml's functions build all are,
 * and others are read and planned each time.
 * Invariant: a tensor is dereferenced only after the graph, or a tensor of the graph, has named it.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPH_GRAPH_SIGNATURE_H
#define GGML_SCHED_LLAMA_CPP_GRAPH_GRAPH_SIGNATURE_H

#include "arena.h"
#include "graph_reader.h"
#include "tensor_descriptors.h"

#define GH_ROOT 2           /* index of the root in gh_signature_item.link, after the first two sources */
#define GH_N_LINKS 3
#define GH_N_REST (GS_MAX_SRC - GH_ROOT) /* sources after the first two, which few tensors have      */

/* Bits of gh_signature_item.bits.  The bits from GH_REST_SHIFT on are 1 + the row of the item's further sources in
 * gh_wiring.rest, or 0: the tensor has at most two sources. */
#define GH_HAS_DATA 1
#define GH_HAS_BUFFER 2
#define GH_HAS_CONSTANT_DATA 4 /* a leaf with data, such as a weight: only that it has data is compared */
#define GH_REST_SHIFT 3

typedef struct gh_signature_item {
    int32_t link[GH_N_LINKS]; /* ids of src[0], src[1] and the root; -1: the tensor has none        */
    int32_t bits;
} gh_signature_item;

/* The part of a signature that graphs of one wiring have in common: all but descriptors and tensors.  Counted by
 * references, since graphs that differ in shapes alone share it. */
typedef struct gh_wiring {
    int32_t refs;
    gh_signature_item *item; /* [n] by id                                                           */
    uintptr_t *memory;      /* [n] memory_kind of each tensor's buffer: its type and usage; NULL under an allocator */
    int32_t *listed;        /* [n_leafs + n_nodes] ids of the leafs and nodes that the graph lists; NULL: each is
                             * listed once, and the ids are 0, 1, 2 ...                             */
    int32_t (*rest)[GH_N_REST]; /* [n_rest] a row for each tensor of more than two sources: ids of the further ones */
    int32_t n_rest;
    int32_t room_rest;
} gh_wiring;

typedef struct gh_signature {
    gh_descriptors *descriptors; /* shared by all signatures of a cache                             */
    int32_t n;              /* how many ids: of leafs, then nodes, then tensors that the graph does not list */
    int32_t n_nodes;
    int32_t n_leafs;
    int32_t n_listed;       /* how many ids leafs and nodes have: n_leafs + n_nodes, less those listed twice */
    bool plain;             /* the graph is plain (gh_reader.plain); if not, it has no links and nothing matches */
    gx_tensor **tensor;     /* [n] by id; [-1] is NULL, so that a link of -1 is compared like any other */
    int32_t *descriptor;    /* [n] by id: the number of the tensor's descriptor                     */
    gh_wiring *wiring;
    int32_t room;           /* ids that `descriptor` has room for                                   */
    int32_t room_tensor;    /* ids that `tensor` has room for                                       */
} gh_signature;

/* Fill a signature with the graph that was just read.  False without memory. */
bool gh_signature_fill(gh_signature *s, gh_descriptors *descriptors, const gh_reader *r);

/* Match a graph with a signature: true if it consists of the signature's own tensors, unchanged.  Meanwhile each tensor
 * with role[id] GH_ROLE_PLACED gets its address in `arenas` at `places`, because it is in the processor's cache just
 * then.  If the graph turns out not to match, these addresses are set to NULL again.  `role` NULL: no tensor gets an
 * address. */
bool gh_signature_match(const gh_signature *s, void *graph, const gh_arena *arenas, const unsigned char *role,
                        gh_places places);

/* Whether a graph of other tensors, as when the client built it anew, equals the signature's graph.  other->tensor
 * receives the graph's tensors by id, and is overwritten even if the result is false; nothing else of `other` is
 * filled. */
bool gh_signature_match_moved(const gh_signature *s, gh_signature *other, void *graph);

/* Exchange the tensors of a signature with those of `other`, which gh_signature_match_moved has filled: the signature
 * is then that of the graph which was found equal. */
void gh_signature_rebind(gh_signature *s, gh_signature *other);

/* Make `s` the signature of a graph if the graph has the wiring, ops and types of `base`, with any shapes.  Returns
 * whether it has. */
bool gh_signature_match_wiring(gh_signature *s, const gh_signature *base, void *graph);

/* Whether two signatures are of graphs with the same wiring, ops and types. */
bool gh_signature_same_wiring(const gh_signature *a, const gh_signature *b);

/* If `s` and `other` have equal wirings, let `s` share that of `other` in place of its own; returns whether they
 * have. */
bool gh_signature_share_wiring(gh_signature *s, const gh_signature *other);

/* If there are many descriptors (gh_descriptors.n_kept), remove those that none of these n signatures has, and renumber
 * the rest in all n signatures. */
void gh_signatures_compact(gh_signature *const *s, int n, gh_descriptors *descriptors);

/* Drop a signature's reference to its wiring.  The signature must be filled again before it is used. */
void gh_signature_clear(gh_signature *s);

void gh_signature_free(gh_signature *s);

/* The id of the graph's leaf number i, or, where i is n_leafs or more, of its node number i - n_leafs. */
static inline int32_t gh_listed_id(const gh_signature *s, int32_t i)
{
    return s->wiring->listed != NULL ? s->wiring->listed[i] : i;
}

static inline const gh_descriptor *gh_descriptor_at(const gh_signature *s, int32_t id)
{
    return &s->descriptors->descriptor[s->descriptor[id]];
}

#endif
