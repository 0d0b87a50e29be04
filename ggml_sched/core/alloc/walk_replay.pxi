# Replaying an allocation: the offsets of a measured walk, used for another walk of the same wiring.
#
# A measured walk is an earlier one whose results were kept: by a GraphAllocator, which measures a graph before it
# allocates, or in a reserved plan (core/plan/replay.pxi).  walk_can_replay checks that a replay is possible,
# walk_replay copies the offsets; no decision is made again.
# Invariant: if walk_can_replay is true, the measured offsets are as sound for the new walk as for the measured one.

cdef bint walk_can_replay(gs_walk *f, const gs_plan *measured, const gs_backend_info *backends) noexcept nogil:
    """Whether the offsets of `measured`, an earlier walk, suit f: no size is larger, in-place reuse is still allowed.

    Sets f.p.view_offs of the ids that reuse memory in place to their offset in their root.  `backends` has the
    alignment of each arena; NULL if memory is only reused at its front.
    """
    cdef int32_t i, k
    if f.p.n != measured.n or f.p.n_seq != measured.n_seq:
        return False
    for i in range(f.p.n):
        if f.p.arena_of[i] != measured.arena_of[i] or f.p.size[i] > measured.size[i]:
            return False
        # An id that had an address in an arena before the walk `measured` must have the same address now.
        if had_address(&f.p, i) != had_address(measured, i):
            return False
        if had_address(&f.p, i) and f.p.offset[i] != measured.offset[i]:
            return False
    # In execution order: a node may reuse memory that an earlier node reused.
    for k in range(f.p.n_seq):
        i = f.p.seq[k]
        if measured.state[i] & GS_STATE_INPLACE and not can_reuse_again(f, measured, backends, i):
            return False
    return True


cdef inline bint had_address(const gs_plan *p, int32_t i) noexcept nogil:
    """Whether id i already had an address in one of the arenas when the walk of p began."""
    return p.root[i] < 0 and p.arena_of[i] != OUTSIDE and p.birth[i] < 0 and p.state[i] & GS_STATE_ADDRESSED


cdef bint can_reuse_again(gs_walk *f, const gs_plan *measured, const gs_backend_info *backends,
                          int32_t i) noexcept nogil:
    """Whether node i can reuse the memory of the same source as in `measured`, an earlier walk.

    The source must have i's layout, and i must fit at the source's offset.  The source is the root, or a view of the
    root; a view may have another shape than the root, and another offset in it than in `measured`.
    """
    cdef int32_t k, s, r = measured.root[i]
    cdef int64_t inside, was, room
    for k in range(f.p.src_begin[i], f.p.src_begin[i + 1]):
        s = f.p.src[k]
        if (s == r or measured.root[s] == r) and measured.offset[s] == measured.offset[i]:
            if layout_equal(&f.layout[f.p.like[i]], &f.layout[f.p.like[s]]):
                break
    else:
        return False
    inside = 0 if s == r else f.p.view_offs[s]
    f.p.view_offs[i] = inside
    was = measured.view_offs[i]
    # Make both offsets relative to the owner of the memory: the root may itself reuse memory in place.
    while measured.root[r] >= 0:
        inside += f.p.view_offs[r]
        was += measured.view_offs[r]
        r = measured.root[r]
    if inside == was:
        return True
    # While i lives, the memory stays allocated up to i's measured end, or up to `rest`, where a tail begins, if higher.
    room = max(was + measured.size[i], measured.rest[r])
    return backends != NULL and inside % backends[f.p.arena_of[i]].alignment == 0 and inside + f.p.size[i] <= room


cdef void walk_replay(gs_walk *f, const gs_plan *measured) noexcept nogil:
    """Copy the offsets, lifetimes and in-place reuse of `measured`, an earlier walk, to f."""
    cdef int32_t i
    for i in range(f.p.n):
        f.p.offset[i] = measured.offset[i]
        f.p.root[i] = measured.root[i]
        f.p.birth[i] = measured.birth[i]
        f.p.death[i] = measured.death[i]
        f.p.rest[i] = min(f.p.size[i], measured.rest[i])
        f.p.trimmed[i] = measured.trimmed[i]
        f.p.state[i] = measured.state[i]
    # Views, and nodes that reuse memory in place, may have other offsets in their roots.
    plan_follow_owners(&f.p)
