"""Typed, checked reads of a GGUF file's metadata.

Invariant: every returned value is of its type, finite and in its range, whatever the file contains.
Corresponds to llama.cpp's llama_model_loader::get_key and get_key_or_arr.
"""

from __future__ import annotations

import math

from ggml_sched.errors import FileFormatError
from ggml_sched.llama.gguf import Array, GGUFFile

__all__ = ["MAX_EXTENT", "MAX_F32", "MAX_POSITION", "Metadata"]

MAX_EXTENT = 1 << 24
"""The largest width, number of heads and vocabulary that a file may have."""
MAX_POSITION = (1 << 31) - 1
MAX_F32 = 3.4028234e38
MAX_ARRAY = 1 << 16
"""The longest list, with a number for each layer, that a file may have."""


class Metadata:
    """The metadata of one architecture: methods take keys without their prefix `{arch}.`."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file, self.arch = file, arch

    def fail(self, what: str) -> FileFormatError:
        return FileFormatError(f"{self.file.name}: {what}")

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.file.metadata

    def _get(self, key: str, default):
        key = f"{self.arch}.{key}"
        value = self.file.metadata.get(key, default)
        if value is None:
            raise self.fail(f"no metadata {key!r}, which architecture {self.arch!r} needs")
        return key, value

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_EXTENT) -> int:
        """An int in low .. high; where a file has a list, with one for each layer, all must be equal."""
        key, value = self._get(key, default)
        if isinstance(value, Array):
            values = list(value) if 1 <= len(value) <= MAX_ARRAY else [0, 1]
            if any(one != values[0] for one in values):
                raise self.fail(f"metadata {key!r} differs from layer to layer, which is not supported")
            value = values[0]
        return self._whole(key, value, low, high)

    def integers(self, key: str, n: int, default: int | None = None, low: int = 1,
                 high: int = MAX_EXTENT) -> tuple[int, ...]:
        """An int in low .. high for each of n layers: one for all, or a list of n or more."""
        key, value = self._get(key, default)
        if not isinstance(value, Array):
            return (self._whole(key, value, low, high),) * n
        if not n <= len(value) <= MAX_ARRAY:
            raise self.fail(f"metadata {key!r} has {len(value)} numbers for {n} layers")
        return tuple(self._whole(key, one, low, high) for one in list(value)[:n])

    def _whole(self, key: str, value, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self.fail(f"metadata {key!r} is {value!r}, not an integer in {low} .. {high}")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0, high: float = MAX_F32) -> float:
        """A finite float in low .. high."""
        key, value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise self.fail(f"metadata {key!r} is {value!r}, not a number in {low:g} .. {high:g}")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        key, value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.fail(f"metadata {key!r} is {value!r}, not a truth value")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        key, value = self._get(key, default)
        if not isinstance(value, str):
            raise self.fail(f"metadata {key!r} is {value!r}, not a string")
        return value

    def pattern(self, key: str, n: int, default: int) -> tuple[bool, ...]:
        """For each of n layers whether it has a sliding window.

        The file has a list of truth values, or a number (or `default`): then all but the last of each so many layers
        have one, and all for 0.
        """
        value = self.file.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, Array):
            flags = list(value)[:n] if n <= len(value) <= MAX_ARRAY else []
            if len(flags) != n or not all(type(flag) in (bool, int) for flag in flags):
                raise self.fail(f"metadata '{self.arch}.{key}' is no list of truth values for {n} layers")
            return tuple(bool(flag) for flag in flags)
        period = self._whole(f"{self.arch}.{key}", value, 0, MAX_EXTENT)
        return tuple(period == 0 or layer % period < period - 1 for layer in range(n))
