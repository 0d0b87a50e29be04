"""Faults of a disk, for tests of stores: reads that fail or end early, files that are shortened or changed during
reads.

    faults = DiskFaults(seed, rate=0.2)
    with faults.on(buffer):             # a FileBuffer of a FileStore
        ...                             # some reads fail, as the seed has it
    assert faults.happened              # the kinds of the faults so far

The faults are made in this process and in the real file, which is restored when the block ends.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ggml_sched.backends.store import FileBuffer

__all__ = ["KINDS", "DiskFaults"]

KINDS = ("short", "short in a block", "error", "refused", "nothing", "slow", "shortened", "changed", "interrupt")
"""short: a read ends early, after whole blocks; short in a block: at any byte; error: EIO; refused: EINVAL, as from
file systems without direct reads; nothing: no bytes, as after a file's end; slow: 2 ms late; shortened, changed: the
file is cut, or its modification time set, before the read; interrupt: SIGINT at the read."""
BLOCK = 4096


class DiskFaults:
    """Faults of the reads of a file: equal seeds give equal faults.

    `rate`: the fraction of the reads that have a fault.  `happened`: the kinds of the faults so far, in order.
    """

    def __init__(self, seed: int, rate: float = 0.2, kinds: Sequence[str] = KINDS) -> None:
        for kind in kinds:
            if kind not in KINDS:
                raise ValueError(f"{kind!r} is not one of {', '.join(KINDS)}")
        self.kinds: tuple[str, ...] = tuple(kinds)
        self.rate: float = rate
        self.happened: list[str] = []
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        """Held while a fault is chosen and the file changed: a store reads on several threads."""
        self._buffer: FileBuffer | None = None
        self._content: bytes | None = None

    @contextmanager
    def on(self, buffer: FileBuffer) -> Iterator[None]:
        """Let reads of the buffer's file have faults in this block; at its end the file's content and times are
        restored."""
        file, found = buffer.file, os.stat(buffer.file.path)
        was_direct = file.is_direct
        self._buffer = buffer
        vars(file)["preadv"] = self._preadv         # hides the method of the class
        try:
            yield
        finally:
            del vars(file)["preadv"]
            if self._content is not None:
                with open(file.path, "r+b") as again:
                    again.write(self._content)
                self._content = None
            os.utime(file.path, ns=(found.st_atime_ns, found.st_mtime_ns))
            if was_direct and not file.is_direct:
                file.reopen_direct()

    def _preadv(self, fd: int, out: memoryview, offset: int) -> int:
        assert self._buffer is not None
        path = self._buffer.file.path
        with self._lock:
            kind = self._random.choice(self.kinds) if self._random.random() < self.rate else None
            if kind is not None:
                self.happened.append(kind)
            if kind == "shortened" and self._content is None:
                with open(path, "rb") as file:
                    self._content = file.read()
                os.truncate(path, self._random.randrange(len(self._content)))
            if kind == "changed":
                os.utime(path)
        if kind == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if kind == "refused":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if kind == "nothing":
            return 0
        if kind == "slow":
            time.sleep(0.002)
        if kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if kind == "short":
            out = out[: max(len(out) // BLOCK // 2, 1) * BLOCK]
        if kind == "short in a block":
            out = out[: self._random.randrange(1, len(out) + 1)]
        return os.preadv(fd, [out], offset)
