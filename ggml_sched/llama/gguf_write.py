"""Writes GGUF model files: for synthetic models and tests.

Invariant: `open_gguf` reads equal values from a written file.  Corresponds to ggml's gguf_write_to_file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from ggml_sched._files import write_all
from ggml_sched._graph import Type
from ggml_sched.graph import hostdata
from ggml_sched.llama.gguf import DEFAULT_ALIGNMENT, DTYPES, MAGIC, SCALARS, Array, Kind

if TYPE_CHECKING:
    from ggml_sched.backend import Bytes
    from ggml_sched.llama.state import File

    Weight: TypeAlias = np.ndarray | tuple[Type | str | int, Sequence[int], Bytes]
    """A tensor to write: an array, or its type, extents and bytes."""

__all__ = ["write_gguf"]

ALIGNMENT = "general.alignment"
CHUNK = 1 << 24


def write_gguf(file: File, metadata: Mapping[str, Any], tensors: Mapping[str, Weight], *,
               alignment: int | None = None, version: int = 3) -> None:
    """Write a model to a path or a binary file object.

    `metadata` values: bool, int (u32, or the smallest of i32, u64 and i64 that holds it), float (f32), str,
    lists and numpy arrays of one of these, or `(Kind, value)`.  `tensors` maps names to numpy arrays (f32,
    f16, f64 or signed ints; their shape is `ne` reversed) or to `(type, ne, bytes)`, `ne` innermost first.
    `alignment` of the tensors in bytes: None takes "general.alignment" of the metadata, or 32.  ValueError where both
    are given and differ, for an alignment that is no power of two, and for metadata that its type does not hold;
    TypeError for a type that GGUF does not have.
    """
    metadata = dict(metadata)
    alignment = _checked_alignment(metadata, alignment)
    entries = [(name, *_tensor(name, value)) for name, value in dict(tensors).items()]
    head = bytearray(MAGIC + struct.pack("<IQQ", version, len(entries), len(metadata)))
    for key, value in metadata.items():
        kind, value = _kinded(key, value)
        head += _string(key) + struct.pack("<I", kind) + _payload(key, kind, value)
    offset = 0
    for name, type_, ne, data in entries:
        head += _string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, type_, offset)
        offset += _padded(len(data), alignment)
    if hasattr(file, "write"):
        _write(cast("IO[bytes]", file), head, entries, alignment)
    else:
        with open(os.fspath(file), "wb") as out:
            _write(out, head, entries, alignment)


def _checked_alignment(metadata: dict[str, Any], alignment: int | None) -> int:
    """The alignment of the tensors, which is in the metadata, too, where it is not the default."""
    given = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT if alignment is None else alignment)
    kind, found = _kinded(ALIGNMENT, given)
    if alignment is not None and found != alignment:
        raise ValueError(f"alignment = {alignment}, and metadata {ALIGNMENT!r} is {found}")
    if kind is not Kind.U32 or found <= 0 or found & (found - 1):
        raise ValueError(f"an alignment is a power of two, stored as u32, not {found!r} ({kind.name})")
    if found != DEFAULT_ALIGNMENT:
        metadata[ALIGNMENT] = given
    return int(found)


def _write(out: IO[bytes], head: bytearray, entries: Sequence[tuple[str, Type, tuple[int, ...], memoryview]],
           alignment: int) -> None:
    write_all(out, bytes(head) + bytes(_padded(len(head), alignment) - len(head)))
    for *_, data in entries:
        for start in range(0, len(data), CHUNK):
            write_all(out, data[start : start + CHUNK])
        write_all(out, bytes(_padded(len(data), alignment) - len(data)))


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _kinded(key: str, value: Any) -> tuple[Kind, Any]:
    """The type under which a metadata value is stored, and the value."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Kind):
        return value
    if isinstance(value, (bool, np.bool_)):
        return Kind.BOOL, value
    if isinstance(value, (int, np.integer)):
        if value < 0:
            return Kind.I32 if value >= -(1 << 31) else Kind.I64, value
        return Kind.U32 if value < 1 << 32 else Kind.U64, value
    if isinstance(value, (float, np.floating)):
        return Kind.F32, value
    if isinstance(value, (str, bytes)):
        return Kind.STRING, value
    if isinstance(value, (list, tuple, np.ndarray, Array)):
        return Kind.ARRAY, value
    raise TypeError(f"metadata {key!r}: GGUF holds no {type(value).__name__}")


def _payload(key: str, kind: Kind, value: Any) -> bytes:
    if kind is Kind.STRING:
        return _string(value)
    if kind is not Kind.ARRAY:
        try:
            return SCALARS[kind].pack(value)
        except (struct.error, OverflowError):
            raise ValueError(f"metadata {key!r}: {value!r} is no {kind.name}") from None
    if isinstance(value, Array) and value.kind in DTYPES:
        value = value.numpy()
    if isinstance(value, np.ndarray):
        for inner, dtype in DTYPES.items():
            if dtype == value.dtype:
                return struct.pack("<IQ", inner, value.size) + value.astype(dtype).tobytes()
        raise TypeError(f"metadata {key!r}: GGUF holds no array of {value.dtype}")
    items = [_kinded(key, item) for item in value]
    inner = items[0][0] if items else Kind.I32
    if any(item[0] is not inner for item in items):
        integers = {Kind.U32, Kind.I32, Kind.U64, Kind.I64}
        if not {item[0] for item in items} <= integers:
            raise TypeError(f"metadata {key!r}: the items of an array are of one type")
        inner = Kind.I64
    return struct.pack("<IQ", inner, len(items)) + b"".join(_payload(key, inner, item[1]) for item in items)


def _tensor(name: str, value: Weight) -> tuple[Type, tuple[int, ...], memoryview]:
    """The type of a tensor, its extents `ne` innermost first, and its bytes."""
    if isinstance(value, tuple):
        kind, ne, data = value
        kind = Type[kind.upper()] if isinstance(kind, str) else Type(kind)
        data = memoryview(cast("Any", data)).cast("B")
        expected = kind.type_size * int(np.prod(ne, dtype=object)) // kind.block_size
        if len(data) != expected:
            raise ValueError(f"tensor {name!r} {kind} {list(ne)}: {len(data)} bytes, not {expected}")
        return kind, tuple(ne), data
    values = np.asarray(value)
    for kind, dtype in hostdata.DTYPES.items():
        if kind is not Type.BF16 and dtype == values.dtype and 1 <= values.ndim <= 4:
            data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            return kind, values.shape[::-1], data.data
    raise TypeError(f"tensor {name!r}: GGUF holds no {values.dtype} array of {values.ndim} dimensions")
