"""Which row of the KV cache holds which position of which sequences: numbers alone, no tensors.

Owns a position (-1: free) and a set of sequences, as bits, for each row.  Invariant: a row is free exactly when no
sequence is in its set; rows from `rows_in_use` on are free; a method that raises has changed nothing.  Corresponds to
llama.cpp's llama_kv_cells.
"""

from __future__ import annotations

import numpy as np

from ggml_sched.llama.errors import ContextFull, SequenceError

__all__ = ["MAX_SEQUENCES", "Cells"]

MAX_SEQUENCES = 64
"""The bits of a row's set."""
FREE = -1


class Cells:
    """`n_rows` rows for sequences 0 .. n_seq - 1.  Ranges of positions are half open; `stop=None` is the end."""

    __slots__ = ("_bits", "_end", "_from", "n_rows", "n_seq", "n_used", "positions", "sets")

    def __init__(self, n_rows: int, n_seq: int = 1) -> None:
        if not 1 <= n_seq <= MAX_SEQUENCES:
            raise ValueError(f"{n_seq} sequences are not in 1 .. {MAX_SEQUENCES}")
        self.n_rows, self.n_seq = n_rows, n_seq
        self.positions = np.full(n_rows, FREE, np.int32)
        self.sets = np.zeros(n_rows, np.uint64)
        self._bits = np.left_shift(np.uint64(1), np.arange(n_seq, dtype=np.uint64))
        self.clear()

    def clear(self) -> None:
        """Every row free."""
        self.positions.fill(FREE)
        self.sets.fill(0)
        self.n_used = self._end = self._from = 0

    # -- facts ----------------------------------------------------------------------

    @property
    def n_free(self) -> int:
        return self.n_rows - self.n_used

    def rows_in_use(self) -> int:
        """So many rows from the first on include all that are in use."""
        return self._end

    def rows_of(self, seq: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The rows (i64) that hold positions start .. stop - 1 of a sequence, by position."""
        rows = np.flatnonzero(self._held(seq, start, stop))
        return rows[np.argsort(self.positions[rows], kind="stable")]

    def shared(self, rows: np.ndarray) -> np.ndarray:
        """Whether each of these rows is in more than one sequence."""
        sets = self.sets[rows]
        return (sets & (sets - np.uint64(1))) != 0

    def mask(self, positions: np.ndarray, sequences: np.ndarray, n_kv: int, window: int = 0) -> np.ndarray:
        """bool [n, n_kv]: whether a token of this position and sequence sees each row.

        It sees its own sequence up to its own position; with a window, the last `window` positions, itself included.
        """
        held = self.positions[:n_kv]
        if len(positions) == 1:
            position = positions[0]
            seen = (self.sets[:n_kv] & self._bits[sequences[0]]).astype(bool)
            seen &= held <= position
            if window:
                seen &= held > position - window
            return seen[None]
        seen = (self.sets[None, :n_kv] & self._bits[sequences][:, None]).astype(bool)
        seen &= held <= positions[:, None]
        if window:
            seen &= held > positions[:, None] - window
        return seen

    # -- changes ------------------------------------------------------------------------

    def place(self, positions: np.ndarray, sequences: np.ndarray) -> np.ndarray:
        """Rows (i64 [n]) for tokens of these positions and sequences: the first free ones.  ContextFull."""
        n = len(positions)
        if n > self.n_rows - self.n_used:
            raise ContextFull(f"{n} tokens after {self.n_used} do not fit a context of {self.n_rows}",
                              self.n_used, n, self.n_rows)
        start = self._from
        if self._end == start:      # nothing is free before
            rows = np.arange(start, start + n)
        else:
            rows = np.flatnonzero(self.positions[start:] < 0)[:n]
            rows += start
        self.positions[rows] = positions
        self.sets[rows] = self._bits[sequences]
        self.n_used += n
        if n:
            self._from = int(rows[-1]) + 1
            self._end = max(self._end, self._from)
        return rows

    def remove(self, seq: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Take positions start .. stop - 1 from a sequence; the rows that are free now."""
        held = self._held(seq, start, stop)
        self.sets[held] &= ~self._bits[seq]
        freed = np.flatnonzero(held & (self.sets == 0))
        self.positions[freed] = FREE
        self._recount()
        return freed

    def keep(self, seq: int) -> np.ndarray:
        """Only this sequence stays; the rows that are free now."""
        bit = self._bits[self._checked(seq)]
        freed = np.flatnonzero((self.sets != 0) & ((self.sets & bit) == 0))
        self.sets &= bit
        self.positions[freed] = FREE
        self._recount()
        return freed

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Let `dst` hold what `src` holds at positions start .. stop - 1: the same rows."""
        held = self._held(src, start, stop)
        if src != dst:
            theirs = self._held(dst, 0, None)
            if np.isin(self.positions[held & ~theirs], self.positions[theirs]).any():
                raise SequenceError(f"sequence {dst} holds some positions of sequence {src} already")
        self.sets[held] |= self._bits[self._checked(dst)]

    def shift(self, seq: int, start: int, stop: int | None, delta: int) -> np.ndarray:
        """Move positions start .. stop - 1 of a sequence by `delta`; i32 [n_rows], by how much each row moved.

        SequenceError for rows that other sequences hold, too, and for positions that are negative or taken then.
        """
        held = self._held(seq, start, stop)
        rows = np.flatnonzero(held)
        if self.shared(rows).any():
            raise SequenceError(f"positions of sequence {seq} are shared with other sequences: they cannot move")
        moved = self.positions[rows].astype(np.int64) + delta
        if len(moved) and not 0 <= moved.min() <= moved.max() < 1 << 31:
            raise SequenceError(f"positions of sequence {seq} would be {moved.min()} .. {moved.max()}")
        others = self.positions[self._held(seq, 0, None) & ~held]
        if np.isin(moved, others).any():
            raise SequenceError(f"positions of sequence {seq} moved by {delta} would meet others of it")
        deltas = np.zeros(self.n_rows, np.int32)
        deltas[rows] = delta
        self.positions[rows] = moved
        return deltas

    def snapshot(self) -> tuple:
        """All that `rollback` needs to make it as it is now."""
        return self.positions.copy(), self.sets.copy(), self.n_used, self._end, self._from

    def rollback(self, snapshot: tuple) -> None:
        positions, sets, self.n_used, self._end, self._from = snapshot
        self.positions[:], self.sets[:] = positions, sets

    # -- inside --------------------------------------------------------------------------

    def _checked(self, seq: int) -> int:
        if not 0 <= seq < self.n_seq:
            raise ValueError(f"sequence {seq} is not in 0 .. {self.n_seq - 1}")
        return seq

    def _held(self, seq: int, start: int, stop: int | None) -> np.ndarray:
        """bool [n_rows]: rows of a sequence at positions start .. stop - 1."""
        held = (self.sets & self._bits[self._checked(seq)]) != 0
        if start > 0:
            held &= self.positions >= start
        if stop is not None:
            held &= self.positions < stop
        return held

    def _recount(self) -> None:
        """Work out the rest from the sets, also where an interrupt came in the middle of a change."""
        self.positions[self.sets == 0] = FREE
        used = self.positions >= 0
        self.n_used = int(np.count_nonzero(used))
        self._end = self.n_rows - int(used[::-1].argmax()) if self.n_used else 0
        self._from = self._end if self.n_used == self._end else int(used.argmin())
