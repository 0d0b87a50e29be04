# Programs of the C API: making them, with their memory, their events and the structs that backends receive.


cdef int64_t program_lay_out(gs_program_box *x, int64_t n_members, size_t base) noexcept nogil:
    """Set the addresses of all arrays in a block at `base`; returns the bytes of the block.  A first call, with base 0,
    is for these bytes alone."""
    cdef int64_t at = 0, n = x.n_tensors, n_ids = x.c.n_ids, n_steps = x.c.n_steps
    cdef int64_t n_events = <int64_t>x.n_awaited * x.depth
    x.nodes = <gs_node *>reserve(base, &at, n_ids * sizeof(gs_node))
    x.twins = <gs_node *>reserve(base, &at, x.n_twins * sizeof(gs_node))
    x.runs = <gs_run_nodes *>reserve(base, &at, x.n_runs * sizeof(gs_run_nodes))
    x.listed = <const gs_node **>reserve(base, &at, x.n_listed * sizeof(void *))
    x.address = <void **>reserve(base, &at, n_ids * sizeof(void *))
    x.version = <int64_t *>reserve(base, &at, n * sizeof(int64_t))
    x.held = <int64_t *>reserve(base, &at, n_ids * sizeof(int64_t))
    x.data = <const void **>reserve(base, &at, n * sizeof(void *))
    x.event = <void **>reserve(base, &at, n_events * sizeof(void *))
    x.done = <gs_done *>reserve(base, &at, n_events * sizeof(gs_done))
    x.last = <gs_done *>reserve(base, &at, x.n_backends * sizeof(gs_done))
    x.follow = <void **>reserve(base, &at, x.n_backends * sizeof(void *))
    x.listed_ids = <int32_t *>reserve(base, &at, x.n_listed * sizeof(int32_t))
    x.run_of = <int32_t *>reserve(base, &at, n_steps * sizeof(int32_t))
    x.n_turns = <int32_t *>reserve(base, &at, n_steps * sizeof(int32_t))
    x.group_begin = <int32_t *>reserve(base, &at, (n_members + n_steps + 1) * sizeof(int32_t))
    x.group_member = <int32_t *>reserve(base, &at, n_members * sizeof(int32_t))
    x.holder = <int32_t *>reserve(base, &at, n_ids * sizeof(int32_t))
    x.root = <int32_t *>reserve(base, &at, n * sizeof(int32_t))
    x.written = <int32_t *>reserve(base, &at, x.n_written * sizeof(int32_t))
    x.awaited = <int32_t *>reserve(base, &at, n_steps * sizeof(int32_t))
    x.traits = <unsigned char *>reserve(base, &at, n)
    x.needed = <unsigned char *>reserve(base, &at, x.n_listed)
    x.staging = <char *>reserve(base, &at, x.n_staging)
    x.experts = <char *>reserve(base, &at, x.n_expert_bytes)
    x.used = <unsigned char *>reserve(base, &at, x.n_used)
    return at


cdef int write_steps(gs_program_box *x, const gs_graph *g, const gs_plan *p, const int32_t *resident,
                     gs_error *error) noexcept with gil:
    """Let planning/_c_program write the steps of the plan to x.c.  An exception becomes a status, with its text as the
    message."""
    cdef bytes said
    try:
        from ggml_sched.planning._c_program import write_program
        flags = tuple([bool(x.backends[k].concurrent_copies) for k in range(x.n_backends)])
        x.steps = <void *><size_t>write_program(<size_t>g, <size_t>p, <size_t>resident, flags, <size_t>&x.c)
        return GS_OK
    except MemoryError:
        return refuse(error, GS_NO_HOST_MEMORY, g.n_tensors, 0, b"no host memory for the steps of a program")
    except BaseException as failed:
        said = f"{type(failed).__name__}: {failed}".encode(errors="replace")
        return refuse(error, GS_BAD_ARGUMENT, 0, 0, said)


cdef void count_parts(gs_program_box *x, const gs_graph *g) noexcept nogil:
    """Count what program_lay_out reserves memory for: events, runs, nodes, twins, and bytes of staging and experts."""
    cdef const gs_step *step
    cdef int64_t n, n_turns
    cdef int32_t i, k
    x.depth = x.c.reach + 1
    for i in range(x.c.n_steps):
        step = &x.c.steps[i]
        x.n_awaited += step.awaited
        if step.kind == GS_STEP_RUN:
            n = 0
            for k in range(step.first, step.last + 1):
                n += not g.role[g.node[k]] & GS_ROLE_VIEW
            n_turns = turns_of(x, step)
            x.n_runs += <int32_t>n_turns
            x.n_listed += n_turns * n
            if step.n_reads or step.n_slots:
                x.n_twins += n_turns * n
        elif step.kind != GS_STEP_LOAD:
            x.n_staging = max(x.n_staging, min(g.nbytes[step.tensor], <int64_t>MAX_STAGING))
            if step.kind == GS_STEP_COPY_EXPERTS:
                x.n_expert_bytes = max(x.n_expert_bytes, g.nbytes[step.ids])
                x.n_used = max(x.n_used, g.layout[step.tensor].ne[2])
    for i in range(g.n_work):
        x.n_written += g.role[g.work[i]] & GS_ROLE_WRITES != 0


cdef int32_t turns_of(const gs_program_box *x, const gs_step *step) noexcept nogil:
    """How many gs_run_nodes a run needs: one, or one for each copy slot if it reads or writes a copy with several
    slots."""
    cdef int32_t k
    if step.n_slots > 1:
        return x.c.copy_slots
    for k in range(step.read, step.read + step.n_reads):
        if x.c.reads[k].n_slots > 1:
            return x.c.copy_slots
    return 1


cdef int place_tensors(gs_program_box *x, const gs_graph *g, const gs_plan *p, const int32_t *resident,
                       void *const *given, gs_error *error) noexcept nogil:
    """Set the address, backend, node and traits of each id."""
    cdef gs_node *node
    cdef int64_t stride, offset
    cdef int32_t i, k, m, like
    cdef int32_t *holder
    cdef char *first
    holder = <int32_t *>malloc(max(<int64_t>p.n, 1) * sizeof(int32_t))
    if holder == NULL:
        return refuse(error, GS_NO_HOST_MEMORY, p.n, 0, b"no host memory for the tensors of a program")
    for i in range(p.n):
        holder[i] = i
    for k in range(p.n_seq):
        if p.state[p.seq[k]] & GS_STATE_INPLACE:
            holder[plan_owner(p, p.seq[k])] = p.seq[k]
    for i in range(p.n):
        like = p.like[i]
        m = g.memory[i] if i < x.n_tensors else i
        x.held[i] = x.holder[i] = -1
        first = NULL
        if i < x.n_tensors and resident[m] >= 0:
            x.holder[i] = resident[m]
            x.traits[i] |= IS_RESIDENT | IS_READABLE
            first = <char *>given[m] if given != NULL else NULL
            if first == NULL and g.nbytes[m]:
                refuse_tensor(error, GS_BAD_ARGUMENT, m, 0, 0, b"a resident has no address")
                if error != NULL:
                    error.backend = resident[m]
                free(holder)
                return GS_BAD_ARGUMENT
        elif p.offset[m] >= 0:
            x.holder[i], offset = p.arena_of[m], p.offset[m]
            stride = p.arena[x.holder[i]].stride
            k = x.arenas.begin[x.holder[i]]
            if stride:
                k += <int32_t>(offset // stride)
                offset %= stride
            first = <char *>x.arenas.chunk[k] + offset if x.arenas.chunk[k] != NULL else NULL
            if (i < x.n_tensors and holder[plan_owner(p, m)] == m
                    and not p.state[plan_owner(p, m)] & GS_STATE_FREED and not p.state[m] & GS_STATE_INNER):
                x.traits[i] |= IS_READABLE
        if i < x.n_tensors:
            x.root[i] = m
            if first != NULL:
                first += g.view_offs[i]
        x.address[i] = first
        node = &x.nodes[i]
        node.layout, node.data = g.layout[like], first
        node.layout.nbytes = g.nbytes[like]
        if i >= x.n_tensors:
            node.layout.op = GS_OP_NONE
            node.op = GS_OP_NONE
            continue
        node_name_op(node)
        memcpy(node.params, g.param + g.param_begin[i],
               min(g.param_begin[i + 1] - g.param_begin[i], <int32_t>GS_MAX_OP_PARAMS) * sizeof(int32_t))
        node.flags = g.flags[i]
        for k in range(g.src_begin[i], g.src_begin[i + 1]):
            node.src[g.slot[k]] = &x.nodes[g.src[k]]
            node.n_src = g.slot[k] + 1
    free(holder)
    k = 0
    for i in range(g.n_work):
        m = g.memory[g.work[i]]
        if g.role[g.work[i]] & GS_ROLE_WRITES and resident[m] >= 0:
            x.written[k] = m
            k += 1
    x.n_written = k
    for i in range(x.c.n_steps):
        if x.c.steps[i].kind == GS_STEP_LOAD:
            x.traits[x.c.steps[i].tensor] |= IS_LOADED
            if x.c.locations[x.c.steps[i].location].id == x.c.steps[i].tensor:
                x.traits[x.c.steps[i].tensor] |= IS_FILLED
    for i in range(x.n_tensors):
        m = x.root[i]
        if g.layout[m].op == GS_OP_NONE and not x.traits[m] & (IS_RESIDENT | IS_FILLED):
            x.traits[i] &= ~IS_READABLE         # nodes read the leaf through copies alone, or not at all
    return GS_OK


cdef int list_runs(gs_program_box *x, const gs_graph *g, const gs_plan *p, gs_error *error) noexcept nogil:
    """Make the gs_run_nodes of each run, one for each copy slot that its nodes use in turn, with twins where needed."""
    cdef gs_node **twin_of = <gs_node **>calloc(max(x.n_tensors, 1), sizeof(gs_node *))
    cdef int32_t *index = <int32_t *>malloc(max(g.n_nodes, 1) * sizeof(int32_t))
    cdef gs_run_nodes *run = x.runs
    cdef const gs_step *step
    cdef int64_t listed = 0, first, twin = 0
    cdef int32_t i, k, t, n, id, status = GS_OK, n_members = 0, n_begins = 0
    cdef const int32_t *begin
    if twin_of == NULL or index == NULL:
        free(twin_of)
        free(index)
        return refuse(error, GS_NO_HOST_MEMORY, g.n_nodes, 0, b"no host memory for the runs of a program")
    for i in range(x.c.n_steps):
        step = &x.c.steps[i]
        if step.kind != GS_STEP_RUN:
            continue
        x.run_of[i], x.n_turns[i] = <int32_t>(run - x.runs), turns_of(x, step)
        first = listed
        for t in range(x.n_turns[i]):
            run.step, run.turn, run.n_nodes = i, t, 0
            run.nodes, run.ids = x.listed + listed, x.listed_ids + listed
            for k in range(step.first, step.last + 1):
                id = g.node[k]
                if g.role[id] & GS_ROLE_VIEW:
                    continue
                x.listed_ids[listed] = id
                x.listed[listed] = &x.nodes[id]
                if step.n_reads or step.n_slots:
                    twin_of[id] = &x.twins[twin]
                    twin += 1
                    twin_of[id][0] = x.nodes[id]
                    x.listed[listed] = twin_of[id]
                index[k] = run.n_nodes
                run.n_nodes += 1
                listed += 1
            if step.n_reads or step.n_slots:
                rewire(x, g, step, t, twin_of, run)
            run += 1
        # The fusion groups of a step are the same for all slots: its gs_run_nodes share the arrays.
        run -= x.n_turns[i]
        n, begin = 0, p.group_begin
        x.group_begin[n_begins] = n_members
        for k in range(p.n_groups):
            if step.first <= p.group_member[begin[k]] and p.group_member[begin[k + 1] - 1] <= step.last:
                for t in range(begin[k], begin[k + 1]):
                    x.group_member[n_members] = index[p.group_member[t]]
                    n_members += 1
                n += 1
                x.group_begin[n_begins + n] = n_members
        if n:
            status = plan_needed(g, p, step.first, step.last, x.needed + first)
            if status < 0:
                status = refuse(error, status, g.n_nodes, 0, b"no host memory for the runs of a program")
                break
            status = GS_OK
        for t in range(x.n_turns[i]):
            if n:
                run.n_groups, run.needed = n, x.needed + first
                run.group_begin, run.group_member = x.group_begin + n_begins, x.group_member
            run += 1
        n_begins += n + 1
    free(twin_of)
    free(index)
    return status


cdef void rewire(gs_program_box *x, const gs_graph *g, const gs_step *step, int32_t turn, gs_node **twin_of,
                 gs_run_nodes *run) noexcept nogil:
    """Make the twins of a run read copies, or each other, and the last twin compute into its copy, if it has one.  Sets
    the run's entries in twin_of back to NULL."""
    cdef gs_node *twin
    cdef const gs_read *read
    cdef int32_t k, s, id
    for k in range(run.n_nodes):
        id = run.ids[k]
        twin = twin_of[id]
        for s in range(g.src_begin[id], g.src_begin[id + 1]):
            if twin_of[g.src[s]] != NULL:
                twin.src[g.slot[s]] = twin_of[g.src[s]]
    for k in range(step.read, step.read + step.n_reads):
        read = &x.c.reads[k]
        twin = twin_of[g.node[read.position]]
        twin.src[read.slot] = &x.nodes[x.c.locations[read.location + turn % read.n_slots].id]
    if step.n_slots:
        twin = twin_of[run.ids[run.n_nodes - 1]]
        twin.data = x.address[x.c.locations[step.location + turn % step.n_slots].id]
    for k in range(run.n_nodes):
        twin_of[run.ids[k]] = NULL


cdef int make_events(gs_program_box *x, gs_error *error) noexcept nogil:
    """Make the events: `depth` of them for each awaited step, since steps wait for earlier computes, and one for each
    queue."""
    cdef int32_t k, d, b, at = 0, status = GS_OK
    for b in range(x.n_backends):
        status = new_event(x, b, &x.follow[b], error)
        if status != GS_OK:
            return status
    for k in range(x.c.n_steps):
        if x.c.steps[k].awaited:
            x.awaited[k] = at
            for d in range(x.depth):
                status = new_event(x, x.c.steps[k].backend, &x.event[<int64_t>at * x.depth + d], error)
                if status != GS_OK:
                    return status
            at += 1
    return GS_OK


cdef int new_event(gs_program_box *x, int32_t b, void **event, gs_error *error) noexcept nogil:
    """Make an event of backend b in *event, which is NULL before, and stays NULL if the backend has no events."""
    cdef gs_error said
    cdef int status
    if x.backends[b].event_new == NULL:
        return GS_OK
    said.message[0] = 0
    status = x.backends[b].event_new(x.backends[b].context, event, &said)
    if status == GS_OK and event[0] == NULL:
        status = GS_BACKEND_FAILED
    if status != GS_OK:
        event[0] = NULL
        return backend_error(x, error, &said, status, b, -1, -1, b"making an event", 0)
    return GS_OK


cdef int program_new(const gs_api_graph *graph, const gs_api_plan *plan, const gs_backend *backends,
                     void *const *resident, gs_api_program **program, gs_error *error) noexcept nogil:
    cdef gs_api_arenas *arenas = NULL
    cdef int status
    if program == NULL:
        return refuse(error, GS_BAD_ARGUMENT, 0, 0, b"program is NULL")
    program[0] = NULL
    status = check_plan(<const gs_graph_box *>graph, <const gs_plan_box *>plan, error)
    if status == GS_OK:
        status = arenas_new(&plan, 1, backends, &arenas, error)
    if status == GS_OK:
        status = program_new_in(graph, plan, arenas, resident, program, error)
    arenas_free(arenas)
    return status


cdef int check_plan(const gs_graph_box *graph, const gs_plan_box *plan, gs_error *error) noexcept nogil:
    if graph == NULL or plan == NULL or not graph.finished or graph.trimmed or not made_for(plan, graph):
        return refuse(error, GS_BAD_ARGUMENT, 0, 0,
                      b"graph or plan is NULL, or plan was not made for what graph holds, or graph is trimmed")
    if not Py_IsInitialized():
        return refuse(error, GS_BAD_ARGUMENT, 0, 0, b"Python is not initialised, or has ended")
    return GS_OK


cdef int program_new_in(const gs_api_graph *graph, const gs_api_plan *plan, gs_api_arenas *arenas,
                        void *const *resident, gs_api_program **program, gs_error *error) noexcept nogil:
    cdef const gs_graph *g
    cdef const gs_plan_box *plan_box = <const gs_plan_box *>plan
    cdef gs_program_box *x
    cdef int status
    if program == NULL:
        return refuse(error, GS_BAD_ARGUMENT, 0, 0, b"program is NULL")
    program[0] = NULL
    if arenas == NULL:
        return refuse(error, GS_BAD_ARGUMENT, 0, 0, b"arenas is NULL")
    status = check_plan(<const gs_graph_box *>graph, plan_box, error)
    if status == GS_OK:
        status = check_fit(<const gs_arenas_box *>arenas, plan_box, error)
    if status != GS_OK:
        return status
    x = <gs_program_box *>calloc(1, sizeof(gs_program_box))
    if x == NULL:
        return refuse(error, GS_NO_HOST_MEMORY, sizeof(gs_program_box), 0, b"no host memory for a program")
    g = &(<const gs_graph_box *>graph).g
    x.arenas = <gs_arenas_box *>arenas
    x.backends = x.arenas.backends
    x.n_tensors, x.n_backends = plan_box.c.n_tensors, plan_box.c.n_backends
    status = enter(x, error)
    if status != GS_OK:
        free(x)
        return status
    x.arenas.n_owners += 1
    status = leave(x, fill_program(x, g, plan_box, resident, error))
    if status != GS_OK:
        program_free(<gs_api_program *>x)
        return status
    program[0] = <gs_api_program *>x
    return GS_OK


cdef int fill_program(gs_program_box *x, const gs_graph *g, const gs_plan_box *plan, void *const *resident,
                      gs_error *error) noexcept nogil:
    """Make all parts of a program.  After a failure the caller calls program_free, which frees those that were made."""
    cdef const gs_plan *p = &plan.c
    cdef const int32_t *residents = plan.request.p.resident
    cdef int64_t bytes, n_members = p.group_begin[p.n_groups] if p.n_groups else 0
    cdef int status = write_steps(x, g, p, residents, error)
    if status != GS_OK:
        return status
    count_parts(x, g)
    bytes = program_lay_out(x, n_members, 0)
    x.memory = calloc(max(bytes, 1), 1)
    if x.memory == NULL:
        return refuse(error, GS_NO_HOST_MEMORY, bytes, 0, b"no host memory for a program")
    program_lay_out(x, n_members, <size_t>x.memory)
    x.c.address = x.address
    memset(x.awaited, 0xff, x.c.n_steps * sizeof(int32_t))      # every number becomes -1
    status = place_tensors(x, g, p, residents, resident, error)
    if status == GS_OK:
        status = list_runs(x, g, p, error)
    if status == GS_OK:
        status = make_events(x, error)
    return status


cdef void program_free(gs_api_program *program) noexcept nogil:
    cdef gs_program_box *x = <gs_program_box *>program
    cdef const gs_backend *b
    cdef int32_t k, d
    cdef void *event
    if x == NULL:
        return
    if x.memory != NULL:
        synchronize_all(x, NULL)
        for k in range(x.c.n_steps):
            if x.c.steps[k].awaited and x.awaited[k] >= 0:
                b = &x.backends[x.c.steps[k].backend]
                for d in range(x.depth):
                    event = x.event[<int64_t>x.awaited[k] * x.depth + d]
                    if event != NULL:
                        b.event_free(b.context, event)
        for k in range(x.n_backends):
            if x.follow[k] != NULL:
                x.backends[k].event_free(x.backends[k].context, x.follow[k])
    if x.arenas.current == x:
        x.arenas.current = NULL
    arenas_free(<gs_api_arenas *>x.arenas)
    free(x.memory)
    free(x.steps)
    free(x)


cdef void program_view(const gs_api_program *program, gs_program *view) noexcept nogil:
    if view != NULL and program != NULL:
        view[0] = (<const gs_program_box *>program).c
    elif view != NULL:
        memset(view, 0, sizeof(gs_program))
