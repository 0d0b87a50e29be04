# The C view of core/plan/make: from requests to plans, without Python.

from libc.stdint cimport int32_t, int64_t

from ggml_sched._c cimport gs_graph, gs_plan, gs_request


# Makes the plan of a request; to be freed with gs_plan_free.  Returns a gs_status; p.failed is the id that failed.
cdef int gs_plan_make(const gs_request *r, gs_plan *p) noexcept nogil
# Makes a plan with the decisions of a reserved one, for a graph of the same wiring; *serves is 0 if it does not fit.
cdef int gs_plan_replay(const gs_request *r, const gs_plan *reserved, gs_plan *p, int32_t *serves) noexcept nogil
# The offsets that a replay gives ids of these sizes.
cdef int gs_plan_compact(const gs_plan *reserved, const int64_t *size, int64_t *offset) noexcept nogil
cdef void gs_plan_free(gs_plan *p) noexcept nogil
cdef void plan_mark_exclusive(gs_plan *p) noexcept nogil
# Marks in `needed` the memories whose data must be valid after all nodes have run; `used`: scratch, zero.
cdef void mark_needed_at_end(const gs_graph *g, unsigned char *needed, unsigned char *used) noexcept nogil


cdef inline int32_t plan_owner(const gs_plan *p, int32_t id) noexcept nogil:
    """The owner of an id's memory: the end of its chain of view roots and sources reused in place."""
    while p.root[id] >= 0:
        id = p.root[id]
    return id
