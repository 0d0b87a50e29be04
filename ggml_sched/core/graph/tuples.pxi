# Making Python tuples from C arrays of numbers.

cdef tuple ints_tuple(const an_integer *at, Py_ssize_t n):
    # A loop, because the code that Cython generates for a comprehension drops a reference twice if memory runs out.
    cdef tuple found = PyTuple_New(n)
    cdef object x
    cdef Py_ssize_t i
    for i in range(n):
        x = at[i]
        Py_INCREF(x)
        PyTuple_SET_ITEM(found, i, x)
    return found
