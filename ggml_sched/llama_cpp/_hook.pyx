# cython: language_level=3
"""The library that a client's ggml meets: ggml's names, our functions (the C files beside this).

Loaded with RTLD_GLOBAL before ggml's libraries, so that the dynamic linker binds their calls to it; install.py does.
Here is what Python sees of it: counters, the last failure, and what was planned last, as plain values.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free

from ggml_sched._c cimport (
    gs_api,
    gs_error,
    gs_graph_arrays,
    gs_import_api,
    gs_layout,
    gs_plan_arrays,
)

from ggml_sched._graph import op_numbers


cdef extern from "alloc.h":
    ctypedef struct gh_keeps:
        int32_t n

    ctypedef struct gh_known:
        int32_t n_arenas
        gs_graph_arrays arrays
        gs_plan_arrays view
        gh_keeps keeps
        int32_t *resident
        int64_t *nbytes
        bint some_larger

    ctypedef struct gh_arena_facts:
        char name[64]
        int64_t alignment
        int64_t max_size
        int64_t nbytes
        const uint64_t *inplace

    cdef const gs_api *gh_api
    int GH_N_COUNTS
    int64_t gh_count_of(int i) noexcept nogil
    void gh_clear_counts() noexcept nogil
    void gh_set_pass_through(bint on) noexcept nogil
    gh_known *gh_last_known(int i, int *n_allocators, gh_arena_facts **arenas) noexcept nogil
    void gh_known_drop(gh_known *k) noexcept nogil
    const char *gh_known_name(const gh_known *k, int32_t id) noexcept nogil
    int32_t gh_known_n_nodes(const gh_known *k) noexcept nogil
    int32_t gh_known_n_leafs(const gh_known *k) noexcept nogil
    bint gh_last_error(gs_error *error) noexcept nogil
    const char *gh_not_understood() noexcept nogil

cdef extern from "scheduler.h":
    void gh_set_schedules(bint on) noexcept nogil

    ctypedef struct gh_prepared:
        const int32_t *buffer
        const unsigned char *usage
        const unsigned char *supports
        int32_t n_buffers
        const unsigned char *reads_buffer

    ctypedef struct gh_sched:
        int n_backends
        const unsigned char *reads

cdef extern from "listed.h":
    gh_sched *gh_hold(int i, int *n_schedulers) noexcept nogil
    void gh_release(gh_sched *s) noexcept nogil
    const gh_prepared *gh_show(const gh_sched *s, gh_known *shown, gh_arena_facts *facts) noexcept nogil


gh_api = gs_import_api()

TIMED = ("ggml_gallocr_reserve_n", "ggml_gallocr_alloc_graph", "ggml_backend_sched_split_graph",
         "ggml_backend_sched_reserve", "ggml_backend_sched_alloc_graph")
"""Functions whose calls and nanoseconds are counted: the first of gh_count, two numbers each."""
OTHERS = ("allocators", "same", "equal", "replayed", "planned", "grown", "failed", "stock",
          "synchronised")
"""What else is counted, in the order of gh_count."""

assert 2 * len(TIMED) + len(OTHERS) == GH_N_COUNTS


def counters():
    """{function: (calls, nanoseconds inside them)} of the whole process."""
    return {name: (gh_count_of(2 * i), gh_count_of(2 * i + 1)) for i, name in enumerate(TIMED)}


def served():
    """{how: number} of the whole process: allocators made, and graphs by how they were served."""
    return {name: gh_count_of(2 * len(TIMED) + i) for i, name in enumerate(OTHERS)}


def clear_counters():
    """Count from zero again."""
    gh_clear_counts()


def pass_through(bint on):
    """Whether allocators made from now on are ggml's own, called through us and counted."""
    gh_set_pass_through(on)


def schedule(bint on):
    """Whether schedulers made from now on are ours; otherwise they are ggml's own."""
    gh_set_schedules(on)


def last_error():
    """What the last failing call of the process said; None: none has failed."""
    cdef gs_error error
    if not gh_last_error(&error):
        return None
    return (<bytes>error.message).decode(errors="replace") or f"status {error.status}"


def not_understood():
    """What of a library is not as we know it, so that its own allocator works there; None: all are as we know them."""
    cdef const char *why = gh_not_understood()
    return None if why == NULL else why.decode()


cdef list _ints(const int32_t *at, int32_t n):
    cdef int32_t i
    return [at[i] for i in range(n)]


cdef list _longs(const int64_t *at, int32_t n):
    cdef int32_t i
    return [at[i] for i in range(n)]


cdef list _bytes(const unsigned char *at, int32_t n):
    cdef int32_t i
    return [at[i] for i in range(n)]


cdef dict _masks(const uint64_t *inplace, dict names):
    """{op: sources that may be its destination, bits} where there are any."""
    return {name: inplace[<int>number] for number, name in names.items() if inplace[<int>number]}


cdef dict _tensor_of(const gh_known *k, int32_t id, dict names):
    """Tensor `id` as a graph file holds it."""
    cdef const gs_graph_arrays *a = &k.arrays
    cdef const gs_layout *layout = &a.layout[id]
    cdef const char *type_name = gh_api.type_name(layout.type)
    cdef const char *name = gh_known_name(k, id)
    cdef int32_t i
    fields = {"name": "" if name == NULL else name.decode(errors="replace"), "op": names[layout.op],
              "ne": _longs(layout.ne, 4), "nb": _longs(layout.nb, 4)}
    if type_name == NULL:
        # What only ggml knows is so many bytes.
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
    if k.keeps.n and a.dep_begin[id] < a.dep_begin[id + 1]:
        fields["deps"] = _ints(a.dep + a.dep_begin[id], a.dep_begin[id + 1] - a.dep_begin[id])
    return fields


cdef dict _plan_of(const gh_known *k):
    """The plan, as `plan_from_values` takes it."""
    cdef const gs_plan_arrays *p = &k.view
    cdef int32_t i
    return {
        "n_backends": p.n_backends, "n_tensors": p.n_tensors, "assign": _ints(p.assign, p.n_tensors),
        "reason": _bytes(p.reason, p.n_tensors),
        "splits": [[p.split_backend[i], p.split_start[i], p.split_stop[i],
                    _ints(p.inputs + (p.split_inputs[i - 1] if i else 0),
                          p.split_inputs[i] - (p.split_inputs[i - 1] if i else 0))] for i in range(p.n_splits)],
        "copies": [[p.copy_like[i], p.copy_from[i], p.copy_backend[i], p.copy_kept[i]] for i in range(p.n_copies)],
        "places": _ints(p.place_copy, p.n_places),
        "write_backs": [[p.back_node[i], p.back_copy[i]] for i in range(p.n_write_backs)],
        "home": _ints(p.home, p.n), "root": _ints(p.root, p.n), "birth": _ints(p.birth, p.n),
        "death": _ints(p.death, p.n), "trimmed": _ints(p.trimmed, p.n),
        "src": [_ints(p.src + p.src_begin[i], p.src_begin[i + 1] - p.src_begin[i]) for i in range(p.n)],
        "size": _longs(p.size, p.n), "view_offs": _longs(p.view_offs, p.n), "offset": _longs(p.offset, p.n),
        "rest": _longs(p.rest, p.n), "op": _bytes(p.op, p.n), "flags": _bytes(p.flags, p.n),
        "state": _bytes(p.state, p.n), "seq": _ints(p.seq, p.n_seq),
        "arenas": [[p.arena[i].live_bytes, p.arena[i].stride, p.arena[i].method,
                    _longs(p.chunk_nbytes + p.arena[i].first_chunk, p.arena[i].n_chunks)]
                   for i in range(p.n_backends)],
    }


def last_planned():
    """For each allocator of the process that has planned a graph, oldest first: what it was asked for last.

    Dicts: `graph`, as `graphfile.graph_from_dict` takes it; `plan`, as `plan_from_values` does; `arenas`: dicts of
    name, alignment, max_size (0: no bound), nbytes of the buffers there are, inplace ({op: sources, bits}); `resident`:
    for each tensor the arena whose backend it is resident on, or -1; `nbytes`: {(arena, id): bytes} where these are more
    than the tensor's.
    """
    cdef gh_known *k
    cdef gh_arena_facts *facts
    cdef int32_t n
    cdef int n_allocators = 0, at = 0
    names = {number: name for name, number in op_numbers().items()}
    found = []
    while True:
        with nogil:
            k = gh_last_known(at, &n_allocators, &facts)
        if k != NULL:
            try:
                n = k.view.n_tensors
                found.append({**_described(k, facts, names), "resident": _ints(k.resident, n)})
            finally:
                gh_known_drop(k)
                free(facts)
        at += 1
        if at >= n_allocators:
            return found


cdef dict _described(const gh_known *k, const gh_arena_facts *facts, dict names):
    """What plans of allocators and of schedulers have in common."""
    cdef int32_t i, b, n = k.view.n_tensors
    return {
        "graph": {"meta": {}, "tensors": [_tensor_of(k, i, names) for i in range(n)],
                  "nodes": _ints(k.arrays.node, gh_known_n_nodes(k)),
                  "leafs": _ints(k.arrays.leaf, gh_known_n_leafs(k))},
        "plan": _plan_of(k),
        "arenas": [{"name": (<bytes>facts[b].name).decode(errors="replace"), "alignment": facts[b].alignment,
                    "max_size": facts[b].max_size, "nbytes": facts[b].nbytes,
                    "inplace": _masks(facts[b].inplace, names)} for b in range(k.n_arenas)],
        "nbytes": {(b, i): k.nbytes[<int64_t>b * n + i] for b in range(k.n_arenas) for i in range(n)
                   if k.some_larger and k.nbytes[<int64_t>b * n + i] > k.arrays.layout[i].nbytes},
    }


cdef dict _scheduled(const gh_sched *s, dict names):
    """What a held scheduler was asked for last; None: nothing."""
    cdef gh_known shown
    cdef gh_arena_facts facts[16]
    cdef const gh_prepared *p = gh_show(s, &shown, facts)
    cdef int32_t i, b, c, n
    if p == NULL:
        return None
    found = _described(&shown, facts, names)
    n = shown.view.n_tensors
    found["reads"] = [[c for c in range(s.n_backends) if s.reads[b * s.n_backends + c]] for b in range(s.n_backends)]
    found["residents"] = {
        i: ("weights" if p.usage[i] else "any", (shown.resident[i], *(
            b for b in range(s.n_backends)
            if b != shown.resident[i] and p.reads_buffer[b * p.n_buffers + p.buffer[i]])))
        for i in range(n) if shown.resident[i] >= 0}
    found["refused"] = [i for i in range(n) if shown.view.assign[i] >= 0
                        and not p.supports[<int64_t>shown.view.assign[i] * n + i]]
    return found


def last_scheduled():
    """For each scheduler of the process that has planned a graph, oldest first: what it was asked for last.

    Dicts as those of `last_planned`, with backends for arenas, and: `reads`, the backends whose memory each reads;
    `residents`: {tensor: (usage, who reads it, the owner first)}; `refused`: tensors whose backend does not support
    them.
    """
    cdef gh_sched *s
    cdef int n = 0, at = 0
    names = {number: name for name, number in op_numbers().items()}
    found = []
    while True:
        with nogil:
            s = gh_hold(at, &n)
        if s != NULL:
            try:
                what = _scheduled(s, names)
            finally:
                gh_release(s)
            if what is not None:
                found.append(what)
        at += 1
        if at >= n:
            return found
