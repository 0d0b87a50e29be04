# The C view of core/alloc/gallocr: the walk of a graph, and the arenas that it fills.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from ggml_sched._c cimport GS_OP_NONE, GS_STATE_LATE, gs_arena_result, gs_graph, gs_layout
from ggml_sched.core.pack.passes cimport gs_blocks


cdef enum:
    OUTSIDE = -1            # home of a tensor that lives in a buffer of its own


# Nodes that a backend computes as one, as the walk sees them: which group each is in, and where the group ends.
ctypedef struct gs_groups:
    int32_t n
    int32_t n_tensors
    int32_t *begin          # member[begin[k] .. begin[k + 1]) are the positions of a group's nodes, ascending
    int32_t *member
    int32_t *id             # of those nodes
    int32_t *of             # of each graph tensor: the group that it is computed in, -1
    int32_t *within         # of each graph tensor: the group of the member whose own memory it has, -1
    int32_t *starts         # of each group: the place of its first member in a walk ...
    int32_t *ends           # ... and of its last
    void *memory


ctypedef struct gs_walk:
    int32_t n               # ids
    int32_t n_seq
    const gs_layout *layout
    const unsigned char *slot   # of a graph tensor's sources
    const uint32_t *alike       # as in gs_graph
    const int32_t *dep_begin    # as in gs_graph: what nodes keep until they are done, or NULL
    const int32_t *dep
    const gs_groups *groups     # nodes that are computed as one, or NULL
    int32_t *like           # the graph tensor whose layout, op and flags an id has
    int32_t *home
    int32_t *root           # whose memory it shares: view root or taken-over source; -1
    int32_t *src_begin
    int32_t *src
    int32_t *seq            # ids in execution order
    int64_t *size           # bytes, aligned
    int64_t *view_offs      # from the start of the root's memory
    int64_t *rest           # result: bytes that stay taken once the tail has been given back
    int64_t *offset         # result: from the start of the home's arena; -1
    int32_t *birth          # result: position in seq at which the memory is taken
    int32_t *death          # result: position after which it is free; n_seq if it stays
    int32_t *trimmed        # result: position at which the tail was given back, where rest < size
    unsigned char *op
    unsigned char *flags
    unsigned char *state
    char *memory
    # The walk's: children and views still to come, and the owners of memory in order of birth, with the sections
    # of their arena (core/pack/prepare.pxi) that they live in.
    int32_t *n_children
    int32_t *n_views
    int32_t n_owners
    int32_t *owner
    int32_t *start
    int32_t *stop
    char *scratch


ctypedef struct gs_arena:
    gs_blocks *blocks       # NULL: lifetimes are all that is wanted; who owns memory then gets offset 0
    int64_t live            # bytes taken at the moment
    int64_t peak            # the largest `live` so far: a lower bound for the arena
    int64_t whole           # as `live`, tails given back counted as taken
    int64_t whole_peak
    int64_t live_bytes      # the one of the two peaks that is a bound for how offsets were chosen
    int64_t alignment       # of what is taken over at an offset
    int32_t reuse           # GS_REUSE_*: what may be taken over
    int32_t n_inner         # takers at another offset than 0
    int32_t n_refused       # sources there that might have been taken over with more reuse
    int64_t limit           # once `peak` has come to this, the arena is not wanted any more
    int32_t *wanted         # how many arenas still are: the walk ends when none is; NULL: it does not
    int32_t n_partial       # takers of the front that are smaller than what they took over
    int32_t n_owners        # with a size
    int32_t section         # that what is born now begins to live in
    bint waiting            # something was born since the last section


cdef inline int32_t walk_owner(const gs_walk *f, int32_t id) noexcept nogil:
    """The id under whose name the memory of id was taken: along views and in-place chains to their first."""
    while f.root[id] >= 0:
        id = f.root[id]
    return id


cdef inline int32_t group_of(const gs_groups *w, int32_t id) noexcept nogil:
    """The group that an id is computed in, -1: copies and most nodes are in none."""
    return w.of[id] if w != NULL and id < w.n_tensors else -1


cdef inline bint group_holds(const gs_groups *w, int32_t group, int32_t id) noexcept nogil:
    """Whether an id is a member of a group, or a view of one, in memory of the member's own."""
    return id < w.n_tensors and w.within[id] == group


cdef inline bint group_waits(const gs_groups *w, int32_t id, int32_t now) noexcept nogil:
    """Whether id's group is not computed before a later place in the walk than `now`."""
    cdef int32_t group = group_of(w, id)
    return group >= 0 and w.ends[group] > now


cdef inline void gallocr_mark_late(gs_walk *f, int32_t id) noexcept nogil:
    """Set or clear GS_STATE_LATE of memory whose offset the walk does not choose.

    A leaf that is born after the start may get an offset where another tensor lived before: it must be loaded at its
    birth, not at the start.
    """
    if f.op[id] == GS_OP_NONE and f.like[id] == id and f.birth[id] > 0:
        f.state[id] |= GS_STATE_LATE
    else:
        f.state[id] &= ~GS_STATE_LATE


cdef int walk_alloc(gs_walk *f, int32_t n, int32_t n_seq, int32_t n_src) noexcept nogil
cdef void walk_free(gs_walk *f) noexcept nogil
cdef void walk_from_graph(gs_walk *f, const gs_graph *g) noexcept nogil
cdef uint64_t walk_wiring(const gs_walk *f) noexcept nogil
cdef void groups_find_places(gs_groups *w, const int32_t *seq, int32_t n_seq) noexcept nogil
cdef void walk_follow_owners(gs_walk *f) noexcept nogil
cdef int gallocr_run(gs_walk *f, gs_arena *arenas, const uint64_t *inplace, const int32_t *order, int32_t n_order,
                     bint leafs_first, int32_t *failed) noexcept nogil
cdef bint placing_replays(gs_walk *f, const gs_walk *measured, const int64_t *alignment) noexcept nogil
cdef int compact_offsets(gs_walk *f, int32_t n_homes, const gs_arena_result *arenas) noexcept nogil
cdef int walk_compact(gs_walk *f, int32_t n_homes, const gs_arena_result *arenas) noexcept nogil
cdef void placing_copy(gs_walk *f, const gs_walk *measured) noexcept nogil
