# Support queries of a request: one to each backend for each kind of node.
#
# Decides which support queries go to which backend, and whether in C or in Python.  The support cache has a record of
# each kind under its hash: sizes and bits, with an entry for each backend, and the words that describe the kind.
# Invariants: a record is used only for the kind with the same words; if a backend raises, no result of the request is
# added to the support cache; a cache has at most MAX_CACHED_KINDS records.

cdef enum:
    MAX_CACHED_KINDS = 4096


cdef class SupportQueries:
    """Support queries for the kinds of one graph: looked up in the support cache, or made."""

    def __cinit__(self, Graph graph not None, Devices devices not None):
        cdef const gs_graph *g = &graph.flat
        cdef int32_t b, k
        cdef int64_t cells
        self.graph, self.devices = graph, devices
        self.n, self.n_backends = graph._kinds.n, devices.n
        cells = <int64_t>self.n * devices.n
        self.size = <int64_t *>malloc(max(cells, 1) * (sizeof(int64_t) + 2) + self.n * (sizeof(int32_t) + 1))
        if self.size == NULL:
            raise no_host_memory(f"support queries for {self.n} kinds of nodes")
        self.example = <int32_t *>(self.size + cells)
        self.bits = <unsigned char *>(self.example + self.n)
        self.pending = self.bits + cells
        self.cached = self.pending + cells
        memset(self.cached, 0, self.n)
        # A copy, because another thread that finds more kinds may reallocate the graph's own table.
        if self.n:
            memcpy(self.example, graph._kinds.example, self.n * sizeof(int32_t))
        for k in range(self.n):
            for b in range(devices.n):
                self.bits[k * devices.n + b] = ASKS_SUPPORTS
                self.size[k * devices.n + b] = g.nbytes[self.example[k]]
                self.pending[k * devices.n + b] = <unsigned char>queries_of(g, self.example[k], devices.in_python[b])

    def __dealloc__(self):
        free(self.size)

    cdef int look_up(self) except -1:
        """Copy the results for all kinds that are in the support cache."""
        cdef dict cache = self.devices.support_cache
        cdef uint64_t[MAX_KIND_WORDS] words
        cdef const char *record
        cdef Py_ssize_t n_sizes = self.n_backends * sizeof(int64_t), n_words
        cdef int32_t k
        for k in range(self.n if cache else 0):
            if not queries_of(&self.graph.flat, self.example[k], self.devices.queries):
                continue
            found = cache.get(self.graph._kinds.hash[k])
            if found is None:
                continue
            record = PyBytes_AS_STRING(found)
            n_words = kind_words(&self.graph.flat, self.example[k], words) * sizeof(uint64_t)
            if (PyBytes_GET_SIZE(found) == n_sizes + self.n_backends + n_words
                    and memcmp(record + n_sizes + self.n_backends, words, n_words) == 0):
                self.cached[k] = True
                memcpy(self.size + k * self.n_backends, record, n_sizes)
                memcpy(self.bits + k * self.n_backends, record + n_sizes, self.n_backends)
        return 0

    cdef int store(self) except -1:
        """Add the results of this request to the support cache, which is cleared when it is full."""
        cdef dict cache = self.devices.support_cache
        cdef uint64_t[MAX_KIND_WORDS] words
        cdef int32_t k, n
        for k in range(self.n):
            if not self.cached[k] and queries_of(&self.graph.flat, self.example[k], self.devices.queries):
                if len(cache) == MAX_CACHED_KINDS:
                    cache.clear()
                n = kind_words(&self.graph.flat, self.example[k], words)
                cache[self.graph._kinds.hash[k]] = (
                    (<char *>(self.size + k * self.n_backends))[:self.n_backends * sizeof(int64_t)]
                    + (<char *>(self.bits + k * self.n_backends))[:self.n_backends]
                    + (<char *>words)[:n * sizeof(uint64_t)])
        return 0

    cdef list open_in_python(self, int32_t b):
        """A tensor of each kind that is not in the support cache and has a query that the backend answers in Python."""
        cdef list found = []
        cdef int32_t k
        for k in range(self.n if self.devices.in_python[b] else 0):
            if not self.cached[k] and self.pending[k * self.n_backends + b]:
                found.append(self.graph.tensors[self.example[k]])
        return found

    cdef int query(self, int32_t b) except -1:
        """Make the queries to one backend about every kind that was not in the support cache."""
        cdef BackendBase backend = self.devices.backends[b]
        cdef tuple tensors = self.graph.tensors
        cdef list ahead
        cdef const gs_graph *g = &self.graph.flat
        cdef int32_t k, at, step = self.n_backends
        cdef int in_c = self.devices.in_c[b]
        if in_c:
            with nogil:
                query_in_c(backend, in_c, g, self.example, self.n, step, self.cached, self.pending + b, self.bits + b,
                           self.size + b)
        ahead = self.open_in_python(b)
        if len(ahead) > 1:
            backend.expect_queries(ahead)
        for k in range(self.n):
            at = k * step + b
            if self.cached[k]:
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


cdef void query_in_c(BackendBase backend, int queries, const gs_graph *g, const int32_t *example, int32_t n,
                     int32_t step, const unsigned char *cached, unsigned char *pending, unsigned char *bits,
                     int64_t *size) noexcept nogil:
    """Make the queries to a backend whose methods are in C; a query that it answers with -1 stays pending, for Python.

    `pending`, `bits` and `size` point to the backend's first entry; its entries are `step` apart.
    """
    cdef gs_node[1 + GS_MAX_SRC] node
    cdef int32_t k, at, answer, wanted
    cdef int64_t found
    for k in range(n):
        at = k * step
        wanted = queries_of(g, example[k], queries)
        if cached[k] or not wanted:
            continue
        node_of_kind(g, example[k], node)
        if wanted & ASKS_SUPPORTS:
            answer = backend.c_supports_op(node)
            if answer != -1:
                pending[at] &= ~ASKS_SUPPORTS
                bits[at] = ASKS_SUPPORTS if answer else 0
        if wanted & ASKS_OFFLOAD:
            answer = backend.c_offload_op(node)
            if answer != -1:
                pending[at] &= ~ASKS_OFFLOAD
                bits[at] |= ASKS_OFFLOAD if answer else 0
        if wanted & ASKS_SIZE:
            found = backend.c_alloc_size(node)
            if found != -1:
                pending[at] &= ~ASKS_SIZE
                size[at] = found


cdef inline int queries_of(const gs_graph *g, int32_t id, int queries) noexcept nogil:
    """The ASKS_* bits of `queries` that apply to a tensor: leafs and views compute nothing, and need only a size."""
    return queries if g.op[id] > GS_OP_TRANSPOSE else queries & ASKS_SIZE
