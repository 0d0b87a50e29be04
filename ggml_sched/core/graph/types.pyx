# cython: language_level=3
"""Element types, op names, and checked arithmetic on layouts.

Has the Python classes over the type table (include/ggml_sched/types.h).  Invariant: every size is computed with the
functions of include/ggml_sched/checked.h.  Corresponds to ggml's type_traits, ggml_row_size and ggml_nbytes.

Includes, before the code below:

    tuples     Making Python tuples from C arrays of numbers.
    ops_table  The op table: names and in-place rules by number.
"""

import enum

from ggml_sched.errors import GraphError

from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport int64_t

from ggml_sched._c cimport *

include "tuples.pxi"
include "ops_table.pxi"


class _TypeSizes(enum.IntEnum):
    """The properties of each member of the enum Type."""

    def __str__(self):
        return TYPE_NAMES[int(self)]

    @property
    def block_size(self):
        """Elements per block; 1 for types that are not quantised."""
        return traits[<int>int(self)].block_size

    @property
    def type_size(self):
        """Bytes per block."""
        return traits[<int>int(self)].type_size

    @property
    def is_quantized(self):
        return traits[<int>int(self)].block_size > 1


cdef dict TYPE_NAMES = {}
cdef dict _TYPE_BY_NAME = {}
cdef list TYPE_OBJECTS = [None] * GS_N_TYPES


def _fill_type_table():
    """Read the table of include/ggml_sched/types.h; returns {name of a member of Type: its number}."""
    cdef int number
    members = {}
    for number in range(GS_N_TYPES):
        traits[number] = gs_traits_of_type(number)
        if gs_type_name(number) != NULL:
            # ggml spells the k-quants with a capital K ("q4_K").
            name = (<bytes>gs_type_name(number)).decode()
            TYPE_NAMES[number] = name
            _TYPE_BY_NAME[name] = _TYPE_BY_NAME[name.lower()] = number
            members[name.upper()] = number
    return members


Type = _TypeSizes("Type", _fill_type_table(), module=__name__)
Type.__doc__ = "Element types, numbered and named as in ggml; `str(t)` is ggml's lower-case name."
for _member in Type:
    TYPE_OBJECTS[_member] = _member


cdef int type_id(object type) except -1:
    """The number of a type given as `gs.Type`, ggml name or number; GraphError if unknown."""
    cdef int number
    if isinstance(type, str):
        found = _TYPE_BY_NAME.get(type)
        if found is None:
            found = _TYPE_BY_NAME.get(type.lower())
        if found is None:
            raise GraphError(f"unknown tensor type {type!r}{like_type(type)}")
        return found
    if isinstance(type, (int, Type)) and not isinstance(type, bool):
        if 0 <= type < GS_N_TYPES:
            number = type
            if traits[number].block_size > 0:
                return number
        raise GraphError(f"unknown tensor type number {int(type)}")
    raise TypeError(f"a type is a gs.Type or its name, not {type!r}{like_type(getattr(type, '__name__', type))}")


cdef dict _OTHER_NAMES = {"bfloat16": "bf16", "half": "f16", "float": "f32", "single": "f32", "double": "f64",
                          "short": "i16", "int": "i32", "long": "i64"}


cdef str like_type(object given):
    """The end of a message about an unknown type: what ggml calls such a type; "" where ggml has none.

    `given`: a dtype of NumPy or of PyTorch, or the name of one, such as "float32", "half" or "torch.bfloat16".
    """
    cdef str name = str(given).lower().rpartition(".")[2]
    cdef str found = _OTHER_NAMES.get(name)
    for full, short in (("float", "f"), ("int", "i")):
        if name.startswith(full) and short + name[len(full):] in _TYPE_BY_NAME:
            found = short + name[len(full):]
    return "" if found is None else f"; ggml calls it {found!r}"


cdef str numbers_of(const int64_t *n):
    """Extents or strides as text, for messages."""
    return f"[{n[0]}, {n[1]}, {n[2]}, {n[3]}]"


cdef int layout_set_nbytes(gs_layout *a) noexcept nogil:
    """Set nbytes of a layout by its strides: the bytes from the first to the last element.

    GS_OVERFLOW also if the number of elements exceeds 63 bits, which is possible in few bytes when strides are 0.
    """
    cdef int64_t total, step, count = 1
    cdef int i
    cdef int block = traits[a.type].block_size
    if layout_is_empty(a):
        a.nbytes = 0
        return GS_OK
    # The usual case, without checks: with extents below 2**15 and strides below 2**45 nothing overflows.
    if (a.ne[0] | a.ne[1] | a.ne[2] | a.ne[3]) >> 15 == 0 and (a.nb[0] | a.nb[1] | a.nb[2] | a.nb[3]) >> 45 == 0:
        total = (a.ne[1] - 1) * a.nb[1] + (a.ne[2] - 1) * a.nb[2] + (a.ne[3] - 1) * a.nb[3]
        if block == 1:
            a.nbytes = total + traits[a.type].type_size + (a.ne[0] - 1) * a.nb[0]
        else:
            a.nbytes = total + a.ne[0] // block * a.nb[0]
        return GS_OK
    for i in range(GS_MAX_DIMS):
        if gs_checked_mul(count, a.ne[i], &count) != GS_OK:
            return GS_OVERFLOW
    if block == 1:
        total = traits[a.type].type_size
        i = 0
    else:
        if gs_checked_mul(a.ne[0] // block, a.nb[0], &total) != GS_OK:
            return GS_OVERFLOW
        i = 1
    while i < GS_MAX_DIMS:
        if gs_checked_mul(a.ne[i] - 1, a.nb[i], &step) != GS_OK or gs_checked_add(total, step, &total) != GS_OK:
            return GS_OVERFLOW
        i += 1
    a.nbytes = total
    return GS_OK


cdef int layout_set_dense(gs_layout *a) noexcept nogil:
    """Fill in nb and nbytes of a contiguous tensor from type and ne."""
    cdef int i
    cdef int64_t row
    a.nb[0] = traits[a.type].type_size
    if gs_checked_mul(a.ne[0] // traits[a.type].block_size, a.nb[0], &row) != GS_OK:
        return GS_OVERFLOW
    a.nb[1] = row
    for i in range(2, GS_MAX_DIMS):
        if gs_checked_mul(a.nb[i - 1], a.ne[i - 1], &a.nb[i]) != GS_OK:
            return GS_OVERFLOW
    return layout_set_nbytes(a)


cdef bint layout_may_overlap(const gs_layout *a) noexcept nogil:
    """Whether elements may share bytes: False if each stride is at least the bytes that smaller strides cover."""
    cdef int64_t count[GS_MAX_DIMS]
    cdef int64_t covered = traits[a.type].type_size
    cdef int i, k, finest
    cdef unsigned int done = 0
    if layout_is_empty(a):
        return False
    for i in range(GS_MAX_DIMS):
        count[i] = a.ne[i]
    count[0] //= traits[a.type].block_size
    for _ in range(GS_MAX_DIMS):
        finest = -1
        for k in range(GS_MAX_DIMS):
            if not done >> k & 1 and (finest < 0 or a.nb[k] < a.nb[finest]):
                finest = k
        done |= <unsigned int>1 << finest
        if count[finest] > 1:
            if a.nb[finest] < covered:
                return True
            covered += (count[finest] - 1) * a.nb[finest]
    return False


cdef bint layout_permutes(const gs_layout *a, const gs_layout *b) noexcept nogil:
    """Whether a has the dimensions of b, each an extent with its stride, in any order: as a PERMUTE of b would."""
    cdef int i, k
    cdef unsigned int used = 0
    for i in range(GS_MAX_DIMS):
        for k in range(GS_MAX_DIMS):
            if not used >> k & 1 and a.ne[i] == b.ne[k] and a.nb[i] == b.nb[k]:
                used |= <unsigned int>1 << k
                break
        else:
            return False
    return True
