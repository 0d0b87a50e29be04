"""Opens GGUF model files: a single file, or all parts of a split model.

Owns the read-only mapping of each file.  Invariant: every tensor of an open file lies inside it; an invalid file raises
FileFormatError.  Corresponds to ggml's gguf_init_from_file.

Opening reads no weights.  A model that is split into several files ("-00001-of-00003.gguf") is opened by its first
part, which has the metadata; the other parts are found in the same folder, and `tensors` are those of all parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import mmap
import os
import re
import stat
from typing import IO, TYPE_CHECKING, Any, Self, TypeAlias, cast

import numpy as np

from ggml_sched.errors import FileFormatError
from ggml_sched.llama.gguf_reader import (
    DEFAULT_ALIGNMENT,
    DTYPES,
    MAGIC,
    SCALARS,
    Array,
    Kind,
    Reader,
    TensorInfo,
    Value,
    alignment_of,
)

if TYPE_CHECKING:
    from ggml_sched.backend import Bytes

    Source: TypeAlias = str | os.PathLike[str] | Bytes | IO[bytes]
    """The source of a model: a path, a buffer of bytes or a binary file."""

__all__ = ["Array", "DEFAULT_ALIGNMENT", "DTYPES", "GGUFFile", "Kind", "MAGIC", "SCALARS", "TensorInfo", "Value",
           "open_gguf", "open_part"]

PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
MAX_PARTS = 1 << 12
POPULATE_READ = 22
"""Linux's MADV_POPULATE_READ, "read these pages now", which Python does not name; older kernels refuse it."""


class GGUFFile:
    """An open file: `.name .version .alignment .metadata .tensors`, `.memory`, `.data(info)`, `.parts`.

    `metadata` maps keys to int, float, bool, str or `Array`; `tensors` maps names to `TensorInfo`; `parts` are the
    files of a split model, this one first; `status`: the `os.stat_result` of a mapped file when it was opened.
    A context manager; `close()` is idempotent.  Arrays taken from the file keep its memory alive.
    """

    def __init__(self, name: str, memory: memoryview, mapping: mmap.mmap | None = None,
                 status: os.stat_result | None = None) -> None:
        self.name = name
        self.status = status
        self._mapping = mapping
        self._memory: memoryview | None = memory
        self.parts: tuple[GGUFFile, ...] = (self,)
        self.version: int
        try:
            reader = Reader(name, memory)
            self.version, n_tensors, n_keys = reader.header()
            self.metadata: dict[str, Value] = reader.metadata(n_keys)
            self.alignment: int = alignment_of(self.metadata, name)
            self.tensors: dict[str, TensorInfo] = reader.tensors(n_tensors, self.alignment)
        except BaseException:
            self.close()
            raise

    @property
    def memory(self) -> np.ndarray:
        """All bytes of the file, read-only; the array keeps them alive."""
        if self._memory is None:
            raise ValueError(f"{self.name}: the file is closed")
        return np.frombuffer(self._memory, np.uint8)

    def data(self, info: TensorInfo) -> np.ndarray:
        """The bytes of one tensor, read-only, not copied; FileFormatError for an unknown type, whose size is unknown.
        """
        part = self.parts[info.part]
        if type(info.type) is int:
            raise FileFormatError(f"{part.name}: tensor {info.name!r} has unknown type {info.type}")
        return part.memory[info.offset : info.offset + info.nbytes]

    @property
    def mapped(self) -> bool:
        """Whether the bytes are a memory-mapped file: the operating system reads a page when it is first accessed."""
        return self._mapping is not None

    def bring(self, start: int, stop: int) -> None:
        """Read bytes start .. stop of this file into memory now instead of at their first access.

        FileFormatError where the file has become shorter since it was opened.
        """
        if self._mapping is None or stop <= start:
            return
        size = self._mapping.size()
        if size < stop:
            raise FileFormatError(f"{self.name}: bytes {start} .. {stop} cannot be read: the file has shrunk to {size}")
        first = start - start % mmap.PAGESIZE
        try:
            self._mapping.madvise(POPULATE_READ, first, stop - first)
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", errno.EINVAL) != errno.EINVAL:
                raise FileFormatError(f"{self.name}: bytes {start} .. {stop} cannot be read: {error}") from error
            # EINVAL: the system does not know POPULATE_READ.  Reading one byte of every page does the same.
            self.memory[start:stop : mmap.PAGESIZE].max()

    def prefer_huge_pages(self) -> None:
        """Tell the operating system to read the file into huge pages, where its kernel and file system can; pages that
        are in memory already stay as they are."""
        if self._mapping is not None and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE)

    def forget(self, start: int, stop: int) -> None:
        """Release the memory of bytes start .. stop of this file, which were copied elsewhere; a later access reads
        them from the file again.  Does nothing where the operating system has no such call."""
        if self._mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE      # not the page before: it may hold another tensor
            if stop > first:
                with contextlib.suppress(OSError):
                    self._mapping.madvise(mmap.MADV_DONTNEED, first, stop - first)

    @property
    def closed(self) -> bool:
        return self._memory is None

    def close(self) -> None:
        """Close the file; idempotent.  Its mapping ends when the last array taken from the file is freed."""
        for part in self.parts[1:]:
            part.close()
        self._memory = None
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            # BufferError: arrays still use the mapping, which ends when the last of these arrays is freed.
            with contextlib.suppress(BufferError):
                mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GGUFFile {self.name!r}: {len(self.metadata)} keys, {len(self.tensors)} tensors>"


def open_gguf(source: Source) -> GGUFFile:
    """Open a model: a path (mapped, not read), bytes or another buffer, or a binary file object (read to its end, and
    where it can seek brought back to where it was).

    A path may be that of the first part of a split model.  Raises FileFormatError for invalid contents,
    FileNotFoundError or another OSError when the file cannot be opened.  A mapped file must not be shortened while it
    is open.
    """
    if isinstance(source, (str, os.PathLike)):
        name = os.fsdecode(source)
        file = open_part(name)
        try:
            return _with_parts(file)
        except BaseException:
            file.close()
            raise
    name = f"<{type(source).__name__}>"
    if hasattr(source, "read"):
        name = str(getattr(source, "name", name))
        source = cast("Bytes", _read_to_end(cast("IO[bytes]", source)))
        if not isinstance(source, (bytes, bytearray)):
            raise TypeError(f"{name}: a model is read from a binary file, not a text file")
    try:
        memory = memoryview(cast("Any", source)).toreadonly()
    except TypeError:
        raise TypeError(f"a model is a path, bytes or a binary file, not {type(source).__name__}") from None
    if not memory.c_contiguous:
        raise TypeError(f"{name}: a model is read from contiguous bytes")
    file = GGUFFile(name, memory.cast("B"))
    n_parts = _split_field(file, "split.count", 1)
    if n_parts > 1:
        raise FileFormatError(f"{name}: part of a model in {n_parts} files, which are opened by the path of the first")
    return file


def _read_to_end(file: IO[bytes]) -> bytes | str:
    """What a file holds from where it is; a file that can seek stays there.  A str for a text file."""
    at = file.tell() if getattr(file, "seekable", bool)() else None
    try:
        return file.read()
    except UnicodeDecodeError:
        return ""
    finally:
        if at is not None:
            file.seek(at)


def open_part(path: str) -> GGUFFile:
    """Open one file alone, which may be a part of a split model; raises as `open_gguf` does."""
    mapping, status = _map(path)
    return GGUFFile(path, memoryview(mapping), mapping, status)


def _split_field(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int or not 0 <= value <= MAX_PARTS:
        raise FileFormatError(f"{file.name}: {key} is {value!r}, not a number up to {MAX_PARTS}")
    return value


def _with_parts(first: GGUFFile) -> GGUFFile:
    """`first`, with the other parts and their tensors added if it is the first part of a split model."""
    n_parts, number = _split_field(first, "split.count", 1), _split_field(first, "split.no", 0)
    if n_parts < 2:
        return first
    if number != 0:
        raise FileFormatError(f"{first.name}: part {number + 1} of {n_parts}: a model is opened by its first part")
    named = PART_NAME.fullmatch(os.path.basename(first.name))
    if named is None or (int(named[2]), int(named[3])) != (1, n_parts):
        raise FileFormatError(f"{first.name}: the first of {n_parts} parts, whose name does not end in "
                              f"-00001-of-{n_parts:05}.gguf: the others cannot be found")
    for k in range(1, n_parts):
        path = os.path.join(os.path.dirname(first.name), f"{named[1]}-{k + 1:05}-of-{n_parts:05}.gguf")
        try:
            part = open_part(path)
        except OSError as error:
            raise FileFormatError(f"{first.name}: part {k + 1} of {n_parts}: {error}") from error
        first.parts += (part,)
        told = _split_field(part, "split.no", 0), _split_field(part, "split.count", 1)
        if told != (k, n_parts):
            raise FileFormatError(f"{path}: says it is part {told[0] + 1} of {told[1]}, not {k + 1} of {n_parts}")
        for name, info in part.tensors.items():
            if name in first.tensors:
                raise FileFormatError(f"{path}: tensor {name!r} is in an earlier part, too")
            first.tensors[name] = dataclasses.replace(info, part=k)
    total = first.metadata.get("split.tensors.count")
    if total is not None and total != len(first.tensors):
        raise FileFormatError(f"{first.name}: split.tensors.count is {total!r}; the parts hold {len(first.tensors)}")
    return first


def _map(path: str) -> tuple[mmap.mmap, os.stat_result]:
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # a zero byte in the path
        raise FileFormatError(f"{path!r}: not a path: {error}") from error
    # The type is checked before the file is opened: opening a pipe would block until a writer opens it.
    if not stat.S_ISREG(mode):
        what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise FileFormatError(f"{path}: {what}, not a GGUF file")
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        if size < len(MAGIC):
            raise FileFormatError(f"{path}: {size} bytes are not a GGUF file")
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), status
        except (ValueError, OSError) as error:
            raise FileFormatError(f"{path}: {size} bytes cannot be mapped: {error}") from error
