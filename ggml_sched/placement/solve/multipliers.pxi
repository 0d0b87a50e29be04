# Part of _chain.pyx: shortest paths at multipliers, and the linear program that chooses multipliers.


@cython.boundscheck(False)
@cython.wraparound(False)
def least_columns(const int64_t[::1] first not None, const double[::1] reduced not None):
    """(the least `reduced` of each group, the first column that has it): f64 [groups], i64 [groups]; infinite and -1
    for a group without a finite `reduced`.

    Columns first[g] .. first[g + 1] - 1 are group g.
    """
    cdef Py_ssize_t group, column
    least_, chosen_ = np.empty(first.shape[0] - 1), np.empty(first.shape[0] - 1, np.int64)
    cdef double[::1] least = least_
    cdef int64_t[::1] chosen = chosen_
    with nogil:
        for group in range(first.shape[0] - 1):
            least[group], chosen[group] = INFINITY, -1
            for column in range(first[group], first[group + 1]):
                if reduced[column] < least[group]:
                    least[group], chosen[group] = reduced[column], column
    return least_, chosen_


@cython.boundscheck(False)
@cython.wraparound(False)
def shortest(const int32_t[::1] classes not None, const double[::1] start not None, const int64_t[::1] first not None,
             const double[::1] cost not None, const int64_t[:, ::1] memory not None,
             const double[::1] multipliers not None, const uint8_t[:, ::1] closed=None):
    """The path of the least reduced seconds: (reduced seconds, columns i64 [stages], seconds, bytes i64 [scarce]).  If
    there is no path, seconds are infinite, and the columns None.  `closed` [stages + 1, states]: where it is not 0, no
    path is in the state before the stage, or after the last one.

    Columns first[g] .. first[g + 1] - 1 are those of the group g = (class * states + before) * states + after.
    """
    cdef Py_ssize_t n = classes.shape[0], states = start.shape[0], rows = multipliers.shape[0]
    cdef Py_ssize_t group, row, stage, before, after, state = 0
    cdef int64_t column
    cdef int32_t number
    cdef double through, best, total
    cdef bint is_closed = closed is not None
    least_, chosen_ = np.empty(first.shape[0] - 1), np.empty(first.shape[0] - 1, np.int64)
    reached_, earlier_ = np.empty((2, states)), np.empty((n, states), np.int32)
    path_, bytes_ = np.empty(n, np.int64), np.zeros(rows, np.int64)
    cdef double[::1] least = least_
    cdef int64_t[::1] chosen = chosen_, path = path_, held = bytes_
    cdef double[:, ::1] reached = reached_
    cdef int32_t[:, ::1] earlier = earlier_
    with nogil:
        for group in range(first.shape[0] - 1):
            best, chosen[group] = INFINITY, -1
            for column in range(first[group], first[group + 1]):
                through = cost[column]
                for row in range(rows):
                    through += multipliers[row] * <double>memory[column, row]
                if through < best:
                    best, chosen[group] = through, column
            least[group] = best
        for after in range(states):
            reached[0, after] = INFINITY if is_closed and closed[0, after] else start[after]
        for stage in range(n):
            number = classes[stage]
            for after in range(states):
                best, earlier[stage, after] = INFINITY, 0
                if is_closed and closed[stage + 1, after]:
                    reached[1 - (stage & 1), after] = INFINITY
                    continue
                for before in range(states):
                    through = reached[stage & 1, before] + least[(number * states + before) * states + after]
                    if through < best:
                        best, earlier[stage, after] = through, <int32_t>before
                reached[1 - (stage & 1), after] = best
        best = INFINITY
        for after in range(states):
            if reached[n & 1, after] < best:
                best, state = reached[n & 1, after], after
    if best == INFINITY:
        return INFINITY, None, INFINITY, bytes_
    with nogil:
        for stage in range(n - 1, -1, -1):
            before = earlier[stage, state]
            path[stage] = chosen[(classes[stage] * states + before) * states + state]
            state = before
        total = start[state]
        for stage in range(n):
            total += cost[path[stage]]
            for row in range(rows):
                held[row] += memory[path[stage], row]
    return best, path_, total, bytes_


@cython.boundscheck(False)
@cython.wraparound(False)
cdef bint inverted(const double[:, ::1] planes, const int64_t[::1] basis, double[:, ::1] work) noexcept nogil:
    # Writes the inverse of the matrix whose columns are planes[basis] to work[:, n:]; False if there is no inverse.
    cdef Py_ssize_t n = basis.shape[0], i, j, k, most
    cdef double part
    for i in range(n):
        for j in range(n):
            work[i, j], work[i, n + j] = planes[basis[j], i], <double>(i == j)
    for k in range(n):
        most = k
        for i in range(k + 1, n):
            if fabs(work[i, k]) > fabs(work[most, k]):
                most = i
        if work[most, k] == 0:
            return False
        if most != k:
            for j in range(2 * n):
                part = work[k, j]
                work[k, j] = work[most, j]
                work[most, j] = part
        part = 1.0 / work[k, k]
        for j in range(k, 2 * n):
            work[k, j] *= part
        for i in range(n):
            part = work[i, k]
            if i != k and part != 0:
                for j in range(k, 2 * n):
                    work[i, j] -= part * work[k, j]
    return True


cdef enum:
    MOST_UPDATES = 20

cdef double EXACT = 1e-9    # the most by which the equations of a basis may be missed


@cython.boundscheck(False)
@cython.wraparound(False)
cdef bint is_exact(const double[:, ::1] planes, const double[::1] prices, const int64_t[::1] basis,
                   const double[::1] dual, const double[::1] have) noexcept nogil:
    # Whether the parts `have` and the duals solve the equations of a basis.
    cdef Py_ssize_t n = basis.shape[0], i, k
    cdef double missed
    for i in range(n):
        missed = -<double>(i == 0)
        for k in range(n):
            missed += planes[basis[k], i] * have[k]
        if not fabs(missed) <= EXACT:
            return False
    for k in range(n):
        missed = prices[basis[k]]
        for i in range(n):
            missed -= dual[i] * planes[basis[k], i]
        if not fabs(missed) <= EXACT * (1 + fabs(prices[basis[k]])):
            return False
    return True


@cython.boundscheck(False)
@cython.wraparound(False)
def simplex(const double[:, ::1] planes not None, const double[::1] prices not None, int64_t[::1] basis not None,
            double tolerance, Py_ssize_t most, double[:, ::1] work not None, int64_t[::1] updated not None):
    """(duals f64 [rows], parts f64 [rows]) after a revised simplex: minimise prices . x where planes.T @ x is
    (1, 0, ..) and x >= 0.  `basis` [rows] has to be feasible, and changes in place; `parts` are its values.  `work`
    [rows, 2 * rows]: the inverse of the basis, from the column `rows` on; `updated` [1]: the pivots since it was made,
    below 0 if there is none.  Both are those of the call before.

    The column of `planes` [columns, rows] with the least reduced price enters the basis; after `most` pivots the first
    column of negative reduced price, by Bland's rule; after twice as many pivots the simplex ends.  The inverse of the
    basis is updated after a pivot, and made anew after `MOST_UPDATES` pivots, and where the result is not exact.
    """
    cdef Py_ssize_t n = basis.shape[0], m = prices.shape[0], pivot, i, k, enter, leave, updates = updated[0]
    cdef bint is_inverse = updates >= 0
    cdef double reduced, lowest, ratio, least, part
    dual_, change_, have_ = np.zeros(n), np.empty(n), np.empty(n)
    in_ = np.zeros(m, np.uint8)
    cdef double[::1] dual = dual_, change = change_, have = have_
    cdef uint8_t[::1] inside = in_
    with nogil:
        for k in range(n):
            inside[basis[k]] = 1
        for pivot in range(2 * most + 1):
            if not is_inverse:
                if not inverted(planes, basis, work):
                    break
                is_inverse, updates = True, 0
            for i in range(n):
                dual[i], have[i] = 0.0, max(work[i, n], 0.0)
                for k in range(n):
                    dual[i] += prices[basis[k]] * work[k, n + i]
            if pivot == 2 * most:
                break
            enter, lowest = -1, -tolerance
            for k in range(m):
                if inside[k]:
                    continue
                reduced = prices[k]
                for i in range(n):
                    reduced -= dual[i] * planes[k, i]
                if reduced < lowest:
                    enter, lowest = k, reduced
                    if pivot >= most:
                        break
            if enter < 0:
                if not updates or is_exact(planes, prices, basis, dual, have):
                    break
                is_inverse = False      # the basis may not be optimal: updates have made the inverse inexact
                continue
            least, leave = INFINITY, -1
            for k in range(n):
                change[k] = 0.0
                for i in range(n):
                    change[k] += work[k, n + i] * planes[enter, i]
                if change[k] > 1e-9:
                    ratio = have[k] / change[k]
                    # Of equal ratios that of the largest change, which keeps the inverse exact; then by Bland's rule.
                    if ratio < least - 1e-12 or (ratio <= least + 1e-12 and (leave < 0 or (
                            change[k] > change[leave] if pivot < most else basis[k] < basis[leave]))):
                        least, leave = min(least, ratio), k
            if leave < 0:
                break
            inside[basis[leave]], inside[enter] = 0, 1
            basis[leave] = enter
            updates += 1
            is_inverse = updates < MOST_UPDATES and fabs(change[leave]) > 1e-6
            if is_inverse:
                for k in range(n):
                    part = change[k] / change[leave]
                    if k != leave and part != 0:
                        for i in range(n):
                            work[k, n + i] -= part * work[leave, n + i]
                for i in range(n):
                    work[leave, n + i] /= change[leave]
        updated[0] = updates if is_inverse else -1
    return dual_, have_
