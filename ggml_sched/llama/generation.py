"""Generates text or ids lazily: each `next()` evaluates only what its result needs.

Owns the tokens and the text generated so far, and the reason for the end.  Invariant: `tokens` are all chosen tokens;
`text` is the part of their text that no later token can change; a chosen token is evaluated when the next one is
requested.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Generic, Self, TypeVar, cast, overload

import numpy as np

from ggml_sched.llama.arguments import count
from ggml_sched.llama.errors import SamplingError, SequenceError
from ggml_sched.llama.hints import unknown_argument
from ggml_sched.llama.sampling import Sampler, SamplerOptions, greedy
from ggml_sched.llama.text.stream import StopStrings

if TYPE_CHECKING:
    from ggml_sched.llama.sequences import Sequence
    from ggml_sched.llama.text.tokenizer import Tokenizer

__all__ = ["Generation", "Options", "Stats"]

SAMPLING = frozenset(SamplerOptions.__annotations__)
"""The names of a Sampler's arguments, which `generate` and `chat` take, too."""

Piece = TypeVar("Piece", str, int)


class ChatOptions(SamplerOptions, total=False):
    """The keyword arguments of `Sequence.chat`: those of `Model.chat`, without `sequence`."""

    stop: str | Iterable[str] | None
    shift: bool
    n_keep: int
    parse_special: bool


class GenerateOptions(ChatOptions, total=False):
    """The keyword arguments of `Sequence.generate`: those of `Model.generate`, without `sequence`."""

    echo: bool
    ignore_eos: bool


@dataclass(slots=True)
class Stats:
    """Numbers of tokens, and times in seconds; `n_cached`: tokens of the prompt that the cache had already."""

    n_prompt: int = 0
    n_cached: int = 0
    prompt_seconds: float = 0.0
    n_evaluated: int = 0
    """The number of generated tokens that were evaluated."""
    seconds: float = 0.0
    """The time spent on evaluating generated tokens, and on choosing the next ones."""


@dataclass(frozen=True, slots=True)
class Options:
    """The checked arguments of a generation: when it ends, and how it chooses tokens."""

    n: int | None
    sampler: Callable[[np.ndarray], int]
    stops: StopStrings
    shift: bool
    n_keep: int
    ignore_eos: bool
    is_ours: bool
    """Whether the sampler was made for this generation alone, from arguments: then it has no history yet, and the
    prompt is added to it, so that penalties apply to the prompt's tokens, too."""

    @classmethod
    def checked(cls, function: Callable[..., object], n: int | None, sampler: Callable[[np.ndarray], int] | None,
                sampling: SamplerOptions, stop: str | Iterable[str] | None, shift: bool, n_keep: int,
                ignore_eos: bool = False) -> Options:
        """The options from the arguments of `function` (`Model.generate` or `Model.chat`); TypeError and ValueError for
        wrong arguments."""
        n, n_keep = None if n is None else count("n", n), count("n_keep", n_keep)
        if sampling and (unknown := sampling.keys() - SAMPLING):
            raise unknown_argument(function, min(unknown), SAMPLING)
        if sampler is not None and sampling:
            raise TypeError(f"either a sampler, or what a Sampler takes: {', '.join(sampling)}")
        if sampler is not None and not callable(sampler):
            raise TypeError(f"a sampler is a function from logits to a token id, not {type(sampler).__name__}")
        is_ours = sampler is None and bool(sampling)
        if sampler is None:
            sampler = Sampler(**sampling) if sampling else greedy
        stops = StopStrings(() if stop is None else stop)
        return cls(n, sampler, stops, bool(shift), n_keep, bool(ignore_eos), is_ours)


class Generation(Generic[Piece]):
    """An iterator over pieces of text, or over ids; made by `Model.generate` and `Model.chat`.

    `finish_reason`: None until the end, then "length", "eos", "stop" or, after `close`, "closed".  `tokens`, `text`:
    what was generated so far.  SequenceError if another generation, or `eval`, has changed the sequence meanwhile.
    """

    def __init__(self, sequence: Sequence, prompt: list[int], options: Options, tokenizer: Tokenizer | None = None,
                 echo: str | bool = "", whole: bool = False) -> None:
        """`whole`: `prompt` replaces the content of the sequence instead of continuing it."""
        self.finish_reason: str | None = None
        self.tokens: list[int] = []
        self.text: str = ""
        self.stats: Stats = Stats(n_prompt=len(prompt))
        self._sequence: Sequence = sequence
        self._pending: list[int] = prompt
        self._options: Options = options
        self._whole: bool = whole
        self._logits: np.ndarray | None = None
        """The logits [n_vocab] after the last evaluated token; None once a token was chosen from them."""
        self._before: int | None = None
        """The length of the sequence before an evaluation whose logits are not in `_logits` yet; else None.

        By the tokens from there on `_evaluate` finds out whether an evaluation that was interrupted is complete.
        """
        self._version: int = sequence.version
        """The version that the sequence had after this generation's last change; another one shows a foreign change."""
        self._is_text: bool = tokenizer is not None
        self._echo: str | list[int] = echo if isinstance(echo, str) else list(prompt) if echo else []
        if tokenizer is None and options.stops.stops:
            tokenizer = sequence.model.tokenizer
        self._stream = None if tokenizer is None else tokenizer.stream(continuing=not whole)
        self._ready = ""
        """Text that no later id can change, and that was not returned yet."""
        self._ends = frozenset() if options.ignore_eos else sequence.model.end_tokens
        if options.is_ours:
            cast("Sampler", options.sampler).accept(*prompt)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        return cast("Piece", self._next_piece())

    def _next_piece(self) -> str | int:
        if self._echo:
            if not isinstance(self._echo, str):
                return self._echo.pop(0)
            echo, self._echo = self._echo, ""
            return echo
        while True:
            token = self._next_token() if self.finish_reason is None else None
            if not self._is_text:
                if token is None:
                    raise StopIteration
                return token
            if self._ready:
                piece, self._ready = self._ready, ""
                self.text += piece
                return piece
            if token is None:
                raise StopIteration

    @overload
    def read(self: Generation[str]) -> str: ...
    @overload
    def read(self: Generation[int]) -> list[int]: ...
    def read(self) -> str | list[int]:
        """Generate to the end; returns all generated text, or, of a generation that streams ids, all generated ids."""
        for _ in self:
            pass
        return self.text if self._is_text else list(self.tokens)

    @property
    def is_full(self) -> bool:
        """Whether the context has no room for another token."""
        return not self._sequence.model.n_free

    def close(self) -> None:
        """End the generation where it is; idempotent.  What it has evaluated stays in the sequence."""
        if self.finish_reason is None:
            self.finish_reason = "closed"
        self._ready, self._echo = "", [] if isinstance(self._echo, list) else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        how = self.finish_reason or "going on"
        return f"<Generation of {len(self.tokens)} tokens: {how}>"

    # -- helpers -------------------------------------------------------------------------

    def _next_token(self) -> int | None:
        """Evaluate the pending tokens and choose the next one; None at the end."""
        options = self._options
        if options.n is not None and len(self.tokens) >= options.n or not self._has_room():
            self._end("length")
            return None
        start = time.perf_counter()
        if self._logits is None:
            self._logits = self._evaluate()
        self._before = None
        token = self._choose(self._logits)
        took = time.perf_counter() - start
        if self.tokens:
            self.stats.n_evaluated += 1
            self.stats.seconds += took
        else:
            self.stats.prompt_seconds += took
        if token in self._ends:
            self._end("eos")
            return None
        self._pending, self._logits = [token], None
        # Not `append`, which is a call: signal handlers run after calls, and one that raises between the line above and
        # this one would lose the token.
        self.tokens += (token,)
        if self._stream is not None:
            self._add(self._stream.feed(token))
            if options.stops.matched is not None:
                self._end("stop")
                return None
        return token

    def _choose(self, logits: np.ndarray) -> int:
        chosen = self._options.sampler(logits)
        try:
            token = index(chosen)
        except TypeError:
            token = -1
        if not 0 <= token < len(logits):
            raise SamplingError(f"the sampler chose {chosen!r}, which is no token id from 0 to {len(logits) - 1}")
        return token

    def _evaluate(self) -> np.ndarray:
        """Evaluate the pending tokens; returns the logits [n_vocab] after them."""
        sequence = self._sequence
        if not self._pending:
            raise ValueError("generating needs one token to start from")
        # Whether the last evaluation was complete, although an interrupt has lost its logits.  Then this generation has
        # changed the sequence once since `_version`.
        is_done = self._before is not None and sequence.tokens[self._before:] == self._pending
        if not self._whole and sequence.version - self._version > is_done:
            raise SequenceError(f"sequence {sequence.index} has changed since this generation's last token: evaluate "
                                "something else in another sequence (load(..., n_seq=...)), or after the end")
        if self._whole:
            n = sequence.keep_common(self._pending)
            self._pending, self._whole, self._version = self._pending[n:], False, sequence.version
            self.stats.n_cached = n
        elif is_done:       # remove the last token and evaluate it again, for its logits
            sequence.truncate(sequence.n_past - 1)
            self._pending, self._version = self._pending[-1:], sequence.version
        self._before = sequence.n_past
        logits: np.ndarray = sequence.eval(self._pending, last_only=True)[0]
        self._version = sequence.version
        return logits

    def _has_room(self) -> bool:
        """Whether the next token fits into the context, and into the positions that the model has learned; if not, and
        the option `shift` is set, a context shift makes room first.  True for a prompt, whose evaluation raises
        ContextFull if it does not fit."""
        sequence, options = self._sequence, self._options
        n_learned = sequence.model.hparams.n_positions
        if not self.tokens or sequence.model.n_free and (not n_learned or sequence.n_past < n_learned):
            return True
        if options.shift and sequence.n_past - options.n_keep >= 2:
            if sequence.version != self._version:
                return True             # something else has changed the sequence: `_evaluate` raises the error
            try:
                sequence.shift(options.n_keep, (sequence.n_past - options.n_keep) // 2)
            except SequenceError:       # no shift: recurrent state, learned positions, or rows that sequences share
                return False
            self._version = sequence.version
            return True
        return False

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        if self._stream is not None and reason != "stop":
            self._add(self._stream.flush())
            self._ready += self._options.stops.flush()
            if self._options.stops.matched is not None:
                self.finish_reason = "stop"

    def _add(self, text: str) -> None:
        """Add decoded text, up to the first stop string."""
        self._ready += self._options.stops.feed(text)
