# Replaying an allocation: the offsets of a measured walk, used for another walk of the same wiring.
#
# placing_replays checks that this is possible, placing_copy copies the offsets; no decision is made again.  Invariant:
# if placing_replays is true, the measured offsets are as sound for the new walk as for the measured one.
# Used by GraphAllocator (measure, then allocate) and for reserved plans (core/plan/replay.pxi).

cdef bint placing_replays(gs_walk *f, const gs_walk *measured, const int64_t *alignment) noexcept nogil:
    """Whether the measured offsets can be used for f: no size is larger, and all in-place reuse is still allowed.

    Sets f.view_offs of the ids that reuse memory in place to their offset in their root.  `alignment` is that of each
    home, or NULL if memory is only reused at its front.
    """
    cdef int32_t i, k
    if f.n != measured.n or f.n_seq != measured.n_seq:
        return False
    for i in range(f.n):
        if f.home[i] != measured.home[i] or f.size[i] > measured.size[i]:
            return False
        # An id with an address in the arena before the walk must have had the same address.
        if was_held(f, i) != was_held(measured, i) or was_held(f, i) and f.offset[i] != measured.offset[i]:
            return False
    # In execution order: a node may reuse memory that an earlier node reused.
    for k in range(f.n_seq):
        i = f.seq[k]
        if measured.state[i] & GS_STATE_TOOK_OVER and not replays_take_over(f, measured, alignment, i):
            return False
    return True


cdef inline bint was_held(const gs_walk *f, int32_t i) noexcept nogil:
    """Whether i had an address in one of the arenas before the walk."""
    return f.root[i] < 0 and f.home[i] != OUTSIDE and f.birth[i] < 0 and f.state[i] & GS_STATE_ADDRESSED


cdef bint replays_take_over(gs_walk *f, const gs_walk *measured, const int64_t *alignment, int32_t i) noexcept nogil:
    """Whether node i can reuse the memory of the same source as in the measured walk.

    The source must have i's layout, and i must fit at the source's offset.  The source is the root, or a view of the
    root; a view may have another shape than the root, and another offset in it than in the measured walk.
    """
    cdef int32_t k, s, r = measured.root[i]
    cdef int64_t place, was, room
    for k in range(f.src_begin[i], f.src_begin[i + 1]):
        s = f.src[k]
        if (s == r or measured.root[s] == r) and measured.offset[s] == measured.offset[i]:
            if layout_equal(&f.layout[f.like[i]], &f.layout[f.like[s]]):
                break
    else:
        return False
    place = 0 if s == r else f.view_offs[s]
    f.view_offs[i] = place
    was = measured.view_offs[i]
    # Make both offsets relative to the owner of the memory: the root may itself reuse memory in place.
    while measured.root[r] >= 0:
        place += f.view_offs[r]
        was += measured.view_offs[r]
        r = measured.root[r]
    if place == was:
        return True
    # While i lives, the memory stays allocated at least up to i's measured end, and up to what is left of its tail.
    room = max(was + measured.size[i], measured.rest[r])
    return alignment != NULL and place % alignment[f.home[i]] == 0 and place + f.size[i] <= room


cdef void placing_copy(gs_walk *f, const gs_walk *measured) noexcept nogil:
    """Copy the measured offsets, lifetimes and in-place reuse to f."""
    cdef int32_t i
    for i in range(f.n):
        f.offset[i] = measured.offset[i]
        f.root[i] = measured.root[i]
        f.birth[i] = measured.birth[i]
        f.death[i] = measured.death[i]
        f.rest[i] = min(f.size[i], measured.rest[i])
        f.trimmed[i] = measured.trimmed[i]
        f.state[i] = measured.state[i]
    # Views, and nodes that reuse memory in place, may have other offsets in their roots.
    walk_follow_owners(f)
