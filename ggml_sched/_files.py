"""Files that are written whole or not at all; reads and writes of all bytes, where one call may move fewer."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from threading import get_ident
from typing import IO

__all__ = ["read_up_to", "replace_file", "write_all", "write_text"]

CHUNK = 1 << 24
"""Bytes that are read at a time, so that a wrong size allocates no more than a file has."""
MAX_LINKS = 40
"""Symbolic links in a row that are followed, as Linux follows them."""

NO_REPLACEMENT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""Errors of a folder in which a file cannot be replaced, though it may be writable itself."""

_numbers = count()
"""Numbers of the files that this process writes, one for each."""


def _descriptor(path: str) -> int | None:
    """The descriptor of this process that a path names, like /dev/stdout; None for any other path.  OSError for
    symbolic links that name each other."""
    link = path
    for _ in range(MAX_LINKS + 1):
        folder, name = os.path.realpath(os.path.dirname(path)), os.path.basename(path)
        if folder in ("/dev/fd", f"/proc/{os.getpid()}/fd") and name.isdecimal():
            return int(name)
        if not os.path.islink(path):
            return None
        path = os.path.join(folder, os.readlink(path))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), link)


def replace_file(path: str | bytes | os.PathLike[str] | os.PathLike[bytes], parts: Iterable[bytes]) -> None:
    """Write a file; an existing one is replaced atomically, when all parts are written, and its mode stays, its owner
    where that is permitted.  Several writers of one path do not disturb each other: the file of the writer that ends
    last stays.  A pipe, a device or an open file (/dev/stdout, /dev/fd/3) is not replaced but written to, as is a file
    that cannot be replaced: one with a mount of its own, or in a folder that is not writable.  Of a symbolic link what
    it names is replaced.  An OSError names `path`, also where another file could not be opened."""
    given = os.fspath(path)
    path = os.fsdecode(given)
    if not path:            # as `open` raises it: the real path would be that of the folder
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), given)
    descriptor = _descriptor(path)
    if descriptor is not None or os.path.exists(path) and not os.path.isfile(path):
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        if descriptor is None:
            file = open(path, "wb")  # noqa: SIM115
        else:
            # A copy of a descriptor goes on where the descriptor is; to open its name again would empty a file.
            copy = os.dup(descriptor)
            try:
                file = open(copy, "wb")  # noqa: SIM115
            except OSError:
                os.close(copy)      # it is a folder's
                raise
        with file:
            file.writelines(parts)
        return
    path = os.path.realpath(path)
    folder, name = os.path.split(path)
    # Short, whatever the name's length: it has at most as many bytes as a name may have.
    unfinished = os.path.join(folder, f"{name[:16]}.{os.getpid()}-{get_ident()}-{next(_numbers)}.unfinished")
    try:
        old = os.stat(path) if os.path.exists(path) else None
        try:
            # What replaces a file that only its owner can read is never readable by others.
            file = open(unfinished, "wb", opener=None if old is None else _open_private)  # noqa: SIM115
        except OSError as error:
            if old is None or error.errno not in NO_REPLACEMENT:
                raise
            with open(path, "wb") as file:
                file.writelines(parts)
            return
        with file:
            if old is not None:
                with suppress(OSError):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
            file.writelines(parts)
        try:
            os.replace(unfinished, path)
        except OSError as error:
            if old is None or error.errno not in NO_REPLACEMENT:
                raise
            from shutil import copyfile  # here: it is seldom needed, and slow to import

            copyfile(unfinished, path)
            os.unlink(unfinished)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(unfinished)
        if isinstance(error, OSError) and error.filename == unfinished and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), given) from None
        raise


def _open_private(path: str, flags: int) -> int:
    """An opener of a new file that only its owner can read and write."""
    return os.open(path, flags, 0o600)


def check_writable(path: str | os.PathLike[str]) -> None:
    """OSError, with `path`, where `replace_file` could not write.  A file that is not there is made and removed; an
    existing one, a pipe or a device is not opened."""
    given, path = path, os.fspath(path)
    try:
        if _descriptor(path) is not None:
            return
        path = os.path.realpath(path)
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.path.exists(path):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            os.unlink(path)
        elif not os.access(path, os.W_OK) and not os.access(os.path.dirname(path), os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise OSError(error.errno, error.strerror, given) from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, as `replace_file` does."""
    replace_file(path, [text.encode()])


def write_all(file: IO[bytes], data: bytes | bytearray | memoryview) -> None:
    """Write all bytes to a binary file; one call of a raw file may write fewer.  BlockingIOError if one writes none."""
    left = data
    while len(left):
        n = file.write(left)
        if n is None and not isinstance(file, io.RawIOBase):
            return      # a file of the caller's own, whose `write` returns nothing
        if not n:
            raise BlockingIOError(f"{len(left)} bytes are left, and none were written")
        left = memoryview(left)[n:]


def read_up_to(file: IO[bytes], n: int) -> bytearray:
    """The next n bytes of a binary file, or as many as there are; one call of a raw file may read fewer.
    BlockingIOError where a raw file has none yet; TypeError for a text file."""
    data = bytearray()
    while len(data) < n:
        part: bytes | str | None
        try:
            part = file.read(min(n - len(data), CHUNK))
        except UnicodeDecodeError:
            part = ""
        if part is None:
            raise BlockingIOError(f"{n - len(data)} bytes are left to read, and none are there yet")
        if isinstance(part, str):
            raise TypeError("a binary file is needed, not a text file")
        if not part:
            break
        data += part
    return data
