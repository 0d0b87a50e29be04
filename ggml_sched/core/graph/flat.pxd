# The C view of core/graph/flat: graphs as arrays.

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport gs_error, gs_graph, gs_graph_size, gs_node


# The kinds of a graph's tensors: support queries have equal answers for tensors of one kind (kinds.pxi).  All arrays
# but `of` are in one block, which begins with `hash`.
ctypedef struct gs_kinds:
    int32_t n                   # how many kinds
    int32_t room                # how many kinds the arrays have memory for
    int32_t *of                 # owned; [n_tensors] the kind of each tensor, -1: not known yet
    uint64_t *hash              # [room] of each kind
    int32_t *example            # [room] the id of one tensor of each kind
    int32_t *slot               # [2 * room] a hash table of kinds; -1: free


cdef enum:
    MAX_KIND_WORDS = 1 + 8 + 16 + 10 * 9    # numbers, layout, parameters and 10 sources of a node (kinds.pxi)
cdef int kinds_sort(gs_kinds *kinds, const gs_graph *g, const int32_t *ids, int32_t n) noexcept nogil
cdef void kinds_free(gs_kinds *kinds) noexcept nogil
cdef int32_t kind_words(const gs_graph *g, int32_t id, uint64_t *out) noexcept nogil
cdef void node_of_kind(const gs_graph *g, int32_t id, gs_node *out) noexcept nogil
cdef void node_name_op(gs_node *out) noexcept nogil
# The result of Graph.arrays.
cdef dict flat_arrays(const gs_graph *g)


# Functions for flat graphs without Tensors, for the C API: such a graph is laid out in a block of flat_bytes bytes, and
# checked once its arrays are filled.
cdef int64_t flat_bytes(const gs_graph_size *size) noexcept nogil
cdef int64_t flat_given_bytes(const gs_graph_size *size) noexcept nogil
cdef void flat_lay_out(gs_graph *g, void *block, const gs_graph_size *size) noexcept nogil
cdef void flat_lay_out_given(gs_graph *g, void *block, const gs_graph_size *size) noexcept nogil
cdef int64_t flat_wiring_bytes(const gs_graph_size *size) noexcept nogil
cdef void flat_lay_out_wiring(gs_graph *g, void *block, const gs_graph_size *size) noexcept nogil
cdef void flat_keep_wiring(gs_graph *g, const gs_graph_size *size) noexcept nogil
cdef int flat_check(gs_graph *g, const gs_graph_size *size, gs_error *error) noexcept nogil
cdef void flat_classify(gs_graph *g) noexcept nogil
cdef bint flat_equal(const gs_graph *a, const gs_graph *b) noexcept nogil
cdef bint flat_same_wiring(const gs_graph *a, const gs_graph *b) noexcept nogil
cdef void flat_fingerprint(const gs_graph *g, uint64_t *layout_hash, uint64_t *found, uint64_t *wiring) noexcept nogil
cdef int flat_alloc(gs_graph *g, const gs_graph_size *size) except -1
