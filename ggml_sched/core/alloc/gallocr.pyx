# cython: language_level=3
"""Graph allocation: one pass over a graph in execution order that allocates, reuses in place and frees memory.

`gallocr_run` is the algorithm of ggml's first-generation ggml_gallocr on a gs_walk; the class GraphAllocator calls it,
and so does planning (core/alloc/arenas.pyx).  Invariant: the pass never changes the graph; its results are in the walk.

Includes, before the code below:

    walk         Walk: the sequence of nodes and input copies that an allocation pass visits, and its results.
    walk_replay  Replaying an allocation: the offsets of a measured walk, used for another walk of the same wiring.
    compaction   Compaction: moving the offsets of a replayed, smaller walk to the low end of each arena.
"""

from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from ggml_sched._c cimport *
from ggml_sched.core.graph.types cimport layout_equal
from ggml_sched.core.pack.solve cimport (
    PACK_INDEX_BITS, PACK_INDEX_MASK, blocks_give, blocks_take, gs_pack, pack_free, pack_prepare, pack_prepared,
    pack_sort_keys,
)

include "walk.pxi"
include "walk_replay.pxi"
include "compaction.pxi"

cdef enum:
    DIES_WITH_GROUP = -2    # a value of `death`: no reader is left, but memory stays until its fusion group has run


cdef int gallocr_place(gs_walk *f, gs_arena *arenas, const uint64_t *inplace, int32_t id, int32_t now) noexcept nogil:
    """Give id its address: in its root, in a source that it may reuse in place, or in newly allocated memory."""
    cdef int32_t k, r, group
    cdef uint64_t mask
    cdef gs_arena *arena
    cdef int64_t high, held, least = 0
    cdef int status
    if f.p.state[id] & GS_STATE_ADDRESSED or f.p.arena_of[id] == OUTSIDE:
        return GS_OK
    arena = &arenas[f.p.arena_of[id]]
    if f.p.root[id] >= 0:
        r = f.p.root[id]
        status = gallocr_place(f, arenas, inplace, r, now)
        f.p.offset[id] = -1 if f.p.offset[r] < 0 else f.p.offset[r] + f.p.view_offs[id]
        f.p.state[id] |= GS_STATE_ADDRESSED
        return status
    # Only graph tensors reuse memory in place, copies never.
    mask = inplace[f.p.arena_of[id] * GS_N_OPS + f.p.op[id]] & f.alike[id] if f.p.like[id] == id else 0
    if mask:
        r = -1
        group = group_of(f.groups, id)
        for k in range(f.p.src_begin[id], f.p.src_begin[id + 1]):
            if not (mask >> f.slot[k]) & 1:
                continue
            # Other members of id's fusion group may read a source from outside at the same time: do not overwrite it.
            if group >= 0 and not group_holds(f.groups, group, f.p.src[k]):
                continue
            held = gallocr_reusable(f, arena, id, f.p.src[k])
            if held >= 0 and (r < 0 or held < least):
                r = f.p.src[k]
                least = held
                if arena.reuse == GS_REUSE_FIRST:
                    break
        if r >= 0:
            gallocr_reuse(f, arena, id, r)
            gallocr_trim(f, arena, id, now)
            return f.status
    if arena.blocks != NULL:
        high = arena.blocks.max_size
        status = blocks_take(arena.blocks, f.p.size[id], &f.p.offset[id])
        if status != GS_OK:
            return status
        if f.p.op[id] == GS_OP_NONE and f.p.offset[id] < high:
            f.p.state[id] |= GS_STATE_LATE
    elif f.p.size[id] > INT64_MAX - arena.whole:
        return GS_OUT_OF_MEMORY
    else:
        f.p.offset[id] = 0
    f.p.state[id] |= GS_STATE_ADDRESSED
    f.p.birth[id] = now
    if arena.blocks == NULL:
        plan_mark_late(&f.p, id)
    f.p.rest[id] = f.p.size[id]
    f.owner[f.n_owners] = id
    f.n_owners += 1
    f.start[id] = arena.section
    if f.p.size[id]:
        arena.n_owners += 1
        arena.waiting = True
    arena.live += f.p.size[id]
    arena.whole += f.p.size[id]
    arena.whole_peak = max(arena.whole_peak, arena.whole)
    if arena.live > arena.peak:
        if arena.wanted != NULL and arena.peak < arena.limit <= arena.live:
            arena.wanted[0] -= 1
        arena.peak = arena.live
        if arena.wanted != NULL and arena.wanted[0] == 0:
            return GS_OUT_OF_MEMORY
    return GS_OK


cdef int64_t gallocr_reusable(const gs_walk *f, gs_arena *arena, int32_t id, int32_t s) noexcept nogil:
    """The bytes of source s's memory, which node id would reuse in place; s has id's layout.

    -1 if id may not reuse it: s has other readers, its memory has other users or is an input's or output's, or id does
    not fit.
    """
    cdef int32_t r = f.p.root[s] if f.p.root[s] >= 0 else s
    cdef int32_t owner
    cdef int64_t place
    if (f.n_children[s] != 1 or f.n_views[s] or f.p.offset[s] < 0 or f.p.arena_of[r] != f.p.arena_of[id]
            or (f.p.flags[s] | f.p.flags[r]) & (GS_FLAG_INPUT | GS_FLAG_OUTPUT)):
        return -1
    # The memory of a view s is that of its root r: nothing but s and its reader may use that memory any more.
    if r != s:
        if f.n_views[r] != 1 or f.n_children[r] != 0:
            return -1
        if f.p.offset[r] != f.p.offset[s]:
            if arena.reuse != GS_REUSE_ALL:
                arena.n_refused += 1
                return -1
            if f.p.offset[s] % arena.alignment:
                return -1
    owner = plan_owner(&f.p, s)
    place = f.p.offset[s] - f.p.offset[owner]
    # Memory that this walk allocated may have a freed tail, after `rest` bytes; no other memory has one.
    if place + f.p.size[id] > (f.p.rest[owner] if f.p.birth[owner] >= 0 else f.p.size[owner]):
        return -1
    if arena.reuse == GS_REUSE_WHOLE and f.p.size[id] != f.p.size[owner]:
        return -1
    return f.p.size[owner]


cdef void gallocr_reuse(gs_walk *f, gs_arena *arena, int32_t id, int32_t s) noexcept nogil:
    """Give node id the address of its source s."""
    cdef int32_t r = f.p.root[s] if f.p.root[s] >= 0 else s
    if f.p.offset[r] != f.p.offset[s]:
        arena.n_inner += 1
    elif f.p.size[id] < f.p.size[plan_owner(&f.p, r)]:
        arena.n_partial += 1
    f.p.root[id] = r
    f.p.view_offs[id] = f.p.offset[s] - f.p.offset[r]
    f.n_views[r] += 1
    f.p.offset[id] = f.p.offset[s]
    f.p.state[id] |= GS_STATE_ADDRESSED | GS_STATE_INPLACE


cdef void gallocr_trim(gs_walk *f, gs_arena *arena, int32_t id, int32_t now) noexcept nogil:
    """Free the tail after node `id`, which reuses the front of a memory: all readers of the tail have run."""
    cdef int32_t owner = plan_owner(&f.p, id)
    cdef int64_t kept = f.p.offset[id] - f.p.offset[owner] + f.p.size[id]
    cdef int64_t tail = f.p.rest[owner] - kept
    if arena.reuse == GS_REUSE_FIRST or f.p.birth[owner] < 0 or tail <= 0 or group_waits(f.groups, id, now):
        return
    f.p.rest[owner] = kept
    f.p.trimmed[owner] = now
    arena.live -= tail
    gallocr_give(f, arena, f.p.offset[owner] + kept, tail)


cdef inline void gallocr_give(gs_walk *f, gs_arena *arena, int64_t offset, int64_t size) noexcept nogil:
    """Make a range of an arena free; if this needs host memory and there is none, set the walk's status."""
    if arena.blocks != NULL and blocks_give(arena.blocks, offset, size) != GS_OK:
        f.status = GS_NO_HOST_MEMORY


cdef void gallocr_release(gs_walk *f, gs_arena *arenas, int32_t id, int32_t now) noexcept nogil:
    """Free an id's memory, if that lies in an arena, even if it was allocated there before this walk."""
    cdef int64_t size
    cdef gs_arena *arena
    # Find the owner, the first tensor in a chain of in-place reuse; an output in the chain keeps the memory allocated.
    while f.p.root[id] >= 0 and not f.p.flags[id] & GS_FLAG_OUTPUT:
        id = f.p.root[id]
    if (f.p.arena_of[id] == OUTSIDE or f.p.offset[id] < 0 or f.p.state[id] & GS_STATE_FREED
            or f.p.flags[id] & GS_FLAG_OUTPUT):
        return
    if group_waits(f.groups, id, now):
        f.p.death[id] = DIES_WITH_GROUP
        return
    size = f.p.rest[id] if f.p.birth[id] >= 0 else f.p.size[id]
    arena = &arenas[f.p.arena_of[id]]
    gallocr_give(f, arena, f.p.offset[id], size)
    arena.live -= size
    arena.whole -= f.p.size[id]
    if arena.waiting and f.p.size[id]:
        arena.section += 1
        arena.waiting = False
    f.stop[id] = arena.section
    f.p.death[id] = now
    f.p.state[id] |= GS_STATE_FREED


cdef inline void gallocr_drop(gs_walk *f, gs_arena *arenas, int32_t s, int32_t now) noexcept nogil:
    """Count one read of s as done; free the memory of s after its last read."""
    cdef int32_t r = s
    f.n_children[s] -= 1
    if f.n_children[s] or f.n_views[s]:
        return
    if f.p.flags[s] & GS_FLAG_OUTPUT:
        return          # an output and its root stay allocated until the next compute
    if f.p.root[s] >= 0:
        r = f.p.root[s]
        f.n_views[r] -= 1
        if f.n_children[r] or f.n_views[r]:
            return
    gallocr_release(f, arenas, r, now)


cdef void gallocr_finish(gs_walk *f, gs_arena *arenas, int32_t id, int32_t now) noexcept nogil:
    """Node id has run: count its reads of sources, and its alloc dependencies, as done."""
    cdef int32_t k
    if group_of(f.groups, id) >= 0:
        gallocr_finish_member(f, arenas, id, now)
        return
    for k in range(f.p.src_begin[id], f.p.src_begin[id + 1]):
        gallocr_drop(f, arenas, f.p.src[k], now)
    gallocr_drop_deps(f, arenas, id, now)


cdef void gallocr_drop_deps(gs_walk *f, gs_arena *arenas, int32_t id, int32_t now) noexcept nogil:
    """Count the alloc dependencies of a node as done."""
    cdef int32_t k
    if f.p.state[id] & GS_STATE_DEPENDS:
        for k in range(f.dep_begin[id], f.dep_begin[id + 1]):
            gallocr_drop(f, arenas, f.dep[k], now)


cdef void gallocr_finish_member(gs_walk *f, gs_arena *arenas, int32_t id, int32_t now) noexcept nogil:
    """The walk has passed node id, a member of a fusion group: drop the sources that the group no longer needs.

    All members run at the position of the last one, and use sources from outside the group until then.  Sources inside
    the group are done as if the members ran one by one, so that members may reuse each other's memory in place.
    """
    cdef const gs_groups *w = f.groups
    cdef int32_t group = w.of[id], i, k, m
    for k in range(f.p.src_begin[id], f.p.src_begin[id + 1]):
        if group_holds(w, group, f.p.src[k]):
            gallocr_drop(f, arenas, f.p.src[k], now)
    if w.ends[group] > now:
        return
    for i in range(w.begin[group], w.begin[group + 1]):
        m = w.id[i]
        for k in range(f.p.src_begin[m], f.p.src_begin[m + 1]):
            if not group_holds(w, group, f.p.src[k]):
                gallocr_drop(f, arenas, f.p.src[k], now)
        gallocr_drop_deps(f, arenas, m, now)
    for i in range(w.begin[group], w.begin[group + 1]):
        if f.p.death[w.id[i]] == DIES_WITH_GROUP:
            gallocr_release(f, arenas, w.id[i], now)


cdef inline void gallocr_require(gs_walk *f, gs_arena *arenas, const uint64_t *inplace, int32_t id, int32_t now,
                                 int32_t *failed) noexcept nogil:
    """Give id its address, unless the walk has failed; *failed is the first id without memory."""
    if f.status == GS_OK:
        f.status = gallocr_place(f, arenas, inplace, id, now)
        if f.status != GS_OK:
            failed[0] = id


cdef int gallocr_run(gs_walk *f, gs_arena *arenas, const uint64_t *inplace, const int32_t *order, int32_t n_order,
                     bint leafs_first, int32_t *failed) noexcept nogil:
    """Allocate the nodes of a walk and the tensors that they read.

    `leafs_first`: leafs are allocated from the start, not from their first use.  So are, in any case, copies that are
    kept or have several copy slots, because an earlier compute has filled them.
    `inplace[arena * GS_N_OPS + op]` is a mask of the sources that may be reused in place.  `order` is NULL, or a parse
    sequence (GraphAllocator.set_parse_seq): positions in seq, and -1 for a barrier; memory is freed only at barriers.
    On failure *failed is the id without memory.  GS_OUT_OF_MEMORY is also the status if the walk ends early because no
    arena can improve any more (gs_arena.wanted).
    """
    cdef int32_t i, k, id, position, since = 0
    for i in range(f.p.n):
        if (f.p.op[i] == GS_OP_NONE and f.p.root[i] < 0 and f.p.arena_of[i] != OUTSIDE
                and (f.n_children[i] or f.n_views[i]) and (leafs_first or f.p.like[i] != i)
                and (f.p.like[i] == i or f.p.flags[i] & GS_FLAG_OUTPUT)):
            gallocr_require(f, arenas, inplace, i, 0, failed)
    for i in range(n_order if order != NULL else f.p.n_seq):
        if f.status != GS_OK:
            return f.status
        position = order[i] if order != NULL else i
        if position >= 0:
            id = f.p.seq[position]
            for k in range(f.p.src_begin[id], f.p.src_begin[id + 1]):
                if not f.p.state[f.p.src[k]] & GS_STATE_ADDRESSED:
                    gallocr_require(f, arenas, inplace, f.p.src[k], position, failed)
            if f.p.state[id] & GS_STATE_DEPENDS:
                for k in range(f.dep_begin[id], f.dep_begin[id + 1]):
                    gallocr_require(f, arenas, inplace, f.dep[k], position, failed)
            gallocr_require(f, arenas, inplace, id, position, failed)
            if order == NULL and f.status == GS_OK:
                gallocr_finish(f, arenas, id, position)
        else:
            while since < i:
                gallocr_finish(f, arenas, f.p.seq[order[since]], order[since])
                since += 1
            since = i + 1
    for i in range(f.n_owners):
        id = f.owner[i]
        if f.p.death[id] < 0:
            f.p.death[id] = f.p.n_seq
            f.stop[id] = arenas[f.p.arena_of[id]].section + arenas[f.p.arena_of[id]].waiting
    return f.status
