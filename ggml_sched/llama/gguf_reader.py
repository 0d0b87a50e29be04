"""Reads the head of a GGUF file: metadata, and where each tensor's bytes are.

Files are not trusted.  Invariant: nothing is read outside the file, and no memory is allocated for more items than the
remaining bytes can hold; every element of an `Array` lies inside the file, and so does every tensor, aligned, without
overlap.  An invalid file raises FileFormatError naming the file, the byte and the field.

A vocabulary has 100,000 strings and more, so the elements of arrays are parsed when they are accessed; reading the head
copies their bytes, so that no array keeps the file open, and finds where each string begins.
"""

from __future__ import annotations

import enum
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, overload

import numpy as np

from ggml_sched._graph import Type
from ggml_sched.errors import FileFormatError
from ggml_sched.llama._strings import find_strings

__all__ = ["Array", "DEFAULT_ALIGNMENT", "DTYPES", "Kind", "MAGIC", "Reader", "SCALARS", "TensorInfo", "Value",
           "alignment_of"]

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
INT64_MAX = (1 << 63) - 1

# Limits: far above any real model, low enough that a hostile file is refused in well under a second.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = 1 << 16
MAX_NAME_BYTES = 256
MAX_STRING_BYTES = 1 << 26
MAX_STRINGS = 1 << 21
"""The most strings in all arrays of a file together (a vocabulary of 256k tokens with its merges has 2**19)."""
MAX_ARRAY_BYTES = 1 << 28
"""The most bytes of all arrays of a file together: all are copied (a vocabulary of 256k tokens has 2**23)."""
MAX_NESTING = 4
MAX_NESTED = 1 << 16
"""The most arrays inside other arrays, in the whole file."""
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20


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


DTYPES: dict[Kind, np.dtype] = {
    Kind.U8: np.dtype("u1"), Kind.I8: np.dtype("i1"), Kind.U16: np.dtype("<u2"), Kind.I16: np.dtype("<i2"),
    Kind.U32: np.dtype("<u4"), Kind.I32: np.dtype("<i4"), Kind.F32: np.dtype("<f4"), Kind.BOOL: np.dtype("?"),
    Kind.U64: np.dtype("<u8"), Kind.I64: np.dtype("<i8"), Kind.F64: np.dtype("<f8"),
}
"""How GGUF stores numbers of each type: little-endian."""

SCALARS = {
    kind: struct.Struct("<" + code)
    for kind, code in zip(
        (Kind.U8, Kind.I8, Kind.U16, Kind.I16, Kind.U32, Kind.I32, Kind.F32, Kind.BOOL, Kind.U64, Kind.I64,
         Kind.F64),
        "BbHhIifBQqd", strict=True)
}
U64 = SCALARS[Kind.U64]


class Array(Sequence["Value"]):
    """An array of a file's metadata: a copy of the bytes in the file, parsed when elements are accessed.

    `kind` is the type of the elements.  Strings come as str; bytes that are not UTF-8 come as lone surrogates (PEP
    383), so that `raw(i)` is always `a[i].encode("utf-8", "surrogateescape")`.
    """

    __slots__ = ("_memory", "_starts", "_values", "kind")

    def __init__(self, kind: Kind, memory: bytes = b"", starts: array[int] | None = None,
                 values: np.ndarray | Sequence[Array] = ()) -> None:
        self.kind: Kind = kind
        self._memory = memory    # of strings: their bytes, each with its length (u64) first
        self._starts = starts    # of strings: the byte of `_memory` where the length of each stands
        self._values = values    # of numbers: an array; of nested arrays: a list; of strings: empty

    def __reduce__(self) -> tuple[object, ...]:
        return Array, (self.kind, self._memory, self._starts, self._values)

    def __len__(self) -> int:
        return len(self._starts if self._starts is not None else self._values)

    @overload
    def __getitem__(self, i: int) -> Value: ...
    @overload
    def __getitem__(self, i: slice) -> list[Value]: ...
    def __getitem__(self, i: int | slice) -> Value | list[Value]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        if self._starts is not None:
            return self.raw(i).decode("utf-8", "surrogateescape")
        if not isinstance(self._values, np.ndarray):
            return self._values[i]
        number: Value = self._values[i].item()
        return number

    def __iter__(self) -> Iterator[Value]:
        if self._starts is None:
            yield from self._values.tolist() if isinstance(self._values, np.ndarray) else self._values
            return
        starts, ends = self._starts, self._starts[1:]
        ends.append(len(self._memory))
        for start, stop in zip(starts, ends, strict=True):
            yield self._memory[start + 8 : stop].decode("utf-8", "surrogateescape")

    def raw(self, i: int) -> bytes:
        """The bytes of string i."""
        if self._starts is None:
            raise TypeError(f"an array of {self.kind.name} holds no strings")
        start = self._starts[i] + 8
        return self._memory[start : start + U64.unpack_from(self._memory, start - 8)[0]]

    @property
    def strings(self) -> tuple[bytes, array[int]]:
        """(the bytes that hold the strings, where in them each begins, its length first), as `_strings` takes them."""
        if self._starts is None:
            raise TypeError(f"an array of {self.kind.name} holds no strings")
        return self._memory, self._starts

    @classmethod
    def of_strings(cls, texts: Sequence[str]) -> Array:
        """The array that a file with these strings would have."""
        memory, starts = bytearray(), array("Q")
        for text in texts:
            raw = text.encode("utf-8", "surrogatepass")
            starts.append(len(memory))
            memory += U64.pack(len(raw)) + raw
        return cls(Kind.STRING, bytes(memory), starts)

    def numpy(self) -> np.ndarray:
        """A copy as a numpy array; for numbers only."""
        if not isinstance(self._values, np.ndarray):
            raise TypeError(f"an array of {self.kind.name} is not a numpy array")
        return self._values.copy()

    def tolist(self) -> list[Value]:
        return list(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and self.tolist() == list(other)

    def __repr__(self) -> str:
        return f"<Array of {len(self)} {self.kind.name}>"


Value: TypeAlias = str | int | float | bool | Array
"""A value of a file's metadata."""

KINDS = {int(kind): kind for kind in Kind}
TYPES = {int(kind): kind for kind in Type}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: `ne` innermost first, `offset` in bytes from the start of the file.

    `type` is GGUF's number of the type if this package does not know it; `nbytes` is 0 then.  `part` is the index of
    the file among those of a split model.
    """

    name: str
    type: Type | int
    ne: tuple[int, ...]
    offset: int
    nbytes: int
    part: int = 0


class Reader:
    """Reads values one after the other; `pos` is the byte of the next one, and never lies beyond the file's end."""

    def __init__(self, name: str, memory: memoryview) -> None:
        self.name = name
        self.memory = memory
        self.size: int = len(memory)
        self.pos: int = 0
        self.strings_left: int = MAX_STRINGS
        self.nested_left: int = MAX_NESTED
        self.bytes_left: int = MAX_ARRAY_BYTES

    def fail(self, what: str) -> FileFormatError:
        return FileFormatError(f"{self.name}: at byte {self.pos}: {what}")

    # -- single values and arrays -------------------------------------------------

    @overload
    def number(self, kind: Literal[Kind.U32, Kind.U64], what: str) -> int: ...
    @overload
    def number(self, kind: Kind, what: str) -> int | float: ...
    def number(self, kind: Kind, what: str) -> int | float:
        packed = SCALARS[kind]
        if packed.size > self.size - self.pos:
            raise self.fail(f"{what} needs {packed.size} bytes, {self.size - self.pos} are left")
        value: int | float = packed.unpack_from(self.memory, self.pos)[0]
        self.pos += packed.size
        return value

    def count(self, what: str, each: int, limit: int) -> int:
        """Read the number of items that follow.  FileFormatError if it is above `limit`, or if the rest of the file is
        too short for so many items of `each` bytes."""
        n = self.number(Kind.U64, f"the number of {what}")
        if n > limit or n > (self.size - self.pos) // each:
            self.pos -= 8
            raise self.fail(
                f"{n} {what} of {each} bytes or more, {self.size - self.pos} bytes are left, limit {limit}")
        return n

    def text(self, what: str, limit: int) -> str:
        length = self.count(f"bytes of {what}", 1, limit)
        start, self.pos = self.pos, self.pos + length
        try:
            return str(self.memory[start : self.pos], "utf-8")
        except UnicodeDecodeError as error:
            self.pos = start
            raise self.fail(f"{what} is not UTF-8: {error}") from error

    def kind(self, what: str) -> Kind:
        number = self.number(Kind.U32, f"the type of {what}")
        kind = KINDS.get(number)
        if kind is None:
            self.pos -= 4
            raise self.fail(f"{what} has unknown type {number}")
        return kind

    def value(self, kind: Kind, what: str) -> Value:
        if kind is Kind.STRING:
            return self.text(what, MAX_STRING_BYTES)
        if kind is Kind.ARRAY:
            return self.array(what, 1)
        value = self.number(kind, what)
        if kind is Kind.BOOL:
            if value > 1:
                self.pos -= 1
                raise self.fail(f"{what} is {value}, not a bool")
            return bool(value)
        return value

    def array(self, what: str, depth: int) -> Array:
        if depth > MAX_NESTING:
            raise self.fail(f"{what}: arrays nested deeper than {MAX_NESTING}")
        kind = self.kind(f"the elements of {what}")
        if kind is Kind.STRING:
            return self.strings(what)
        if kind is Kind.ARRAY:
            n = self.count(f"arrays in {what}", 12, self.nested_left)
            self.nested_left -= n
            return Array(kind, values=[self.array(what, depth + 1) for _ in range(n)])
        dtype = DTYPES[kind]
        n = self.count(f"elements of {what}", dtype.itemsize, self.bytes_left // dtype.itemsize)
        start, self.pos = self.pos, self.pos + n * dtype.itemsize
        self.bytes_left -= n * dtype.itemsize
        return Array(kind, values=np.frombuffer(self.memory, dtype, n, start).copy() if n else np.empty(0, dtype))

    def strings(self, what: str) -> Array:
        n = self.count(f"strings in {what}", 8, self.strings_left)
        self.strings_left -= n
        starts = array("Q", bytes(8 * n))
        found, pos = find_strings(self.memory, self.pos, starts)
        if found < n:
            self.pos = pos
            if pos > self.size - 8:
                raise self.fail(f"string {found} of {n} in {what} starts at {pos}, the file ends at {self.size}")
            end = pos + 8 + U64.unpack_from(self.memory, pos)[0]
            raise self.fail(f"string {found} of {n} in {what} ends at {end}, the file ends at {self.size}")
        if pos - self.pos > self.bytes_left:
            raise self.fail(f"{what} takes {pos - self.pos} bytes, the limit of all arrays together leaves "
                            f"{self.bytes_left}")
        self.bytes_left -= pos - self.pos
        copied, self.pos = self.memory[self.pos : pos].tobytes(), pos
        if n:
            begins = np.frombuffer(starts, np.uint64)
            begins -= begins[0]     # the strings follow each other, and so do their copies
        return Array(Kind.STRING, copied, starts)

    # -- parts of the file ----------------------------------------------------------

    def header(self) -> tuple[int, int, int]:
        """The version and the numbers of tensors and keys."""
        if bytes(self.memory[:4]) != MAGIC:
            raise self.fail(f"starts with {bytes(self.memory[:4])!r}, not {MAGIC!r}: not a GGUF file")
        self.pos = 4
        version = self.number(Kind.U32, "the version")
        if version not in (2, 3):
            self.pos = 4
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in (1, 2, 3):
                raise self.fail(f"a big-endian GGUF file (version {swapped}); little-endian ones are read")
            raise self.fail(f"GGUF version {version}; versions 2 and 3 are read")
        n_tensors = self.count("tensors", 24, MAX_TENSORS)
        n_keys = self.count("metadata keys", 13, MAX_KEYS)
        return version, n_tensors, n_keys

    def metadata(self, n_keys: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for i in range(n_keys):
            start = self.pos
            key = self.text(f"metadata key {i}", MAX_KEY_BYTES)
            if key in metadata:
                self.pos = start
                raise self.fail(f"metadata key {key!r} appears twice")
            what = f"metadata {key!r}"
            metadata[key] = self.value(self.kind(what), what)
        return metadata

    def tensors(self, n_tensors: int, alignment: int) -> dict[str, TensorInfo]:
        found = {}
        for i in range(n_tensors):
            start = self.pos
            name = self.text(f"the name of tensor {i}", MAX_NAME_BYTES)
            if name in found:
                self.pos = start
                raise self.fail(f"tensor {name!r} appears twice")
            found[name] = self.tensor(name)
        base = -(-self.pos // alignment) * alignment
        infos = {name: self.place(*fields, base, alignment) for name, fields in found.items()}
        self.check_apart(infos)
        return infos

    def tensor(self, name: str) -> tuple[str, Type | int, tuple[int, ...], int, int]:
        """The description of a tensor: (name, type, extents, offset from the start of the tensors' data, bytes)."""
        what = f"tensor {name!r}"
        n_dims = self.number(Kind.U32, f"the number of dimensions of {what}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.fail(f"{what} has {n_dims} dimensions, not 1 to {MAX_DIMS}")
        ne = tuple(self.number(Kind.U64, f"an extent of {what}") for _ in range(n_dims))
        number = self.number(Kind.U32, f"the type of {what}")
        kind = TYPES.get(number)
        if kind is None:
            # An unknown type is no error here: the architecture may not use the tensor.
            return name, number, ne, self.number(Kind.U64, f"the offset of {what}"), 0
        nbytes = kind.type_size  # a Python int, which cannot overflow
        for extent in ne:
            nbytes *= extent
        if min(ne) < 1 or ne[0] % kind.block_size:
            raise self.fail(
                f"{what} has extents {list(ne)}: not rows of whole {kind} blocks of {kind.block_size}")
        offset = self.number(Kind.U64, f"the offset of {what}")
        return name, kind, ne, offset, nbytes // kind.block_size

    def place(self, name: str, kind: Type | int, ne: tuple[int, ...], offset: int, nbytes: int, base: int,
              alignment: int) -> TensorInfo:
        if offset % alignment:
            raise self.fail(f"tensor {name!r} at offset {offset} of the data is not aligned to {alignment}")
        start = base + offset
        if nbytes > self.size or start > self.size - nbytes:
            raise self.fail(f"tensor {name!r} of type {kind} {list(ne)}: bytes {start} .. {start + nbytes} do not "
                            f"lie inside the file of {self.size}")
        return TensorInfo(name, kind, ne, start, nbytes)

    def check_apart(self, infos: dict[str, TensorInfo]) -> None:
        end, before = 0, ""
        for info in sorted(infos.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise self.fail(f"tensors {before!r} and {info.name!r} overlap at byte {info.offset}")
            end, before = info.offset + info.nbytes, info.name


def alignment_of(metadata: Mapping[str, object], name: str) -> int:
    """The alignment of a file's tensors, in bytes."""
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise FileFormatError(
            f"{name}: general.alignment is {value!r}, not a power of two up to {MAX_ALIGNMENT}")
    return value
