# Arenas of the C API: backends and their memory, which programs use one at a time.
#
# Owns the buffers and a copy of the backends' tables.  Invariants: the data in the buffers is that of one program,
# `current`, and one function at a time uses the programs of the same arenas.

cdef void *reserve(size_t base, int64_t *at, int64_t nbytes) noexcept nogil:
    """The address of the next `nbytes` of a block at address `base`, of which *at bytes are taken; adds them to *at."""
    cdef size_t found = base + <size_t>at[0]
    at[0] += (nbytes + 7) // 8 * 8
    return <void *>found


cdef int64_t arenas_lay_out(gs_arenas_box *x, int64_t n_chunks, size_t base) noexcept nogil:
    """Set the addresses of all arrays in a block at `base`, after the struct; returns the bytes of the block.  A first
    call, with base 0, is for these bytes alone."""
    cdef int64_t at = 0
    reserve(base, &at, sizeof(gs_arenas_box))
    x.backends = <gs_backend *>reserve(base, &at, x.n_backends * sizeof(gs_backend))
    x.chunk = <void **>reserve(base, &at, n_chunks * sizeof(void *))
    x.chunk_nbytes = <int64_t *>reserve(base, &at, n_chunks * sizeof(int64_t))
    x.begin = <int32_t *>reserve(base, &at, (x.n_backends + 1) * sizeof(int32_t))
    return at


cdef int check_backends(const gs_backend *backends, int32_t n, gs_error *error) noexcept nogil:
    """GS_OK if the table of each backend has the functions that it needs; else GS_BAD_ARGUMENT."""
    cdef char name[NAME_ROOM]
    cdef const char *lacks
    cdef int32_t k
    for k in range(n):
        lacks = what_lacks(&backends[k])
        if lacks != NULL:
            refuse(error, GS_BAD_ARGUMENT, 0, 0, lacks)
            if error != NULL:
                error.backend = k
                name_backend(name, k, backends[k].name)
                snprintf(error.message, sizeof(error.message), b"%s lacks %s", name, lacks)
            return GS_BAD_ARGUMENT
    return GS_OK


cdef const char *what_lacks(const gs_backend *b) noexcept nogil:
    """What the table of a backend lacks: the name of a function, and why it is needed; NULL: nothing."""
    if b.alloc == NULL:
        return b"alloc"
    if b.free == NULL:
        return b"free"
    if b.write == NULL:
        return b"write"
    if b.read == NULL:
        return b"read"
    if b.run == NULL:
        return b"run"
    if b.event_new == NULL and b.event_free == NULL and b.event_record == NULL and b.event_synchronize == NULL:
        if b.event_wait != NULL and b.synchronize == NULL:
            return b"synchronize, and has event_wait"
        return NULL
    if b.synchronize == NULL:
        return b"synchronize, and has events"
    if b.event_new == NULL:
        return b"event_new, and has other functions of events"
    if b.event_free == NULL:
        return b"event_free, and has other functions of events"
    if b.event_record == NULL:
        return b"event_record, and has other functions of events"
    if b.event_synchronize == NULL:
        return b"event_synchronize, and has other functions of events"
    return NULL


cdef const gs_plan_box *plan_at(const gs_api_plan *const *plans, int32_t i) noexcept nogil:
    return <const gs_plan_box *>plans[i]


cdef int arenas_new(const gs_api_plan *const *plans, int32_t n_plans, const gs_backend *backends,
                    gs_api_arenas **arenas, gs_error *error) noexcept nogil:
    cdef gs_arenas_box sizes
    cdef gs_arenas_box *x
    cdef int64_t bytes, n_chunks = 0
    cdef int32_t i, b, n, status
    if arenas == NULL:
        return refuse(error, GS_BAD_ARGUMENT, 0, 0, b"arenas is NULL")
    arenas[0] = NULL
    if plans == NULL or n_plans < 1 or backends == NULL:
        return refuse(error, GS_BAD_ARGUMENT, n_plans, 0, b"plans or backends is NULL, or there is no plan")
    for i in range(n_plans):
        if plans[i] == NULL or plan_at(plans, i).c.n_backends != plan_at(plans, 0).c.n_backends:
            refuse(error, GS_BAD_ARGUMENT, i, n_plans - 1, b"a plan is NULL, or has another number of backends")
            if error != NULL:
                error.index = i
            return GS_BAD_ARGUMENT
    sizes.n_backends = plan_at(plans, 0).c.n_backends
    status = check_backends(backends, sizes.n_backends, error)
    if status != GS_OK:
        return status
    for b in range(sizes.n_backends):
        n_chunks += most_chunks(plans, n_plans, b)
    bytes = arenas_lay_out(&sizes, n_chunks, 0)
    x = <gs_arenas_box *>calloc(bytes, 1)
    if x == NULL:
        return refuse(error, GS_NO_HOST_MEMORY, bytes, 0, b"no host memory for the arenas of programs")
    x.n_backends, x.n_owners = sizes.n_backends, 1
    arenas_lay_out(x, n_chunks, <size_t>x)
    atomic_flag_clear(&x.busy)
    memcpy(x.backends, backends, x.n_backends * sizeof(gs_backend))
    for b in range(x.n_backends):
        x.begin[b + 1] = x.begin[b] + most_chunks(plans, n_plans, b)
    for b in range(x.n_backends):
        for i in range(x.begin[b], x.begin[b + 1]):
            status = allocate_chunk(x, plans, n_plans, b, i, error)
            if status != GS_OK:
                arenas_free(<gs_api_arenas *>x)
                return status
    arenas[0] = <gs_api_arenas *>x
    return GS_OK


cdef int32_t most_chunks(const gs_api_plan *const *plans, int32_t n_plans, int32_t b) noexcept nogil:
    """The most chunks that one of the plans has on backend b."""
    cdef int32_t i, n = 0
    for i in range(n_plans):
        n = max(n, plan_at(plans, i).c.arena[b].n_chunks)
    return n


cdef int allocate_chunk(gs_arenas_box *x, const gs_api_plan *const *plans, int32_t n_plans, int32_t b, int32_t k,
                        gs_error *error) noexcept nogil:
    """Allocate chunk k, which is of backend b, with the largest size and alignment that a plan needs; none for 0
    bytes."""
    cdef gs_error said
    cdef const gs_plan_box *plan
    cdef void *found = NULL
    cdef int64_t alignment = 1
    cdef int32_t i, status
    for i in range(n_plans):
        plan = plan_at(plans, i)
        if k - x.begin[b] < plan.c.arena[b].n_chunks:
            x.chunk_nbytes[k] = max(x.chunk_nbytes[k],
                                    plan.c.chunk_nbytes[plan.c.arena[b].first_chunk + k - x.begin[b]])
            alignment = max(alignment, plan.request.p.backends[b].alignment)
    if x.chunk_nbytes[k] == 0:
        return GS_OK
    said.message[0] = 0
    status = x.backends[b].alloc(x.backends[b].context, x.chunk_nbytes[k], &found, &said)
    if status == GS_OK and found == NULL:
        status = GS_OUT_OF_MEMORY
    if status != GS_OK:
        return backend_failed(x.backends, error, &said, status, b, b"allocating its arena", b"", x.chunk_nbytes[k])
    x.chunk[k] = found
    if <size_t>found % <size_t>alignment:
        snprintf(said.message, sizeof(said.message), b"the address is no multiple of %lld", <long long>alignment)
        status = GS_BAD_PLACEMENT
    elif <size_t>found > SIZE_MAX - <size_t>x.chunk_nbytes[k]:
        snprintf(said.message, sizeof(said.message), b"the memory exceeds the address range")
        status = GS_BAD_PLACEMENT
    for i in range(x.begin[b], k):
        if (<size_t>x.chunk[i] < <size_t>found + <size_t>x.chunk_nbytes[k]
                and <size_t>found < <size_t>x.chunk[i] + <size_t>x.chunk_nbytes[i]):
            snprintf(said.message, sizeof(said.message), b"the memory overlaps that of another buffer of the arena")
            status = GS_BAD_PLACEMENT
    if status != GS_OK:
        return backend_failed(x.backends, error, &said, status, b, b"allocating its arena", b"", x.chunk_nbytes[k])
    return GS_OK


cdef void arenas_free(gs_api_arenas *arenas) noexcept nogil:
    cdef gs_arenas_box *x = <gs_arenas_box *>arenas
    cdef int32_t b, k
    if x == NULL:
        return
    x.n_owners -= 1
    if x.n_owners:
        return
    for b in range(x.n_backends):
        for k in range(x.begin[b], x.begin[b + 1]):
            if x.chunk[k] != NULL:
                x.backends[b].free(x.backends[b].context, x.chunk[k], x.chunk_nbytes[k])
    free(x)


cdef int check_fit(const gs_arenas_box *x, const gs_plan_box *plan, gs_error *error) noexcept nogil:
    """GS_OK if the arenas of a plan fit into these; else GS_BAD_ARGUMENT (the plan has other backends),
    GS_OUT_OF_MEMORY or GS_BAD_PLACEMENT (the alignment is too small)."""
    cdef const gs_plan *p = &plan.c
    cdef int64_t nbytes, room, alignment
    cdef int32_t b, k, chunk
    if p.n_backends != x.n_backends:
        return refuse(error, GS_BAD_ARGUMENT, p.n_backends, x.n_backends,
                      b"the plan has another number of backends than the arenas")
    for b in range(p.n_backends):
        alignment = plan.request.p.backends[b].alignment
        for k in range(p.arena[b].n_chunks):
            chunk = x.begin[b] + k
            nbytes, room = p.chunk_nbytes[p.arena[b].first_chunk + k], 0
            if chunk < x.begin[b + 1]:
                room = x.chunk_nbytes[chunk]
            if nbytes > room:
                return refuse_arena(x, error, GS_OUT_OF_MEMORY, b, nbytes, room,
                                    b"%s: the plan needs a buffer of %lld bytes, the arenas have %lld")
            if nbytes and <size_t>x.chunk[chunk] % <size_t>alignment:
                return refuse_arena(x, error, GS_BAD_PLACEMENT, b, alignment, 0,
                                    b"%s: the plan needs an alignment of %lld, the arenas have less")
    return GS_OK


cdef int refuse_arena(const gs_arenas_box *x, gs_error *error, int status, int32_t b, int64_t value, int64_t limit,
                      const char *format) noexcept nogil:
    """Describe in `error` an arena that a plan does not fit into, with backend and both numbers; returns the status."""
    cdef char name[NAME_ROOM]
    refuse(error, status, value, limit, b"")
    if error != NULL:
        error.backend = b
        name_backend(name, b, x.backends[b].name)
        snprintf(error.message, sizeof(error.message), format, name, <long long>value, <long long>limit)
    return status


cdef int enter(gs_program_box *program, gs_error *error) noexcept nogil:
    """Begin to use a program; GS_BAD_ARGUMENT for NULL, GS_HAZARD if another function is using a program of its
    arenas."""
    if program == NULL:
        return refuse(error, GS_BAD_ARGUMENT, 0, 0, b"program is NULL")
    if atomic_flag_test_and_set(&program.arenas.busy):
        return refuse(error, GS_HAZARD, 0, 0,
                      b"another thread, or a function of a backend, is using a program of the same arenas")
    return GS_OK


cdef int leave(gs_program_box *program, int status) noexcept nogil:
    """End the use of a program that `enter` has begun; returns `status`."""
    atomic_flag_clear(&program.arenas.busy)
    return status


cdef int make_current(gs_program_box *program, gs_error *error) noexcept nogil:
    """Let a program use its arenas: waits for the queued work of the program that used them last, whose data is
    lost."""
    cdef gs_program_box *other = program.arenas.current
    cdef int status = GS_OK
    if other == program:
        return GS_OK
    if other != NULL:
        status = synchronize_all(other, error)
        forget(other)
    program.arenas.current = program if status == GS_OK else NULL
    return status
