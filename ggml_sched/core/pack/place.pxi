# Packing in one pass over the buffers, each into the lowest gap that it fits.
#
# Owns the orders (pack_sort) and two ways to place buffers in an order, with equal results: pack_place_near looks only
# at the buffers that overlap in time, from the carry lists; pack_place_far walks all placed buffers in order of offset,
# for problems that are too large for such lists, or have too many overlaps.
# Invariant: placed buffers that overlap in time never overlap in memory; ties fall to the earlier birth, so that
# the result is the same on every machine (no floats decide, except exactly rounded ones).

cdef enum:
    PACK_BLOCK = 128            # the most placed buffers in one gs_pack_block

ctypedef struct gs_pack_spot:   # a placed buffer, as pack_place_far sees it
    int64_t bottom              # the buffer has bytes [bottom, top) of the arena
    int64_t top
    int32_t start               # and sections [start, stop) of time (prepare.pxi)
    int32_t stop

ctypedef struct gs_pack_block:  # some spots in order of bottom, as an element of a linked list
    int32_t count
    int32_t start               # [start, stop): sections that contain the lifetimes of all spots of the block
    int32_t stop
    int32_t next                # index of the block with the next higher bottoms, -1 at the end
    gs_pack_spot spots[PACK_BLOCK]


cdef inline uint64_t pack_scale(double x) noexcept nogil:
    """x >= 1 as a 16-bit integer in the same order: 7 bits of exponent, 9 of mantissa; above 16 bits from 2**128 on."""
    cdef uint64_t word
    memcpy(&word, &x, sizeof(word))
    return (word >> 43) - (<uint64_t>1023 << 9)


cdef void pack_sort_keys(uint64_t *keys, int64_t n, int from_bit, int n_bytes) noexcept nogil:
    """Stable radix sort of n keys by the n_bytes (up to 6) bytes that begin at from_bit; `keys` has room for 2 n."""
    cdef uint64_t *a = keys
    cdef uint64_t *b = keys + n
    cdef uint64_t *swap
    cdef int32_t counts[6 * 256]
    cdef int32_t *count
    cdef int32_t total, c
    cdef uint64_t key
    cdef int64_t i
    cdef int digit, shift
    memset(counts, 0, n_bytes * 256 * sizeof(int32_t))
    for i in range(n):
        key = a[i] >> from_bit
        for digit in range(n_bytes):
            counts[digit * 256 + (key & 255)] += 1
            key >>= 8
    for digit in range(n_bytes):
        count = counts + digit * 256
        shift = from_bit + 8 * digit
        if count[(a[0] >> shift) & 255] == n:
            continue
        total = 0
        for i in range(256):
            c = count[i]
            count[i] = total
            total += c
        for i in range(n):
            c = (a[i] >> shift) & 255
            b[count[c]] = a[i]
            count[c] += 1
        swap = a
        a = b
        b = swap
    if a != keys:
        memcpy(keys, a, n * sizeof(uint64_t))


cdef void pack_sort(gs_pack *p, int by, int seed) noexcept nogil:
    """Fill p.order with the buffers in the order PACK_BY_* `by`.

    A key has the buffer's index in its low bits; above it, complemented to sort descending, are 16 bits for the first
    quantity of the order, and 16 or 8 for each further one (8-bit lifetimes are exact up to 255 sections).
    A seed other than 0 lowers the quantities at random, so that repeated searches take different orders: live bytes and
    lifetimes by up to a quarter, sizes and areas by up to a half.
    """
    cdef int live_shift = max(pack_bits(p.bound) - 16, 0)
    cdef int life_shift = max(pack_bits(p.n_sections) - 16, 0)
    cdef uint64_t busy, life, short_life, bytes, key, noise
    cdef double area
    cdef int32_t b
    cdef int n_bytes
    for b in range(p.n):
        busy = <uint64_t>p.peak[b] >> live_shift
        life = <uint64_t>(p.stop[b] - p.start[b])
        area = <double>p.size[b]
        if by == PACK_BY_TAW:
            area *= life
        elif by == PACK_BY_LONG_AREA:
            area *= <double>life * life * life
        bytes = min(pack_scale(area), <uint64_t>0xffff)
        if seed:
            noise = gs_mix(<uint64_t>seed, <uint64_t>b + 1)
            busy -= (busy * (noise & 255)) >> 10
            life -= (life * ((noise >> 8) & 255)) >> 10
            bytes -= min(bytes, 2 * ((noise >> 16) & 255))
        short_life = life
        if p.n_sections > 255:
            short_life = pack_scale(<double>life) >> 6 if life > 0 else 0
            life = life >> life_shift
        # Where the lifetime is compared first, the size can replace the area: among equal lifetimes they order alike.
        if by == PACK_BY_TWA:
            key = ~((busy << 16) | (short_life << 8) | (bytes >> 8))
        elif by == PACK_BY_SIZE:
            key = ~((bytes << 8) | short_life)
        elif by == PACK_BY_WAT:
            key = ~((life << 24) | (bytes << 8) | (busy >> 8))
        elif by == PACK_BY_LONG_AREA:
            key = ~((bytes << 24) | (life << 8))
        else:
            key = ~((busy << 24) | (bytes << 8) | short_life)
        p.keys[b] = (key << PACK_INDEX_BITS) | <uint64_t>b
    n_bytes = 3 if by == PACK_BY_SIZE else 4 if by == PACK_BY_TWA else 5
    pack_sort_keys(p.keys, p.n, PACK_INDEX_BITS, n_bytes)
    for b in range(p.n):
        p.order[b] = <int32_t>(p.keys[b] & PACK_INDEX_MASK)


cdef inline int64_t pack_gap(int64_t *bottom, int64_t *top, int32_t m, int64_t size) noexcept nogil:
    """The lowest offset at which `size` bytes overlap none of the m ranges [bottom, top); may sort them by bottom."""
    cdef int64_t at = 0
    cdef int64_t before, x, y
    cdef int32_t i, j, jump
    if m <= 24:
        # A short list: rise above each range that overlaps, until none does.  The inner loop has no branches.
        while True:
            before = at
            for i in range(m):
                at = top[i] if (bottom[i] < at + size) & (top[i] > at) else at
            if at == before:
                return at
    jump = 1
    while jump < m // 9:
        jump = 3 * jump + 1
    while jump > 0:
        for i in range(jump, m):
            x, y = bottom[i], top[i]
            j = i
            while j >= jump and bottom[j - jump] > x:
                bottom[j], top[j] = bottom[j - jump], top[j - jump]
                j -= jump
            bottom[j], top[j] = x, y
        jump //= 3
    for i in range(m):
        if bottom[i] - at >= size:
            break
        at = max(at, top[i])
    return at


cdef int64_t pack_place_near(gs_pack *p, int64_t limit) noexcept nogil:
    """Place the buffers in p.order, each in its lowest gap; needs the carry lists.

    Returns the arena's bytes, or GS_OUT_OF_MEMORY once it would exceed `limit`.
    """
    # Locals, because the compiler must assume that a store to offset changes the pointers in p.
    cdef int64_t *offset = p.offset
    cdef int64_t *sizes = p.size
    cdef int32_t *carry
    cdef int64_t *bottom = <int64_t *>p.keys        # in the memory of the sort's keys, which are used up
    cdef int64_t *top = <int64_t *>p.keys + p.n
    cdef int64_t arena = 0
    cdef int64_t at, size
    cdef int32_t i, b, j, m, q
    for i in range(p.n):
        offset[i] = -1
    for i in range(p.n):
        b = p.order[i]
        size = sizes[b]
        m = 0
        if i < p.born[p.stop[b]] - p.born[p.start[b]]:
            # Fewer buffers are placed than are born during b's life: look at the placed ones instead of the lists.
            for q in range(i):
                j = p.order[q]
                if p.start[j] < p.stop[b] and p.start[b] < p.stop[j]:
                    bottom[m] = offset[j]
                    top[m] = offset[j] + sizes[j]
                    m += 1
            offset[b] = pack_gap(bottom, top, m, size)
            if offset[b] > limit - size:
                return GS_OUT_OF_MEMORY
            arena = max(arena, offset[b] + size)
            continue
        carry = p.carry + p.carry_begin[p.start[b]]
        for q in range(p.carry_begin[p.start[b] + 1] - p.carry_begin[p.start[b]]):
            j = carry[q]
            at = offset[j]
            bottom[m] = at
            top[m] = at + sizes[j]
            m += at >= 0
        for j in range(p.born[p.start[b]], p.born[p.stop[b]]):
            at = offset[j]
            bottom[m] = at
            top[m] = at + sizes[j]
            m += at >= 0
        at = pack_gap(bottom, top, m, size)
        if at > limit - size:
            return GS_OUT_OF_MEMORY
        offset[b] = at
        arena = max(arena, at + size)
    return arena


cdef void pack_insert_spot(gs_pack_block *blocks, int32_t *n_blocks, const gs_pack_spot *spot) noexcept nogil:
    """Insert a spot after all spots with a lower bottom; a full block is split in two."""
    cdef int32_t k = 0
    cdef int32_t i, q
    cdef gs_pack_block *a
    cdef gs_pack_block *b
    while blocks[k].next >= 0 and blocks[blocks[k].next].spots[0].bottom < spot.bottom:
        k = blocks[k].next
    a = &blocks[k]
    if a.count == PACK_BLOCK:
        b = &blocks[n_blocks[0]]
        b.next = a.next
        a.next = n_blocks[0]
        n_blocks[0] += 1
        a.count = PACK_BLOCK // 2
        b.count = PACK_BLOCK - PACK_BLOCK // 2
        memcpy(b.spots, a.spots + a.count, b.count * sizeof(gs_pack_spot))
        for q in range(2):
            b.start, b.stop = b.spots[0].start, b.spots[0].stop
            for i in range(b.count):
                b.start = min(b.start, b.spots[i].start)
                b.stop = max(b.stop, b.spots[i].stop)
            b, a = a, b
        if b.spots[0].bottom < spot.bottom:
            a = b
    i = a.count
    while i > 0 and a.spots[i - 1].bottom >= spot.bottom:
        a.spots[i] = a.spots[i - 1]
        i -= 1
    a.spots[i] = spot[0]
    a.start = min(a.start, spot.start)
    a.stop = max(a.stop, spot.stop)
    a.count += 1


cdef int64_t pack_place_far(gs_pack *p, int64_t limit) noexcept nogil:
    """Place the buffers in p.order, each in its lowest gap, without the carry lists.

    Returns the arena's bytes, GS_OUT_OF_MEMORY once it would exceed `limit`, or GS_NO_HOST_MEMORY.
    """
    cdef int64_t arena = 0
    cdef int64_t at, size
    cdef int32_t n_blocks = 1
    cdef int32_t i, b, k, q
    cdef bint found
    cdef gs_pack_spot spot
    cdef gs_pack_spot *s
    # Splitting leaves every block at least half full.
    cdef int64_t room = p.n // (PACK_BLOCK // 2) + 2
    cdef gs_pack_block *blocks = <gs_pack_block *>malloc(room * sizeof(gs_pack_block))
    if blocks == NULL:
        return GS_NO_HOST_MEMORY
    blocks[0].count = blocks[0].stop = 0
    blocks[0].start = p.n_sections
    blocks[0].next = -1
    for i in range(p.n):
        b = p.order[i]
        size = p.size[b]
        spot.start, spot.stop = p.start[b], p.stop[b]
        at = 0
        k = 0
        found = False
        while k >= 0 and not found:
            if blocks[k].start < spot.stop and spot.start < blocks[k].stop:
                s = blocks[k].spots
                for q in range(blocks[k].count):
                    if s[q].start < spot.stop and spot.start < s[q].stop:
                        if s[q].bottom - at >= size:
                            found = True
                            break
                        at = max(at, s[q].top)
            k = blocks[k].next
        if at > limit - size:
            arena = GS_OUT_OF_MEMORY
            break
        spot.bottom = at
        spot.top = at + size
        pack_insert_spot(blocks, &n_blocks, &spot)
        p.offset[b] = at
        arena = max(arena, at + size)
    free(blocks)
    return arena
