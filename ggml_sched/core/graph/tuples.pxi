# Making Python tuples from C arrays of numbers.
#
# Loops, not comprehensions: where memory runs out, code that Cython generates for those drops a reference twice.

cdef tuple ints_tuple(const int32_t *at, Py_ssize_t n):
    cdef tuple found = PyTuple_New(n)
    cdef object x
    cdef Py_ssize_t i
    for i in range(n):
        x = at[i]
        Py_INCREF(x)
        PyTuple_SET_ITEM(found, i, x)
    return found


cdef tuple longs_tuple(const int64_t *at, Py_ssize_t n):
    cdef tuple found = PyTuple_New(n)
    cdef object x
    cdef Py_ssize_t i
    for i in range(n):
        x = at[i]
        Py_INCREF(x)
        PyTuple_SET_ITEM(found, i, x)
    return found


cdef tuple bytes_tuple(const unsigned char *at, Py_ssize_t n):
    return tuple(at[:n])
