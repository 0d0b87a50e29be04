# Programs of the C API: setting inputs, running, waiting and reading.
#
# One thread issues all steps, as execution/pipeline.py does for backends that are asynchronous.  Invariant: after a
# failure all backends are synchronized, no location counts as holding data, and no node as computed.


cdef int backend_failed(const gs_backend *backends, gs_error *error, gs_error *said, int status, int32_t b,
                        const char *doing, const char *what, int64_t value) noexcept nogil:
    """Describe the failure of a backend's function in `error`, unless that is NULL.  Returns the function's status, or
    GS_BACKEND_FAILED if that is no error of gs_status.  `said` has the message that the function has written."""
    cdef char name[NAME_ROOM]
    cdef const char *why = gs_status_name(status)
    if status >= 0 or why == NULL:
        status, why = GS_BACKEND_FAILED, gs_status_name(GS_BACKEND_FAILED)
    if error == NULL:
        return status
    error.status, error.backend, error.tensor, error.index = status, b, -1, -1
    error.value, error.limit = value, 0
    name_backend(name, b, backends[b].name)
    if said.message[0]:
        why = said.message
    snprintf(error.message, sizeof(error.message), b"%s failed while %s%s: %.120s", name, doing, what, why)
    return status


cdef int backend_error(const gs_program_box *x, gs_error *error, gs_error *said, int status, int32_t b,
                       int32_t tensor, int32_t step, const char *doing, int64_t value) noexcept nogil:
    """Describe the failure of a backend's function as backend_failed does, with a tensor and a step (-1: none) in
    `error`."""
    cdef char what[48]
    cdef const char *op
    what[0] = 0
    if tensor >= 0:
        op = gs_op_name(x.nodes[tensor].layout.op)
        if op == NULL:
            op = b"CUSTOM"
        snprintf(what, sizeof(what), b" tensor %d (%s)", <int>tensor, op)
    status = backend_failed(x.backends, error, said, status, b, doing, what, value)
    if error != NULL:
        error.tensor, error.index = tensor, step
    return status


# -- queues and events ------------------------------------------------------------------------------------------


cdef inline bint is_queued(const gs_program_box *x, int32_t b) noexcept nogil:
    """Whether functions of backend b may return before their work is done."""
    return x.backends[b].synchronize != NULL


cdef int wait_for(gs_program_box *x, int32_t b, int32_t of, void *event, gs_error *error) noexcept nogil:
    """Make work that is queued on backend b from now on wait for an event of backend `of`."""
    cdef gs_error said
    cdef int status = GS_NOT_DONE
    said.message[0] = 0
    if x.backends[b].event_wait != NULL:
        status = x.backends[b].event_wait(x.backends[b].context, &x.backends[of], event, &said)
        if status != GS_OK and status != GS_NOT_DONE:
            return backend_error(x, error, &said, status, b, -1, -1, b"waiting for an event", 0)
    return host_wait(x, of, event, error) if status == GS_NOT_DONE else GS_OK


cdef int host_wait(gs_program_box *x, int32_t of, void *event, gs_error *error) noexcept nogil:
    """Wait on the host for an event of backend `of`."""
    cdef gs_error said
    cdef int status
    said.message[0] = 0
    status = x.backends[of].event_synchronize(x.backends[of].context, event, &said)
    if status != GS_OK:
        return backend_error(x, error, &said, status, of, -1, -1, b"waiting for an event", 0)
    return GS_OK


cdef int record(gs_program_box *x, int32_t b, void *event, gs_error *error) noexcept nogil:
    """Record an event in the queue of backend b.  `event` is NULL if the backend has no events: wait until its queue is
    empty."""
    cdef gs_error said
    cdef int status = GS_OK
    said.message[0] = 0
    if event != NULL:
        status = x.backends[b].event_record(x.backends[b].context, event, &said)
    elif is_queued(x, b):
        status = x.backends[b].synchronize(x.backends[b].context, &said)
    if status != GS_OK:
        return backend_error(x, error, &said, status, b, -1, -1, b"recording an event", 0)
    return GS_OK


cdef int let_follow(gs_program_box *x, int32_t later, int32_t earlier, gs_error *error) noexcept nogil:
    """Make all later work of backend `later` wait for the work queued on `earlier` so far."""
    cdef int status
    if later == earlier or not is_queued(x, earlier):
        return GS_OK
    status = record(x, earlier, x.follow[earlier], error)
    if status == GS_OK and x.follow[earlier] != NULL:
        status = wait_for(x, later, earlier, x.follow[earlier], error)
    return status


cdef int synchronize_all(gs_program_box *x, gs_error *error) noexcept nogil:
    """Wait for all backends, even if one fails.  Returns the first failure, after which no results and no data are
    valid."""
    cdef gs_error said
    cdef int32_t b
    cdef int status, first = GS_OK
    for b in range(x.n_backends):
        if is_queued(x, b):
            said.message[0] = 0
            status = x.backends[b].synchronize(x.backends[b].context, &said)
            if status != GS_OK and first == GS_OK:
                first = backend_error(x, error, &said, status, b, -1, -1, b"finishing queued work", 0)
    x.n_queued = 0
    memset(x.last, 0, x.n_backends * sizeof(gs_done))
    if first != GS_OK:
        forget(x)
        if x.arenas.current != NULL:
            forget(x.arenas.current)        # the failed work may be that of this program
    return first


cdef void forget(gs_program_box *x) noexcept nogil:
    """Note that no location holds data, and that no node is computed."""
    x.has_results = False
    memset(x.held, 0xff, x.c.n_ids * sizeof(int64_t))       # every number becomes -1


# -- moving data ------------------------------------------------------------------------------------------------


cdef int move(gs_program_box *x, int32_t queue, int32_t there, const char *source, int32_t here, char *to,
              int64_t nbytes, int32_t tensor, int32_t step, gs_error *error) noexcept nogil:
    """Copy bytes from memory of backend `there` to memory of `here`, as work of `queue`, which is one of the two."""
    cdef gs_error said
    cdef const gs_backend *b
    cdef int32_t k, one, first = here
    cdef int64_t part
    cdef int status
    if nbytes <= 0:
        return GS_OK
    said.message[0] = 0
    if queue == there and x.backends[here].concurrent_copies:
        first = there       # the destination takes data while it computes: the source's queue can copy
    for k in range(2):
        one = first if k == 0 else there + here - first
        b = &x.backends[one]
        if b.copy == NULL or k and there == here:
            continue
        status = let_follow(x, one, queue, error)
        if status != GS_OK:
            return status
        status = b.copy(b.context, &x.backends[here], to, &x.backends[there], source, nbytes, &said)
        if status == GS_OK:
            return let_follow(x, queue, one, error)
        if status != GS_NOT_DONE:
            return backend_error(x, error, &said, status, one, tensor, step, b"copying", nbytes)
    status = let_follow(x, there, queue, error)
    if status == GS_OK:
        status = let_follow(x, here, queue, error)
    if status != GS_OK:
        return status
    while nbytes:
        part = min(nbytes, <int64_t>MAX_STAGING)
        b = &x.backends[there]
        status = b.read(b.context, x.staging, source, part, &said)
        if status != GS_OK:
            return backend_error(x, error, &said, status, there, tensor, step, b"reading", part)
        b = &x.backends[here]
        status = b.write(b.context, to, x.staging, part, &said)
        if status != GS_OK:
            return backend_error(x, error, &said, status, here, tensor, step, b"writing", part)
        source += part
        to += part
        nbytes -= part
    return let_follow(x, queue, here, error)


cdef int move_elements(gs_program_box *x, int32_t queue, int32_t there, const char *source, int32_t here, char *to,
                       const gs_layout *layout, int32_t tensor, int32_t step, gs_error *error) noexcept nogil:
    """Copy a tensor's elements as `move` does, without the bytes in gaps between them, which belong to other
    tensors."""
    cdef gs_type_traits traits = gs_traits_of_type(layout.type)
    cdef int64_t size = traits.type_size, at
    cdef int64_t[4] n, index
    cdef int d, k, n_dims = 0
    cdef int64_t[4] stride
    cdef int status
    if traits.block_size == 0 or layout.nbytes == 0:
        return move(x, queue, there, source, here, to, layout.nbytes, tensor, step, error)
    for d in range(4):
        at = layout.ne[d] // traits.block_size if d == 0 else layout.ne[d]
        if n_dims == 0 and layout.nb[d] == size:
            size *= at
        elif at != 1:
            n[n_dims], stride[n_dims], index[n_dims] = at, layout.nb[d], 0
            n_dims += 1
    while True:
        at = 0
        for d in range(n_dims):
            at += index[d] * stride[d]
        status = move(x, queue, there, source + at, here, to + at, size, tensor, step, error)
        if status != GS_OK:
            return status
        k = 0
        while k < n_dims:
            index[k] += 1
            if index[k] < n[k]:
                break
            index[k] = 0
            k += 1
        if k == n_dims:
            return GS_OK


cdef int copy_experts(gs_program_box *x, int32_t k, int32_t location, gs_error *error) noexcept nogil:
    """Copy the used experts of a weight: their numbers are in step.ids, on the host or on another backend."""
    cdef const gs_step *step = &x.c.steps[k]
    cdef const gs_layout *ids = &x.nodes[step.ids].layout
    cdef const gs_layout *weight = &x.nodes[step.tensor].layout
    cdef int32_t root = x.root[step.ids], b, number
    cdef const char *numbers = <const char *>x.data[root]
    cdef gs_error said
    cdef int64_t i, j, size
    cdef int status
    if ids.nbytes == 0 or weight.nbytes == 0:
        return GS_OK
    if not x.traits[root] & IS_LOADED:
        numbers = NULL
    if numbers != NULL:
        # The numbers may be a view of the leaf that the caller set: they have the same offset in the caller's data as
        # in the leaf's memory.
        numbers += <char *>x.address[step.ids] - <char *>x.address[root]
    else:
        b = x.holder[step.ids]
        status = host_waits(x, step, error)
        if status == GS_OK:
            status = let_follow(x, b, step.backend, error)
        if status != GS_OK:
            return status
        said.message[0] = 0
        status = x.backends[b].read(x.backends[b].context, x.experts, x.address[step.ids], ids.nbytes, &said)
        if status != GS_OK:
            return backend_error(x, error, &said, status, b, step.ids, k, b"reading", ids.nbytes)
        numbers = x.experts
    memset(x.used, 0, weight.ne[2])
    for j in range(ids.ne[1]):
        for i in range(ids.ne[0]):
            memcpy(&number, numbers + j * ids.nb[1] + i * ids.nb[0], sizeof(number))
            if 0 <= number < weight.ne[2]:
                x.used[number] = True       # the kernel refuses any other number
    size = weight.nbytes - (weight.ne[2] - 1) * weight.nb[2]     # also of a type that this package does not know
    for i in range(weight.ne[2]):
        if x.used[i]:
            status = move(x, step.backend, x.holder[step.tensor], <char *>x.address[step.tensor] + i * weight.nb[2],
                          x.holder[location], <char *>x.address[location] + i * weight.nb[2], size, step.tensor, k, error)
            if status != GS_OK:
                return status
    return GS_OK


# -- steps ------------------------------------------------------------------------------------------------------


cdef gs_done *done_of(const gs_program_box *x, const gs_step *step, const gs_wait *wait) noexcept nogil:
    """The event that `wait` names; NULL if the step needs no wait: that compute was not queued, no event was recorded,
    or the step is in the same backend's queue."""
    cdef gs_done *found
    if wait.back > x.n_queued or x.awaited[wait.step] < 0:
        return NULL
    found = &x.done[<int64_t>x.awaited[wait.step] * x.depth + (x.n_computed - wait.back) % x.depth]
    return NULL if found.event == NULL or found.backend == step.backend else found


cdef int host_waits(gs_program_box *x, const gs_step *step, gs_error *error) noexcept nogil:
    """Wait on the host for all that a step waits for."""
    cdef gs_done *done
    cdef int32_t k
    cdef int status
    for k in range(step.wait, step.wait + step.n_waits):
        done = done_of(x, step, &x.c.waits[k])
        if done != NULL:
            status = host_wait(x, done.backend, done.event, error)
            if status != GS_OK:
                return status
    return GS_OK


cdef bint is_due(gs_program_box *x, const gs_step *step, int32_t location) noexcept nogil:
    """Whether a step has to run; False if it is optional (`if_changed`) and its data is already in place."""
    return not step.if_changed or x.held[location] != x.version[x.root[step.tensor]]


cdef int issue(gs_program_box *x, int32_t k, int64_t turn, gs_error *error) noexcept nogil:
    """Issue step k: wait for other steps, move data or compute, record an event."""
    cdef const gs_step *step = &x.c.steps[k]
    cdef const gs_backend *b = &x.backends[step.backend]
    cdef int32_t location = -1, i
    cdef gs_done *before
    cdef gs_done *end = NULL
    cdef gs_error said
    cdef gs_run_nodes *run
    cdef int status = GS_OK
    if step.n_slots:
        location = x.c.locations[step.location + turn % step.n_slots].id
    if x.awaited[k] >= 0:
        end = &x.done[<int64_t>x.awaited[k] * x.depth + x.n_computed % x.depth]
        end[0] = x.last[step.backend]
    if not is_due(x, step, location):
        return GS_OK
    for i in range(step.wait, step.wait + step.n_waits):
        before = done_of(x, step, &x.c.waits[i])
        if before != NULL:
            status = wait_for(x, step.backend, before.backend, before.event, error)
            if status != GS_OK:
                return status
    said.message[0] = 0
    if step.kind == GS_STEP_RUN:
        run = &x.runs[x.run_of[k] + turn % x.n_turns[k]]
        status = b.run(b.context, run, &said)
        if status != GS_OK:
            status = backend_error(x, error, &said, status, step.backend, run.ids[0], k, b"computing nodes from",
                                   run.n_nodes)
    elif step.kind == GS_STEP_LOAD:
        if x.data[step.tensor] != NULL and step.nbytes and x.address[location] != NULL:
            status = b.write(b.context, x.address[location], <const char *>x.data[step.tensor] + step.start, step.nbytes,
                             &said)
            if status != GS_OK:
                status = backend_error(x, error, &said, status, step.backend, step.tensor, k, b"loading", step.nbytes)
    elif step.kind == GS_STEP_COPY:
        status = move(x, step.backend, x.holder[step.tensor], <char *>x.address[step.tensor], x.holder[location],
                      <char *>x.address[location], x.nodes[step.tensor].layout.nbytes, step.tensor, k, error)
    elif step.kind == GS_STEP_COPY_EXPERTS:
        status = copy_experts(x, k, location, error)
    else:
        status = move_elements(x, step.backend, x.holder[location], <char *>x.address[location], x.holder[step.tensor],
                               <char *>x.address[step.tensor], &x.nodes[step.tensor].layout, step.tensor, k, error)
    if status != GS_OK:
        return status
    if step.if_changed:
        x.held[location] = x.version[x.root[step.tensor]]
    if end != NULL:
        end.event = x.event[<int64_t>x.awaited[k] * x.depth + x.n_computed % x.depth]
        end.backend = step.backend
        x.last[step.backend] = end[0]
        status = record(x, step.backend, end.event, error)
    return status


cdef int program_run(gs_api_program *program, gs_error *error) noexcept nogil:
    cdef gs_program_box *x = <gs_program_box *>program
    cdef int status = enter(x, error)
    return status if status != GS_OK else leave(x, issue_all(x, error))


cdef int issue_all(gs_program_box *x, gs_error *error) noexcept nogil:
    """Issue the steps of one compute."""
    cdef int32_t k, id
    cdef int64_t turn
    cdef int status
    for k in range(x.c.n_inputs):
        id = x.c.inputs[k]
        if x.data[id] == NULL and x.nodes[id].layout.nbytes:
            return refuse_tensor(error, GS_HAZARD, id, x.nodes[id].layout.nbytes, 0,
                                 b"an input was never set: call program_set")
    status = make_current(x, error)
    if status != GS_OK:
        return status
    turn = x.n_computed % x.c.copy_slots
    for k in range(x.c.n_steps):
        status = issue(x, k, turn, error)
        if status != GS_OK:
            break
    for k in range(x.n_written):
        x.version[x.written[k]] += 1
    x.n_computed += 1
    if status != GS_OK:
        synchronize_all(x, NULL)
        forget(x)
        return status
    x.n_queued += 1
    x.has_results = True
    return GS_OK


cdef int program_synchronize(gs_api_program *program, gs_error *error) noexcept nogil:
    cdef gs_program_box *x = <gs_program_box *>program
    cdef int status = enter(x, error)
    return status if status != GS_OK else leave(x, synchronize_all(x, error))


cdef int check_tensor(const gs_program_box *x, int32_t tensor, int traits, const char *wrong,
                      gs_error *error) noexcept nogil:
    """GS_OK if `tensor` is an id of the graph and has all of `traits`; else GS_BAD_ARGUMENT with the message
    `wrong`."""
    if 0 <= tensor < x.n_tensors and x.traits[tensor] & traits == traits:
        return GS_OK
    return refuse_tensor(error, GS_BAD_ARGUMENT, tensor, tensor, x.n_tensors - 1, wrong)


cdef int refuse_tensor(gs_error *error, int status, int32_t tensor, int64_t value, int64_t limit,
                       const char *message) noexcept nogil:
    """Describe an invalid call in `error`, with the tensor first in the message (-1: no tensor); returns the status."""
    refuse(error, status, value, limit, message)
    if error != NULL and tensor >= 0:
        error.tensor = tensor
        snprintf(error.message, sizeof(error.message), b"tensor %d: %s", <int>tensor, message)
    return status


cdef int program_set(gs_api_program *program, int32_t tensor, const void *data, int64_t nbytes,
                     gs_error *error) noexcept nogil:
    cdef gs_program_box *x = <gs_program_box *>program
    cdef int status = enter(x, error)
    return status if status != GS_OK else leave(x, set_leaf(x, tensor, data, nbytes, error))


cdef int set_leaf(gs_program_box *x, int32_t tensor, const void *data, int64_t nbytes,
                  gs_error *error) noexcept nogil:
    cdef int status = check_tensor(x, tensor, IS_LOADED, b"it is no leaf that the program loads", error)
    if status != GS_OK:
        return status
    if nbytes != x.nodes[tensor].layout.nbytes or data == NULL and nbytes:
        refuse_tensor(error, GS_BAD_ARGUMENT, tensor, nbytes, x.nodes[tensor].layout.nbytes, b"")
        if error != NULL:
            snprintf(error.message, sizeof(error.message), b"tensor %d has %lld bytes, not %lld; or data is NULL",
                     <int>tensor, <long long>error.limit, <long long>nbytes)
        return GS_BAD_ARGUMENT
    x.data[tensor] = data
    x.version[tensor] += 1
    return GS_OK


cdef int program_touch(gs_api_program *program, int32_t tensor, gs_error *error) noexcept nogil:
    cdef gs_program_box *x = <gs_program_box *>program
    cdef int status = enter(x, error)
    if status != GS_OK:
        return status
    if tensor == -1:
        forget(x)
        return leave(x, GS_OK)
    status = check_tensor(x, tensor, IS_RESIDENT, b"it is no resident", error)
    if status == GS_OK:
        x.version[x.root[tensor]] += 1
    return leave(x, status)


cdef int program_read(gs_api_program *program, int32_t tensor, void *to, int64_t offset, int64_t nbytes,
                      gs_error *error) noexcept nogil:
    cdef gs_program_box *x = <gs_program_box *>program
    cdef int status = enter(x, error)
    return status if status != GS_OK else leave(x, read_tensor(x, tensor, to, offset, nbytes, error))


cdef int read_tensor(gs_program_box *x, int32_t tensor, void *to, int64_t offset, int64_t nbytes,
                     gs_error *error) noexcept nogil:
    cdef const gs_backend *b
    cdef const char *wrong = NULL
    cdef gs_error said
    cdef int status = check_tensor(x, tensor, 0, b"it is no tensor of the graph", error)
    if status != GS_OK:
        return status
    if to == NULL or nbytes < 0 or not gs_range_fits(offset, nbytes, x.nodes[tensor].layout.nbytes):
        return refuse_tensor(error, GS_BAD_ARGUMENT, tensor, offset, x.nodes[tensor].layout.nbytes,
                             b"to is NULL, or the bytes lie outside the tensor")
    status = synchronize_all(x, error)
    if status != GS_OK:
        return status
    if not x.traits[tensor] & IS_RESIDENT:
        if x.arenas.current != x and x.arenas.current != NULL:
            wrong = b"another program has computed in the same arenas since: read a result before the next program runs"
        elif not x.has_results:
            wrong = b"no compute has succeeded, so that it has no result"
    if wrong == NULL and not x.traits[tensor] & IS_READABLE:
        wrong = b"it is not in memory at the end of a compute: flag a node as an output before planning"
    if wrong != NULL:
        return refuse_tensor(error, GS_HAZARD, tensor, offset, nbytes, wrong)
    if nbytes == 0:
        return GS_OK
    b = &x.backends[x.holder[tensor]]
    said.message[0] = 0
    status = b.read(b.context, to, <char *>x.address[tensor] + offset, nbytes, &said)
    if status != GS_OK:
        return backend_error(x, error, &said, status, x.holder[tensor], tensor, -1, b"reading", nbytes)
    return GS_OK
