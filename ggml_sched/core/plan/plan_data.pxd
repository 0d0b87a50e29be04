# The C view of core/plan/plan_data.

from libc.stdint cimport int32_t

from ggml_sched._c cimport gs_plan


cdef class PlanData:
    cdef gs_plan c                      # owned
    cdef bint knows_exclusive           # found out when first asked: planning alone does not need it
    cdef tuple _chunk_sizes
    cdef public object _program         # what program.make_program has made of it, or None
    cdef public object _work_sizes      # what backends have said of work memory, or None
    cdef void know_exclusive(self) noexcept
    cdef int check(self, int32_t i) except -1
