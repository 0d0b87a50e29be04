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


cdef int run_segment(Segment segment, Device device, void *pool) noexcept nogil:
    cdef gx_cplan plan
    if device.has_host_plans:
        plan = segment.plan
        plan.work_data = <uint8_t *>aligned(device.work)
        plan.threadpool = pool
        return device.api.call.graph_compute(segment.graph, &plan)
    return device.api.call.backend_graph_compute(device.backend, segment.graph)


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
    cdef Segment segment
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
    for segment in program.segments:
        for leaf, written in segment.loads:
            apply_staged(leaf, written)
        if device.has_host_plans and segment.n_threads != n:
            segment.n_threads = 0       # if `reserve` raises, the next run makes the plan again
            segment.plan = device.api.call.graph_plan(segment.graph, n, device.pool)
            device.reserve(segment.plan.work_size)
            if program.own is not None:
                device.reserve(<size_t>program.own.products.work_size(n))
            segment.n_threads = n
        if program.own is not None:
            program.own.products.begin(<char *>aligned(device.work), n)
        if segment.n_ids and not device.host:
            fetch_ids(program, segment)
        k = -1
        with nogil:
            for k in range(segment.n_ids):
                if gs_bad_id(segment.ids[k].layout, segment.ids[k].data, segment.ids[k].n_rows, &bad):
                    break
            else:
                k = -1
            status = 0 if k >= 0 else run_segment(segment, device, device.pool)
        if k >= 0:
            raise BackendError(f"{program.name_of(<Py_ssize_t>segment.ids[k].node)}: id {bad} does not name one of "
                               f"{segment.ids[k].n_rows} rows")
        if status != 0:
            raise BackendError(f"backend {program.backend.name!r}: ggml failed to compute "
                               f"{program.table.n} nodes (status {status})")
    return 0


cdef int fetch_ids(GraphPlan program, Segment segment) except -1:
    """Copy the row ids of a segment from the device to the host, where they are checked."""
    cdef size_t total = 0, at = 0
    cdef gx_tensor *made
    cdef int k
    for k in range(segment.n_ids):
        total += <size_t>program.table.nodes[segment.ids[k].tensor].layout.nbytes
    free(program.fetched)
    program.fetched = <uint8_t *>calloc(total + 1, 1)
    if program.fetched == NULL:
        raise no_host_memory(f"{total} bytes of ids")
    for k in range(segment.n_ids):
        made = &program.made[segment.ids[k].tensor]
        segment.ids[k].data = <const char *>(program.fetched + at)
        program.device.api.call.backend_tensor_get(made, program.fetched + at, 0, <size_t>
                                                   program.table.nodes[segment.ids[k].tensor].layout.nbytes)
        at += <size_t>program.table.nodes[segment.ids[k].tensor].layout.nbytes
    return 0
