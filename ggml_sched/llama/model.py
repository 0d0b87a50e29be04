"""A model that runs: evaluating tokens, its sequences, text.

Owns a runner and the backends that `load` made, and closes them.  Invariant: what a sequence says it holds is in the
cache, and a call that raises leaves that as it was.  Corresponds to llama.cpp's llama_model and llama_context.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from operator import index

import numpy as np

from ggml_sched.backend import Backend
from ggml_sched.errors import each
from ggml_sched.llama import state
from ggml_sched.llama.batch import Batch, checked_tokens
from ggml_sched.llama.builder import Shape
from ggml_sched.llama.errors import ContextFull, ModelBusy, ModelClosed, SequenceError
from ggml_sched.llama.generation import Generation, Options
from ggml_sched.llama.runner import Runner
from ggml_sched.llama.sequence import Sequence

__all__ = ["Model"]


class Model:
    """A loaded model and the sequences in its cache; made by `load`.

    `hparams`, `n_vocab`, `n_ctx`, `n_batch`, `n_seq`, `n_past` (of sequence 0), `scheduler`, `backends`, `weights`,
    `cache`, `metadata` (the file's).  A context manager.  One thread at a time: another one gets ModelBusy.
    """

    def __init__(self, runner: Runner, backends: tuple[Backend, ...], owned: Items[Backend], n_batch: int, n_seq: int,
                 metadata: Mapping[str, object]) -> None:
        self._runner = runner
        self.hparams, self.weights, self.cache = runner.hparams, runner.weights, runner.cache
        self.scheduler = runner.scheduler
        self.backends, self._owned = backends, list(owned)
        self.n_vocab = runner.hparams.n_vocab
        self.n_ctx, self.n_batch, self.n_seq = runner.cache.n_ctx, n_batch, n_seq
        self.metadata = metadata
        self._sequences = [Sequence(self, i) for i in range(n_seq)]
        self._lock = _Lock()
        self._tokenizer = None
        self._template = None

    # -- facts ----------------------------------------------------------------------

    @property
    def n_past(self) -> int:
        """Tokens of sequence 0 in the cache."""
        return len(self._sequences[0]._ids)

    @property
    def closed(self) -> bool:
        return self._lock.closed

    @property
    def n_free(self) -> int:
        """So many tokens, of any sequence, still fit."""
        return self._runner.cells.n_free

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a text or a turn, as the file names them."""
        if self._tokenizer is not None:
            return frozenset(self._tokenizer.eos_ids)
        named = (self.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
        return frozenset(i for i in named if type(i) is int)

    @property
    def kv_type(self) -> str:
        """The type of the cache's elements."""
        return str(self.cache.kv_type)

    @property
    def flash(self) -> bool:
        """Whether attention is one node, which reads the cache once."""
        return self.cache.flash

    @property
    def tokenizer(self):
        """The file's tokenizer, made when it is first asked for; TokenizerError where that cannot be."""
        if self._tokenizer is None:
            from ggml_sched.llama.text.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.from_metadata(self.metadata)
        return self._tokenizer

    @property
    def chat_template(self):
        """The file's chat template, or chatml's; ChatTemplateError where that cannot be."""
        if self._template is None:
            from ggml_sched.llama.text.chat import ChatTemplate

            self._template = ChatTemplate.from_metadata(self.metadata)
        return self._template

    def __repr__(self) -> str:
        h = self.hparams
        used = self._runner.cells.n_used
        how = "closed" if self.closed else f"{used} of {self.n_ctx} tokens"
        return f"<Model {h.arch}: {h.n_layer} layers of {h.n_embd}, vocabulary of {h.n_vocab}, {how}>"

    # -- evaluating ----------------------------------------------------------------------

    def eval(self, tokens, last_only: bool = False) -> np.ndarray:
        """Continue sequence 0 with `tokens`: float32 logits [len(tokens), n_vocab].

        `last_only`: those of the last token alone, [1, n_vocab]; no others are computed.
        Raises ContextFull when the tokens do not fit, ValueError for an unknown one; after any exception the
        sequence is as it was.
        """
        return self._eval(self._sequences[0], tokens, last_only)

    def eval_batch(self, parts: Batch | Iterable[tuple[int, object]]) -> np.ndarray:
        """Continue several sequences together: float32 logits [n, n_vocab].

        `parts` are pairs of a sequence's number and its tokens, and the logits are those of the last token of each
        pair; or a `Batch`, and they are those of its outputs.  Raises as `eval` does, and SequenceError for a Batch
        whose positions do not continue its sequences.
        """
        with self._lock:
            batch = self._checked_batch(parts) if isinstance(parts, Batch) else self._joined(parts)
            out = np.empty((len(batch.outputs), self.n_vocab), np.float32)
            self._continue(batch, out)
            return out

    def embed(self, text, pooling: str = "mean", normalize: bool = False) -> np.ndarray:
        """The embedding of a text, or of ids: float32 [n_embd].

        `pooling`: "mean" of the last layer's normed output over all tokens, or that of the "last" one.  `normalize`
        scales it to length 1.  No sequence changes, but the context must have room for the tokens: ContextFull.
        """
        if pooling not in ("mean", "last"):
            raise ValueError(f"pooling = {pooling!r}; known: mean, last")
        ids = self._encode(text, 0) if isinstance(text, str) else text
        with self._lock:
            ids = checked_tokens(ids, self.n_vocab)
            if not len(ids):
                raise ValueError("an embedding needs one token or more")
            found = self._embed(ids, pooling == "mean").mean(axis=0, dtype=np.float64)
        if normalize:
            found /= np.sqrt(found @ found) or 1.0
        return found.astype(np.float32)

    # -- text ------------------------------------------------------------------------------

    def generate(self, prompt, n: int | None = None, sampler: Callable[[np.ndarray], int] | None = None, *,
                 sequence: Sequence | None = None, stop: str | Iterable[str] = (), echo: bool = False,
                 shift: bool = False, n_keep: int = 0, ignore_eos: bool = False, parse_special: bool = False,
                 **sampling) -> Generation:
        """Continue sequence 0 (or another) with a text, and stream text; or with ids, and stream ids.

        Ends after `n` tokens or with the context ("length"), before a token that ends texts ("eos"; `ignore_eos` goes
        on), or before one of the strings `stop` ("stop"): `finish_reason` of what is returned says which.  `shift`
        goes on beyond the context, by forgetting half of the tokens after the first `n_keep`.  `echo` gives the
        prompt first.  `parse_special`: names of control tokens in the prompt mean these tokens.
        `sampler` chooses tokens from logits; or `sampling` are arguments for a `Sampler`; without either, the likeliest
        is taken.  The last token is not part of the sequence yet.

        Nothing is evaluated before the first item is asked for.  Raises TypeError and ValueError for wrong arguments,
        ContextFull for a prompt that does not fit; what was generated stays.
        """
        sequence = self._sequences[0] if sequence is None else sequence
        options = Options.checked(n, sampler, sampling, stop, shift, n_keep, ignore_eos)
        if not isinstance(prompt, str):
            return Generation(sequence, checked_tokens(prompt, self.n_vocab).tolist(), options, echo=echo)
        ids = self._encode(prompt, sequence.n_past, parse_special)
        return Generation(sequence, ids, options, self.tokenizer, prompt if echo else "")

    def chat(self, messages, n: int | None = None, sampler: Callable[[np.ndarray], int] | None = None, *,
             sequence: Sequence | None = None, stop: str | Iterable[str] = (), shift: bool = False, n_keep: int = 0,
             **sampling) -> Generation:
        """Stream the reply to a conversation, a list of {"role": ..., "content": ...}.

        The chat template of the file makes a prompt of it.  What the sequence holds of that already is not evaluated
        again; what it holds beyond is forgotten.  Other arguments as `generate` has them.
        """
        sequence = self._sequences[0] if sequence is None else sequence
        options = Options.checked(n, sampler, sampling, stop, shift, n_keep, False)
        ids = self.chat_template.encode(self.tokenizer, messages)
        return Generation(sequence, ids, options, self.tokenizer, whole=True)

    def _encode(self, text: str, n_past: int, parse_special: bool = False) -> list[int]:
        """The ids of a text, with the special ones of a beginning where it is one."""
        return self.tokenizer.encode(text, add_special=n_past == 0, parse_special=parse_special)

    # -- sequences -----------------------------------------------------------------------------

    def sequence(self, i: int) -> Sequence:
        """Sequence i of 0 .. n_seq - 1, to evaluate and change by itself."""
        if not 0 <= index(i) < self.n_seq:
            raise ValueError(f"sequence {i} is not in 0 .. {self.n_seq - 1}; load(..., n_seq=...) makes more")
        return self._sequences[i]

    def truncate(self, n: int) -> None:
        """Keep the first n tokens of sequence 0."""
        self._truncate(self._sequences[0], n)

    def shift(self, n_keep: int, n_discard: int) -> None:
        """Forget n_discard tokens of sequence 0 after its first n_keep; see `Sequence.shift`."""
        self._shift(self._sequences[0], n_keep, n_discard)

    def save(self, target) -> None:
        """Write the state of sequence 0 to a path or a binary file."""
        self._save(self._sequences[0], target)

    def restore(self, source) -> None:
        """Take the state that `save` wrote as sequence 0; see `Sequence.restore`."""
        self._restore(self._sequences[0], source)

    def reset(self) -> None:
        """Forget all sequences."""
        with self._lock:
            self._runner.clear()
            for sequence in self._sequences:
                sequence._ids.clear()

    def batch_graph(self, n_tokens: int, n_kv: int, n_outputs: int | None = None):
        """The graph of n_tokens tokens that attend to n_kv rows; the last few are kept."""
        return self._runner.graph(Shape(n_tokens, n_kv, n_tokens if n_outputs is None else n_outputs))

    # -- what sequences ask for ---------------------------------------------------------------------

    def _eval(self, sequence: Sequence, tokens, last_only: bool) -> np.ndarray:
        with self._lock:
            ids = checked_tokens(tokens, self.n_vocab)
            n, past = len(ids), len(sequence._ids)
            self._check_room(n, past)
            first = max(n - 1, 0) if last_only else 0
            out = np.empty((n - first, self.n_vocab), np.float32)
            if n:
                places = np.arange(past, past + n, dtype=np.int32)
                where = np.full(n, sequence.index, np.int32)
                self._continue(Batch(ids, places, where, np.arange(first, n, dtype=np.int32)), out)
            return out

    def _continue(self, batch: Batch, out: np.ndarray, embeddings: bool = False) -> None:
        """Evaluate a checked batch, n_batch tokens at a time; the sequences hold it then."""
        runner, before = self._runner, {}
        ids, sequences = batch.tokens.tolist(), batch.sequences.tolist()
        runner.begin(sequences)
        try:
            for start, stop in runner.pieces(batch.sequences, self.n_batch):
                first, last = np.searchsorted(batch.outputs, (start, stop))
                piece = batch if stop - start == len(ids) else Batch(
                    batch.tokens[start:stop], batch.positions[start:stop], batch.sequences[start:stop],
                    batch.outputs[first:last] - np.int32(start))
                runner.compute(piece, out[first:last], embeddings)
            for token, i in zip(ids, sequences, strict=True):
                held = self._sequences[i]._ids
                before.setdefault(i, len(held))
                held.append(token)
        except BaseException:
            for i, n in before.items():
                del self._sequences[i]._ids[n:]
            runner.undo()
            raise

    def _embed(self, ids: np.ndarray, everywhere: bool) -> np.ndarray:
        """Outputs [m, n_embd] of all tokens or the last, evaluated as a sequence of their own, which is gone then."""
        n, hidden = len(ids), self.n_seq
        self._check_room(n, 0)
        outputs = np.arange(0 if everywhere else n - 1, n, dtype=np.int32)
        out = np.empty((len(outputs), self.hparams.n_embd), np.float32)
        self._sequences.append(Sequence(self, hidden))
        try:
            batch = Batch(ids, np.arange(n, dtype=np.int32), np.full(n, hidden, np.int32), outputs)
            self._runner.clear_state(hidden)
            self._continue(batch, out, embeddings=True)
            self._runner.cells.remove(hidden)
        finally:
            self._sequences.pop()
        return out

    def _joined(self, parts) -> Batch:
        """Pairs of sequence and tokens as a batch; the last token of each pair is an output."""
        tokens, positions, sequences, outputs, past, n = [], [], [], [], {}, 0
        for i, ids in parts:
            sequence = self.sequence(i)
            ids = checked_tokens(ids, self.n_vocab)
            if not len(ids):
                raise ValueError(f"no tokens for sequence {i}")
            start = past.get(i, sequence.n_past)
            past[i] = start + len(ids)
            n += len(ids)
            tokens.append(ids)
            positions.append(np.arange(start, past[i], dtype=np.int32))
            sequences.append(np.full(len(ids), i, np.int32))
            outputs.append(n - 1)
        if not n:
            raise ValueError("a batch needs one pair of sequence and tokens, or more")
        self._check_room(n, self._runner.cells.n_used)
        return Batch(np.concatenate(tokens), np.concatenate(positions), np.concatenate(sequences),
                     np.array(outputs, np.int32))

    def _checked_batch(self, batch: Batch) -> Batch:
        tokens = checked_tokens(batch.tokens, self.n_vocab)
        n = len(tokens)
        checked = [tokens]
        for name in ("positions", "sequences", "outputs"):
            values = np.asarray(getattr(batch, name))
            if values.ndim != 1 or values.dtype.kind not in "iu":
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
            past = self._sequences[i].n_past
            mine = positions[sequences == i]
            if (mine != np.arange(past, past + len(mine))).any():
                raise SequenceError(f"positions of the batch do not continue sequence {i}, which has {past} tokens")
        self._check_room(n, self._runner.cells.n_used)
        return Batch(*(values.astype(np.int32) for values in checked))

    def _check_room(self, n: int, past: int) -> None:
        cells = self._runner.cells
        if n > cells.n_free:
            rest = "" if cells.n_used == past else f", of which {cells.n_used} rows are in use"
            raise ContextFull(f"{n} tokens after {past} do not fit a context of {self.n_ctx}{rest}",
                              past, n, self.n_ctx)

    def _truncate(self, sequence: Sequence, n: int) -> None:
        with self._lock:
            past = sequence.n_past
            if not 0 <= index(n) <= past:
                raise ValueError(f"sequence {sequence.index} has {past} tokens: it cannot keep {n}")
            if self._runner.is_recurrent and n not in (0, past):
                raise SequenceError(f"the state of a recurrent model cannot be cut to {n} of {past} tokens: save it "
                                    "there, or evaluate them again")
            self._cut(sequence, n)

    def _cut(self, sequence: Sequence, n: int) -> None:
        if n == 0:
            self._runner.clear_state(sequence.index)
        self._runner.cells.remove(sequence.index, n)
        del sequence._ids[n:]

    def _keep_common(self, sequence: Sequence, ids: list[int]) -> int:
        with self._lock:
            held, n = sequence._ids, 0
            for ours, theirs in zip(held, ids[:-1], strict=False):
                if ours != theirs:
                    break
                n += 1
            if self._runner.is_recurrent and n < len(held):
                n = 0
            cells = self._runner.cells
            rows = cells.rows_of(sequence.index, n)
            free = cells.n_free + int(np.count_nonzero(~cells.shared(rows)))
            if len(ids) - n > free:
                raise ContextFull(f"{len(ids) - n} tokens after {n} do not fit a context of {self.n_ctx}",
                                  n, len(ids) - n, self.n_ctx)
            if n < len(held):
                self._cut(sequence, n)
            return n

    def _copy(self, sequence: Sequence, other: int | Sequence) -> None:
        if isinstance(other, Sequence) and other.model is not self:
            raise ValueError("a sequence is copied within its model: save and restore it elsewhere")
        target = other if isinstance(other, Sequence) else self.sequence(other)
        with self._lock:
            if target is sequence:
                return
            self._runner.copy_state(sequence.index, target.index)
            self._runner.cells.remove(target.index)
            self._runner.cells.copy(sequence.index, target.index)
            target._ids[:] = sequence._ids

    def _shift(self, sequence: Sequence, n_keep: int, n_discard: int) -> None:
        with self._lock:
            past = sequence.n_past
            if index(n_keep) < 0 or index(n_discard) < 0 or n_keep + n_discard > past:
                raise ValueError(f"sequence {sequence.index} has {past} tokens: it cannot keep {n_keep} and then "
                                 f"forget {n_discard}")
            if self._runner.is_recurrent:
                raise SequenceError("the state of a recurrent model has no tokens that could be forgotten")
            cells = self._runner.cells
            snapshot = cells.snapshot()
            try:
                cells.remove(sequence.index, n_keep, n_keep + n_discard)
                deltas = cells.shift(sequence.index, n_keep + n_discard, None, -n_discard)
                self._runner.turn(deltas)
                del sequence._ids[n_keep : n_keep + n_discard]
            except BaseException:
                cells.rollback(snapshot)
                raise

    def _save(self, sequence: Sequence, target) -> None:
        with self._lock:
            state.save(target, self._runner, sequence.index, sequence._ids)

    def _restore(self, sequence: Sequence, source) -> None:
        with self._lock:
            sequence._ids[:] = state.restore(source, self._runner, sequence.index)

    # -- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """Give all memory back; idempotent.  Backends that the caller gave stay open."""
        if self.closed:
            return
        with self._lock:
            self._lock.closed = True
            each([self._runner.close, *(backend.close for backend in self._owned)])

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class _Lock:
    """One call at a time: a second thread, or a callback, gets an error instead of corruption."""

    __slots__ = ("closed", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.closed = False

    def __enter__(self) -> None:
        if not self.lock.acquire(False):
            raise ModelBusy("the model is in use; one thread at a time")
        if self.closed:
            self.lock.release()
            raise ModelClosed("the model is closed")

    def __exit__(self, *exc) -> None:
        self.lock.release()
