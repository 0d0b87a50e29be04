# The C view of core/plan/plan_data.

from libc.stdint cimport int32_t

from ggml_sched._c cimport gs_plan


cdef class PlanData:
    cdef gs_plan c                      # owned
    cdef bint has_exclusive             # whether find_exclusive has set GS_STATE_EXCLUSIVE and WRITTEN
    cdef tuple _chunk_sizes
    cdef public object _program         # cached program of this plan, or None
    cdef public object _work_sizes      # cached bytes of work memory that the backends want for this plan, or None
    cdef void find_exclusive(self) noexcept
    cdef int check(self, int32_t i) except -1
