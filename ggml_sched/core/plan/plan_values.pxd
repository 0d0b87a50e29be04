# The C view of core/plan/plan_values.

from ggml_sched._c cimport gs_plan


cdef dict values_of_plan(const gs_plan *p)
cdef int plan_take_values(gs_plan *p, object values, Py_ssize_t n_nodes) except -1
