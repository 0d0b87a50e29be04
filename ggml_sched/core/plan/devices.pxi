# Devices: the backends of one scheduler, with their constant properties and the support cache.
#
# The constant properties are alignments, the sources that each op may overwrite, and which support queries a backend
# implements, in C or in Python.  The support cache is cleared when the `answers_version` of a backend changes.

cdef class Devices:
    """The backends of one scheduler, with their constant properties and the support cache."""

    def __cinit__(self, tuple backends not None):
        cdef Py_ssize_t i
        self.backends = backends
        self.n = <int32_t>len(backends)
        self.inplace_first = <uint64_t *>calloc(self.n * GS_N_OPS, sizeof(uint64_t))
        self.inplace = <uint64_t *>calloc(self.n * GS_N_OPS, sizeof(uint64_t))
        self.alignment = <int64_t *>malloc(max(self.n, 1) * (2 * sizeof(int64_t) + 4))
        if self.inplace_first == NULL or self.inplace == NULL or self.alignment == NULL:
            raise no_host_memory("the backends of a scheduler")
        self.margin = self.alignment + self.n
        self.in_python = <unsigned char *>(self.margin + self.n)
        self.in_c = self.in_python + self.n
        self.has_field = self.in_c + self.n
        self.store = self.has_field + self.n
        for i in range(self.n):
            self.alignment[i] = (<BackendBase?>backends[i]).alignment
            if (<object>backends[i]).alignment != self.alignment[i]:
                raise ValueError(f"{backends[i]!r} has alignment {(<object>backends[i]).alignment} by an attribute of its "
                                 f"class, and was made with {self.alignment[i]}: give it to Backend.__init__")
            self.store[i] = bool(getattr(backends[i], "is_store", False))
            self.margin[i] = max(_index(backends[i].margin), 0) if self.store[i] else 0
            self.stores |= self.store[i]
            fill_inplace_masks(self.inplace_first + i * GS_N_OPS, backends[i], True)
            fill_inplace_masks(self.inplace + i * GS_N_OPS, backends[i], False)
            self.find_queries(i, backends[i])
        self.reads_buffers = each_overrides(backends, "supports_buffer")
        self.shares_buffers = any(self.reads_buffers)
        fuses = each_overrides(backends, "fusion_groups")
        self.fuses = fuses if any(fuses) else ()
        expects = each_overrides(backends, "expect_graph")
        self.expects = expects if any(expects) else ()
        self.support_cache = {}
        self.versions = self.all_versions()

    def __dealloc__(self):
        free(self.inplace_first)
        free(self.inplace)
        free(self.alignment)

    cdef void find_queries(self, Py_ssize_t i, BackendBase backend):
        """Find the support queries of a backend: those methods that it overrides, in Python or in C."""
        cdef int in_c = backend.answers_in_c(), in_python = 0
        for method, bit in (("supports_op", ASKS_SUPPORTS), ("offload_op", ASKS_OFFLOAD), ("alloc_size", ASKS_SIZE)):
            if overrides(backend, method):
                in_python |= bit
                if decides_in_python(backend, method):
                    in_c &= ~bit
        self.in_python[i], self.in_c[i] = in_python, in_c
        self.queries |= in_python | in_c
        # The C field of answers_version is fast to read, but valid only if no subclass has an attribute of that name.
        self.has_field[i] = type(backend).answers_version is BackendBase.answers_version

    cdef list all_versions(self):
        cdef list found = []
        cdef Py_ssize_t i
        for i in range(self.n):
            found.append(self.version_of(i))
        return found

    cdef object version_of(self, Py_ssize_t i):
        """The version of a backend's answers; TypeError unless it is an int or None."""
        cdef BackendBase backend = self.backends[i]
        version = backend.answers_version if self.has_field[i] else (<object>backend).answers_version
        if version is not None and not isinstance(version, int):
            raise TypeError(f"backend {backend.name!r}: answers_version = {version!r} is neither an int nor None")
        return version

    cpdef int64_t epoch(self) except -1:
        """A number that grows when the `answers_version` of a backend changes; the support cache is cleared then."""
        cdef Py_ssize_t i
        cdef list cached = self.versions
        for i in range(self.n):
            version = self.version_of(i)
            if version is not cached[i] and version != cached[i]:
                cached[i] = version
                self.support_cache.clear()
                self._epoch += 1
        return self._epoch

    def expect(self, Graph graph not None):
        """Give each backend that overrides `expect_graph` the graph, and the tensors about which support queries to it
        are still to be made."""
        cdef SupportQueries queries
        cdef int32_t b
        if not self.expects:
            return
        self.epoch()
        graph.find_kinds(self.queries & ASKS_SIZE)
        queries = SupportQueries(graph, self)
        queries.look_up()
        for b in range(self.n):
            if self.expects[b] and self.versions[b] is not None:
                (<BackendBase>self.backends[b]).expect_graph(graph, queries.open_in_python(b))

    def unchanged(self, Graph graph not None, list buffers not None, int64_t residence, int64_t support):
        """Whether all buffers are open, the residents of a graph have not moved, and backends answer as before.

        `residence` and `support` are earlier results of `Graph.residence_epoch` and `epoch`.
        """
        cdef BufferBase buffer
        for buffer in buffers:
            if buffer.closed:
                return False
        return graph.residence_epoch() == residence and self.epoch() == support

    def clear(self):
        """Clear the support cache: the next request calls the backends again."""
        self.support_cache.clear()

    @property
    def n_cached(self):
        """The number of kinds of nodes in the support cache."""
        return len(self.support_cache)

    cdef int32_t index(self, BackendBase backend) noexcept:
        """The index of a backend, -1 if it is not one of the scheduler's."""
        cdef int32_t i
        for i in range(self.n):
            if <BackendBase>(<tuple>self.backends)[i] is backend:
                return i
        return -1


cdef tuple each_overrides(tuple backends, str method):
    cdef list found = []
    for backend in backends:
        found.append(overrides(backend, method))
    return tuple(found)


cdef str names_of(tuple backends):
    """The names of backends, for messages."""
    cdef list names = []
    for backend in backends:
        names.append(repr(backend.name))
    return ", ".join(names)


cdef bint overrides(object backend, str method):
    return (method in getattr(backend, "__dict__", ())
            or getattr(type(backend), method) is not getattr(BackendBase, method))


cdef bint decides_in_python(object backend, str method):
    """Whether the backend object, or a Python class before its first compiled base class, overrides `method`: the C
    function must then not be called."""
    if method in getattr(backend, "__dict__", ()):
        return True
    for cls in type(backend).__mro__:
        if "__pyx_vtable__" in vars(cls):
            return False
        if method in vars(cls):
            return True
    return False
