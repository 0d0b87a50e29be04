# cython: language_level=3
"""The C API: the functions of ggml_sched/api.h, in a capsule named `api`.

Owns the handles, and checks that a call is valid in the present state of a handle.  Calls core.graph to check graphs,
core.plan to check problems and make plans, core.pack to pack buffers, and planning._c_program to compile programs.
Only program_new and program_new_in take the GIL and use Python objects.  Invariant: every handle that a caller has is
complete, and a function that fails has changed no handle.

Includes, before the table at the end:

    _capi_arenas   Backends and their memory, which programs share.
    _capi_program  Making programs, with their events.
    _capi_run      Running them.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport SIZE_MAX, int32_t, int64_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset, strcmp

from ggml_sched._c cimport *
from ggml_sched.core.alloc.gallocr cimport plan_owner
from ggml_sched.core.graph.flat cimport (
    flat_bytes, flat_check, flat_classify, flat_equal, flat_fingerprint, flat_given_bytes, flat_keep_wiring,
    flat_lay_out, flat_lay_out_given, flat_lay_out_wiring, flat_same_wiring, flat_wiring_bytes, node_name_op,
)
from ggml_sched.core.pack.api cimport pack_any_times, pack_method_word
from ggml_sched.core.plan.make cimport (
    gs_failure, gs_plan_compact, gs_plan_free, gs_plan_make, gs_plan_replay, plan_mark_exclusive, plan_needed,
)
from ggml_sched.core.plan.problem cimport NAME_ROOM, name_backend, planning_error, request_init, requests_match

cdef extern from "Python.h" nogil:
    int Py_IsInitialized()


cdef int refuse(gs_error *error, int status, int64_t value, int64_t limit, const char *message) noexcept nogil:
    """Describe an invalid call in `error`, unless that is NULL; returns the status."""
    if error != NULL:
        error.status = status
        error.tensor = error.backend = error.index = -1
        error.value, error.limit = value, limit
        snprintf(error.message, sizeof(error.message), b"%s", message)
    return status


# -- graphs -----------------------------------------------------------------------------------------------------


cdef int check_size(const gs_graph_size *size, gs_error *error) noexcept nogil:
    if not 0 <= size.n_tensors <= GS_MAX_TENSORS:
        return refuse(error, GS_BAD_ARGUMENT, size.n_tensors, GS_MAX_TENSORS, b"n_tensors is negative or too large")
    if size.n_nodes < 0 or size.n_leafs < 0 or size.n_nodes > size.n_tensors - <int64_t>size.n_leafs:
        return refuse(error, GS_BAD_ARGUMENT, <int64_t>size.n_nodes + size.n_leafs, size.n_tensors,
                      b"n_nodes and n_leafs are negative, or more than the tensors")
    if not 0 <= size.n_src <= GS_MAX_TENSORS or not 0 <= size.n_params <= GS_MAX_TENSORS:
        return refuse(error, GS_BAD_ARGUMENT, max(size.n_src, size.n_params), GS_MAX_TENSORS,
                      b"n_src or n_params is negative or too large")
    if not 0 <= size.n_deps <= GS_MAX_TENSORS:
        return refuse(error, GS_BAD_ARGUMENT, size.n_deps, GS_MAX_TENSORS, b"n_deps is negative or too large")
    return GS_OK


cdef int graph_refill(gs_api_graph *graph, const gs_graph_size *size, gs_graph_arrays *fill,
                      gs_error *error) noexcept nogil:
    cdef gs_graph_box *box = <gs_graph_box *>graph
    cdef int64_t bytes
    cdef void *block
    cdef int status
    if box == NULL or size == NULL or fill == NULL:
        return refuse(error, GS_BAD_ARGUMENT, 0, 0, b"graph, size or fill is NULL")
    status = check_size(size, error)
    if status != GS_OK:
        return status
    bytes = flat_bytes(size)
    if bytes > box.room:
        block = malloc(bytes)
        if block == NULL:
            return refuse(error, GS_NO_HOST_MEMORY, bytes, 0, b"no host memory for the arrays of a graph")
        free(box.block)
        box.block, box.room = block, bytes
    box.size = size[0]
    box.filling += 1
    box.finished = box.trimmed = False
    flat_lay_out(&box.g, box.block, size)
    show_arrays(&box.g, fill)
    return GS_OK


cdef void show_arrays(const gs_graph *g, gs_graph_arrays *found) noexcept nogil:
    """Store in *found the addresses of the arrays of a graph that the caller fills."""
    found.layout, found.view_src, found.view_offs, found.flags = g.layout, g.view_src, g.view_offs, g.flags
    found.src_begin, found.src, found.slot = g.src_begin, g.src, g.slot
    found.param_begin, found.param = g.param_begin, g.param
    found.node, found.leaf = g.node, g.leaf
    found.dep_begin, found.dep = g.dep_begin, g.dep


cdef int graph_new(const gs_graph_size *size, gs_graph_arrays *fill, gs_api_graph **graph,
                   gs_error *error) noexcept nogil:
    cdef gs_graph_box *box
    cdef int status
    if graph == NULL:
        return refuse(error, GS_BAD_ARGUMENT, 0, 0, b"graph is NULL")
    graph[0] = NULL
    box = <gs_graph_box *>calloc(1, sizeof(gs_graph_box))
    if box == NULL:
        return refuse(error, GS_NO_HOST_MEMORY, sizeof(gs_graph_box), 0, b"no host memory for a graph")
    status = graph_refill(<gs_api_graph *>box, size, fill, error)
    if status != GS_OK:
        graph_free(<gs_api_graph *>box)
        return status
    graph[0] = <gs_api_graph *>box
    return GS_OK


cdef int graph_finish(gs_api_graph *graph, gs_error *error) noexcept nogil:
    cdef gs_graph_box *box = <gs_graph_box *>graph
    cdef int status
    if box == NULL or box.finished:
        return refuse(error, GS_BAD_ARGUMENT, 0, 0, b"graph is NULL, or finished already")
    status = flat_check(&box.g, &box.size, error)
    if status == GS_OK:
        flat_classify(&box.g)
        box.finished = True
    return status


cdef int graph_trim(gs_api_graph *graph, gs_graph_arrays *kept, gs_error *error) noexcept nogil:
    cdef gs_graph_box *box = <gs_graph_box *>graph
    if box == NULL or kept == NULL or not box.finished or box.g.layout == NULL:
        return refuse(error, GS_BAD_ARGUMENT, 0, 0,
                      b"graph is NULL, not finished or has its wiring alone, or kept is NULL")
    shrink_block(box, flat_given_bytes(&box.size))
    flat_lay_out_given(&box.g, box.block, &box.size)
    show_arrays(&box.g, kept)
    return GS_OK


cdef int graph_keep_wiring(gs_api_graph *graph, gs_graph_arrays *kept, gs_error *error) noexcept nogil:
    cdef gs_graph_box *box = <gs_graph_box *>graph
    if box == NULL or kept == NULL or not box.finished or box.trimmed:
        return refuse(error, GS_BAD_ARGUMENT, 0, 0, b"graph is NULL, trimmed or not finished, or kept is NULL")
    flat_keep_wiring(&box.g, &box.size)
    shrink_block(box, flat_wiring_bytes(&box.size))
    flat_lay_out_wiring(&box.g, box.block, &box.size)
    show_arrays(&box.g, kept)
    return GS_OK


cdef void shrink_block(gs_graph_box *box, int64_t bytes) noexcept nogil:
    """Free a graph's block except its first `bytes`, and note that the graph is trimmed."""
    cdef void *block = realloc(box.block, max(bytes, 1))
    if block != NULL:       # if realloc fails, the block keeps its size
        box.block, box.room = block, bytes
    box.trimmed = True


cdef void graph_free(gs_api_graph *graph) noexcept nogil:
    cdef gs_graph_box *box = <gs_graph_box *>graph
    if box != NULL:
        free(box.block)
        free(box)


cdef bint both_finished(const gs_graph_box *a, const gs_graph_box *b) noexcept nogil:
    return a != NULL and b != NULL and a.finished and b.finished


cdef int graph_equal(const gs_api_graph *a, const gs_api_graph *b) noexcept nogil:
    cdef const gs_graph_box *x = <const gs_graph_box *>a
    cdef const gs_graph_box *y = <const gs_graph_box *>b
    if x == NULL or y == NULL or not (x.finished or y.finished):
        return False
    if x == y:
        return True
    if x.g.layout == NULL or y.g.layout == NULL or memcmp(&x.size, &y.size, sizeof(gs_graph_size)) != 0:
        return False
    return flat_equal(&x.g, &y.g) if x.finished else flat_equal(&y.g, &x.g)


cdef int graph_same_wiring(const gs_api_graph *a, const gs_api_graph *b) noexcept nogil:
    cdef const gs_graph_box *x = <const gs_graph_box *>a
    cdef const gs_graph_box *y = <const gs_graph_box *>b
    return both_finished(x, y) and (x == y or flat_same_wiring(&x.g, &y.g))


cdef int graph_fingerprint(const gs_api_graph *graph, uint64_t *fingerprint, uint64_t *wiring,
                           gs_error *error) noexcept nogil:
    cdef const gs_graph_box *box = <const gs_graph_box *>graph
    if box == NULL or not box.finished or box.trimmed or fingerprint == NULL or wiring == NULL:
        return refuse(error, GS_BAD_ARGUMENT, 0, 0,
                      b"graph is NULL, trimmed or not finished, or fingerprint or wiring is NULL")
    flat_fingerprint(&box.g, NULL, fingerprint, wiring)
    return GS_OK


# -- plans ------------------------------------------------------------------------------------------------------


cdef void policy_default(gs_policy *policy) noexcept nogil:
    if policy == NULL:
        return
    policy.placement = GS_PLACEMENT_DEFAULT
    policy.offsets = GS_OFFSETS_PACKED
    policy.reuse = GS_REUSE_ALL
    policy.leafs_first = True
    policy.stream = False
    policy.n_copies = 1


cdef void policy_seed(gs_policy *policy) noexcept nogil:
    if policy == NULL:
        return
    policy_default(policy)
    policy.placement = GS_PLACEMENT_SEED
    policy.offsets = GS_OFFSETS_BEST_FIT
    policy.reuse = GS_REUSE_FIRST
    policy.leafs_first = False


cdef int plan_box_new(const gs_graph_box *graph, const gs_problem *problem, gs_plan_box **box,
                      gs_error *error) noexcept nogil:
    """Check graph and problem, and make in *box a handle with their request and an empty plan."""
    cdef int status
    if graph == NULL or problem == NULL or not graph.finished or graph.trimmed:
        return refuse(error, GS_BAD_ARGUMENT, 0, 0, b"problem is NULL, or graph is NULL, trimmed or not finished")
    box[0] = <gs_plan_box *>calloc(1, sizeof(gs_plan_box))
    if box[0] == NULL:
        return refuse(error, GS_NO_HOST_MEMORY, sizeof(gs_plan_box), 0, b"no host memory for a plan")
    status = request_init(&box[0].request, &graph.g, problem, error)
    if status != GS_OK:
        free(box[0])
        return status
    box[0].graph, box[0].filling, box[0].size = graph, graph.filling, graph.size
    return GS_OK


cdef void plan_box_detach(gs_plan_box *box) noexcept nogil:
    """Clear the pointers to arrays of the caller, which may be freed once plan_new or plan_replay has returned."""
    box.request.g = NULL
    box.request.p.supports = box.request.p.offloads = NULL
    box.request.p.nbytes = NULL


cdef int plan_new(const gs_api_graph *graph, const gs_problem *problem, gs_api_plan **plan,
                  gs_error *error) noexcept nogil:
    cdef gs_plan_box *box = NULL
    cdef gs_failure failed
    cdef int status
    if plan == NULL:
        return refuse(error, GS_BAD_ARGUMENT, 0, 0, b"plan is NULL")
    plan[0] = NULL
    status = plan_box_new(<const gs_graph_box *>graph, problem, &box, error)
    if status != GS_OK:
        return status
    status = gs_plan_make(&box.request, &box.c, &failed)
    if status != GS_OK:
        status = planning_error(error, &box.request, problem, status, &failed)
        plan_free(<gs_api_plan *>box)
        return status
    plan_box_detach(box)
    plan[0] = <gs_api_plan *>box
    return GS_OK


cdef bint made_for(const gs_plan_box *plan, const gs_graph_box *graph) noexcept nogil:
    """Whether a plan was made for the present contents of `graph`.  Does not read *plan.graph, which may have been
    freed."""
    return (plan.graph == graph and plan.filling == graph.filling and plan.size.n_tensors == graph.size.n_tensors
            and plan.size.n_nodes == graph.size.n_nodes and plan.size.n_src == graph.size.n_src)


cdef int plan_replay(const gs_api_plan *reserved, const gs_api_graph *reserved_graph, const gs_api_graph *graph,
                     const gs_problem *problem, gs_api_plan **plan, int *serves, gs_error *error) noexcept nogil:
    cdef const gs_plan_box *first = <const gs_plan_box *>reserved
    cdef const gs_graph_box *old = <const gs_graph_box *>reserved_graph
    cdef gs_plan_box *box = NULL
    cdef gs_failure failed
    cdef bint fits = False
    cdef int status
    if plan == NULL or serves == NULL or first == NULL or old == NULL:
        return refuse(error, GS_BAD_ARGUMENT, 0, 0, b"plan, serves, reserved or reserved_graph is NULL")
    plan[0] = NULL
    serves[0] = False
    if not made_for(first, old):
        return refuse(error, GS_BAD_ARGUMENT, 0, 0, b"reserved was not made for what reserved_graph holds")
    status = plan_box_new(<const gs_graph_box *>graph, problem, &box, error)
    if status != GS_OK:
        return status
    if graph_same_wiring(reserved_graph, graph) and requests_match(&first.request, &box.request):
        status = gs_plan_replay(&box.request, &first.c, &box.c, &fits, &failed)
        if status != GS_OK:
            status = planning_error(error, &box.request, problem, status, &failed)
    if status != GS_OK or not fits:
        plan_free(<gs_api_plan *>box)
        return status
    plan_box_detach(box)
    plan[0] = <gs_api_plan *>box
    serves[0] = True
    return GS_OK


cdef int plan_compact(const gs_api_plan *reserved, const int64_t *size, int in_order, int64_t *offset) noexcept nogil:
    cdef const gs_plan_box *box = <const gs_plan_box *>reserved
    if box == NULL or size == NULL or offset == NULL:
        return GS_BAD_ARGUMENT
    return gs_plan_compact(&box.c, size, in_order != 0, offset)


cdef void plan_find_exclusive(gs_api_plan *plan) noexcept nogil:
    if plan != NULL:
        plan_mark_exclusive(&(<gs_plan_box *>plan).c)


cdef void plan_free(gs_api_plan *plan) noexcept nogil:
    cdef gs_plan_box *box = <gs_plan_box *>plan
    if box != NULL:
        gs_plan_free(&box.c)
        free(box.request.memory)
        free(box)


cdef void plan_view(const gs_api_plan *plan, gs_plan *view) noexcept nogil:
    if view != NULL and plan != NULL:
        view[0] = (<const gs_plan_box *>plan).c
    elif view != NULL:
        memset(view, 0, sizeof(gs_plan))


# -- packing ----------------------------------------------------------------------------------------------------


cdef int c_pack(int32_t n, const int64_t *lower, const int64_t *upper, const int64_t *size, int64_t capacity,
                int64_t budget, int64_t *offsets, gs_pack_result *result, gs_error *error) noexcept nogil:
    cdef int32_t failed = -1
    cdef int status
    if result == NULL or n > 0 and (lower == NULL or upper == NULL or size == NULL or offsets == NULL):
        return refuse(error, GS_BAD_ARGUMENT, 0, 0, b"result or one of the arrays is NULL")
    status = pack_any_times(n, lower, upper, size, capacity, budget, offsets, result, &failed)
    if status == GS_OK:
        return GS_OK
    if status == GS_NO_HOST_MEMORY:
        return refuse(error, status, n, 0, b"no host memory to pack")
    if status == GS_OVERFLOW:
        return refuse(error, status, n, 0, b"the sizes of all buffers add up to more than 63 bits hold")
    if failed < 0:
        return refuse(error, status, n, 0,
                      b"n is negative or more than can be packed, or capacity or budget is negative")
    status = refuse(error, status, size[failed], 0, b"a buffer ends before it begins, or has a negative size")
    if error != NULL:
        error.index = failed
    return status


# -- names ------------------------------------------------------------------------------------------------------


cdef int number_of(const char *name, const char *(*name_of)(int) noexcept nogil, int n) noexcept nogil:
    """The number below n whose name, by `name_of`, is `name`; -1 if there is none."""
    cdef const char *found
    cdef int number
    if name != NULL:
        for number in range(n):
            found = name_of(number)
            if found != NULL and strcmp(found, name) == 0:
                return number
    return -1


cdef int op_of_name(const char *name) noexcept nogil:
    return number_of(name, gs_op_name, GS_N_OPS)


cdef int type_of_name(const char *name) noexcept nogil:
    return number_of(name, gs_type_name, GS_N_TYPES)


cdef int type_traits(int type, gs_type_traits *traits) noexcept nogil:
    cdef gs_type_traits found = gs_traits_of_type(type)
    if traits == NULL or found.block_size == 0:
        return GS_BAD_ARGUMENT
    traits[0] = found
    return GS_OK


include "_capi_arenas.pxi"
include "_capi_run.pxi"
include "_capi_program.pxi"

# -- the table --------------------------------------------------------------------------------------------------


cdef gs_api functions
functions.major, functions.minor, functions.size = GS_API_MAJOR, GS_API_MINOR, sizeof(gs_api)
functions.size_layout = sizeof(gs_layout)
functions.size_policy = sizeof(gs_policy)
functions.size_arena_result = sizeof(gs_arena_result)
functions.size_error = sizeof(gs_error)
functions.size_graph_size = sizeof(gs_graph_size)
functions.size_graph_arrays = sizeof(gs_graph_arrays)
functions.size_backend_info = sizeof(gs_backend_info)
functions.size_problem = sizeof(gs_problem)
functions.size_plan = sizeof(gs_plan)
functions.size_pack_result = sizeof(gs_pack_result)
functions.graph_new = graph_new
functions.graph_refill = graph_refill
functions.graph_finish = graph_finish
functions.graph_free = graph_free
functions.graph_equal = graph_equal
functions.graph_same_wiring = graph_same_wiring
functions.graph_fingerprint = graph_fingerprint
functions.policy_default = policy_default
functions.policy_seed = policy_seed
functions.plan_new = plan_new
functions.plan_replay = plan_replay
functions.plan_find_exclusive = plan_find_exclusive
functions.plan_view = plan_view
functions.plan_free = plan_free
functions.pack = c_pack
functions.status_name = gs_status_name
functions.reason_name = gs_reason_name
functions.pack_method_name = pack_method_word
functions.op_name = gs_op_name
functions.op_of_name = op_of_name
functions.type_name = gs_type_name
functions.type_of_name = type_of_name
functions.type_traits = type_traits
functions.plan_compact = plan_compact
functions.graph_trim = graph_trim
functions.graph_keep_wiring = graph_keep_wiring
functions.size_node = sizeof(gs_node)
functions.size_location = sizeof(gs_location)
functions.size_wait = sizeof(gs_wait)
functions.size_read = sizeof(gs_read)
functions.size_step = sizeof(gs_step)
functions.size_program = sizeof(gs_program)
functions.size_run = sizeof(gs_run_nodes)
functions.size_backend = sizeof(gs_backend)
functions.program_new = program_new
functions.program_view = program_view
functions.program_set = program_set
functions.program_touch = program_touch
functions.program_run = program_run
functions.program_synchronize = program_synchronize
functions.program_read = program_read
functions.program_free = program_free
functions.arenas_new = arenas_new
functions.program_new_in = program_new_in
functions.arenas_free = arenas_free

api = PyCapsule_New(&functions, GS_API_CAPSULE, NULL)
