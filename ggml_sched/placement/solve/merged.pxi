# Part of _chain.pyx: a bound by merged labels.


@cython.boundscheck(False)
@cython.wraparound(False)
@cython.final
cdef class _Merged:
    """The merged labels after a stage: one for each state and cell of bytes, a range of 2^shift on each scarce device.
    Its seconds, reduced seconds and bytes are the least of all labels that were merged."""

    cdef Py_ssize_t n, most, rows, n_slots
    cdef int32_t[::1] state, slots, shift
    cdef double[::1] cost, reduced
    cdef int64_t[:, ::1] memory

    def __init__(self, Py_ssize_t most, const int32_t[::1] shift):
        self.most, self.rows, self.n_slots = most, shift.shape[0], 256
        while self.n_slots < 2 * most:
            self.n_slots *= 2
        self.state, self.slots = np.empty(most, np.int32), np.empty(self.n_slots, np.int32)
        self.shift = np.array(shift)
        self.cost, self.reduced = np.empty(most), np.empty(most)
        self.memory = np.empty((most, max(self.rows, 1)), np.int64)

    cdef void clear(self) noexcept nogil:
        self.n = 0
        memset(&self.slots[0], 0xff, self.n_slots * sizeof(int32_t))

    cdef void add(self, int32_t state, const int64_t *memory, double cost, double reduced) noexcept nogil:
        cdef uint64_t seen
        cdef Py_ssize_t row, slot
        cdef int32_t at
        while True:
            seen = mixed(0, <uint64_t>state)
            for row in range(self.rows):
                seen = mixed(seen, <uint64_t>(memory[row] >> self.shift[row]))
            slot = <Py_ssize_t>((seen >> 20) & <uint64_t>(self.n_slots - 1))
            while True:
                at = self.slots[slot]
                if at < 0:
                    break
                if self.state[at] == state:
                    for row in range(self.rows):
                        if self.memory[at, row] >> self.shift[row] != memory[row] >> self.shift[row]:
                            break
                    else:
                        self.cost[at] = min(self.cost[at], cost)
                        self.reduced[at] = min(self.reduced[at], reduced)
                        for row in range(self.rows):
                            self.memory[at, row] = min(self.memory[at, row], memory[row])
                        return
                slot = (slot + 1) & (self.n_slots - 1)
            if self.n < self.most:
                at = <int32_t>self.n
                self.n = at + 1
                self.slots[slot] = at
                self.state[at] = state
                self.cost[at] = cost
                self.reduced[at] = reduced
                for row in range(self.rows):
                    self.memory[at, row] = memory[row]
                return
            self.coarsen()

    cdef void coarsen(self) noexcept nogil:
        # Merges labels in larger and larger cells, until at most half of the room is taken.
        cdef Py_ssize_t n, at, row
        while 2 * self.n > self.most:
            for row in range(self.rows):
                self.shift[row] += 1
            n = self.n
            self.clear()
            for at in range(n):         # no label moves to a later place
                self.add(self.state[at], &self.memory[at, 0], self.cost[at], self.reduced[at])


@cython.boundscheck(False)
@cython.wraparound(False)
def merged_labels(const int32_t[::1] classes not None, const double[::1] start not None,
                  const double[::1] ends not None, const int64_t[::1] ranges not None,
                  const double[::1] cost not None, const double[::1] reduced not None,
                  const int64_t[:, ::1] memory not None, const int32_t[::1] after not None,
                  const int64_t[::1] budget not None, double constant, const double[:, ::1] suffix not None,
                  const int64_t[:, :, ::1] least not None, double stop, const int32_t[::1] shift not None,
                  Py_ssize_t most, Py_ssize_t parts, const float[:, :, ::1] ahead_cost,
                  const float[:, :, ::1] ahead_reduced, int64_t effort):
    """A sweep of merged labels over the stages: (bound, effort left, widest, seconds, reduced seconds).  No path that
    fits costs less than the bound, which is at most `stop`.  The sweep is not complete if the effort left is negative.

    Other arguments are those of `labels`; `constant`: that of the multipliers of `reduced`; `ends`: seconds for each
    state after the last stage.  Labels of one state are merged if their bytes are in the same cell, of 2^`shift` bytes
    on each scarce device [scarce].  Where these would be more than `most` (at least twice the states), cells are
    larger; `widest` is how many times they were doubled, at most.

    The last two results are tables f32 [stages + 1, states, parts ^ scarce]: the least (reduced) seconds of labels whose
    bytes are, on each device, at most in this one of `parts` parts of the budget.  `ahead_cost` and `ahead_reduced` are
    such tables of a complete sweep in the other direction, with a `stop` at least as large, in the order of this sweep's
    stages; None: none.
    """
    cdef Py_ssize_t n = classes.shape[0], states = start.shape[0], rows = budget.shape[0], cells = 1
    cdef Py_ssize_t stage, at, row, cell, n_labels, stride, block
    cdef bint has_ahead = ahead_cost is not None, fits
    cdef int64_t column, room
    cdef int32_t before, state, number, widest = 0
    cdef double through, seconds, lowest, bound, least_bound, best = -INFINITY
    cdef _Merged made = _Merged(most, shift)
    for row in range(rows):
        cells *= parts
    seconds_ = np.full((n + 1, states, cells), np.inf, np.float32)
    reduced_ = np.full((n + 1, states, cells), np.inf, np.float32)
    label_state_, label_cost_, label_reduced_ = np.empty(most, np.int32), np.empty(most), np.empty(most)
    label_memory_, new_memory_ = np.empty((most, max(rows, 1)), np.int64), np.zeros(max(rows, 1), np.int64)
    scale_ = np.empty(max(rows, 1))
    cdef float[:, :, ::1] out_cost = seconds_, out_reduced = reduced_
    cdef int32_t[::1] label_state = label_state_
    cdef double[::1] label_cost = label_cost_, label_reduced = label_reduced_, scale = scale_
    cdef int64_t[:, ::1] label_memory = label_memory_
    cdef int64_t[::1] new_memory = new_memory_
    with nogil:
        made.clear()
        for row in range(rows):
            scale[row] = <double>parts / (<double>budget[row] + 1.0)
        for at in range(states):
            fits = start[at] < INFINITY
            for row in range(rows):
                fits = fits and least[0, at, row] <= budget[row]
            if fits and start[at] + constant + suffix[0, at] < stop:
                made.add(<int32_t>at, &new_memory[0], start[at], start[at])
        for stage in range(n + 1):
            n_labels, least_bound = made.n, INFINITY
            for row in range(rows):
                widest = max(widest, made.shift[row] - shift[row])
            for at in range(n_labels):
                state = made.state[at]
                label_state[at], label_cost[at], label_reduced[at] = state, made.cost[at], made.reduced[at]
                bound = max(label_reduced[at] + constant + suffix[stage, state],
                            label_cost[at] + ends[state] if stage == n else label_cost[at])
                cell = 0
                for row in range(rows):
                    label_memory[at, row] = made.memory[at, row]
                    cell = cell * parts + min(<Py_ssize_t>(<double>made.memory[at, row] * scale[row]), parts - 1)
                # Lowered by more than half of the last bit of a float.
                out_cost[stage, state, cell] = min(out_cost[stage, state, cell],
                                                   <float>(label_cost[at] * (1.0 - 1e-7)))
                out_reduced[stage, state, cell] = min(out_reduced[stage, state, cell],
                                                      <float>(label_reduced[at] * (1.0 - 1e-7)))
                if has_ahead:
                    cell = 0
                    for row in range(rows):
                        room = budget[row] - label_memory[at, row]
                        cell = cell * parts + min(<Py_ssize_t>(<double>room * scale[row]), parts - 1)
                    bound = max(bound, label_cost[at] + ahead_cost[stage, state, cell])
                    bound = max(bound, label_reduced[at] + constant + ahead_reduced[stage, state, cell])
                least_bound = min(least_bound, bound)
            best = max(best, least_bound)
            if stage == n:
                break
            number, lowest = classes[stage], INFINITY
            for at in range(states):
                lowest = min(lowest, suffix[stage + 1, at])
            made.clear()
            for row in range(rows):
                made.shift[row] = max(shift[row], made.shift[row] - 1)
            for at in range(n_labels):
                before = label_state[at]
                for column in range(ranges[number * states + before], ranges[number * states + before + 1]):
                    through = label_reduced[at] + reduced[column]
                    if through + constant + lowest >= stop:
                        break
                    effort -= 1
                    state = after[column]
                    if through + constant + suffix[stage + 1, state] >= stop:
                        continue
                    fits, cell = True, 0
                    for row in range(rows):
                        new_memory[row] = label_memory[at, row] + memory[column, row]
                        room = budget[row] - new_memory[row]
                        if room < least[stage + 1, state, row]:
                            fits = False
                            break
                        cell = cell * parts + min(<Py_ssize_t>(<double>room * scale[row]), parts - 1)
                    if not fits:
                        continue
                    seconds = label_cost[at] + cost[column]
                    if has_ahead and (seconds + ahead_cost[stage + 1, state, cell] >= stop
                                      or through + constant + ahead_reduced[stage + 1, state, cell] >= stop):
                        continue
                    made.add(state, &new_memory[0], seconds, through)
                if effort < 0:
                    break
            if effort < 0:
                break
        for stage in range(n + 1):
            for state in range(states):
                stride = 1
                for row in range(rows):
                    for block in range(cells // (stride * parts)):
                        for at in range(block * stride * parts + stride, (block + 1) * stride * parts):
                            out_cost[stage, state, at] = min(out_cost[stage, state, at],
                                                             out_cost[stage, state, at - stride])
                            out_reduced[stage, state, at] = min(out_reduced[stage, state, at],
                                                                out_reduced[stage, state, at - stride])
                    stride *= parts
    return min(stop, best), effort, widest, seconds_, reduced_
