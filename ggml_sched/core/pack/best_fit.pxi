# Packing, part 4: what an online allocator would do.
#
# Owns pack_best_fit, the floor under everything else here: no packing is returned that is worse than it.
# Invariant: free blocks lie in order of offset, none touches another, and the last has no end.
# Corresponds to ggml_tallocr_alloc and ggml_tallocr_free_tensor over the whole sequence.

cdef int64_t pack_best_fit(gs_pack *p) noexcept nogil:
    """ggml's tallocr over the whole sequence: the smallest free block that fits, the later one on a tie, the
    last block only when no other fits.  The arena, or GS_NO_HOST_MEMORY (negative)."""
    cdef gs_block *blocks = <gs_block *>malloc((<int64_t>p.n + 2) * sizeof(gs_block))
    cdef int32_t *dead = p.order            # buffers by death
    cdef int64_t arena = 0
    cdef int64_t best
    cdef int32_t n_blocks = 1
    cdef int32_t k, b, i, at
    cdef int32_t n_dead = 0
    if blocks == NULL:
        return GS_NO_HOST_MEMORY
    for b in range(p.n):
        p.keys[b] = (<uint64_t>p.stop[b] << PACK_INDEX_BITS) | <uint64_t>b
    pack_sort_keys(p.keys, p.n, PACK_INDEX_BITS, 3)
    for b in range(p.n):
        dead[b] = <int32_t>(p.keys[b] & PACK_INDEX_MASK)
    blocks[0].offset = 0
    blocks[0].size = PACK_FAR
    for k in range(p.n_sections):
        while n_dead < p.n and p.stop[dead[n_dead]] <= k:
            b = dead[n_dead]
            n_dead += 1
            n_blocks = pack_give_back(blocks, n_blocks, p.offset[b], p.size[b])
        for b in range(p.born[k], p.born[k + 1]):
            at = n_blocks - 1
            best = PACK_FAR
            for i in range(n_blocks - 1):
                if p.size[b] <= blocks[i].size <= best:
                    at = i
                    best = blocks[i].size
            p.offset[b] = blocks[at].offset
            blocks[at].offset += p.size[b]
            blocks[at].size -= p.size[b]
            arena = max(arena, blocks[at].offset)
            if blocks[at].size == 0:
                n_blocks -= 1
                memmove(blocks + at, blocks + at + 1, (n_blocks - at) * sizeof(gs_block))
    free(blocks)
    return arena


cdef int32_t pack_give_back(gs_block *blocks, int32_t n, int64_t offset, int64_t size) noexcept nogil:
    """Return a range to the free blocks, joined with those it touches; the new number of blocks."""
    cdef int32_t low = 0
    cdef int32_t high = n
    cdef int32_t mid
    while low < high:
        mid = (low + high) // 2
        if blocks[mid].offset < offset:
            low = mid + 1
        else:
            high = mid
    # The last block reaches to the end of the address space, so `low` always exists.
    if blocks[low].offset == offset + size:
        blocks[low].offset = offset
        blocks[low].size += size
        if low > 0 and blocks[low - 1].offset + blocks[low - 1].size == offset:
            blocks[low - 1].size += blocks[low].size
            memmove(blocks + low, blocks + low + 1, (n - low - 1) * sizeof(gs_block))
            return n - 1
        return n
    if low > 0 and blocks[low - 1].offset + blocks[low - 1].size == offset:
        blocks[low - 1].size += size
        return n
    memmove(blocks + low + 1, blocks + low, (n - low) * sizeof(gs_block))
    blocks[low].offset = offset
    blocks[low].size = size
    return n + 1
