/* ggml_sched/graph.h -- a graph as the planner sees it, and a node as a kernel sees it.
 *
 * Plain structs; the arrays of gs_graph are indexed by tensor id.  Sizes, strides and offsets are bytes.  They
 * correspond to ggml_cgraph and ggml_tensor.
 */
#ifndef GGML_SCHED_GRAPH_H
#define GGML_SCHED_GRAPH_H

#include <stdint.h>
#include "ggml_sched/ops.h"
#include "ggml_sched/structs.h"

/* Roles of a tensor, for the passes of the planner: bits of gs_graph.role. */
#define GS_ROLE_VIEW 1    /* VIEW, RESHAPE, PERMUTE, TRANSPOSE                               */
#define GS_ROLE_WRITES 2  /* computes into its root's memory: CPY, SET_ROWS, in place        */
#define GS_ROLE_INPUT 4   /* a leaf flagged INPUT, not a view                                */
#define GS_ROLE_FOLLOWS 8 /* a computing node that its weights draw to their backend         */

typedef struct gs_graph {
    int32_t n_tensors;
    int32_t n_nodes;
    int32_t n_leafs;
    gs_layout *layout;          /* NULL once graph_keep_wiring (api.h) has freed all but the wiring       */
    int64_t *view_offs;
    int32_t *view_src;          /* of a view the id of its root, else -1                                  */
    unsigned char *flags;       /* GS_FLAG_*                                                              */
    int32_t *src_begin;         /* sources of tensor i: src[src_begin[i] .. src_begin[i + 1])             */
    int32_t *src;               /* ids; empty slots left out                                              */
    unsigned char *slot;        /* for each entry of src its slot, 0 .. GS_MAX_SRC - 1                    */
    int32_t *param_begin;       /* parameters of tensor i: param[param_begin[i] .. param_begin[i + 1]),   */
    int32_t *param;             /*   in graphs of Python none of views, and no trailing zeros             */
    int32_t *node;              /* ids in execution order                                                 */
    int32_t *leaf;              /* ids of the tensors without op                                          */
    int32_t *position;          /* of each tensor its index in `node`; -1: it is no node                  */
    int32_t *dep_begin;         /* alloc dependencies of node i: dep[dep_begin[i] .. dep_begin[i+1])      */
    int32_t *dep;               /* dep_begin and dep are NULL if no node has alloc dependencies           */
    /* Derived from the above, once for all passes: */
    int32_t n_work;
    int32_t n_roots;
    int32_t n_views;
    int32_t *root;              /* ids of the tensors that are not views                                  */
    int32_t *work;              /* ids of the nodes that compute, in order (views compute nothing)        */
    int32_t *view;              /* ids of the tensors with a root that compute nothing: views, and leafs  */
    int32_t *memory;            /* for each tensor the id that owns its memory: a root, or itself         */
    int64_t *nbytes;
    int32_t *n_readers;         /* how often nodes have a tensor as a source or an alloc dependency       */
    int32_t *n_viewers;         /* of each root: how many of its views are nodes, or read, or outputs     */
    int32_t *first_view;        /* of each root: its view with the lowest id; -1: it has no view          */
    int32_t *next_view;         /* of each view: the next view of the same root by id; -1: the last       */
    int32_t *reader_begin;      /* computing nodes that read tensor i: reader[reader_begin[i] ..          */
    int32_t *reader;            /*   reader_begin[i + 1]), in execution order; twice if two slots do      */
    unsigned char *op;
    unsigned char *role;        /* GS_ROLE_* bits                                                         */
    uint64_t *layout_hash;      /* hash of a tensor's type, extents and strides                           */
    uint32_t *alike;            /* of a node: bit k is set if its source in slot k has its layout         */
    int32_t *type;              /* of each tensor its type, if `layout` is NULL; else NULL                */
} gs_graph;

/* A node with its address: the argument of compiled kernels. */
typedef struct gs_node {
    gs_layout layout;
    int32_t op;                 /* the op's family: GS_OP_UNARY, GS_OP_GLU; or layout.op  */
    int32_t sub_op;             /* number in the family: GS_UNARY_*, GS_GLU_*; else 0     */
    int32_t params[GS_MAX_OP_PARAMS];
    int32_t flags;              /* GS_FLAG_*                                             */
    int32_t n_src;
    const struct gs_node *src[GS_MAX_SRC]; /* NULL for an empty slot                     */
    void *data;                 /* address of its first byte; NULL: no address            */
} gs_node;

#endif
