# Growing arrays of int32 for the passes.
#
# A gs_ints owns its array `at`.  Invariant: n <= room.

cdef int ints_push(gs_ints *v, int32_t x) noexcept nogil:
    cdef int32_t *grown
    cdef int64_t room
    if v.n == v.room:
        room = min(max(16, 2 * <int64_t>v.room), INT32_MAX)
        grown = <int32_t *>realloc(v.at, room * sizeof(int32_t)) if v.n < room else NULL
        if grown == NULL:
            return GS_NO_HOST_MEMORY
        v.at = grown
        v.room = <int32_t>room
    v.at[v.n] = x
    v.n += 1
    return GS_OK
