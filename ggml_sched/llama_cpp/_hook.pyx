# cython: language_level=3
"""The hook: a library whose functions, in the C files beside this, have ggml's names and replace those of a client's
ggml.

install.py loads it with RTLD_GLOBAL before ggml's libraries, so that the dynamic linker binds their calls to it.
The functions of this module give Python the hook's counters, its last failure, and its last plans, as plain values.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport *
from ggml_sched.core.plan.plan_values cimport values_of_plan

from ggml_sched.core.graph.types import op_numbers


cdef extern from "counters.h":
    int GH_N_COUNTS
    int64_t gh_count_of(int i) noexcept nogil
    void gh_clear_counts() noexcept nogil
    void gh_set_pass_through(bint on) noexcept nogil
    bint gh_last_error(gs_error *error) noexcept nogil
    const char *gh_unsupported() noexcept nogil

cdef extern from "scheduler.h":
    cdef const gs_api *gh_api
    void gh_set_schedules(bint on) noexcept nogil

cdef extern from "plan_view.h":
    ctypedef struct gh_plan_cache:
        pass

    ctypedef struct gh_problem:
        const int32_t *resident
        const int32_t *buffer
        const unsigned char *usage
        const unsigned char *supports
        const unsigned char *reads_buffer
        int32_t n_buffers

    ctypedef struct gh_arena_view:
        char name[64]
        int64_t alignment
        int64_t max_size
        int64_t nbytes
        const uint64_t *inplace

    ctypedef struct gh_plan_view:
        int n_backends
        bint is_scheduler
        bint has_deps
        gs_graph_size size
        gs_graph_arrays arrays
        gs_plan plan
        const gh_problem *problem
        const int64_t *nbytes
        const unsigned char *reads
        gh_arena_view arena[16]

    gh_plan_cache *gh_plan_cache_lock(int i, int *n) noexcept nogil
    void gh_plan_cache_unlock(gh_plan_cache *c) noexcept nogil
    bint gh_plan_view_open(const gh_plan_cache *c, gh_plan_view *view) noexcept nogil
    void gh_plan_view_close(gh_plan_view *view) noexcept nogil
    const char *gh_plan_view_name(const gh_plan_view *view, int32_t id) noexcept nogil


gh_api = gs_import_api()

TIMED = ("ggml_gallocr_reserve_n", "ggml_gallocr_alloc_graph", "ggml_backend_sched_split_graph",
         "ggml_backend_sched_reserve", "ggml_backend_sched_alloc_graph")
"""Functions whose calls and nanoseconds are counted: the first numbers of enum gh_counter, two for each function."""
OTHERS = ("allocators", "same", "equal", "replayed", "planned", "grown", "failed", "stock",
          "synchronised")
"""What else is counted, in the order of enum gh_counter."""

assert 2 * len(TIMED) + len(OTHERS) == GH_N_COUNTS


def counters():
    """{function: (calls, nanoseconds inside them)} of the whole process."""
    return {name: (gh_count_of(2 * i), gh_count_of(2 * i + 1)) for i, name in enumerate(TIMED)}


def served():
    """{what: count} of the whole process: allocators made, graphs by how they got a plan, and the rest of OTHERS."""
    return {name: gh_count_of(2 * len(TIMED) + i) for i, name in enumerate(OTHERS)}


def clear_counters():
    """Count from zero again."""
    gh_clear_counts()


def pass_through(bint on):
    """Choose whether allocators made from now on are ggml's own, for comparison: calls are counted and passed on."""
    gh_set_pass_through(on)


def schedule(bint on):
    """Choose whether schedulers made from now on are ours (level "sched"); otherwise they are ggml's own."""
    gh_set_schedules(on)


def last_error():
    """The message of the last failed call of the process; None: no call has failed."""
    cdef gs_error error
    if not gh_last_error(&error):
        return None
    return (<bytes>error.message).decode(errors="replace") or f"status {error.status}"


def unsupported():
    """Why a loaded library is not supported, so that its own allocator is used; None: all are."""
    cdef const char *why = gh_unsupported()
    return None if why == NULL else why.decode()


cdef list _ints(const int32_t *at, int32_t n):
    cdef int32_t i
    return [at[i] for i in range(n)]


cdef list _longs(const int64_t *at, int32_t n):
    cdef int32_t i
    return [at[i] for i in range(n)]


cdef dict _masks(const uint64_t *inplace, dict names):
    """{op: bits, bit k for each source k that may be its destination}, of the ops that have such a source."""
    return {name: inplace[<int>number] for number, name in names.items() if inplace[<int>number]}


cdef dict _tensor_of(const gh_plan_view *view, int32_t id, dict names):
    """The dict of tensor `id`, as `graphfile.graph_from_dict` takes it."""
    cdef const gs_graph_arrays *a = &view.arrays
    cdef const gs_layout *layout = &a.layout[id]
    cdef const char *type_name = gh_api.type_name(layout.type)
    cdef const char *name = gh_plan_view_name(view, id)
    cdef int32_t i
    fields = {"name": "" if name == NULL else name.decode(errors="replace"), "op": names[layout.op],
              "ne": _longs(layout.ne, 4), "nb": _longs(layout.nb, 4)}
    if type_name == NULL:
        # A type that exists in ggml only is shown as its bytes.
        fields.update(type="i8", ne=[layout.nbytes, 1, 1, 1], nb=[1, layout.nbytes, layout.nbytes, layout.nbytes])
    else:
        fields["type"] = type_name.decode()
    src = []
    for i in range(a.src_begin[id], a.src_begin[id + 1]):
        src += [-1] * (a.slot[i] - len(src)) + [a.src[i]]
    if src:
        fields["src"] = src
    if a.view_src[id] >= 0:
        fields.update(view_src=a.view_src[id], view_offs=a.view_offs[id])
    fields["flags"] = [word for bit, word in ((1, "input"), (2, "output")) if a.flags[id] & bit]
    if view.has_deps and a.dep_begin[id] < a.dep_begin[id + 1]:
        fields["deps"] = _ints(a.dep + a.dep_begin[id], a.dep_begin[id + 1] - a.dep_begin[id])
    return fields


cdef dict _residents(const gh_plan_view *view):
    """{tensor: (usage, backends that read it, the owner first)} of tensors that had memory before planning."""
    cdef const gh_problem *q = view.problem
    cdef int32_t i, b, n = view.plan.n_tensors
    return {i: ("weights" if view.is_scheduler and q.usage[i] else "any", (q.resident[i], *(
                b for b in range(view.n_backends) if b != q.resident[i]
                and (not view.is_scheduler or q.reads_buffer[b * q.n_buffers + q.buffer[i]]))))
            for i in range(n) if q.resident[i] >= 0}


cdef dict _view_of(const gh_plan_view *view, dict names):
    """The plan that a cache used last, as the dict that `last_planned` describes."""
    cdef int32_t i, b, c, n = view.plan.n_tensors, m = view.n_backends
    return {
        "graph": {"meta": {}, "tensors": [_tensor_of(view, i, names) for i in range(n)],
                  "nodes": _ints(view.arrays.node, view.size.n_nodes),
                  "leafs": _ints(view.arrays.leaf, view.size.n_leafs)},
        "plan": values_of_plan(&view.plan),
        "arenas": [{"name": (<bytes>view.arena[b].name).decode(errors="replace"),
                    "alignment": view.arena[b].alignment, "max_size": view.arena[b].max_size,
                    "nbytes": view.arena[b].nbytes, "inplace": _masks(view.arena[b].inplace, names)}
                   for b in range(m)],
        "nbytes": {(b, i): view.nbytes[<int64_t>b * n + i] for b in range(m) for i in range(n)
                   if view.nbytes[<int64_t>b * n + i] > view.arrays.layout[i].nbytes},
        "reads": [[c for c in range(m) if view.reads[b * m + c]] for b in range(m)],
        "residents": _residents(view),
        "refused": [i for i in range(n) if view.is_scheduler and view.plan.assign[i] >= 0
                    and not view.problem.supports[<int64_t>view.plan.assign[i] * n + i]],
    }


cdef list _last(bint schedulers):
    """The last plans of all caches: of those of schedulers, or of those of graph allocators."""
    cdef gh_plan_cache *c
    cdef gh_plan_view view
    cdef int n = 0, at = 0
    names = {number: name for name, number in op_numbers().items()}
    found = []
    while True:
        with nogil:
            c = gh_plan_cache_lock(at, &n)
        if c != NULL:
            try:
                if gh_plan_view_open(c, &view):
                    try:
                        if view.is_scheduler == schedulers:
                            found.append(_view_of(&view, names))
                    finally:
                        gh_plan_view_close(&view)
            finally:
                gh_plan_cache_unlock(c)
        at += 1
        if at >= n:
            return found


def last_planned():
    """For each graph allocator of the process that has planned a graph, oldest first: the plan of its last graph.

    Each is a dict: `graph`, as `graphfile.graph_from_dict` takes it; `plan`, as `plan_from_values` does; `arenas`:
    dicts of name, alignment, max_size (0: no bound), nbytes of the buffers that are held, inplace ({op: bits of the
    sources that may be its destination}); `nbytes`: {(arena, id): bytes} of the tensors that take more than their own
    bytes; `reads`: for each backend those whose memory it reads; `residents`: {tensor: (usage, backends that read it,
    the owner first)}; `refused`: tensors that the backend they were planned for does not support.
    """
    return _last(False)


def last_scheduled():
    """The same for each scheduler, with backends for arenas."""
    return _last(True)
