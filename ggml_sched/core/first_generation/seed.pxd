# The C view of core/first_generation/seed: the passes of the seed policy.

from libc.stdint cimport int32_t

from ggml_sched.core.plan.placement cimport gs_request, gs_splits


cdef int plan_seed(const gs_request *r, int32_t *assign, unsigned char *reason, gs_splits *w, int32_t *failed) noexcept nogil
