# Tensors: what one is, and where its bytes are at the moment.
#
# A Tensor is metadata: type, shape, strides, op, sources.  None of that changes
# after creation.  Its *address* is a separate thing with a lifetime:
#
#   permanent   a weight or KV cache: `_lease` is None, the buffer keeps it
#   leased      placed by an allocator or a scheduler: valid while `_lease.alive`
#   view        always resolved through `view_src`, never stored
#
# so a released or re-planned arena leaves no dangling address behind.
# Corresponds to struct ggml_tensor, with data/buffer made safe.

cdef class Lease:
    """The period in which the addresses that one allocation handed out are valid."""

    def __cinit__(self):
        self.alive = True
        self.displaced = False
        self.stages = False
        self.through = False
        self.transient = False

    cpdef void end(self) noexcept:
        """Every address under this lease is void from now on."""
        self.alive = False


cdef class BackendBase:
    """The C view of a backend; `ggml_sched.Backend` is the class to subclass.

    `name` is unique within a scheduler, `alignment` in bytes.
    """

    def __init__(self, name, alignment=64):
        alignment = _index(alignment)
        if not 1 <= alignment <= 1 << 30:
            raise ValueError(f"backend {name!r}: alignment {alignment} is not in 1 .. 2**30")
        self.name = str(name)
        self.alignment = alignment


cdef class BufferBase:
    """The C view of a buffer; `ggml_sched.Buffer` is the class to subclass.

    `backend` owns the memory, `size` is in bytes, `base` is the address that offsets
    count from (0 where addresses mean nothing), `usage` is "weights", "compute" or "any".
    """

    def __init__(self, BackendBase backend not None, size, base=0, usage="any"):
        size = _index(size)
        if not 0 <= size <= 0x7fffffffffffffff:
            raise ValueError(f"buffer of backend {backend.name!r}: size {size} is not in 0 .. 2**63 - 1")
        self.backend = backend
        self.size = size
        self.base = _index(base)
        self.usage = str(usage)

    def close(self):
        """Give the memory back; idempotent.  Its tensors have no address afterwards."""
        if not self.closed:
            self.closed = True
            self.free()

    def free(self):
        """Hook: give the memory back.  Called once, by close()."""


cpdef int64_t checked_alloc_size(BackendBase backend, Tensor t, object size) except -1:
    """What alloc_size has answered for a tensor, in bytes.

    TypeError unless it is an integer, PlacementError for less than the tensor's bytes or more than an int64 holds.
    """
    try:
        found = _index(size)
    except TypeError:
        raise TypeError(f"backend {backend.name!r} says that {describe(t)} takes {size!r} bytes, "
                        "which is not an integer") from None
    if not t.layout.nbytes <= found <= 0x7fffffffffffffff:
        raise PlacementError(f"backend {backend.name!r} says that {describe(t)} of {t.layout.nbytes} bytes "
                             f"takes {found}")
    return found


cdef frozenset flag_names(int flags):
    names = []
    if flags & GS_FLAG_INPUT:
        names.append("input")
    if flags & GS_FLAG_OUTPUT:
        names.append("output")
    return frozenset(names)


cdef class Tensor:
    """One value of a graph: metadata only, made by the methods of `Context`.

    `ne` are elements and `nb` byte strides, innermost dimension first (ggml's order).
    """

    def __init__(self):
        raise TypeError("tensors are made by a Context: ctx.tensor(...), ctx.mul_mat(...)")

    # -- facts ------------------------------------------------------------

    @property
    def type(self):
        """`gs.Type` of the elements."""
        return _TYPE_OBJECTS[self.layout.type]

    @property
    def op(self):
        """ggml's op name, "NONE" for a leaf; kinds are spelled "UNARY:SILU", "GLU:SWIGLU"."""
        return OP_NAMES[self.layout.op]

    @property
    def ne(self):
        """Extents in elements, a 4-tuple, innermost first."""
        return (self.layout.ne[0], self.layout.ne[1], self.layout.ne[2], self.layout.ne[3])

    @property
    def nb(self):
        """Strides in bytes, a 4-tuple, innermost first (of a block for quantised types)."""
        return (self.layout.nb[0], self.layout.nb[1], self.layout.nb[2], self.layout.nb[3])

    @property
    def nbytes(self):
        """Bytes from the first to the last element, gaps included."""
        return self.layout.nbytes

    @property
    def n_elements(self):
        return layout_n_elements(&self.layout)

    @property
    def flags(self):
        """frozenset of "input" and "output"."""
        return flag_names(self._flags)

    @property
    def deps(self):
        """What `Context.keep_until` said: tensors that stay until this node is done, though it does not read them."""
        return () if self._deps is None else self._deps

    @property
    def is_contiguous(self):
        return layout_contiguous(&self.layout)

    @property
    def is_view(self):
        return self.view_src is not None

    # -- where it is now ----------------------------------------------------

    @property
    def lease(self):
        """The `Lease` under which the address (a view: of its root) was handed out, or None."""
        return self._lease if self.view_src is None else self.view_src._lease

    cdef BufferBase c_buffer(self):
        """The buffer that holds this tensor now, or None."""
        cdef Tensor t = self if self.view_src is None else self.view_src
        if t._buffer is None or t._buffer.closed or (t._lease is not None and not t._lease.alive):
            return None
        return t._buffer

    cdef BufferBase settled(self):
        """The buffer that holds this tensor whatever is planned: None for an address that a scheduler lent."""
        cdef Tensor t = self if self.view_src is None else self.view_src
        if t._lease is not None and t._lease.transient:
            return None
        return self.c_buffer()

    cdef void bind(self, BufferBase buffer, int64_t offset, Lease lease) noexcept:
        """Give a tensor that is not a view an address (or take it away: buffer None)."""
        if self._lease is not None and self._lease is not lease:
            self._lease.displaced = True
        self._buffer = buffer
        self._offset = offset
        self.overwritten = False
        self._lease = lease
        if lease is None:
            self.home.epoch += 1

    @property
    def buffer(self):
        """The `Buffer` that holds this tensor now (a view: its root's), or None."""
        return self.c_buffer()

    @property
    def backend(self):
        """The `Backend` of `buffer`, or None."""
        cdef BufferBase buffer = self.c_buffer()
        return None if buffer is None else buffer.backend

    @property
    def offset(self):
        """Bytes from the start of `buffer`, or None without an address."""
        if self.c_buffer() is None:
            return None
        if self.view_src is not None:
            return self.view_src._offset + self.view_offs
        return self._offset

    @property
    def is_resident(self):
        """True for a tensor (or view of one) whose address outlives any plan: weights, KV cache."""
        cdef Tensor t = self if self.view_src is None else self.view_src
        return t._lease is None and self.c_buffer() is not None

    def __repr__(self):
        shape = "x".join(map(str, self.ne))
        return f"<Tensor {self.name!r} {self.op} {self.type} [{shape}]>"

    # -- data ---------------------------------------------------------------

    def touch(self):
        """Say that the data (of a view: its root's) has changed, so that copies of it are stale.

        `set`, `tensor_copy`, `Backend.set_tensor` and computes do it themselves.
        """
        cdef Tensor root = self if self.view_src is None else self.view_src
        root.version += 1

    @property
    def data_version(self):
        """How often the data (of a view: its root's) has changed."""
        cdef Tensor root = self if self.view_src is None else self.view_src
        return root.version

    def set(self, array):
        """Copy data in through the tensor's backend.

        `array` has the tensor's extents (numpy order: `ne` reversed, leading ones optional) or is flat.
        Quantised types take floats, which are quantised, or uint8 blocks of `nbytes`.
        Raises PlacementError without an address, ValueError for a wrong shape, TypeError for a wrong dtype.
        """
        _hostdata().write(self, array)

    def numpy(self):
        """The data as a new numpy array, extents reversed and leading ones dropped; quantised types as float32.

        Raises PlacementError without an address, BackendError from a backend without memory, HazardError for a
        result that a scheduler computed and whose memory has served other nodes since (flag it as an output).
        """
        return _hostdata().read(self)


def _hostdata():
    from ggml_sched import hostdata
    return hostdata


def bind_resident(Tensor t not None, BufferBase buffer, Py_ssize_t offset):
    """Give a tensor a permanent address, or take it away (buffer None).

    For backends that place weights themselves.  Raises PlacementError for a view, or a tensor that
    would not lie inside the buffer.
    """
    if t.view_src is not None:
        raise PlacementError(f"{describe(t)} is a view: its root {t.view_src.name!r} decides where it lives")
    if buffer is not None and not gs_range_fits(offset, t.layout.nbytes, buffer.size):
        raise PlacementError(f"{describe(t)}: {t.layout.nbytes} bytes at offset {offset} do not fit a buffer of "
                             f"{buffer.size} bytes of backend {buffer.backend.name!r}")
    t.bind(buffer, offset, None)


def inplace_ops():
    """The ops that ggml computes in place, a frozenset of names."""
    return _INPLACE_OPS
