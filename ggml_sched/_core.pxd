# The C view of the core: `from ggml_sched cimport _core` (or `from ggml_sched._core cimport Tensor`).
#
# Each reference below says what it keeps alive.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef extern from "ggml_sched/status.h" nogil:
    enum: GS_OK
    enum: GS_NO_HOST_MEMORY
    enum: GS_OVERFLOW
    enum: GS_OUT_OF_MEMORY
    enum: GS_BAD_ARGUMENT
    enum: GS_BAD_PLACEMENT
    enum: GS_UNSUPPORTED_OP
    enum: GS_HAZARD

cdef extern from "ggml_sched/structs.h" nogil:
    enum: GS_MAX_DIMS
    enum: GS_MAX_SRC
    enum: GS_MAX_OP_PARAMS
    enum: GS_FLAG_INPUT
    enum: GS_FLAG_OUTPUT

    ctypedef struct gs_layout:
        int64_t ne[4]
        int64_t nb[4]
        int64_t nbytes
        int32_t type
        int32_t op

    ctypedef struct gs_block:
        int64_t offset
        int64_t size

    ctypedef struct gs_type_traits:
        int32_t block_size
        int32_t type_size

cdef extern from "ggml_sched/checked.h" nogil:
    int gs_checked_add(int64_t a, int64_t b, int64_t *out)
    int gs_checked_mul(int64_t a, int64_t b, int64_t *out)
    int gs_checked_align(int64_t a, int64_t alignment, int64_t *out)
    bint gs_range_fits(int64_t offset, int64_t size, int64_t capacity)


cdef class Lease:
    cdef readonly bint alive
    cdef readonly bint displaced        # somebody else has re-addressed one of its tensors
    cdef readonly bint transient        # of a scheduler: other planners treat its tensors as unplaced
    cdef readonly bint stages           # leafs keep what was set in `Tensor.stash`, to be loaded when their life begins
    cdef readonly bint through          # ... and it goes to their memory at once: nothing lives there before them
    cdef public object guard            # call before reading a tensor: raises if its data is gone; None: no such check
    cdef public object drain            # call before touching the data: waits for queued computes; None: none queued
    cdef object __weakref__
    cpdef void end(self) noexcept


cdef class BackendBase:
    cdef readonly str name
    cdef readonly int64_t alignment     # bytes
    cdef object __weakref__


cdef class BufferBase:
    cdef readonly BackendBase backend   # keeps its backend alive
    cdef readonly int64_t size          # bytes
    cdef readonly int64_t base
    cdef public str usage
    cdef readonly bint closed
    cdef object __weakref__


cdef class Home:
    cdef readonly str name
    cdef readonly bint closed
    cdef int64_t epoch                  # counts permanent addresses given or taken


cdef class ContextBase:
    cdef Home home                      # shared with the tensors, so that no reference cycle arises
    cdef list _tensors                  # keeps its tensors alive until close()
    cdef object __weakref__
    cdef Tensor add_tensor(self, str name, int op, gs_layout *layout, tuple src, Tensor view, int64_t view_offs,
                           tuple params)
    cdef Tensor add_like(self, int op, Tensor a, tuple src, tuple params, bint inplace=*, str name=*)
    cdef Tensor add_dense(self, int op, int type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3, tuple src,
                          tuple params, str name=*)


cdef class Tensor:
    # First what passes over all tensors read and write, close together.
    cdef Home home                      # the context's state, kept alive (the context itself is not)
    cdef BufferBase _buffer             # keeps its buffer alive
    cdef Lease _lease                   # None: a permanent address
    cdef int64_t _offset
    cdef public bint overwritten        # a node has computed over it since: its memory holds the latest data
    cdef readonly str name
    cdef gs_layout layout
    cdef readonly tuple src             # keeps its sources alive
    cdef readonly Tensor view_src       # the root of a view, kept alive; None otherwise
    cdef readonly int64_t view_offs     # bytes from the root's start
    cdef readonly tuple op_params       # int32 words as in ggml, trailing zeros cut
    cdef tuple _deps                    # tensors kept until this node is done, kept alive; None: none
    cdef int _flags
    cdef int32_t mark                   # scratch index, meaningful only inside Graph building
    cdef readonly str resident          # "weight", "kv" or "" (from a graph file)
    cdef readonly int64_t version       # of a root's data: how often it was set or written, as far as we know
    cdef public object stash            # what the caller last set, under a lease that stages: bytes or None
    cdef object __weakref__
    cdef BufferBase c_buffer(self)
    cdef BufferBase settled(self)
    cdef void bind(self, BufferBase buffer, int64_t offset, Lease lease) noexcept


# The free ranges of one arena, in address order.
ctypedef struct gs_blocks:
    gs_block *at
    int32_t n
    int32_t room
    int64_t max_size            # high-water mark, from the arena's start
    int64_t chunk               # bytes of one chunk of an arena that may not be one buffer; 0: no bound
    int64_t stride              # distance of the chunks' first offsets, so that they never touch
    int32_t n_chunks


# A graph as the planner sees it: tensor ids index every array.
ctypedef struct gs_graph:
    int32_t n_tensors
    int32_t n_nodes
    int32_t n_leafs
    gs_layout *layout
    int64_t *view_offs
    int32_t *view_src           # id of the root, -1 for none
    unsigned char *flags
    int32_t *src_begin          # sources of tensor i: src[src_begin[i] .. src_begin[i + 1])
    int32_t *src                # empty slots left out
    unsigned char *slot         # of each entry of src: its place among the tensor's sources
    int32_t *node               # ids in execution order
    int32_t *leaf
    int32_t *position           # index into node, -1 for tensors that are not nodes
    # What the passes ask most, once for all of them:
    int32_t n_work
    int32_t n_roots
    int32_t n_views
    int32_t *root               # ids of the tensors that are not views
    int32_t *work               # ids of the nodes that compute, in order (views compute nothing)
    int32_t *view               # ids of the views that no op computes into
    int32_t *memory             # whose memory a tensor has: a view's root, else itself
    int64_t *nbytes
    int32_t *n_readers          # how often nodes read or keep a tensor
    int32_t *n_viewers          # how many nodes are views of it
    int32_t *first_view         # of each root, -1; then next_view, ascending
    int32_t *next_view
    int32_t *reader_begin       # nodes that compute with tensor i: reader[reader_begin[i] .. reader_begin[i + 1]),
    int32_t *reader             # ascending, once for each time that they read it
    unsigned char *op
    unsigned char *kind         # KIND_* bits
    uint32_t *alike             # of a node: bit k is set when its source k has the node's layout
    int32_t *dep_begin          # tensors kept until node i is done: dep[dep_begin[i] .. dep_begin[i + 1]);
    int32_t *dep                # both NULL where no node has any


cdef class TensorSet:
    cdef tuple tensors                  # keeps its members alive
    cdef int32_t *slots                 # owned
    cdef int64_t capacity
    cdef int64_t probe(self, object t)
    cdef int32_t find(self, object t)


cdef class Graph:
    cdef gs_graph flat                  # owned
    cdef readonly tuple nodes           # keep their tensors alive
    cdef readonly tuple leafs
    cdef readonly tuple tensors
    cdef public dict meta
    cdef tuple homes                    # of the contexts that its tensors come from
    cdef TensorSet _index               # made when a mark was overwritten by another graph
    cdef readonly object fingerprint    # a 128-bit int over the structure: equal for an equal graph built anew
    cdef readonly uint64_t wiring       # a hash of everything but shapes, strides and view offsets
    cdef object __weakref__
    cdef int fill(self, tuple tensors, tuple nodes, tuple leafs, Graph like=*) except -1
    cdef int fill_deps(self, int64_t n_deps, dict given) except -1
    cdef void fingerprint_structure(self, uint64_t *found) noexcept nogil
    cpdef int32_t id_of(self, Tensor t)
    cdef int32_t require(self, Tensor t, Tensor user) except -1


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


# Everything a placement depends on besides the graph.
ctypedef struct gs_request:
    const gs_graph *g
    int32_t n_backends
    int32_t *resident           # backend of the buffer that a tensor's root lives in; -1: to be placed
    unsigned char *usage        # of that buffer
    int32_t *user               # the user's assignment, -1 for none; NULL: none at all
    unsigned char *supports     # [n_backends][n_tensors], NULL: everything is supported
    unsigned char *offloads     # [n_backends][n_tensors], NULL: nothing is offloaded
    unsigned char *reads        # [n_backends][n_backends]: b may read memory of c without a copy
    int64_t *nbytes             # [n_backends][n_tensors] alloc sizes, NULL: the tensor's own byte size
    int32_t *buffer             # of each resident root: index of its buffer
    int32_t n_buffers
    unsigned char *reads_buffer # [n_backends][n_buffers]: b may read that buffer without a copy
    bint shares                 # a backend may read what is not its own


cdef class Devices:
    cdef readonly tuple backends        # kept alive
    cdef int32_t n
    cdef uint64_t *inplace_first        # owned; [n][N_OPS_MAX] source masks, first generation's ops
    cdef uint64_t *inplace              # owned; the same for all ops that the backend declares
    cdef tuple asks_op, asks_offload, asks_buffer, asks_size
    cdef bint asks_ops, asks_offloads, asks_buffers, asks_sizes     # whether any of them does
    cdef int32_t index(self, BackendBase backend) noexcept


cdef class Request:
    cdef gs_request c                   # arrays owned, graph borrowed from `graph`
    cdef Graph graph
    cdef Devices devices
    cdef readonly uint64_t key          # of residency and assignments
    cdef readonly list buffers          # that the graph's tensors live in outside any plan
    cdef bint asked                     # the backends have answered
    cdef list readers                   # for each of those the backends that read it; () where none was asked
    cdef int check_open(self) except -1
    cdef int fill_residents(self) except -1
    cdef int32_t index_of_buffer(self, BufferBase buffer, dict known) except -1
    cdef int fill_assigned(self, object assigned) except -1
    cdef tuple readers_of(self, BufferBase buffer)
    cdef int32_t reader_of(self, Tensor t, BufferBase buffer) except -2
    cdef int ask(self) except -1
