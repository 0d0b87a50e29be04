# Access to the memory of NumPy arrays from C, without Cython's typed memoryviews: these would add 17,000 lines of C to
# each module that has one.

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.string cimport strchr


cdef inline Py_ssize_t take(object given, Py_buffer *view, const char *kinds, Py_ssize_t itemsize,
                            bint writable) except -1:
    # Make `view` hold the memory of `given`, an array of one dimension without gaps, until PyBuffer_Release(view).
    # Returns the number of elements.  ValueError if the type of the elements is none of the letters `kinds` (of the
    # module struct), or their size is not `itemsize` bytes.
    cdef const char *kind = b"B"
    PyObject_GetBuffer(given, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0))
    if view.format != NULL:
        kind = view.format
    if view.ndim != 1 or view.itemsize != itemsize or kind[0] == 0 or kind[1] != 0 or strchr(kinds, kind[0]) == NULL:
        message = f"{view.ndim} dimensions of '{kind.decode()}', not one of '{kinds.decode()}'"
        PyBuffer_Release(view)
        raise ValueError(message)
    return view.len // itemsize
