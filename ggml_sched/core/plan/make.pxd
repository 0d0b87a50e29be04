# The C view of core/plan/make: from requests to plans, without Python.

from libc.stdint cimport int32_t, int64_t

from ggml_sched._c cimport gs_graph, gs_plan, gs_request


# Everything that r asks; to be freed with gs_plan_free.  A gs_status, with p.failed the id that an error is about.
cdef int gs_plan_make(const gs_request *r, gs_plan *p) noexcept nogil
# A reserved plan for a graph of the same wiring; *serves says whether it fits.
cdef int gs_plan_replay(const gs_request *r, const gs_plan *reserved, gs_plan *p, int32_t *serves) noexcept nogil
# The offsets that a replay gives ids of these sizes.
cdef int gs_plan_compact(const gs_plan *reserved, const int64_t *size, int64_t *offset) noexcept nogil
cdef void gs_plan_free(gs_plan *p) noexcept nogil
cdef void plan_mark_exclusive(gs_plan *p) noexcept nogil
# Marks in `needed` the memories whose data somebody may want once all nodes have run; `used` is scratch.
cdef void mark_needed_at_end(const gs_graph *g, unsigned char *needed, unsigned char *used) noexcept nogil


cdef inline int32_t plan_owner(const gs_plan *p, int32_t id) noexcept nogil:
    """The id under whose name the memory of id was taken: along views and in-place chains to their first."""
    while p.root[id] >= 0:
        id = p.root[id]
    return id
