"""Typed, checked reads of a file's metadata for tokenizers.

Files are not trusted.  Invariant: a returned value has the requested type and range; every error names the file and the
field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ggml_sched.llama.errors import TokenizerError
from ggml_sched.llama.gguf import Array, Kind

__all__ = ["Fields", "shown"]


class Fields:
    """Typed, checked reads of metadata; every error names the field."""

    def __init__(self, metadata: Mapping, name: str) -> None:
        self.metadata, self.name = metadata, name

    def fail(self, key: str, what: str) -> TokenizerError:
        return TokenizerError(f"{self.name}: {key}: {what}", key)

    def string(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(key, default)
        if value is None:
            raise self.fail(key, "is missing: the file holds no tokenizer")
        if not isinstance(value, str):
            raise self.fail(key, f"is {shown(value)}, not a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"is {shown(value)}, not a bool")
        return value

    def token_id(self, key: str, n_vocab: int, default: int | None = None) -> int | None:
        value = self.metadata.get(key)
        if value is None:
            return default if default is not None and default < n_vocab else None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"is {shown(value)}, not a token id")
        if value == 0xFFFFFFFF:  # "none" in an unsigned field
            return None
        if not 0 <= value < n_vocab:
            raise self.fail(key, f"is {value}, the vocabulary has {n_vocab} tokens")
        return value

    def strings(self, key: str, missing: str) -> list[str]:
        value = self.metadata.get(key)
        if value is None:
            raise self.fail(key, missing)
        if isinstance(value, Array):
            if value.kind is not Kind.STRING:
                raise self.fail(key, f"is an array of {value.kind.name}, not of strings")
            return value.tolist()
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise self.fail(key, f"is {shown(value)}, not an array of strings")
        for i, element in enumerate(value):
            if not isinstance(element, str):
                raise self.fail(f"{key}[{i}]", f"is {shown(element)}, not a string")
        return list(value)

    def numbers(self, key: str, n: int, kind: str) -> np.ndarray | None:
        """An array of n numbers, or None where the file has none; `kind`: NumPy's letters of the types that it may have
        ("iu" integers, "f" floats)."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, Array):
            kind_of_elements = value.kind.name
            try:
                value = value.numpy()
            except TypeError:
                raise self.fail(key, f"is an array of {kind_of_elements}, not of numbers") from None
        try:
            numbers = np.asarray(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise self.fail(key, f"is not an array of numbers: {error}") from error
        if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in kind):
            raise self.fail(key, f"is {shown(value)}, not an array of {'floats' if 'f' in kind else 'integers'}")
        if len(numbers) != n:
            raise self.fail(key, f"has {len(numbers)} elements, the vocabulary has {n} tokens")
        return numbers


def shown(value) -> str:
    """A short text of any value, for error messages."""
    if isinstance(value, Array):
        return repr(value)
    if isinstance(value, (str, bytes)):
        return repr(value[:60]) + ("..." if len(value) > 60 else "")
    if isinstance(value, bool) or isinstance(value, int) and abs(value) < 1 << 64 or isinstance(value, float):
        return repr(value)
    return f"a {type(value).__name__}"
