"""A handle of one sequence of a model: its tokens, and the operations on them.

The state itself is in `sequences.py`; a handle only passes calls on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ggml_sched.llama.model import Model

__all__ = ["Sequence"]


class Sequence:
    """Sequence `index` of a model; made by `Model.sequence(index)`, always the same object for an index."""

    __slots__ = ("_store", "index", "model")

    def __init__(self, model: Model, index: int) -> None:
        self.model, self.index, self._store = model, index, model._store

    @property
    def n_past(self) -> int:
        """The number of its tokens in the cache."""
        return len(self._store.tokens[self.index])

    @property
    def tokens(self) -> list[int]:
        """The tokens so far."""
        return list(self._store.tokens[self.index])

    def __len__(self) -> int:
        return len(self._store.tokens[self.index])

    def __repr__(self) -> str:
        return f"<Sequence {self.index}: {self.n_past} tokens>"

    def eval(self, tokens, last_only: bool = False) -> np.ndarray:
        """As `Model.eval`, for this sequence."""
        return self._store.eval(self.index, tokens, last_only)

    def generate(self, prompt, n: int | None = None, sampler=None, **options):
        """As `Model.generate`, for this sequence."""
        return self.model.generate(prompt, n, sampler, sequence=self, **options)

    def chat(self, messages, n: int | None = None, sampler=None, **options):
        """As `Model.chat`, for this sequence."""
        return self.model.chat(messages, n, sampler, sequence=self, **options)

    def keep_common(self, ids: list[int]) -> int:
        """Keep the longest common beginning of the sequence and `ids`, forget the rest; returns the number kept.

        At least the last id is left to evaluate.  ContextFull if the ids to evaluate do not fit; then nothing changes.
        """
        return self._store.keep_common(self.index, ids)

    def truncate(self, n: int) -> None:
        """Keep the first n tokens; SequenceError for a recurrent model, whose state can only be kept whole or cleared.
        """
        self._store.truncate(self.index, n)

    def shift(self, n_keep: int, n_discard: int) -> None:
        """Forget n_discard tokens after the first n_keep; positions of later tokens shrink (llama.cpp's context shift).

        The cached values of later tokens were computed with attention to the forgotten ones: logits afterwards are
        close to, not the same as, those of an evaluation of the remaining tokens.  SequenceError where the model has
        no rope, or another sequence shares these tokens.
        """
        self._store.shift(self.index, n_keep, n_discard)

    def copy_to(self, other: int | Sequence) -> None:
        """Replace another sequence by a copy of this one; both share the rows of the cache."""
        if isinstance(other, Sequence) and other.model is not self.model:
            raise ValueError("a sequence is copied within its model: save and restore it elsewhere")
        self._store.copy(self.index, other.index if isinstance(other, Sequence) else self._store.checked_index(other))

    def reset(self) -> None:
        """Forget all tokens."""
        self._store.truncate(self.index, 0)

    def save(self, target) -> None:
        """Write the state to a path or a binary file."""
        self._store.save(self.index, target)

    def restore(self, source) -> None:
        """Replace the sequence by a state that `save` wrote.

        StateFormatError for a damaged file, or one of another model or cache type; ContextFull where it does not fit.
        """
        self._store.restore(self.index, source)
