# Free blocks: the free ranges of one arena, and best fit among them as in ggml's first generation.
#
# A gs_blocks owns its array `at`, which grows without limit.  Used by allocators that choose addresses one by one, and
# by pack_best_fit.  Invariant: blocks are in address order, disjoint and not empty, and no two are adjacent, since
# adjacent ones are merged.  Corresponds to free_blocks in ggml_tallocr.

cdef int blocks_reset(gs_blocks *b, int64_t size) noexcept nogil:
    """Make [0, size) the only free block; max_size does not change."""
    if b.room == 0:
        b.at = <gs_block *>malloc(16 * sizeof(gs_block))
        if b.at == NULL:
            return GS_NO_HOST_MEMORY
        b.room = 16
    b.n = 0
    if size > 0:
        b.at[0].offset = 0
        b.at[0].size = size
        b.n = 1
    return GS_OK


cdef void blocks_free(gs_blocks *b) noexcept nogil:
    free(b.at)
    memset(b, 0, sizeof(gs_blocks))


cdef int blocks_copy(gs_blocks *to, const gs_blocks *b) noexcept nogil:
    """Make `to` a copy of b, with memory of its own."""
    to[0] = b[0]
    to.at = <gs_block *>malloc(max(b.room, 1) * sizeof(gs_block))
    if to.at == NULL:
        memset(to, 0, sizeof(gs_blocks))
        return GS_NO_HOST_MEMORY
    memcpy(to.at, b.at, b.n * sizeof(gs_block))
    return GS_OK


cdef int64_t blocks_largest(const gs_blocks *b) noexcept nogil:
    cdef int64_t best = 0
    cdef int32_t i
    for i in range(b.n):
        best = max(best, b.at[i].size)
    return best


cdef int blocks_reset_chunked(gs_blocks *b, int64_t chunk, int64_t alignment) noexcept nogil:
    """Begin an arena of chunks of `chunk` bytes each, rounded down to the alignment; only the first one exists yet."""
    b.chunk = chunk - chunk % alignment
    b.stride = b.chunk + alignment
    b.n_chunks = 1
    return blocks_reset(b, b.chunk)


cdef int blocks_open_chunk(gs_blocks *b, int64_t size) noexcept nogil:
    """Add a chunk as the last free block; GS_OUT_OF_MEMORY if the arena has no chunks or `size` exceeds a chunk."""
    cdef int64_t offset, end
    cdef int status
    # Every offset within the new chunk, and its end, must fit in an int64.
    if (size > b.chunk or gs_checked_mul(b.n_chunks, b.stride, &offset) != GS_OK
            or gs_checked_add(offset, b.stride, &end) != GS_OK):
        return GS_OUT_OF_MEMORY
    status = blocks_give(b, offset, b.chunk)
    b.n_chunks += 1
    return status


cdef int blocks_take(gs_blocks *b, int64_t size, int64_t *offset) noexcept nogil:
    """Take `size` bytes, a multiple of the alignment, from the front of a free block, and return their offset.

    As in ggml, this is the smallest block that fits, on a tie the later one, but the last block, which is all memory
    after the others, only if no other fits.  Nothing is taken for size 0.
    """
    cdef int32_t i, found = -1
    cdef int status
    cdef int64_t best = INT64_MAX
    if b.n == 0:
        if size == 0:
            offset[0] = 0
            return GS_OK
        status = blocks_open_chunk(b, size)
        if status != GS_OK:
            return status
    for i in range(b.n - 1):
        if size <= b.at[i].size <= best:
            found = i
            best = b.at[i].size
    if found < 0:
        found = b.n - 1
        if b.at[found].size < size:
            status = blocks_open_chunk(b, size)
            if status != GS_OK:
                return status
            found = b.n - 1
    offset[0] = b.at[found].offset
    b.at[found].offset += size
    b.at[found].size -= size
    if b.at[found].size == 0:
        b.n -= 1
        memmove(b.at + found, b.at + found + 1, (b.n - found) * sizeof(gs_block))
    b.max_size = max(b.max_size, offset[0] + size)
    return GS_OK


cdef int blocks_give(gs_blocks *b, int64_t offset, int64_t size) noexcept nogil:
    """Make a range free, merging it with adjacent free blocks."""
    cdef int32_t low = 0
    cdef int32_t high = b.n
    cdef int32_t mid
    cdef gs_block *grown
    if size == 0:
        return GS_OK
    # Find the first block after the range: `low`.
    while low < high:
        mid = (low + high) // 2
        if b.at[mid].offset < offset:
            low = mid + 1
        else:
            high = mid
    if low < b.n and b.at[low].offset == offset + size:
        b.at[low].offset = offset
        b.at[low].size += size
        if low > 0 and b.at[low - 1].offset + b.at[low - 1].size == offset:
            b.at[low - 1].size += b.at[low].size
            b.n -= 1
            memmove(b.at + low, b.at + low + 1, (b.n - low) * sizeof(gs_block))
        return GS_OK
    if low > 0 and b.at[low - 1].offset + b.at[low - 1].size == offset:
        b.at[low - 1].size += size
        return GS_OK
    if b.n == b.room:
        grown = <gs_block *>realloc(b.at, 2 * b.room * sizeof(gs_block))
        if grown == NULL:
            return GS_NO_HOST_MEMORY
        b.at = grown
        b.room *= 2
    memmove(b.at + low + 1, b.at + low, (b.n - low) * sizeof(gs_block))
    b.at[low].offset = offset
    b.at[low].size = size
    b.n += 1
    return GS_OK


cdef int blocks_cut(gs_blocks *b, int64_t offset, int64_t size) noexcept nogil:
    """Take exactly the range [offset, offset + size), which must be free; GS_OUT_OF_MEMORY if it is not."""
    cdef int32_t i
    cdef int64_t end
    if size == 0:
        return GS_OK
    for i in range(b.n):
        if b.at[i].offset <= offset and offset + size <= b.at[i].offset + b.at[i].size:
            end = b.at[i].offset + b.at[i].size
            b.at[i].size = offset - b.at[i].offset
            if b.at[i].size == 0:
                b.n -= 1
                memmove(b.at + i, b.at + i + 1, (b.n - i) * sizeof(gs_block))
            return blocks_give(b, offset + size, end - offset - size)
    return GS_OUT_OF_MEMORY
