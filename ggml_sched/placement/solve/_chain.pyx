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


@cython.boundscheck(False)
@cython.wraparound(False)
def runs(const int32_t[::1] classes not None, const double[::1] start not None, const int64_t[::1] ranges not None,
         const double[::1] reduced not None, const int64_t[:, ::1] memory not None, const int32_t[::1] after not None,
         const int64_t[::1] budget not None, const int32_t[::1] row_of not None, const double[:, ::1] suffix not None,
         double stop, Py_ssize_t cells):
    """The least reduced seconds, below `stop`, of paths whose runs keep the budgets: (seconds, columns i32 [stages]).

    A run goes from where the activation between stages enters a scarce device to where it enters another one: `row_of`
    [states] is the row of a state's scarce device, or -1.  Only the bytes of a run on its device count.  Columns
    ranges[c * states + s] .. are those of class c from state s; `suffix` [stages + 1, states]: the least reduced
    seconds from each stage on.  Labels of one state and device are merged if their bytes are in the same of `cells`
    parts of the budget: one label is left, with the least bytes and seconds of all, so that the seconds may be less
    than the path's.  (infinite, None) if there is no such path.
    """
    cdef Py_ssize_t n = classes.shape[0], states = start.shape[0], rows = budget.shape[0]
    cdef Py_ssize_t size = states * (rows + 1) * cells, stage, at, slot, n_labels = 0, key, cell, column, best = -1
    cdef int32_t before, number, state, row, now
    cdef int64_t held
    cdef double through, least, total
    least_, seconds_, bytes_ = np.empty(size), np.empty(size), np.empty(size, np.int64)
    held_, from_, by_ = np.empty(size, np.int64), np.empty(size, np.int32), np.empty(size, np.int32)
    place_ = np.empty(size, np.int32)
    earlier_, used_ = np.empty((n + 1, size), np.int32), np.empty((n + 1, size), np.int32)
    cdef double[::1] found = least_, seconds = seconds_
    cdef int64_t[::1] label_bytes = bytes_, found_bytes = held_
    cdef int32_t[::1] source = from_, chosen = by_, place = place_
    cdef int32_t[:, ::1] earlier = earlier_, used = used_
    with nogil:
        for slot in range(size):
            found[slot] = INFINITY
        for at in range(states):
            if start[at] + suffix[0, at] < stop:
                slot = (at * (rows + 1) + row_of[at] + 1) * cells
                found[slot], found_bytes[slot], source[slot], chosen[slot] = start[at], 0, -1, -1
        for stage in range(n + 1):
            # For each state and device: labels by rising bytes; one that is not cheaper than all before is dropped.
            n_labels = 0
            for key in range(states * (rows + 1)):
                least = INFINITY
                for cell in range(cells):
                    slot = key * cells + cell
                    if found[slot] < least:
                        least = found[slot]
                        seconds[n_labels], label_bytes[n_labels] = least, found_bytes[slot]
                        place[n_labels] = <int32_t>key
                        earlier[stage, n_labels], used[stage, n_labels] = source[slot], chosen[slot]
                        n_labels += 1
                    found[slot] = INFINITY
            if stage == n:
                break
            number = classes[stage]
            for at in range(n_labels):
                before, row = <int32_t>(place[at] // (rows + 1)), <int32_t>(place[at] % (rows + 1)) - 1
                for column in range(ranges[number * states + before], ranges[number * states + before + 1]):
                    through, state = seconds[at] + reduced[column], after[column]
                    if through + suffix[stage + 1, state] >= stop:
                        continue
                    now, held = row, 0
                    if row >= 0:
                        held = label_bytes[at] + memory[column, row]
                        if held > budget[row]:
                            continue
                    if row_of[state] >= 0 and row_of[state] != row:
                        now = row_of[state]
                        held = memory[column, now]
                        if held > budget[now]:
                            continue
                    slot = (state * (rows + 1) + now + 1) * cells
                    if now >= 0:
                        cell = <Py_ssize_t>(<double>held / (<double>budget[now] + 1.0) * <double>cells)
                        slot += min(cell, cells - 1)
                    if found[slot] == INFINITY:
                        found_bytes[slot] = held
                    else:
                        found_bytes[slot] = min(found_bytes[slot], held)
                    if through < found[slot]:
                        found[slot], source[slot], chosen[slot] = through, <int32_t>at, <int32_t>column
        for at in range(n_labels):
            if best < 0 or seconds[at] < seconds[best]:
                best = at
    if best < 0:
        return INFINITY, None
    total = seconds[best]
    path = np.empty(n, np.int32)
    cdef int32_t[::1] columns = path
    for stage in range(n, 0, -1):
        columns[stage - 1] = used[stage, best]
        best = earlier[stage, best]
    return total, path


include "multipliers.pxi"
include "labels.pxi"
include "merged.pxi"
