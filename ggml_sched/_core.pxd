# The C view of the core: `from ggml_sched cimport _core` (or `from ggml_sched._core cimport Tensor`).
#
# Each reference below says what it keeps alive.

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport gs_checked_add, gs_checked_align, gs_checked_mul, gs_error, gs_graph, gs_layout, gs_plan
from ggml_sched._c cimport gs_policy, gs_problem, gs_range_fits, gs_request
from ggml_sched._graph cimport BackendBase, BufferBase, ContextBase, Graph, Home, Lease, Tensor, TensorSet
from ggml_sched._pack cimport gs_blocks


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


# A problem of the C API, checked, as the request that the passes take.
ctypedef struct gs_asked:
    gs_request r                # `g`, `supports`, `offloads` and `nbytes` are the caller's; all else stands in `memory`
    void *memory                # owned; bytes 0 .. n_bytes are the same for the same problem
    int64_t n_bytes


cdef class PlanData:
    cdef gs_plan c                      # owned
    cdef bint knows_exclusive           # found out when first asked: planning alone does not need it
    cdef tuple _chunk_sizes
    cdef public object _program         # what program.make_program has made of it, or None
    cdef public object _work_sizes      # what backends have said of work memory, or None
    cdef void know_exclusive(self) noexcept
    cdef int check(self, int32_t i) except -1


# Everything that r asks; to be freed with gs_plan_free.  A gs_status, with p.failed the id that an error is about.
cdef int gs_plan_make(const gs_request *r, gs_plan *p) noexcept nogil
# A reserved plan for a graph of the same wiring; *serves says whether it fits.
cdef int gs_plan_compact(const gs_plan *reserved, const int64_t *size, int64_t *offset) noexcept nogil
cdef int gs_plan_replay(const gs_request *r, const gs_plan *reserved, gs_plan *p, int32_t *serves) noexcept nogil
cdef void gs_plan_free(gs_plan *p) noexcept nogil
cdef void plan_mark_exclusive(gs_plan *p) noexcept nogil
# Freed with asked_free when this succeeds.
cdef int asked_init(gs_asked *a, const gs_graph *g, const gs_problem *p, gs_error *error) noexcept nogil
cdef void asked_free(gs_asked *a) noexcept nogil
cdef bint asked_alike(const gs_asked *a, const gs_asked *b) noexcept nogil
cdef int planning_refused(gs_error *error, const gs_asked *a, const gs_problem *p, int status,
                          int32_t id) noexcept nogil
