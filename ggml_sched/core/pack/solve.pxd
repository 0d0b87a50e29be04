# The C view of core/pack/solve: the packing of prepared buffers.

from libc.stdint cimport int32_t, int64_t

from ggml_sched.core.pack.passes cimport gs_pack


cdef enum:
    N_PACK_METHODS = 9
    PACK_NO_CAPACITY = -1
    PACK_DEFAULT_BUDGET = -1        # two million tries, fewer where each takes long
    PACK_PLANNER_BUDGET = -2        # a hundred thousand, in the same way


# What came of it.
ctypedef struct gs_packing:
    int64_t arena           # bytes
    int64_t bound           # max-live bytes
    int64_t proven          # no arena is smaller than this
    int64_t tries           # of the search
    int32_t method
    bint optimal


cdef int pack_prepared(gs_pack *p, int64_t capacity, int64_t budget, gs_packing *out) noexcept nogil
cdef int pack_run(int32_t n, int32_t n_times, const int32_t *lower, const int32_t *upper, const int64_t *size,
                  int64_t capacity, int64_t budget, int64_t *offsets, gs_packing *out) noexcept nogil
