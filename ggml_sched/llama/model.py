"""A loaded model: evaluates tokens, generates text, and has the sequences in its cache.

Owns a runner and the backends that `load` made, and closes them.  Invariant: the cache holds exactly the tokens that
each sequence lists, and a call that raises leaves both unchanged.  Corresponds to llama.cpp's llama_model and
llama_context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self, TypeAlias, Unpack, overload

import numpy as np

from ggml_sched.backend import Backend
from ggml_sched.errors import each, shown
from ggml_sched.llama.batch import Batch, checked_tokens
from ggml_sched.llama.builder import Shape
from ggml_sched.llama.errors import TokenizerError
from ggml_sched.llama.generation import Generation, Options
from ggml_sched.llama.memory import Memory, memory_of
from ggml_sched.llama.runner import Runner
from ggml_sched.llama.sampling import SamplerOptions
from ggml_sched.llama.sequences import Sequence, SequenceStore, evaluate_again
from ggml_sched.llama.text.chat import ChatTemplate
from ggml_sched.llama.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ggml_sched.backends.store import ExpertSlots, Store
    from ggml_sched.execution.scheduler import Scheduler
    from ggml_sched.experts import Routing
    from ggml_sched.llama.batchgraph import BatchGraph
    from ggml_sched.llama.hparams import Hparams
    from ggml_sched.llama.kvcache import KVCache
    from ggml_sched.llama.residency import Residency
    from ggml_sched.llama.state import File
    from ggml_sched.llama.weights import Weights

__all__ = ["Model"]

Ids: TypeAlias = "Items[int] | np.ndarray[Any, Any]"
"""Token ids."""


class Model:
    """A loaded model and the sequences in its cache; made by `load`.

    `hparams`, `n_vocab`, `n_ctx`, `n_batch`, `n_seq`, `n_past` (of sequence 0), `scheduler`, `backends`, `weights`,
    `cache`, `metadata` (the file's).  A context manager.  One thread at a time: another one gets ModelBusy.
    """

    def __init__(self, runner: Runner, backends: tuple[Backend, ...], owned: Items[Backend], n_batch: int, n_seq: int,
                 metadata: Mapping[str, object], load_again: Callable[[Items[Backend]], Model] | None = None) -> None:
        self._runner = runner
        self.hparams: Hparams = runner.hparams
        self.weights: Weights = runner.weights
        self.cache: KVCache = runner.cache
        self.scheduler: Scheduler = runner.scheduler
        self.backends = backends
        self._owned = list(owned)
        self.n_vocab: int = runner.hparams.n_vocab
        self.n_ctx: int = runner.cache.n_ctx
        self.n_batch = n_batch
        self.n_seq = n_seq
        self.metadata = metadata
        self._load_again = load_again
        self._store = SequenceStore(runner, n_batch, n_seq)
        self._sequences = [Sequence(self, i) for i in range(n_seq)]
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None

    # -- properties -----------------------------------------------------------------

    @property
    def n_past(self) -> int:
        """The number of tokens of sequence 0 in the cache."""
        return self._sequences[0].n_past

    @property
    def closed(self) -> bool:
        return self._store.lock.closed

    @property
    def n_free(self) -> int:
        """The number of tokens, of all sequences together, that still fit."""
        return self._runner.cells.n_free

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids of the tokens that end a text or a turn: the tokenizer's, or, before it is made, those that the file's
        metadata names."""
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
        """Whether flash attention is used: each layer's attention is one node, and no matrix of scores is stored."""
        return self.cache.flash

    def memory(self) -> dict[Backend, Memory]:
        """{backend: bytes of weights, cache, arena and work memory} that the model holds now; zeros once it is closed.

        Buffers grow to their largest size at the first batch of each kind, such as a prompt or a token.  Under a limit
        of memory, the store of the weights that do not stay is one of the backends.
        """
        return {backend: memory_of(backend, self.weights, self.cache, self.scheduler, self.closed)
                for backend in self.backends + (() if self.store is None else (self.store,))}

    @property
    def store(self) -> Store | None:
        """The store of the weights that do not fit under the limit that `load` was given; None where all fit."""
        held = self._runner.held
        return None if held is None else held.store

    @property
    def residency(self) -> Residency | None:
        """Which weights stay in memory and which are fetched, under the limit that `load` was given; None without one.
        """
        held = self._runner.held
        return None if held is None else held.residency

    @property
    def slots(self) -> ExpertSlots | None:
        """The slots of experts under the limit that `load` was given: `slots.traffic` has hits, misses and bytes; None
        where no weight is read expert by expert."""
        return self.weights.slots

    @contextmanager
    def record_experts(self) -> Iterator[Routing]:
        """Record which experts each layer uses for which tokens in a `with` block: `with model.record_experts() as r`.

        `r.save(path)` writes a file that `ggml-sched experts` replays.  Nodes that choose experts are observed, which
        takes time.  An evaluation that fails is recorded, too, up to where it fails.  RuntimeError if the model is
        recorded already, ModelClosed if it is closed.
        """
        from ggml_sched.llama.routing import Recorder

        with self._store.lock:
            if self._runner.recorder is not None:
                raise RuntimeError("the experts of this model are recorded already")
            recorder = self._runner.recorder = Recorder(self.weights.tensors)
        try:
            yield recorder.recording
        finally:
            self._runner.recorder = None

    def explain(self, name: str) -> str:
        """A text about a weight: on which backend the graph of one token has it; under a limit of memory also why the
        weight stays or is fetched, and what one GiB more would change.  KeyError for an unknown name."""
        plan = self.scheduler.plan(self.batch_graph(1, self.cache.padded(self.n_ctx)).graph)
        weight = self.weights[name]
        found = [plan.explain(weight) if weight in plan.graph.tensors else f"{name}: no node reads it"]
        if self.residency is not None and name in self.residency.names:
            found.insert(0, self.residency.explain(name))
        return "\n".join(found)

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer, made at the first access; TokenizerError where the file has no usable vocabulary, or
        one of fewer tokens than the model has logits."""
        if self._tokenizer is None:
            made = Tokenizer.from_metadata(self.metadata)
            if made.n_vocab < self.n_vocab:
                raise TokenizerError(f"tokenizer.ggml.tokens has {made.n_vocab} tokens, the model {self.n_vocab} "
                                     "logits: some tokens that it chooses would have no text")
            self._tokenizer = made
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """The file's chat template, ChatML where it has none; ChatTemplateError for an invalid one."""
        if self._template is None:
            self._template = ChatTemplate.from_metadata(self.metadata)
        return self._template

    def __repr__(self) -> str:
        h = self.hparams
        used = self._runner.cells.n_used
        how = "closed" if self.closed else f"{used} of {self.n_ctx} tokens"
        where = ", ".join(f"{backend.name} ({type(backend).__name__})" for backend in self.backends)
        return f"<Model {h.arch}: {h.n_layer} layers of {h.n_embd}, vocabulary of {h.n_vocab}, on {where}, {how}>"

    def _repr_html_(self) -> str:
        """The model in a notebook: its repr, the bytes on each backend, and the sequences that have tokens."""
        from ggml_sched.planning.tables import memory_text, preformatted  # here: importing them imports plans, too

        lines = [repr(self)]
        for backend, held in self.memory().items():
            parts = (f"{name} {memory_text(nbytes)}" for name, nbytes in
                     (("weights", held.weights), ("cache", held.cache), ("arena", held.arena)))
            lines.append(f"{backend.name}: {', '.join(parts)}")
        lines += [f"sequence {one.index}: {one.n_past} tokens" for one in self._sequences if one.n_past]
        return preformatted("\n".join(lines))

    # -- evaluating ----------------------------------------------------------------------

    def eval(self, tokens: Ids, last_only: bool = False) -> np.ndarray:
        """Continue sequence 0 with `tokens`: float32 logits [len(tokens), n_vocab].

        `last_only`: compute only the logits of the last token, [1, n_vocab].  Raises ContextFull if the tokens do not
        fit, ValueError for an unknown token; after any exception the sequence is as it was.
        """
        return self._sequences[0].eval(tokens, last_only)

    def eval_batch(self, parts: Batch | Iterable[tuple[int, object]]) -> np.ndarray:
        """Continue several sequences together: float32 logits [n, n_vocab].

        `parts`: pairs of a sequence's number and its tokens (returns the logits of the last token of each pair), or a
        `Batch` (returns the logits of its outputs).  Raises as `eval` does, and SequenceError for a Batch
        whose positions do not continue its sequences.
        """
        return self._store.eval_batch(parts)

    def embed(self, text: str | Ids, pooling: str = "mean", normalize: bool = False) -> np.ndarray:
        """The embedding of a text, or of ids: float32 [n_embd].

        `pooling`: "mean" of the last layer's normed output over all tokens, or the output of the "last" token.
        `normalize` scales the embedding to length 1.  No sequence changes; ContextFull if the tokens do not fit.
        """
        if not isinstance(pooling, str) or pooling not in ("mean", "last"):
            raise ValueError(f"pooling = {shown(pooling)}; known: mean, last")
        ids = self._encode(text, 0) if isinstance(text, str) else text
        found: np.ndarray = self._store.embed(ids, pooling == "mean").mean(axis=0, dtype=np.float64)
        if normalize:
            found /= np.sqrt(found @ found) or 1.0
        return found.astype(np.float32)

    # -- text ------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str, n: int | None = None, sampler: Callable[[np.ndarray], int] | None = None, *,
                 sequence: Sequence | int | None = None, stop: str | Iterable[str] | None = None, echo: bool = False,
                 shift: bool = False, n_keep: int = 0, ignore_eos: bool = False, parse_special: bool = False,
                 **sampling: Unpack[SamplerOptions]) -> Generation[str]: ...
    @overload
    def generate(self, prompt: Ids, n: int | None = None, sampler: Callable[[np.ndarray], int] | None = None, *,
                 sequence: Sequence | int | None = None, stop: str | Iterable[str] | None = None, echo: bool = False,
                 shift: bool = False, n_keep: int = 0, ignore_eos: bool = False, parse_special: bool = False,
                 **sampling: Unpack[SamplerOptions]) -> Generation[int]: ...
    def generate(self, prompt: str | Ids, n: int | None = None, sampler: Callable[[np.ndarray], int] | None = None, *,
                 sequence: Sequence | int | None = None, stop: str | Iterable[str] | None = None, echo: bool = False,
                 shift: bool = False, n_keep: int = 0, ignore_eos: bool = False, parse_special: bool = False,
                 **sampling: Unpack[SamplerOptions]) -> Generation[Any]:
        """Continue sequence 0 (or another) with a text, and stream text; or with ids, and stream ids.

        Ends after `n` tokens, or when the context is full or the positions that the model has learned are used up
        ("length"), before a token that ends texts ("eos"; not with `ignore_eos`), or before one of the strings `stop`
        ("stop"); the generation's `finish_reason` is one of these.
        `shift` continues when the context is full, by forgetting half of the tokens after the first `n_keep`.  `echo`
        yields the prompt first.  `parse_special`: names of control tokens in the prompt become these tokens.
        `sampler` chooses a token from logits, or `sampling` are arguments for a `Sampler`; with neither, the likeliest
        token is chosen.  The last generated token is not in the sequence yet: only the next request evaluates it.

        Nothing is evaluated before the first item is requested.  One sequence has one generation at a time.  Raises
        SequenceError when something else has changed the sequence since the last item, TypeError and ValueError for
        wrong arguments, ContextFull for a prompt that does not fit; text generated before an error remains in `text`
        and `tokens`.
        """
        sequence = self._checked_sequence(sequence)
        options = Options.checked(self.generate, n, sampler, sampling, stop, shift, n_keep, ignore_eos)
        if not isinstance(prompt, str):
            return Generation(sequence, checked_tokens(prompt, self.n_vocab).tolist(), options, echo=echo)
        ids = self._encode(prompt, sequence.n_past, parse_special)
        return Generation(sequence, ids, options, self.tokenizer, prompt if echo else "")

    def chat(self, messages: Items[Mapping[str, Any]], n: int | None = None,
             sampler: Callable[[np.ndarray], int] | None = None, *, sequence: Sequence | int | None = None,
             stop: str | Iterable[str] | None = None, shift: bool = False, n_keep: int = 0, parse_special: bool = True,
             **sampling: Unpack[SamplerOptions]) -> Generation[str]:
        """Stream the reply to a conversation, a list of {"role": ..., "content": ...}.

        The file's chat template renders a prompt.  Only the tokens after the longest common beginning of prompt and
        sequence are evaluated; the sequence's tokens after that beginning are forgotten.  `parse_special=False`: names
        of control tokens in messages stay text, for messages from untrusted users.  Other arguments as for `generate`.
        """
        sequence = self._checked_sequence(sequence)
        options = Options.checked(self.chat, n, sampler, sampling, stop, shift, n_keep)
        ids = self.chat_template.encode(self.tokenizer, messages, parse_special=bool(parse_special))
        return Generation(sequence, ids, options, self.tokenizer, whole=True)

    def _checked_sequence(self, sequence: Sequence | int | None) -> Sequence:
        if not isinstance(sequence, Sequence):
            return self.sequence(0 if sequence is None else sequence)
        if sequence.model is not self:
            raise ValueError(f"{sequence!r} is one of another model")
        return sequence

    def _encode(self, text: str, n_past: int, parse_special: bool = False) -> list[int]:
        """The ids of a text that follows n_past tokens; if n_past is 0, with BOS and EOS where the file says so."""
        return self.tokenizer.encode(text, add_special=n_past == 0, parse_special=parse_special)

    # -- sequences -----------------------------------------------------------------------------

    def sequence(self, i: int) -> Sequence:
        """The object for sequence i, of sequences 0 .. n_seq - 1."""
        return self._sequences[self._store.checked_index(i)]

    def truncate(self, n: int) -> None:
        """Keep the first n tokens of sequence 0."""
        self._sequences[0].truncate(n)

    def shift(self, n_keep: int, n_discard: int) -> None:
        """Forget n_discard tokens of sequence 0 after its first n_keep; see `Sequence.shift`."""
        self._sequences[0].shift(n_keep, n_discard)

    def save(self, target: File) -> None:
        """Write the state of sequence 0 to a path or a binary file."""
        self._sequences[0].save(target)

    def restore(self, source: File) -> None:
        """Replace sequence 0 by a state that `save` wrote; see `Sequence.restore`."""
        self._sequences[0].restore(source)

    def reset(self) -> None:
        """Forget all sequences."""
        self._store.reset()

    def batch_graph(self, n_tokens: int, n_kv: int, n_outputs: int | None = None) -> BatchGraph:
        """The graph of n_tokens tokens that attend to n_kv rows of the cache; the last few graphs are kept.

        `n_outputs`: the number of tokens whose logits are computed; None: all.
        """
        with self._store.lock:
            return self._runner.graph(Shape(n_tokens, n_kv, n_tokens if n_outputs is None else n_outputs))

    # -- closing -------------------------------------------------------------------------

    def close(self) -> None:
        """Free all memory; idempotent.  Backends that the caller passed stay open."""
        self._close()

    def _close(self, spared: Items[Backend] = ()) -> None:
        """Free all memory, and close the backends that `load` made; those in `spared` stay open until the next call."""
        going = [backend for backend in self._owned if backend not in spared]
        if self.closed and not going:
            return
        with nullcontext() if self.closed else self._store.lock:
            self._store.lock.closed = True
            self._owned = [backend for backend in self._owned if backend in spared]
            each([self._runner.close, *(backend.close for backend in going)])

    def moved(self, backends: Items[Backend]) -> Model:
        """Load this model again on other backends, evaluate the tokens of its sequences there, and close this one.
        For when a backend is lost: `model.moved([b for b in model.backends if b.lost is None])`.

        The arguments of `load` hold again, but for `place`: layers are spread evenly.  A limit of `memory` by backend
        stays with its backend; of a `Fit` that fetches weights, the memory of its host is such a limit.  If no backend
        with a limit is left, the limit of the only backend over host memory becomes that of the only one among
        `backends`; other limits of backends that are gone do not hold any more.

        Raises ValueError if the model was read from a file object, which cannot be read again, and what `load` and
        `eval` raise; then this model stays as it is.  A model that has lost a backend is closed before the new one is
        loaded, to free memory of the other backends; if loading fails, `moved` may be called again.  So it may where
        closing this model raises: both models are closed then, and this one keeps its tokens.  Backends that `load` has
        made stay open until the new model is there, which then owns those of them that it uses.
        """
        if self._load_again is None:
            raise ValueError("the model was read from a file object, and can not be loaded again")
        backends = tuple(backends)
        if any(backend.lost is not None for backend in self.backends):
            self._close(self.backends)
        model = self._load_again(backends)
        try:
            evaluate_again(model._sequences, [held.tokens for held in self._sequences])
            self._close(backends)
        except BaseException:
            model.close()
            raise
        model._owned += self._owned
        self._owned = []
        return model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
