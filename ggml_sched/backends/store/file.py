"""FileStore: weights in files; only the weights that are being used take memory.

A buffer stands for a whole file, and a weight has the same offset in both.  Several files, such as the parts of a model
that was divided, are several buffers.
"""

from __future__ import annotations

import os

import numpy as np

from ggml_sched._graph import BufferBase
from ggml_sched.backend import Buffer
from ggml_sched.backends.cpu.buffer import HostBackend
from ggml_sched.backends.store.files import ROOM, StoredFile
from ggml_sched.backends.store.store import Store
from ggml_sched.errors import BackendError

__all__ = ["FileBuffer", "FileStore"]


class FileBuffer(Buffer):
    """An open file as a buffer of weights.  `bind_resident(tensor, buffer, offset)` gives a weight its place in it."""

    plain = False

    def __init__(self, backend: FileStore, file: StoredFile) -> None:
        super().__init__(backend, file.size, usage="weights")
        self.file = file

    def write(self, offset: int, data: memoryview) -> None:
        raise BackendError(f"{self.file.path}: a file of weights of backend {self.backend.name!r} is read-only")

    def read(self, offset: int, out: memoryview) -> None:
        self._check_range(offset, len(out))
        memory = np.frombuffer(out, np.uint8)
        self.file.read(offset, memory, 0, memory.nbytes, (0, memory.nbytes))

    def free(self) -> None:
        self.file.close()


class FileStore(Store):
    """A store whose weights are in files, which `open_file` opens.

    `direct`: whether reads go past the page cache.  True: always, and FetchError for a file that does not allow it;
    False: never; None: where the file system allows it.  `rows` and `memory`: see `Store`.
    """

    n_readers = 4
    """Four threads read, so that a disk gets its next read before it has finished the last one, and is never idle: also
    while kernels, which evict the memory of fetches from the caches, make single reads slow."""

    def __init__(self, name: str = "file", rows: HostBackend | None = None, memory: int | None = None,
                 direct: bool | None = None) -> None:
        super().__init__(name, rows, memory)
        self.direct = direct
        self.margin: int = 0 if direct is False else ROOM

    def open_file(self, path: str | os.PathLike[str], status: os.stat_result | None = None) -> FileBuffer:
        """A buffer over a file, with usage "weights"; closing it closes the file.  OSError, FetchError.

        `status`: what `os.fstat` returned when the file's header was read, or None.  With it, FetchError if another
        file has this path now, or the file was changed since.
        """
        self._require_open()
        return FileBuffer(self, StoredFile(os.fsdecode(path), self.direct, status))

    def shift_at(self, buffer: BufferBase | None, start: int, address: int) -> int:
        return buffer.file.shift(start, address) if isinstance(buffer, FileBuffer) else 0

    def read(self, buffer: BufferBase, start: int, memory: np.ndarray, at: int, size: int,
             room: tuple[int, int]) -> None:
        if isinstance(buffer, FileBuffer):
            buffer.file.read(start, memory, at, size, room, self.is_stopping)
        else:
            super().read(buffer, start, memory, at, size, room)
