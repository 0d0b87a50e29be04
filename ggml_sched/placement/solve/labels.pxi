# Part of _chain.pyx: paths by labels, stage by stage.


@cython.boundscheck(False)
@cython.wraparound(False)
cdef int32_t ordered(int64_t *bytes_, int32_t state, const int32_t[:, ::1] swaps, const int32_t[:, ::1] state_swaps,
                     int32_t *done, int32_t *n_done) noexcept nogil:
    # Exchanges equal devices until their bytes are in falling order, and until no exchange of devices with equal bytes
    # gives a lower state; returns the new state.  `done`, if not NULL, receives the exchanges as rows of `swaps`.
    cdef Py_ssize_t swap
    cdef int64_t kept
    cdef int32_t a, b
    cdef bint changed = True
    while changed:
        changed = False
        for swap in range(swaps.shape[0]):
            a, b = swaps[swap, 0], swaps[swap, 1]
            if bytes_[a] < bytes_[b] or (bytes_[a] == bytes_[b] and state_swaps[swap, state] < state):
                kept = bytes_[a]
                bytes_[a] = bytes_[b]
                bytes_[b] = kept
                state = state_swaps[swap, state]
                if done != NULL:
                    done[n_done[0]] = <int32_t>swap
                    n_done[0] += 1
                changed = True
    return state


def exchanges(int64_t[::1] bytes_ not None, int32_t state, const int32_t[:, ::1] swaps not None,
              const int32_t[:, ::1] state_swaps not None):
    """Put equal devices in order, as `labels` does: (the new state, the exchanges as rows of `swaps`).  `bytes_`
    [scarce] changes in place; `swaps`, `state_swaps`: see `Twins`.
    """
    cdef Py_ssize_t most = bytes_.shape[0] * (bytes_.shape[0] + 1) * (state_swaps.shape[1] + 1)
    made = np.zeros(most, np.int32)
    cdef int32_t[::1] done = made
    cdef int32_t n_done = 0
    if not swaps.shape[0]:
        return state, []
    state = ordered(&bytes_[0], state, swaps, state_swaps, &done[0], &n_done)
    return state, made[:n_done].tolist()


cdef inline uint64_t mixed(uint64_t seen, uint64_t value) noexcept nogil:
    seen ^= value + <uint64_t>0x9e3779b97f4a7c15 + (seen << 6) + (seen >> 2)
    return seen * <uint64_t>0xff51afd7ed558ccd


@cython.boundscheck(False)
@cython.wraparound(False)
@cython.final
cdef class _Stage:
    """The labels after a stage, while they are being computed: no two have the same state and bytes."""

    cdef Py_ssize_t n, most, width, rows, n_slots
    cdef double lowest          # the lowest bound of a label that was dropped
    cdef int shift              # `drop` last kept one label for each cell of 2^shift bytes
    cdef double[::1] cost, bound
    cdef int64_t[:, ::1] memory
    cdef int32_t[::1] state, earlier, column, slots
    cdef uint8_t[::1] sorted_bytes
    cdef Entry *entries

    def __init__(self, Py_ssize_t width, Py_ssize_t rows):
        self.width, self.rows, self.most = width, rows, 4 * width + 64
        self.n_slots = 256
        while self.n_slots < 2 * self.most:
            self.n_slots *= 2
        self.cost, self.bound = np.empty(self.most), np.empty(self.most)
        self.memory = np.empty((self.most, rows), np.int64)
        self.state, self.earlier, self.column = (np.empty(self.most, np.int32) for _ in range(3))
        self.slots = np.empty(self.n_slots, np.int32)
        self.sorted_bytes = np.empty(self.most * sizeof(Entry), np.uint8)
        self.entries = <Entry *>&self.sorted_bytes[0]
        self.lowest, self.shift = INFINITY, 0

    cdef void clear(self) noexcept nogil:
        self.n = 0
        memset(&self.slots[0], 0xff, self.n_slots * sizeof(int32_t))

    cdef int32_t *slot_of(self, int32_t state, const int64_t *memory, int shift) noexcept nogil:
        # The slot, in a hash table, for labels of this state and of these bytes in units of 2^shift; it holds the index
        # of such a label, or -1.
        cdef uint64_t seen = mixed(0, <uint64_t>state)
        cdef Py_ssize_t row, slot
        cdef int32_t other
        for row in range(self.rows):
            seen = mixed(seen, <uint64_t>(memory[row] >> shift))
        slot = <Py_ssize_t>((seen >> 20) & <uint64_t>(self.n_slots - 1))
        while True:
            other = self.slots[slot]
            if other < 0:
                return &self.slots[slot]
            if self.state[other] == state:
                for row in range(self.rows):
                    if self.memory[other, row] >> shift != memory[row] >> shift:
                        break
                else:
                    return &self.slots[slot]
            slot = (slot + 1) & (self.n_slots - 1)

    cdef void add(self, int32_t state, const int64_t *memory, double cost, double bound, int32_t earlier,
                  int32_t column) noexcept nogil:
        cdef int32_t *slot
        cdef int32_t at
        cdef Py_ssize_t row
        slot = self.slot_of(state, memory, 0)
        at = slot[0]
        if at >= 0:
            if cost < self.cost[at]:
                self.cost[at], self.bound[at], self.earlier[at], self.column[at] = cost, bound, earlier, column
            return
        if self.n == self.most:
            self.drop(2 * self.width)
            slot = self.slot_of(state, memory, 0)
        at = <int32_t>self.n
        slot[0] = at
        self.n = at + 1
        self.state[at], self.cost[at], self.bound[at] = state, cost, bound
        self.earlier[at], self.column[at] = earlier, column
        for row in range(self.rows):
            self.memory[at, row] = memory[row]

    cdef void drop(self, Py_ssize_t kept) noexcept nogil:
        # Keeps at most `kept` labels: of each state and cell the one of the lowest bound.  A cell is a range of 2^shift
        # bytes on each scarce device; cells grow until so few labels are left.
        cdef Py_ssize_t at, chosen
        cdef int32_t *slot
        if self.n <= kept:
            return
        for at in range(self.n):
            self.entries[at].key, self.entries[at].index = self.bound[at], <int32_t>at
        qsort(self.entries, self.n, sizeof(Entry), by_key)
        self.shift = max(self.shift - 2, 0)
        while True:
            memset(&self.slots[0], 0xff, self.n_slots * sizeof(int32_t))
            chosen = 0
            for at in range(self.n):
                slot = self.slot_of(self.state[self.entries[at].index], &self.memory[self.entries[at].index, 0],
                                    self.shift)
                self.entries[at].state = slot[0] < 0 and chosen < kept
                if slot[0] < 0:
                    slot[0] = self.entries[at].index
                    chosen += 1
                    if chosen > kept and self.shift < WIDEST:
                        break
            if chosen <= kept or self.shift >= WIDEST:
                break
            self.shift = self.shift + 1
        chosen = 0
        for at in range(self.n):
            if self.entries[at].state:
                self.entries[chosen].index = self.entries[at].index
                chosen += 1
            elif self.entries[at].key < self.lowest:
                self.lowest = self.entries[at].key
        # Sorted by index, so that `gather` never overwrites a label that it has yet to move.
        for at in range(chosen):
            self.entries[at].key = self.entries[at].index
        qsort(self.entries, chosen, sizeof(Entry), by_key)
        self.gather(chosen)

    cdef void gather(self, Py_ssize_t kept) noexcept nogil:
        # Moves the labels entries[0 .. kept - 1], whose indices rise, to the front.
        cdef Py_ssize_t at, row
        cdef int32_t old
        memset(&self.slots[0], 0xff, self.n_slots * sizeof(int32_t))
        for at in range(kept):
            old = self.entries[at].index
            self.state[at], self.cost[at], self.bound[at] = self.state[old], self.cost[old], self.bound[old]
            self.earlier[at], self.column[at] = self.earlier[old], self.column[old]
            for row in range(self.rows):
                self.memory[at, row] = self.memory[old, row]
            self.slot_of(self.state[at], &self.memory[at, 0], 0)[0] = <int32_t>at
        self.n = kept

    cdef void end(self) noexcept nogil:
        # Removes each label if a cheaper one of the same state takes no more bytes on any device; then drops labels
        # until at most `width` are left.
        cdef Py_ssize_t at, other, row, kept = 0, begin = 0
        cdef int32_t one, two
        cdef bint beaten
        self.drop(2 * self.width)
        for at in range(self.n):
            self.entries[at].key, self.entries[at].index = self.cost[at], <int32_t>at
            self.entries[at].state = self.state[at]
        qsort(self.entries, self.n, sizeof(Entry), by_state_and_key)
        for at in range(self.n):
            if kept and self.entries[at].state != self.entries[kept - 1].state:
                begin = kept
            one, beaten = self.entries[at].index, False
            for other in range(kept - 1, max(begin, kept - COMPARED) - 1, -1):
                two, beaten = self.entries[other].index, True
                for row in range(self.rows):
                    if self.memory[two, row] > self.memory[one, row]:
                        beaten = False
                        break
                if beaten:
                    break
            if not beaten:
                self.entries[kept] = self.entries[at]
                kept += 1
        for at in range(kept):
            self.entries[at].key = self.entries[at].index
        qsort(self.entries, kept, sizeof(Entry), by_key)
        self.gather(kept)
        self.drop(self.width)


@cython.boundscheck(False)
@cython.wraparound(False)
def labels(const int32_t[::1] classes not None, const double[::1] start not None, const int64_t[::1] ranges not None,
           const double[::1] cost not None, const double[::1] reduced not None, const int64_t[:, ::1] memory not None,
           const int32_t[::1] after not None, const int64_t[::1] budget not None,
           const double[:, ::1] multipliers not None, const double[::1] constants not None,
           const double[:, :, ::1] suffix not None, const int64_t[:, :, ::1] least not None,
           const int32_t[:, ::1] swaps not None, const int32_t[:, ::1] state_swaps not None, double stop,
           Py_ssize_t width, int64_t effort):
    """The cheapest path below `stop` seconds that fits, by labels: (columns i32 [stages] or None, bound, effort left).

    Columns ranges[c * states + s] .. are those of class c from state s, by rising `reduced` seconds at the first
    multipliers.  Each row of `multipliers` [rows, scarce] gives a bound of a label, the sum of its seconds, its bytes
    times the multipliers, the suffix [rows, stages + 1, states] and the constant of the row; the largest bound counts.
    `least` [stages + 1, states, scarce]: the bytes that the later stages take at least.  At most `width` labels are
    kept after a stage: for each state and range of bytes the one of the lowest bound, and so few that about `effort`
    columns are tried.  No path that fits, except the returned one, costs less than both `bound` and `stop`.  The two
    devices of a pair of `swaps` are equal: `state_swaps` [pairs, states] has for each state the one with these devices
    exchanged.
    """
    cdef Py_ssize_t n = classes.shape[0], states = start.shape[0], rows = budget.shape[0], n_bounds = constants.shape[0]
    cdef Py_ssize_t stage, at, row, k, n_labels = 0, best = -1
    cdef int64_t column, tried
    cdef int32_t before, number, state
    cdef double base, through, bound, seconds, other, lowest_suffix
    cdef bint fits
    cdef _Stage made = _Stage(width, rows)
    label_cost_, label_reduced_ = np.empty(width), np.empty(width)
    label_memory_, new_memory_ = np.zeros((width, max(rows, 1)), np.int64), np.zeros(max(rows, 1), np.int64)
    label_state_ = np.empty(width, np.int32)
    earlier_, used_ = np.empty((n, width), np.int32), np.empty((n, width), np.int32)
    cdef double[::1] label_cost = label_cost_, label_reduced = label_reduced_
    cdef int64_t[:, ::1] label_memory = label_memory_
    cdef int64_t[::1] new_memory = new_memory_
    cdef int32_t[::1] label_state = label_state_
    cdef int32_t[:, ::1] earlier = earlier_, used = used_
    with nogil:
        made.clear()
        for at in range(states):
            fits = start[at] < INFINITY
            for row in range(rows):
                new_memory[row] = 0
                fits = fits and least[0, at, row] <= budget[row]
            if fits and start[at] + constants[0] + suffix[0, 0, at] < stop:
                if ordered(&new_memory[0], <int32_t>at, swaps, state_swaps, NULL, NULL) == at:
                    made.add(<int32_t>at, &new_memory[0], start[at], start[at] + constants[0] + suffix[0, 0, at], -1, -1)
        made.drop(width)
        for stage in range(n + 1):
            n_labels = made.n
            for at in range(n_labels):
                label_state[at], label_cost[at] = made.state[at], made.cost[at]
                label_reduced[at] = made.cost[at] + constants[0]
                for row in range(rows):
                    label_memory[at, row] = made.memory[at, row]
                    label_reduced[at] += multipliers[0, row] * <double>made.memory[at, row]
                if stage:
                    earlier[stage - 1, at], used[stage - 1, at] = made.earlier[at], made.column[at]
            if stage == n:
                break
            number = classes[stage]
            lowest_suffix = INFINITY
            for at in range(states):
                lowest_suffix = min(lowest_suffix, suffix[0, stage + 1, at])
            tried = effort
            made.clear()
            for at in range(n_labels):
                before, base = label_state[at], label_reduced[at]
                for column in range(ranges[number * states + before], ranges[number * states + before + 1]):
                    through = base + reduced[column]
                    if through + lowest_suffix >= stop:
                        break
                    effort -= 1
                    state = after[column]
                    bound = through + suffix[0, stage + 1, state]
                    if bound >= stop:
                        continue
                    fits = True
                    for row in range(rows):
                        new_memory[row] = label_memory[at, row] + memory[column, row]
                        if new_memory[row] + least[stage + 1, state, row] > budget[row]:
                            fits = False
                            break
                    if not fits:
                        continue
                    seconds = label_cost[at] + cost[column]
                    for k in range(1, n_bounds):
                        other = seconds + constants[k] + suffix[k, stage + 1, state]
                        for row in range(rows):
                            other += multipliers[k, row] * <double>new_memory[row]
                        if other > bound:
                            bound = other
                            if bound >= stop:
                                break
                    if bound >= stop:
                        continue
                    state = ordered(&new_memory[0], state, swaps, state_swaps, NULL, NULL)
                    made.add(state, &new_memory[0], seconds, bound, <int32_t>at, <int32_t>column)
            # The effort that is left is divided among the stages that are left.
            tried = max((tried - effort) // max(n_labels, 1), <int64_t>1)
            made.width = min(width, max(<int64_t>FEWEST, effort // (n - stage) // tried))
            made.end()
        for at in range(n_labels):
            if best < 0 or label_cost[at] < label_cost[best]:
                best = at
    if best < 0:
        return None, made.lowest, effort
    path = np.empty(n, np.int32)
    cdef int32_t[::1] columns = path
    for stage in range(n - 1, -1, -1):
        columns[stage] = used[stage, best]
        best = earlier[stage, best]
    return path, made.lowest, effort


@cython.boundscheck(False)
@cython.wraparound(False)
def cheapest_labels(const int64_t[::1] parent not None, const double[:, ::1] own not None,
                    const double[:, :, ::1] edge not None):
    """The cheapest labels for all nodes of a forest: (sum of the costs, labels i64 [nodes]).  In this function a label
    is a number that a node gets, such as a device (nodebound.py), not a path.

    `parent[i]` is smaller than i, or -1 for a root; `own` [nodes, labels]: the cost of a label at a node; `edge`
    [nodes, label, label of the parent]: the cost of the two labels together.
    """
    cdef Py_ssize_t n = own.shape[0], n_labels = own.shape[1], node, label, above
    cdef double total = 0.0, least, cost
    sums_, chosen_ = np.array(own), np.zeros((n, max(n_labels, 1)), np.int64)
    labels_ = np.zeros(n, np.int64)
    cdef double[:, ::1] sums = sums_
    cdef int64_t[:, ::1] chosen = chosen_
    cdef int64_t[::1] out = labels_
    with nogil:
        for node in range(n - 1, -1, -1):
            if parent[node] < 0:
                least = INFINITY
                for label in range(n_labels):
                    if sums[node, label] < least:
                        least, chosen[node, 0] = sums[node, label], label
                total += least
                continue
            for above in range(n_labels):
                least = INFINITY
                for label in range(n_labels):
                    cost = sums[node, label] + edge[node, label, above]
                    if cost < least:
                        least, chosen[node, above] = cost, label
                sums[parent[node], above] += least
        for node in range(n):
            out[node] = chosen[node, 0 if parent[node] < 0 else out[parent[node]]]
    return total, labels_
