# Support queries: asking the backends of a request about its nodes, once for each kind of node.
#
# Decides which support queries go to which backend, and whether in C or in Python.  Invariant: if a backend raises, no
# result of the request is added to the support cache.

cdef class Inquiry:
    """Support queries for the kinds of one graph: looked up in the support cache, else asked."""

    def __cinit__(self, Graph graph not None, Devices devices not None):
        cdef const gs_graph *g = &graph.flat
        cdef int32_t b, k
        cdef int64_t cells
        self.graph, self.devices = graph, devices
        self.n, self.n_backends = graph._kinds.n, devices.n
        cells = <int64_t>self.n * devices.n
        self.size = <int64_t *>malloc(max(cells, 1) * (sizeof(int64_t) + 2) + self.n * (sizeof(int32_t) + 1))
        if self.size == NULL:
            raise no_host_memory(f"asking about {self.n} kinds of nodes")
        self.example = <int32_t *>(self.size + cells)
        self.bits = <unsigned char *>(self.example + self.n)
        self.pending = self.bits + cells
        self.known = self.pending + cells
        memset(self.known, 0, self.n)
        # A copy, because another thread that finds more kinds may reallocate the graph's own table.
        if self.n:
            memcpy(self.example, graph._kinds.example, self.n * sizeof(int32_t))
        for k in range(self.n):
            for b in range(devices.n):
                self.bits[k * devices.n + b] = ASKS_SUPPORTS
                self.size[k * devices.n + b] = g.nbytes[self.example[k]]
                self.pending[k * devices.n + b] = <unsigned char>questions(g, self.example[k], devices.in_python[b])

    def __dealloc__(self):
        free(self.size)

    cdef void recall(self) noexcept:
        """Look up all kinds in the support cache."""
        cdef uint64_t[MAX_KIND_WORDS] words
        cdef const gs_answer *found
        cdef int32_t k, n
        for k in range(self.n):
            if not questions(&self.graph.flat, self.example[k], self.devices.asks):
                continue
            n = kind_words(&self.graph.flat, self.example[k], words)
            found = self.devices.answers.find(self.graph._kinds.hash[k], words, n)
            if found != NULL:
                self.known[k] = True
                memcpy(self.bits + k * self.n_backends, found.bits, self.n_backends)
                memcpy(self.size + k * self.n_backends, found.size, self.n_backends * sizeof(int64_t))

    cdef void remember(self) noexcept:
        """Add the results of this request to the support cache."""
        cdef uint64_t[MAX_KIND_WORDS] words
        cdef int32_t k, n
        for k in range(self.n):
            if not self.known[k] and questions(&self.graph.flat, self.example[k], self.devices.asks):
                n = kind_words(&self.graph.flat, self.example[k], words)
                self.devices.answers.add(self.graph._kinds.hash[k], words, n, self.bits + k * self.n_backends,
                                         self.size + k * self.n_backends)

    cdef int ask(self, int32_t b) except -1:
        """Ask one backend about every kind that was not in the support cache."""
        cdef BackendBase backend = self.devices.backends[b]
        cdef tuple tensors = self.graph.tensors
        cdef const gs_graph *g = &self.graph.flat
        cdef int32_t k, at, step = self.n_backends
        cdef int in_c = self.devices.in_c[b]
        if in_c:
            with nogil:
                ask_in_c(backend, in_c, g, self.example, self.n, step, self.known, self.pending + b, self.bits + b,
                         self.size + b)
        for k in range(self.n):
            at = k * step + b
            if self.known[k]:
                continue
            t = <Tensor>tensors[self.example[k]]
            if self.pending[at] & ASKS_SUPPORTS and not backend.supports_op(t):
                self.bits[at] &= ~ASKS_SUPPORTS
            if self.pending[at] & ASKS_OFFLOAD and backend.offload_op(t):
                self.bits[at] |= ASKS_OFFLOAD
            if self.pending[at] & ASKS_SIZE:
                self.size[at] = checked_alloc_size(backend, t, backend.alloc_size(t))
            elif in_c & ASKS_SIZE:
                checked_alloc_size(backend, t, self.size[at])
        return 0



cdef void ask_in_c(BackendBase backend, int asks, const gs_graph *g, const int32_t *example, int32_t n,
                   int32_t step, const unsigned char *known, unsigned char *pending, unsigned char *bits,
                   int64_t *size) noexcept nogil:
    """Ask a compiled backend; questions that it leaves open (-1) stay pending.

    `pending`, `bits` and `size` point to the backend's first entry; its entries are `step` apart.
    """
    cdef gs_node[1 + GS_MAX_SRC] node
    cdef int32_t k, at, answer, asked
    cdef int64_t found
    for k in range(n):
        at = k * step
        asked = questions(g, example[k], asks)
        if known[k] or not asked:
            continue
        node_of_kind(g, example[k], node)
        if asked & ASKS_SUPPORTS:
            answer = backend.c_supports_op(node)
            if answer != -1:
                pending[at] &= ~ASKS_SUPPORTS
                bits[at] = ASKS_SUPPORTS if answer else 0
        if asked & ASKS_OFFLOAD:
            answer = backend.c_offload_op(node)
            if answer != -1:
                pending[at] &= ~ASKS_OFFLOAD
                bits[at] |= ASKS_OFFLOAD if answer else 0
        if asked & ASKS_SIZE:
            found = backend.c_alloc_size(node)
            if found != -1:
                pending[at] &= ~ASKS_SIZE
                size[at] = found


cdef inline int questions(const gs_graph *g, int32_t id, int asks) noexcept nogil:
    """The ASKS_* bits of `asks` that apply to a tensor: leafs and views compute nothing, and need only a size."""
    return asks if g.op[id] > GS_OP_TRANSPOSE else asks & ASKS_SIZE
