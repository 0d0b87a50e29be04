# The C view of core/first_generation/allocators.  Each reference says what it keeps alive.

from libc.stdint cimport int64_t

from ggml_sched.core.graph.tensor cimport BufferBase, Lease, Tensor
from ggml_sched.core.pack.solve cimport gs_blocks


cdef class TensorAllocator:
    cdef readonly BufferBase buffer     # kept alive; close() closes it if `owns_buffer`
    cdef readonly bint is_measure
    cdef readonly int64_t alignment
    cdef readonly bint closed
    cdef bint owns_buffer
    cdef int64_t start                  # offset of the first aligned address in the buffer
    cdef int64_t room                   # bytes from that address to the buffer's end
    cdef gs_blocks blocks               # owned
    cdef Lease lease                    # for tensors allocated one by one since the last reset
    cdef Lease graph_lease              # for tensors allocated with a whole graph since the last reset
    cdef Lease early_lease              # for leafs of a graph in memory that no other tensor has had
    cdef dict live                      # {tensor: bytes} of the tensors allocated one by one, kept alive
    cdef object __weakref__
    cdef int64_t size_of(self, Tensor t) except -1
    cdef int check_open(self) except -1
    cdef int forget(self, Tensor t) except -1
    cdef void new_leases(self)
    cdef void end_leases(self)
