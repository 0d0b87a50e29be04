/* ggml_sched/api.h -- planning from C, C++ and Cython: the one header to include.
 *
 * `gs_api` is a struct of functions that lives in the Python extension ggml_sched._capi.  Whoever runs inside Python
 * gets it with GS_IMPORT_API(), once, with the GIL held (include Python.h first); everybody else is handed the
 * pointer and asks gs_api_check.  No signature has a Python object; no function takes the GIL, prints, aborts, sets
 * errno or keeps anything between calls but in the handles below.
 *
 *     graph:    graph_new -> fill the arrays -> graph_finish -> any number of plans -> graph_free
 *     problem:  what a plan depends on besides the graph; the caller's arrays, borrowed while a function runs
 *     plan:     plan_new, or plan_replay from a reserved one -> plan_view -> plan_free
 *
 * Units: sizes, strides and offsets are bytes; `ne` is elements, innermost dimension first, as in ggml.  Tensors are
 * ids 0 .. n_tensors-1, in any order.  Backends are indices, best first; the last one is the host.  -1 is none.
 *
 * Threads.  A handle is filled, finished, refilled and freed by one thread at a time, and by none while another uses
 * it.  A finished graph and a plan may be read by any number of threads at once: they are `const` where functions only
 * read.  Functions on different handles run in parallel.  After fork everything goes on working in the child.
 *
 * Errors.  A function that can fail returns a gs_status: GS_OK, or negative.  With an `error` that is not NULL it
 * says there what it is about, and writes nothing there otherwise.  A failure leaves nothing behind: no handle is
 * given, one that was passed in is as it was before the call and works.  Whatever the arrays hold, nothing worse than
 * an error comes of it, as long as they are as long as they are said to be.
 *
 * Versions.  `major` changes with anything that a compiled consumer relies on, struct sizes among them; a new `minor`
 * only adds functions at the end of gs_api, or numbers to ops.h, types.h and policy.h.
 */
#ifndef GGML_SCHED_API_H
#define GGML_SCHED_API_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include "ggml_sched/ops.h"
#include "ggml_sched/policy.h"
#include "ggml_sched/status.h"
#include "ggml_sched/structs.h"
#include "ggml_sched/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GS_API_MAJOR 1
#define GS_API_MINOR 1
#define GS_API_MODULE "ggml_sched._capi"
#define GS_API_CAPSULE "ggml_sched._capi.api"

#define GS_MAX_BACKENDS 256
#define GS_MAX_TENSORS 0x3fffffff

/* -- graphs --------------------------------------------------------------------------------------------------- */

typedef struct gs_api_graph gs_api_graph;

/* How long the arrays of a graph are. */
typedef struct gs_graph_size {
    int32_t n_tensors;
    int32_t n_nodes;            /* that are computed, or are views made on the way                  */
    int32_t n_leafs;            /* tensors without op                                               */
    int32_t n_src;              /* sources of all tensors together, empty slots left out            */
    int32_t n_params;           /* parameter words of all tensors together; 0 will do, see below    */
    int32_t n_deps;             /* entries of `dep`; mostly 0                                       */
} gs_graph_size;

/* Where a graph is written: its own memory, valid until graph_refill or graph_free.  All of it is uninitialised. */
typedef struct gs_graph_arrays {
    /* ne, nb, type and op.  nbytes is computed from them for the types of types.h, and the caller's for a type that
     * has no number there (which may be any that is not negative): so graphs of types that only the caller knows are
     * planned, too.  Numbers of ops are those of ops.h; an op that it does not list is GS_OP_CUSTOM, never computed
     * in place. */
    gs_layout *layout;          /* [n_tensors]                                                      */
    int32_t *view_src;          /* [n_tensors] -1, or the root: whose memory it shares; no view itself */
    int64_t *view_offs;         /* [n_tensors] from the root's start; 0 for what is no view         */
    unsigned char *flags;       /* [n_tensors] GS_FLAG_* bits                                       */
    int32_t *src_begin;         /* [n_tensors + 1] sources of tensor i: src[src_begin[i] .. src_begin[i + 1]) */
    int32_t *src;               /* [n_src] ids                                                      */
    unsigned char *slot;        /* [n_src] of each: its place among the op's sources, ascending, below GS_MAX_SRC */
    /* Parameters do not change a plan: they only make graph_equal and the fingerprint tell graphs apart.  Trailing
     * zeros and those of views left out, the fingerprint is that of the same graph in Python. */
    int32_t *param_begin;       /* [n_tensors + 1]                                                  */
    int32_t *param;             /* [n_params]                                                       */
    int32_t *node;              /* [n_nodes] ids in execution order                                 */
    int32_t *leaf;              /* [n_leafs] ids of tensors with GS_OP_NONE                         */
    int32_t *dep_begin;         /* [n_tensors + 1] tensors that node i keeps until it is done:      */
    int32_t *dep;               /*   dep[dep_begin[i] .. dep_begin[i + 1]); both NULL where n_deps is 0 */
} gs_graph_arrays;

/* -- problems ------------------------------------------------------------------------------------------------- */

typedef struct gs_backend_info {
    const char *name;           /* for messages; may be NULL                                        */
    int64_t alignment;          /* of every address, 1 .. 2**30                                     */
    int64_t max_buffer;         /* the largest buffer; 0: no bound                                  */
    const uint64_t *inplace;    /* [GS_N_OPS] bit k: source k of that op may be its destination, where it has the same
                                 * layout; NULL: every source of the ops that ggml computes in place */
} gs_backend_info;

/* What a plan depends on besides the graph.  Everything but `policy`, `n_backends` and `backends` may be zero or
 * NULL; arrays of bytes hold 0 or not 0. */
typedef struct gs_problem {
    gs_policy policy;           /* begin with policy_default or policy_seed                         */
    int32_t n_backends;         /* 1 .. GS_MAX_BACKENDS                                             */
    int32_t n_buffers;          /* of `buffer`; 0: residents of one backend are in one buffer       */
    int32_t n_groups;
    const gs_backend_info *backends; /* [n_backends]                                                */
    /* Tensors that have memory already.  Of views the entries of their roots count, their own are not looked at. */
    const int32_t *resident;    /* [n_tensors] backend of the buffer, or the first that reads it; -1: to be placed */
    const unsigned char *usage; /* [n_tensors] GS_USAGE_*; NULL: GS_USAGE_ANY                       */
    const int32_t *buffer;      /* [n_tensors] index of the buffer; NULL with n_buffers 0           */
    const unsigned char *reads_buffer; /* [n_backends][n_buffers] b reads or owns it; NULL with n_buffers 0 */
    const unsigned char *reads; /* [n_backends][n_backends] b reads memory of c; NULL: nobody's but its own */
    /* What is asked of backends. */
    const int32_t *assigned;    /* [n_tensors] the caller's choice, -1 for none                     */
    const unsigned char *supports; /* [n_backends][n_tensors] NULL: everything                      */
    const unsigned char *offloads; /* [n_backends][n_tensors] offers to take it from the host; NULL: nothing */
    const int64_t *nbytes;      /* [n_backends][n_tensors] bytes that it takes there, at least its own; NULL: its own */
    /* Nodes that a backend would compute as one (fusion), by first member, then backend. */
    const int32_t *group_backend; /* [n_groups]                                                     */
    const int32_t *group_begin; /* [n_groups + 1], into group_member                                */
    const int32_t *group_member; /* positions in the graph's node order, ascending in each group, two or more */
} gs_problem;

/* -- plans ---------------------------------------------------------------------------------------------------- */

typedef struct gs_api_plan gs_api_plan;

/* Everything that was decided: the plan's own memory, valid until plan_free.  Ids below n_tensors are the graph's
 * tensors, then come the copies, then the further places of copies that have several.  Positions (birth, death,
 * trimmed) count in `seq`; an id's chunk is offset / stride of its home's arena, and offset % stride where it begins
 * in that. */
typedef struct gs_plan_arrays {
    int32_t n_backends;
    int32_t n_tensors;
    int32_t n_copies;
    int32_t n_places;           /* beyond the first of each copy                                    */
    int32_t n;                  /* ids: n_tensors + n_copies + n_places                             */
    int32_t n_seq;
    int32_t n_splits;
    int32_t n_inputs;
    int32_t n_write_backs;
    int32_t n_chunks;
    int32_t n_groups;
    /* Of each graph tensor: */
    const int32_t *assign;      /* its backend, -1 for a leaf that nothing uses                     */
    const unsigned char *reason; /* GS_REASON_*                                                     */
    /* Of each split: */
    const int32_t *split_backend;
    const int32_t *split_start; /* positions in the graph's node order                              */
    const int32_t *split_stop;
    const int32_t *split_inputs; /* one past its last entry in `inputs`                             */
    const int32_t *inputs;      /* [n_inputs] copies in the order in which they are made; a copy may recur */
    /* Of each copy: */
    const int32_t *copy_like;   /* graph tensor with the copy's layout                              */
    const int32_t *copy_from;   /* graph tensor that must exist before the copy is made             */
    const int32_t *copy_backend;
    const int32_t *copy_kept;   /* 1: an unchanged weight, copied once and kept for the next compute */
    const int32_t *place_copy;  /* [n_places] of each further place: its copy, ascending            */
    const int32_t *back_node;   /* [n_write_backs] nodes that write through a copy into another backend's memory, */
    const int32_t *back_copy;   /*   and that copy: it goes back once the node is done              */
    /* Of each id: */
    const int32_t *like;        /* the graph tensor whose layout, op and flags it has               */
    const int32_t *home;        /* the backend whose arena holds it, -1: memory outside the plan    */
    const int32_t *root;        /* whose memory it shares: view root or taken-over source; -1       */
    const int32_t *birth;       /* position at which its memory is taken; -1                        */
    const int32_t *death;       /* position after which it is free; n_seq if it stays               */
    const int32_t *trimmed;     /* position at which the tail was given back, where rest < size     */
    const int32_t *src_begin;   /* [n + 1] what it reads, copies put in: src[src_begin[i] .. src_begin[i + 1]) */
    const int32_t *src;
    const int64_t *size;        /* aligned                                                          */
    const int64_t *view_offs;   /* from the start of the root's memory                              */
    const int64_t *offset;      /* from the start of its home's arena; -1 outside the plan          */
    const int64_t *rest;        /* bytes that stay taken once the tail has been given back          */
    const unsigned char *op;
    const unsigned char *flags;
    const unsigned char *state; /* GS_STATE_*; EXCLUSIVE and WRITTEN once plan_find_exclusive was called */
    const int32_t *seq;         /* [n_seq] ids in execution order, copies before the nodes of their split */
    /* Of each backend: */
    const gs_arena_result *arena;
    const int64_t *chunk_nbytes; /* [n_chunks]: the bytes of each buffer to allocate                */
    /* Nodes that are computed as one, at the place of the last; NULL where there are none: */
    const int32_t *group_begin; /* [n_groups + 1], into group_member                                */
    const int32_t *group_member; /* positions in the graph's node order, ascending in each group    */
} gs_plan_arrays;

/* -- packing -------------------------------------------------------------------------------------------------- */

#define GS_PACK_NO_CAPACITY (-1)    /* only the smallest arena is good enough                       */
#define GS_PACK_DEFAULT_BUDGET (-1) /* a few seconds at most                                        */
#define GS_PACK_PLANNER_BUDGET (-2) /* a fraction of one                                            */

typedef struct gs_pack_result {
    int64_t arena;              /* bytes that the offsets need                                      */
    int64_t bound;              /* the most bytes alive at one moment                               */
    int64_t proven;             /* no arena is smaller than this                                    */
    int64_t tries;              /* that the search spent                                            */
    int32_t method;             /* what won; pack_method_name                                       */
    int32_t optimal;            /* 1: it is proven that no smaller arena exists                     */
} gs_pack_result;

/* -- the functions -------------------------------------------------------------------------------------------- */

typedef struct gs_api {
    int32_t major;
    int32_t minor;
    size_t size;                /* of this struct, as the functions were compiled; the sizes of the others: */
    size_t size_layout;
    size_t size_policy;
    size_t size_arena_result;
    size_t size_error;
    size_t size_graph_size;
    size_t size_graph_arrays;
    size_t size_backend_info;
    size_t size_problem;
    size_t size_plan_arrays;
    size_t size_pack_result;

    /* A graph to be filled: `fill` says where.  GS_BAD_ARGUMENT, GS_NO_HOST_MEMORY. */
    int (*graph_new)(const gs_graph_size *size, gs_graph_arrays *fill, gs_api_graph **graph, gs_error *error);
    /* Make a graph writable again, for other contents of any size; allocates only where it needs more memory than it
     * ever had.  What was in it is gone, but for a failure, which leaves it as it was.  Plans made from it stay
     * valid. */
    int (*graph_refill)(gs_api_graph *graph, const gs_graph_size *size, gs_graph_arrays *fill, gs_error *error);
    /* Check everything, and find out what planning asks of a graph.  A finished graph is not to be written to.
     * GS_BAD_ARGUMENT and GS_OVERFLOW name the tensor or the array's index: it may be mended and finished again then.
     *   - Every id is in range; each tensor is at most once among nodes and leafs; leafs have GS_OP_NONE and no
     *     sources, nodes another op, and every tensor with an op that computes is a node.
     *   - A node reads leafs and earlier nodes, and so it is with what it keeps (`dep`).
     *   - Roots are no views, come before their views, and hold all of their bytes; a view's first source is its root
     *     or shares its memory; a node that computes into another tensor's memory reads that memory.
     *   - Extents and strides are not negative, and sizes do not overflow. */
    int (*graph_finish)(gs_api_graph *graph, gs_error *error);
    void (*graph_free)(gs_api_graph *graph); /* NULL will do */
    /* 1 if two graphs are the same in everything that a plan depends on, and in their parameters; else 0.  One of them
     * may be filled and not finished: where it is equal to a graph that has a plan, it need not be. */
    int (*graph_equal)(const gs_api_graph *a, const gs_api_graph *b);
    /* The same of two finished graphs but for parameters, extents, strides, view offsets and sizes: what a reserved
     * plan may serve. */
    int (*graph_same_wiring)(const gs_api_graph *a, const gs_api_graph *b);
    /* 128 bits that equal graphs have in common, as Graph.fingerprint in Python (high half first), and 64 of the
     * wiring.  Made anew each time, and slower than graph_equal: a key for graphs that are kept.  GS_BAD_ARGUMENT: not
     * finished. */
    int (*graph_fingerprint)(const gs_api_graph *graph, uint64_t fingerprint[2], uint64_t *wiring, gs_error *error);

    void (*policy_default)(gs_policy *policy);
    void (*policy_seed)(gs_policy *policy);

    /* Decide everything.  GS_UNSUPPORTED_OP, GS_BAD_PLACEMENT (memory on a backend that does not support the node),
     * GS_OUT_OF_MEMORY (a tensor exceeds the largest buffer), GS_OVERFLOW, GS_BAD_ARGUMENT (the problem, or a graph
     * that is not finished), GS_NO_HOST_MEMORY. */
    int (*plan_new)(const gs_api_graph *graph, const gs_problem *problem, gs_api_plan **plan, gs_error *error);
    /* The decisions of a reserved plan for a graph of the same wiring whose tensors are no larger: *serves is 1, and
     * *plan new.  Where the graph, or what the problem says of backends, residents, assignments and groups, is not
     * the same, or something does not fit, *serves is 0, *plan NULL, and the status GS_OK.  `reserved_graph` is the
     * one that `reserved` was made for, neither freed nor refilled since. */
    int (*plan_replay)(const gs_api_plan *reserved, const gs_api_graph *reserved_graph, const gs_api_graph *graph,
                       const gs_problem *problem, gs_api_plan **plan, int *serves, gs_error *error);
    /* Find the ids that nothing else shares memory with, and those written to: GS_STATE_EXCLUSIVE, GS_STATE_WRITTEN.
     * Writes to the plan: before other threads read it. */
    void (*plan_find_exclusive)(gs_api_plan *plan);
    void (*plan_view)(const gs_api_plan *plan, gs_plan_arrays *arrays);
    void (*plan_free)(gs_api_plan *plan);    /* NULL will do */

    /* Offsets for n buffers of `size` bytes alive over [lower, upper), any times, so that none that live at once
     * overlap.  `capacity`: an arena that fits it is good enough; GS_PACK_NO_CAPACITY.  `budget`: tries of the search,
     * 0 for none; GS_PACK_*_BUDGET.  The same input gives the same offsets everywhere, and those of Python's `pack`. */
    int (*pack)(int32_t n, const int64_t *lower, const int64_t *upper, const int64_t *size, int64_t capacity,
                int64_t budget, int64_t *offsets, gs_pack_result *result, gs_error *error);

    /* Names live as long as the process; NULL for a number that has none, -1 for a name that is none. */
    const char *(*status_name)(int status);
    const char *(*reason_name)(int reason);
    const char *(*pack_method_name)(int method);
    const char *(*op_name)(int op);          /* "MUL_MAT", "UNARY:SILU"                            */
    int (*op_of_name)(const char *name);
    const char *(*type_name)(int type);      /* "q4_K"                                             */
    int (*type_of_name)(const char *name);
    int (*type_traits)(int type, gs_type_traits *traits); /* GS_BAD_ARGUMENT for a number that no type has */

    /* Since minor version 1. */

    /* The offsets that plan_replay gives ids of `size` bytes, without a plan of their own; both arrays have the plan's
     * `n` entries.  Sizes are rounded up to the alignment of their arena; one above the plan's is a GS_BAD_ARGUMENT.
     * The caller has checked that the plan serves: views lie where they did in their roots, and in-place reuse is still
     * allowed.  For plans of a policy that packs.  GS_NO_HOST_MEMORY. */
    int (*plan_compact)(const gs_api_plan *reserved, const int64_t *size, int64_t *offset);
} gs_api;

/* GS_OK if these functions are what this header declares; else GS_BAD_ARGUMENT, and `error` says both versions. */
static inline int gs_api_check(const gs_api *api, gs_error *error) {
    const char *wrong = NULL;
    if (api == NULL) {
        wrong = "there is none";
    } else if (api->major != GS_API_MAJOR || api->minor < GS_API_MINOR) {
        wrong = "the versions do not go together";
    } else if (api->size < sizeof(gs_api) || api->size_layout != sizeof(gs_layout)
               || api->size_policy != sizeof(gs_policy) || api->size_arena_result != sizeof(gs_arena_result)
               || api->size_error != sizeof(gs_error) || api->size_graph_size != sizeof(gs_graph_size)
               || api->size_graph_arrays != sizeof(gs_graph_arrays) || api->size_backend_info != sizeof(gs_backend_info)
               || api->size_problem != sizeof(gs_problem) || api->size_plan_arrays != sizeof(gs_plan_arrays)
               || api->size_pack_result != sizeof(gs_pack_result)) {
        wrong = "the structs differ in size";
    }
    if (wrong == NULL) return GS_OK;
    if (error != NULL) {
        error->status = GS_BAD_ARGUMENT;
        error->tensor = error->backend = error->index = -1;
        error->value = api != NULL ? api->major : 0;
        error->limit = GS_API_MAJOR;
        snprintf(error->message, sizeof(error->message), "the C API of ggml_sched is %d.%d, compiled against %d.%d: %s",
                 api != NULL ? (int)api->major : 0, api != NULL ? (int)api->minor : 0, GS_API_MAJOR, GS_API_MINOR,
                 wrong);
    }
    return GS_BAD_ARGUMENT;
}

#ifdef Py_PYTHON_H
/* The functions, from the installed package; NULL with ImportError.  Needs the GIL. */
static inline const gs_api *gs_import_api(void) {
    gs_error error;
    const gs_api *api = NULL;
    PyObject *capsule, *module = PyImport_ImportModule(GS_API_MODULE);
    if (module == NULL) return NULL;
    capsule = PyObject_GetAttrString(module, "api");
    Py_DECREF(module);
    if (capsule == NULL) return NULL;
    api = (const gs_api *)PyCapsule_GetPointer(capsule, GS_API_CAPSULE);
    /* The extension is never unloaded, and the struct is part of it. */
    Py_DECREF(capsule);
    if (api == NULL) return NULL;
    if (gs_api_check(api, &error) != GS_OK) {
        PyErr_SetString(PyExc_ImportError, error.message);
        return NULL;
    }
    return api;
}

#define GS_IMPORT_API() gs_import_api()
#endif

#ifdef __cplusplus
}
#endif

#endif
