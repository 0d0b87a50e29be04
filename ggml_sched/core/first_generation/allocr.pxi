# Allocator: single tensors and graphs in one buffer, as in ggml's first generation.  Corresponds to ggml_allocr.

cdef class Allocator(TensorAllocator):
    """The first generation's allocr: a TensorAllocator with a GraphAllocator over it."""

    cdef readonly GraphAllocator gallocr

    def __cinit__(self, *args, **kwargs):
        self.gallocr = GraphAllocator()

    @property
    def tallocr(self):
        """The allocator of single tensors: this one."""
        return self

    def set_parse_seq(self, seq):
        """See GraphAllocator.set_parse_seq."""
        self.gallocr.set_parse_seq(seq)

    def alloc_graph(self, graph):
        """See GraphAllocator.alloc_graph; the tensors are placed in this allocator's buffer.  Returns max_size."""
        return self.gallocr.alloc_graph(self, graph)

    def offset_of(self, t):
        """See GraphAllocator.offset_of."""
        return self.gallocr.offset_of(t)

    def inplace_root(self, t):
        """See GraphAllocator.inplace_root."""
        return self.gallocr.inplace_root(t)
