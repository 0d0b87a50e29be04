"""The sequences in a cache: their tokens, and the operations that change them.

Owns a runner, the tokens of each sequence, and a lock.  Invariants: `tokens[i]` are those whose keys and values (or
whose state) the cache holds for sequence i, at positions 0, 1, ...; a call that raises changes nothing; one call at a
time.  Corresponds to llama.cpp's llama_decode and its memory functions (llama_memory_seq_rm, _cp, _add).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np

from ggml_sched.llama import state
from ggml_sched.llama.arguments import count
from ggml_sched.llama.batch import Batch, checked_tokens, is_one_token
from ggml_sched.llama.errors import ContextFull, ModelBusy, ModelClosed, SequenceError
from ggml_sched.llama.runner import Runner
from ggml_sched.threads.locks import OneAtATime

if TYPE_CHECKING:
    from ggml_sched.llama.generation import ChatOptions, GenerateOptions, Generation
    from ggml_sched.llama.model import Ids, Model
    from ggml_sched.llama.state import File

__all__ = ["Sequence", "SequenceStore", "evaluate_again"]


class SequenceStore:
    """The state of sequences 0 .. n_seq - 1, and of a hidden one for embeddings."""

    def __init__(self, runner: Runner, n_batch: int, n_seq: int) -> None:
        self.runner = runner
        self.n_batch = n_batch
        self.n_seq = n_seq
        self.n_vocab: int = runner.hparams.n_vocab
        self.n_ctx: int = runner.cache.n_ctx
        self.tokens: list[list[int]] = [[] for _ in range(n_seq + 1)]
        self.versions: list[int] = [0] * (n_seq + 1)
        """How often each sequence has changed, so that a generation notices changes that are not its own."""
        self.lock: OneAtATime = OneAtATime(partial(ModelBusy, "the model is in use; one thread at a time"),
                                           partial(ModelClosed, "the model is closed"))
        self._pending_rollback: Callable[[], None] | None = None
        """The function that undoes the change in progress; None between calls, unless that function has failed."""

    # -- evaluating ----------------------------------------------------------------------

    def eval_batch(self, parts: Batch | Iterable[tuple[int, object]]) -> np.ndarray:
        """Continue several sequences, by a Batch or pairs (sequence, tokens); returns the logits of the batch's
        outputs, or of the last token of each pair."""
        with self.lock:
            self.roll_back()
            each = self._each_of(parts)
            if each is not None:
                return self.continue_by_each(each, self.runner.cells.n_used)
            batch = self._checked_batch(parts) if isinstance(parts, Batch) else self._joined(parts)
            self.check_room(len(batch.tokens), self.runner.cells.n_used)
            out = np.empty((len(batch.outputs), self.n_vocab), np.float32)
            self.continue_by(batch, out)
            return out

    def embed(self, tokens: Ids, everywhere: bool) -> np.ndarray:
        """The last layer's normed output, f32 [m, n_embd], of all tokens (m of them) or of the last (m = 1).

        The tokens are evaluated in the hidden sequence, which is cleared afterwards.
        """
        with self.lock:
            self.roll_back()
            ids, hidden = checked_tokens(tokens, self.n_vocab), self.n_seq
            n = len(ids)
            if not n:
                raise ValueError("an embedding needs one token or more")
            self.check_room(n, 0)
            outputs = np.arange(0 if everywhere else n - 1, n, dtype=np.int32)
            out = np.empty((len(outputs), self.runner.hparams.n_embd), np.float32)
            batch = Batch(ids, np.arange(n, dtype=np.int32), np.full(n, hidden, np.int32), outputs)
            self.runner.clear_state(hidden)
            self.continue_by(batch, out, embeddings=True)
            return out

    def continue_by_each(self, each: Mapping[int, int], past: int) -> np.ndarray:
        """Evaluate one token in each of n sequences, {sequence: token}, as every step of a generation does; returns
        their logits, f32 [n, n_vocab].  `past`: the tokens that an error says were before.

        It does what `continue_by` does, faster, because it makes no Batch.
        """
        runner, n = self.runner, len(each)
        if n > runner.cells.n_free:
            self.check_room(n, past)
        before = {i: len(self.tokens[i]) for i in each}
        out = np.empty((n, self.n_vocab), np.float32)
        if runner.moves:
            runner.move_weights()
        if runner.dirty or runner.is_recurrent:
            runner.begin(before)

        def evaluate() -> None:
            runner.compute_each([*each.values()], [*before.values()], [*each], out)
            for i, token in each.items():
                self.tokens[i].append(token)
                self.versions[i] += 1

        self.transaction(evaluate, partial(self._undo, before, {i: self.versions[i] for i in each}))
        return out

    def _undo(self, before: dict[int, int], versions: dict[int, int]) -> None:
        """Truncate sequences to their lengths before a failed evaluation, {sequence: number of tokens}, and restore
        their versions, {sequence: version}."""
        for i, n in before.items():
            del self.tokens[i][n:]
            self.versions[i] = versions[i]
        self.runner.undo(before)

    def continue_by(self, batch: Batch, out: np.ndarray, embeddings: bool = False) -> None:
        """Evaluate a checked batch, n_batch tokens at a time, and append its tokens to the sequences.

        `embeddings`: the sequences stay as they were, because only the outputs are needed.
        """
        runner, ids, sequences = self.runner, batch.tokens.tolist(), batch.sequences.tolist()
        before = {i: len(self.tokens[i]) for i in set(sequences)}
        undo = partial(self._undo, before, {i: self.versions[i] for i in before})

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
            for i in before:
                self.versions[i] += 1

        if runner.moves:
            runner.move_weights()
        runner.begin(before)
        self.transaction(evaluate, undo)

    # -- rollback after errors and signals ----------------------------------------------------

    def transaction(self, steps: Callable[[], None], rollback: Callable[[], None]) -> None:
        """Call `steps`.  If an exception or signal ends them half way, `rollback` restores a consistent state.

        `rollback` either undoes the steps or completes them.  If it fails itself, the next call of a method retries it.
        """
        self._pending_rollback = rollback
        try:
            steps()
            self._pending_rollback = None
        except BaseException:
            with suppress(Exception):       # the error of `steps` says more than one of the rollback
                self.roll_back()
            raise

    def roll_back(self) -> None:
        """Call the pending rollback, if there is one: of the change that has just failed, or of a change in an earlier
        call whose rollback failed, too."""
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

    def _each_of(self, parts: object) -> dict[int, int] | None:
        """{sequence: token} of a list of pairs, each of another sequence and a list of one valid token, that one
        compute evaluates; None for other parts, which may be wrong."""
        if type(parts) is not list or not 0 < len(parts) <= (1 if self.runner.is_recurrent else self.n_batch):
            return None
        each: dict[int, int] = {}
        for part in parts:
            if type(part) is not tuple or len(part) != 2:
                return None
            i, tokens = part
            if type(i) is not int or not 0 <= i < self.n_seq or i in each or not is_one_token(tokens, self.n_vocab):
                return None
            each[i] = tokens[0]
        return each

    def _joined(self, parts: Iterable[tuple[int, object]]) -> Batch:
        """Make a batch of pairs (sequence, tokens); the last token of each pair is an output."""
        tokens, positions, sequences, outputs, n = [], [], [], [], 0
        past: dict[int, int] = {}
        wrong = "a batch is a Batch, or pairs of a sequence's number and its tokens"
        if not isinstance(parts, Iterable):
            raise TypeError(wrong)
        for part in parts:
            try:
                i, given = part
            except (TypeError, ValueError):
                raise TypeError(wrong) from None
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

    def check_room(self, n: int, past: int) -> None:
        cells = self.runner.cells
        if n > cells.n_free:
            rest = "" if cells.n_used == past else f", of which {cells.n_used} rows are in use"
            raise ContextFull(f"{n} tokens after {past} do not fit a context of {self.n_ctx}{rest}",
                              past, n, self.n_ctx)

    # -- changing sequences --------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all sequences."""
        with self.lock:

            def forget() -> None:
                for i, tokens in enumerate(self.tokens):
                    tokens.clear()
                    self.versions[i] += 1
                self.runner.clear()

            self.transaction(forget, forget)


class Sequence:
    """Sequence `index` of a model; made by `Model.sequence(index)`, always the same object for an index."""

    __slots__ = ("_store", "index", "model")

    def __init__(self, model: Model, index: int) -> None:
        self.model: Model = model
        self.index: int = index
        self._store: SequenceStore = model._store

    @property
    def _tokens(self) -> list[int]:
        return self._store.tokens[self.index]

    @property
    def version(self) -> int:
        """How often the sequence has changed; a generation compares it to notice changes that are not its own."""
        return self._store.versions[self.index]

    @property
    def n_past(self) -> int:
        """The number of the sequence's tokens, all of which are in the cache."""
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """A copy of the list of the sequence's tokens."""
        return list(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def __repr__(self) -> str:
        return f"<Sequence {self.index}: {self.n_past} tokens>"

    def eval(self, tokens: Ids, last_only: bool = False) -> np.ndarray:
        """As `Model.eval`, for this sequence."""
        store, i = self._store, self.index
        with store.lock:
            store.roll_back()
            if is_one_token(tokens, store.n_vocab):
                return store.continue_by_each({i: tokens[0]}, len(store.tokens[i]))
            ids = checked_tokens(tokens, store.n_vocab)
            n, past = len(ids), len(self._tokens)
            store.check_room(n, past)
            first = max(n - 1, 0) if last_only else 0
            out = np.empty((n - first, store.n_vocab), np.float32)
            if n:
                places = np.arange(past, past + n, dtype=np.int32)
                store.continue_by(
                    Batch(ids, places, np.full(n, i, np.int32), np.arange(first, n, dtype=np.int32)), out)
            return out

    @overload
    def generate(self, prompt: str, n: int | None = None, sampler: Callable[[np.ndarray], int] | None = None,
                 **options: Unpack[GenerateOptions]) -> Generation[str]: ...
    @overload
    def generate(self, prompt: Ids, n: int | None = None, sampler: Callable[[np.ndarray], int] | None = None,
                 **options: Unpack[GenerateOptions]) -> Generation[int]: ...
    def generate(self, prompt: str | Ids, n: int | None = None, sampler: Callable[[np.ndarray], int] | None = None,
                 **options: Unpack[GenerateOptions]) -> Generation[Any]:
        """As `Model.generate`, for this sequence."""
        return self.model.generate(prompt, n, sampler, sequence=self, **options)

    def chat(self, messages: Items[Mapping[str, Any]], n: int | None = None,
             sampler: Callable[[np.ndarray], int] | None = None, **options: Unpack[ChatOptions]) -> Generation[str]:
        """As `Model.chat`, for this sequence."""
        return self.model.chat(messages, n, sampler, sequence=self, **options)

    def keep_common(self, ids: list[int]) -> int:
        """Keep the longest common beginning of the sequence and `ids`, forget the rest; returns the number kept.

        The last id is never kept, because evaluating it gives the logits for the next token.  ContextFull if the ids
        after the kept ones do not fit into the cache; then nothing changes.
        """
        store, held, n, cells = self._store, self._tokens, 0, self._store.runner.cells
        with store.lock:
            store.roll_back()
            for ours, theirs in zip(held, ids[:-1], strict=False):
                if ours != theirs:
                    break
                n += 1
            if store.runner.is_recurrent and n < len(held):
                n = 0
            going = cells.rows_of(self.index, n)
            if len(ids) - n > cells.n_free + int(np.count_nonzero(~cells.shared(going))):
                raise ContextFull(f"{len(ids) - n} tokens after {n} do not fit a context of {store.n_ctx}",
                                  n, len(ids) - n, store.n_ctx)
            if n < len(held):
                self._cut(n)
            return n

    def truncate(self, n: int) -> None:
        """Keep the first n tokens; SequenceError for a recurrent model, whose state can only be kept whole or cleared.
        """
        with self._store.lock:
            self._store.roll_back()
            past, n = len(self._tokens), count("n", n)
            if n > past:
                raise ValueError(f"sequence {self.index} has {past} tokens: it cannot keep {n}")
            if self._store.runner.is_recurrent and n not in (0, past):
                raise SequenceError(f"the state of a recurrent model cannot be cut to {n} of {past} tokens: save it "
                                    "there, or evaluate them again")
            self._cut(n)

    def _cut(self, n: int) -> None:
        runner = self._store.runner

        def cut() -> None:
            del self._tokens[n:]
            self._store.versions[self.index] += 1
            runner.cells.remove(self.index, n)
            if n == 0:
                runner.clear_state(self.index)

        self._store.transaction(cut, cut)

    def shift(self, n_keep: int, n_discard: int) -> None:
        """Forget n_discard tokens after the first n_keep; positions of later tokens shrink (llama.cpp's context shift).

        The keys and values of later tokens in deeper layers were computed with attention to the forgotten tokens, so
        logits afterwards are not those of an evaluation of the remaining tokens: in small random models they differ by
        up to a third of the largest.  SequenceError where the model has no rope, or another sequence shares these
        tokens.
        """
        i, held, runner, cells = self.index, self._tokens, self._store.runner, self._store.runner.cells
        with self._store.lock:
            self._store.roll_back()
            n_keep, n_discard = count("n_keep", n_keep), count("n_discard", n_discard)
            if n_keep + n_discard > len(held):
                raise ValueError(f"sequence {i} has {len(held)} tokens: it cannot keep {n_keep} and then forget "
                                 f"{n_discard}")
            if runner.is_recurrent:
                raise SequenceError("the state of a recurrent model has no tokens that could be forgotten")
            before, snapshot, rows = list(held), cells.snapshot(), cells.rows_of(i, n_keep + n_discard)
            rotation = runner.rotation(rows)

            def undo() -> None:
                held[:] = before
                cells.rollback(snapshot)
                rotation.undo()

            def move() -> None:
                cells.remove(i, n_keep, n_keep + n_discard)
                rotation.apply(cells.shift(i, n_keep + n_discard, None, -n_discard))
                del held[n_keep : n_keep + n_discard]
                self._store.versions[i] += 1

            self._store.transaction(move, undo)

    def copy_to(self, other: int | Sequence) -> None:
        """Replace another sequence by a copy of this one; both share the rows of the cache."""
        if isinstance(other, Sequence) and other.model is not self.model:
            raise ValueError("a sequence is copied within its model: save and restore it elsewhere")
        i, target = self.index, other.index if isinstance(other, Sequence) else self._store.checked_index(other)
        runner, cells, held = self._store.runner, self._store.runner.cells, self._store.tokens[target]
        with self._store.lock:
            self._store.roll_back()
            if target == i:
                return
            snapshot, before = cells.snapshot(), list(held)

            def undo() -> None:
                held[:] = before
                cells.rollback(snapshot)
                runner.put_back()

            def share() -> None:
                runner.copy_state(i, target)
                cells.remove(target)
                cells.copy(i, target)
                held[:] = self._tokens
                self._store.versions[target] += 1

            runner.begin((target,))
            self._store.transaction(share, undo)

    def reset(self) -> None:
        """Forget all tokens."""
        self.truncate(0)

    def save(self, target: File) -> None:
        """Write the state to a path or a binary file."""
        with self._store.lock:
            self._store.roll_back()
            state.save(target, self._store.runner, self.index, self._tokens)

    def restore(self, source: File) -> None:
        """Replace the sequence by a state that `save` wrote.

        StateFormatError for a damaged file, or one of another cache type or of a model of other sizes; ContextFull
        where it does not fit.  A state of a model of the same sizes with other weights is taken: its results mean
        nothing.
        """
        i, held, runner, cells = self.index, self._tokens, self._store.runner, self._store.runner.cells
        with self._store.lock:
            self._store.roll_back()
            with state.reading(source, runner) as saved:
                runner.begin((i,))
                snapshot, before, own = cells.snapshot(), list(held), cells.rows_of(i)
                overwritten: list[tuple[np.ndarray, list[np.ndarray]]] = []
                new: list[np.ndarray] = []

                def undo() -> None:
                    held[:] = before
                    cells.rollback(snapshot)
                    for rows, data in overwritten:
                        runner.cache.write_rows(rows, data)
                    runner.dirty.extend(new)
                    runner.put_back()

                def take() -> None:
                    cells.remove(i)
                    n = len(saved.ids)
                    rows = cells.place(np.arange(n, dtype=np.int32), np.full(n, i, np.int32))
                    mine = np.isin(rows, own)
                    overwritten.append((rows[mine], runner.cache.read_rows(rows[mine])))
                    new.append(rows[~mine])
                    runner.cache.write_each(rows, saved.rows)
                    states = [*saved.states]
                    if runner.is_recurrent:
                        runner.cache.write_state(i, states)
                    held[:] = saved.ids
                    self._store.versions[i] += 1

                self._store.transaction(take, undo)


def evaluate_again(sequences: Items[Sequence], tokens: Items[list[int]]) -> None:
    """Evaluate a list of tokens in each of some empty sequences of one model.  A beginning that lists have in common is
    evaluated once, and its rows are shared: so the lists fit where sequences with these tokens have fitted before."""
    given = sorted(((ids, i) for i, ids in enumerate(tokens) if ids), key=lambda pair: pair[0])
    groups = [(given, 0)] if given else []
    while groups:
        # Of a group of ascending lists the first n tokens are equal, and evaluated in the sequence of its first list.
        group, n = groups.pop()
        (first, i), last = group[0], group[-1][0]
        end = n
        while end < len(first) and first[end] == last[end]:
            end += 1
        if end > n:
            sequences[i].eval(first[n:end], last_only=True)
        parts: dict[int | None, list[tuple[list[int], int]]] = {}
        for pair in group:
            parts.setdefault(pair[0][end] if end < len(pair[0]) else None, []).append(pair)
        for part in parts.values():
            ended = len(part[0][0]) == end
            for _, other in part if ended else part[:1]:
                if other != i:
                    sequences[i].copy_to(sequences[other])
            if not ended:
                groups.append((part, end))
