# Allocator: single tensors and graphs in one buffer, as in ggml's first generation.
#
# Owns a TensorAllocator and a GraphAllocator over it, and forwards all calls to them.
# Corresponds to ggml_allocr.

cdef class Allocator:
    """The first generation's allocr: one TensorAllocator and one GraphAllocator.

    Constructors as TensorAllocator's; a context manager.
    """

    cdef readonly TensorAllocator tallocr
    cdef readonly GraphAllocator gallocr

    def __init__(self, buffer, *, TensorAllocator tallocr=None):
        self.tallocr = TensorAllocator(buffer) if tallocr is None else tallocr
        self.gallocr = GraphAllocator()

    @classmethod
    def from_memory(cls, memory, alignment=64):
        """Over caller-owned memory, which is never freed by us."""
        return cls(None, tallocr=TensorAllocator.from_memory(memory, alignment))

    @classmethod
    def from_backend(cls, backend, size):
        """Allocates a buffer and owns it."""
        return cls(None, tallocr=TensorAllocator.from_backend(backend, size))

    @classmethod
    def measure(cls, alignment=64):
        """Hands out addresses, never touches memory."""
        return cls(None, tallocr=TensorAllocator.measure(alignment))

    @classmethod
    def measure_from_backend(cls, backend):
        """Like measure, with the backend's own alloc-size rule."""
        return cls(None, tallocr=TensorAllocator.measure_from_backend(backend))

    def alloc(self, t):
        """TensorAllocator.alloc."""
        return self.tallocr.alloc(t)

    def free(self, t):
        """TensorAllocator.free."""
        self.tallocr.free(t)

    def reset(self):
        """TensorAllocator.reset."""
        self.tallocr.reset()

    def set_parse_seq(self, seq):
        """GraphAllocator.set_parse_seq."""
        self.gallocr.set_parse_seq(seq)

    def alloc_graph(self, graph):
        """GraphAllocator.alloc_graph on this allocator's buffer; returns max_size."""
        return self.gallocr.alloc_graph(self.tallocr, graph)

    def offset_of(self, t):
        """GraphAllocator.offset_of."""
        return self.gallocr.offset_of(t)

    def inplace_root(self, t):
        """GraphAllocator.inplace_root."""
        return self.gallocr.inplace_root(t)

    @property
    def buffer(self):
        return self.tallocr.buffer

    @property
    def is_measure(self):
        return self.tallocr.is_measure

    @property
    def alignment(self):
        return self.tallocr.alignment

    @property
    def max_size(self):
        return self.tallocr.max_size

    @property
    def free_blocks(self):
        return self.tallocr.free_blocks

    def close(self):
        """TensorAllocator.close."""
        self.tallocr.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
