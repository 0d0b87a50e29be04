"""The values of a GGUF file's metadata: their kinds, how they are stored, and arrays whose elements are read at access.

Owns the numbers of the kinds.  Invariant: an `Array` was checked when its file was opened: all of its elements lie
inside the file.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence

import numpy as np

__all__ = ["Array", "DTYPES", "Kind", "SCALARS", "U64"]


class Kind(enum.IntEnum):
    """The types of metadata values, numbered as in GGUF."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


DTYPES = {
    Kind.U8: np.dtype("u1"), Kind.I8: np.dtype("i1"), Kind.U16: np.dtype("<u2"), Kind.I16: np.dtype("<i2"),
    Kind.U32: np.dtype("<u4"), Kind.I32: np.dtype("<i4"), Kind.F32: np.dtype("<f4"), Kind.BOOL: np.dtype("?"),
    Kind.U64: np.dtype("<u8"), Kind.I64: np.dtype("<i8"), Kind.F64: np.dtype("<f8"),
}
"""How the elements of each numeric kind are stored."""

SCALARS = {
    kind: struct.Struct("<" + code)
    for kind, code in zip(
        (Kind.U8, Kind.I8, Kind.U16, Kind.I16, Kind.U32, Kind.I32, Kind.F32, Kind.BOOL, Kind.U64, Kind.I64,
         Kind.F64),
        "BbHhIifBQqd", strict=True)
}
U64 = SCALARS[Kind.U64]


class Array(Sequence):
    """An array of a file's metadata, whose elements are read at access.

    `kind` is the kind of the elements.  Strings come as str; bytes that are not UTF-8 come as lone
    surrogates (PEP 383), so that `raw(i)` is always `a[i].encode("utf-8", "surrogateescape")`.
    An array keeps the mapping alive, also after the file was closed.
    """

    __slots__ = ("_memory", "_starts", "_values", "kind")

    def __init__(self, kind: Kind, memory, starts=None, values=None) -> None:
        self.kind = kind
        self._memory = memory    # the bytes of the whole file
        self._starts = starts    # strings: where the length of each one is
        self._values = values    # numbers: a view of the file; nested arrays: a list

    def __len__(self) -> int:
        return len(self._starts if self._starts is not None else self._values)

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        if self._starts is not None:
            return self.raw(i).decode("utf-8", "surrogateescape")
        value = self._values[i]
        return value if isinstance(value, Array) else value.item()

    def __iter__(self) -> Iterator:
        if self._starts is None:
            yield from self._values.tolist() if isinstance(self._values, np.ndarray) else self._values
            return
        starts, end = self._starts, 0
        if starts:
            end = starts[-1] + 8 + U64.unpack_from(self._memory, starts[-1])[0]
        ends = starts[1:]
        ends.append(end)
        # The strings are contiguous: slicing one copy of them costs a third of slicing the mapping.
        base = starts[0] if starts else 0
        data = bytes(self._memory[base:end])
        for start, stop in zip(starts, ends, strict=True):
            yield data[start + 8 - base : stop - base].decode("utf-8", "surrogateescape")

    def raw(self, i: int) -> bytes:
        """The bytes of string i."""
        if self._starts is None:
            raise TypeError(f"an array of {self.kind.name} holds no strings")
        start = self._starts[i] + 8
        return bytes(self._memory[start : start + U64.unpack_from(self._memory, start - 8)[0]])

    def numpy(self) -> np.ndarray:
        """A copy as a numpy array; for numbers only."""
        if not isinstance(self._values, np.ndarray):
            raise TypeError(f"an array of {self.kind.name} is not a numpy array")
        return self._values.copy()

    def tolist(self) -> list:
        return list(self)

    def __eq__(self, other) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and self.tolist() == list(other)

    __hash__ = None    # type: ignore[assignment]  # as Python sets it for a class that defines __eq__ alone

    def __repr__(self) -> str:
        return f"<Array of {len(self)} {self.kind.name}>"
