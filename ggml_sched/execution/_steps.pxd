# What other compiled modules may use of _steps: its classes, with their fields and methods in C.

from cpython cimport array
from libc.stdint cimport int64_t

from ggml_sched._c cimport gs_node, gs_run_nodes
from ggml_sched._graph cimport BackendBase, NodeTable, Tensor


cdef class LocationVersions:
    cdef dict versions
    cpdef bint is_new(self, int64_t location, int64_t version) except -1


cdef class BoundStep:
    cdef readonly object backend
    cdef int take(self, list keep_alive) except -1      # returns 1 if the step was left out


cdef class BoundLoad(BoundStep):
    cdef readonly Tensor leaf
    cdef readonly Tensor tensor
    cdef readonly LocationVersions versions
    cdef int64_t start                  # the first byte of the leaf that is loaded
    cdef int64_t location               # the id of the location, for `versions`
    cdef bint is_due(self) except -1


cdef class BoundTransfer(BoundStep):
    cdef readonly Tensor src
    cdef readonly Tensor dst
    cdef NodeTable table                # src and dst, for c_copy; None: not made yet
    cdef object copy_after(self, events, list keep_alive)
    cdef bint copied_in_c(self, BackendBase one, BackendBase other) except -1


cdef class BoundCopy(BoundTransfer):
    cdef readonly LocationVersions versions
    cdef int64_t location
    cdef bint is_due(self) except -1


cdef class BoundFetch(BoundStep):
    cdef readonly Tensor src
    cdef readonly Tensor dst
    cdef readonly int64_t start         # the first byte of the weight, the root of `src`, that is read
    cdef readonly int64_t nbytes        # the number of bytes that are read
    cdef readonly tuple room            # (first, stop): bytes of the buffer of `dst` that the fetch may write


cdef class BoundExperts(BoundStep):
    cdef readonly Tensor src
    cdef readonly Tensor dst
    cdef readonly Tensor ids
    cdef readonly tuple used            # indices of the experts that the last copy moved
    cdef bint on_host


cdef class BoundRun(BoundStep):
    cdef readonly tuple nodes
    cdef readonly tuple twins
    cdef readonly tuple groups
    cdef readonly object needed         # frozenset of indices into `twins`; None: all
    cdef object handle                  # what graph_plan_create returned; None: call graph_compute instead
    cdef bint is_prepared
    # For a backend with the C method c_compute, made on first use: `c` is its argument, the others hold what c points to.
    cdef NodeTable table                # keeps the tensors of `c` alive
    cdef tuple buffers                  # those of `twins` and of their sources
    cdef gs_run_nodes c
    cdef void *memory                   # the arrays of `c`; freed with the step
    cdef int prepare_c(self) except -1
    cdef bint compute_c(self) except -1


cdef class BoundWriteBack(BoundTransfer):
    pass


cdef class Recorder:
    cdef readonly list recordings
    cdef public bint waits_after_steps  # whether the host waits for all backends after each step
    cdef object plan                    # of the recording that was made last; None: none was
    cdef object data                    # the PlanData of `plan`
    cdef object tensors                 # the tensors of the graph of `plan`


cdef class Recording:
    cdef readonly Recorder recorder
    cdef readonly object plan
    cdef readonly Py_ssize_t n_steps
    cdef readonly int64_t start
    cdef readonly int64_t stop          # when the call that issued the compute had ended; 0: it has not
    cdef readonly bint has_failed       # whether the compute has failed, or has not ended yet
    cdef readonly array.array times     # start and end of each step; both 0 for a step that did not run
    cdef int check(self, Py_ssize_t step) except -1
