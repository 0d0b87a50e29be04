# The C view of core/plan/problem: problems of the C API.

from libc.stdint cimport int32_t

from ggml_sched._c cimport gs_error, gs_graph, gs_problem
from ggml_sched.core.plan.make cimport gs_failure
from ggml_sched.core.plan.placement cimport gs_request


cdef enum:
    NAME_ROOM = 64      # the most bytes that describe a backend in messages


# Writes a description of backend b for messages, NAME_ROOM bytes at most: its number, and its name unless that is NULL.
cdef void name_backend(char *out, int32_t b, const char *name) noexcept nogil
# Makes the request of a problem: `g`, `supports`, `offloads` and `nbytes` stay the caller's, all else is copied.  After
# GS_OK the caller frees r.memory.
cdef int request_init(gs_request *r, const gs_graph *g, const gs_problem *p, gs_error *error) noexcept nogil
# Whether a reserved plan of one problem can serve the other: all but supports, offloads and nbytes are equal.
cdef bint requests_match(const gs_request *a, const gs_request *b) noexcept nogil
# Describes a failure of planning in `error`; returns the status.
cdef int planning_error(gs_error *error, const gs_request *r, const gs_problem *p, int status,
                        const gs_failure *failed) noexcept nogil
