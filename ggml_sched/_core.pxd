# The C view of the core: `from ggml_sched cimport _core` (or `from ggml_sched._core cimport Tensor`).
#
# Each reference below says what it keeps alive.

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport gs_block, gs_checked_add, gs_checked_align, gs_checked_mul, gs_graph, gs_layout, gs_plan
from ggml_sched._c cimport gs_policy, gs_range_fits, gs_request
from ggml_sched._graph cimport BackendBase, BufferBase, ContextBase, Graph, Home, Lease, Tensor, TensorSet


# The free ranges of one arena, in address order.
ctypedef struct gs_blocks:
    gs_block *at
    int32_t n
    int32_t room
    int64_t max_size            # high-water mark, from the arena's start
    int64_t chunk               # bytes of one chunk of an arena that may not be one buffer; 0: no bound
    int64_t stride              # distance of the chunks' first offsets, so that they never touch
    int32_t n_chunks


cdef class TensorAllocator:
    cdef readonly BufferBase buffer     # kept alive; closed by close() only if owned
    cdef readonly bint is_measure
    cdef readonly int64_t alignment
    cdef readonly bint closed
    cdef bint owns_buffer
    cdef int64_t start                  # offset of the first aligned address in the buffer
    cdef int64_t room                   # bytes from there to the end
    cdef gs_blocks blocks               # owned
    cdef Lease lease                    # of the tensors allocated one by one since the last reset
    cdef Lease graph_lease              # of the tensors of whole graphs since then
    cdef Lease early_lease              # of those leafs among them whose memory is theirs from the start
    cdef dict live                      # {tensor: size} of those, kept alive
    cdef object __weakref__
    cdef int64_t size_of(self, Tensor t) except -1
    cdef int check_open(self) except -1
    cdef int forget(self, Tensor t) except -1
    cdef void new_leases(self)
    cdef void end_leases(self)


cdef class Devices:
    cdef readonly tuple backends        # kept alive
    cdef int32_t n
    cdef int64_t *alignment             # owned; of each backend
    cdef uint64_t *inplace_first        # owned; [n][GS_N_OPS] source masks, first generation's ops
    cdef uint64_t *inplace              # owned; the same for all ops that the backend declares
    cdef tuple asks_op, asks_offload, asks_buffer, asks_size
    cdef bint asks_ops, asks_offloads, asks_buffers, asks_sizes     # whether any of them does
    cdef int32_t index(self, BackendBase backend) noexcept


cdef class Policy:
    cdef gs_policy c


cdef class Request:
    cdef gs_request c                   # arrays owned, graph borrowed from `graph`, masks from `devices`
    cdef Graph graph
    cdef Devices devices
    cdef void *memory                   # of what is known before anybody is asked
    cdef int64_t *max_buffer
    cdef readonly uint64_t key          # of residency and assignments
    cdef readonly list buffers          # that the graph's tensors live in outside any plan
    cdef bint asked                     # the backends have answered
    cdef list readers                   # for each of those the backends that read it; () where none was asked
    cdef int check_open(self) except -1
    cdef int fill_residents(self) except -1
    cdef int32_t index_of_buffer(self, BufferBase buffer, dict known) except -1
    cdef int fill_assigned(self, object assigned) except -1
    cdef int check_homes(self) except -1
    cdef tuple readers_of(self, BufferBase buffer)
    cdef int32_t reader_of(self, Tensor t, BufferBase buffer) except -2
    cdef void follow(self, Policy policy) noexcept
    cdef int ask(self) except -1


cdef class PlanData:
    cdef gs_plan c                      # owned
    cdef bint knows_exclusive           # found out when first asked: planning alone does not need it
    cdef tuple _chunk_sizes
    cdef int check(self, int32_t i) except -1


# Everything that r asks; to be freed with gs_plan_free.  A gs_status, with p.failed the id that an error is about.
cdef int gs_plan_make(const gs_request *r, gs_plan *p) noexcept nogil
# A reserved plan for a graph of the same wiring; *serves says whether it fits.
cdef int gs_plan_replay(const gs_request *r, const gs_plan *reserved, gs_plan *p, int32_t *serves) noexcept nogil
cdef void gs_plan_free(gs_plan *p) noexcept nogil
