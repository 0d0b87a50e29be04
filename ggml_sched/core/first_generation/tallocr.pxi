# TensorAllocator: addresses for single tensors, best fit over one buffer.
#
# Owns the free blocks of that buffer.  Invariant: free blocks, the tensors in `live` (allocated one by one) and the
# tensors of graph allocations (not in `live`) together cover the buffer.  Corresponds to ggml_tallocr.

cdef object _wrap_memory        # makes a buffer over the caller's memory; a Python module registers it at import


def register_host_memory(wrap):
    """Let `TensorAllocator.from_memory` call wrap(memory), which returns a Buffer."""
    global _wrap_memory
    _wrap_memory = wrap


cdef class TensorAllocator:
    """Places tensors in one buffer, one at a time (ggml_tallocr).

    `TensorAllocator(buffer)` takes the alignment from the buffer's backend and does not own the buffer.
    See also `from_memory`, `from_backend`, `measure`, `measure_from_backend`.  A context manager.
    """

    def __cinit__(self, *args, **kwargs):
        self.new_leases()
        self.live = {}

    def __dealloc__(self):
        blocks_free(&self.blocks)

    def __init__(self, BufferBase buffer not None, *, alignment=None, owns_buffer=False, is_measure=False):
        cdef int64_t rest
        if buffer.closed:
            raise PlacementError(f"the buffer of backend {buffer.backend.name!r} is closed")
        self.alignment = _index(alignment) if alignment is not None else buffer.backend.alignment
        if not 1 <= self.alignment <= 1 << 30:
            raise ValueError(f"alignment {self.alignment} is not in 1 .. 2**30")
        self.buffer = buffer
        self.owns_buffer = owns_buffer
        self.is_measure = is_measure
        rest = buffer.base % self.alignment
        self.start = self.alignment - rest if rest else 0
        self.room = max(buffer.size - self.start, 0)
        if blocks_reset(&self.blocks, self.room) != GS_OK:
            raise no_host_memory("the free blocks of a TensorAllocator")

    @classmethod
    def from_memory(cls, memory, alignment=64):
        """An allocator over the caller's memory, any writable object with the buffer protocol; it never frees that
        memory."""
        return cls(_wrap_memory(memory), alignment=alignment)

    @classmethod
    def from_backend(cls, BackendBase backend not None, size):
        """Allocates a buffer of `size` bytes and owns it.  Raises OutOfMemory, BackendError."""
        buffer = new_buffer(backend, size)
        try:
            return cls(buffer, owns_buffer=True)
        except BaseException:
            buffer.close()
            raise

    @classmethod
    def measure(cls, alignment=64):
        """An allocator of addresses without memory; its `max_size` is the bytes that a real allocation needs."""
        return cls(measure_buffer(alignment=alignment), is_measure=True)

    @classmethod
    def measure_from_backend(cls, BackendBase backend not None):
        """An allocator of addresses without memory, as `measure`; alignment and sizes are those of the backend."""
        return cls(measure_buffer(backend), is_measure=True)

    cdef int check_open(self) except -1:
        if self.closed or self.buffer.closed:
            raise PlacementError(f"the allocator over backend {self.buffer.backend.name!r} is closed")
        return 0

    cdef int64_t size_of(self, Tensor t) except -1:
        """Bytes that `t` takes: what the buffer's alloc_size says, rounded up to the alignment."""
        cdef int64_t size = checked_alloc_size(self.buffer.backend, t, self.buffer.alloc_size(t))
        if gs_checked_align(size, self.alignment, &size) != GS_OK:
            raise OutOfMemory(f"{describe(t)}: {size} bytes cannot be aligned to {self.alignment}",
                              self.buffer.backend.name, size, self.room)
        return size

    def alloc(self, Tensor t not None):
        """Give a tensor an address; returns its offset from the first aligned address.

        Raises PlacementError for a view or a tensor that has an address, OutOfMemory with the largest
        free block as `available`.  Calls the buffer's `init_tensor`, unless this allocator only measures.
        """
        cdef int64_t offset, size, high = self.blocks.max_size
        self.check_open()
        if t.context_state.closed:
            raise GraphError(f"{describe(t)} belongs to closed context {t.context_state.name!r}")
        if t.view_src is not None:
            raise PlacementError(f"{describe(t)} is a view: its root {label(t.view_src)} is what is allocated")
        if t.settled() is not None:
            raise PlacementError(f"{describe(t)} already has an address on backend {t.settled().backend.name!r}")
        size = self.size_of(t)
        t.settle()
        if blocks_take(&self.blocks, size, &offset) != GS_OK:
            largest = blocks_largest(&self.blocks)
            raise OutOfMemory(
                f"backend {self.buffer.backend.name!r}: {describe(t)} needs {size} bytes, the largest free block of "
                f"{self.room} bytes has {largest}", self.buffer.backend.name, size, largest)
        t.bind(self.buffer, self.start + offset, self.lease)
        self.live[t] = size
        if not self.is_measure:
            try:
                self.buffer.init_tensor(t)
            except BaseException:
                self.forget(t)
                self.blocks.max_size = high
                raise
        return offset

    def free(self, Tensor t not None):
        """Take a tensor's address away.  Ignores one that `alloc` has not placed here, or that a graph has freed."""
        if self.closed or t not in self.live or t.c_buffer() is not self.buffer:
            return
        self.buffer.settle()
        if not self.is_measure:
            self.buffer.free_tensor(t)
        self.forget(t)

    cdef int forget(self, Tensor t) except -1:
        if blocks_give(&self.blocks, t._offset - self.start, self.live[t]) != GS_OK:
            raise no_host_memory(f"the free blocks of {self!r}")
        del self.live[t]
        t.bind(None, 0, self.lease)
        return 0

    cdef void new_leases(self):
        self.lease = Lease()
        self.graph_lease = Lease()
        # Inputs of a graph may be born after its first node: their data is staged on the host until then.
        self.graph_lease.stages = True
        self.early_lease = Lease()
        self.early_lease.stages = self.early_lease.through = True

    cdef void end_leases(self):
        self.lease.end()
        self.graph_lease.end()
        self.early_lease.end()

    def reset(self):
        """Forget every tensor; the buffer is one free block again.  `max_size` stays, a high-water mark."""
        self.check_open()
        self.buffer.settle()
        self.end_leases()
        self.new_leases()
        self.live = {}
        blocks_reset(&self.blocks, self.room)

    def close(self):
        """Make all addresses from this allocator invalid, and close the buffer if the allocator owns it; idempotent."""
        if not self.closed:
            self.buffer.settle()
            self.closed = True
            self.end_leases()
            self.live = {}
            if self.owns_buffer:
                self.buffer.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    @property
    def max_size(self):
        """The bytes that the buffer must have: the highest end of a range allocated so far, from the buffer's start."""
        return self.blocks.max_size + self.start if self.blocks.max_size else 0

    @property
    def free_blocks(self):
        """Free ranges as a tuple of (offset, size) in bytes, from the first aligned address."""
        cdef list found = []
        cdef int32_t i
        for i in range(self.blocks.n):
            found.append((self.blocks.at[i].offset, self.blocks.at[i].size))
        return tuple(found)

    def __repr__(self):
        kind = "measuring" if self.is_measure else f"{self.room} bytes"
        return f"<{type(self).__name__} on {self.buffer.backend.name!r}, {kind}, high water {self.max_size}>"
