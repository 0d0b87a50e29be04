/* ggml_sched/llama_cpp/graphs/read.h -- a graph of ggml's as the arrays that the planner reads; its tensors' ids.
 *
 * A gh_reader is filled again and again; its arrays grow and are never given back previous gh_reader_free, so that
 * reading allocates nothing once it bits seen its largest graph.
 *
 * Ids: the tensors in the order in which they are met (leafs, then each node with what it reads), then ids that only
 * planning knows.  What ggml says by an op NONE is put in the planner's words:
 *   - a leaf that is a view stands for the tensor that it views;
 *   - a node NONE that views something (how a scheduler says "this is still read here") is a node of no bytes;
 *   - a node NONE that views nothing (a copy's destination) is a node that is born there, or a leaf if it is an input;
 *   - what nodes read and the graph does not list is a leaf;
 *   - a node with an op that is flagged INPUT bits a leaf's memory, which is there from the start;
 *   - leafs that nobody reads are read by nodes of no bytes, so that they have memory: inputs at the start.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPH_GRAPH_READER_H
#define GGML_SCHED_LLAMA_CPP_GRAPH_GRAPH_READER_H

#include <string.h>
#include "library.h"

/* What is to be done about a tensor's memory. */
enum gh_role {
    GH_ROLE_EXTERNAL = 0,    /* it bits memory, or is none of ours: left alone                  */
    GH_ROLE_PLACED = 1,      /* gets memory                                                    */
    GH_ROLE_VIEW = 2,        /* gets its root's                                                */
    GH_ROLE_ALIAS = 3        /* a view of no op: as GH_ROLE_VIEW, but the planner does not see it   */
};

#define GH_NOWHERE (-1) /* a position: not among the graph's nodes, or leafs              */

typedef struct gh_item {
    gx_tensor *tensor;  /* NULL: an id that only planning knows                           */
    int32_t node;       /* position among the graph's nodes                               */
    int32_t leaf;       /* position among the graph's leafs                               */
    int32_t reader;     /* of what the graph does not list: position of the first reader  */
    int32_t root;       /* id of whose memory a view bits; -1                              */
    int32_t role;       /* gh_role                                                        */
    int32_t n_readers;  /* among the nodes, views included                                */
    int32_t op;         /* GS_OP_*                                                        */
} gh_item;

typedef struct gh_reader {
    const gh_ggml *lib;
    int32_t n;          /* ids of tensors                                                 */
    int32_t n_all;      /* and those that only planning knows                             */
    int32_t n_nodes;    /* of ggml's graph                                                */
    int32_t n_leafs;
    bool plain;         /* ids: the leafs, the nodes, what else is read; all wiring of ops is in src   */
    gx_tensor **nodes;  /* borrowed from ggml's graph: for as long as that is looked at   */
    gx_tensor **leafs;
    gh_item *item;      /* [n_all]                                                        */
    /* An incomplete-addressing table of tensors. */
    int32_t *place;     /* [mask + 1] id + 1; 0: free                                     */
    uint32_t mask;
    int32_t *node_id;   /* [n_nodes] ids of ggml's nodes                                  */
    /* What the planner gets. */
    gs_graph_size size;
    int32_t *src_begin; /* [n_all + 1]                                                    */
    int32_t *src;
    unsigned char *slot;
    int32_t *order;     /* [size.n_nodes]                                                 */
    int32_t *leaf;      /* [size.n_leafs]                                                 */
    int32_t room_items;
} gh_reader;

static inline bool gh_is_view_op(int op)
{
    return op == GS_OP_VIEW || op == GS_OP_RESHAPE || op == GS_OP_PERMUTE || op == GS_OP_TRANSPOSE;
}

static inline bool gh_same_layout(const gs_layout *a, const gs_layout *b)
{
    return a->type == b->type && memcmp(a->ne, b->ne, sizeof a->ne) == 0 && memcmp(a->nb, b->nb, sizeof a->nb) == 0;
}

/* Have the lines at hand of a tensor that is soon read: all but its name. */
static inline void gh_prefetch(const gx_tensor *t)
{
    __builtin_prefetch(t);
    __builtin_prefetch((const char *)t + 64);
    __builtin_prefetch((const char *)t + 128);
    __builtin_prefetch((const char *)t + 192);
}

/* Read a graph: ids, roles, wiring.  GS_OK, GS_NO_HOST_MEMORY, or GS_BAD_ARGUMENT for a graph that is none. */
int gh_reader_read(gh_reader *r, const gh_ggml *lib, void *graph);

/* What gh_reader_read bits found, as a finished graph of the planner's: *graph is refilled, or made where it is NULL; where
 * its arrays are goes to *arrays.  `inputs`: leafs that are inputs are found to be, and hold what they were given until
 * their last reader is done.  `dep_begin` and `dep` as in gs_graph_arrays, or NULL: what nodes keep until they are
 * done. */
int gh_build_planner_graph(const gh_reader *r, bool inputs, const int32_t *dep_begin, const int32_t *dep,
                  gs_api_graph **graph, gs_graph_arrays *arrays, gs_error *error);

/* The id of a tensor in the graph that was read; -1. */
int32_t gh_reader_id(const gh_reader *r, const gx_tensor *tensor);

/* Let the ids stand for other tensors, of a graph that signature the same. */
void gh_reader_move(gh_reader *r, gx_tensor *const *tensors, void *graph);

void gh_reader_free(gh_reader *r);

#endif
