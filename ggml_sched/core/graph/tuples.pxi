# Making Python tuples from C arrays of numbers.

cdef tuple ints_tuple(const an_integer *at, Py_ssize_t n):
    # A loop, not a comprehension: where memory runs out, code that Cython generates for that drops a reference twice.
    cdef tuple found = PyTuple_New(n)
    cdef object x
    cdef Py_ssize_t i
    for i in range(n):
        x = at[i]
        Py_INCREF(x)
        PyTuple_SET_ITEM(found, i, x)
    return found
