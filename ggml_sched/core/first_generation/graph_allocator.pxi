# GraphAllocator: the Python class of graph allocation.
#
# Owns the results of the last allocation, and of earlier measurements.  Invariant: a failed call leaves allocator,
# tallocrs and graph unchanged.  Corresponds to ggml_gallocr.

cdef class AllocationPass:
    """The result of one allocation pass over a graph; immutable once the pass has run."""

    cdef gs_walk walk                   # owned; lifetimes and offsets of all tensors
    cdef list peaks                     # for each arena, the highest end of an allocated range, in bytes
    cdef list before                    # for each arena, its free blocks before the pass

    def __dealloc__(self):
        walk_free(&self.walk)


cdef bint same_but_for_the_end(tuple ours, tuple measured, int64_t room):
    """Whether the free blocks `ours` equal `measured`, those before a measurement, except that the last ends at `room`.

    A buffer with which an allocator measures is larger than any other, so its last free block ends later.
    """
    if len(ours) != len(measured) or ours[:-1] != measured[:-1]:
        return False
    return not ours or ours[-1][0] == measured[-1][0] and ours[-1][0] + ours[-1][1] == room


cdef class GraphAllocator:
    """Allocates all tensors of a graph, with in-place reuse; memory is freed after its last reader (ggml_gallocr).

    Measure a graph with a measuring TensorAllocator first: the graph, and any other of the same wiring whose tensors
    are no larger (and broadcast alike), then fits in a buffer of `max_size` bytes.  The graph itself is never changed.
    Inputs that are allocated here keep their data on the host until their lifetime begins.
    """

    cdef tuple parse_seq
    cdef AllocationPass last
    cdef Graph graph
    cdef dict measured                  # {(wiring, parse_seq): AllocationPass}

    def __cinit__(self):
        self.measured = {}

    def set_parse_seq(self, seq):
        """Allocate nodes in the order of a list of node indices; -1 is a barrier, and memory is freed only there.

        None or an empty list returns to the graph's own order.
        """
        self.parse_seq = tuple(map(_index, seq)) if seq else None

    def alloc_graph(self, TensorAllocator tallocr not None, Graph graph not None):
        """Place every tensor of `graph` that has no address in `tallocr`'s buffer; returns its max_size in bytes.

        A measuring allocator leaves the tensors without address: ask `offset_of`.  Raises OutOfMemory.
        """
        self.allocate(graph, [tallocr], None)
        return tallocr.max_size

    def alloc_graph_n(self, Graph graph not None, table):
        """Like alloc_graph with an allocator for each tensor: `table` maps {tensor: tallocr}, or is a sequence parallel
        to `graph.tensors` (None: a tensor that lives elsewhere).  Returns the allocators' max_size, by first use."""
        cdef list tallocrs = []
        cdef list arena_of = []
        if not isinstance(table, dict) and len(table) != len(graph.tensors):
            raise ValueError(f"a table of {len(table)} allocators for {len(graph.tensors)} tensors")
        for i, t in enumerate(graph.tensors):
            tallocr = table.get(t) if isinstance(table, dict) else table[i]
            if tallocr is None:
                arena_of.append(OUTSIDE)
                continue
            if not isinstance(tallocr, TensorAllocator):
                raise TypeError(f"the allocator of {label(t)} is {tallocr!r}")
            if tallocr not in tallocrs:
                tallocrs.append(tallocr)
            arena_of.append(tallocrs.index(tallocr))
        self.allocate(graph, tallocrs, arena_of)
        found = []
        for tallocr in tallocrs:
            found.append(tallocr.max_size)
        return tuple(found)

    cdef int allocate(self, Graph graph, list tallocrs, list arena_of) except -1:
        cdef AllocationPass p = AllocationPass()
        cdef TensorAllocator tallocr
        cdef gs_arena *arenas = NULL
        cdef gs_blocks *saved = NULL
        cdef uint64_t *inplace = NULL
        cdef int32_t *order = NULL
        cdef int32_t failed = -1
        cdef Py_ssize_t n = len(tallocrs), k
        cdef int status = GS_OK
        cdef bint replayed, measures
        if len(set(tallocrs)) != n:
            raise ValueError("one allocator twice")
        for tallocr in tallocrs:
            tallocr.check_open()
        self.fill(p, graph, tallocrs, arena_of)
        key = (walk_wiring(&p.walk), self.parse_seq)
        arenas = <gs_arena *>calloc(max(n, 1), sizeof(gs_arena))
        saved = <gs_blocks *>calloc(max(n, 1), sizeof(gs_blocks))
        inplace = <uint64_t *>calloc(max(n, 1) * GS_N_OPS, sizeof(uint64_t))
        try:
            if arenas == NULL or saved == NULL or inplace == NULL:
                raise no_host_memory("a graph allocation")
            for k in range(n):
                tallocr = tallocrs[k]
                arenas[k].blocks = &tallocr.blocks
                if blocks_copy(&saved[k], &tallocr.blocks) != GS_OK:
                    raise no_host_memory("a graph allocation")
                fill_inplace_masks(inplace + k * GS_N_OPS, tallocr.buffer.backend, True)
            order = self.read_order(graph)
            p.before = []
            for tallocr in tallocrs:
                p.before.append(tallocr.free_blocks)
            replayed = self.replay(p, tallocrs, key)
            if not replayed:
                with nogil:
                    if order == NULL:
                        status = gallocr_run(&p.walk, arenas, inplace, NULL, 0, False, &failed)
                    else:
                        status = gallocr_run(&p.walk, arenas, inplace, order + 1, order[0], False, &failed)
                if status == GS_NO_HOST_MEMORY:
                    raise no_host_memory("a graph allocation")
                if status != GS_OK:
                    self.raise_out_of_memory(p, graph, tallocrs, failed)
            p.peaks = []
            measures = n > 0
            for tallocr in tallocrs:
                p.peaks.append(tallocr.blocks.max_size)
                measures = measures and tallocr.is_measure
            if measures:
                if not replayed:
                    self.measured[key] = p
            else:
                self.bind(p, graph, tallocrs)
        except BaseException:
            for k in range(n):
                tallocr = tallocrs[k]
                if saved != NULL and saved[k].at != NULL:
                    blocks_free(&tallocr.blocks)
                    tallocr.blocks = saved[k]
                    memset(&saved[k], 0, sizeof(gs_blocks))
            raise
        finally:
            for k in range(n):
                if saved != NULL:
                    blocks_free(&saved[k])
            free(saved)
            free(arenas)
            free(inplace)
            free(order)
        self.last, self.graph = p, graph
        return 0

    cdef int fill(self, AllocationPass p, Graph graph, list tallocrs, list arena_of) except -1:
        """Fill p.walk before the pass: each tensor's arena and size, and the address that some tensors already have."""
        cdef gs_graph *g = &graph.flat
        cdef gs_walk *f = &p.walk
        cdef Tensor t
        cdef TensorAllocator tallocr
        cdef BufferBase buffer
        cdef int32_t i
        cdef Py_ssize_t k
        if walk_alloc(f, NULL, g.n_tensors, g.n_nodes, g.src_begin[g.n_tensors]) != GS_OK:
            raise no_host_memory(f"a graph allocation of {g.n_tensors} tensors")
        walk_from_graph(f, g)
        for i in range(g.n_tensors):
            t = graph.tensors[i]
            if t.context_state.closed:
                raise GraphError(f"{describe(t)} belongs to closed context {t.context_state.name!r}")
            if t.view_src is not None:
                continue
            buffer = t.settled()
            f.p.arena_of[i] = 0 if arena_of is None else arena_of[i]
            if buffer is None:
                if f.p.arena_of[i] == OUTSIDE:
                    raise PlacementError(f"{describe(t)} has neither an address nor an allocator")
                f.p.size[i] = (<TensorAllocator>tallocrs[f.p.arena_of[i]]).size_of(t)
                continue
            # Memory in an allocator's own buffer may be reused and freed; other memory may not.
            f.p.state[i] = GS_STATE_ADDRESSED
            f.p.arena_of[i] = OUTSIDE
            for k in range(len(tallocrs)):
                tallocr = tallocrs[k]
                if tallocr.buffer is buffer and t in tallocr.live:
                    f.p.arena_of[i] = <int32_t>k
                    f.p.size[i] = tallocr.live[t]
                    f.p.offset[i] = t._offset - tallocr.start
                elif tallocr.buffer is buffer and (t._lease is tallocr.graph_lease or t._lease is tallocr.early_lease):
                    # Allocated with an earlier graph: it keeps its address until the allocator is reset.
                    f.p.offset[i] = t._offset - tallocr.start
        for i in range(g.n_tensors):
            if g.view_src[i] >= 0:
                f.p.arena_of[i] = f.p.arena_of[g.view_src[i]]
        return 0

    cdef int32_t *read_order(self, Graph graph) except? NULL:
        """The parse sequence (set_parse_seq) as an array [count, positions...]; NULL without one."""
        cdef int32_t *order
        cdef Py_ssize_t i
        if self.parse_seq is None:
            return NULL
        for position in self.parse_seq:
            if not -1 <= position < len(graph.nodes):
                raise ValueError(f"parse sequence: {position} is not one of {len(graph.nodes)} nodes")
        order = <int32_t *>malloc((len(self.parse_seq) + 1) * sizeof(int32_t))
        if order == NULL:
            raise no_host_memory("a parse sequence")
        order[0] = <int32_t>len(self.parse_seq)
        for i in range(len(self.parse_seq)):
            order[i + 1] = self.parse_seq[i]
        return order

    cdef bint replay(self, AllocationPass p, list tallocrs, object key) except -1:
        """Replay the offsets measured for `key`, if free blocks are as they were then and no tensor is larger.

        Returns whether they were replayed.
        """
        cdef AllocationPass m = self.measured.get(key)
        cdef TensorAllocator tallocr
        cdef gs_walk *f
        cdef int32_t i
        cdef Py_ssize_t k
        if m is None or not walk_can_replay(&p.walk, &m.walk.p, NULL):
            return False
        for k in range(len(tallocrs)):
            tallocr = tallocrs[k]
            if tallocr.room < m.peaks[k] or not same_but_for_the_end(p.before[k], m.before[k], tallocr.room):
                return False
        walk_replay(&p.walk, &m.walk.p)
        f = &m.walk
        for k in range(len(tallocrs)):
            tallocr = tallocrs[k]
            tallocr.blocks.max_size = max(tallocr.blocks.max_size, <int64_t>m.peaks[k])
            for i in range(f.p.n):
                if f.p.arena_of[i] == k and f.p.birth[i] < 0 and f.p.state[i] & GS_STATE_FREED:
                    if blocks_give(&tallocr.blocks, f.p.offset[i], f.p.size[i]) != GS_OK:
                        raise no_host_memory("a graph allocation")
            for i in range(f.p.n):
                if f.p.arena_of[i] == k and f.p.birth[i] >= 0 and not f.p.state[i] & GS_STATE_FREED:
                    if blocks_cut(&tallocr.blocks, f.p.offset[i], f.p.size[i]) != GS_OK:
                        raise no_host_memory("a graph allocation")
        return True

    cdef int raise_out_of_memory(self, AllocationPass p, Graph graph, list tallocrs, int32_t failed) except -1:
        cdef TensorAllocator tallocr = tallocrs[p.walk.p.arena_of[failed]]
        largest = blocks_largest(&tallocr.blocks)
        size = p.walk.p.size[failed]
        raise OutOfMemory(
            f"backend {tallocr.buffer.backend.name!r}: {describe(graph.tensors[failed])} needs {size} bytes, the "
            f"largest free block of {tallocr.room} bytes has {largest}", tallocr.buffer.backend.name, size, largest)

    cdef int bind(self, AllocationPass p, Graph graph, list tallocrs) except -1:
        """Give the tensors their addresses; undone if a buffer's init_tensor raises."""
        cdef Tensor t
        cdef TensorAllocator tallocr
        cdef int32_t i
        cdef list bound = []
        cdef gs_walk *f = &p.walk
        for t in graph.tensors:
            t.settle()
        try:
            for i in range(f.p.n):
                t = graph.tensors[i]
                if t.view_src is None and t.settled() is None and f.p.offset[i] >= 0:
                    tallocr = tallocrs[f.p.arena_of[i]]
                    if tallocr.is_measure:
                        continue
                    early = t.layout.op == GS_OP_NONE and not f.p.state[i] & GS_STATE_LATE
                    t.bind(tallocr.buffer, tallocr.start + f.p.offset[i],
                           tallocr.early_lease if early else tallocr.graph_lease)
                    bound.append(t)
                    tallocr.buffer.init_tensor(t)
        except BaseException:
            for t in bound:
                t.bind(None, 0, None)
            raise
        # Inputs that were allocated one by one and freed by the pass keep their address, but no longer own the memory.
        for i in range(f.p.n):
            if f.p.state[i] & GS_STATE_FREED and f.p.birth[i] < 0:
                tallocr = tallocrs[f.p.arena_of[i]]
                tallocr.live.pop(graph.tensors[i], None)
        return 0

    def offset_of(self, Tensor t not None):
        """The offset of t, or of a view, in bytes from the buffer's first aligned address; None for a tensor that lives
        elsewhere or that nothing in the graph uses.  GraphError for a tensor of another graph."""
        cdef int64_t offset = self.last_pass().walk.p.offset[self.find(t)]
        return None if offset < 0 else offset

    def inplace_root(self, Tensor t not None):
        """The tensor whose memory `t` shares: the source that it reuses in place, or the root that it views; None for
        memory of its own."""
        cdef int32_t root = self.last_pass().walk.p.root[self.find(t)]
        return None if root < 0 else self.graph.tensors[root]

    cdef AllocationPass last_pass(self):
        if self.last is None:
            raise GraphError("no graph has been allocated yet")
        return self.last

    cdef int32_t find(self, Tensor t) except -1:
        cdef int32_t i
        self.last_pass()
        i = self.graph.id_of(t)
        if i < 0:
            raise GraphError(f"{describe(t)} is not part of the allocated graph")
        return i
