# cython: language_level=3
"""The entry points of packing: `pack` for Python, pack_any_times for C.

Invariant: for any integers, pack_prepare receives times from 0 and sizes in int64, all checked; nothing is rounded.

Includes, before the code below:

    times  Times: converting any integers to ranks, which are the times of a packing.
"""

from operator import index as _index

import numpy as np

from ggml_sched.errors import Error, no_host_memory

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memcpy

from ggml_sched._c cimport *
from ggml_sched.core.pack.solve cimport *

include "times.pxi"


cdef int64_t PACK_MOST_TRIES = 0x3fffffffffffffff       # the largest budget: a sum of two still fits in int64
cdef const char *PACK_METHOD_WORDS[N_PACK_METHODS]      # indexed by PACK_METHOD_*
PACK_METHOD_WORDS[:] = [b"nothing to place", b"busiest first", b"larger first", b"longest first", b"larger area first",
                        b"best fit", b"place or lift", b"two ends", b"joined buffers"]


cdef const char *pack_method_word(int method) noexcept nogil:
    """The name of a PACK_METHOD_*, NULL for another number; valid as long as the process."""
    return PACK_METHOD_WORDS[method] if 0 <= method < N_PACK_METHODS else NULL


cpdef str method_name(int method):
    """The name of a PACK_METHOD_*."""
    if not 0 <= method < N_PACK_METHODS:
        raise IndexError(f"{method} is no method of packing")
    return (<bytes>pack_method_word(method)).decode()


cdef class Packing:
    """The result of `pack`.  Immutable.

    `offsets` is an int64 array in the caller's order, `arena` the bytes that these offsets need, `method` how they were
    found.  `bound` is the most bytes alive at one moment, `optimal` whether it is proven that no smaller arena exists,
    `tries` the number of tries of the search.
    """

    cdef readonly object offsets
    cdef readonly object arena
    cdef readonly object bound
    cdef readonly str method
    cdef readonly bint optimal
    cdef readonly object tries

    def __init__(self):
        raise TypeError("a Packing is made by pack()")

    def __len__(self):
        return len(self.offsets)

    def __repr__(self):
        if self.optimal:
            verdict = "optimal"
        else:
            verdict = f"{100 * (self.arena / self.bound - 1):.2f} % above the bound"
        return f"<Packing of {len(self.offsets)} buffers in {self.arena} bytes, {verdict}, by {self.method}>"


def pack(lower, upper, size, capacity=None, budget=None):
    """Choose offsets for buffers of `size` bytes alive over [lower, upper); those alive at the same time never overlap.

    Times are any integers, also negative or huge ones; a buffer with no lifetime or no bytes takes no space and has
    offset 0.  The search stops once the arena has at most `capacity` bytes; the best packing found is returned even if
    it needs more, so compare `arena`.  `budget` is the number of tries of the search, 0 for no search; the default
    takes at most a few seconds.  Equal inputs give equal results on every machine.

    Raises TypeError for anything but integers, ValueError for arrays of different lengths, a lifetime that
    ends before it begins or a negative size, capacity or budget, and Error when the sizes add up to more than 63
    bits hold.
    """
    cdef Py_buffer a, b, c, d
    cdef gs_pack_result out
    cdef int status
    cdef int32_t n, failed = -1
    cdef int64_t c_capacity = GS_PACK_NO_CAPACITY
    cdef int64_t c_budget = GS_PACK_DEFAULT_BUDGET
    cdef Packing packing = Packing.__new__(Packing)
    lower, upper = _pack_integers(lower, "lower"), _pack_integers(upper, "upper")
    size = _pack_integers(size, "size")
    if not len(lower) == len(upper) == len(size):
        raise ValueError(f"lower, upper and size differ in length: {len(lower)}, {len(upper)}, {len(size)}")
    if len(size) > PACK_MAX:
        raise ValueError(f"{len(size)} buffers are more than the {PACK_MAX} that can be packed at once")
    if capacity is not None:
        if _index(capacity) < 0:
            raise ValueError(f"capacity {capacity} is negative")
        c_capacity = min(_index(capacity), 0x7fffffffffffffff)
    if budget is not None:
        if _index(budget) < 0:
            raise ValueError(f"budget {budget} is negative")
        c_budget = min(_index(budget), PACK_MOST_TRIES)
    times = _pack_ranks(lower, upper)
    if size.dtype != np.int64:
        # _pack_integers returns another type only where int64 cannot hold a value.
        if size.min() < 0:
            raise ValueError(f"buffer {size.argmin()} has a negative size, {size.min()}")
        raise Error(f"sizes of up to {size.max()} bytes do not fit into 63 bits")
    n = <int32_t>len(size)
    offsets = np.empty(n, np.int64)
    PyObject_GetBuffer(times[0], &a, PyBUF_SIMPLE)
    PyObject_GetBuffer(times[1], &b, PyBUF_SIMPLE)
    PyObject_GetBuffer(size, &c, PyBUF_SIMPLE)
    PyObject_GetBuffer(offsets, &d, PyBUF_WRITABLE)
    with nogil:
        status = pack_any_times(n, <const int64_t *>a.buf, <const int64_t *>b.buf, <const int64_t *>c.buf, c_capacity,
                                c_budget, <int64_t *>d.buf, &out, &failed)
    PyBuffer_Release(&a)
    PyBuffer_Release(&b)
    PyBuffer_Release(&c)
    PyBuffer_Release(&d)
    if status == GS_NO_HOST_MEMORY:
        raise no_host_memory(f"packing {n} buffers")
    if status == GS_OVERFLOW:
        raise Error(f"the sizes of {n} buffers add up to more than 63 bits hold")
    if failed >= 0 and lower[failed] > upper[failed]:
        raise ValueError(f"buffer {failed} lives over [{lower[failed]}, {upper[failed]}), which ends before it begins")
    if status != GS_OK:
        raise ValueError(f"buffer {failed} has a negative size, {size[failed]}")
    offsets.flags.writeable = False
    packing.offsets, packing.arena, packing.bound = offsets, out.arena, out.bound
    packing.method, packing.optimal, packing.tries = method_name(out.method), out.optimal, out.tries
    return packing


def _pack_integers(values, str name):
    """`values` as a one-dimensional array: int64 where all fit, Python integers where not.  Never rounds."""
    array = values if isinstance(values, np.ndarray) else None
    if array is None:
        values = list(values)
        array = np.array(values) if values else np.empty(0, np.int64)
        if array.dtype.kind not in "iu":
            # NumPy turns a mixture of huge and negative integers into floats: keep them as Python objects.
            array = np.empty(len(values), object)
            array[:] = values
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions, not 1")
    if array.dtype.kind == "O":
        try:
            items = list(map(_index, array))
        except TypeError:
            raise TypeError(f"{name} holds something that is not an integer") from None
        array = np.empty(len(items), object)
        array[:] = items
        try:
            return array.astype(np.int64)
        except OverflowError:
            return array
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, not {array.dtype}")
    if array.dtype == np.uint64 and len(array) and array.max() > 0x7fffffffffffffff:
        return array.astype(object)
    return np.ascontiguousarray(array, np.int64)


def _pack_ranks(lower, upper):
    """(lower, upper) as int64: unchanged if both are int64 already; otherwise each time's rank among all times."""
    if lower.dtype == upper.dtype == np.int64:
        return lower, upper
    _, ranks = np.unique(np.concatenate((lower, upper)), return_inverse=True)
    return np.split(np.ascontiguousarray(ranks, np.int64), 2)
