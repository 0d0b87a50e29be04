"""Files that a store reads: exactly the bytes that were requested, or a typed error that names the file and the range.

Reads go past the page cache (O_DIRECT) where the file system allows that and the memory is placed for it: addresses and
offsets in the file must agree modulo BLOCK, and whole blocks are read, also those in which only a few bytes were
requested.  Otherwise bytes are read through the page cache, which is then advised to forget them.  A file that was
changed after it was opened is refused: its bytes are not those of the model any more.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import numpy as np

from ggml_sched.backends.cpu.buffer import address_of
from ggml_sched.errors import FetchError

__all__ = ["BLOCK", "CHUNK", "ROOM", "StoredFile"]

BLOCK = 4096
"""Addresses, offsets and sizes of direct reads are multiples of this many bytes, which every common device allows."""
ROOM = 3 * BLOCK
"""Memory for a read must be this many bytes larger than the read, so that whole blocks can be read to it, wherever it
begins."""
CHUNK = 8 << 20
"""Bytes of one read: large enough for the full speed of a disk, small enough that closing a store ends soon."""


class StoredFile:
    """A file that is open for reading.  `direct`: whether reads go past the page cache; None: where the file system
    allows it.  `status`: what `os.fstat` returned when the file was opened before, or None.

    OSError if it cannot be opened, FetchError if it is no regular file, if it is not the file of `status` or was
    changed since, or if `direct` is True and not possible.  The file is closed when this object is freed.
    """

    _fd = _direct = -1
    _gave_up = False

    def __init__(self, path: str, direct: bool | None = None, status: os.stat_result | None = None) -> None:
        self.path = path
        # O_NONBLOCK: to open a named pipe would wait for its writer.
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise FetchError(f"{path}: not a regular file", path=path)
            if status is not None and _identity(found) != _identity(status):
                raise FetchError(f"{path}: the file was replaced or changed after its header was read", path=path)
            self.size: int = found.st_size
            self._identity = _identity(found)
            if direct is not False:
                self._open_direct(direct is True)
            with suppress(AttributeError, OSError):     # not every system has this call
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        except BaseException:
            self.close()
            raise

    def _open_direct(self, required: bool) -> None:
        """Open the file a second time, past the page cache, and read a block as a trial."""
        why: object = "the system has no direct reads"
        if hasattr(os, "O_DIRECT") and hasattr(os, "preadv"):
            try:
                self._direct = os.open(self.path, os.O_RDONLY | os.O_DIRECT | getattr(os, "O_CLOEXEC", 0))
                os.preadv(self._direct, [memoryview(cast("Any", aligned(BLOCK)))], 0)
                return
            except OSError as error:
                self._close_direct()
                why = error
        if required:
            raise FetchError(f"{self.path}: no direct reads: {why}", path=self.path)

    def reopen_direct(self) -> None:
        """Read past the page cache again, where the file system allows it."""
        self._gave_up = False
        if self._direct < 0:
            self._open_direct(False)

    @property
    def is_direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._direct >= 0 and not self._gave_up

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def close(self) -> None:
        """Close the file; idempotent."""
        self._close_direct()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def give_up_direct(self) -> None:
        """Read through the page cache from now on; another thread may still be reading past it."""
        self._gave_up = True

    def _close_direct(self) -> None:
        fd, self._direct = self._direct, -1
        if fd >= 0:
            os.close(fd)

    def shift(self, start: int, address: int) -> int:
        """How many bytes after `address` the bytes of the file, from `start` on, must be placed so that direct reads
        are possible; 0 if there are no direct reads."""
        return -address % BLOCK + start % BLOCK if self.is_direct else 0

    def read(self, start: int, memory: np.ndarray, at: int, size: int, room: tuple[int, int],
             stop: Callable[[], bool] = lambda: False) -> None:
        """Read `size` bytes from `start` on to `memory[at : at + size]`; memory[room[0] : room[1]] may be written.

        `stop` is called before each chunk, and once it returns True, the read ends with a FetchError.  FetchError also
        if bytes cannot be read, and if the file was changed since it was opened.
        """
        if self._fd < 0:
            raise self.error(start, size, "the file is closed")
        if size and not (self.is_direct and self._read_blocks(start, memory, at, size, room, stop)):
            self._read_bytes(start, memory, at, size, stop)
        if stop():
            raise self.error(start, size, "the store is being closed")
        try:
            found = os.fstat(self._fd)
        except OSError as error:        # closed by another thread
            raise self.error(start, size, "the file was closed meanwhile", error.errno) from error
        if _identity(found) != self._identity:
            raise self.error(start, size, "the file was changed after it was opened")

    def _read_blocks(self, start: int, memory: np.ndarray, at: int, size: int, room: tuple[int, int],
                     stop: Callable[[], bool]) -> bool:
        """Read whole blocks past the page cache, with the arguments of `read`; False if the memory is not placed for
        that, or the system refuses."""
        before = start % BLOCK
        end = -(-(start + size) // BLOCK) * BLOCK
        here = at - before
        if (address_of(memory) + here) % BLOCK or here < room[0] or here + end - (start - before) > room[1]:
            return False
        view = memoryview(cast("Any", memory))
        place = start - before
        while place < start + size and not stop():
            n = min(CHUNK, end - place)
            try:
                got = self.preadv(self._direct, view[here : here + n], place)
            except OSError as error:
                if error.errno == errno.EINVAL:         # the file system takes no direct reads here after all
                    self.give_up_direct()
                    return False
                raise self.error(start, size, os.strerror(error.errno or 0), error.errno) from error
            if place + got < start + size and got < BLOCK:
                # A short read that ends inside a block cannot go on from there: the rest comes through the page cache.
                done = max(place - start, 0)
                self._read_bytes(start + done, memory, at + done, size - done, stop)
                return True
            got -= got % BLOCK if place + got < start + size else 0
            place, here = place + got, here + got
        return True

    def _read_bytes(self, start: int, memory: np.ndarray, at: int, size: int, stop: Callable[[], bool]) -> None:
        """Read bytes through the page cache, and advise it to forget them."""
        view, done = memoryview(cast("Any", memory)), 0
        while done < size and not stop():
            n = min(CHUNK, size - done)
            try:
                got = self.preadv(self._fd, view[at + done : at + done + n], start + done)
            except OSError as error:
                raise self.error(start, size, os.strerror(error.errno or 0), error.errno) from error
            if got == 0:
                raise self.error(start, size, f"the file ends at byte {os.fstat(self._fd).st_size}")
            done += got
        with suppress(AttributeError, OSError):
            os.posix_fadvise(self._fd, start, size, os.POSIX_FADV_DONTNEED)

    def preadv(self, fd: int, out: memoryview, offset: int) -> int:
        """One read; returns how many bytes it has read.  A signal does not end it early (PEP 475)."""
        return os.preadv(fd, [out], offset) if hasattr(os, "preadv") else self._pread(fd, out, offset)

    @staticmethod
    def _pread(fd: int, out: memoryview, offset: int) -> int:
        data = os.pread(fd, len(out), offset)
        out[: len(data)] = data
        return len(data)

    def error(self, start: int, size: int, why: str, code: int | None = None) -> FetchError:
        """The error for bytes that cannot be read."""
        return FetchError(f"{self.path}: bytes {start} .. {start + size} cannot be read: {why}", path=self.path,
                          start=start, stop=start + size, code=code)


def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
    """(device, inode, size, time of the last change): equal for the same file if it was not changed."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def aligned(size: int) -> np.ndarray:
    """An array of `size` bytes whose address is a multiple of BLOCK."""
    block = np.empty(size + BLOCK, np.uint8)
    return block[-address_of(block) % BLOCK :][:size]
