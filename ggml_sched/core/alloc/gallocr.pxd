# The C view of core/alloc/gallocr: the walk of a graph, and the arenas that it fills.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from ggml_sched._c cimport GS_OP_NONE, GS_STATE_LATE, gs_arena_result, gs_backend_info, gs_graph, gs_layout, gs_plan
from ggml_sched.core.pack.solve cimport gs_blocks


cdef enum:
    OUTSIDE = -1            # the value in `arena_of` for a tensor whose memory is not in an arena


# Fusion groups: the members of each group, and the group of each tensor.
ctypedef struct gs_groups:
    int32_t n
    int32_t n_tensors
    int32_t *begin          # member[begin[k] .. begin[k + 1]) belong to group k
    int32_t *member         # positions in the graph's nodes, ascending in each group
    int32_t *id             # of each entry of `member`: the id of that node
    int32_t *of             # of each graph tensor: the group that it is a member of; -1 if it is in no group
    int32_t *within         # of each graph tensor: the group that its memory's root is a member of, or -1
    int32_t *starts         # of each group: the position of its first member in a walk
    int32_t *ends           # of each group: the position of its last member in a walk
    void *memory


ctypedef struct gs_walk:
    gs_plan p               # the walk's ids, with the lifetimes and offsets that the walk finds
    const gs_layout *layout
    const unsigned char *slot   # as in gs_graph: the slot of each entry of `src`
    const uint32_t *alike       # as in gs_graph: which sources have the node's layout
    const int32_t *dep_begin    # as in gs_graph: alloc dependencies, or NULL
    const int32_t *dep
    const gs_groups *groups     # fusion groups, or NULL
    # Used during the walk only:
    int status                  # the first error
    int32_t *n_children         # of each id: how many reads of it are still to come
    int32_t *n_views            # of each id: how many views and in-place results of it are still in use
    int32_t n_owners
    int32_t *owner              # [n_owners] the owners of memory, in order of birth
    int32_t *start              # of each owner: the first section (core/pack/prepare.pxi) of its lifetime
    int32_t *stop               # of each owner: one past the last of these sections
    char *scratch               # the memory of the arrays above


ctypedef struct gs_arena:
    gs_blocks *blocks       # free blocks, or NULL: the walk finds lifetimes only, and owners get offset 0
    int64_t live            # bytes allocated at the current position of the walk
    int64_t peak            # the largest `live` so far: a lower bound for the arena
    int64_t whole           # as `live`, but freed tails (see the glossary) count as allocated
    int64_t whole_peak      # the largest `whole` so far
    int64_t live_bytes      # the lower bound of the arena: whole_peak if no tail is reused, else peak
    int64_t alignment       # bytes; in-place reuse at an offset needs a multiple of it
    int32_t reuse           # GS_REUSE_*: the allowed in-place reuse
    int32_t n_inner         # nodes that reuse in place a view that begins inside its root, not at its start
    int32_t n_refused       # views of this kind that were not reused, because only GS_REUSE_ALL may
    int64_t limit           # bytes of the best result so far: an arena whose `peak` reaches it is no improvement
    int32_t *wanted         # shared: how many arenas may still improve; at 0 the walk ends early.  NULL: it never does
    int32_t n_partial       # nodes that reuse only the front of a larger memory
    int32_t n_owners        # owners of more than 0 bytes of memory
    int32_t section         # index of the current section (an interval of time, core/pack/prepare.pxi)
    bint waiting            # memory was allocated since the last section began


cdef inline int32_t plan_owner(const gs_plan *p, int32_t id) noexcept nogil:
    """The owner of an id's memory: the end of its chain of view roots and sources reused in place."""
    while p.root[id] >= 0:
        id = p.root[id]
    return id


cdef inline int32_t group_of(const gs_groups *w, int32_t id) noexcept nogil:
    """The group that an id is a member of; -1 if it is in no group, as all copies."""
    return w.of[id] if w != NULL and id < w.n_tensors else -1


cdef inline bint group_holds(const gs_groups *w, int32_t group, int32_t id) noexcept nogil:
    """Whether an id is a member of this group, or a view of a member."""
    return id < w.n_tensors and w.within[id] == group


cdef inline bint group_waits(const gs_groups *w, int32_t id, int32_t now) noexcept nogil:
    """Whether id is in a group that is computed later in the walk than position `now`."""
    cdef int32_t group = group_of(w, id)
    return group >= 0 and w.ends[group] > now


cdef inline void plan_mark_late(gs_plan *p, int32_t id) noexcept nogil:
    """Set or clear GS_STATE_LATE of an id whose offset is chosen after the walk.

    A leaf that is born after the start may get an offset where another tensor lived before: it must be loaded at its
    birth, not at the start.
    """
    if p.op[id] == GS_OP_NONE and p.like[id] == id and p.birth[id] > 0:
        p.state[id] |= GS_STATE_LATE
    else:
        p.state[id] &= ~GS_STATE_LATE


cdef int plan_alloc_ids(gs_plan *p, int32_t n, int32_t n_seq, int32_t n_src) noexcept nogil
cdef int walk_alloc(gs_walk *f, const gs_plan *p, int32_t n, int32_t n_seq, int32_t n_src) noexcept nogil
cdef void walk_free(gs_walk *f) noexcept nogil
cdef void walk_from_graph(gs_walk *f, const gs_graph *g) noexcept nogil
cdef uint64_t walk_wiring(const gs_walk *f) noexcept nogil
cdef void groups_find_positions(gs_groups *w, const int32_t *seq, int32_t n_seq) noexcept nogil
cdef void plan_follow_owners(gs_plan *p) noexcept nogil
cdef int gallocr_run(gs_walk *f, gs_arena *arenas, const uint64_t *inplace, const int32_t *order, int32_t n_order,
                     bint leafs_first, int32_t *failed) noexcept nogil
cdef bint walk_can_replay(gs_walk *f, const gs_plan *measured, const gs_backend_info *backends) noexcept nogil
cdef void walk_replay(gs_walk *f, const gs_plan *measured) noexcept nogil
cdef int compact_offsets(gs_plan *p, int32_t n_arenas, const gs_arena_result *arenas, bint in_order) noexcept nogil
