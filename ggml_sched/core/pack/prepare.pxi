# Preparing a problem: converting lifetimes to sections.
#
# A gs_pack has the buffers that take space, numbered in order of birth, and the sections of their lifetimes.  A section
# is the moment between consecutive births and the next death; its buffers are a maximal clique.  Any two buffers that
# are alive at the same time are both alive in some section, and the most live bytes of any section are the lower bound
# of the arena.
# Invariants: 0 <= start < stop <= n_sections; start is ascending; the sum of all sizes fits in int64, so that no sum of
# sizes overflows.  Time is linear in buffers and times.  ggml has no counterpart, because it allocates online.
#
# The buffers that overlap buffer i in time are those in carry[start[i]] (born in an earlier section, alive when i is
# born), and born[start[i]] .. born[stop[i]] (which include i).  So overlaps are a short list and a range, not pairs.

cdef inline char *pack_take(char **cursor, int64_t count, int64_t width) noexcept nogil:
    """Take the next `count` items of `width` bytes from a larger allocation; advances *cursor to a multiple of 8."""
    cdef char *start = cursor[0]
    cursor[0] = start + ((count * width + 7) & ~<int64_t>7)
    return start


cdef inline int pack_bits(uint64_t x) noexcept nogil:
    """Bits needed to write x."""
    cdef int bits = 0
    while x:
        x >>= 1
        bits += 1
    return bits


cdef void pack_free(gs_pack *p) noexcept nogil:
    free(p.memory)
    free(p.carry_memory)
    memset(p, 0, sizeof(gs_pack))


cdef int pack_expect(gs_pack *p, int64_t n, int64_t n_sections, int64_t n_scratch, char **scratch) noexcept nogil:
    """Allocate p for n buffers over at most n_sections sections, and *scratch: n_scratch more bytes for the caller."""
    cdef char *cursor
    cdef int64_t bytes = n * (7 * 4 + 4 * 8 + 2 * 8) + 8 + (n_sections + 1) * (4 + 8) + n_scratch
    memset(p, 0, sizeof(gs_pack))
    if n > PACK_MAX:
        return GS_BAD_ARGUMENT
    p.memory = malloc(bytes + 16 * 8)       # 16 * 8: the rounding of each array to 8 bytes
    if p.memory == NULL:
        return GS_NO_HOST_MEMORY
    cursor = <char *>p.memory
    p.n = <int32_t>n
    p.size = <int64_t *>pack_take(&cursor, n, 8)
    p.offset = <int64_t *>pack_take(&cursor, n, 8)
    p.best = <int64_t *>pack_take(&cursor, n, 8)
    p.peak = <int64_t *>pack_take(&cursor, n, 8)
    p.keys = <uint64_t *>pack_take(&cursor, 2 * n + 1, 8)
    p.id = <int32_t *>pack_take(&cursor, n, 4)
    p.start = <int32_t *>pack_take(&cursor, n, 4)
    p.stop = <int32_t *>pack_take(&cursor, n, 4)
    p.birth = <int32_t *>pack_take(&cursor, n, 4)
    p.life = <int32_t *>pack_take(&cursor, n, 4)
    p.order = <int32_t *>pack_take(&cursor, n, 4)
    p.turn = <int32_t *>pack_take(&cursor, n, 4)
    p.live = <int64_t *>pack_take(&cursor, n_sections + 1, 8)
    p.born = <int32_t *>pack_take(&cursor, n_sections + 1, 4)
    scratch[0] = cursor
    return GS_OK


cdef int pack_prepare(gs_pack *p, int32_t n, int32_t n_times, const int32_t *lower, const int32_t *upper,
                      const int64_t *size) noexcept nogil:
    """Fill p from n buffers, each with a lifetime [lower, upper) within the times 0 .. n_times, and a size in bytes.

    GS_BAD_ARGUMENT: more than 2**24 buffers, a lifetime that ends before it begins or leaves the times, or a
    negative size.  GS_OVERFLOW: the sizes add up to more than int64.  GS_NO_HOST_MEMORY.
    """
    cdef int64_t n_used = 0
    cdef int64_t times = <int64_t>n_times + 1
    cdef int32_t i
    cdef int status
    cdef char *cursor
    cdef int32_t *first
    cdef int32_t *section_of
    cdef char *dies
    for i in range(n):
        if size[i] < 0 or lower[i] < 0 or lower[i] > upper[i] or upper[i] > n_times:
            memset(p, 0, sizeof(gs_pack))
            return GS_BAD_ARGUMENT
        n_used += size[i] > 0 and lower[i] < upper[i]
    # There are no more sections than births, and no more than times.
    status = pack_expect(p, n_used, min(n_used, times), times * (4 + 4 + 1) + 3 * 8, &cursor)
    if status != GS_OK:
        return status
    first = <int32_t *>pack_take(&cursor, times, 4)
    section_of = <int32_t *>pack_take(&cursor, times, 4)
    dies = pack_take(&cursor, times, 1)
    memset(first, 0, times * 4)
    memset(dies, 0, times)
    for i in range(n):
        if size[i] > 0 and lower[i] < upper[i]:
            first[lower[i]] += 1
            dies[upper[i]] = 1
    p.n_sections = pack_find_sections(n_times, first, section_of, dies)
    pack_sort_by_birth(p, n, lower, upper, size, first, section_of)
    return pack_measure(p)


cdef int32_t pack_find_sections(int32_t n_times, int32_t *first, int32_t *section_of, const char *dies) noexcept nogil:
    """Fill section_of: the section of each time.  Returns the number of sections.

    first: for each time, how many buffers are born then; on return, how many are born before then.
    dies: for each time, whether a buffer dies then.
    """
    cdef int32_t n_born = 0
    cdef int32_t k = 0
    cdef int32_t t, births
    cdef bint waiting = False           # a buffer was born since the current section began
    for t in range(n_times):
        section_of[t] = k
        births = first[t]
        first[t] = n_born
        n_born += births
        waiting |= births != 0
        if waiting and dies[t + 1]:
            k += 1
            waiting = False
    section_of[n_times] = k
    return k


cdef void pack_sort_by_birth(gs_pack *p, int32_t n, const int32_t *lower, const int32_t *upper,
                             const int64_t *size, int32_t *first, const int32_t *section_of) noexcept nogil:
    """Copy the buffers into p by time of birth, then by the caller's index (counting sort); advances `first`."""
    cdef int32_t i, b
    for i in range(n):
        if size[i] > 0 and lower[i] < upper[i]:
            b = first[lower[i]]
            first[lower[i]] = b + 1
            p.id[b] = i
            p.size[b] = size[i]
            p.start[b] = section_of[lower[i]]
            p.stop[b] = section_of[upper[i]]
            p.birth[b] = lower[i]
            p.life[b] = upper[i] - lower[i]


cdef int pack_measure(gs_pack *p) noexcept nogil:
    """Fill what follows from size, start and stop of the buffers, which are in order of birth: the bytes alive in each
    section (live) and their maximum (bound), the first buffer born in each section (born), and how many entries `carry`
    will need (n_carried).

    GS_OVERFLOW: the sizes add up to more than int64.
    """
    cdef int64_t total = 0
    cdef int32_t b, k = 0
    memset(p.live, 0, (p.n_sections + 1) * sizeof(int64_t))
    for b in range(p.n):
        if gs_checked_add(total, p.size[b], &total) != GS_OK:
            return GS_OVERFLOW
        p.live[p.start[b]] += p.size[b]
        p.live[p.stop[b]] -= p.size[b]
        p.n_carried += p.stop[b] - p.start[b] - 1
        while k <= p.start[b]:
            p.born[k] = b
            k += 1
    p.born[p.n_sections] = p.n
    total = 0
    for k in range(p.n_sections):
        total += p.live[k]
        p.live[k] = total
        p.bound = max(p.bound, total)
    return GS_OK


ctypedef fused pack_number:
    int32_t
    int64_t


cdef inline bint pack_comes_before(const gs_pack *p, int32_t a, int32_t b) noexcept nogil:
    """Whether buffer a comes before b, of the same section of birth; this does not depend on the caller's indices."""
    if p.stop[a] != p.stop[b]:
        return p.stop[a] > p.stop[b]
    if p.size[a] != p.size[b]:
        return p.size[a] > p.size[b]
    if p.life[a] != p.life[b]:
        return p.life[a] > p.life[b]
    return p.birth[a] < p.birth[b]


cdef void pack_settle(gs_pack *p) noexcept nogil:
    """Sort the buffers born in each section, so that the caller's order does not affect the packing; fill p.turn."""
    cdef int32_t *order = p.order
    cdef int32_t k, i, j, jump, b, first, n
    for i in range(p.n):
        order[i] = i
    for k in range(p.n_sections):
        first = p.born[k]
        n = p.born[k + 1] - first
        jump = 1
        while jump < n // 9:
            jump = 3 * jump + 1
        while jump > 0 and n > 1:
            for i in range(first + jump, first + n):
                b = order[i]
                j = i
                while j >= first + jump and pack_comes_before(p, b, order[j - jump]):
                    order[j] = order[j - jump]
                    j -= jump
                order[j] = b
            jump //= 3
    pack_permute(p.size, order, p.n, p.keys)
    pack_permute(p.id, order, p.n, p.keys)
    pack_permute(p.stop, order, p.n, p.keys)
    pack_permute(p.birth, order, p.n, p.keys)
    pack_permute(p.life, order, p.n, p.keys)
    # p.start needs no permuting: buffers move only among those born in the same section.
    memcpy(p.turn, order, p.n * sizeof(int32_t))


cdef void pack_permute(pack_number *at, const int32_t *order, int32_t n, void *scratch) noexcept nogil:
    """Move the number at order[i] to i, for each i."""
    cdef pack_number *old = <pack_number *>scratch
    cdef int32_t i
    memcpy(old, at, n * sizeof(pack_number))
    for i in range(n):
        at[i] = old[order[i]]


cdef void pack_find_peaks(gs_pack *p) noexcept nogil:
    """Fill p.peak: the live bytes of each buffer's fullest section."""
    cdef int64_t *block = <int64_t *>p.keys     # scratch: the most live bytes in each 32 sections, which saves look-ups
    cdef int64_t peak
    cdef int32_t b, k, stop
    for k in range(p.n_sections):
        if k & 31 == 0 or p.live[k] > block[k >> 5]:
            block[k >> 5] = p.live[k]
    for b in range(p.n):
        k, stop = p.start[b], p.stop[b]
        peak = 0
        while k < stop:
            if k & 31 == 0 and stop - k >= 32:
                peak = max(peak, block[k >> 5])
                k += 32
            else:
                peak = max(peak, p.live[k])
                k += 1
        p.peak[b] = peak


cdef int pack_fill_carry(gs_pack *p, int64_t limit) noexcept nogil:
    """Fill p.carry: for each section, the buffers alive in it that were born in an earlier one.

    GS_OUT_OF_MEMORY when the lists would have more than `limit` entries; p.carry stays NULL then.
    """
    cdef int32_t b, k
    cdef int32_t *cursor
    cdef int64_t total = 0
    cdef int32_t here
    if p.n_carried > limit:
        return GS_OUT_OF_MEMORY
    p.carry_memory = malloc((p.n_carried + 2 * (<int64_t>p.n_sections + 2)) * sizeof(int32_t))
    if p.carry_memory == NULL:
        return GS_NO_HOST_MEMORY
    p.carry_begin = <int32_t *>p.carry_memory
    cursor = p.carry_begin + p.n_sections + 1
    p.carry = cursor + p.n_sections + 1
    memset(cursor, 0, (p.n_sections + 1) * sizeof(int32_t))
    for b in range(p.n):
        if p.stop[b] - p.start[b] > 1:
            cursor[p.start[b] + 1] += 1
            cursor[p.stop[b]] -= 1
    here = 0
    for k in range(p.n_sections):
        here += cursor[k]               # buffers carried into k
        p.carry_begin[k] = <int32_t>total
        cursor[k] = <int32_t>total
        total += here
        p.n_neighbours += <int64_t>here * (p.born[k + 1] - p.born[k])
    p.carry_begin[p.n_sections] = <int32_t>total
    for b in range(p.n):
        p.n_neighbours += p.born[p.stop[b]] - p.born[p.start[b]]
        for k in range(p.start[b] + 1, p.stop[b]):
            p.carry[cursor[k]] = b
            cursor[k] += 1
    return GS_OK
