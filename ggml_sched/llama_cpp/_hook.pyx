# cython: language_level=3
"""The hook: a library whose functions, in the C files beside this one, have the names of ggml's functions and replace
those of a client's ggml.

install.py loads it with RTLD_GLOBAL before ggml's libraries, so that the dynamic linker binds their calls to it.
The functions of this module give Python the hook's counters, its last failure, and its last plans, as plain values.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport *
from ggml_sched.core.graph.types cimport an_integer, layout_contiguous, op_is_view
from ggml_sched.core.plan.plan_values cimport values_of_plan

from ggml_sched.core.graph.types import op_numbers


cdef extern from "Python.h":
    int PyGC_Enable() noexcept
    int PyGC_Disable() noexcept

cdef extern from "counters.h":
    int GH_N_COUNTS
    long long gh_counters[]
    bint gh_pass_through
    bint gh_last_error(gs_error *error) noexcept nogil
    const char *gh_unsupported() noexcept nogil

cdef extern from "scheduler.h":
    cdef const gs_api *gh_api
    void gh_set_schedules(bint on) noexcept nogil

cdef extern from "plan_view.h":
    ctypedef struct gh_ggml:
        const uint64_t *inplace

    ctypedef struct gh_arena:
        void *buft
        size_t alignment
        size_t max_size

    ctypedef struct gh_cache_key:
        bint is_scheduler
        const unsigned char *reads

    ctypedef struct gh_plan_cache:
        const gh_ggml *lib
        gh_cache_key key
        int n_backends
        const char **name
        int n_pools
        const int *pool_of
        const int *first_of
        const gh_arena *pool
        const void *stock
        const size_t *stock_nbytes

    ctypedef struct gh_problem:
        const int32_t *resident
        const int32_t *buffer
        const unsigned char *usage
        const unsigned char *supports
        const unsigned char *reads_buffer
        int32_t n_buffers

    ctypedef struct gh_plan:
        gs_graph_size size
        gh_problem problem

    ctypedef struct gh_plan_view:
        const gh_plan *of
        gs_graph_arrays arrays
        gs_plan plan
        const int64_t *nbytes

    gh_plan_cache *gh_plan_cache_lock(int i, int *n) noexcept nogil
    void gh_plan_cache_unlock(gh_plan_cache *c) noexcept nogil
    void gh_watch_releases(void (*each)(gh_plan_cache *c) noexcept) noexcept nogil
    ctypedef struct gh_plan_entry:
        pass

    gh_plan_entry *gh_plan_cache_last(const gh_plan_cache *c) noexcept nogil
    gh_plan_entry *gh_plan_cache_largest(const gh_plan_cache *c) noexcept nogil
    bint gh_plan_view_open(const gh_plan_cache *c, const gh_plan_entry *e, gh_plan_view *view) noexcept nogil
    void gh_plan_view_close(gh_plan_view *view) noexcept nogil
    const char *gh_plan_name(const gh_plan *p, int32_t id) noexcept nogil
    size_t gh_arena_nbytes(const gh_arena *a, const gh_ggml *lib) noexcept nogil
    int64_t gh_max_buffer(size_t max_size) noexcept nogil
    void gh_set_compares(bint on) noexcept nogil

cdef extern from "open_buffers.h":
    ctypedef struct gh_open_buffer:
        const gh_ggml *lib
        void *buft
        size_t nbytes
        int usage
        bint is_mapped
        const char *first
        const char *type
        const char *device

    ctypedef struct gh_simulated:
        int context
        const char *name
        const char *type_name
        int64_t ne[4]
        size_t nbytes
        int usage
        const char *buffer_type
        const char *device
        size_t total

    bint gh_open_buffer_at(int i, gh_open_buffer *found) noexcept nogil
    const char *gh_device_of(const gh_ggml *lib, void *buft) noexcept nogil
    bint gh_device_memory(const gh_ggml *lib, void *buft, size_t *free_bytes, size_t *total) noexcept nogil
    void gh_record_contexts(bint on) noexcept nogil
    void gh_simulated_tensors(void (*each)(const gh_simulated *tensor, void *user) noexcept, void *user) noexcept

cdef extern from "measuring.h":
    ctypedef struct gh_measured:
        int n
        const char **type
        const char **device
        size_t *nbytes

    void gh_set_measures(void (*each)(const gh_measured *found) noexcept) noexcept nogil


gh_api = gs_import_api()

TIMED = ("ggml_gallocr_reserve_n", "ggml_gallocr_alloc_graph", "ggml_backend_sched_split_graph",
         "ggml_backend_sched_reserve", "ggml_backend_sched_alloc_graph")
"""Functions whose calls and nanoseconds are counted: the first numbers of enum gh_counter, two for each function."""
OTHERS = ("allocators", "same", "equal", "replayed", "planned", "grown", "failed", "stock",
          "synchronised")
"""The names of the other counters, in the order of enum gh_counter."""

assert 2 * len(TIMED) + len(OTHERS) == GH_N_COUNTS


def counters():
    """{function: (calls, nanoseconds inside them)} of the whole process."""
    return {name: (gh_counters[2 * i], gh_counters[2 * i + 1]) for i, name in enumerate(TIMED)}


def served():
    """{what: count} of the whole process: allocators made, graphs by how they got a plan, and the rest of OTHERS."""
    return {name: gh_counters[2 * <int>len(TIMED) + i] for i, name in enumerate(OTHERS)}


def clear_counters():
    """Count from zero again."""
    cdef int i
    for i in range(GH_N_COUNTS):
        gh_counters[i] = 0


def pass_through(bint on):
    """Choose whether allocators made from now on are ggml's own, for comparison: calls are counted and passed on."""
    global gh_pass_through
    gh_pass_through = on


def schedule(bint on):
    """Choose whether schedulers made from now on are ours (level "sched"); otherwise they are ggml's own."""
    gh_set_schedules(on)


def compare(bint on):
    """Choose whether graphs that are reserved from now on are measured by ggml's own allocator, too."""
    gh_set_compares(on)


ctypedef object (*gh_visit)(gh_plan_cache *c, list found)


cdef list _of_plan_caches(gh_visit visit):
    """A list of the values that `visit` appends for each plan cache of the process, oldest first; each cache is locked
    meanwhile."""
    return _of_plan_caches_into(visit, [])


cdef list _of_plan_caches_into(gh_visit visit, list found):
    """`_of_plan_caches`, for a list that is given.

    The garbage collector is held off while a cache is locked: objects that a visit makes can start it, and it may free
    a client's context, whose cache this thread would then lock again to release it, and wait for ever.  A visit keeps
    the GIL, so that no other thread sees or changes the collector's state meanwhile.
    """
    cdef gh_plan_cache *c
    cdef int n = 0, at = 0
    cdef bint collects
    while True:
        with nogil:
            c = gh_plan_cache_lock(at, &n)
        if c != NULL:
            collects = PyGC_Disable()
            try:
                visit(c, found)
            finally:
                gh_plan_cache_unlock(c)
                if collects:
                    PyGC_Enable()
        at += 1
        if at >= n:
            return found


def buffers():
    """For each buffer type of each graph allocator and scheduler of the process, oldest first: the type's name, the
    bytes that are held, those that ggml's own allocator would hold (None where nothing was compared), and the name of
    the type's device (None where the library does not say)."""
    return _of_plan_caches(_append_buffers)


cdef object _append_buffers(gh_plan_cache *c, list found):
    cdef int pool
    for pool in range(c.n_pools):
        found.append((c.name[c.first_of[pool]].decode(errors="replace"), gh_arena_nbytes(&c.pool[pool], c.lib),
                      None if c.stock == NULL else c.stock_nbytes[pool],
                      _text(gh_device_of(c.lib, c.pool[pool].buft))))


cdef object _text(const char *found):
    return None if found == NULL else found.decode(errors="replace")


def open_buffers():
    """For each buffer that clients hold now, except those of our graph allocators and schedulers: the name of its type,
    the name of its device, its bytes, ggml's number of its usage, whether it was made over existing memory, and the
    name of the first tensor of the context that it was made for."""
    cdef gh_open_buffer buffer
    found = []
    while gh_open_buffer_at(len(found), &buffer):
        found.append((_text(buffer.type), _text(buffer.device), buffer.nbytes, buffer.usage, bool(buffer.is_mapped),
                      _text(buffer.first)))
    return found


cdef object _add_device(dict found, const gh_ggml *lib, void *buft):
    cdef size_t free_bytes = 0, total = 0
    name = None if buft == NULL else _text(gh_device_of(lib, buft))
    if name is not None and name not in found and gh_device_memory(lib, buft, &free_bytes, &total):
        found[name] = (free_bytes, total)


cdef object _append_devices(gh_plan_cache *c, list found):
    cdef int pool
    for pool in range(c.n_pools):
        _add_device(found[0], c.lib, c.pool[pool].buft)


def device_memory():
    """{device: (bytes that are free, bytes that it has)} of the devices on which anything is open now."""
    cdef gh_open_buffer buffer
    cdef int i = 0
    found = {}
    while gh_open_buffer_at(i, &buffer):
        _add_device(found, buffer.lib, buffer.buft)
        i += 1
    _of_plan_caches_into(_append_devices, [found])
    return found


def record_contexts(bint on):
    """Choose whether ggml's contexts are recorded from now on, for `simulated_tensors`."""
    gh_record_contexts(on)


cdef void _add_tensor(const gh_simulated *t, void *user) noexcept:
    (<list>user).append((t.context, _text(t.name), _text(t.type_name), tuple([t.ne[i] for i in range(4)]), t.nbytes,
                         t.usage, _text(t.buffer_type), _text(t.device), t.total))


def simulated_tensors():
    """The tensors whose allocation a client only simulates in a dry run, in the order of their contexts.

    Each is a tuple: the number of its context, its name, type and `ne`, its bytes, ggml's number of its buffer's usage,
    the names of the buffer's type and device, and the bytes that all tensors of the context take there.
    """
    found = []
    gh_simulated_tensors(_add_tensor, <void *>found)
    return found


_measured = None


cdef void _report(const gh_measured *found) noexcept with gil:
    _measured([(_text(found.type[b]), _text(found.device[b]), found.nbytes[b]) for b in range(found.n)])


def measure(called):
    """Let graphs that clients would reserve be measured in arenas without memory (measuring.h), until `measure(None)`.

    After each graph `called` receives a list: for each backend the names of its buffer type and device, and the bytes.
    Its exceptions are printed and dropped.  For dry runs, in a process of their own: nothing can be computed meanwhile.
    """
    global _measured
    _measured = called
    if called is None:
        gh_set_measures(NULL)
    else:
        gh_set_measures(_report)


def last_error():
    """The message of the last failed call of the process; None: no call has failed."""
    cdef gs_error error
    if not gh_last_error(&error):
        return None
    return (<bytes>error.message).decode(errors="replace") or f"status {error.status}"


def unsupported():
    """Why a loaded library is not supported, so that its own allocator is used; None: all libraries are supported."""
    cdef const char *why = gh_unsupported()
    return None if why == NULL else why.decode()


cdef list _numbers(const an_integer *at, int32_t n):
    cdef int32_t i
    return [at[i] for i in range(n)]


cdef bint _is_shown_as_bytes(const gs_graph_arrays *a, int32_t id):
    """Whether a `Graph` cannot have the layout of tensor `id`, or of its root.

    The type exists in ggml only; or the tensor is computed and not contiguous, such as a copy that ggml's scheduler
    makes of a view: it has the view's strides, and all bytes from its first to its last element are written.
    """
    cdef const gs_layout *layout = &a.layout[a.view_src[id] if a.view_src[id] >= 0 else id]
    return (gh_api.type_name(a.layout[id].type) == NULL or gh_api.type_name(layout.type) == NULL
            or layout.op != GS_OP_NONE and not layout_contiguous(layout))


cdef dict _tensor_of(const gh_plan_view *view, int32_t id, dict names):
    """The dict of tensor `id`, as `graphfile.graph_from_dict` takes it."""
    cdef const gs_graph_arrays *a = &view.arrays
    cdef const gs_layout *layout = &a.layout[id]
    cdef const char *name = gh_plan_name(view.of, id)
    cdef int32_t i
    fields = {"name": "" if name == NULL else name.decode(errors="replace"), "op": names[layout.op]}
    if _is_shown_as_bytes(a, id):
        fields.update(type="i8", ne=[layout.nbytes, 1, 1, 1], nb=[1, layout.nbytes, layout.nbytes, layout.nbytes])
        if op_is_view(layout.op):
            fields["op"] = names[GS_OP_VIEW]
    else:
        fields.update(type=gh_api.type_name(layout.type).decode(), ne=_numbers(layout.ne, 4), nb=_numbers(layout.nb, 4))
    src = []
    for i in range(a.src_begin[id], a.src_begin[id + 1]):
        src += [-1] * (a.slot[i] - len(src)) + [a.src[i]]
    if src:
        fields["src"] = src
    if a.view_src[id] >= 0:
        fields.update(view_src=a.view_src[id], view_offs=a.view_offs[id])
    fields["flags"] = [word for bit, word in ((1, "input"), (2, "output")) if a.flags[id] & bit]
    if a.dep_begin != NULL and a.dep_begin[id] < a.dep_begin[id + 1]:
        fields["deps"] = _numbers(a.dep + a.dep_begin[id], a.dep_begin[id + 1] - a.dep_begin[id])
    return fields


cdef dict _residents(const gh_plan_cache *c, const gh_plan_view *view):
    """{id: (usage, backends that read it, the resident backend first)} of each resident tensor."""
    cdef const gh_problem *q = &view.of.problem
    cdef bint some = c.key.is_scheduler
    cdef int32_t i, b
    return {i: ("weights" if some and q.usage[i] else "any", (q.resident[i], *(
                b for b in range(c.n_backends) if b != q.resident[i]
                and (not some or q.reads_buffer[b * q.n_buffers + q.buffer[i]]))))
            for i in range(view.plan.n_tensors) if q.resident[i] >= 0 and view.arrays.view_src[i] < 0}


cdef tuple _need(const gh_plan_cache *c, const gh_plan_view *view, int32_t id):
    """(Whether the backend of tensor `id` supports it; the bytes that the tensor takes there, 0 if only its own.)"""
    cdef const gs_plan *p = &view.plan
    cdef int32_t n = p.n_tensors, arena = p.arena_of[id]
    cdef int64_t nbytes = view.nbytes[<int64_t>arena * n + p.like[id]] if arena >= 0 else 0
    return (not c.key.is_scheduler or id >= n or p.assign[id] < 0
            or view.of.problem.supports[<int64_t>p.assign[id] * n + id] != 0,
            nbytes if nbytes > view.arrays.layout[p.like[id]].nbytes else 0)


cdef dict _refused(const gh_plan_cache *c, const gh_plan_view *view, int b):
    """{id of a node that backend number b does not support: None}; the reasons are not known."""
    cdef int32_t i, n = view.plan.n_tensors
    return {i: None for i in range(n) if c.key.is_scheduler and not view.of.problem.supports[<int64_t>b * n + i]}


cdef dict _backend(const gh_plan_cache *c, int b, list sizes, dict names):
    """Backend number b, as `recorded_backends` takes it.  `sizes`: bytes of the planned buffers.  One may exceed the
    backend's largest buffer size, because a tensor that is larger than that has a buffer of its own."""
    cdef const gh_arena *pool = &c.pool[c.pool_of[b]]
    cdef int64_t most = gh_max_buffer(pool.max_size)
    return {"name": c.name[b].decode(errors="replace"), "alignment": pool.alignment,
            "max_buffer_size": max(most, max(sizes, default=0)) if most else None, "concurrent_copies": False,
            "inplace": {name: c.lib.inplace[<int>number] for number, name in names.items()
                        if c.lib.inplace[<int>number]},
            "reads": tuple([k for k in range(c.n_backends) if c.key.reads[b * c.n_backends + k]])}


cdef dict _view_of(const gh_plan_cache *c, const gh_plan_view *view, dict names):
    """A plan of a cache, as the dict that `last_planned` describes."""
    cdef int32_t i, b
    values = values_of_plan(&view.plan)
    return {
        "graph": {"meta": {}, "tensors": [_tensor_of(view, i, names) for i in range(view.plan.n_tensors)],
                  "nodes": _numbers(view.arrays.node, view.of.size.n_nodes),
                  "leafs": _numbers(view.arrays.leaf, view.of.size.n_leafs)},
        "plan": values,
        "backends": [_backend(c, b, values["arenas"][b][3], names) for b in range(c.n_backends)],
        "needs": [_need(c, view, i) for i in range(view.plan.n)],
        "refused": [_refused(c, view, b) for b in range(c.n_backends)],
        "residents": _residents(c, view),
        "is_scheduler": bool(c.key.is_scheduler),
        "stock": [None if c.stock == NULL else c.stock_nbytes[c.pool_of[b]] for b in range(c.n_backends)],
    }


def last_planned():
    """For each graph allocator and scheduler of the process that has planned a graph, oldest first: its last plan.

    Each is a dict: `graph`, as `graphfile.graph_from_dict` takes it; `plan`, `backends`, `needs`, `refused` and
    `residents`, as `recorded_backends` takes them; `is_scheduler`; and `stock`, for each backend the bytes that ggml's
    own buffer would have (None where nothing was compared).
    """
    return _of_plan_caches(_append_last_planned)


cdef object _append_last_planned(gh_plan_cache *c, list found):
    _append_view(c, gh_plan_cache_last(c), found)


def largest_planned():
    """For each graph allocator and scheduler of the process, oldest first: the plan that takes the most bytes, which
    decides how large the buffers are.  Plans are dicts like those of `last_planned`."""
    return _of_plan_caches(_append_largest_planned)


cdef object _append_largest_planned(gh_plan_cache *c, list found):
    _append_view(c, gh_plan_cache_largest(c), found)


cdef object _append_view(gh_plan_cache *c, const gh_plan_entry *e, list found):
    """Append the plan of an entry, if there is one."""
    cdef gh_plan_view view
    if not gh_plan_view_open(c, e, &view):
        return
    try:
        found.append(_view_of(c, &view, {number: name for name, number in op_numbers().items()}))
    finally:
        gh_plan_view_close(&view)


_released = None


cdef void _report_release(gh_plan_cache *c) noexcept with gil:
    found = []
    _append_largest_planned(c, found)
    for one in found:
        _released(one)


def watch_releases(called):
    """Let `called` receive the largest plan of each allocator and scheduler that is freed; None: no longer.

    The plan is a dict like those of `largest_planned`; exceptions of `called` are printed and dropped.
    """
    global _released
    _released = called
    if called is None:
        gh_watch_releases(NULL)
    else:
        gh_watch_releases(_report_release)
