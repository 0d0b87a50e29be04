# The C view of core/plan/placement: requests, and splits.

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport GS_REASON_UNSUPPORTED, GS_REASON_USER, GS_REASON_USER_UNSUPPORTED, gs_graph, gs_problem


# Everything that a plan depends on: a graph, and a problem in which fields that callers may leave out are filled in.
ctypedef struct gs_request:
    gs_problem p                # arrays that may be NULL: `assigned`, `supports`, `offloads`, `nbytes`, the groups
    const gs_graph *g
    const uint64_t *inplace     # [n_backends][GS_N_OPS]: bit k: source k may be the destination
    bint shares                 # whether any backend can read a buffer or memory of another backend
    const unsigned char *store  # [n_backends] 1: a store, whose weights are fetched; NULL: no backend is one
    const int64_t *margin       # [n_backends] of each store: bytes that a fetched copy takes beyond the weight's own
    const int64_t *window       # [n_backends] bytes that fetched copies may take together ahead of their readers
    void *memory                # owned; holds those arrays of `p` that are not the caller's
    int64_t n_bytes             # bytes of `memory` to compare with another request; only set for problems of the C API


# A growing array (ints.pxi).
ctypedef struct gs_ints:
    int32_t *at
    int32_t n
    int32_t room


cdef enum:
    N_SPLIT_LISTS = 14          # how many growing arrays gs_splits begins with
    N_PLAN_LISTS = 12           # how many of them, from the first on, gs_plan has, too, in the same order


# Splits, copies and write-backs while they are being made; gs_plan has the same arrays with fixed lengths.
ctypedef struct gs_splits:
    gs_ints split_backend
    gs_ints split_start         # positions in the graph's node order
    gs_ints split_stop          # one past a split's last position
    gs_ints split_inputs        # one past a split's last entry in `inputs`
    gs_ints inputs              # copies in the order in which they are made; a copy may recur
    gs_ints copy_like           # graph tensor with the copy's layout
    gs_ints copy_from           # graph tensor that must exist before the copy is made
    gs_ints copy_backend
    gs_ints copy_kept           # 1: an unchanged weight, copied once and kept for the next compute
    gs_ints slot_copy           # of each further copy slot: index of its copy, ascending
    gs_ints back_node           # of each write-back: a node that computes into a copy of another backend's memory
    gs_ints back_copy           # of each write-back: the copy that the node computes into
    gs_ints copy_version        # `version` of the source's memory when copied; once that differs, the copy is outdated
    gs_ints copy_next           # of each copy: the copy of the same tensor that was added before it, or -1
    int32_t *src                # the graph's sources; where a node reads copy c, the id n_tensors + c
    int32_t *last_copy          # of each tensor: the copy of it that was added last, plus 1; 0: it has no copy
    int32_t *version            # of each root's memory: how often the nodes so far have written to it


cdef inline gs_ints *splits_lists(gs_splits *w) noexcept nogil:
    """The N_SPLIT_LISTS growing arrays."""
    return &w.split_backend


cdef inline bint request_supports(const gs_request *r, int32_t backend, int32_t id) noexcept nogil:
    return r.p.supports == NULL or r.p.supports[<int64_t>backend * r.g.n_tensors + id]


cdef inline unsigned char reason_of_refusal(unsigned char reason) noexcept nogil:
    """The reason of a node whose backend, chosen for `reason`, does not support it, so that another one computes it."""
    return GS_REASON_USER_UNSUPPORTED if reason == GS_REASON_USER else GS_REASON_UNSUPPORTED


cdef inline int64_t request_size(const gs_request *r, int32_t backend, int32_t id) noexcept nogil:
    return r.g.nbytes[id] if r.p.nbytes == NULL else r.p.nbytes[<int64_t>backend * r.g.n_tensors + id]


cdef inline bint is_store(const gs_request *r, int32_t backend) noexcept nogil:
    return r.store != NULL and backend >= 0 and r.store[backend]


cdef inline bint is_stored(const gs_request *r, int32_t id) noexcept nogil:
    """Whether a tensor is a weight of a store, or a view of one: every compute fetches it anew."""
    return is_store(r, r.p.resident[id])


cdef inline bint request_reads(const gs_request *r, int32_t backend, int32_t other) noexcept nogil:
    return backend == other or r.p.reads[backend * r.p.n_backends + other]


cdef inline bint reads_tensor(const gs_request *r, const int32_t *assign, int32_t backend, int32_t id) noexcept nogil:
    """Whether a backend may read a tensor where its memory is, without a copy."""
    cdef int32_t m = r.g.memory[id]
    if r.p.resident[m] >= 0:
        return r.p.resident[m] == backend or r.p.reads_buffer[<int64_t>backend * r.p.n_buffers + r.p.buffer[m]]
    return assign[m] == backend or assign[m] >= 0 and r.p.reads[backend * r.p.n_backends + assign[m]]


cdef int splits_init(gs_splits *w, const gs_graph *g) noexcept nogil
cdef void splits_free(gs_splits *w) noexcept nogil
cdef int splits_open(gs_splits *w, int32_t backend, int32_t start) noexcept nogil
cdef int splits_finish(gs_splits *w, const gs_graph *g, const int32_t *assign) noexcept nogil
cdef int32_t splits_new_copy(gs_splits *w, int32_t like, int32_t source, int32_t backend,
                             int32_t version) noexcept nogil
cdef int32_t splits_known(const gs_splits *w, int32_t id, int32_t backend) noexcept nogil
cdef void splits_note(gs_splits *w, int32_t id, int32_t copy) noexcept nogil
cdef int splits_add_input(gs_splits *w, int32_t copy) noexcept nogil
cdef int splits_write_through(gs_splits *w, const gs_graph *g, int32_t id, int32_t backend) noexcept nogil
cdef void place_deps(const gs_graph *g, int32_t *assign, unsigned char *reason) noexcept nogil
cdef int plan_default(const gs_request *r, int32_t *assign, unsigned char *reason, gs_splits *splits,
                      int32_t *failed) noexcept nogil
