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
@cython.final
cdef class _Walk:
    """Shortest paths of one problem, and the arrays that they need; `path`, `total` and `held` are those of the last
    path: its columns, seconds, and bytes on the scarce devices."""

    cdef const int32_t[::1] classes
    cdef const double[::1] start, cost
    cdef const int64_t[::1] first
    cdef const int64_t[:, ::1] memory
    cdef const uint8_t[:, ::1] closed
    cdef bint is_closed
    cdef double[::1] least
    cdef int64_t[::1] chosen, path, held, rows
    cdef double[:, ::1] reached
    cdef int32_t[:, ::1] earlier
    cdef double total

    def __init__(self, const int32_t[::1] classes, const double[::1] start, const int64_t[::1] first,
                 const double[::1] cost, const int64_t[:, ::1] memory, const uint8_t[:, ::1] closed):
        cdef Py_ssize_t n = classes.shape[0], states = start.shape[0], groups = first.shape[0] - 1
        self.classes, self.start, self.first, self.cost, self.memory = classes, start, first, cost, memory
        self.closed, self.is_closed = closed, closed is not None
        self.least, self.chosen = np.empty(groups), np.empty(groups, np.int64)
        self.reached, self.earlier = np.empty((2, states)), np.empty((n, states), np.int32)
        self.path, self.held = np.empty(n, np.int64), np.empty(memory.shape[1], np.int64)
        self.rows = np.empty(memory.shape[1], np.int64)

    cdef double shortest(self, const double *multipliers) noexcept nogil:
        # The least reduced seconds; infinite if there is no path: then `path`, `total` and `held` are undefined.
        cdef Py_ssize_t n = self.classes.shape[0], states = self.start.shape[0], rows = self.memory.shape[1]
        cdef Py_ssize_t group, row, stage, before, after, state = 0, n_rows = 0
        cdef int64_t column
        cdef int32_t number
        cdef double through, best
        cdef const int64_t *held
        cdef const double *least
        cdef double *reached
        cdef double *further
        for row in range(rows):
            if multipliers[row] != 0:
                self.rows[n_rows] = row
                n_rows += 1
        for group in range(self.first.shape[0] - 1):
            best, self.chosen[group] = INFINITY, -1
            for column in range(self.first[group], self.first[group + 1]):
                through, held = self.cost[column], &self.memory[column, 0] if rows else NULL
                for row in range(n_rows):
                    through += multipliers[self.rows[row]] * <double>held[self.rows[row]]
                if through < best:
                    best, self.chosen[group] = through, column
            self.least[group] = best
        for after in range(states):
            self.reached[0, after] = INFINITY if self.is_closed and self.closed[0, after] else self.start[after]
        for stage in range(n):
            number = self.classes[stage]
            least = &self.least[number * states * states]
            reached, further = &self.reached[stage & 1, 0], &self.reached[1 - (stage & 1), 0]
            for after in range(states):
                best, self.earlier[stage, after] = INFINITY, 0
                if not (self.is_closed and self.closed[stage + 1, after]):
                    for before in range(states):
                        through = reached[before] + least[before * states + after]
                        if through < best:
                            best, self.earlier[stage, after] = through, <int32_t>before
                further[after] = best
        best = INFINITY
        for after in range(states):
            if self.reached[n & 1, after] < best:
                best, state = self.reached[n & 1, after], after
        if best == INFINITY:
            return INFINITY
        for stage in range(n - 1, -1, -1):
            before = self.earlier[stage, state]
            self.path[stage] = self.chosen[(self.classes[stage] * states + before) * states + state]
            state = before
        self.total = self.start[state]
        for row in range(rows):
            self.held[row] = 0
        for stage in range(n):
            column = self.path[stage]
            self.total = self.total + self.cost[column]
            for row in range(rows):
                self.held[row] += self.memory[column, row]
        return best


def shortest(const int32_t[::1] classes not None, const double[::1] start not None, const int64_t[::1] first not None,
             const double[::1] cost not None, const int64_t[:, ::1] memory not None,
             const double[::1] multipliers not None, const uint8_t[:, ::1] closed=None):
    """The path of the least reduced seconds: (reduced seconds, columns i64 [stages], seconds, bytes i64 [scarce]).  If
    there is no path, seconds are infinite, and the columns None.  `closed` [stages + 1, states]: where it is not 0, no
    path is in the state before the stage, or after the last one.

    Columns first[g] .. first[g + 1] - 1 are those of the group g = (class * states + before) * states + after.
    """
    cdef _Walk walk = _Walk(classes, start, first, cost, memory, closed)
    cdef const double *at = &multipliers[0] if multipliers.shape[0] else NULL
    cdef double value
    with nogil:
        value = walk.shortest(at)
    if value == INFINITY:
        return INFINITY, None, INFINITY, np.zeros(memory.shape[1], np.int64)
    return value, np.asarray(walk.path), walk.total, np.asarray(walk.held)


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
@cython.final
cdef class _Simplex:
    """A basis of a linear program, and the arrays that pivots need: minimise prices . x where planes.T @ x is
    (1, 0, ..) and x >= 0.  `dual` and `have` are the duals and the values of the basis of the last solution."""

    cdef const double[:, ::1] planes
    cdef const double[::1] prices
    cdef int64_t[::1] basis
    cdef double[:, ::1] work        # the inverse of the basis, from the column `rows` on
    cdef Py_ssize_t updates         # pivots since the inverse was made; below 0: there is none
    cdef double[::1] dual, change, have
    cdef uint8_t[::1] inside

    def __init__(self, const double[:, ::1] planes, const double[::1] prices, int64_t[::1] basis, double[:, ::1] work,
                 Py_ssize_t updates):
        cdef Py_ssize_t n = basis.shape[0]
        self.planes, self.prices, self.basis, self.work, self.updates = planes, prices, basis, work, updates
        self.dual, self.change, self.have = np.zeros(n), np.empty(n), np.empty(n)
        self.inside = np.empty(prices.shape[0], np.uint8)

    cdef void solve(self, Py_ssize_t m, double tolerance, Py_ssize_t most) noexcept nogil:
        # Solves the program of the first m planes.
        cdef Py_ssize_t n = self.basis.shape[0], pivot, i, k, enter, leave
        cdef bint is_inverse = self.updates >= 0
        cdef double reduced, lowest, ratio, least, part
        cdef const double *plane
        memset(&self.inside[0], 0, m)
        for k in range(n):
            self.inside[self.basis[k]] = 1
        for pivot in range(2 * most + 1):
            if not is_inverse:
                if not inverted(self.planes, self.basis, self.work):
                    break
                is_inverse, self.updates = True, 0
            for i in range(n):
                self.dual[i], self.have[i] = 0.0, max(self.work[i, n], 0.0)
            for k in range(n):
                part = self.prices[self.basis[k]]
                for i in range(n):
                    self.dual[i] += part * self.work[k, n + i]
            if pivot == 2 * most:
                break
            enter, lowest = -1, -tolerance
            for k in range(m):
                if self.inside[k]:
                    continue
                reduced, plane = self.prices[k], &self.planes[k, 0]
                for i in range(n):
                    reduced -= self.dual[i] * plane[i]
                if reduced < lowest:
                    enter, lowest = k, reduced
                    if pivot >= most:
                        break
            if enter < 0:
                if not self.updates or is_exact(self.planes, self.prices, self.basis, self.dual, self.have):
                    break
                is_inverse = False      # the basis may not be optimal: updates have made the inverse inexact
                continue
            least, leave = INFINITY, -1
            for k in range(n):
                self.change[k] = 0.0
                for i in range(n):
                    self.change[k] += self.work[k, n + i] * self.planes[enter, i]
                if self.change[k] > 1e-9:
                    ratio = self.have[k] / self.change[k]
                    # Of equal ratios that of the largest change, which keeps the inverse exact; then by Bland's rule.
                    if ratio < least - 1e-12 or (ratio <= least + 1e-12 and (leave < 0 or (
                            self.change[k] > self.change[leave] if pivot < most
                            else self.basis[k] < self.basis[leave]))):
                        least, leave = min(least, ratio), k
            if leave < 0:
                break
            self.inside[self.basis[leave]], self.inside[enter] = 0, 1
            self.basis[leave] = enter
            self.updates = self.updates + 1
            is_inverse = self.updates < MOST_UPDATES and fabs(self.change[leave]) > 1e-6
            if is_inverse:
                for k in range(n):
                    part = self.change[k] / self.change[leave]
                    if k != leave and part != 0:
                        for i in range(n):
                            self.work[k, n + i] -= part * self.work[leave, n + i]
                for i in range(n):
                    self.work[leave, n + i] /= self.change[leave]
        if not is_inverse:
            self.updates = -1


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
    cdef _Simplex program = _Simplex(planes, prices, basis, work, updated[0])
    with nogil:
        program.solve(prices.shape[0], tolerance, most)
    updated[0] = program.updates
    return np.asarray(program.dual), np.asarray(program.have)


@cython.boundscheck(False)
@cython.wraparound(False)
def cutting_planes(const int32_t[::1] classes not None, const double[::1] start not None,
                   const int64_t[::1] first not None, const double[::1] cost not None,
                   const int64_t[:, ::1] memory not None, const int64_t[::1] budget not None,
                   const double[::1] unit not None, double seconds, const uint8_t[:, ::1] closed,
                   const double[::1] known_cost not None, const int64_t[:, ::1] known_memory not None,
                   begun, double value, double stop, double dearest, double wanted, double close, double limit,
                   double tolerance, double error, Py_ssize_t most):
    """Choose multipliers by cutting planes, with the planes of known paths to begin with.

    Returns (bounds f64 [n], multipliers f64 [n, scarce], columns i64 [n, stages], seconds f64 [n], bytes i64
    [n, scarce]) of the n paths found, and (basis i64 [rows], parts f64 [rows]) of the last master problem: planes 0 ..
    scarce - 1 are slacks of the budgets, then bytes above them, then the known paths, then those found.

    `known_cost` [known], `known_memory` [known, scarce]; `unit`, `seconds`: the units of bytes and of seconds in the
    master problem; `begun`: its first basis, which has to be feasible, or None; `value`: the bound before.  It ends as
    soon as the bound reaches `stop` or is above `dearest`; where the planes promise less than `wanted`, or at most the
    part `close` more than the bound; and after `most` paths.  `limit`: the largest multiplier in these units;
    `tolerance`: of reduced prices in the simplex; `error`: the rounding error of a bound as a part of its sums.
    """
    cdef Py_ssize_t n = budget.shape[0], known = known_cost.shape[0], at = 2 * n + known, found = 0, i, k
    cdef _Walk walk = _Walk(classes, start, first, cost, memory, closed)
    planes_, prices_, basis_ = np.zeros((at + most, n + 1)), np.zeros(at + most), np.empty(n + 1, np.int64)
    cdef double[:, ::1] planes = planes_
    cdef double[::1] prices = prices_
    cdef int64_t[::1] basis = basis_
    cdef Py_ssize_t stages = classes.shape[0]
    values_, multipliers_ = np.empty(most), np.zeros((most, n))
    paths_, costs_, bytes_ = np.empty((most, stages), np.int64), np.empty(most), np.empty((most, n), np.int64)
    cdef double[::1] values = values_, costs = costs_
    cdef double[:, ::1] multipliers = multipliers_
    cdef int64_t[:, ::1] paths = paths_, held = bytes_
    cdef double promised, allowed, reduced
    cdef bint is_zero
    for k in range(n):
        planes[k, 1 + k], planes[n + k, 1 + k], prices[n + k] = 1.0, -1.0, limit
    for k in range(known):
        planes[2 * n + k, 0], prices[2 * n + k] = 1.0, known_cost[k] / seconds
        for i in range(n):
            planes[2 * n + k, 1 + i] = <double>(known_memory[k, i] - budget[i]) / unit[i]
    if begun is None:
        basis[0] = 2 * n
        for i in range(n):
            basis[1 + i] = n * <int64_t>(planes[2 * n, 1 + i] > 0) + i
    else:
        basis_[:] = begun
    cdef _Simplex program = _Simplex(planes, prices, basis, np.empty((n + 1, 2 * n + 2)), -1)
    with nogil:
        while True:
            program.solve(at + found, tolerance, 50 * (n + 2))
            promised = program.dual[0] * seconds
            if found == most or (value > -INFINITY and promised - value <= close * fabs(value)) or promised < wanted:
                break
            is_zero, allowed = True, 0.0
            for i in range(n):
                multipliers[found, i] = min(max(-program.dual[1 + i], 0.0), limit) * seconds / unit[i]
                allowed += multipliers[found, i] * <double>budget[i]
                is_zero = is_zero and multipliers[found, i] == 0
            reduced = walk.shortest(&multipliers[found, 0])
            if reduced == INFINITY:
                value = INFINITY
                break
            if not is_zero:         # else the value is the path's seconds, without an error
                reduced -= allowed + error * (reduced + fabs(allowed))
            values[found], costs[found] = reduced, walk.total
            for i in range(stages):
                paths[found, i] = walk.path[i]
            planes[at + found, 0], prices[at + found] = 1.0, walk.total / seconds
            for i in range(n):
                held[found, i] = walk.held[i]
                planes[at + found, 1 + i] = <double>(walk.held[i] - budget[i]) / unit[i]
            value = max(value, reduced)
            found += 1
            if value >= stop or value > dearest:
                break
    return (values_[:found], multipliers_[:found], paths_[:found], costs_[:found], bytes_[:found], basis_,
            np.asarray(program.have))
