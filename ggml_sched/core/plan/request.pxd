# The C view of core/plan/request.  Each reference says what it keeps alive.

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched.core.graph.graph cimport Graph
from ggml_sched.core.graph.tensor cimport BackendBase, BufferBase, Tensor
from ggml_sched.core.plan.placement cimport gs_request


cdef class Devices:
    cdef readonly tuple backends        # kept alive
    cdef int32_t n
    cdef int64_t *alignment             # owned, one block with other arrays; of each backend, in bytes
    cdef int64_t *margin                # of each store: bytes that a fetched copy takes beyond the weight's own; else 0
    cdef unsigned char *store           # of each backend: whether it is a store
    cdef bint stores                    # whether any backend is a store
    cdef uint64_t *inplace_first        # owned; as `inplace`, bits only for in-place ops of ggml's first generation
    cdef uint64_t *inplace              # owned; [n][GS_N_OPS] bit k: the op may write its result over source k
    cdef tuple reads_buffers            # of each backend: whether it overrides supports_buffer
    cdef bint shares_buffers            # whether any backend overrides supports_buffer
    cdef tuple fuses                    # of each backend: whether it overrides fusion_groups; () if none does
    cdef tuple expects                  # of each backend: whether it overrides expect_graph; () if none does
    cdef unsigned char *in_python       # of each backend: the support queries (ASKS_*) that a Python method answers
    cdef unsigned char *in_c            # of each backend: the support queries that a C method, called first, answers
    cdef unsigned char *has_field       # of each backend: whether its answers_version can be read from the C field
    cdef int queries                    # the support queries (ASKS_*) of all backends together
    cdef dict support_cache             # {hash of a kind of node: its record, bytes (support_queries.pxi)}
    cdef list versions                  # of each backend: the answers_version of the cached results
    cdef int64_t _epoch
    cdef void find_queries(self, Py_ssize_t i, BackendBase backend)
    cdef list all_versions(self)
    cdef object version_of(self, Py_ssize_t i)
    cpdef int64_t epoch(self) except -1
    cdef int32_t index(self, BackendBase backend) noexcept


cdef class SupportQueries:
    cdef Graph graph                    # kept alive
    cdef Devices devices
    cdef int32_t n                      # how many kinds of nodes
    cdef int32_t n_backends
    cdef int64_t *size                  # owned, one block with the arrays below; [n][n_backends] bytes to allocate
    cdef int32_t *example               # [n] a tensor of each kind
    cdef unsigned char *bits            # [n][n_backends] ASKS_SUPPORTS, ASKS_OFFLOAD: set if the answer is yes
    cdef unsigned char *pending         # [n][n_backends] ASKS_*: queries that a Python method has to answer
    cdef unsigned char *cached          # [n] whether the kind was in the support cache
    cdef int look_up(self) except -1
    cdef int store(self) except -1
    cdef list open_in_python(self, int32_t b)
    cdef int query(self, int32_t b) except -1


cdef class Request:
    cdef gs_request c                   # owned; the graph is that of `graph`, the in-place masks are those of `devices`
    cdef Graph graph
    cdef Devices devices
    cdef readonly uint64_t key          # a hash of residents and assignments
    cdef readonly list buffers          # the buffers of the graph's residents
    cdef bint has_support               # the support queries are complete
    cdef tuple group_offers             # the fusion groups that backends offer; None: not queried yet
    cdef list readers                   # of each buffer: the backends that can read it; () if no backend was queried
    cdef int64_t *window                # owned; of each backend the policy's window, in bytes; NULL without stores
    cdef int check_open(self) except -1
    cdef int fill_residents(self) except -1
    cdef uint64_t bank_key(self, BufferBase buffer) except? 0
    cdef int32_t index_of_buffer(self, BufferBase buffer, dict indices) except -1
    cdef int fill_assigned(self, object assigned) except -1
    cdef int check_placed(self) except -1
    cdef tuple readers_of(self, BufferBase buffer)
    cdef int32_t reader_of(self, Tensor t, BufferBase buffer) except -2
    cdef int set_policy(self, object policy) except -1
    cdef int query_support(self) except -1
    cdef void free_support(self) noexcept
    cdef int query_buffers(self) except -1
    cdef int query_nodes(self) except -1
    cdef int query_each(self, int32_t b) except -1
    cdef int apply(self, int32_t b, SupportQueries queries) except -1
    cdef int set_support(self, int32_t b, int32_t id, bint supports, bint offloads) except -1
    cdef int set_size(self, int32_t b, int32_t id, int64_t size) except -1

cdef str names_of(tuple backends)
