# Runs a GraphPlan (once for each compute), and answers support queries in C.

cdef class GgmlBase(BackendBase):
    """Base class of `GgmlBackend` that answers support queries in C, because the planner makes thousands of them."""

    cdef Device device
    cdef bint overridden       # a subclass overrides supports_op

    def adopt(self, Device device not None):
        """Use this device to compute and to answer support queries."""
        self.device = device
        self.overridden = type(self).supports_op is not GgmlBase.supports_op

    def supports_op(self, node):
        """Whether the device computes the node, and correctly (supported_ops.h)."""
        cdef NodeTable table = NodeTable((node,))
        return self.answer(table.node(0))

    cdef bint answer(self, const gs_node *node) noexcept nogil:
        if self.device is None:
            return False
        if node.op == GS_OP_NONE or op_is_view(node.op) or gs_count(node.layout.ne) == 0:
            return True
        if not (self.device.api.has_op(node) and gx_supports(node)):
            return False
        return self.device.host or self.device.supports(node)

    cdef int c_supports_op(self, const gs_node *node) noexcept nogil:
        return -1 if self.overridden else self.answer(node)


cdef int run_part(GraphPart part, Device device, void *pool) noexcept nogil:
    cdef gx_cplan plan
    if device.has_host_plans:
        plan = part.plan
        plan.work_data = <uint8_t *>aligned(device.work)
        plan.threadpool = pool
        return device.api.call.graph_compute(part.graph, &plan)
    return device.api.call.backend_graph_compute(device.backend, part.graph)


def run_graph_plan(GraphPlan program not None):
    """Compute once; BackendError for an id that names no row, PlacementError for a buffer that is closed."""
    cdef Tensor t
    try:
        replay(program)
    finally:
        for t in program.written:       # also after a failure: the nodes before it have written
            t.version += 1


cdef int replay(GraphPlan program) except -1:
    cdef Device device = program.device
    cdef GraphPart part
    cdef BufferBase buffer
    cdef RepackedWeight packed
    cdef Tensor t
    cdef list held = []         # keeps memory alive: another thread may close a buffer while kernels run
    cdef int status, k, n = device.n_threads
    cdef int64_t bad = 0
    check_graph_plan(program.backend.name, program.freed, program.buffers)
    for buffer in program.buffers if device.host else ():
        held.append(getattr(buffer, "memory", None))
    for t, packed, address in program.packs:
        if not packed.is_of(t):
            packed.load(t, <void *><uintptr_t>address)
    for part in program.parts:
        for leaf, written in part.loads:
            apply_staged(leaf, written)
        if device.has_host_plans and part.n_threads != n:
            part.n_threads = 0          # if `reserve` raises, the next run makes the plan again
            part.plan = device.api.call.graph_plan(part.graph, n, device.pool)
            device.reserve(part.plan.work_size)
            if program.own is not None:
                device.reserve(<size_t>program.own.products.work_size(n))
            part.n_threads = n
        if program.own is not None:
            program.own.products.begin(<char *>aligned(device.work), n)
        if part.n_ids and not device.host:
            fetch_ids(program, part)
        k = -1
        with nogil:
            for k in range(part.n_ids):
                if gs_bad_id(part.ids[k].layout, part.ids[k].data, part.ids[k].n_rows, &bad):
                    break
            else:
                k = -1
            status = 0 if k >= 0 else run_part(part, device, device.pool)
        if k >= 0:
            raise BackendError(f"{program.name_of(<Py_ssize_t>part.ids[k].node)}: id {bad} does not name one of "
                               f"{part.ids[k].n_rows} rows")
        if status != 0:
            raise BackendError(f"backend {program.backend.name!r}: ggml failed to compute "
                               f"{program.table.n} nodes (status {status})")
    return 0


cdef int fetch_ids(GraphPlan program, GraphPart part) except -1:
    """Copy the row ids of a part from the device to the host, where they are checked."""
    cdef size_t total = 0, at = 0
    cdef gx_tensor *made
    cdef int k
    for k in range(part.n_ids):
        total += <size_t>program.table.nodes[part.ids[k].tensor].layout.nbytes
    free(program.fetched)
    program.fetched = <uint8_t *>calloc(total + 1, 1)
    if program.fetched == NULL:
        raise no_host_memory(f"{total} bytes of ids")
    for k in range(part.n_ids):
        made = &program.made[part.ids[k].tensor]
        part.ids[k].data = <const char *>(program.fetched + at)
        program.device.api.call.backend_tensor_get(made, program.fetched + at, 0, <size_t>
                                                   program.table.nodes[part.ids[k].tensor].layout.nbytes)
        at += <size_t>program.table.nodes[part.ids[k].tensor].layout.nbytes
    return 0
