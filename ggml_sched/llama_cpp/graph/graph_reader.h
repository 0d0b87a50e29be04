/* ggml_sched/llama_cpp/graph/graph_reader.h -- reads ggml's graphs into the arrays that the planner takes.
 *
 * A gh_reader is filled again and again.  Its arrays grow and are freed by gh_reader_free alone, so that reading
 * allocates nothing once the largest graph was read.
 *
 * Every tensor gets an id: first the leafs, then the nodes, then tensors that nodes read and the graph does not list.
 * The ids after these belong to tensors that only the planner's graph has.  A tensor of ggml's without an op becomes:
 *   - a leaf that is a view: not in the planner's graph; its readers read the tensor that it views;
 *   - a node that views another tensor, which a scheduler adds so that the tensor stays in use: a node without bytes;
 *   - a node that views nothing, such as the destination of a copy: a node whose memory begins there, or a leaf if it
 *     is flagged as an input;
 *   - a tensor that nodes read and the graph does not list: a leaf.
 * A node with an op that is flagged as an input is written by the client before the graph runs.  The planner's graph
 * has a leaf for it, and the node is a view of that leaf, so that its memory is taken from the start.
 * Leafs that no node reads get a node that reads them and has no bytes, because the planner gives memory only to leafs
 * that are read: that node is the first one for inputs, the last one for others (graph_reader.c).
 */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPH_GRAPH_READER_H
#define GGML_SCHED_LLAMA_CPP_GRAPH_GRAPH_READER_H

#include <string.h>
#include "arrays.h"
#include "library.h"

/* Where a tensor's memory comes from. */
enum gh_role {
    GH_ROLE_EXTERNAL = 0,   /* the client gave it memory                                        */
    GH_ROLE_PLACED = 1,     /* the plan gives it memory                                         */
    GH_ROLE_VIEW = 2,       /* it shares the memory of its root                                 */
    GH_ROLE_ALIAS = 3       /* a view without an op: its readers read what it views             */
};

#define GH_NOWHERE (-1)     /* instead of a position: not among the graph's nodes, or not among its leafs */

typedef struct gh_item {
    gx_tensor *tensor;      /* NULL: only the planner's graph has this id                       */
    int32_t node;           /* position among the graph's nodes, or GH_NOWHERE                  */
    int32_t leaf;           /* position among the graph's leafs, or GH_NOWHERE                  */
    int32_t reader;         /* of a tensor that the graph does not list: position of the first node that reads it */
    int32_t root;           /* of a view: id of the tensor whose memory it shares; -1: no view  */
    int32_t role;           /* gh_role                                                          */
    int32_t n_readers;      /* how many nodes read it, views included                           */
    int32_t op;             /* GS_OP_*                                                          */
} gh_item;

typedef struct gh_reader {
    const gh_ggml *lib;
    int32_t n;              /* how many tensors ggml's graph has: they have the ids below n     */
    int32_t n_all;          /* how many ids there are; those from n on only the planner's graph has */
    int32_t n_nodes;        /* how many nodes ggml's graph lists                                */
    int32_t n_leafs;        /* how many leafs ggml's graph lists                                */
    int32_t n_listed;       /* how many different tensors the graph lists as leafs or nodes     */
    int32_t n_unlisted;     /* how many tensors the nodes name that the graph does not list     */
    bool plain;             /* every view names its root directly; signatures match plain graphs alone */
    gx_tensor **nodes;      /* ggml's array of the graph's nodes                                */
    gx_tensor **leafs;      /* ggml's array of the graph's leafs                                */
    gh_item *item;          /* [n_all] by id                                                    */
    gs_index index;         /* hash table from a tensor's address to its id                     */
    int32_t *node_id;       /* [n_nodes] the id of each node that ggml's graph lists            */
    /* The planner's graph: */
    gs_graph_size size;
    int32_t *src_begin;     /* [n_all + 1] where the sources of each id begin in `src` and `slot` */
    int32_t *src;           /* ids of the sources of all nodes                                  */
    unsigned char *slot;    /* the index k of each source in its node's src[k]                  */
    int32_t *order;         /* [size.n_nodes] ids of the planner's nodes, in execution order    */
    int32_t *leaf;          /* [size.n_leafs] ids of the planner's leafs                        */
    int32_t room_items;     /* ids that the arrays have room for                                */
} gh_reader;

static inline bool gh_is_view_op(int op)
{
    return op == GS_OP_VIEW || op == GS_OP_RESHAPE || op == GS_OP_PERMUTE || op == GS_OP_TRANSPOSE;
}

static inline bool gh_same_layout(const gs_layout *a, const gs_layout *b)
{
    return a->type == b->type && memcmp(a->ne, b->ne, sizeof a->ne) == 0 && memcmp(a->nb, b->nb, sizeof a->nb) == 0;
}

/* Fetch into the processor's cache the first 256 bytes of a tensor that is read soon: all fields up to its name. */
static inline void gh_prefetch(const gx_tensor *t)
{
    __builtin_prefetch(t);
    __builtin_prefetch((const char *)t + 64);
    __builtin_prefetch((const char *)t + 128);
    __builtin_prefetch((const char *)t + 192);
}

/* Read a graph: ids, roles, sources.  GS_OK; GS_NO_HOST_MEMORY; GS_BAD_ARGUMENT for an invalid graph, such as one with
 * a cycle of views. */
int gh_reader_read(gh_reader *r, const gh_ggml *lib, void *graph);

/* The id of a tensor in the graph that was read; -1: the graph does not have it. */
int32_t gh_reader_id(const gh_reader *r, const gx_tensor *tensor);

void gh_reader_free(gh_reader *r);

#endif
