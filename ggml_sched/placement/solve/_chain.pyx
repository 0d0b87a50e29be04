# cython: language_level=3
"""The loops of the solver over columns, stages and labels, without the GIL.

This module owns no memory: every array is NumPy's, so nothing leaks if a call raises.  The callers, in this folder,
check shapes and ranges.  A label is a path up to some stage: its state, its seconds and its bytes on the scarce
devices, those whose budgets a path may exceed.  Reduced seconds are seconds plus the bytes times the multipliers.
"""

cimport cython
from libc.math cimport INFINITY, fabs
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport qsort
from libc.string cimport memset

import numpy as np


cdef struct Entry:
    double key
    int32_t state
    int32_t index

cdef enum:
    COMPARED = 256      # the most labels of the same state that a label is compared with
    FEWEST = 32         # labels of a stage that are kept however small the effort is, if the width allows
    WIDEST = 62         # the largest `_Stage.shift`: a cell of 2^62 bytes holds everything


cdef int by_key(const void *a, const void *b) noexcept nogil:
    cdef const Entry *one = <const Entry *>a
    cdef const Entry *two = <const Entry *>b
    if one.key != two.key:
        return -1 if one.key < two.key else 1
    return (one.index > two.index) - (one.index < two.index)


cdef int by_state_and_key(const void *a, const void *b) noexcept nogil:
    cdef const Entry *one = <const Entry *>a
    cdef const Entry *two = <const Entry *>b
    if one.state != two.state:
        return -1 if one.state < two.state else 1
    return by_key(a, b)


@cython.boundscheck(False)
@cython.wraparound(False)
def undominated(const int64_t[::1] first not None, const int64_t[:, ::1] memory not None):
    """bool [columns]: False for a column if an earlier, cheaper one of its group takes no more bytes on any device.

    Columns first[g] .. first[g + 1] - 1 are a group, cheapest first.
    """
    kept = np.ones(memory.shape[0], np.uint8)
    cdef uint8_t[::1] keep = kept
    cdef Py_ssize_t group, one, other, row, n = memory.shape[1]
    with nogil:
        for group in range(first.shape[0] - 1):
            for one in range(first[group], first[group + 1]):
                for other in range(first[group], one):
                    if keep[other]:
                        for row in range(n):
                            if memory[other, row] > memory[one, row]:
                                break
                        else:
                            keep[one] = 0
                            break
    return kept.view(np.bool_)


@cython.boundscheck(False)
@cython.wraparound(False)
def unbeaten(const double[:, ::1] rows not None):
    """bool [rows]: False for a row if some earlier row is at most as large in every entry.

    `rows` has to be sorted so that a row which is at most as large as another comes before it.
    """
    kept = np.ones(rows.shape[0], np.uint8)
    cdef uint8_t[::1] keep = kept
    cdef Py_ssize_t one, other, column, n = rows.shape[1]
    with nogil:
        for one in range(rows.shape[0]):
            for other in range(one):
                if keep[other]:
                    for column in range(n):
                        if rows[other, column] > rows[one, column]:
                            break
                    else:
                        keep[one] = 0
                        break
    return kept.view(np.bool_)


@cython.boundscheck(False)
@cython.wraparound(False)
def suffixes(const int32_t[::1] classes not None, const double[:, :, ::1] table not None):
    """The least sum over the stages from each one on, for each state before it: f64 [stages + 1, states].

    `table` [classes, states before, states after] has what a stage of each class adds.
    """
    cdef Py_ssize_t n = classes.shape[0], states = table.shape[1], stage, before, after
    cdef int32_t number
    cdef double best, through
    made = np.zeros((n + 1, states))
    cdef double[:, ::1] out = made
    with nogil:
        for stage in range(n - 1, -1, -1):
            number = classes[stage]
            for before in range(states):
                best = INFINITY
                for after in range(states):
                    through = table[number, before, after] + out[stage + 1, after]
                    if through < best:
                        best = through
                out[stage, before] = best
    return made


@cython.boundscheck(False)
@cython.wraparound(False)
def prefixes(const int32_t[::1] classes not None, const double[:, :, ::1] table not None,
             const double[::1] start not None):
    """The least sum over the stages before each one, for each state between: f64 [stages + 1, states].

    `table` [classes, states before, states after] has what a stage of each class adds, `start` [states] the beginning.
    """
    cdef Py_ssize_t n = classes.shape[0], states = table.shape[1], stage, before, after
    cdef int32_t number
    cdef double best, through
    made = np.zeros((n + 1, states))
    cdef double[:, ::1] out = made
    with nogil:
        out[0, :] = start
        for stage in range(n):
            number = classes[stage]
            for after in range(states):
                best = INFINITY
                for before in range(states):
                    through = out[stage, before] + table[number, before, after]
                    if through < best:
                        best = through
                out[stage + 1, after] = best
    return made


include "multipliers.pxi"
include "labels.pxi"
include "merged.pxi"
