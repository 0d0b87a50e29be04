# cython: language_level=3
"""Making plans: from gs_request to gs_plan, without Python objects and without the GIL.

gs_plan_make runs the passes one after the other: placement, splits and copies, lifetimes, offsets.  The plan owns the
arrays that result.

Includes, before the code below:

    groups  Fusion groups: nodes that a backend computes as one kernel, at the position of the last of them.
    replay  Replay: a reserved plan for other graphs of the same wiring whose tensors are no larger.
"""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memmove, memset

from ggml_sched._c cimport *
from ggml_sched.core.alloc.arenas cimport (
    allocate,
    allocation_free,
    allocation_init,
    fill_chunks,
    gs_allocation,
    walk_from_splits,
)
from ggml_sched.core.alloc.gallocr cimport (
    compact_offsets,
    gs_arena,
    gs_groups,
    gs_walk,
    placing_copy,
    placing_replays,
    walk_compact,
    walk_free,
)
from ggml_sched.core.first_generation.seed cimport plan_seed
from ggml_sched.core.pack.passes cimport gs_blocks
from ggml_sched.core.plan.placement cimport (
    gs_ints,
    gs_splits,
    plan_default,
    request_supports,
    splits_free,
    splits_init,
    splits_tensor,
)

include "groups.pxi"
include "replay.pxi"


cdef int gs_plan_make(const gs_request *r, gs_plan *p) noexcept nogil:
    """Make the plan of request r in `p`, which is overwritten; after GS_OK the caller frees it with gs_plan_free.

    GS_UNSUPPORTED_OP, GS_BAD_PLACEMENT, GS_OUT_OF_MEMORY, GS_OVERFLOW with the id that failed in p.failed;
    GS_NO_HOST_MEMORY.
    """
    cdef gs_splits splits
    cdef gs_groups groups
    cdef gs_walk walk
    cdef gs_allocation a
    cdef int status
    memset(p, 0, sizeof(gs_plan))
    memset(&walk, 0, sizeof(gs_walk))
    memset(&groups, 0, sizeof(gs_groups))
    p.failed = -1
    status = allocation_init(&a, r)
    if splits_init(&splits, r.g) != GS_OK or plan_begin(p, r) != GS_OK:
        status = GS_NO_HOST_MEMORY
    if status == GS_OK:
        status = decide(r, p.assign, p.reason, &splits, &a.failed)
    if status == GS_OK:
        status = groups_keep(&groups, r, &splits)
    if status == GS_OK:
        a.assign = p.assign
        a.splits = &splits
        a.groups = &groups if groups.n else NULL
        a.walk = &walk
        status = allocate(&a)
    if status == GS_OK:
        status = plan_take(p, &splits, &walk, count_chunks(a.blocks, r.n_backends))
    if status == GS_OK:
        plan_measure(p, a.arenas, a.blocks, a.methods)
        groups_drop_late(&groups, p)
        if groups.n:
            status = plan_take_groups(p, r.g, &groups)
    if status != GS_OK:
        gs_plan_free(p)
        p.failed = splits_tensor(&splits, r.g, a.failed)
    allocation_free(&a)
    splits_free(&splits)
    groups_free(&groups)
    walk_free(&walk)
    return status


cdef int decide(const gs_request *r, int32_t *assign, unsigned char *reason, gs_splits *splits,
                int32_t *failed) noexcept nogil:
    """Choose placement, splits and copies, by the policy's placement."""
    if r.policy.placement == GS_PLACEMENT_SEED:
        return plan_seed(r, assign, reason, splits, failed)
    return plan_default(r, assign, reason, splits, failed)


cdef int plan_begin(gs_plan *p, const gs_request *r) noexcept nogil:
    """Allocate the arrays of the placement."""
    cdef int64_t n = max(r.g.n_tensors, 1)
    p.n_backends = r.n_backends
    p.n_tensors = r.g.n_tensors
    p.memory[0] = calloc(n, sizeof(int32_t) + 1)
    if p.memory[0] == NULL:
        return GS_NO_HOST_MEMORY
    p.assign = <int32_t *>p.memory[0]
    p.reason = <unsigned char *>(p.assign + n)
    return GS_OK


cdef int32_t *plan_put(int32_t **cursor, const gs_ints *v) noexcept nogil:
    """Copy an array to the cursor, and advance the cursor; returns the copy."""
    cdef int32_t *at = cursor[0]
    if v.n:
        memcpy(at, v.at, v.n * sizeof(int32_t))
    cursor[0] = at + v.n
    return at


cdef int32_t count_chunks(const gs_blocks *blocks, int32_t n_backends) noexcept nogil:
    """The number of buffers of all arenas."""
    cdef int32_t i, n = 0
    for i in range(n_backends):
        n += max(blocks[i].n_chunks, 1)
    return n


cdef int plan_take(gs_plan *p, const gs_splits *w, gs_walk *f, int32_t n_chunks) noexcept nogil:
    """Copy splits and copies into the plan, move the walk's memory to it, and allocate arena and chunk sizes."""
    cdef int32_t *cursor
    p.memory[1] = malloc(p.n_backends * sizeof(gs_arena_result) + n_chunks * sizeof(int64_t) + sizeof(int32_t) * (
        4 * <int64_t>w.split_start.n + w.inputs.n + 4 * <int64_t>w.copy_like.n + w.place_copy.n + 2 * <int64_t>w.back_node.n))
    if p.memory[1] == NULL:
        return GS_NO_HOST_MEMORY
    p.arena = <gs_arena_result *>p.memory[1]
    p.chunk_nbytes = <int64_t *>(p.arena + p.n_backends)
    cursor = <int32_t *>(p.chunk_nbytes + n_chunks)
    p.n_splits, p.n_inputs = w.split_start.n, w.inputs.n
    p.n_copies, p.n_places, p.n_write_backs = w.copy_like.n, w.place_copy.n, w.back_node.n
    p.split_backend = plan_put(&cursor, &w.split_backend)
    p.split_start = plan_put(&cursor, &w.split_start)
    p.split_stop = plan_put(&cursor, &w.split_stop)
    p.split_inputs = plan_put(&cursor, &w.split_inputs)
    p.inputs = plan_put(&cursor, &w.inputs)
    p.copy_like = plan_put(&cursor, &w.copy_like)
    p.copy_from = plan_put(&cursor, &w.copy_from)
    p.copy_backend = plan_put(&cursor, &w.copy_backend)
    p.copy_kept = plan_put(&cursor, &w.copy_kept)
    p.place_copy = plan_put(&cursor, &w.place_copy)
    p.back_node = plan_put(&cursor, &w.back_node)
    p.back_copy = plan_put(&cursor, &w.back_copy)
    p.n_chunks = n_chunks
    plan_take_walk(p, f)
    return GS_OK


cdef void plan_take_walk(gs_plan *p, gs_walk *f) noexcept nogil:
    """Move lifetimes and offsets, with the block that holds them, from the walk to the plan."""
    p.memory[2] = f.memory
    f.memory = NULL
    p.n, p.n_seq = f.n, f.n_seq
    p.like, p.home, p.root = f.like, f.home, f.root
    p.birth, p.death, p.trimmed = f.birth, f.death, f.trimmed
    p.src_begin, p.src, p.seq = f.src_begin, f.src, f.seq
    p.size, p.view_offs, p.offset, p.rest = f.size, f.view_offs, f.offset, f.rest
    p.op, p.flags, p.state = f.op, f.flags, f.state


cdef void plan_measure(gs_plan *p, const gs_arena *arenas, const gs_blocks *blocks, const int32_t *methods) noexcept nogil:
    """Set the sizes, live bytes and methods of the arenas and chunks."""
    cdef gs_walk f
    cdef gs_arena_result *arena
    cdef int32_t i, at = 0
    walk_of_plan(&f, p)
    for i in range(p.n_backends):
        arena = &p.arena[i]
        arena.live_bytes = arenas[i].live_bytes
        arena.method = methods[i]
        arena.first_chunk = at
        arena.n_chunks = max(blocks[i].n_chunks, 1)
        arena.stride = blocks[i].stride if arena.n_chunks > 1 else 0
        if arena.n_chunks == 1:
            p.chunk_nbytes[at] = arena.nbytes = blocks[i].max_size
        else:
            memset(p.chunk_nbytes + at, 0, arena.n_chunks * sizeof(int64_t))
            arena.nbytes = fill_chunks(&f, i, &blocks[i], p.chunk_nbytes + at)
        at += arena.n_chunks


cdef void walk_of_plan(gs_walk *f, const gs_plan *p) noexcept nogil:
    """A walk with the arrays of a finished plan, borrowed; without the arrays that only an allocation pass needs."""
    memset(f, 0, sizeof(gs_walk))
    f.n, f.n_seq = p.n, p.n_seq
    f.like, f.home, f.root = p.like, p.home, p.root
    f.birth, f.death, f.trimmed = p.birth, p.death, p.trimmed
    f.src_begin, f.src, f.seq = p.src_begin, p.src, p.seq
    f.size, f.view_offs, f.offset, f.rest = p.size, p.view_offs, p.offset, p.rest
    f.op, f.flags, f.state = p.op, p.flags, p.state


cdef void gs_plan_free(gs_plan *p) noexcept nogil:
    cdef int32_t i
    for i in range(4):
        free(p.memory[i])
    memset(p, 0, sizeof(gs_plan))


cdef void plan_mark_exclusive(gs_plan *f) noexcept nogil:
    """Mark leafs and copies whose memory no other tensor uses, so that their data survives from compute to compute.

    Marks none if that would take too long.
    """
    cdef int32_t i, k, r, count = 0
    for i in range(f.n):
        count += f.op[i] == GS_OP_NONE and f.birth[i] >= 0
    if <int64_t>count * f.n > 50_000_000:
        return
    for i in range(f.n):
        if f.op[i] != GS_OP_NONE or f.birth[i] < 0:
            continue
        for k in range(f.n):
            if k == i or f.birth[k] < 0 or f.home[k] != f.home[i]:
                continue
            if f.offset[k] < f.offset[i] + f.size[i] and f.offset[i] < f.offset[k] + f.size[k]:
                break
        else:
            f.state[i] |= GS_STATE_EXCLUSIVE
    # Memory that a node writes to, through a view or by in-place reuse, is not exclusive.
    for i in range(f.n):
        if f.root[i] >= 0 and (f.state[i] & GS_STATE_TOOK_OVER or f.op[i] > GS_OP_TRANSPOSE):
            r = f.root[i]
            while f.root[r] >= 0:
                r = f.root[r]
            f.state[r] &= ~GS_STATE_EXCLUSIVE
            if not f.state[i] & GS_STATE_TOOK_OVER:
                f.state[f.root[i]] |= GS_STATE_WRITTEN
    # A copy of memory that nodes write to is valid for one compute only; and a node that writes to another backend's
    # memory through a copy writes to that copy.
    for i in range(f.n):
        if f.like[i] != i:
            k = f.like[i]
            r = f.root[k] if f.root[k] >= 0 and not f.state[k] & GS_STATE_TOOK_OVER else k
            if f.state[r] & GS_STATE_WRITTEN:
                f.state[i] &= ~GS_STATE_EXCLUSIVE
