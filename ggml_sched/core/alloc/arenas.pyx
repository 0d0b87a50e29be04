# cython: language_level=3
"""The arenas of a graph in splits: lifetimes, in-place reuse and offsets, such that each arena is small.

Runs the walk (gallocr_run), which gives lifetimes, and then chooses offsets for them (choose_offsets).  A node that
reuses part of another tensor's memory in place needs no memory of its own, but the other part stays allocated longer,
or the memory is fragmented.  Where such reuse occurs, the walk is repeated with a higher and with a lower mode of reuse
(GS_REUSE_*), and each arena keeps the mode that makes it smallest.
Owns nothing: gs_allocation points to the data of one planning run.

Includes, before the code below:

    offsets      Offsets of each arena, chosen once all its lifetimes are known.
    walk_splits  The walk of a graph in splits.
"""

from libc.stdint cimport INT64_MAX, int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from ggml_sched._c cimport *
from ggml_sched.core.alloc.gallocr cimport (
    OUTSIDE, gallocr_run, groups_find_positions, gs_arena, gs_walk, plan_follow_owners, plan_mark_late, walk_alloc,
    walk_free, walk_from_graph,
)
from ggml_sched.core.pack.solve cimport *
from ggml_sched.core.plan.placement cimport gs_request, is_stored, request_size

include "offsets.pxi"
include "walk_splits.pxi"


ctypedef struct gs_reuse_trials:
    # The result of the first walk, moved here before the second walk; all arrays have an entry for each backend.
    gs_walk walk
    gs_arena *arenas
    gs_blocks *blocks
    int32_t *methods
    int64_t *best               # bytes of the arena's smallest result so far
    int32_t *reuse              # GS_REUSE_*: the mode that gave this result
    int32_t last                # GS_REUSE_* of the last trial if its walk was completed; else -1
    bint kept                   # the first walk's result has been moved to the fields above
    bint some_refused           # an arena could reuse more memory in mode GS_REUSE_ALL
    bint some_partial           # an arena may be smaller in mode GS_REUSE_WHOLE


cdef int64_t fill_chunks(const gs_plan *p, int32_t backend, const gs_blocks *blocks, int64_t *sizes) noexcept nogil:
    """Raise sizes[k], for each chunk k of the arena, to the bytes that the chunk needs; returns the sum of sizes."""
    cdef int64_t total = 0, at
    cdef int32_t i
    for i in range(p.n):
        if p.arena_of[i] == backend and p.birth[i] >= 0 and p.size[i]:
            at = p.offset[i] // blocks.stride
            sizes[at] = max(sizes[at], p.offset[i] % blocks.stride + p.size[i])
    for i in range(blocks.n_chunks):
        total += sizes[i]
    return total


cdef int64_t arena_bytes(const gs_plan *p, int32_t backend, const gs_blocks *blocks) noexcept nogil:
    """The bytes that all chunks of an arena need together; -1 if malloc fails."""
    cdef int64_t *sizes
    cdef int64_t total
    if blocks.n_chunks <= 1:
        return blocks.max_size
    sizes = <int64_t *>calloc(blocks.n_chunks, sizeof(int64_t))
    if sizes == NULL:
        return -1
    total = fill_chunks(p, backend, blocks, sizes)
    free(sizes)
    return total


cdef int allocation_init(gs_allocation *a, const gs_request *r) noexcept nogil:
    """Make an empty arena for each backend."""
    cdef int64_t n = max(r.p.n_backends, 1)
    cdef int32_t i
    memset(a, 0, sizeof(gs_allocation))
    a.r = r
    a.failed = -1
    a.arenas = <gs_arena *>calloc(n, sizeof(gs_arena))
    a.blocks = <gs_blocks *>calloc(n, sizeof(gs_blocks))
    a.methods = <int32_t *>calloc(n, sizeof(int32_t))
    if a.arenas == NULL or a.blocks == NULL or a.methods == NULL:
        return GS_NO_HOST_MEMORY
    for i in range(r.p.n_backends):
        a.blocks[i].chunk = r.p.backends[i].max_buffer
    return GS_OK


cdef void allocation_free(gs_allocation *a) noexcept nogil:
    cdef int32_t i
    for i in range(a.r.p.n_backends if a.blocks != NULL else 0):
        blocks_free(&a.blocks[i])
    free(a.blocks)
    free(a.arenas)
    free(a.methods)
    walk_free(&a.walk)


cdef int allocate(gs_allocation *a) noexcept nogil:
    """Find lifetimes, in-place reuse and offsets, with the mode of reuse that makes each arena smallest."""
    cdef int32_t i
    cdef int status
    for i in range(a.r.p.n_backends):
        a.arenas[i].reuse = min(a.r.p.policy.reuse, <int32_t>GS_REUSE_FRONT)
    status = allocate_once(a)
    if status == GS_OK and a.r.p.policy.reuse > GS_REUSE_WHOLE:
        status = try_reuse_modes(a)
    return status


cdef int allocate_once(gs_allocation *a) noexcept nogil:
    """Walk once, each arena with its mode of reuse, and choose offsets; replaces the result of an earlier walk."""
    cdef gs_arena *arena
    cdef gs_blocks *blocks
    cdef int32_t i, n = a.r.p.n_backends
    cdef int status
    cdef bint packed = a.r.p.policy.offsets == GS_OFFSETS_PACKED
    walk_free(&a.walk)
    status = walk_from_splits(&a.walk, a.r, a.plan, a.src, &a.failed)
    if status == GS_OK and a.groups != NULL:
        groups_find_positions(a.groups, a.walk.p.seq, a.walk.p.n_seq)
        a.walk.groups = a.groups
    for i in range(n):
        arena = &a.arenas[i]
        blocks = &a.blocks[i]
        arena.live = arena.peak = arena.whole = arena.whole_peak = 0
        arena.n_inner = arena.n_refused = arena.n_partial = arena.n_owners = arena.section = 0
        arena.waiting = False
        arena.alignment = a.r.p.backends[i].alignment
        arena.blocks = NULL
        blocks.max_size = blocks.n_chunks = 0
        if not packed or blocks.chunk:
            arena.blocks = blocks
            if status == GS_OK and blocks.chunk:
                status = blocks_reset_chunked(blocks, blocks.chunk, arena.alignment)
            elif status == GS_OK:
                status = blocks_reset(blocks, INT64_MAX)
    if status == GS_OK:
        status = gallocr_run(&a.walk, a.arenas, a.r.inplace, NULL, 0, a.r.p.policy.leafs_first, &a.failed)
    for i in range(n):
        a.arenas[i].live_bytes = a.arenas[i].peak
    if status == GS_OK and packed:
        status = choose_offsets(&a.walk, n, a.blocks, a.arenas, a.methods)
    return status


cdef int try_reuse_modes(gs_allocation *a) noexcept nogil:
    """Try other modes of in-place reuse, and keep for each arena the mode that makes it smallest.

    GS_REUSE_ALL is tried if a source was refused for its offset, GS_REUSE_WHOLE if a part of memory was reused.  The
    arenas do not depend on each other, so that one walk tries a mode for all of them.  On a tie the earlier mode stays:
    without reuse at an offset, fewer offsets change when a reserved plan is replayed.
    """
    cdef gs_reuse_trials w
    cdef int status = trials_init(&w, a)
    if status == GS_OK and w.some_refused:
        status = trials_run(&w, a, GS_REUSE_ALL)
    if status == GS_OK and w.some_partial:
        status = trials_run(&w, a, GS_REUSE_WHOLE)
    if status == GS_OK:
        status = trials_choose(&w, a)
    trials_free(&w)
    return status


cdef void trials_free(gs_reuse_trials *w) noexcept nogil:
    walk_free(&w.walk)
    free(w.best)


cdef int trials_init(gs_reuse_trials *w, gs_allocation *a) noexcept nogil:
    """Compute the bytes of each arena in the first result, and find out which other modes could make one smaller."""
    cdef int64_t n = max(a.r.p.n_backends, 1)
    cdef int32_t i
    memset(w, 0, sizeof(gs_reuse_trials))
    w.best = <int64_t *>malloc(n * (sizeof(int64_t) + sizeof(gs_arena) + sizeof(gs_blocks) + 2 * sizeof(int32_t)))
    if w.best == NULL:
        return GS_NO_HOST_MEMORY
    w.arenas = <gs_arena *>(w.best + n)
    w.blocks = <gs_blocks *>(w.arenas + n)
    w.methods = <int32_t *>(w.blocks + n)
    w.reuse = w.methods + n
    for i in range(a.r.p.n_backends):
        w.reuse[i] = a.arenas[i].reuse
        w.best[i] = arena_bytes(&a.walk.p, i, &a.blocks[i])
        if w.best[i] < 0:
            return GS_NO_HOST_MEMORY
        w.some_refused |= a.arenas[i].n_refused > 0 and a.r.p.policy.reuse == GS_REUSE_ALL
        w.some_partial |= may_shrink_whole(a, i, w.best[i])
    return GS_OK


cdef inline bint may_shrink_whole(const gs_allocation *a, int32_t i, int64_t size) noexcept nogil:
    """Whether the arena of backend i, of `size` bytes, could be smaller in mode GS_REUSE_WHOLE.

    It cannot if `size` is the arena's `peak`, the most bytes alive without freed tails: no mode needs fewer.
    """
    return a.arenas[i].n_partial > 0 and size != a.arenas[i].peak


cdef int trials_run(gs_reuse_trials *w, gs_allocation *a, int32_t mode) noexcept nogil:
    """Repeat the walk with another mode for all arenas; it ends early once no arena can improve on its best result."""
    cdef int32_t i, wanted = 0, n = a.r.p.n_backends
    cdef int64_t size
    cdef int status
    if not w.kept:
        w.walk = a.walk
        memset(&a.walk, 0, sizeof(gs_walk))
        memcpy(w.arenas, a.arenas, n * sizeof(gs_arena))
        memcpy(w.blocks, a.blocks, n * sizeof(gs_blocks))
        memcpy(w.methods, a.methods, n * sizeof(int32_t))
        w.kept = True
    for i in range(n):
        a.arenas[i].reuse = mode
        a.arenas[i].limit = w.best[i]
        # If no source was refused for its offset, GS_REUSE_ALL gives the same arena as the first walk.
        if w.best[i] > 0 and (mode != GS_REUSE_ALL or w.arenas[i].n_refused > 0):
            a.arenas[i].wanted = &wanted
            wanted += 1
    w.last = -1
    status = allocate_once(a)
    for i in range(n):
        a.arenas[i].wanted = NULL
    if status == GS_OUT_OF_MEMORY:
        a.failed = -1
        return GS_OK
    if status != GS_OK:
        return status
    w.last = mode
    for i in range(n):
        size = arena_bytes(&a.walk.p, i, &a.blocks[i])
        if size < 0:
            return GS_NO_HOST_MEMORY
        w.some_partial |= may_shrink_whole(a, i, size)
        if size < w.best[i]:
            w.best[i] = size
            w.reuse[i] = mode
    return GS_OK


cdef int trials_choose(gs_reuse_trials *w, gs_allocation *a) noexcept nogil:
    """Leave in `a` the best result of each arena; walk once more unless the first or the last walk has them all."""
    cdef int32_t i, n = a.r.p.n_backends
    cdef bint first = True, last = True
    if not w.kept:
        return GS_OK
    for i in range(n):
        first &= w.reuse[i] == w.arenas[i].reuse
        last &= w.reuse[i] == w.last
    if last:
        return GS_OK
    if not first:
        for i in range(n):
            a.arenas[i].reuse = w.reuse[i]
        return allocate_once(a)
    walk_free(&a.walk)
    a.walk = w.walk
    memset(&w.walk, 0, sizeof(gs_walk))
    memcpy(a.arenas, w.arenas, n * sizeof(gs_arena))
    memcpy(a.methods, w.methods, n * sizeof(int32_t))
    for i in range(n):
        # The lists of free blocks are not copied: nothing reads them, and a later walk may have reallocated them.
        a.blocks[i].max_size = w.blocks[i].max_size
        a.blocks[i].n_chunks = w.blocks[i].n_chunks
    return GS_OK
