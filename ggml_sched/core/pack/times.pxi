# Converting times of any size to the small ones that pack_prepare accepts.
#
# Times that are close together are shifted to begin at 0; others are replaced by their ranks among the distinct times,
# because pack_prepare takes memory and time in proportion to the largest time.  Invariant: the order of times is kept.

cdef int compare_times(const void *a, const void *b) noexcept nogil:
    cdef int64_t x = (<const int64_t *>a)[0], y = (<const int64_t *>b)[0]
    return (x > y) - (x < y)


cdef int32_t rank_of(const int64_t *times, int32_t n, int64_t x) noexcept nogil:
    """The index of x in `times`, which is ascending and contains it."""
    cdef int32_t low = 0, high = n, middle
    while low < high:
        middle = low + (high - low) // 2
        if times[middle] < x:
            low = middle + 1
        else:
            high = middle
    return low


cdef int pack_any_times(int32_t n, const int64_t *lower, const int64_t *upper, const int64_t *size, int64_t capacity,
                        int64_t budget, int64_t *offsets, gs_pack_result *out, int32_t *failed) noexcept nogil:
    """Choose offsets for n buffers of `size` bytes alive over [lower, upper), times of any size; 0 bytes are allowed.

    `capacity` and `budget` are those of pack_prepared.  After an error the offsets are unchanged.

    GS_BAD_ARGUMENT: failed[0] is the index of a buffer that ends before it begins or has a negative size; if it is -1,
    there are more than PACK_MAX buffers, or the capacity or the budget is invalid.
    """
    cdef gs_pack p
    cdef int64_t first, last
    cdef int64_t *times
    cdef int32_t *rank
    cdef int32_t i, k, n_times
    cdef int status
    failed[0] = -1
    if not 0 <= n <= PACK_MAX or capacity < GS_PACK_NO_CAPACITY or budget < GS_PACK_PLANNER_BUDGET:
        return GS_BAD_ARGUMENT
    first, last = INT64_MAX, INT64_MIN
    for i in range(n):
        if lower[i] > upper[i] or size[i] < 0:
            failed[0] = i
            return GS_BAD_ARGUMENT
        first = min(first, lower[i])
        last = max(last, upper[i])
    times = <int64_t *>malloc(max(<int64_t>n, 1) * (2 * sizeof(int64_t) + 2 * sizeof(int32_t)))
    if times == NULL:
        return GS_NO_HOST_MEMORY
    rank = <int32_t *>(times + 2 * <int64_t>n)
    n_times = 0
    if n and <uint64_t>last - <uint64_t>first <= <uint64_t>(4 * <int64_t>n + 1024):
        # The times are close together: shifting is enough, and avoids the sort.
        for i in range(n):
            rank[i] = <int32_t>(lower[i] - first)
            rank[n + i] = <int32_t>(upper[i] - first)
        n_times = <int32_t>(last - first)
    elif n:
        memcpy(times, lower, n * sizeof(int64_t))
        memcpy(times + n, upper, n * sizeof(int64_t))
        qsort(times, 2 * <size_t>n, sizeof(int64_t), compare_times)
        k = 1
        for i in range(1, 2 * n):
            if times[i] != times[i - 1]:
                times[k] = times[i]
                k += 1
        for i in range(n):
            rank[i] = rank_of(times, k, lower[i])
            rank[n + i] = rank_of(times, k, upper[i])
        n_times = k - 1
    status = pack_prepare(&p, n, n_times, rank, rank + n, size)
    if status == GS_OK:
        status = pack_prepared(&p, capacity, min(budget, PACK_MOST_TRIES), out)
    if status == GS_OK:
        for i in range(n):
            offsets[i] = 0
        for i in range(p.n):
            offsets[p.id[i]] = p.best[i]
    pack_free(&p)
    free(times)
    return status
