# The C view of core/plan/request.  Each reference says what it keeps alive.

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport gs_policy, gs_request
from ggml_sched.core.graph.graph cimport Graph
from ggml_sched.core.graph.tensor cimport BackendBase, BufferBase, Tensor


# What is said of one kind.  In one block: sizes, the words of the kind, bits; sizes and bits one for each backend.
ctypedef struct gs_answer:
    int32_t n_words
    int64_t *size
    uint64_t *words
    unsigned char *bits         # ASKS_SUPPORTS, ASKS_OFFLOAD


cdef class Answers:
    cdef int32_t n_backends
    cdef int32_t n
    cdef gs_answer **slot               # owned, and so are the records; NULL: nothing is known
    cdef void forget(self) noexcept
    cdef const gs_answer *find(self, uint64_t hash, const uint64_t *words, int32_t n_words) noexcept
    cdef void add(self, uint64_t hash, const uint64_t *words, int32_t n_words, const unsigned char *bits,
                  const int64_t *sizes) noexcept


cdef class Devices:
    cdef readonly tuple backends        # kept alive
    cdef int32_t n
    cdef int64_t *alignment             # owned; of each backend
    cdef uint64_t *inplace_first        # owned; [n][GS_N_OPS] source masks, first generation's ops
    cdef uint64_t *inplace              # owned; the same for all ops that the backend declares
    cdef tuple asks_buffer
    cdef bint asks_buffers              # whether any of them does
    cdef tuple fuses                    # of each backend whether it may compute nodes as one
    cdef unsigned char *in_python       # of each backend the ASKS_* that a Python method answers
    cdef unsigned char *in_c            # ... and those that a compiled one does, which goes first
    cdef unsigned char *has_field       # ... and whether its version stands in the C field
    cdef int asks                       # ASKS_* of all of them
    cdef Answers answers
    cdef list versions                  # those that the answers are of
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
    cdef int64_t *size                  # owned, with what follows; [n][n_backends]
    cdef int32_t *example               # a tensor of each kind
    cdef unsigned char *bits            # [n][n_backends] ASKS_SUPPORTS, ASKS_OFFLOAD: the answer is yes
    cdef unsigned char *pending         # [n][n_backends] ASKS_*: left to be asked in Python
    cdef unsigned char *known           # of each kind: remembered
    cdef void recall(self) noexcept
    cdef void remember(self) noexcept
    cdef int ask(self, int32_t b) except -1


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
    cdef tuple offered                  # what they would compute as one; None: not asked yet
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
    cdef void drop_answers(self) noexcept
    cdef int ask_about_buffers(self) except -1
    cdef int ask_about_nodes(self) except -1
    cdef int ask_about_each(self, int32_t b) except -1
    cdef int take(self, int32_t b, Inquiry inquiry) except -1
    cdef int note(self, int32_t b, int32_t id, bint supports, bint offloads) except -1
    cdef int note_size(self, int32_t b, int32_t id, int64_t size) except -1

cdef str names_of(tuple backends)
