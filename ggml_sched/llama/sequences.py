"""The sequences in a cache: their tokens, and the operations that change them.

Owns a runner, the tokens of each sequence, and a lock.  Invariants: `tokens[i]` are those whose keys and values (or
whose state) the cache holds for sequence i, at positions 0, 1, ...; a call that raises changes nothing; one call at a
time.  Corresponds to llama.cpp's llama_decode and its memory functions (llama_memory_seq_rm, _cp, _add).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from operator import index

import numpy as np

from ggml_sched.llama import state
from ggml_sched.llama.arguments import count
from ggml_sched.llama.batch import Batch, checked_tokens, is_one_token
from ggml_sched.llama.errors import ContextFull, ModelBusy, ModelClosed, SequenceError
from ggml_sched.llama.runner import Runner
from ggml_sched.threads._locks import OneAtATime

__all__ = ["SequenceStore"]


class SequenceStore:
    """Sequences 0 .. n_seq - 1, and a hidden one for embeddings."""

    def __init__(self, runner: Runner, n_batch: int, n_seq: int) -> None:
        self.runner, self.n_batch, self.n_seq = runner, n_batch, n_seq
        self.n_vocab, self.n_ctx = runner.hparams.n_vocab, runner.cache.n_ctx
        self.tokens: list[list[int]] = [[] for _ in range(n_seq + 1)]
        self.lock = OneAtATime(partial(ModelBusy, "the model is in use; one thread at a time"),
                               partial(ModelClosed, "the model is closed"))
        self._pending_rollback: Callable[[], None] | None = None
        """The function that undoes the present change; not None between calls only if that function has failed."""

    # -- evaluating ----------------------------------------------------------------------

    def eval(self, i: int, tokens, last_only: bool) -> np.ndarray:
        """Continue sequence i with tokens: their logits, f32 [len(tokens), n_vocab], or [1, n_vocab] of the last."""
        with self.lock:
            self._roll_back()
            if is_one_token(tokens, self.n_vocab):
                return self._next(i, tokens[0])
            ids = checked_tokens(tokens, self.n_vocab)
            n, past = len(ids), len(self.tokens[i])
            self._check_room(n, past)
            first = max(n - 1, 0) if last_only else 0
            out = np.empty((n - first, self.n_vocab), np.float32)
            if n:
                places = np.arange(past, past + n, dtype=np.int32)
                self._continue(Batch(ids, places, np.full(n, i, np.int32), np.arange(first, n, dtype=np.int32)), out)
            return out

    def eval_batch(self, parts: Batch | Iterable[tuple[int, object]]) -> np.ndarray:
        """Continue several sequences: logits of the batch's outputs, or of the last token of each pair."""
        with self.lock:
            self._roll_back()
            batch = self._checked_batch(parts) if isinstance(parts, Batch) else self._joined(parts)
            self._check_room(len(batch.tokens), self.runner.cells.n_used)
            out = np.empty((len(batch.outputs), self.n_vocab), np.float32)
            self._continue(batch, out)
            return out

    def embed(self, tokens, everywhere: bool) -> np.ndarray:
        """The last layer's normed output, f32 [m, n_embd], of all tokens (m of them) or of the last (m = 1).

        The tokens are evaluated in the hidden sequence, which is cleared afterwards.
        """
        with self.lock:
            self._roll_back()
            ids, hidden = checked_tokens(tokens, self.n_vocab), self.n_seq
            n = len(ids)
            if not n:
                raise ValueError("an embedding needs one token or more")
            self._check_room(n, 0)
            outputs = np.arange(0 if everywhere else n - 1, n, dtype=np.int32)
            out = np.empty((len(outputs), self.runner.hparams.n_embd), np.float32)
            batch = Batch(ids, np.arange(n, dtype=np.int32), np.full(n, hidden, np.int32), outputs)
            self.runner.clear_state(hidden)
            self._continue(batch, out, embeddings=True)
            return out

    def _next(self, i: int, token: int) -> np.ndarray:
        """`eval` of one token, which a generation calls most: as `_continue`, but faster, without a Batch."""
        held, runner = self.tokens[i], self.runner
        n = len(held)
        if not runner.cells.n_free:
            self._check_room(1, n)
        out = np.empty((1, self.n_vocab), np.float32)
        if runner.dirty or runner.is_recurrent:
            runner.begin((i,))

        def evaluate() -> None:
            runner.compute_token(token, n, i, out)
            held.append(token)

        self._transaction(evaluate, partial(self._undo, {i: n}))
        return out

    def _undo(self, before: dict[int, int]) -> None:
        """Truncate sequences to their lengths before an evaluation; `before` is {sequence: number of tokens}."""
        for i, n in before.items():
            del self.tokens[i][n:]
        self.runner.undo(before)

    def _continue(self, batch: Batch, out: np.ndarray, embeddings: bool = False) -> None:
        """Evaluate a checked batch, n_batch tokens at a time, and append its tokens to the sequences.

        `embeddings`: the sequences stay as they were, only the outputs are wanted.
        """
        runner, ids, sequences = self.runner, batch.tokens.tolist(), batch.sequences.tolist()
        before = {i: len(self.tokens[i]) for i in set(sequences)}
        undo = partial(self._undo, before)

        def evaluate() -> None:
            for start, stop in runner.pieces(batch.sequences, self.n_batch):
                first, last = np.searchsorted(batch.outputs, (start, stop))
                piece = batch if stop - start == len(ids) else Batch(
                    batch.tokens[start:stop], batch.positions[start:stop], batch.sequences[start:stop],
                    batch.outputs[first:last] - np.int32(start))
                runner.compute(piece, out[first:last], embeddings)
            if embeddings:
                undo()
                return
            for token, i in zip(ids, sequences, strict=True):
                self.tokens[i].append(token)

        runner.begin(before)
        self._transaction(evaluate, undo)

    # -- rollback after errors and signals ----------------------------------------------------

    def _transaction(self, steps: Callable[[], None], rollback: Callable[[], None]) -> None:
        """Call `steps`.  If an exception or signal ends them half way, `rollback` restores a consistent state.

        It either undoes the steps or completes them, and may be called again after it has failed.
        """
        self._pending_rollback = rollback
        try:
            steps()
            self._pending_rollback = None
        except BaseException:
            with suppress(Exception):       # the first error says more; the next call tries again
                self._roll_back()
            raise

    def _roll_back(self) -> None:
        """Call the pending rollback, if there is one: of a change that has just failed, or of one that failed in an
        earlier call together with its rollback."""
        if self._pending_rollback is not None:
            self._pending_rollback()
            self._pending_rollback = None

    # -- checks of arguments ------------------------------------------------------------------

    def checked_index(self, i: int) -> int:
        try:
            i = index(i)
        except TypeError:
            raise TypeError(f"the number of a sequence is an int, not {type(i).__name__}") from None
        if not 0 <= i < self.n_seq:
            raise ValueError(f"sequence {i} is not in 0 .. {self.n_seq - 1}; load(..., n_seq=...) makes more")
        return i

    def _joined(self, parts: Iterable[tuple[int, object]]) -> Batch:
        """Pairs of sequence and tokens as a batch; the last token of each pair is an output."""
        tokens, positions, sequences, outputs, n = [], [], [], [], 0
        past: dict[int, int] = {}
        try:
            pairs = [(i, given) for i, given in parts]
        except (TypeError, ValueError):
            raise TypeError("a batch is a Batch, or pairs of a sequence's number and its tokens") from None
        for i, given in pairs:
            i, ids = self.checked_index(i), checked_tokens(given, self.n_vocab)
            if not len(ids):
                raise ValueError(f"no tokens for sequence {i}")
            start = past.get(i, len(self.tokens[i]))
            past[i] = start + len(ids)
            n += len(ids)
            tokens.append(ids)
            positions.append(np.arange(start, past[i], dtype=np.int32))
            sequences.append(np.full(len(ids), i, np.int32))
            outputs.append(n - 1)
        if not n:
            raise ValueError("a batch needs one pair of sequence and tokens, or more")
        return Batch(np.concatenate(tokens), np.concatenate(positions), np.concatenate(sequences),
                     np.array(outputs, np.int32))

    def _checked_batch(self, batch: Batch) -> Batch:
        tokens = checked_tokens(batch.tokens, self.n_vocab)
        n = len(tokens)
        checked = [tokens]
        for name in ("positions", "sequences", "outputs"):
            values = np.asarray(getattr(batch, name))
            if values.ndim != 1 or values.size and values.dtype.kind not in "iu":
                raise TypeError(f"{name} of a batch are a sequence of ints, not {values.dtype} {list(values.shape)}")
            if len(values) != n and name != "outputs":
                raise ValueError(f"{len(values)} {name} for {n} tokens")
            checked.append(values.astype(np.int64))
        _, positions, sequences, outputs = checked
        if n and not 0 <= sequences.min() <= sequences.max() < self.n_seq:
            raise ValueError(f"a sequence of the batch is not in 0 .. {self.n_seq - 1}")
        if len(outputs) and (outputs[0] < 0 or outputs[-1] >= n or (np.diff(outputs) <= 0).any()):
            raise ValueError(f"outputs of a batch are ascending, in 0 .. {n - 1}")
        for i in np.unique(sequences):
            past = len(self.tokens[i])
            mine = positions[sequences == i]
            if (mine != np.arange(past, past + len(mine))).any():
                raise SequenceError(f"positions of the batch do not continue sequence {i}, which has {past} tokens")
        return Batch(*(values.astype(np.int32) for values in checked))

    def _check_room(self, n: int, past: int) -> None:
        cells = self.runner.cells
        if n > cells.n_free:
            rest = "" if cells.n_used == past else f", of which {cells.n_used} rows are in use"
            raise ContextFull(f"{n} tokens after {past} do not fit a context of {self.n_ctx}{rest}",
                              past, n, self.n_ctx)

    # -- changing sequences --------------------------------------------------------------------

    def truncate(self, i: int, n: int) -> None:
        with self.lock:
            self._roll_back()
            past, n = len(self.tokens[i]), count("n", n)
            if n > past:
                raise ValueError(f"sequence {i} has {past} tokens: it cannot keep {n}")
            if self.runner.is_recurrent and n not in (0, past):
                raise SequenceError(f"the state of a recurrent model cannot be cut to {n} of {past} tokens: save it "
                                    "there, or evaluate them again")
            self._cut(i, n)

    def keep_common(self, i: int, ids: list[int]) -> int:
        """Forget the tokens after the longest common beginning with `ids[:-1]`; returns the number of tokens kept.

        The last id is left out, because evaluating it gives the logits of the next token.
        """
        with self.lock:
            self._roll_back()
            held, n, cells = self.tokens[i], 0, self.runner.cells
            for ours, theirs in zip(held, ids[:-1], strict=False):
                if ours != theirs:
                    break
                n += 1
            if self.runner.is_recurrent and n < len(held):
                n = 0
            going = cells.rows_of(i, n)
            if len(ids) - n > cells.n_free + int(np.count_nonzero(~cells.shared(going))):
                raise ContextFull(f"{len(ids) - n} tokens after {n} do not fit a context of {self.n_ctx}",
                                  n, len(ids) - n, self.n_ctx)
            if n < len(held):
                self._cut(i, n)
            return n

    def _cut(self, i: int, n: int) -> None:

        def cut() -> None:
            del self.tokens[i][n:]
            self.runner.cells.remove(i, n)
            if n == 0:
                self.runner.clear_state(i)

        self._transaction(cut, cut)

    def copy(self, i: int, target: int) -> None:
        with self.lock:
            self._roll_back()
            if target == i:
                return
            runner, cells, held = self.runner, self.runner.cells, self.tokens[target]
            snapshot, before = cells.snapshot(), list(held)

            def undo() -> None:
                held[:] = before
                cells.rollback(snapshot)
                runner.put_back()

            def share() -> None:
                runner.copy_state(i, target)
                cells.remove(target)
                cells.copy(i, target)
                held[:] = self.tokens[i]

            runner.begin((target,))
            self._transaction(share, undo)

    def shift(self, i: int, n_keep: int, n_discard: int) -> None:
        with self.lock:
            self._roll_back()
            past, cells = len(self.tokens[i]), self.runner.cells
            n_keep, n_discard = count("n_keep", n_keep), count("n_discard", n_discard)
            if n_keep + n_discard > past:
                raise ValueError(f"sequence {i} has {past} tokens: it cannot keep {n_keep} and then forget {n_discard}")
            if self.runner.is_recurrent:
                raise SequenceError("the state of a recurrent model has no tokens that could be forgotten")
            held, snapshot, rows = self.tokens[i], cells.snapshot(), cells.rows_of(i, n_keep + n_discard)
            before, keys = list(held), self.runner.cache.read_rows(rows)

            def undo() -> None:
                held[:] = before
                cells.rollback(snapshot)
                self.runner.cache.write_rows(rows, keys)

            def move() -> None:
                cells.remove(i, n_keep, n_keep + n_discard)
                self.runner.turn(cells.shift(i, n_keep + n_discard, None, -n_discard))
                del held[n_keep : n_keep + n_discard]

            self._transaction(move, undo)

    def save(self, i: int, target) -> None:
        with self.lock:
            self._roll_back()
            state.save(target, self.runner, i, self.tokens[i])

    def restore(self, i: int, source) -> None:
        with self.lock:
            self._roll_back()
            runner, cells, held = self.runner, self.runner.cells, self.tokens[i]
            ids, rows, states = state.read(source, runner)
            runner.begin((i,))
            snapshot, before = cells.snapshot(), list(held)
            written: list[tuple[np.ndarray, tuple[bytes, bytes]]] = []

            def undo() -> None:
                held[:] = before
                cells.rollback(snapshot)
                for places, data in written:
                    runner.write(i, places, *data)

            def take() -> None:
                cells.remove(i)
                places = cells.place(np.arange(len(ids), dtype=np.int32), np.full(len(ids), i, np.int32))
                written.append((places, runner.read(i, places)))
                runner.write(i, places, rows, states)
                held[:] = ids

            self._transaction(take, undo)

    def reset(self) -> None:
        """Forget all sequences."""
        with self.lock:

            def forget() -> None:
                for tokens in self.tokens:
                    tokens.clear()
                self.runner.clear()

            self._transaction(forget, forget)
