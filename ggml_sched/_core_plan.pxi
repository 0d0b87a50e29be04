# PlanData: what a planner decided, as flat arrays, independent of any one graph object.
#
# Immutable after `make_plan`; equal graphs share it.  Ids below n_tensors are the
# graph's, copies follow, then further slots of copies in a ring.  Offsets count from the start of their backend's buffer.

cdef class PlanData:
    """The decisions of one planning run.  `ggml_sched.plan.Plan` joins it with a graph."""

    cdef gs_flow flow                   # owned
    cdef gs_routes routes               # owned
    cdef int32_t *assign                # owned; backend index of each graph tensor
    cdef unsigned char *why             # owned; WHY_* of each
    cdef bint knows_exclusive           # found out when first asked: planning alone does not need it
    cdef readonly int32_t n_tensors
    cdef readonly tuple chunk_sizes     # for each backend, in order, the bytes of each of its buffers
    cdef readonly tuple buffer_sizes    # their sums
    cdef readonly tuple methods         # for each backend, how its offsets were chosen
    cdef tuple strides                  # for each backend the distance of its chunks' offsets, 0: one chunk
    cdef readonly tuple live_bytes      # largest sum of live bytes, in backend order

    def __cinit__(self):
        memset(&self.flow, 0, sizeof(gs_flow))
        memset(&self.routes, 0, sizeof(gs_routes))
        self.assign = NULL
        self.why = NULL

    def __dealloc__(self):
        flow_free(&self.flow)
        routes_free(&self.routes)
        free(self.assign)
        free(self.why)

    @property
    def n_splits(self):
        return self.routes.split_backend.n

    @property
    def n_copies(self):
        """Distinct copies: memory for copied tensors."""
        return self.routes.copy_like.n

    @property
    def splits(self):
        """Tuples (backend, start, stop, inputs): node positions, and indices of the copies made first."""
        cdef gs_routes *w = &self.routes
        cdef list found = []
        cdef int32_t i, first = 0
        for i in range(w.split_backend.n):
            inputs = tuple([w.inputs.at[k] for k in range(first, w.split_inputs.at[i])])
            first = w.split_inputs.at[i]
            found.append((w.split_backend.at[i], w.split_start.at[i], w.split_stop.at[i], inputs))
        return tuple(found)

    @property
    def copies(self):
        """Tuples (tensor id whose layout it has, backend), one for each distinct copy."""
        cdef gs_routes *w = &self.routes
        return tuple([(w.copy_like.at[i], w.copy_backend.at[i]) for i in range(w.copy_like.n)])

    @property
    def kept(self):
        """One bool for each distinct copy: made once, and kept while its source stays unchanged."""
        return tuple([bool(self.routes.copy_kept.at[i]) for i in range(self.routes.copy_kept.n)])

    @property
    def ring(self):
        """For each id beyond the copies, which are the ring's further slots: the index of its copy."""
        return tuple([self.routes.more_copy.at[k] for k in range(self.routes.more_copy.n)])

    def copy_of(self, int32_t i):
        """The index of the copy that id i, not a graph tensor, is a place of."""
        self.check(i)
        i -= self.n_tensors
        return i if i < self.routes.copy_like.n else self.routes.more_copy.at[i - self.routes.copy_like.n]

    @property
    def write_backs(self):
        """Pairs (tensor id of a node that writes through a copy, index of that copy)."""
        cdef gs_routes *w = &self.routes
        return tuple([(w.back_node.at[i], w.back_copy.at[i]) for i in range(w.back_node.n)])

    @property
    def sequence(self):
        """Ids in execution order, copies (n_tensors + c) before the nodes of their split."""
        return tuple([self.flow.seq[i] for i in range(self.flow.n_seq)])

    def backend_index(self, int32_t i):
        """Index of the backend that id i lives on or runs on, -1 if nothing uses it."""
        self.check(i)
        return self.flow.home[i] if i >= self.n_tensors else self.assign[i]

    def memory_index(self, int32_t i):
        """Index of the backend whose arena holds id i, -1 for memory outside the plan."""
        self.check(i)
        return self.flow.home[i]

    def offset(self, int32_t i):
        """Bytes from the start of the backend's buffer (of chunk `chunk(i)`), -1 outside the plan."""
        self.check(i)
        if self.flow.offset[i] < 0 or not self.strides[self.flow.home[i]]:
            return self.flow.offset[i]
        return self.flow.offset[i] % self.strides[self.flow.home[i]]

    def chunk(self, int32_t i):
        """Which of the backend's buffers holds id i: 0 unless a maximum buffer size made several."""
        self.check(i)
        if self.flow.offset[i] < 0 or not self.strides[self.flow.home[i]]:
            return 0
        return self.flow.offset[i] // self.strides[self.flow.home[i]]

    def live_at_peak(self, int32_t backend):
        """Ids of the allocations alive on a backend when most bytes are, largest first."""
        cdef gs_flow *f = &self.flow
        steps = [0] * (f.n_seq + 2)
        owners = [i for i in range(f.n) if f.home[i] == backend and f.birth[i] >= 0]
        for i in owners:
            steps[f.birth[i]] += f.size[i]
            steps[f.death[i] + 1] -= f.size[i]
        totals = list(itertools.accumulate(steps))
        peak = max(range(len(totals)), key=totals.__getitem__)
        alive = [i for i in owners if f.birth[i] <= peak <= f.death[i]]
        return sorted(alive, key=lambda i: (-f.size[i], i))

    def size(self, int32_t i):
        """Aligned bytes that id i takes (0 for views and what took over memory)."""
        self.check(i)
        return 0 if self.flow.root[i] >= 0 else self.flow.size[i]

    def trimmed(self, int32_t i):
        """(position, bytes): when a smaller heir gave the tail of i's memory back, and what stayed; None if not."""
        self.check(i)
        if self.flow.birth[i] < 0 or self.flow.rest[i] == self.flow.size[i]:
            return None
        return self.flow.trimmed[i], self.flow.rest[i]

    def root(self, int32_t i):
        """The id whose memory i shares, as a view or in place; -1 for memory of its own."""
        self.check(i)
        return self.flow.root[i]

    def took_over(self, int32_t i):
        """Whether i writes over its root's memory in place."""
        self.check(i)
        return bool(self.flow.state[i] & TOOK_OVER)

    def is_late(self, int32_t i):
        """Whether leaf i begins its life where something else lived before."""
        self.check(i)
        return bool(self.flow.state[i] & LATE)

    def is_exclusive(self, int32_t i):
        """Whether leaf or copy i has memory that nothing else uses, so that its data survives computes."""
        self.check(i)
        if not self.knows_exclusive:
            flow_mark_exclusive(&self.flow)
            self.knows_exclusive = True
        return bool(self.flow.state[i] & EXCLUSIVE)

    def is_overwritten(self, int32_t i):
        """Whether something else has come to live in node i's memory by the end of a compute."""
        cdef gs_flow *f = &self.flow
        cdef int32_t k, owner, at = -1
        cdef int64_t size
        self.check(i)
        if f.offset[i] < 0:
            return False
        owner = flow_owner(f, i)
        for k in range(f.n_seq):
            if f.seq[k] == i:
                at = k
            elif at >= 0 and f.state[f.seq[k]] & TOOK_OVER and flow_owner(f, f.seq[k]) == owner:
                return True
        size = f.rest[owner] if at >= f.trimmed[owner] else f.size[owner]
        for k in range(f.n):
            if (k != owner and f.home[k] == f.home[owner] and f.birth[k] > at and f.offset[k] < f.offset[owner] + size
                    and f.offset[owner] < f.offset[k] + f.size[k]):
                return True
        return False

    def lifetime(self, int32_t i):
        """(birth, death): positions in `sequence` between which the memory of i is taken; None outside the plan."""
        self.check(i)
        i = flow_owner(&self.flow, i)
        if self.flow.birth[i] < 0:
            return None
        return self.flow.birth[i], self.flow.death[i]

    def sources(self, int32_t i):
        """The ids that i reads, copies put in."""
        self.check(i)
        return tuple([self.flow.src[k] for k in range(self.flow.src_begin[i], self.flow.src_begin[i + 1])])

    def reason(self, int32_t i):
        """Why graph tensor i is where it is, a sentence."""
        self.check(i)
        return _WHY[self.why[i]] if i < self.n_tensors else "a copy"

    cdef tuple measure_chunks(self, int32_t backend, const gs_blocks *blocks):
        """The bytes that each chunk of a backend's arena must hold."""
        cdef int64_t *sizes
        cdef int32_t k
        if blocks.n_chunks <= 1:
            return (blocks.max_size,)
        sizes = <int64_t *>calloc(blocks.n_chunks, sizeof(int64_t))
        if sizes == NULL:
            raise MemoryError(f"{blocks.n_chunks} chunks of an arena")
        fill_chunks(&self.flow, backend, blocks, sizes)
        found = tuple([sizes[k] for k in range(blocks.n_chunks)])
        free(sizes)
        return found

    cdef int check(self, int32_t i) except -1:
        if not 0 <= i < self.flow.n:
            raise IndexError(f"id {i} of {self.flow.n}")
        return 0


def make_plan(Request request not None, str policy, bint stream=False, int32_t n_slots=1):
    """Run the passes of a policy; raises UnsupportedOp, OutOfMemory, GraphError naming the tensor.

    `stream`: no foreign weight is kept on the backend that reads it; all take turns in the same memory.
    `n_slots`: places for each copy between backends (policy "default").
    """
    cdef PlanData p = PlanData.__new__(PlanData)
    cdef gs_request *r = &request.c
    cdef Devices devices = request.devices
    cdef int64_t *alignment = <int64_t *>malloc(devices.n * sizeof(int64_t))
    cdef gs_allocation a
    cdef int32_t i
    cdef int status
    memset(&a, 0, sizeof(gs_allocation))
    a.seed = policy == "seed"
    a.r = r
    a.inplace = devices.inplace_first if a.seed else devices.inplace
    a.alignment = alignment
    a.arenas = <gs_arena *>calloc(devices.n, sizeof(gs_arena))
    a.blocks = <gs_blocks *>calloc(devices.n, sizeof(gs_blocks))
    a.methods = <int32_t *>calloc(devices.n, sizeof(int32_t))
    a.failed = -1
    p.n_tensors = r.g.n_tensors
    p.assign = <int32_t *>malloc(max(r.g.n_tensors, 1) * sizeof(int32_t))
    p.why = <unsigned char *>calloc(max(r.g.n_tensors, 1), 1)
    try:
        if (alignment == NULL or a.arenas == NULL or a.blocks == NULL or a.methods == NULL or p.assign == NULL
                or p.why == NULL):
            raise MemoryError(f"planning {r.g.n_tensors} tensors")
        for i in range(devices.n):
            alignment[i] = (<BackendBase>devices.backends[i]).alignment
            limit = devices.backends[i].max_buffer_size
            if limit is not None:
                a.blocks[i].chunk = min(max(_index(limit), 1), <int64_t>1 << 48)
        request.ask()
        with nogil:
            status = decide(p, r, stream, 1 if a.seed else n_slots, &a)
        if status != GS_OK:
            raise_planning_error(status, request, a.failed)
        p.strides = tuple([a.blocks[i].stride if a.blocks[i].n_chunks > 1 else 0 for i in range(devices.n)])
        p.chunk_sizes = tuple([p.measure_chunks(i, &a.blocks[i]) for i in range(devices.n)])
        p.buffer_sizes = tuple([sum(sizes) for sizes in p.chunk_sizes])
        p.methods = tuple([_PACK_METHODS[a.methods[i] - OFFSETS_PACKED] if a.methods[i] else "best fit"
                           for i in range(devices.n)])
        p.live_bytes = tuple([a.arenas[i].live_bytes for i in range(devices.n)])
        flow_settle(&p.flow)
    finally:
        if a.blocks != NULL:
            for i in range(devices.n):
                blocks_free(&a.blocks[i])
        free(a.blocks)
        free(a.arenas)
        free(a.methods)
        free(alignment)
    return p


cdef int decide(PlanData p, const gs_request *r, bint stream, int32_t n_slots, gs_allocation *a) noexcept nogil:
    """Placement, splits and copies, lifetimes, offsets: one after the other."""
    cdef int status = routes_init(&p.routes, r.g)
    if status == GS_OK and a.seed:
        status = plan_seed(r, p.assign, p.why, &p.routes, &a.failed)
    elif status == GS_OK:
        status = place_default(r, p.assign, p.why, &a.failed)
        if status == GS_OK:
            status = tighten_boundaries(r, p.assign, p.why)
        if status == GS_OK:
            status = split_default(r, p.assign, p.why, stream, &p.routes)
        if status == GS_OK:
            routes_inputs_first(&p.routes, r.g)
            status = routes_add_slots(&p.routes, r, n_slots)
    if status != GS_OK:
        return status
    a.assign = p.assign
    a.routes = &p.routes
    a.flow = &p.flow
    return allocate(a)


cdef int raise_planning_error(int status, Request request, int32_t failed) except -1:
    cdef tuple backends = request.devices.backends
    cdef Tensor t
    if status == GS_NO_HOST_MEMORY or failed < 0:
        raise MemoryError(f"planning {request.c.g.n_tensors} tensors")
    t = request.graph.tensors[failed if failed < request.c.g.n_tensors else 0]
    if status == GS_UNSUPPORTED_OP:
        names = ", ".join([b.name for b in backends])
        raise UnsupportedOp(f"{describe(t)}: none of the backends {names} supports it")
    if status == GS_BAD_PLACEMENT:
        raise PlacementError(f"{describe(t)} has memory on backend {t.backend.name!r}, which does not support it")
    if status == GS_OUT_OF_MEMORY:
        for b in backends:
            if b.max_buffer_size is not None and t.layout.nbytes > b.max_buffer_size - b.max_buffer_size % b.alignment:
                raise OutOfMemory(f"{describe(t)}: {t.layout.nbytes} bytes exceed the maximum buffer size "
                                  f"{b.max_buffer_size} of backend {b.name!r}", b.name, t.layout.nbytes, b.max_buffer_size)
    raise OutOfMemory(f"{describe(t)}: sizes leave the 64-bit range", None, t.layout.nbytes, None)
