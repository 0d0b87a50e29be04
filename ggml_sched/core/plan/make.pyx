# cython: language_level=3
"""Making plans: from gs_request to gs_plan, without Python objects and without the GIL.

gs_plan_make runs the passes one after the other: placement, splits and copies, lifetimes, offsets.  The plan owns the
arrays that result.

Includes, before the code below:

    needed  Which results of a range of nodes are read elsewhere.
    groups  Fusion groups: nodes that a backend computes as one kernel, at the position of the last of them.
    replay  Replay: a reserved plan for other graphs of the same wiring whose tensors are no larger.
"""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memmove, memset

from ggml_sched._c cimport *
from ggml_sched.core.alloc.arenas cimport (
    allocate, allocation_free, allocation_init, fill_chunks, gs_allocation, walk_from_splits,
)
from ggml_sched.core.alloc.gallocr cimport (
    compact_offsets, gs_groups, gs_walk, plan_mark_late, plan_owner, walk_can_replay, walk_free, walk_replay,
)
from ggml_sched.core.first_generation.seed cimport plan_seed
from ggml_sched.core.plan.placement cimport (
    N_PLAN_LISTS, gs_ints, gs_request, gs_splits, plan_default, request_supports, splits_free, splits_init,
    splits_lists,
)

include "needed.pxi"
include "groups.pxi"
include "replay.pxi"


cdef int gs_plan_make(const gs_request *r, gs_plan *p, gs_failure *failed) noexcept nogil:
    """Make the plan of request r in `p`, which is overwritten; after GS_OK the caller frees it with gs_plan_free.

    Errors: GS_UNSUPPORTED_OP, GS_BAD_PLACEMENT, GS_OUT_OF_MEMORY and GS_OVERFLOW, with what failed in *failed;
    GS_NO_HOST_MEMORY.
    """
    cdef gs_splits splits
    cdef gs_groups groups
    cdef gs_allocation a
    cdef int status
    memset(p, 0, sizeof(gs_plan))
    p.n_backends, p.n_tensors = r.p.n_backends, r.g.n_tensors
    memset(&groups, 0, sizeof(gs_groups))
    failed.tensor, failed.backend, failed.nbytes = -1, -1, 0
    status = allocation_init(&a, r)
    if splits_init(&splits, r.g) != GS_OK or plan_alloc_assign(p) != GS_OK:
        status = GS_NO_HOST_MEMORY
    if status == GS_OK:
        if r.p.policy.placement == GS_PLACEMENT_SEED:
            status = plan_seed(r, p.assign, p.reason, &splits, &a.failed)
        else:
            status = plan_default(r, p.assign, p.reason, &splits, &a.failed)
    if status == GS_OK:
        status = plan_take_splits(p, &splits)
    if status == GS_OK:
        status = groups_keep(&groups, r, p)
    if status == GS_OK:
        a.plan = p
        a.src = splits.src
        a.groups = &groups if groups.n else NULL
        status = allocate(&a)
    if status == GS_OK:
        plan_take_walk(p, &a.walk)
        status = plan_measure(p, &a)
    if status == GS_OK:
        groups_drop_late(&groups, p)
        if groups.n:
            status = plan_take_groups(p, r.g, groups.n, groups.begin, groups.member)
    if status != GS_OK:
        failed.tensor = plan_tensor(p, a.failed)
        if status == GS_OUT_OF_MEMORY and a.failed >= 0:
            plan_find_full(failed, &a)
        gs_plan_free(p)
    allocation_free(&a)
    splits_free(&splits)
    groups_free(&groups)
    return status


cdef int plan_alloc_assign(gs_plan *p) noexcept nogil:
    """Allocate the arrays of the placement."""
    cdef int64_t n = max(p.n_tensors, 1)
    p.assign = <int32_t *>calloc(n, sizeof(int32_t) + 1)
    if p.assign == NULL:
        return GS_NO_HOST_MEMORY
    p.reason = <unsigned char *>(p.assign + n)
    return GS_OK


cdef int64_t plan_split_ints(const gs_plan *p) noexcept nogil:
    """The number of elements of all arrays of splits, copies and write-backs."""
    return 4 * <int64_t>p.n_splits + p.n_inputs + 4 * <int64_t>p.n_copies + p.n_slots + 2 * <int64_t>p.n_write_backs


cdef int plan_alloc_splits(gs_plan *p) noexcept nogil:
    """Allocate the arrays of splits, copies and write-backs."""
    p.split_backend = <int32_t *>malloc(max(plan_split_ints(p), 1) * sizeof(int32_t))
    if p.split_backend == NULL:
        return GS_NO_HOST_MEMORY
    p.split_start = p.split_backend + p.n_splits
    p.split_stop = p.split_start + p.n_splits
    p.split_inputs = p.split_stop + p.n_splits
    p.inputs = p.split_inputs + p.n_splits
    p.copy_like = p.inputs + p.n_inputs
    p.copy_from = p.copy_like + p.n_copies
    p.copy_backend = p.copy_from + p.n_copies
    p.copy_kept = p.copy_backend + p.n_copies
    p.slot_copy = p.copy_kept + p.n_copies
    p.back_node = p.slot_copy + p.n_slots
    p.back_copy = p.back_node + p.n_write_backs
    return GS_OK


cdef int plan_alloc_arenas(gs_plan *p) noexcept nogil:
    """Allocate the sizes of arenas and chunks."""
    p.arena = <gs_arena_result *>calloc(1, max(p.n_backends, 1) * sizeof(gs_arena_result)
                                        + p.n_chunks * sizeof(int64_t))
    if p.arena == NULL:
        return GS_NO_HOST_MEMORY
    p.chunk_nbytes = <int64_t *>(p.arena + p.n_backends)
    return GS_OK


cdef int plan_alloc_groups(gs_plan *p, int32_t n_members) noexcept nogil:
    """Allocate the arrays of fusion groups."""
    p.group_begin = <int32_t *>malloc((<int64_t>n_members + p.n_groups + 1) * sizeof(int32_t))
    if p.group_begin == NULL:
        return GS_NO_HOST_MEMORY
    p.group_member = p.group_begin + p.n_groups + 1
    return GS_OK


cdef void gs_plan_free(gs_plan *p) noexcept nogil:
    """Free the arrays of a plan: each block begins with the array that one of the functions above, or plan_alloc_ids,
    has allocated."""
    free(p.assign)
    free(p.split_backend)
    free(p.size)
    free(p.arena)
    free(p.group_begin)
    memset(p, 0, sizeof(gs_plan))


cdef int plan_take_splits(gs_plan *p, gs_splits *w) noexcept nogil:
    """Copy splits, copies and write-backs into the plan, whose arrays lie in one block, in the same order."""
    cdef const gs_ints *lists = splits_lists(w)
    cdef int32_t *at
    cdef int32_t i
    p.n_splits, p.n_inputs = w.split_start.n, w.inputs.n
    p.n_copies, p.n_slots, p.n_write_backs = w.copy_like.n, w.slot_copy.n, w.back_node.n
    if plan_alloc_splits(p) != GS_OK:
        return GS_NO_HOST_MEMORY
    at = p.split_backend
    for i in range(N_PLAN_LISTS):
        if lists[i].n:
            memcpy(at, lists[i].at, lists[i].n * sizeof(int32_t))
        at += lists[i].n
    return GS_OK


cdef void plan_take_walk(gs_plan *p, gs_walk *f) noexcept nogil:
    """Move the walk's plan to p: its lifetimes and offsets, with the placement and splits that the walk began with."""
    p[0] = f.p
    f.p.size = NULL


cdef int plan_measure(gs_plan *p, const gs_allocation *a) noexcept nogil:
    """Set the sizes, live bytes and methods of the arenas and chunks."""
    cdef gs_arena_result *arena
    cdef int32_t i, at = 0
    for i in range(p.n_backends):
        p.n_chunks += max(a.blocks[i].n_chunks, 1)
    if plan_alloc_arenas(p) != GS_OK:
        return GS_NO_HOST_MEMORY
    for i in range(p.n_backends):
        arena = &p.arena[i]
        arena.live_bytes = a.arenas[i].live_bytes
        arena.method = a.methods[i]
        arena.first_chunk = at
        arena.n_chunks = max(a.blocks[i].n_chunks, 1)
        arena.stride = a.blocks[i].stride if arena.n_chunks > 1 else 0
        if arena.n_chunks == 1:
            p.chunk_nbytes[at] = arena.nbytes = a.blocks[i].max_size
        else:
            arena.nbytes = fill_chunks(p, i, &a.blocks[i], p.chunk_nbytes + at)
        at += arena.n_chunks
    return GS_OK


cdef void plan_find_full(gs_failure *failed, const gs_allocation *a) noexcept nogil:
    """Note the backend that has no memory for the id that failed, if a buffer of its own would be too small for it."""
    cdef int32_t b = a.walk.p.arena_of[a.failed]
    cdef int64_t size = a.walk.p.size[a.failed]
    if a.blocks[b].chunk and size > a.blocks[b].chunk:
        failed.backend, failed.nbytes = b, size


cdef int32_t plan_tensor(const gs_plan *p, int32_t id) noexcept nogil:
    """The graph tensor that `id` is, or whose copy it is; -1 for id -1."""
    if id < p.n_tensors:
        return id
    id -= p.n_tensors
    return p.copy_like[id if id < p.n_copies else p.slot_copy[id - p.n_copies]]


cdef void plan_mark_exclusive(gs_plan *p) noexcept nogil:
    """Set GS_STATE_EXCLUSIVE for leafs and copies whose memory no other tensor uses: their data survives computes.

    Also sets GS_STATE_WRITTEN.  Sets neither if that would take more than 50 million comparisons.
    """
    cdef int32_t i, k, r, count = 0
    for i in range(p.n):
        count += p.op[i] == GS_OP_NONE and p.birth[i] >= 0
    if <int64_t>count * p.n > 50_000_000:
        return
    for i in range(p.n):
        if p.op[i] != GS_OP_NONE or p.birth[i] < 0:
            continue
        for k in range(p.n):
            if k == i or p.birth[k] < 0 or p.arena_of[k] != p.arena_of[i]:
                continue
            if p.offset[k] < p.offset[i] + p.size[i] and p.offset[i] < p.offset[k] + p.size[k]:
                break
        else:
            p.state[i] |= GS_STATE_EXCLUSIVE
    # Memory that a node writes to, through a view or by in-place reuse, is not exclusive: its data does not survive.
    for i in range(p.n):
        if p.root[i] >= 0 and (p.state[i] & GS_STATE_INPLACE or p.op[i] > GS_OP_TRANSPOSE):
            p.state[plan_owner(p, i)] &= ~GS_STATE_EXCLUSIVE
            if not p.state[i] & GS_STATE_INPLACE:
                p.state[p.root[i]] |= GS_STATE_WRITTEN
    # A copy is not exclusive if a node writes to the memory of the copied tensor: the copy is then outdated after the
    # compute, or the node writes to the copy itself, which is written back.
    for i in range(p.n):
        if p.like[i] != i:
            k = p.like[i]
            r = p.root[k] if p.root[k] >= 0 and not p.state[k] & GS_STATE_INPLACE else k
            if p.state[r] & GS_STATE_WRITTEN:
                p.state[i] &= ~GS_STATE_EXCLUSIVE
