# Placings that serve again: offsets found for one walk, for another of the same wiring.
#
# Whether they do, and taking them over; nothing is decided anew.  Invariant: a walk that
# passes placing_replays is as sound with the measured offsets as the measured one is.
# For GraphAllocator (measure, then allocate) and for reserved plans (_core_replay).

cdef bint placing_replays(gs_walk *f, const gs_walk *measured, const int64_t *alignment) noexcept nogil:
    """Whether measured offsets serve f: nothing larger, and whatever took over memory may still do so.

    Where that is at a view's offset, f.view_offs says where afterwards.  `alignment` of each home, or NULL where
    memory is only taken over at its front.
    """
    cdef int32_t i, k
    if f.n != measured.n or f.n_seq != measured.n_seq:
        return False
    for i in range(f.n):
        if f.home[i] != measured.home[i] or f.size[i] > measured.size[i]:
            return False
        # What had an address in the arena before must have had the same one.
        if was_held(f, i) != was_held(measured, i) or was_held(f, i) and f.offset[i] != measured.offset[i]:
            return False
    # In the order of execution: one may take over from another.
    for k in range(f.n_seq):
        i = f.seq[k]
        if measured.state[i] & GS_STATE_TOOK_OVER and not replays_take_over(f, measured, alignment, i):
            return False
    return True


cdef inline bint was_held(const gs_walk *f, int32_t i) noexcept nogil:
    """Whether i had an address in one of the arenas before the walk."""
    return f.root[i] < 0 and f.home[i] != OUTSIDE and f.birth[i] < 0 and f.state[i] & GS_STATE_ADDRESSED


cdef bint replays_take_over(gs_walk *f, const gs_walk *measured, const int64_t *alignment, int32_t i) noexcept nogil:
    """Whether the source whose memory i took over still has i's layout, at a place where i fits.

    That source is the memory's owner or a view of it, which may be shaped otherwise than its owner, and lie
    elsewhere in it than it did.
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
    # Both from the start of the memory, which is itself a taker's place when views of takers were taken over.
    while measured.root[r] >= 0:
        place += f.view_offs[r]
        was += measured.view_offs[r]
        r = measured.root[r]
    if place == was:
        return True
    # While i lives, the memory is taken at least up to where i ended, and to where its last taker did.
    room = max(was + measured.size[i], measured.rest[r])
    return alignment != NULL and place % alignment[f.home[i]] == 0 and place + f.size[i] <= room


cdef void placing_copy(gs_walk *f, const gs_walk *measured) noexcept nogil:
    """Take over measured offsets, lifetimes and in-place decisions."""
    cdef int32_t i
    for i in range(f.n):
        f.offset[i] = measured.offset[i]
        f.root[i] = measured.root[i]
        f.birth[i] = measured.birth[i]
        f.death[i] = measured.death[i]
        f.rest[i] = min(f.size[i], measured.rest[i])
        f.trimmed[i] = measured.trimmed[i]
        f.state[i] = measured.state[i]
    # Views and takers may lie elsewhere in their roots.
    walk_follow_owners(f)
