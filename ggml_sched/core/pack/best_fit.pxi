# Packing by best fit, as an online allocator does it: in order of time, without knowing what comes later.
#
# ggml's first allocator (ggml_tallocr_alloc, ggml_tallocr_free_tensor) packs so.  The result is an upper bound:
# pack_prepared never returns a packing with a larger arena.
# Invariant: buffers born in one section are allocated by time of birth, then in the caller's order.

cdef int64_t pack_best_fit(gs_pack *p) noexcept nogil:
    """Allocate and free all buffers in order of time; returns the arena's bytes, or a negative status.

    pack_settle must have run.
    """
    cdef gs_blocks blocks
    cdef int32_t *dead = p.order            # buffers in order of death; p.order needs sorting again afterwards
    cdef int32_t *born = <int32_t *>p.keys  # buffers in order of birth; in the memory of the keys, which are used up
    cdef int32_t b, i, k, n_dead = 0
    cdef int64_t arena
    cdef int status
    for b in range(p.n):
        p.keys[b] = (<uint64_t>p.stop[b] << PACK_INDEX_BITS) | <uint64_t>b
    pack_sort_keys(p.keys, p.n, PACK_INDEX_BITS, 3)
    for b in range(p.n):
        dead[b] = <int32_t>(p.keys[b] & PACK_INDEX_MASK)
    for b in range(p.n):
        born[p.turn[b]] = b
    memset(&blocks, 0, sizeof(blocks))
    status = blocks_reset(&blocks, INT64_MAX)
    for k in range(p.n_sections):
        while status == GS_OK and p.stop[dead[n_dead]] <= k:
            b = dead[n_dead]
            n_dead += 1
            status = blocks_give(&blocks, p.offset[b], p.size[b])
        for i in range(p.born[k], p.born[k + 1]):
            if status == GS_OK:
                b = born[i]
                status = blocks_take(&blocks, p.size[b], &p.offset[b])
    arena = blocks.max_size if status == GS_OK else status
    blocks_free(&blocks)
    return arena
