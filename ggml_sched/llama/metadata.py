"""Typed, checked reads of a file's metadata.

Files are not trusted.  Invariant: every returned value is of its type, finite and in its range, whatever the file
contains; every error names the file and the field.
Corresponds to llama.cpp's llama_model_loader::get_key and get_key_or_arr.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ggml_sched.errors import Error, FileFormatError
from ggml_sched.llama.gguf import Array, GGUFFile

__all__ = ["MAX_EXTENT", "MAX_F32", "MAX_POSITION", "Fields", "Metadata", "shown"]

MAX_EXTENT = 1 << 24
"""The largest width, number of heads or vocabulary that a file may have."""
MAX_POSITION = (1 << 31) - 1
MAX_F32 = 3.4028234e38
MAX_ARRAY = 1 << 16
"""The longest list with one number for each layer that a file may have."""


class Fields:
    """The metadata fields whose keys begin with `prefix`; methods take keys without this prefix.  A field that is read
    without a default is required."""

    def __init__(self, metadata: Mapping[str, object], name: str, prefix: str) -> None:
        self.metadata = metadata
        self.name = name
        self.prefix = prefix

    def fail(self, key: str, what: str) -> Error:
        """The error for a wrong field."""
        return FileFormatError(f"{self.name}: {self.prefix}{key}: {what}")

    def get(self, key: str, default: object = None, missing: str = "is missing") -> object:
        """The value, of any type; `missing`: the text of the error for a required field that the file lacks."""
        value = self.metadata.get(self.prefix + key, default)
        if value is None:
            raise self.fail(key, missing)
        return value

    def string(self, key: str, default: str | None = None, missing: str = "is missing") -> str:
        value = self.get(key, default, missing)
        if not isinstance(value, str):
            raise self.fail(key, f"is {shown(value)}, not a string")
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"is {shown(value)}, not a bool")
        return value


class Metadata(Fields):
    """The metadata of one architecture, whose keys begin with its name."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        super().__init__(file.metadata, file.name, arch + ".")
        self.file = file
        self.arch = arch

    def error(self, what: str) -> FileFormatError:
        """The error for fields that are right one by one, but do not fit together."""
        return FileFormatError(f"{self.name}: {what}")

    def has(self, key: str) -> bool:
        return self.prefix + key in self.metadata

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_EXTENT) -> int:
        """An int in low .. high.  A file may have a list with an int for each layer; these must be equal."""
        value = self.get(key, default)
        if isinstance(value, Array):
            values = list(value) if 1 <= len(value) <= MAX_ARRAY else [0, 1]
            if any(one != values[0] for one in values):
                raise self.fail(key, "differs from layer to layer, which is not supported")
            value = values[0]
        return self._whole(key, value, low, high)

    def integers(self, key: str, n: int, default: int | None = None, low: int = 1,
                 high: int = MAX_EXTENT) -> tuple[int, ...]:
        """An int in low .. high for each of n layers; a file has one for all layers, or a list of n or more."""
        value = self.get(key, default)
        if not isinstance(value, Array):
            return (self._whole(key, value, low, high),) * n
        if not n <= len(value) <= MAX_ARRAY:
            raise self.fail(key, f"has {len(value)} numbers for {n} layers")
        return tuple(self._whole(key, one, low, high) for one in list(value)[:n])

    def _whole(self, key: str, value: object, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self.fail(key, f"is {shown(value)}, not an integer in {low} .. {high}")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0, high: float = MAX_F32) -> float:
        """A finite float in low .. high."""
        value = self.get(key, default)
        if not (type(value) is int or type(value) is float) or not math.isfinite(value) or not low <= value <= high:
            raise self.fail(key, f"is {shown(value)}, not a number in {low:g} .. {high:g}")
        return float(value)

    def pattern(self, key: str, n: int, default: int) -> tuple[bool, ...]:
        """For each of n layers whether it has a sliding window.

        The file has a list of bools, or a number p: of every p consecutive layers all but the last have a window; with
        p = 0 all layers have one.  `default`: the number p for a file that has neither.
        """
        value = self.get(key, default)
        if isinstance(value, Array):
            flags = list(value)[:n] if n <= len(value) <= MAX_ARRAY else []
            if len(flags) != n or not all(type(flag) in (bool, int) for flag in flags):
                raise self.fail(key, f"is no list of bools for {n} layers")
            return tuple(bool(flag) for flag in flags)
        period = self._whole(key, value, 0, MAX_EXTENT)
        return tuple(period == 0 or layer % period < period - 1 for layer in range(n))


def shown(value: object) -> str:
    """A short text of any value, for error messages."""
    if isinstance(value, Array):
        return repr(value)
    if isinstance(value, (str, bytes)):
        return repr(value[:60]) + ("..." if len(value) > 60 else "")
    if isinstance(value, bool) or isinstance(value, int) and abs(value) < 1 << 64 or isinstance(value, float):
        return repr(value)
    return f"a {type(value).__name__}"
