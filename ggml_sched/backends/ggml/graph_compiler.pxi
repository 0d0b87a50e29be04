# GraphPlan: the nodes of a split as ggml graphs over the addresses of the scheduler's plan.
#
# Owns the ggml tensors and graphs, in blocks of its own memory.  Invariant: supported_ops.h admits every node, and
# every address lies inside an open buffer of the backend, so that no check of ggml's aborts the process.
#
# A split is one ggml graph, unless something must be done between two nodes: row ids that an earlier node of the split
# computed are checked before a node uses them, and inputs of a GraphAllocator are loaded.  A source that overlaps the
# result of its node, in a way that the kernel does not tolerate, is copied first: a node computes as if it read
# all sources before it wrote.
#
# ggml fuses nodes only if the graph has counts of their uses.  Nodes are added here without these counts, so that ggml
# fuses none: it would not check whether the memory of fused nodes overlaps, as it may in a packed arena.

cdef class GraphPart:
    """Consecutive nodes of a split between which nothing must be checked or loaded: one ggml graph."""

    cdef Py_ssize_t first           # index of its first node in the split
    cdef list loads                 # pairs of `staged_leafs`: leafs to load before the part runs
    cdef gx_ids *ids                # owned; row ids to check before the part runs
    cdef int n_ids
    cdef void *graph                # ggml_cgraph
    cdef gx_cplan plan              # ggml's work size and threads for the graph
    cdef int n_threads              # number of threads that `plan` is for; 0: `plan` was not made yet

    def __dealloc__(self):
        PyMem_Free(self.ids)


# no_gc_clear: `release` needs the device, so the garbage collector must not clear the field `device` before.
@cython.no_gc_clear
cdef class GraphPlan:
    """`GraphPlan(backend, device, nodes)`: compiles the nodes.  Raises UnsupportedOp, PlacementError,
    BackendError or OutOfMemory, which name the node."""

    cdef object backend
    cdef readonly Device device
    cdef NodeTable table            # the nodes, then the leafs; keeps the tensors alive
    cdef gx_tensor *made            # owned; a ggml tensor for each tensor of the table, then the copied sources
    cdef uint8_t *block             # owned; memory in which ggml makes its graphs
    cdef void *context              # the ggml_context over the block
    cdef uint8_t *copies            # owned; memory of copied sources
    cdef uint8_t *fetched           # owned; row ids, copied from a device to be checked
    cdef list parts                 # in execution order
    cdef list packs                 # (weight, RepackedWeight, address of the plain data)
    cdef OwnProducts own            # None: ggml computes all products
    cdef list written               # roots outside the arenas that nodes write (caches): each run raises their version
    cdef tuple buffers              # the buffers of all tensors, kept alive
    cdef BufferBase placed          # the buffer of the last tensor in check_place, as neighbours mostly share one
    cdef readonly bint freed

    def __cinit__(self, backend, Device device not None, tuple nodes):
        cdef list work = []
        cdef Tensor t
        for t in nodes:
            if not op_is_view(t.layout.op) and t.layout.op != GS_OP_NONE and gs_count(t.layout.ne) > 0:
                work.append(t)
        self.backend, self.device = backend, device
        self.table = NodeTable(work)
        self.parts, self.packs, self.written = [], [], []
        self.check_places()
        self.make_tensors()
        self.make_parts()
        self.use_packed_weights()
        if self.device.has_host_plans and self.device.api.custom >= 0 and backend.own_products:
            self.own = own_products(self.table, self.made, self.device, backend.own_products)
        self.make_graphs()

    def __dealloc__(self):
        self.release()

    cdef void release(self) noexcept:
        if self.context != NULL:
            self.device.api.call.free(self.context)
            self.context = NULL
        free(self.made)
        free(self.block)
        free(self.copies)
        free(self.fetched)
        self.made, self.block, self.copies, self.fetched = NULL, NULL, NULL, NULL

    def free(self):
        """Release everything; idempotent."""
        self.freed = True
        self.parts, self.packs, self.written, self.buffers, self.own = [], [], [], (), None
        self.release()

    # -- checks of nodes and of their buffers -----------------------------------------

    cdef str name_of(self, Py_ssize_t i):
        cdef Tensor t = self.table.tensors[i]
        return f"backend {self.backend.name!r}: node {label(t)} ({t.op})"

    cdef int check_places(self) except -1:
        """Check that nodes are supported, and that tensors are in buffers that ggml may use."""
        cdef dict buffers = {}
        cdef BufferBase last = None     # the buffer of the node before: neighbours mostly share one
        cdef bint writable = False
        cdef Tensor t
        cdef Py_ssize_t i, n = len(self.table.tensors)
        cdef gs_node *node
        for i in range(self.table.n):
            node = &self.table.nodes[i]
            t = self.table.tensors[i]
            if not (self.device.api.has_op(node) and gx_supports(node)):
                raise UnsupportedOp(f"{self.name_of(i)} is not one that this backend computes: "
                                    f"{', '.join([repr(s) for s in t.src])} to {t!r}")
            self.check_place(t, i, buffers)
            if last is None or (t if t.view_src is None else t.view_src)._buffer is not last:
                last = t.c_buffer()
                writable = buffers[last]
            if not writable:
                raise BackendError(f"{self.name_of(i)}: its memory is read-only")
        for i in range(self.table.n, n):
            t = self.table.tensors[i]
            self.check_place(t, i, buffers)
        self.buffers, self.placed = tuple(buffers), None
        return 0

    cdef int check_place(self, Tensor t, Py_ssize_t i, dict buffers) except -1:
        cdef BufferBase buffer = t.c_buffer()
        cdef int64_t offset
        if buffer is None:
            raise PlacementError(f"{self.reader_of(i)}: {label(t)} has no address")
        if buffer is not self.placed and buffer not in buffers:
            if not self.backend.supports_buffer(buffer):
                raise PlacementError(f"{self.reader_of(i)}: {label(t)} is on backend "
                                     f"{buffer.backend.name!r}")
            if buffer.closed:
                raise PlacementError(f"{self.reader_of(i)}: the buffer of {label(t)} is closed")
            buffers[buffer] = buffer.writable
        self.placed = buffer
        offset = t.c_offset()
        if not gs_range_fits(offset, t.layout.nbytes, buffer.size):
            raise PlacementError(f"{self.reader_of(i)}: {label(t)} of {t.layout.nbytes} bytes at "
                                 f"{offset} lies outside its buffer of {buffer.size}")
        return 0

    cdef str reader_of(self, Py_ssize_t i):
        """The node named in a message about tensor i: the tensor itself, or the first node that reads it."""
        cdef Py_ssize_t k, s
        if i < self.table.n:
            return self.name_of(i)
        for k in range(self.table.n):
            for s in range(self.table.nodes[k].n_src):
                if self.table.nodes[k].src[s] == &self.table.nodes[i]:
                    return self.name_of(k)
        return f"backend {self.backend.name!r}"

    # -- tensors ------------------------------------------------------------------------

    cdef int make_tensors(self) except -1:
        """Make a ggml tensor for each tensor of the table, and for each source that must be copied first."""
        cdef Py_ssize_t i, k, n = len(self.table.tensors)
        cdef list clashes = []
        cdef gs_node *node
        cdef gx_tensor *made
        cdef void *buffer = self.device.host_buffer
        cdef Tensor t
        cdef size_t total = 0, at = 0
        for i in range(self.table.n):
            node = &self.table.nodes[i]
            for k in range(node.n_src):
                if gs_clashes(node, <int>k, gx_tolerates(node.op)):
                    clashes.append((i, k))
        self.made = <gx_tensor *>calloc(max(n + len(clashes), 1), sizeof(gx_tensor))
        if self.made == NULL:
            raise no_host_memory(f"{n} tensors")
        for i in range(n):
            node, made = &self.table.nodes[i], &self.made[i]
            self.device.api.fill_layout(made, &node.layout)
            made.data = node.data
            if not self.device.host:
                t = self.table.tensors[i]
                buffer = <void *><uintptr_t>t.c_buffer().handle
            made.buffer = buffer
            if i < self.table.n:
                self.device.api.fill_op(made, node)
                for k in range(node.n_src):
                    if node.src[k] != NULL:
                        made.src[k] = &self.made[node.src[k] - self.table.nodes]
                if is_copy(node.op) and made.src[1] == NULL:
                    made.src[1] = made          # as ggml_cast does: kernels read the destination's layout from src[1]
        if clashes:
            self.make_copies(clashes)
        return 0

    cdef int make_copies(self, list clashes) except -1:
        """For each pair (i, k) of `clashes`, let node i read a dense copy of its source k.  The copy is a CONT node of
        the ggml graph, which runs before node i."""
        cdef Py_ssize_t i, k, c = 0, n = len(self.table.tensors)
        cdef size_t total = 0, at = 0, size
        cdef gx_tensor *made
        cdef gs_layout layout
        if not self.device.host:
            i, k = clashes[0]
            raise UnsupportedOp(f"{self.name_of(i)}: its result overlaps source {k}")
        for i, k in clashes:
            dense_like(&layout, &self.table.nodes[i].src[k].layout)
            if not gx_copy(&layout, &self.table.nodes[i].src[k].layout):
                raise UnsupportedOp(f"{self.name_of(i)}: its result overlaps source {k}, of which ggml makes no copy")
            total += (<size_t>layout.nbytes + 63) // 64 * 64
        self.copies = <uint8_t *>calloc(total + 64, 1)
        if self.copies == NULL:
            raise no_host_memory(f"{total} bytes of copies")
        at = <uintptr_t>aligned(self.copies) - <uintptr_t>self.copies
        for i, k in clashes:
            made = &self.made[n + c]
            dense_like(&layout, &self.table.nodes[i].src[k].layout)
            self.device.api.fill_layout(made, &layout)
            made.op, made.flags = self.device.api.op[GS_OP_CONT], GX_FLAG_COMPUTE
            made.buffer, made.data = self.device.host_buffer, self.copies + at
            made.src[0] = &self.made[self.table.nodes[i].src[k] - self.table.nodes]
            self.made[i].src[k] = made
            at += (<size_t>layout.nbytes + 63) // 64 * 64
            c += 1
        return 0

    # -- parts ----------------------------------------------------------------------------

    cdef int make_parts(self) except -1:
        """Cut the split into parts, each one ggml graph, and list the row ids to check before each.

        A part begins at the first node, at a node before which leafs must be loaded, and at a node whose row ids must
        be checked and are written by the part before.
        """
        cdef dict found = {}        # {(ids tensor, number of rows): True} for each check of the present part
        cdef list checks = []       # for each part a list of (node, source slot of its ids, number of rows)
        cdef GraphPart part = None
        cdef Tensor t, ids, root
        cdef Py_ssize_t i, written
        cdef int slot
        cdef int64_t rows = 0
        cdef dict staged = staged_leafs(self.table.tensors[:self.table.n])
        cdef bint cut
        for i in range(self.table.n):
            t = <Tensor>PyTuple_GET_ITEM(self.table.tensors, i)
            loads = staged.get(i)
            slot = ids_slot(&self.table.nodes[i], &rows)
            ids = None if slot < 0 else t.src[slot]
            cut = part is None or loads
            if ids is not None:
                written = last_writer(self.table, i, self.table.nodes[i].src[slot])
                if written >= 0 and orders_rows(self.table, written, ids, rows):
                    ids = None      # indices from a sort are always in range: no check, so no cut
                elif part is not None and written >= part.first:
                    cut = True
            if cut:
                part = GraphPart.__new__(GraphPart)
                part.first, part.loads = i, loads or []
                self.parts.append(part)
                checks.append([])
                found.clear()
            if ids is not None and (ids, rows) not in found:
                found[(ids, rows)] = True
                checks[-1].append((i, slot, rows))
            root = t if t.view_src is None else t.view_src
            if root._lease is None and root not in self.written:
                self.written.append(root)
        for part, wanted in zip(self.parts, checks):
            self.fill_checks(part, wanted)
        return 0

    cdef int fill_checks(self, GraphPart part, list wanted) except -1:
        cdef gx_ids *ids
        cdef const gs_node *source
        if not wanted:
            return 0
        part.ids = <gx_ids *>PyMem_Calloc(len(wanted), sizeof(gx_ids))
        if part.ids == NULL:
            raise no_host_memory("ids to check")
        for i, slot, rows in wanted:
            ids = &part.ids[part.n_ids]
            source = self.table.nodes[<Py_ssize_t>i].src[<int>slot]
            ids.layout, ids.data = &source.layout, <const char *>source.data
            ids.n_rows, ids.node, ids.tensor = rows, i, source - self.table.nodes
            part.n_ids += 1
        return 0

    # -- graphs -----------------------------------------------------------------------------

    cdef int make_graphs(self) except -1:
        """Make a ggml graph for each part, all in one block of memory."""
        cdef gx_api *call = &self.device.api.call
        cdef gx_init_params params
        cdef GraphPart part
        cdef Py_ssize_t i, k, s, end, n_graphs = len(self.parts), n = len(self.table.tensors)
        cdef size_t total = 4096
        cdef list counts = []
        for s in range(n_graphs):
            part = self.parts[s]
            end = self.table.n if s + 1 == n_graphs else (<GraphPart>self.parts[s + 1]).first
            count = 0
            for i in range(part.first, end):
                count += 1 if self.own is None else 1 + self.own.n_earlier(i)
                for k in range(self.table.nodes[i].n_src):
                    if self.made[i].src[k] >= self.made + n:
                        count += 1
            counts.append(count)
            total += call.graph_overhead_custom(count, False) + 64
        self.block = <uint8_t *>calloc(total + 64, 1)
        if self.block == NULL:
            raise no_host_memory(f"a graph of {self.table.n} nodes")
        params.mem_size, params.mem_buffer, params.no_alloc = total, aligned(self.block), True
        self.context = call.init(params)
        if self.context == NULL:
            raise no_host_memory(f"a graph of {self.table.n} nodes")
        for s in range(n_graphs):
            part = self.parts[s]
            end = self.table.n if s + 1 == n_graphs else (<GraphPart>self.parts[s + 1]).first
            part.graph = call.new_graph_custom(self.context, <size_t>counts[s], False)
            for i in range(part.first, end):
                for k in range(self.table.nodes[i].n_src):
                    if self.made[i].src[k] >= self.made + n:
                        call.graph_add_node(part.graph, self.made[i].src[k])
                if self.own is not None:
                    for k in range(self.own.n_earlier(i)):
                        call.graph_add_node(part.graph, self.own.earlier_call(i, k))
                call.graph_add_node(part.graph, &self.made[i])
        return 0

    cdef int use_packed_weights(self) except -1:
        """Let matrix products read repacked copies of their weights, where ggml has a faster layout; makes the copies
        that do not exist yet."""
        cdef gs_node *node
        cdef Tensor t, w
        cdef RepackedWeight packed
        cdef Py_ssize_t i
        cdef set taken = set()
        cdef tuple bufts = self.backend.packed_bufts
        if not bufts:
            return 0
        for i in range(self.table.n):
            node = &self.table.nodes[i]
            if node.op != GS_OP_MUL_MAT and node.op != GS_OP_MUL_MAT_ID:
                continue
            t = self.table.tensors[i]
            w = t.src[0]
            if (w.layout.op != GS_OP_NONE or w.view_src is not None or w._lease is not None or w._buffer is None
                    or not is_packable(node) or w._buffer.usage != "weights" or w in self.written):
                continue
            packs = getattr(w._buffer, "packs", None)
            if packs is None:
                continue
            if w._offset not in packs:
                packs[w._offset] = self.new_packed(i, bufts)
            packed = packs[w._offset]
            if packed is None or not packed.fits(w):
                continue
            self.made[i].src[0] = &packed.made
            if w not in taken:
                taken.add(w)
                self.packs.append((w, packed, <uintptr_t>node.src[0].data))
        return 0

    cdef RepackedWeight new_packed(self, Py_ssize_t i, tuple bufts):
        """A RepackedWeight, filled with data, for the weight of node i; None if ggml has no faster layout for it."""
        cdef gs_node *node = &self.table.nodes[i]
        cdef Tensor t = self.table.tensors[i], w = t.src[0]
        cdef RepackedWeight packed = packed_weight(self.device, bufts, w, node)
        if packed is not None:
            packed.load(w, node.src[0].data)
            self.backend.plain_unread(w)
        return packed


cdef bint is_packable(const gs_node *node) noexcept nogil:
    """Whether ggml may have a repacked layout for the weights of a product: they are a dense quantised matrix, or for
    MUL_MAT_ID a stack of these, and the columns are dense f32."""
    cdef const gs_layout *a = &node.src[0].layout
    cdef const gs_layout *b = &node.src[1].layout
    cdef int64_t block
    gx_unit(a, &block)
    if block == 1 or not gx_dense(a) or b.type != 0 or not gx_dense(b) or a.ne[3] != 1 or b.ne[3] != 1:
        return False
    return node.op == GS_OP_MUL_MAT_ID or (a.ne[2] == 1 and b.ne[2] == 1)


cdef int ids_slot(const gs_node *node, int64_t *rows) noexcept nogil:
    """The index of the source of a node that holds row (or expert) ids; -1 if none does.  Sets `rows`: valid ids are
    below it."""
    if node.op == GS_OP_GET_ROWS:
        rows[0] = node.src[0].layout.ne[1]
        return 1
    if node.op == GS_OP_SET_ROWS:
        rows[0] = node.layout.ne[1]
        return 1
    if node.op == GS_OP_MUL_MAT_ID:
        rows[0] = node.src[0].layout.ne[2]
        return 2
    if node.op == GS_OP_ADD_ID:
        rows[0] = node.src[1].layout.ne[1]
        return 2
    if node.op == GS_OP_SSM_SCAN:
        rows[0] = node.src[0].layout.ne[3]
        return 6
    return -1


cdef Py_ssize_t last_writer(NodeTable table, Py_ssize_t before, const gs_node *ids) noexcept:
    """The last node before node `before` that writes to the memory of `ids`; -1 if none does.

    Compares addresses, because tensors that share memory need not be views of each other.
    """
    cdef uintptr_t at = <uintptr_t>ids.data, end = at + <uintptr_t>ids.layout.nbytes, first
    cdef Py_ssize_t i
    for i in range(before - 1, -1, -1):
        first = <uintptr_t>table.nodes[i].data
        if first < end and at < first + <uintptr_t>table.nodes[i].layout.nbytes:
            return i
    return -1


cdef bint orders_rows(NodeTable table, Py_ssize_t written, Tensor ids, int64_t rows):
    """Whether all `ids` are certainly below `rows`: node `written` is an ARGSORT or TOP_K of rows of at most `rows`
    elements, and `ids` are its indices or a view of them that cuts no index apart."""
    cdef Tensor root = ids if ids.view_src is None else ids.view_src
    cdef int op = root.layout.op
    if table.tensors[written] is not root or (op != GS_OP_ARGSORT and op != GS_OP_TOP_K):
        return False
    return (table.nodes[written].src[0].layout.ne[0] <= rows and ids.layout.type == root.layout.type
            and ids.view_offs % 4 == 0 and ids.layout.nb[0] % 4 == 0 and ids.layout.nb[1] % 4 == 0
            and ids.layout.nb[2] % 4 == 0 and ids.layout.nb[3] % 4 == 0 and gx_dense(&root.layout))


cdef void dense_like(gs_layout *out, const gs_layout *a) noexcept nogil:
    out[0] = a[0]
    out.nb[0] = gx_unit(a, &out.nb[1])      # gx_unit also writes the block size to nb[1]; the next line replaces it
    out.nb[1] = gx_row_size(a)
    out.nb[2] = out.nb[1] * a.ne[1]
    out.nb[3] = out.nb[2] * a.ne[2]
    out.nbytes = out.nb[3] * a.ne[3]


cdef inline bint is_copy(int op) noexcept nogil:
    return op == GS_OP_CPY or op == GS_OP_CONT or op == GS_OP_DUP


cdef int gx_tolerates(int op) noexcept nogil:
    """Bit i is set if ggml's kernel of the op also computes in place, where source i has the result's memory and
    layout.  The planner gets the same answer from `inplace_sources`."""
    if GS_OP_SCALE <= op <= GS_OP_LOG or op == GS_OP_CLAMP or op == GS_OP_ROPE or op == GS_OP_RMS_NORM:
        return 0b11 if GS_OP_ADD <= op <= GS_OP_DIV and op != GS_OP_ADD1 else 0b1
    if op == GS_OP_SOFT_MAX or op == GS_OP_ADD_ID or op == GS_OP_UNARY or op == GS_OP_SET:
        return 0b1
    return 0b11 if op == GS_OP_GLU else 0


def tolerated_sources(int op):
    """gx_tolerates, callable from Python; `op` is this package's number of an op."""
    return gx_tolerates(gs_op_family(op))
