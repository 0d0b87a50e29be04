# The C view of core/plan/problem: problems of the C API.

from libc.stdint cimport int32_t, int64_t

from ggml_sched._c cimport gs_error, gs_graph, gs_problem, gs_request


# A problem of the C API, checked, as the request that the passes take.
ctypedef struct gs_asked:
    gs_request r                # `g`, `supports`, `offloads` and `nbytes` are the caller's; all else is in `memory`
    void *memory                # owned; bytes 0 .. n_bytes are equal for equal problems
    int64_t n_bytes


# Freed with asked_free when this succeeds.
cdef int asked_init(gs_asked *a, const gs_graph *g, const gs_problem *p, gs_error *error) noexcept nogil
cdef void asked_free(gs_asked *a) noexcept nogil
cdef bint asked_alike(const gs_asked *a, const gs_asked *b) noexcept nogil
cdef int planning_refused(gs_error *error, const gs_asked *a, const gs_problem *p, int status,
                          int32_t id) noexcept nogil
