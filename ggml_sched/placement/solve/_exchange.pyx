# cython: language_level=3
"""The loops of exchanges and splices, without the GIL: they replace columns of a path, or a part of it, by others.

This module owns no memory: every array is NumPy's, so nothing leaks if a call raises.  The callers, in this folder,
check shapes and ranges.  A group is all columns of one class with the same state before and the same state after.
Columns first[g] .. first[g + 1] - 1 are those of group g, by rising `cost`; `memory` [columns, rows] has their bytes on
the scarce devices, those whose budgets a path may exceed.  Reduced seconds are seconds plus the bytes times the
multipliers.  A path is an array with a column for each stage; stages with the same column are interchangeable, so
exchanges are tried once for each column in use.
"""

cimport cython
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport qsort

import numpy as np


cdef struct Option:
    double reduced
    int64_t column


cdef int by_reduced(const void *a, const void *b) noexcept nogil:
    cdef const Option *one = <const Option *>a
    cdef const Option *two = <const Option *>b
    if one.reduced != two.reduced:
        return -1 if one.reduced < two.reduced else 1
    return (one.column > two.column) - (one.column < two.column)


cdef int by_column(const void *a, const void *b) noexcept nogil:
    cdef const Option *one = <const Option *>a
    cdef const Option *two = <const Option *>b
    return (one.column > two.column) - (one.column < two.column)


cdef int by_value(const void *a, const void *b) noexcept nogil:
    cdef int64_t one = (<const int64_t *>a)[0], two = (<const int64_t *>b)[0]
    return (one > two) - (one < two)


@cython.boundscheck(False)
@cython.wraparound(False)
@cython.final
cdef class _Path:
    """A path, its bytes on the scarce devices (`used`), and the columns that it uses, each once, in rising order."""

    cdef const int64_t[::1] first, group, budget
    cdef const double[::1] cost
    cdef const int64_t[:, ::1] memory
    cdef int64_t[::1] path, used, columns
    cdef Py_ssize_t rows, n_columns

    def __init__(self, const int64_t[::1] first not None, const int64_t[::1] group not None,
                 const double[::1] cost not None, const int64_t[:, ::1] memory not None,
                 const int64_t[::1] budget not None, int64_t[::1] path not None):
        self.first, self.group, self.cost, self.memory, self.budget = first, group, cost, memory, budget
        self.path, self.rows = path, budget.shape[0]
        self.used, self.columns = np.zeros(max(self.rows, 1), np.int64), np.empty(max(path.shape[0], 1), np.int64)
        cdef Py_ssize_t stage, row
        for stage in range(path.shape[0]):
            for row in range(self.rows):
                self.used[row] += memory[path[stage], row]
        self.find()

    cdef void find(self) noexcept nogil:
        # Sets `columns` to the columns in use.
        cdef Py_ssize_t stage, n = self.path.shape[0], kept = 0
        for stage in range(n):
            self.columns[stage] = self.path[stage]
        qsort(&self.columns[0], n, sizeof(int64_t), by_value)
        for stage in range(n):
            if not stage or self.columns[stage] != self.columns[kept - 1]:
                self.columns[kept] = self.columns[stage]
                kept += 1
        self.n_columns = kept

    cdef void exchange(self, int64_t old, int64_t new) noexcept nogil:
        # Replaces the first `old` of the path by `new`; a call of `find` has to follow.
        cdef Py_ssize_t stage, row
        for stage in range(self.path.shape[0]):
            if self.path[stage] == old:
                self.path[stage] = new
                break
        for row in range(self.rows):
            self.used[row] += self.memory[new, row] - self.memory[old, row]

    cdef bint twice(self, int64_t column) noexcept nogil:
        cdef Py_ssize_t stage, count = 0
        for stage in range(self.path.shape[0]):
            count += self.path[stage] == column
        return count > 1

    cdef double single(self, double least, int64_t *old, int64_t *new) noexcept nogil:
        # Finds the exchange of one stage that saves most seconds, if it saves more than `least`, and writes its columns
        # to `old` and `new`.  Returns the change of the path's seconds, which is -least if there is no such exchange.
        cdef Py_ssize_t at, row
        cdef int64_t column, other
        cdef double best = -least, seconds
        for at in range(self.n_columns):
            column = self.columns[at]
            for other in range(self.first[self.group[column]], self.first[self.group[column] + 1]):
                seconds = self.cost[other] - self.cost[column]
                if seconds >= best:
                    break
                for row in range(self.rows):
                    if self.used[row] + self.memory[other, row] - self.memory[column, row] > self.budget[row]:
                        break
                else:
                    best, old[0], new[0] = seconds, column, other
                    break
        return best


@cython.boundscheck(False)
@cython.wraparound(False)
def repaired(const int64_t[::1] first not None, const int64_t[::1] group not None, const double[::1] cost not None,
             const int64_t[:, ::1] memory not None, const int64_t[::1] budget not None, int64_t[::1] path not None,
             const double[::1] multipliers not None, const double[::1] unit not None):
    """Exchange columns of `path`, in place, until it fits; returns whether it does.

    Each exchange is the one with the fewest reduced seconds for each unit by which it lowers the bytes above budgets.
    `multipliers` [rows] are seconds a byte; `unit` [rows]: how many bytes of each device are one unit.
    """
    cdef _Path at = _Path(first, group, cost, memory, budget, path)
    cdef Py_ssize_t _step, k, row, rows = at.rows, steps = 4 * path.shape[0]
    cdef int64_t column, other, old = -1, new = -1, over, left
    cdef double best, price, freed, seconds
    cdef bint fits = False
    with nogil:
        for _step in range(steps):
            fits = True
            for row in range(rows):
                fits = fits and at.used[row] <= budget[row]
            if fits:
                break
            best = INFINITY
            for k in range(at.n_columns):
                column = at.columns[k]
                for other in range(first[group[column]], first[group[column] + 1]):
                    freed, seconds = 0.0, cost[other] - cost[column]
                    for row in range(rows):
                        over = max(at.used[row] - budget[row], 0)
                        left = at.used[row] + memory[other, row] - memory[column, row] - budget[row]
                        freed += <double>(over - max(left, 0)) / unit[row]
                        seconds += multipliers[row] * <double>(memory[other, row] - memory[column, row])
                    if freed > 0:
                        price = max(seconds, 0.0) / max(freed, 1e-300)
                        if price < best:
                            best, old, new = price, column, other
            if best == INFINITY:
                break
            at.exchange(old, new)
            at.find()
    return fits


@cython.boundscheck(False)
@cython.wraparound(False)
def improved(const int64_t[::1] first not None, const int64_t[::1] group not None, const double[::1] cost not None,
             const int64_t[:, ::1] memory not None, const int64_t[::1] budget not None, int64_t[::1] path not None,
             const double[::1] multipliers not None, double least, Py_ssize_t paired):
    """Exchange the columns of one or of two stages of `path`, in place: again and again the exchange that saves most
    seconds within the budgets, until none saves more than `least` seconds.

    `path` has to fit.  In exchanges of two stages only the `paired` columns of the fewest reduced seconds are tried for
    each stage.
    """
    cdef _Path at = _Path(first, group, cost, memory, budget, path)
    cdef Py_ssize_t _step, k, other_k, i, j, row, rows = at.rows, steps = 8 * path.shape[0] + 64, most = 0
    cdef int64_t column, one, two, old = -1, new = -1, old_2 = -1, new_2 = -1, end
    cdef double best, seconds
    for k in range(first.shape[0] - 1):
        most = max(most, first[k + 1] - first[k])
    ranked_ = np.empty(max(most, 1) * sizeof(Option), np.uint8)
    options_ = np.empty((path.shape[0], paired), np.int64)
    counts_ = np.empty(path.shape[0], np.int64)
    cdef unsigned char[::1] ranked_bytes = ranked_
    cdef Option *ranked = <Option *>&ranked_bytes[0]
    cdef int64_t[:, ::1] options = options_
    cdef int64_t[::1] counts = counts_
    with nogil:
        for _step in range(steps):
            if at.single(least, &old, &new) < -least:
                at.exchange(old, new)
                at.find()
                continue
            for k in range(at.n_columns):
                column = at.columns[k]
                end = first[group[column] + 1] - first[group[column]]
                for i in range(end):
                    ranked[i].column = first[group[column]] + i
                    ranked[i].reduced = cost[ranked[i].column]
                    for row in range(rows):
                        ranked[i].reduced += multipliers[row] * <double>memory[ranked[i].column, row]
                if end > paired:
                    qsort(ranked, end, sizeof(Option), by_reduced)
                    end = paired
                    qsort(ranked, end, sizeof(Option), by_column)
                counts[k] = end
                for i in range(end):
                    options[k, i] = ranked[i].column
            best = -least
            for k in range(at.n_columns):
                column = at.columns[k]
                for other_k in range(k, at.n_columns):
                    if other_k == k and not at.twice(column):
                        continue
                    for i in range(counts[k]):
                        one = options[k, i]
                        if cost[one] - cost[column] + cost[options[other_k, 0]] - cost[at.columns[other_k]] >= best:
                            break
                        for j in range(counts[other_k]):
                            two = options[other_k, j]
                            seconds = cost[one] - cost[column] + (cost[two] - cost[at.columns[other_k]])
                            if seconds >= best:
                                break
                            for row in range(rows):
                                if (at.used[row] + memory[one, row] - memory[column, row] + memory[two, row]
                                        - memory[at.columns[other_k], row] > budget[row]):
                                    break
                            else:
                                best, old, new, old_2, new_2 = seconds, column, one, at.columns[other_k], two
                                break
            if best >= -least:
                break
            at.exchange(old, new)
            at.exchange(old_2, new_2)
            at.find()


@cython.boundscheck(False)
@cython.wraparound(False)
def spliced(const int32_t[::1] classes not None, const int64_t[::1] before not None, const int64_t[::1] after not None,
            const double[::1] cost not None, const int64_t[:, ::1] memory not None, const int64_t[::1] budget not None,
            const double[:, :, :, ::1] tables not None, const int64_t[:, :, :, ::1] columns not None,
            int64_t[::1] path not None, double least):
    """Replace one part of `path` in place by another between the same states; returns whether it did.

    Candidates: for each part of the path and each row of multipliers, the columns with the least reduced seconds in its
    place.  Of the candidates that keep the budgets the one that saves most seconds is taken, if it saves more than
    `least`.  `path` has to fit.  `tables` [rows of multipliers, classes, states, states] has the least reduced seconds
    of a stage, `columns` the columns that have them.
    """
    cdef Py_ssize_t n = classes.shape[0], states = tables.shape[2], rows = budget.shape[0], k, i, j, row, a, b, chosen
    cdef Py_ssize_t best_k = -1, best_i = -1, best_j = -1
    cdef int32_t number
    cdef int64_t column
    cdef double best = -least, through, lowest
    cdef bint fits
    reached_, seconds_ = np.empty((2, states)), np.empty((2, states))
    bytes_ = np.empty((2, states, max(rows, 1)), np.int64)
    room_, old_bytes_ = np.empty(max(rows, 1), np.int64), np.empty(max(rows, 1), np.int64)
    earlier_ = np.zeros((n, states), np.int64)
    cdef double[:, ::1] reached = reached_, taken = seconds_
    cdef int64_t[:, :, ::1] held = bytes_
    cdef int64_t[::1] room = room_, old_bytes = old_bytes_
    cdef int64_t[:, ::1] earlier = earlier_
    cdef double old_seconds
    cdef Py_ssize_t now, then
    with nogil:
        for row in range(rows):
            room[row] = budget[row]
            for i in range(n):
                room[row] -= memory[path[i], row]
        for k in range(tables.shape[0]):
            for i in range(n):
                now, old_seconds = 0, 0.0
                for a in range(states):
                    reached[0, a] = INFINITY
                a = before[path[i]]
                reached[0, a], taken[0, a] = 0.0, 0.0
                for row in range(rows):
                    held[0, a, row], old_bytes[row] = 0, 0
                for j in range(i, n):
                    then, number = 1 - now, classes[j]
                    for b in range(states):
                        lowest, chosen = INFINITY, -1
                        for a in range(states):
                            through = reached[now, a] + tables[k, number, a, b]
                            if through < lowest:
                                lowest, chosen = through, a
                        reached[then, b] = lowest
                        if chosen >= 0:
                            column = columns[k, number, chosen, b]
                            taken[then, b] = taken[now, chosen] + cost[column]
                            for row in range(rows):
                                held[then, b, row] = held[now, chosen, row] + memory[column, row]
                    now = then
                    old_seconds += cost[path[j]]
                    for row in range(rows):
                        old_bytes[row] += memory[path[j], row]
                    b = after[path[j]]
                    if reached[now, b] < INFINITY and taken[now, b] - old_seconds < best:
                        fits = True
                        for row in range(rows):
                            fits = fits and held[now, b, row] - old_bytes[row] <= room[row]
                        if fits:
                            best, best_k, best_i, best_j = taken[now, b] - old_seconds, k, i, j
        if best_k >= 0:
            # Computes the best part again, and keeps the state before each of its stages this time.
            now = 0
            for a in range(states):
                reached[0, a] = INFINITY
            reached[0, before[path[best_i]]] = 0.0
            for j in range(best_i, best_j + 1):
                then, number = 1 - now, classes[j]
                for b in range(states):
                    lowest, chosen = INFINITY, 0
                    for a in range(states):
                        through = reached[now, a] + tables[best_k, number, a, b]
                        if through < lowest:
                            lowest, chosen = through, a
                    reached[then, b], earlier[j, b] = lowest, chosen
                now = then
            b = after[path[best_j]]
            for j in range(best_j, best_i - 1, -1):
                a = earlier[j, b]
                path[j] = columns[best_k, classes[j], a, b]
                b = a
    return best_k >= 0
