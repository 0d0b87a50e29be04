# cython: language_level=3
"""Tensors and their addresses; leases, and the base classes of backends and buffers.

A Tensor has type, extents, strides, op and sources, which never change.  Its address has a lifetime:

  permanent   a weight or KV cache: `_lease` is None, valid while the buffer is open
  leased      from an allocator or a scheduler: valid while `_lease.alive`
  view        computed from the address of `view_src`, never stored

so that no tensor has a dangling address once an arena is freed or planned again.
Corresponds to struct ggml_tensor, but with checked data and buffer.

Includes, before the code below:

    backends    Leases, and the base classes of backends and buffers.
    nodes       NodeTable: tensors as gs_node structs, for compiled kernels and support queries in C.
"""

from operator import index as _index
from weakref import WeakSet

from ggml_sched.core.graph.types import inplace_ops, op_numbers
from ggml_sched.errors import BackendError, GraphError, PlacementError, no_host_memory

cimport cython
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_WarnEx
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memmove, memset

from ggml_sched._c cimport *
from ggml_sched.core.graph.flat cimport node_name_op
from ggml_sched.core.graph.types cimport (
    OP_NAMES, TYPE_OBJECTS, ints_tuple, layout_contiguous, layout_n_elements,
)

include "backends.pxi"
include "nodes.pxi"

cdef tuple _ENDINGS = ("", " (view)", " (reshaped)", " (permuted)", " (transposed)", " (cont)", " (copy)")


cpdef str label(Tensor t):
    """How messages name a tensor: its name in quotes; without one, its id in the graph that was last made with it."""
    if t.name:
        return repr(t.name)
    return f"tensor {t.mark}" if t.mark >= 0 else "unnamed tensor"


cdef str describe(Tensor t):
    return f"{label(t)} ({t.op} {t.type} {list(t.ne)})"


cpdef str lone_surrogate(str text):
    """The first lone surrogate of a text, such as "U+D800", or "": it is no character, and no file or terminal takes it.
    """
    cdef Py_UCS4 c
    for c in text:
        if 0xD800 <= c <= 0xDFFF:
            return f"U+{<int>c:04X}"
    return ""


cdef str bounded_name(str name):
    """A name that an op generates: of more than MAX_GENERATED characters the first and the last ones.

    Otherwise names would double with each copy of a copy, and grow with each view of a view.  The result is the same
    whether the name was bounded before its last endings were appended or only after.
    """
    cdef Py_ssize_t half = (MAX_GENERATED - 3) // 2
    if len(name) <= MAX_GENERATED:
        return name
    return f"{name[:half]}...{name[len(name) - half:]}"


cdef frozenset flag_names(int flags):
    names = []
    if flags & GS_FLAG_INPUT:
        names.append("input")
    if flags & GS_FLAG_OUTPUT:
        names.append("output")
    return frozenset(names)


# Models build a new graph for every step: the freelist reuses the memory of the last graph's tensors, at most 1.5 MB.
@cython.freelist(4096)
cdef class Tensor:
    """One value of a graph: metadata only, made by the methods of `Context`.

    `ne` are elements and `nb` byte strides, innermost dimension first (ggml's order).
    """

    def __init__(self):
        raise TypeError("tensors are made by a Context: ctx.tensor(...), ctx.mul_mat(...)")

    # -- facts ------------------------------------------------------------

    @property
    def name(self):
        """The name in messages, plans and tables: given, or made from that of a tensor it views or copies; else "".

        A name that is made has at most 256 characters: of a longer one the middle is left out.
        """
        return self.full_name()

    cdef str full_name(self):
        """The name.  Its endings are appended on the first read, because most names are never read."""
        cdef uint64_t rest = self.endings
        cdef str endings = ""
        while rest:
            endings = <str>_ENDINGS[rest % N_ENDINGS] + endings
            rest //= N_ENDINGS
        if self.endings:
            self._name = bounded_name(self._name + endings)
            self.endings = 0
        return self._name

    cdef void name_after(self, Tensor t, int ending):
        """Set the name to t's current name with an ending (ENDS_*)."""
        if t.endings > <uint64_t>0xffffffffffffffff // N_ENDINGS - 1:
            t.full_name()
        self._name = t._name
        self.endings = t.endings * N_ENDINGS + <uint64_t>ending

    @property
    def resident(self):
        """"weight", "kv" or "": what a graph file says of a leaf."""
        return "" if self._resident is None else self._resident

    @property
    def type(self):
        """`gs.Type` of the elements."""
        return TYPE_OBJECTS[self.layout.type]

    @property
    def op(self):
        """ggml's op name, "NONE" for a leaf; sub-ops are spelled "UNARY:SILU", "GLU:SWIGLU"."""
        return OP_NAMES[self.layout.op]

    @property
    def ne(self):
        """Extents in elements, a 4-tuple, innermost first."""
        return (self.layout.ne[0], self.layout.ne[1], self.layout.ne[2], self.layout.ne[3])

    @property
    def nb(self):
        """Strides in bytes, a 4-tuple, innermost first; for quantised types nb[0] is the bytes of a block."""
        return (self.layout.nb[0], self.layout.nb[1], self.layout.nb[2], self.layout.nb[3])

    @property
    def nbytes(self):
        """Bytes from the first to the last element, gaps included."""
        return self.layout.nbytes

    @property
    def n_elements(self):
        return layout_n_elements(&self.layout)

    @property
    def op_params(self):
        """ggml's parameters of the op, int32 words, a tuple; trailing zeros are cut."""
        return ints_tuple(self.params, self.n_params)

    @property
    def flags(self):
        """frozenset of "input" and "output"."""
        return flag_names(self._flags)

    @property
    def deps(self):
        """A node's alloc dependencies (`Context.keep_until`): their memory stays allocated until the node is done."""
        return () if self._deps is None else self._deps

    @property
    def is_contiguous(self):
        return layout_contiguous(&self.layout)

    @property
    def is_view(self):
        return self.view_src is not None

    @property
    def root(self):
        """The tensor whose memory this one has: of a view its root, else itself."""
        return self if self.view_src is None else self.view_src

    @property
    def computes(self):
        """Whether computing the tensor takes a kernel: False for leafs, VIEW, RESHAPE, PERMUTE and TRANSPOSE."""
        return self.layout.op > GS_OP_TRANSPOSE

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

    cdef int64_t c_offset(self) noexcept:
        """Bytes from the start of `c_buffer()`; meaningless without one."""
        return self._offset if self.view_src is None else self.view_src._offset + self.view_offs

    cdef char *plain(self) noexcept:
        """The address of the data, if the host may copy bytes there without calling the backend (`BufferBase.plain`).

        NULL for other memory, for a tensor without an address, and for data that does not lie inside the buffer.
        """
        cdef BufferBase buffer = self.c_buffer()
        cdef int64_t at = self.c_offset()
        if buffer is None or not buffer.plain or not gs_range_fits(at, self.layout.nbytes, buffer.size):
            return NULL
        return <char *><size_t>buffer.base + at

    cdef BufferBase settled(self):
        """The buffer of a permanent address, or of one from an allocator; None for an address from a scheduler."""
        cdef Tensor t = self if self.view_src is None else self.view_src
        if t._lease is not None and t._lease.transient:
            return None
        return self.c_buffer()

    cdef int settle(self) except -1:
        """Wait for queued computes that use the tensor at its address; call it before `bind` changes the address."""
        return 0 if self._buffer is None or self._buffer.closed else self._buffer.settle()

    cdef void bind(self, BufferBase buffer, int64_t offset, Lease lease) noexcept:
        """Give a tensor that is not a view an address, or, with buffer None, take it away."""
        if self._lease is not None and self._lease is not lease:
            self._lease.rebound = True
        self._buffer = buffer
        self._offset = offset
        self.overwritten = False
        self._lease = lease
        if lease is None or not lease.transient:
            self.context_state.epoch += 1       # a resident, of which plans have to know

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
        return None if self.c_buffer() is None else self.c_offset()

    @property
    def is_resident(self):
        """True for a tensor (or view of one) whose address outlives any plan: weights, KV cache."""
        cdef Tensor t = self if self.view_src is None else self.view_src
        return t._lease is None and self.c_buffer() is not None

    def __repr__(self):
        shape = "x".join(map(str, self.ne))
        called = repr(self.name) if self.name else str(self.mark) if self.mark >= 0 else "unnamed"
        return f"<Tensor {called} {self.op} {self.type} [{shape}]>"

    # -- data ---------------------------------------------------------------

    def touch(self):
        """Mark the data (of a view: its root's) as changed, so that copies of it are stale.

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
        It may be anything with DLPack, the buffer protocol, `__array__` or the CUDA array interface, and have a dtype
        of ml_dtypes.  Quantised types take floats, which are quantised, or uint8 blocks of `nbytes`.
        Where an input was never set, setting a view of it makes the rest zeros.  Setting weights and caches first waits
        for queued computes.  Raises PlacementError without an address, ValueError for a wrong shape or an integer that
        the type does not hold, TypeError for a wrong dtype: integer types take integers only.
        """
        _write_data(self, array)

    cpdef bint stage(self, bytes data) except -1:
        """A fast `set` from bytes, for an input whose data waits on the host until a compute loads it.

        Does nothing and returns False for any other tensor, or another number of bytes.
        """
        cdef Lease lease = self._lease
        if (lease is None or not lease.stages or lease.through or self.layout.op != GS_OP_NONE or data is None
                or self.view_src is not None or self.c_buffer() is None or len(data) != self.layout.nbytes
                or not layout_contiguous(&self.layout)):
            return False
        self.version += 1
        self.overwritten, self.stash = False, data
        return True

    cpdef bint fetch(self, out) except -1:
        """A fast `Backend.get_tensor` into the contiguous buffer `out`, for `plain` buffers; does not wait.

        Does nothing and returns False for any other memory, or another number of bytes.
        """
        cdef const char *at
        cdef Py_buffer view
        cdef bint fits
        PyObject_GetBuffer(out, &view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS)
        at = self.plain()       # only now: the code that gave `out` may have closed the tensor's buffer
        fits = at != NULL and view.len == self.layout.nbytes
        if fits:
            memmove(view.buf, at, <size_t>view.len)
        PyBuffer_Release(&view)
        return fits

    @property
    def shape(self):
        """The extents in NumPy's order, as `numpy()` has them: `ne` reversed, without leading ones."""
        return _data_views.shape_of(self)

    @property
    def dtype(self):
        """The dtype of `numpy()`: float32 for bf16 and quantised types."""
        return _data_views.dtype_of(self)

    def _repr_html_(self):
        """Notebooks show the tensor, and the data if it has some."""
        return _data_views.as_html(self)

    def numpy(self):
        """The data as a new numpy array, extents reversed and leading ones dropped; quantised types as float32.

        Raises PlacementError without an address, BackendError from a backend without memory, HazardError for a
        result that a scheduler computed and whose memory has served other nodes since (flag it as an output).
        """
        return _read_data(self)

    def __getbuffer__(self, Py_buffer *view, int flags):
        """A read-only view of the data in host memory, for `memoryview(t)`; see graph/hostviews.py."""
        PyObject_GetBuffer(_data_views.as_buffer(self), view, flags)

    def __array__(self, dtype=None, copy=None):
        """The data as an array, for `numpy.asarray(t)`.

        Weights and caches in host memory: a read-only view, which stays valid when the buffer is closed and shows what
        later computes write.  Other memory, bf16 and quantised types: a copy as from `numpy`.  With copy=False raises
        HazardError for memory that later computes use again, ValueError for types that NumPy has not.
        """
        return _data_views.as_array(self, dtype, copy)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """The data as a DLPack capsule in host memory, for `torch.from_dlpack(t)` and `jax.dlpack.from_dlpack(t)`.

        A view or a copy as from `__array__`, but bf16 stays bf16, and a consumer of DLPack before 1.0, which has no
        read-only memory, gets a copy.  Raises BufferError for a stream, for another device, and for copy=False where
        such a consumer or a quantised type needs a copy.
        """
        return _data_views.as_capsule(self, stream, max_version, dl_device, copy)

    def __dlpack_device__(self):
        """(1, 0): host memory."""
        return (1, 0)


# The functions that write and read the data of tensors, and the module that gives views of the data; modules that
# import this one register them (register_tensor_data).
cdef object _write_data
cdef object _read_data
cdef object _data_views


def register_tensor_data(write, read, views):
    """Let `Tensor.set` call write(tensor, array), `Tensor.numpy` read(tensor), and the array protocols the functions of
    the module `views`: as_buffer, as_array, as_capsule."""
    global _write_data, _read_data, _data_views
    _write_data, _read_data, _data_views = write, read, views


def no_address(Tensor t not None):
    """The sentence of an error about a tensor without an address: why it has none, and what gives it one."""
    cdef Tensor root = t if t.view_src is None else t.view_src
    named = label(t)
    if root._buffer is None:
        return f"{named} has no address: place it (backend.alloc_tensors) or plan its graph (scheduler.alloc) first"
    where = f"on backend {root._buffer.backend.name!r}"
    if root._lease is None:
        return f"{named} has no address: its buffer {where} was closed"
    if root._lease.ended_by is not None:
        return f"{named} has no address: it was in an arena {where}, and {root._lease.ended_by}"
    return (f"{named} has no address: it was in an arena {where}, which another graph uses now or which was freed; "
            "allocate its graph again (scheduler.alloc)")


def wait_for_queued(Tensor t not None):
    """Wait for queued computes that use a tensor's memory, before other code reads or writes it."""
    (t if t.view_src is None else t.view_src).settle()


def bind_resident(Tensor t not None, BufferBase buffer, Py_ssize_t offset):
    """Give a tensor a permanent address, or take it away (buffer None).

    For backends that place weights themselves.  Waits for queued computes that use the tensor where it is.  Raises
    PlacementError for a view, or a tensor that would not lie inside the buffer.
    """
    if t.view_src is not None:
        raise PlacementError(f"{describe(t)} is a view: its root {label(t.view_src)} decides where it lives")
    if buffer is not None and not gs_range_fits(offset, t.layout.nbytes, buffer.size):
        raise PlacementError(f"{describe(t)}: {t.layout.nbytes} bytes at offset {offset} do not fit a buffer of "
                             f"{buffer.size} bytes of backend {buffer.backend.name!r}")
    t.settle()
    t.bind(buffer, offset, None)
