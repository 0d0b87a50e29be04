# The C view of core/plan/make: from requests to plans, without Python.

from libc.stdint cimport int32_t, int64_t

from ggml_sched._c cimport gs_graph, gs_plan
from ggml_sched.core.plan.placement cimport gs_request


ctypedef struct gs_failure:
    int32_t tensor          # the tensor that failed, or -1
    int32_t backend         # the backend whose largest buffer does not hold it, or a copy of it; -1: another cause
    int64_t nbytes          # the bytes that it takes there, aligned; 0 for backend -1


# Makes the plan of a request; to be freed with gs_plan_free.  Returns a gs_status; *failed is what failed.
cdef int gs_plan_make(const gs_request *r, gs_plan *p, gs_failure *failed) noexcept nogil
# Makes a plan with the decisions of a reserved one, for a graph of the same wiring; *serves is 0 if they do not fit.
cdef int gs_plan_replay(const gs_request *r, const gs_plan *reserved, gs_plan *p, bint *serves,
                        gs_failure *failed) noexcept nogil
# Writes to `offset` the offsets that gs_plan_replay would choose for ids of these sizes, without making a plan: those
# of the reserved plan, or, if any id is smaller, lower ones; in_order: lower ones in the order of the reserved ones.
cdef int gs_plan_compact(const gs_plan *reserved, const int64_t *size, bint in_order, int64_t *offset) noexcept nogil
cdef void gs_plan_free(gs_plan *p) noexcept nogil
# Allocate the arrays of a plan, by its counts.
cdef int plan_alloc_assign(gs_plan *p) noexcept nogil
cdef int plan_alloc_splits(gs_plan *p) noexcept nogil
cdef int plan_alloc_arenas(gs_plan *p) noexcept nogil
cdef int plan_alloc_groups(gs_plan *p, int32_t n_members) noexcept nogil
cdef void plan_mark_exclusive(gs_plan *p) noexcept nogil
# Sets needed[k] to whether memory must hold the result of the k-th computing node at positions first .. last, because
# it is used elsewhere (core/plan/needed.pxi).  Returns the number of computing nodes at these positions, or
# GS_NO_HOST_MEMORY.
cdef int plan_needed(const gs_graph *g, const gs_plan *p, int32_t first, int32_t last,
                     unsigned char *needed) noexcept nogil
