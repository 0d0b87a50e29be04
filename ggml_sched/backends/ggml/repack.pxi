# RepackedWeight: a copy of a weight in a layout that ggml's matrix products read faster.

@cython.no_gc
cdef class RepackedWeight:
    """A copy of a weight in one of ggml's extra buffer types, in a layout that its matrix products read faster.

    `tensor_version` is the version of the weight from which the copy was made: the copy is outdated once the weight's
    version differs.
    """

    cdef Device device              # kept alive
    cdef void *buffer               # owned; ggml's buffer with the copy
    cdef gx_tensor made             # the copy as a ggml tensor
    cdef readonly size_t size       # bytes of the copy
    cdef int64_t tensor_version
    cdef object tensor              # a weak reference to the weight that was copied

    def __dealloc__(self):
        if self.buffer != NULL:
            self.device.api.call.backend_buffer_free(self.buffer)

    def outdate(self) -> None:
        """Note that the weight's bytes were changed without a new version: the next run repacks them."""
        self.tensor_version = -1

    cdef bint is_of(self, Tensor w) noexcept:
        return self.tensor_version == w.version and self.tensor() is w

    cdef bint fits(self, Tensor w) noexcept:
        """Whether the copy was made for a weight of w's type and extents; another weight may lie at the same offset
        now."""
        return (self.made.type == w.layout.type and self.made.ne[0] == w.layout.ne[0]
                and self.made.ne[1] == w.layout.ne[1] and self.made.ne[2] == w.layout.ne[2])

    cdef int load(self, Tensor w, void *plain) except -1:
        """Repack the data of w, which lie at `plain`."""
        with nogil:
            self.device.api.call.backend_tensor_set(&self.made, plain, 0, <size_t>w.layout.nbytes)
        self.tensor_version, self.tensor = w.version, weakref_to(w)
        return 0


cdef RepackedWeight packed_weight(Device device, tuple bufts, Tensor w, const gs_node *node):
    """A RepackedWeight without data for source 0 of a matrix product; None if ggml has no faster layout for it, or no
    memory."""
    cdef gx_tensor[1 + GS_MAX_SRC] made
    cdef Api api = device.api
    cdef RepackedWeight found
    cdef void *empty
    cdef void *extra
    cdef bint taken
    for buft in bufts:
        api.fill_node(made, node, device.host_buffer)
        empty = api.call.backend_buft_alloc_buffer(<void *><uintptr_t>buft, 0)
        if empty == NULL:
            continue
        made[1].buffer = empty
        taken = api.call.backend_dev_supports_op(device.dev, made)
        api.call.backend_buffer_free(empty)
        if not taken:
            continue
        found = RepackedWeight.__new__(RepackedWeight)
        found.device = device
        api.fill_layout(&found.made, &w.layout)
        found.size = api.call.backend_buft_get_alloc_size(<void *><uintptr_t>buft, &found.made)
        found.buffer = api.call.backend_buft_alloc_buffer(<void *><uintptr_t>buft, found.size)
        if found.buffer == NULL:
            return None             # no memory: the product reads the plain weight
        api.call.backend_buffer_set_usage(found.buffer, GX_BUFFER_USAGE_WEIGHTS)
        extra = api.call.backend_buffer_get_base(found.buffer)
        if api.call.backend_tensor_alloc(found.buffer, &found.made, extra) != 0 or found.made.extra == NULL:
            continue
        return found
    return None
