"""Weights that a worker reads from its own copy of a driver's GGUF file.

A worker reads whole tensors of a regular file with a valid header, and uses them only if their digest is the one that
the driver sent: all that a driver learns of a file is that it holds a tensor which the driver knows.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from ggml_sched.errors import Error

__all__ = ["DIGEST", "SMALLEST", "Files", "digest_of"]

DIGEST = 16
"""Bytes of the BLAKE2b digest of a weight."""
SMALLEST = 1 << 12
"""A weight of fewer bytes is not looked for in a file: by digests of a few bytes a driver could guess a file's
contents."""
KEPT = 8
"""The most files of which the places of tensors are remembered."""
Key = tuple[int, int, int, int]


def digest_of(data: Any) -> str:
    """The digest of a buffer's bytes, as text."""
    return hashlib.blake2b(data, digest_size=DIGEST).hexdigest()


class Files:
    """Reads weights from files, and remembers where the tensors of a file are while the file stays as it is."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, Key], frozenset[tuple[int, int]]] = OrderedDict()

    def read(self, path: str, start: int, size: int, digest: str) -> bytes | None:
        """Bytes [start, start + size) of a file, if they are a whole tensor and have this digest; else None."""
        if size < SMALLEST:
            return None
        with contextlib.suppress(OSError, ValueError, Error), _opened(path) as descriptor:
            if (start, size) in self._places(path, descriptor):
                data = _read(descriptor, start, size)
                if len(data) == size and digest_of(data) == digest:
                    return data
        return None

    def _places(self, path: str, descriptor: int) -> frozenset[tuple[int, int]]:
        """(first byte, bytes) of each tensor of a file."""
        from ggml_sched.llama.gguf import open_part

        key = path, _key(descriptor)
        if key not in self._known:
            with open_part(path) as file:
                self._known[key] = frozenset((info.offset, info.nbytes) for info in file.tensors.values())
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return self._known[key]


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """A descriptor of a regular file; OSError for anything else, which is not opened."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{path!r} is no regular file")
    # O_NONBLOCK: opening must not wait if the file has become a pipe meanwhile.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path!r} is no regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def _key(descriptor: int) -> Key:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(descriptor: int, start: int, size: int) -> bytes:
    """Up to `size` bytes, fewer where the file ends."""
    pieces = []
    while size and (piece := os.pread(descriptor, min(size, 1 << 30), start)):
        pieces.append(piece)
        start, size = start + len(piece), size - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
