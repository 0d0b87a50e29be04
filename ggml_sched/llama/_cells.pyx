# cython: language_level=3
"""Which row of the KV cache holds which position of which sequences, and the graph inputs that follow from it.

Owns a position (-1: free) and a set of sequences, as bits, for each row.  Invariant: a row is free exactly when no
sequence is in its set; rows from `rows_in_use` on are free; a method that raises has changed nothing.  Compiled,
because it runs for every token.  Corresponds to llama.cpp's llama_kv_cells, and to the set_input of its KV cache.
"""

cimport cython
from cpython.buffer cimport PyBuffer_Release
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t, uint16_t, uint64_t

from ggml_sched._graph cimport Tensor
from ggml_sched.llama._arrays cimport take

import numpy as np

from ggml_sched._graph import Type
from ggml_sched.llama.errors import ContextFull, SequenceError

MAX_SEQUENCES = 64
"""The most sequences: a row's set of sequences is the bits of a u64."""

cdef enum:
    FREE = -1
    HALF_HIDDEN = 0xfc00        # minus infinity as f16: the mask of a row that a token does not attend to


@cython.final
cdef class _Tokens:
    """The position of each of n tokens, and the sequence of each, as C arrays; made from two NumPy arrays i32 [n]."""

    cdef Py_buffer views[2]
    cdef const int32_t *positions
    cdef const int32_t *sequences
    cdef int64_t n

    def __cinit__(self, positions, sequences):
        self.n = take(positions, &self.views[0], b"il", sizeof(int32_t), False)
        cdef int64_t n = take(sequences, &self.views[1], b"il", sizeof(int32_t), False)
        if n != self.n:
            raise ValueError(f"{n} sequences for {self.n} positions")
        self.positions, self.sequences = <const int32_t *>self.views[0].buf, <const int32_t *>self.views[1].buf

    def __dealloc__(self):
        PyBuffer_Release(&self.views[0])
        PyBuffer_Release(&self.views[1])


cdef class Cells:
    """The `n_rows` rows of a KV cache, which hold tokens of the sequences 0 .. n_seq - 1.

    Ranges of positions are half open; `stop=None` is the end of the sequence.
    """

    def __init__(self, int64_t n_rows, int64_t n_seq=1):
        if not 1 <= n_seq <= MAX_SEQUENCES:
            raise ValueError(f"{n_seq} sequences are not in 1 .. {MAX_SEQUENCES}")
        positions, sets = np.full(n_rows, FREE, np.int32), np.zeros(n_rows, np.uint64)
        self.release()
        take(positions, &self.views[0], b"il", sizeof(int32_t), True)
        take(sets, &self.views[1], b"LQ", sizeof(uint64_t), True)
        self.positions, self.position = positions, <int32_t *>self.views[0].buf
        self.sets, self.set = sets, <uint64_t *>self.views[1].buf
        self.n_rows, self.n_seq = n_rows, n_seq
        self.clear()

    def __dealloc__(self):
        self.release()

    cdef void release(self) noexcept:
        PyBuffer_Release(&self.views[0])
        PyBuffer_Release(&self.views[1])

    def clear(self):
        """Free every row."""
        self.positions.fill(FREE)
        self.sets.fill(0)
        self.n_used = self.end = self.first_free = 0

    # -- reading --------------------------------------------------------------------

    @property
    def n_free(self):
        return self.n_rows - self.n_used

    def rows_in_use(self):
        """The number of the last row in use, plus one: all rows from this number on are free."""
        return self.end

    def rows_of(self, seq, start=0, stop=None):
        """The rows (i64) that hold positions start .. stop - 1 of a sequence, in the order of the positions."""
        rows = np.flatnonzero(self.held(seq, start, stop))
        return rows[np.argsort(self.positions[rows], kind="stable")]

    def shared(self, rows):
        """bool [len(rows)]: whether each of these rows belongs to more than one sequence."""
        sets = self.sets[rows]
        return (sets & (sets - np.uint64(1))) != 0

    def mask(self, positions, sequences, int64_t n_kv, int64_t window=0, bint half=False):
        """The attention mask of n tokens of these positions and sequences: bytes of [n_kv, n] f32, or f16 with `half`.

        A value is 0 where a token attends to one of the first n_kv rows, else minus infinity.  A token attends to its
        own sequence up to its own position; with a window (not 0), to the last `window` of these positions.
        """
        cdef _Tokens tokens = _Tokens(positions, sequences)
        cdef int64_t i, size = n_kv * (2 if half else 4)
        if not 0 <= n_kv <= self.n_rows:
            raise ValueError(f"a mask for {n_kv} of {self.n_rows} rows")
        cdef bytes made = PyBytes_FromStringAndSize(NULL, tokens.n * size)
        cdef char *out = made
        for i in range(tokens.n):
            self.check(tokens.sequences[i])
            self.fill_mask(out + i * size, tokens.positions[i], tokens.sequences[i], n_kv, window, half)
        return made

    cdef void fill_mask(self, char *out, int64_t position, int64_t seq, int64_t n_kv, int64_t window,
                        bint half) noexcept nogil:
        # Write the mask of one token, n_kv values, to `out`.  Compilers vectorise the loops, as they have no branches.
        cdef uint64_t bit = <uint64_t>1 << seq
        cdef int64_t row, oldest = position - window if window else -1
        cdef bint seen
        cdef const int32_t *positions = self.position
        cdef const uint64_t *sets = self.set
        if half:
            for row in range(n_kv):
                seen = (sets[row] & bit != 0) & (positions[row] <= position) & (positions[row] > oldest)
                (<uint16_t *>out)[row] = 0 if seen else HALF_HIDDEN
        else:
            for row in range(n_kv):
                seen = (sets[row] & bit != 0) & (positions[row] <= position) & (positions[row] > oldest)
                (<float *>out)[row] = 0 if seen else -INFINITY

    # -- changes ------------------------------------------------------------------------

    def place(self, positions, sequences):
        """Put n tokens of these positions and sequences into the first free rows; returns these rows, i64 [n].

        ContextFull if fewer than n rows are free; then no row is changed.
        """
        cdef _Tokens tokens = _Tokens(positions, sequences)
        cdef int64_t i
        for i in range(tokens.n):
            self.check(tokens.sequences[i])
        self.check_room(tokens.n)
        rows = np.empty(tokens.n, np.int64)
        cdef Py_buffer out
        take(rows, &out, b"lq", sizeof(int64_t), True)
        try:
            for i in range(tokens.n):
                (<int64_t *>out.buf)[i] = self.put(tokens.positions[i], tokens.sequences[i])
        finally:
            PyBuffer_Release(&out)
        return rows

    def place_each(self, list positions not None, list sequences not None):
        """`place` for lists of ints; returns a list.  It makes no arrays, and runs for every token of a generation."""
        cdef int64_t seq
        cdef int32_t position
        if len(positions) != len(sequences):
            raise ValueError(f"{len(sequences)} sequences for {len(positions)} positions")
        for seq in sequences:
            self.check(seq)
        self.check_room(len(positions))
        rows = []
        for position, seq in zip(positions, sequences):
            rows.append(self.put(position, seq))
        return rows

    cdef int64_t put(self, int32_t position, int64_t seq) except -1:
        """Put a token at a position of a sequence into the first free row, which must exist; returns the row."""
        cdef int64_t row = self.first_free
        while row < self.n_rows and self.position[row] != FREE:
            row += 1
        if row >= self.n_rows:
            raise SequenceError(f"no row is free, though only {self.n_used} of {self.n_rows} are in use")
        self.position[row] = position
        self.set[row] = <uint64_t>1 << seq
        self.n_used += 1
        self.first_free = row + 1
        self.end = max(self.end, row + 1)
        return row

    def remove(self, seq, start=0, stop=None):
        """Remove positions start .. stop - 1 of a sequence; returns the rows (i64) that this has freed."""
        held = self.held(seq, start, stop)
        self.sets[held] &= ~self.bit(seq)
        freed = np.flatnonzero(held & (self.sets == 0))
        self.positions[freed] = FREE
        self.recount()
        return freed

    def copy(self, src, dst, start=0, stop=None):
        """Make sequence `dst` share the rows that sequence `src` has at positions start .. stop - 1.

        SequenceError if `dst` has other rows at some of these positions.
        """
        held = self.held(src, start, stop)
        if src != dst:
            theirs = self.held(dst, 0, None)
            if np.isin(self.positions[held & ~theirs], self.positions[theirs]).any():
                raise SequenceError(f"sequence {dst} holds some positions of sequence {src} already")
        self.sets[held] |= self.bit(dst)

    def shift(self, seq, start, stop, delta):
        """Move positions start .. stop - 1 of a sequence by `delta`; returns how far each row moved, i32 [n_rows].

        SequenceError if other sequences share some of the rows, or a new position is negative or already taken.
        """
        held = self.held(seq, start, stop)
        rows = np.flatnonzero(held)
        if self.shared(rows).any():
            raise SequenceError(f"positions of sequence {seq} are shared with other sequences: they cannot move")
        moved = self.positions[rows].astype(np.int64) + delta
        if len(moved) and not 0 <= moved.min() <= moved.max() < 1 << 31:
            raise SequenceError(f"positions of sequence {seq} would be {moved.min()} .. {moved.max()}")
        others = self.positions[self.held(seq, 0, None) & ~held]
        if np.isin(moved, others).any():
            raise SequenceError(f"positions of sequence {seq} moved by {delta} would meet others of it")
        deltas = np.zeros(self.n_rows, np.int32)
        deltas[rows] = delta
        self.positions[rows] = moved
        return deltas

    def snapshot(self):
        """Copies of `positions` and `sets`, which `rollback` takes to undo all changes after this call."""
        return self.positions.copy(), self.sets.copy()

    def rollback(self, tuple snapshot not None):
        self.positions[:], self.sets[:] = snapshot
        self.recount()

    # -- helpers -------------------------------------------------------------------------

    cdef int check_room(self, int64_t n) except -1:
        if n > self.n_rows - self.n_used:
            raise ContextFull(f"{n} tokens after {self.n_used} do not fit a context of {self.n_rows}",
                              self.n_used, n, self.n_rows)
        return 0

    cdef int check(self, int64_t seq) except -1:
        if not 0 <= seq < self.n_seq:
            raise ValueError(f"sequence {seq} is not in 0 .. {self.n_seq - 1}")
        return 0

    cdef object bit(self, int64_t seq):
        self.check(seq)
        return np.uint64(<uint64_t>1 << seq)

    cdef object held(self, int64_t seq, int64_t start, stop):
        """bool [n_rows]: rows of a sequence at positions start .. stop - 1."""
        held = (self.sets & self.bit(seq)) != 0
        if start > 0:
            held &= self.positions >= start
        if stop is not None:
            held &= self.positions < stop
        return held

    cdef int recount(self) except -1:
        """Free the rows whose set of sequences is empty, and count the rows anew (n_used, end, first_free).

        The result is consistent even if an interrupt has ended an earlier change half way.
        """
        self.positions[self.sets == 0] = FREE
        used = self.positions >= 0
        self.n_used = int(np.count_nonzero(used))
        self.end = self.n_rows - int(used[::-1].argmax()) if self.n_used else 0
        self.first_free = self.end if self.n_used == self.end else int(used.argmin())
        return 0


cdef class TokenInputs:
    """`TokenInputs(tokens, positions, rows, elements, masks, state_row)`: sets the inputs of a graph of n tokens, all of
    which are outputs.

    Compiled, because it runs for each generated token.  The arguments are input tensors, or None where the graph has no
    such input: `tokens`, `positions` i32 [n], `rows` i64 [n], `state_row` i32 [1], which a graph of one sequence has.
    `elements`: pairs (i64 tensor [width * n] for the indices of the tokens' values in a transposed V cache, number of
    columns of that cache).  `masks`: pairs (tensor [n_kv, n], f32 or f16; window).  ValueError for a tensor in
    `elements` or `masks` of another type or shape.
    """

    def __init__(self, Tensor tokens not None, Tensor positions, Tensor rows, list elements not None,
                 list masks not None, Tensor state_row):
        self.n = tokens.n_elements
        for t, _ in elements:
            check_rows(t, Type.I64, 1)
            if t.n_elements % self.n:
                raise ValueError(f"{t!r} has no whole number of elements for each of {self.n} tokens")
        for t, _ in masks:
            check_rows(t, Type.F16 if t.type == Type.F16 else Type.F32, self.n)
        self.tokens, self.positions, self.rows = tokens, positions, rows
        self.elements, self.state_row = [*elements], state_row
        self.masks = [(t, window, t.type == Type.F16) for t, window in masks]

    def set(self, Cells cells not None, list tokens not None, list positions not None, list sequences not None,
            list rows not None):
        """Set all inputs for n tokens that `cells` holds in `rows`; False if `Tensor.stage` refuses one of them.

        ValueError for lists of other lengths, and for a sequence that `cells` does not have.
        """
        cdef Tensor t
        cdef int64_t columns, window, i, k, row, seq, width
        cdef bytes data
        cdef bint half
        for given in (tokens, positions, sequences, rows):
            if len(given) != self.n:
                raise ValueError(f"{len(given)} values for {self.n} tokens")
        for seq in sequences:
            cells.check(seq)
        if not self.tokens.stage(packed(tokens)):
            return False
        if self.positions is not None and not self.positions.stage(packed(positions)):
            return False
        if self.rows is not None:
            data = PyBytes_FromStringAndSize(NULL, self.n * sizeof(int64_t))
            for i in range(self.n):
                (<int64_t *><char *>data)[i] = rows[i]
            if not self.rows.stage(data):
                return False
        for t, columns in self.elements:
            data = PyBytes_FromStringAndSize(NULL, t.layout.nbytes)
            width = t.layout.ne[0] // self.n
            for i in range(self.n):
                row = rows[i]
                for k in range(width):
                    (<int64_t *><char *>data)[i * width + k] = k * columns + row
            if not t.stage(data):
                return False
        for t, window, half in self.masks:
            data = PyBytes_FromStringAndSize(NULL, t.layout.nbytes)
            if t.layout.ne[0] > cells.n_rows:
                raise ValueError(f"{t!r}: a mask of {t.layout.ne[0]} rows for {cells.n_rows}")
            for i in range(self.n):
                cells.fill_mask(<char *>data + i * (t.layout.nbytes // self.n), positions[i], sequences[i],
                                t.layout.ne[0], window, half)
            if not t.stage(data):
                return False
        return self.state_row is None or self.state_row.stage(packed(sequences[:1]))


cdef bytes packed(list values):
    """Ints as the bytes of i32."""
    cdef bytes data = PyBytes_FromStringAndSize(NULL, len(values) * sizeof(int32_t))
    cdef int64_t i
    for i in range(len(values)):
        (<int32_t *><char *>data)[i] = values[i]
    return data


cdef int check_rows(Tensor t, kind, int64_t n) except -1:
    """ValueError unless a tensor is n contiguous rows of elements of type `kind`."""
    if t.type != kind or t.n_elements != n * t.layout.ne[0] or not t.is_contiguous:
        raise ValueError(f"{t!r} is not {n} rows of {kind}")
    return 0
