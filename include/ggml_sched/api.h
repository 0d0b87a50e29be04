/* ggml_sched/api.h -- planning and running from C, C++ and Cython: the one header to include.
 *
 * `gs_api` is a struct of function pointers in the Python extension ggml_sched._capi.  Code that may use Python calls
 * GS_IMPORT_API() once, with the GIL held (include Python.h first).  Code that may not use Python receives the pointer
 * from such code, and checks it with gs_api_check.  No signature has a Python object; no function prints, aborts or
 * sets errno; only program_new and program_new_in take the GIL; the only state between calls is in handles.
 *
 *     graph:    graph_new -> fill the arrays -> graph_finish -> any number of plans -> graph_free
 *     problem:  the other inputs of a plan; arrays of the caller, borrowed while a function runs
 *     plan:     plan_new, or plan_replay from a reserved one -> plan_view -> plan_free
 *     program:  program_new from a plan and backends -> program_set, program_run, program_read -> program_free
 *     arenas:   arenas_new from several plans -> program_new_in for each -> arenas_free
 *
 * Units: sizes, strides and offsets are bytes; `ne` is elements, innermost dimension first, as in ggml.  Tensors are
 * ids 0 .. n_tensors-1, in any order.  Backends are indices, best first; the last one is the host.  -1 means none.
 *
 * Threads.  A handle is filled, finished, refilled and freed by one thread at a time, while no other thread uses the
 * handle.  Any number of threads may read a finished graph or a plan at once; functions that only read take `const`
 * pointers.  Functions on different handles run in parallel.  Programs of the same arenas count as one handle; a
 * function that is called on one of them while another function uses these arenas returns GS_HAZARD.  After fork all
 * handles work in the child.
 *
 * Errors.  A function that can fail returns a gs_status: GS_OK, or a negative number.  A function that fails describes
 * the failure in `*error` unless `error` is NULL; a function that succeeds leaves `*error` unchanged.  A function that
 * fails makes no handle, and leaves the handles that it was called with unchanged and usable.  Wrong contents of arrays
 * cause errors, never invalid memory accesses, provided that the arrays have the stated lengths.  NULL for a handle or
 * for a result is an error, too; a handle that was freed must not be used, as with `free` of C.
 *
 * Versions.  `major` changes with anything that a compiled consumer relies on, including struct sizes; a new `minor`
 * only adds functions, and sizes of new structs, at the end of gs_api, or numbers to ops.h, types.h and policy.h.
 */
#ifndef GGML_SCHED_API_H
#define GGML_SCHED_API_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include "ggml_sched/ops.h"
#include "ggml_sched/plan.h"
#include "ggml_sched/policy.h"
#include "ggml_sched/program.h"
#include "ggml_sched/status.h"
#include "ggml_sched/structs.h"
#include "ggml_sched/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GS_API_MAJOR 2
#define GS_API_MINOR 2
#define GS_API_MODULE "ggml_sched._capi"
#define GS_API_CAPSULE "ggml_sched._capi.api"

#define GS_MAX_TENSORS 0x3fffffff

/* -- graphs --------------------------------------------------------------------------------------------------- */

typedef struct gs_api_graph gs_api_graph;

/* The lengths of a graph's arrays. */
typedef struct gs_graph_size {
    int32_t n_tensors;
    int32_t n_nodes;            /* tensors with an op: computing nodes, and views in the node order */
    int32_t n_leafs;            /* tensors without op                                               */
    int32_t n_src;              /* sources of all tensors together, without empty slots             */
    int32_t n_params;           /* int32 parameters of all tensors; 0 is allowed, see `param_begin` */
    int32_t n_deps;             /* alloc dependencies of all nodes: entries of `dep`; mostly 0      */
} gs_graph_size;

/* The arrays of a graph, which the caller fills.  They are uninitialised memory of the graph, valid until the graph is
 * refilled, trimmed or freed. */
typedef struct gs_graph_arrays {
    /* The caller writes ne, nb, type and op; graph_finish computes nbytes of a type that types.h lists.  A type that
     * types.h does not list may have any other number that is not negative, and the caller writes its nbytes, too.  Ops
     * have the numbers of ops.h; an op that ops.h does not list is GS_OP_CUSTOM, which is never computed in place. */
    gs_layout *layout;          /* [n_tensors]                                                      */
    int32_t *view_src;          /* [n_tensors] root whose memory the tensor shares, never a view; -1: its own memory */
    int64_t *view_offs;         /* [n_tensors] bytes from the root's start; 0 unless a view         */
    unsigned char *flags;       /* [n_tensors] GS_FLAG_* bits                                       */
    int32_t *src_begin;         /* [n_tensors + 1] sources of tensor i: src[src_begin[i] .. src_begin[i + 1]) */
    int32_t *src;               /* [n_src] ids                                                      */
    unsigned char *slot;        /* [n_src] source slot of each entry of src, below GS_MAX_SRC, ascending in a tensor */
    /* An op's parameters do not change a plan: only graph_equal and graph_fingerprint depend on them.  The fingerprint
     * equals the one that the graph has in Python if trailing zeros, and the parameters of views, are left out. */
    int32_t *param_begin;       /* [n_tensors + 1] of tensor i: param[param_begin[i] .. param_begin[i + 1]) */
    int32_t *param;             /* [n_params]                                                       */
    int32_t *node;              /* [n_nodes] ids in execution order                                 */
    int32_t *leaf;              /* [n_leafs] ids of tensors with GS_OP_NONE                         */
    int32_t *dep_begin;         /* [n_tensors + 1] alloc dependencies of node i:                    */
    int32_t *dep;               /*   dep[dep_begin[i] .. dep_begin[i + 1]); both NULL where n_deps is 0 */
} gs_graph_arrays;

/* The handle of a plan.  plan.h has the struct of its arrays, gs_plan, and that of its input, gs_problem. */
typedef struct gs_api_plan gs_api_plan;

/* The handle of a program with memory, which runs on backends; see program.h. */
typedef struct gs_api_program gs_api_program;

/* The handle of arenas, the memory of one or several programs on their backends.  One of the programs runs at a
 * time. */
typedef struct gs_api_arenas gs_api_arenas;

/* -- packing -------------------------------------------------------------------------------------------------- */

#define GS_PACK_NO_CAPACITY (-1)    /* `capacity` of pack: search for the smallest arena            */
#define GS_PACK_DEFAULT_BUDGET (-1) /* `budget` of pack: a few seconds at most                      */
#define GS_PACK_PLANNER_BUDGET (-2) /* `budget` of pack: a fraction of a second                     */

typedef struct gs_pack_result {
    int64_t arena;              /* bytes that the offsets need                                      */
    int64_t bound;              /* live bytes: the most bytes alive at one moment                   */
    int64_t proven;             /* proven lower bound of the arena, in bytes                        */
    int64_t tries;              /* how many tries of its budget the search used                     */
    int32_t method;             /* the packing method that gave these offsets; see pack_method_name */
    int32_t optimal;            /* 1: it is proven that no smaller arena exists                     */
} gs_pack_result;

/* -- the functions -------------------------------------------------------------------------------------------- */

typedef struct gs_api {
    int32_t major;
    int32_t minor;
    size_t size;                /* bytes of this struct when the package was compiled; then those of the other
                                 * structs.  gs_api_check compares them with the headers of the consumer. */
    size_t size_layout;
    size_t size_policy;
    size_t size_arena_result;
    size_t size_error;
    size_t size_graph_size;
    size_t size_graph_arrays;
    size_t size_backend_info;
    size_t size_problem;
    size_t size_plan;
    size_t size_pack_result;

    /* Make a graph; the caller then fills the arrays in *fill.  Errors: GS_BAD_ARGUMENT, GS_NO_HOST_MEMORY. */
    int (*graph_new)(const gs_graph_size *size, gs_graph_arrays *fill, gs_api_graph **graph, gs_error *error);
    /* Make a graph writable again, for other contents of any size.  Allocates memory only if the new contents need
     * more than the graph has.  The old contents are lost, unless the function fails.  Plans made from the graph
     * stay valid. */
    int (*graph_refill)(gs_api_graph *graph, const gs_graph_size *size, gs_graph_arrays *fill, gs_error *error);
    /* Check a filled graph, as listed here, and derive the arrays that planning needs.  A finished graph must not be
     * written to.  Errors: GS_BAD_ARGUMENT and GS_OVERFLOW, with the tensor or the index of the wrong entry in *error;
     * the caller may then correct the arrays and call graph_finish again.
     *   - Every id is in range; each tensor is at most once among nodes and leafs; leafs have GS_OP_NONE and no
     *     sources, nodes another op, and every tensor with an op that computes is a node.
     *   - The sources and the alloc dependencies of a node are leafs and earlier nodes.
     *   - Roots are no views, come before their views, and contain all bytes of their views; a view's first source is
     *     its root or a view of its root; a node that computes into another tensor's memory reads that memory.
     *   - Extents and strides are not negative, and sizes do not overflow. */
    int (*graph_finish)(gs_api_graph *graph, gs_error *error);
    void (*graph_free)(gs_api_graph *graph); /* `graph` may be NULL */
    /* 1 if two graphs are equal in everything that a plan depends on, and in their parameters; else 0.  One of the two
     * may be filled and not finished: so a graph that equals one with a plan needs no graph_finish. */
    int (*graph_equal)(const gs_api_graph *a, const gs_api_graph *b);
    /* 1 if two finished graphs are equal except in parameters, extents, strides, view offsets and sizes; else 0.  Such
     * graphs can share a reserved plan, see plan_replay. */
    int (*graph_same_wiring)(const gs_api_graph *a, const gs_api_graph *b);
    /* Compute two hashes, as keys for a cache of graphs; this takes longer than graph_equal.  `fingerprint`, of 128
     * bits, the high half first, is the same for equal graphs, and the same as Graph.fingerprint in Python.  `wiring`
     * is the same for graphs of equal wiring.  Error: GS_BAD_ARGUMENT, for a graph that is not finished, or trimmed. */
    int (*graph_fingerprint)(const gs_api_graph *graph, uint64_t fingerprint[2], uint64_t *wiring, gs_error *error);

    void (*policy_default)(gs_policy *policy);
    void (*policy_seed)(gs_policy *policy);

    /* Make a plan.  Errors: GS_UNSUPPORTED_OP, GS_BAD_PLACEMENT (a node has memory on a backend that does not support
     * it), GS_OUT_OF_MEMORY (a tensor exceeds the largest buffer), GS_OVERFLOW, GS_BAD_ARGUMENT (in the problem, or a
     * graph that is not finished), GS_NO_HOST_MEMORY. */
    int (*plan_new)(const gs_api_graph *graph, const gs_problem *problem, gs_api_plan **plan, gs_error *error);
    /* Make a plan for `graph` with the decisions of a reserved plan, and set *serves to 1.  That requires the reserved
     * plan's wiring, policy, backends, residents, assignments and fusion groups, and that no tensor is larger.
     * Otherwise *serves is 0, *plan is NULL, and the status is GS_OK.  `reserved_graph` is the graph that `reserved`
     * was made for, neither freed nor refilled since. */
    int (*plan_replay)(const gs_api_plan *reserved, const gs_api_graph *reserved_graph, const gs_api_graph *graph,
                       const gs_problem *problem, gs_api_plan **plan, int *serves, gs_error *error);
    /* Set GS_STATE_EXCLUSIVE for leafs and copies whose memory no other id uses, and GS_STATE_WRITTEN for roots that
     * nodes write to; neither in a plan of very many ids.  Writes to the plan: call it before other threads read the
     * plan. */
    void (*plan_find_exclusive)(gs_api_plan *plan);
    /* Write the pointers to the arrays of a plan to *view.  The plan owns the arrays, until plan_free.  For a plan that
     * is NULL all of *view is zero. */
    void (*plan_view)(const gs_api_plan *plan, gs_plan *view);
    void (*plan_free)(gs_api_plan *plan);    /* `plan` may be NULL */

    /* Choose offsets for n buffers; buffer i has size[i] bytes and is alive over [lower[i], upper[i]), in any unit of
     * time.  Buffers that are alive at the same time do not overlap.  The search ends once the arena has at most
     * `capacity` bytes (GS_PACK_NO_CAPACITY: never for this reason), or after `budget` tries (0: no search; or
     * GS_PACK_*_BUDGET).  Equal inputs give equal offsets on every machine, and the same as `pack` in Python. */
    int (*pack)(int32_t n, const int64_t *lower, const int64_t *upper, const int64_t *size, int64_t capacity,
                int64_t budget, int64_t *offsets, gs_pack_result *result, gs_error *error);

    /* Names by number, valid as long as the process; NULL for an unknown number.  Numbers by name; -1 for an unknown
     * name. */
    const char *(*status_name)(int status);
    const char *(*reason_name)(int reason);
    const char *(*pack_method_name)(int method);
    const char *(*op_name)(int op);          /* "MUL_MAT", "UNARY:SILU"                            */
    int (*op_of_name)(const char *name);
    const char *(*type_name)(int type);      /* "q4_K"                                             */
    int (*type_of_name)(const char *name);
    int (*type_traits)(int type, gs_type_traits *traits); /* GS_BAD_ARGUMENT for an unknown number */

    /* Compute the offsets that plan_replay would choose for ids of size[i] bytes, without making a plan.  `size` and
     * `offset` have an entry for each of the plan's `n` ids.  With `in_order` the ids keep the order of the plan's
     * offsets, which may take more memory: of two ids that are alive at the same time the lower one stays the lower
     * one, and no offset rises.  Each size is a multiple of the alignment of its arena.  The caller has checked that
     * the plan serves: views have the offsets in their roots that they have in the plan, and in-place reuse is still
     * allowed.  Only for plans with GS_OFFSETS_PACKED.  Errors: GS_BAD_ARGUMENT for a size above the plan's;
     * GS_NO_HOST_MEMORY. */
    int (*plan_compact)(const gs_api_plan *reserved, const int64_t *size, int in_order, int64_t *offset);

    /* Free nearly half of the memory of a finished graph from which no more plans are made: the arrays that
     * graph_finish has derived.  The arrays that the caller has filled may move; *kept receives their addresses.  The
     * graph still serves as `reserved_graph`, for graph_equal and for graph_same_wiring, until it is refilled.  Error:
     * GS_BAD_ARGUMENT. */
    int (*graph_trim)(gs_api_graph *graph, gs_graph_arrays *kept, gs_error *error);

    /* Since minor version 2: the sizes of the structs of program.h, and functions that run programs. */
    size_t size_node;
    GS_RENAMED { size_t size_location, size_place; };
    size_t size_wait;
    size_t size_read;
    size_t size_step;
    size_t size_program;
    size_t size_run;
    size_t size_backend;

    /* Make the program of a plan, and allocate its arenas.  `graph` is the graph of the plan, neither trimmed nor
     * refilled since; graph and plan may be freed afterwards.  `backends` has the plan's backends in their order; the
     * tables are copied, and what they point to must live until program_free.  `resident[id]` is the address of a
     * resident's first byte in its backend's memory; entries of other tensors and of views are ignored; NULL: there are
     * no residents.  Takes the GIL and imports NumPy: the calling thread need not hold the GIL, but Python must be
     * initialised.  Errors: GS_BAD_ARGUMENT, GS_BAD_PLACEMENT (an address that is not aligned), GS_OUT_OF_MEMORY (a
     * backend has no memory for its arena), GS_NO_HOST_MEMORY, and what a backend returns. */
    int (*program_new)(const gs_api_graph *graph, const gs_api_plan *plan, const gs_backend *backends,
                       void *const *resident, gs_api_program **program, gs_error *error);
    /* Write the pointers to the arrays of a program to *view.  The program owns the arrays, until program_free.  For a
     * program that is NULL all of *view is zero. */
    void (*program_view)(const gs_api_program *program, gs_program *view);
    /* Set the data of a leaf for all computes from now on.  `data` is host memory of the caller, from which computes
     * load.  It must stay valid and unchanged until the next call for this leaf, because a compute does not load again
     * what is in place already.  Error: GS_BAD_ARGUMENT, if the program loads no such leaf, or the leaf has another
     * number of bytes. */
    int (*program_set)(gs_api_program *program, int32_t tensor, const void *data, int64_t nbytes, gs_error *error);
    /* Note that the caller has changed a resident's data, so that copies of the resident are made again.  `tensor` -1:
     * other code may have used the memory of the arenas, so that all data is loaded and copied again.  Error:
     * GS_BAD_ARGUMENT. */
    int (*program_touch)(gs_api_program *program, int32_t tensor, gs_error *error);
    /* Issue the steps of a compute on this thread, without the GIL and without allocating memory.  Returns when all
     * steps are queued; those of a backend without a queue are then done.  GS_HAZARD: an input was never set, and
     * nothing ran.  After an error of a backend no node has a result, all backends have been synchronized, and the
     * program can run again.  If another program of the same arenas ran last, its queued work is waited for first. */
    int (*program_run)(gs_api_program *program, gs_error *error);
    /* Wait for all backends, and return the first error of queued work. */
    int (*program_synchronize)(gs_api_program *program, gs_error *error);
    /* Wait for all backends, and copy `nbytes` bytes of a node or leaf, from byte `offset` on, to host memory.
     * GS_HAZARD: no compute has succeeded, or the last one has failed; or another program has computed in the same
     * arenas since; or the tensor is not in memory at the end of a compute: other nodes use a node's memory (flag it as
     * an output), or nodes read a leaf through copies alone.  GS_BAD_ARGUMENT: bytes outside the tensor.  Other errors
     * are those of a backend. */
    int (*program_read)(gs_api_program *program, int32_t tensor, void *to, int64_t offset, int64_t nbytes,
                        gs_error *error);
    /* Wait for all backends, and free all memory and events; `program` may be NULL.  A backend's function must not call
     * it. */
    void (*program_free)(gs_api_program *program);

    /* Allocate arenas for the programs of these plans, large enough for each of them, one at a time: the prompts and
     * the tokens of a runner need one set of arenas.  `backends` as for program_new; all plans have the same backends.
     * The plans may be freed afterwards.  Errors: GS_BAD_ARGUMENT, GS_BAD_PLACEMENT (an address that is not aligned, or
     * memory that overlaps another buffer of the backend), GS_OUT_OF_MEMORY, GS_NO_HOST_MEMORY, and what a backend
     * returns. */
    int (*arenas_new)(const gs_api_plan *const *plans, int32_t n_plans, const gs_backend *backends,
                      gs_api_arenas **arenas, gs_error *error);
    /* Make a program as program_new does, in arenas that exist; its plan is one that they were made for, or another
     * that fits.  A compute overwrites the results of the other programs in these arenas, whose next compute loads and
     * copies all data again.  GS_OUT_OF_MEMORY: an arena is too small; in *error `value` is what the plan needs,
     * `limit` what there is. */
    int (*program_new_in)(const gs_api_graph *graph, const gs_api_plan *plan, gs_api_arenas *arenas,
                          void *const *resident, gs_api_program **program, gs_error *error);
    /* Free the arenas as soon as no program uses them; `arenas` may be NULL. */
    void (*arenas_free)(gs_api_arenas *arenas);

    /* Free all arrays of a finished graph except those of its wiring, which are less than a quarter of what
     * graph_trim keeps.  *kept receives the addresses of the wiring's arrays, which may have moved; layout,
     * view_offs, param_begin and param are NULL.  The graph then equals no other graph, but still serves as
     * `reserved_graph` and for graph_same_wiring, until it is refilled.  Error: GS_BAD_ARGUMENT, for a graph that is
     * not finished, or trimmed. */
    int (*graph_keep_wiring)(gs_api_graph *graph, gs_graph_arrays *kept, gs_error *error);
} gs_api;

/* GS_OK if the functions and structs of `api` are those of this header; else GS_BAD_ARGUMENT, with both versions in
 * `error`. */
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
               || api->size_problem != sizeof(gs_problem) || api->size_plan != sizeof(gs_plan)
               || api->size_pack_result != sizeof(gs_pack_result) || api->size_node != sizeof(gs_node)
               || api->size_location != sizeof(gs_location) || api->size_wait != sizeof(gs_wait)
               || api->size_read != sizeof(gs_read) || api->size_step != sizeof(gs_step)
               || api->size_program != sizeof(gs_program) || api->size_run != sizeof(gs_run_nodes)
               || api->size_backend != sizeof(gs_backend)) {
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
/* Import the functions of the installed package; NULL with a Python exception set, such as ImportError.  The caller
 * holds the GIL. */
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
