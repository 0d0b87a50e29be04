# cython: language_level=3
"""Contexts: they make and own tensors, with one method for each op.

Invariant: every tensor that a Context returns has a consistent layout whose byte size was computed without overflow; a
view lies inside its root; all sources are from open contexts.  Corresponds to ggml_context and ggml_new_tensor.

Includes, before the code below:

    wiring           Rules for the sources, the root and the destination of each op.
    ops_elementwise  Op methods of a Context: arithmetic, unary functions, gated units, reductions, norms.
    ops_matrix       Op methods of a Context: matrix products.
    ops_copy         Op methods of a Context that move elements: rows, copies, repetition, joining, padding.
    ops_view         Op methods of a Context: views, which share their root's memory and compute nothing.
    ops_recurrent    Op methods of a Context for recurrent (state space) models: a short convolution, and a scan.
    ops_attention    Op methods of a Context for attention: masks, soft_max, rope, flash attention.
"""

from operator import index as _index

from ggml_sched.core.graph.types import _GLU_KINDS, _UNARY_KINDS
from ggml_sched.errors import GraphError, shown

from cpython.number cimport PyIndex_Check
from cpython.object cimport PyObject
from cpython.pyport cimport PY_SSIZE_T_MAX, PY_SSIZE_T_MIN
from libc.math cimport ceil, isfinite, isnan
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcpy, memset

from ggml_sched._c cimport *
from ggml_sched.core.graph.tensor cimport (
    ENDS_CONT, ENDS_COPY, ENDS_PERMUTED, ENDS_RESHAPED, ENDS_TRANSPOSED, ENDS_VIEW, ContextState, Tensor, bounded_name,
    describe, label, lone_surrogate,
)
from ggml_sched.core.graph.types cimport (
    OP_IDS, OP_NAMES, TYPE_NAMES, layout_can_repeat, layout_contiguous, layout_equal, layout_is_empty,
    layout_may_overlap, layout_n_elements, layout_permutes, layout_same_ne, layout_set_dense, layout_set_nbytes,
    numbers_of, op_is_view, traits, type_id,
)

include "wiring.pxi"
include "ops_elementwise.pxi"
include "ops_matrix.pxi"
include "ops_copy.pxi"
include "ops_view.pxi"
include "ops_recurrent.pxi"
include "ops_attention.pxi"


cdef double number(str op, Tensor a, str name, object x) except? -1:
    """Convert the argument `name` of an op on `a` (None: on no tensor).  TypeError for what is no number, GraphError
    for NaN and for an int beyond float64."""
    cdef double value
    if type(x) is float:
        value = x
    else:
        try:
            value = x
        except OverflowError:
            raise GraphError(f"{begin_of(op, a)}{name} = {shown(x)} is beyond float32") from None
        except TypeError:
            raise TypeError(f"{begin_of(op, a)}{name} is a number, not {shown(x)}") from None
    if isnan(value):
        raise GraphError(f"{begin_of(op, a)}{name} = {value} is no number")
    return value


cdef int32_t f32_word(str op, Tensor a, str name, object x) except? -1:
    """Convert an argument that becomes one of the op's parameters: a float32, as the int32 word that ggml stores."""
    cdef double value = number(op, a, name, x)
    cdef float f = <float>value
    cdef int32_t word
    if isfinite(value) and not isfinite(f):
        raise GraphError(f"{begin_of(op, a)}{name} = {value} is beyond float32")
    memcpy(&word, &f, sizeof(word))
    return word


cdef Tensor with_params(Tensor t, const int32_t *words, int n):
    """Give t, which was just made, its op_params: the first n of `words`, without trailing zeros.  Returns t."""
    while n and words[n - 1] == 0:
        n -= 1
    t.params = t.context_state.keep(words, n)
    t.n_params = n
    return t


cdef extern from "Python.h":
    # Declared here, because Cython's declaration takes no NULL as `exc`.  With NULL, numbers that are too large are
    # clipped, and no exception is raised.
    Py_ssize_t PyNumber_AsSsize_t(object x, PyObject *exc) except? -1


cdef int read_ne(object ne, int64_t *out, str op="", Tensor of=None) except -1:
    """Read one to four extents, innermost first, into out[4], filled up with 1; errors name op and tensor, if given."""
    cdef Py_ssize_t i, n, extent
    if isinstance(ne, int):
        ne = (ne,)
    elif PyIndex_Check(ne):
        try:
            len(ne)             # an array: arrays have __index__, too
        except TypeError:
            ne = (ne,)
    try:
        n = len(ne)
    except TypeError:
        raise TypeError(f"{begin_of(op, of)}extents are one to {GS_MAX_DIMS} ints, not {shown(ne)}") from None
    if not 1 <= n <= GS_MAX_DIMS:
        raise GraphError(f"{begin_of(op, of)}a tensor has 1 to {GS_MAX_DIMS} dimensions, not {n}")
    for i in range(n):
        given = ne[i]
        extent = (PyNumber_AsSsize_t(given, NULL) if type(given) is int
                  else index_of(op, of, f"extent of dimension {i}", given))
        if extent < 0 or extent == PY_SSIZE_T_MAX and extent != given:
            raise GraphError(f"{begin_of(op, of)}extent {shown(given)} of dimension {i} is not in 0 .. 2**63 - 1")
        out[i] = extent
    for i in range(n, GS_MAX_DIMS):
        out[i] = 1
    return 0


cdef Py_ssize_t index_of(str op, Tensor a, str name, object x) except? -1:
    """Convert what has __index__; of numbers beyond 64 bits the nearest.  TypeError for a float, which a C parameter
    would truncate."""
    try:
        return PyNumber_AsSsize_t(x, NULL)
    except TypeError:
        raise TypeError(f"{begin_of(op, a)}{name} is an int, not {shown(x)}") from None


cdef int64_t whole(str op, Tensor a, str name, object x) except? -1:
    """Convert the integer argument `name` of an op on `a`."""
    cdef Py_ssize_t n = PyNumber_AsSsize_t(x, NULL) if type(x) is int else index_of(op, a, name, x)
    if (n == PY_SSIZE_T_MAX or n == PY_SSIZE_T_MIN) and n != x:
        raise GraphError(f"{op}: {describe(a)}: {name} = {shown(x)} is beyond 64 bits")
    return n


cdef int whole32(str op, Tensor a, str name, object x) except? -1:
    """Convert an integer argument that becomes one of the op's parameters, which are int32 words as in ggml."""
    cdef int64_t n = whole(op, a, name, x)
    if not -INT32_MAX - 1 <= n <= INT32_MAX:
        raise GraphError(f"{op}: {describe(a)}: {name} = {n} is beyond int32")
    return <int>n


cdef str begin_of(str op, Tensor a):
    """How a message of an op on `a` begins; both may be left out."""
    return f"{op}: {describe(a)}: " if a is not None else f"{op}: " if op else ""


cdef int fill_dense(gs_layout *a, int op, int type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) except -1:
    """Fill in a contiguous layout; GraphError when a row is not a multiple of the type's block, or a size overflows."""
    a.op = op
    a.type = type
    a.ne[0] = ne0
    a.ne[1] = ne1
    a.ne[2] = ne2
    a.ne[3] = ne3
    if ne0 % traits[type].block_size:
        raise GraphError(
            f"{OP_NAMES[op]}: rows of {ne0} elements do not hold whole {TYPE_NAMES[type]} blocks "
            f"of {traits[type].block_size}")
    if layout_set_dense(a) != GS_OK:
        raise GraphError(f"{OP_NAMES[op]}: {TYPE_NAMES[type]} [{ne0}, {ne1}, {ne2}, {ne3}] has more than 2**63 bytes")
    return 0


cdef int check_same_count(str op, Tensor a, const int64_t *ne) except -1:
    """GraphError unless ne[4] has as many elements as a."""
    cdef int64_t count = 1
    cdef int i
    for i in range(GS_MAX_DIMS):
        if gs_checked_mul(count, ne[i], &count) != GS_OK:
            raise GraphError(f"{op}: {describe(a)}: extents {numbers_of(ne)} overflow")
    if count != layout_n_elements(&a.layout):
        raise GraphError(f"{op}: {describe(a)} does not hold {numbers_of(ne)} elements")
    return 0


cdef int check_batches(str op, Tensor a, Tensor b) except -1:
    """GraphError unless b's extents in dimensions 2 and 3 are multiples of a's."""
    cdef int i
    for i in range(2, GS_MAX_DIMS):
        if a.layout.ne[i] == 0:
            if b.layout.ne[i] != 0:
                raise GraphError(f"{op}: dimension {i} of {describe(a)} is empty, of {describe(b)} it is not")
        elif b.layout.ne[i] % a.layout.ne[i]:
            raise GraphError(f"{op}: dimension {i} of {describe(a)} does not repeat to {describe(b)}")
    return 0


cdef int check_mask(str op, Tensor mask, double max_bias, Tensor a, int64_t n_kv) except -1:
    """GraphError unless `mask` fits attention with the rows, heads and batches of `a` over n_kv keys; it may be None if
    max_bias is 0."""
    cdef const int64_t *ne
    if mask is None:
        if max_bias > 0:
            raise GraphError(f"{op}: max_bias {max_bias} for {describe(a)} needs a mask")
        return 0
    ne = mask.layout.ne
    if mask.layout.type != GS_TYPE_F32 and mask.layout.type != GS_TYPE_F16:
        raise GraphError(f"{op}: mask {describe(mask)} must be f32 or f16")
    if not (layout_contiguous(&mask.layout) and ne[0] == n_kv and ne[1] >= a.layout.ne[1]
            and ne[2] > 0 and a.layout.ne[2] % ne[2] == 0 and ne[3] > 0 and a.layout.ne[3] % ne[3] == 0):
        raise GraphError(f"{op}: mask {describe(mask)} does not fit {describe(a)} and {n_kv} keys")
    return 0


cdef int check_sinks(str op, Tensor sinks, int64_t n_head) except -1:
    if sinks is not None and (sinks.layout.type != GS_TYPE_F32 or layout_n_elements(&sinks.layout) != n_head):
        raise GraphError(f"{op}: sinks {describe(sinks)} must be f32 [{n_head}], one for each head")
    return 0


cdef tuple cut_none(tuple src):
    """Sources without the empty slots at the end."""
    cdef Py_ssize_t n = len(src)
    while n and src[n - 1] is None:
        n -= 1
    return src[:n]


cdef str checked_name(object given):
    """The name of a tensor as a text; GraphError for one with a lone surrogate."""
    cdef str name = str(given)
    cdef str found = lone_surrogate(name)
    if found:
        raise GraphError(f"tensor {name!r}: the name has the lone surrogate {found}")
    return name


cdef class ContextBase:
    """The base of the classes with op methods: owns the tensors, and has the functions that make them."""

    def __cinit__(self, name=""):
        self.context_state = ContextState.__new__(ContextState)
        self.context_state.name = str(name)
        self._tensors = []

    @property
    def name(self):
        return self.context_state.name

    @property
    def closed(self):
        return self.context_state.closed

    @property
    def tensors(self):
        """Every tensor made so far, in order."""
        return tuple(self._tensors)

    def close(self):
        """Release the tensors; idempotent.  Using a released tensor in a new op or graph raises GraphError."""
        self.context_state.closed = True
        self._tensors = []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __repr__(self):
        return f"<Context {self.name!r}: {len(self._tensors)} tensors{', closed' if self.closed else ''}>"

    # -- makers -------------------------------------------------------------

    cdef Tensor add_tensor(self, int op, gs_layout *layout, tuple src, Tensor view, int64_t view_offs):
        """Make a tensor without name; all tensors are made here.  It shares the memory of `view` (None: of no tensor)
        from byte view_offs on; if `view` is itself a view, its root is stored."""
        cdef Tensor s, t
        cdef int64_t end
        if self.context_state.closed:
            raise GraphError(f"{OP_NAMES[op]}: context {self.context_state.name!r} is closed")
        for s in src:
            if s is not None and s.context_state.closed:
                raise GraphError(f"{OP_NAMES[op]}: source {describe(s)} belongs to closed context "
                                 f"{s.context_state.name!r}")
        layout.op = op
        t = Tensor.__new__(Tensor)
        if view is not None:
            if op > GS_OP_TRANSPOSE and layout_may_overlap(layout):
                # The final value would depend on the backend and its number of threads.
                raise GraphError(f"{OP_NAMES[op]}: {describe(view)} is written to, and elements of it share bytes: "
                                 f"{strides_of(layout)}")
            if view.view_src is not None:
                if gs_checked_add(view_offs, view.view_offs, &view_offs) != GS_OK:
                    raise GraphError(f"{OP_NAMES[op]}: offset {view_offs} into {describe(view)} overflows")
                view = view.view_src
            if view_offs < 0 or gs_checked_add(view_offs, layout.nbytes, &end) != GS_OK or (
                    end > view.layout.nbytes):
                raise GraphError(
                    f"{OP_NAMES[op]}: {layout.nbytes} bytes at offset {view_offs} do not lie inside "
                    f"{describe(view)} of {view.layout.nbytes} bytes")
            t.view_src = view
            t.view_offs = view_offs
        t.context_state = self.context_state
        t._name = ""
        t.layout = layout[0]
        t.src = src
        t.mark = -1
        self._tensors.append(t)
        return t

    cdef Tensor add_named(self, int op, gs_layout *layout, tuple src, Tensor view, int64_t view_offs, Tensor like,
                          int ending):
        """Make a tensor as add_tensor does, with the name of `like` and an ending (ENDS_*)."""
        cdef Tensor t = self.add_tensor(op, layout, src, view, view_offs)
        t.name_after(like, ending)
        return t

    cdef Tensor add_like(self, int op, Tensor a, tuple src, bint inplace=False):
        """A result with the type and ne of `a`: a new dense tensor, or, with `inplace`, a view of `a`."""
        cdef gs_layout layout
        if inplace:
            layout = a.layout
            if a.endings or a._name:
                return self.add_named(op, &layout, src, a, 0, a, ENDS_VIEW)
            return self.add_tensor(op, &layout, src, a, 0)
        fill_dense(&layout, op, a.layout.type, a.layout.ne[0], a.layout.ne[1], a.layout.ne[2], a.layout.ne[3])
        return self.add_tensor(op, &layout, src, None, 0)

    cdef Tensor add_dense(self, int op, int type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3, tuple src):
        cdef gs_layout layout
        fill_dense(&layout, op, type, ne0, ne1, ne2, ne3)
        return self.add_tensor(op, &layout, src, None, 0)

    def tensor(self, type, ne, name="", input=False, output=False):
        """A new leaf of `type` and extents `ne` (one to four, innermost first), contiguous.

        Raises GraphError for an unknown type, a row that does not hold whole blocks, a byte size beyond 2**63, or a
        lone surrogate in the name, which no file or terminal takes.
        """
        cdef int64_t extents[4]
        cdef Tensor t
        read_ne(ne, extents)
        name = checked_name(name)
        t = self.add_dense(GS_OP_NONE, type_id(type), extents[0], extents[1], extents[2], extents[3], ())
        t._name = name
        t._flags = (GS_FLAG_INPUT if input else 0) | (GS_FLAG_OUTPUT if output else 0)
        return t

    def set_name(self, Tensor t not None, name):
        """Name a tensor for messages, plans and tables; returns it.  GraphError for a lone surrogate in the name."""
        t._name = checked_name(name)
        t.endings = 0
        return t

    def set_input(self, Tensor t not None):
        """Flag a tensor as set by the caller before each compute; returns it."""
        t._flags |= GS_FLAG_INPUT
        return t

    def set_output(self, Tensor t not None):
        """Flag a tensor whose data must survive until the next compute; returns it."""
        t._flags |= GS_FLAG_OUTPUT
        return t

    def keep_until(self, Tensor t not None, Tensor node not None):
        """Make `t` an alloc dependency of `node`: its memory stays allocated until `node` is done; returns `t`.

        A graph with the node also has the tensor, computes it before the node, and reuses its memory only after the
        node.  No copy of `t` is made, and placement does not change.  Call this before making the graph.  Raises
        GraphError for a node that computes nothing (a leaf, a view), or that is `t`.
        """
        for one in (t, node):
            if (<Tensor>one).context_state.closed:
                raise GraphError(f"keep_until: {describe(one)} belongs to closed context "
                                 f"{(<Tensor>one).context_state.name!r}")
        if node.layout.op == GS_OP_NONE or op_is_view(node.layout.op):
            raise GraphError(f"keep_until: {describe(node)} computes nothing")
        if t is node:
            raise GraphError(f"keep_until: {describe(node)} cannot wait for itself")
        if node._deps is None:
            node._deps = (t,)
        elif t not in node._deps:
            node._deps += (t,)
        return t

    def restore(self, str op, type, ne, nb, src=(), Tensor view_src=None, view_offs=0, op_params=(),
                flags=(), name="", resident=""):
        """A tensor with every field given, as a graph file holds it; strides and views are checked.

        Raises GraphError for an unknown op or type, strides that do not fit, a view outside its root, sources or a
        root that the op cannot have, and a lone surrogate in the name.
        """
        cdef gs_layout layout
        cdef Tensor t
        cdef int32_t[GS_MAX_OP_PARAMS] words
        cdef int i, n_words
        found = OP_IDS.get(op)
        if found is None:
            raise GraphError(f"tensor {name!r}: unknown op {op!r}")
        layout.type = type_id(type)
        layout.op = found
        read_ne(ne, layout.ne)
        read_ne(nb, layout.nb)
        if layout.ne[0] % traits[layout.type].block_size:
            raise GraphError(f"tensor {name!r}: rows of {layout.ne[0]} do not hold whole {TYPE_NAMES[layout.type]} blocks")
        if traits[layout.type].block_size > 1 and layout.nb[0] != traits[layout.type].type_size:
            raise GraphError(f"tensor {name!r}: {TYPE_NAMES[layout.type]} blocks of {traits[layout.type].type_size} "
                             f"bytes do not lie {layout.nb[0]} bytes apart")
        if layout_set_nbytes(&layout) != GS_OK:
            raise GraphError(f"tensor {name!r}: ne {list(ne)} with nb {list(nb)} has more than 2**63 bytes or elements")
        if len(src) > GS_MAX_SRC:
            raise GraphError(f"tensor {name!r}: {len(src)} sources, at most {GS_MAX_SRC}")
        for s in src:
            if s is not None and not isinstance(s, Tensor):
                raise TypeError(f"tensor {name!r}: a source is a Tensor or None, not {s!r}")
        given = tuple(op_params)
        if len(given) > GS_MAX_OP_PARAMS or not all(isinstance(w, int) and -2**31 <= w < 2**31 for w in given):
            raise GraphError(f"tensor {name!r}: op_params are at most {GS_MAX_OP_PARAMS} int32 words")
        n_words = <int>len(given)
        for i in range(n_words):
            words[i] = given[i]
        for flag in flags:
            if flag not in ("input", "output"):
                raise GraphError(f"tensor {name!r}: unknown flag {flag!r}")
        name, resident, src = checked_name(name), str(resident), tuple(src)
        view_offs = _index(view_offs)
        check_wiring(name, &layout, src, view_src, view_offs, resident)
        t = self.add_tensor(found, &layout, cut_none(src), view_src, view_offs)
        with_params(t, words, n_words)
        t._name = name
        t._flags = (GS_FLAG_INPUT if "input" in flags else 0) | (GS_FLAG_OUTPUT if "output" in flags else 0)
        t._resident = resident or None
        return t
