# Devices: the backends of one scheduler, as the planner sees them.
#
# Owns what they declare once and for all: alignments, and the sources that each op may overwrite.

cdef class Devices:
    """The backends of one scheduler: asked once what they declare."""

    def __cinit__(self, tuple backends not None):
        cdef Py_ssize_t i
        self.backends = backends
        self.n = <int32_t>len(backends)
        self.inplace_first = <uint64_t *>calloc(self.n * GS_N_OPS, sizeof(uint64_t))
        self.inplace = <uint64_t *>calloc(self.n * GS_N_OPS, sizeof(uint64_t))
        self.alignment = <int64_t *>malloc(max(self.n, 1) * sizeof(int64_t))
        if self.inplace_first == NULL or self.inplace == NULL or self.alignment == NULL:
            raise no_host_memory("the backends of a scheduler")
        for i in range(self.n):
            self.alignment[i] = (<BackendBase?>backends[i]).alignment
            fill_inplace_masks(self.inplace_first + i * GS_N_OPS, backends[i], True)
            fill_inplace_masks(self.inplace + i * GS_N_OPS, backends[i], False)
        # What a backend does not override needs no call per node.
        self.asks_op = each_overrides(backends, "supports_op")
        self.asks_offload = each_overrides(backends, "offload_op")
        self.asks_buffer = each_overrides(backends, "supports_buffer")
        self.asks_size = each_overrides(backends, "alloc_size")
        self.asks_ops, self.asks_offloads = any(self.asks_op), any(self.asks_offload)
        self.asks_buffers, self.asks_sizes = any(self.asks_buffer), any(self.asks_size)

    def __dealloc__(self):
        free(self.inplace_first)
        free(self.inplace)
        free(self.alignment)

    cdef int32_t index(self, BackendBase backend) noexcept:
        """The position of a backend, -1 for a stranger."""
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
    """How messages list backends."""
    cdef list names = []
    for backend in backends:
        names.append(backend.name)
    return ", ".join(names)


cdef bint overrides(object backend, str method):
    return method in getattr(backend, "__dict__", ()) or getattr(type(backend), method) is not getattr(BackendBase, method)


cdef int fill_inplace_masks(uint64_t *mask, BackendBase backend, bint first_only) except -1:
    """mask[op]: the sources that op may take over on this backend; 0 where `first_only` leaves out what ggml's first
    generation did not compute in place."""
    cdef int op
    cdef object declared
    memset(mask, 0, GS_N_OPS * sizeof(uint64_t))
    for name, number in op_numbers().items():
        op = number
        if not first_only or gs_op_inplace(op) & GS_INPLACE_FIRST:
            declared = backend.inplace_sources(name)
            try:
                mask[op] = <uint64_t>(_index(declared) & 0xffffffffffffffff)
            except TypeError:
                raise TypeError(f"backend {backend.name!r} says that {name} may overwrite the sources {declared!r}, "
                                "which is not a bit mask") from None
    return 0
