# The C view of core/graph/graph.

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport gs_graph, gs_graph_size
from ggml_sched.core.graph.flat cimport gs_kinds
from ggml_sched.core.graph.tensor cimport Tensor


cdef class Graph:
    cdef gs_graph flat                  # owned
    cdef readonly tuple nodes           # keep their tensors alive
    cdef readonly tuple leafs
    cdef readonly tuple tensors
    cdef public dict meta
    cdef tuple context_states           # the ContextState of each context that made some of its tensors
    cdef gs_kinds _kinds                # owned; computed on first use
    cdef bint sorted_work               # _kinds has the kinds of all computing nodes
    cdef bint sorted_all                # _kinds has the kinds of all tensors
    cdef dict _ids                      # {tensor: its id}; made if another graph has overwritten a tensor's mark
    cdef readonly object fingerprint    # a 128-bit hash of structure, layouts and wiring; equal for equal graphs
    cdef bint names_residents           # one of its tensors is marked as a weight or cache
    cdef readonly uint64_t wiring       # a hash of everything but parameters, shapes, strides and view offsets
    cdef object __weakref__
    # `recorded`: a graph of the same tensors, whose flags and alloc dependencies are used; None: the present ones.
    cdef int fill(self, tuple tensors, tuple nodes, tuple leafs, Graph recorded=*) except -1
    cdef int find_kinds(self, bint all) except -1
    cdef int number(self, dict given, gs_graph_size *size) except -1
    cdef int fill_tensors(self, Graph recorded) except -1
    cdef int fill_order(self, dict deps) except -1
    cdef int fill_deps(self, dict given) except -1
    cpdef int32_t id_of(self, Tensor t) except -2
    cpdef int64_t residence_epoch(self) noexcept
    cdef int32_t known(self, Tensor t) except -1
    cdef int32_t require(self, void *t, void *user) except -1
    cdef int32_t require_tensor(self, void *t) except -1
