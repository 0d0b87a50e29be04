# The C view of core/plan/request.  Each reference says what it keeps alive.

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport gs_policy
from ggml_sched.core.graph.graph cimport Graph
from ggml_sched.core.graph.tensor cimport BackendBase, BufferBase, Tensor
from ggml_sched.core.plan.placement cimport gs_request


# A record of the support cache, for one kind of node: sizes, the words of the kind, bits, in one block.  Sizes and bits
# have one entry for each backend.
ctypedef struct gs_answer:
    int32_t n_words
    int64_t *size
    uint64_t *words
    unsigned char *bits         # ASKS_SUPPORTS, ASKS_OFFLOAD


cdef class Answers:
    cdef int32_t n_backends
    cdef int32_t n
    cdef gs_answer **slot               # owned, as are the records; NULL: the cache is empty
    cdef void forget(self) noexcept
    cdef const gs_answer *find(self, uint64_t hash, const uint64_t *words, int32_t n_words) noexcept
    cdef void add(self, uint64_t hash, const uint64_t *words, int32_t n_words, const unsigned char *bits,
                  const int64_t *sizes) noexcept


cdef class Devices:
    cdef readonly tuple backends        # kept alive
    cdef int32_t n
    cdef int64_t *alignment             # owned; of each backend, in bytes
    cdef uint64_t *inplace_first        # owned; [n][GS_N_OPS] masks of in-place sources, first generation's ops
    cdef uint64_t *inplace              # owned; [n][GS_N_OPS] the same for all ops that the backend declares
    cdef tuple asks_buffer
    cdef bint asks_buffers              # whether any backend overrides supports_buffer
    cdef tuple fuses                    # of each backend: whether it overrides fusion_groups; () if none does
    cdef unsigned char *in_python       # of each backend: ASKS_* that a Python method answers
    cdef unsigned char *in_c            # of each backend: ASKS_* that a C method answers, which is called first
    cdef unsigned char *has_field       # of each backend: whether answers_version can be read from the C field
    cdef int asks                       # ASKS_* of all backends together
    cdef Answers answers
    cdef list versions                  # of each backend: the answers_version of the cached results
    cdef int64_t _epoch
    cdef void fill_questions(self, Py_ssize_t i, BackendBase backend)
    cdef list all_versions(self)
    cdef object version_of(self, Py_ssize_t i)
    cpdef int64_t epoch(self) except -1
    cdef int32_t index(self, BackendBase backend) noexcept


cdef class Inquiry:
    cdef Graph graph                    # kept alive
    cdef Devices devices
    cdef int32_t n                      # kinds
    cdef int32_t n_backends
    cdef int64_t *size                  # owned, one block with the arrays below; [n][n_backends] bytes
    cdef int32_t *example               # [n] a tensor of each kind
    cdef unsigned char *bits            # [n][n_backends] ASKS_SUPPORTS, ASKS_OFFLOAD: set if the answer is yes
    cdef unsigned char *pending         # [n][n_backends] ASKS_*: questions still to be asked in Python
    cdef unsigned char *known           # [n] whether the kind was in the support cache
    cdef void recall(self) noexcept
    cdef void remember(self) noexcept
    cdef int ask(self, int32_t b) except -1


cdef class Policy:
    cdef gs_policy c


cdef class Request:
    cdef gs_request c                   # owned; the graph is that of `graph`, the masks are those of `devices`
    cdef Graph graph
    cdef Devices devices
    cdef readonly uint64_t key          # a hash of residents and assignments
    cdef readonly list buffers          # the buffers of the graph's residents
    cdef bint asked                     # the support queries are complete
    cdef tuple offered                  # the fusion groups that backends offer; None: not asked yet
    cdef list readers                   # of each buffer: the backends that can read it; () if no backend was asked
    cdef int check_open(self) except -1
    cdef int fill_residents(self) except -1
    cdef int32_t index_of_buffer(self, BufferBase buffer, dict known) except -1
    cdef int fill_assigned(self, object assigned) except -1
    cdef int check_homes(self) except -1
    cdef tuple readers_of(self, BufferBase buffer)
    cdef int32_t reader_of(self, Tensor t, BufferBase buffer) except -2
    cdef void follow(self, Policy policy) noexcept
    cdef int ask(self) except -1
    cdef void drop_answers(self) noexcept
    cdef int ask_about_buffers(self) except -1
    cdef int ask_about_nodes(self) except -1
    cdef int ask_about_each(self, int32_t b) except -1
    cdef int take(self, int32_t b, Inquiry inquiry) except -1
    cdef int note(self, int32_t b, int32_t id, bint supports, bint offloads) except -1
    cdef int note_size(self, int32_t b, int32_t id, int64_t size) except -1

cdef str names_of(tuple backends)
