"""Buffers of host memory, allocated here or given by the caller.

A CpuBuffer holds a NumPy uint8 array, and NumPy counts the references to its memory.  Arrays made over `memory` keep it
alive, so they stay valid when the buffer is closed.  Corresponds to ggml's CPU buffer and buffer_from_ptr.
"""

from __future__ import annotations

import ctypes
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, cast

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backend import Backend, Buffer, CountingBackend, same_layout
from ggml_sched.errors import BackendError, OutOfMemory
from ggml_sched.graph.hostdata import array_over

if TYPE_CHECKING:
    from ggml_sched.backend import Bytes
    from ggml_sched.backends.cpu.interleaved import Interleaved

    Memory: TypeAlias = Bytes | SupportsIndex
    """Memory of the caller: an object with the buffer protocol, or an address."""

__all__ = ["ALIGNMENT", "CpuBuffer", "HostBackend", "address_of", "allocate", "copy_on_host", "wrap"]

ALIGNMENT = 64
MOVES = ("set_tensor_async", "get_tensor_async", "set_tensor", "get_tensor", "synchronize")
"""Methods of a backend that may move data by other ways than `Buffer.write` and `Buffer.read`, if a subclass overrides
them: then its buffers are not `plain`."""


class CpuBuffer(Buffer):
    """Bytes that the CPU reads directly; `base` is the real address of the first one."""

    def __init__(self, backend: Backend, memory: np.ndarray, usage: str = "any") -> None:
        super().__init__(backend, memory.nbytes, address_of(memory), usage)
        self._memory: np.ndarray | None = memory
        self.interleaved: Interleaved | None = None     # weights of the buffer in a second form, made by its backend
        self.plain: bool = (memory.flags.writeable and _is_left_as(self, CpuBuffer, ("write", "read", "memory"))
                      and _is_left_as(backend, Backend, MOVES))

    @property
    def memory(self) -> np.ndarray:
        """The bytes, a uint8 array; BackendError once the buffer is closed."""
        if self._memory is None:
            raise BackendError(f"a buffer of {self.size} bytes of backend {self.backend.name!r} is closed")
        return self._memory

    @property
    def writable(self) -> bool:
        return self.memory.flags.writeable

    def write(self, offset: int, data: memoryview) -> None:
        incoming = as_bytes(data)
        target = self._range(offset, incoming.nbytes)
        if not target.flags.writeable:
            raise BackendError(f"a buffer of {self.size} bytes of backend {self.backend.name!r} is read-only")
        target[:] = incoming
        self.changed()

    def read(self, offset: int, out: memoryview) -> None:
        outgoing = as_bytes(out)
        outgoing[:] = self._range(offset, outgoing.nbytes)

    def clear(self, value: int = 0) -> None:
        self.write(0, memoryview(b""))      # raises if the buffer is closed or read-only
        self.memory[:] = self.checked_byte(value)
        self.changed()

    def changed(self) -> None:
        """Called after `write` and `clear`, which give no tensor a new version.  For a subclass that keeps copies of
        the bytes."""

    def is_read(self, offset: int) -> bool:
        return self.interleaved is None or not self.interleaved.has(offset)

    def free(self) -> None:
        self._memory, self.plain = None, False
        if self.interleaved is not None:
            self.interleaved.close()
            self.interleaved = None
        cast("HostBackend", self.backend).buffer_sizes.drop(self)

    def _range(self, offset: int, size: int) -> np.ndarray:
        self._check_range(offset, size)
        return self.memory[offset : offset + size]


class HostBackend(CountingBackend):
    """Base class of backends over host memory: allocates and wraps buffers, copies tensors, and refuses to go on after
    `close`.

    `buffer_sizes` counts no buffers over memory of the caller.
    """

    concurrent_copies = True
    buffer_class: type[CpuBuffer] = CpuBuffer
    _closed = False

    def _check_size(self, size: int) -> None:
        """Check that a buffer of `size` bytes may be allocated; BackendError, ValueError, OutOfMemory."""
        self._require_open()
        if size < 0:
            raise ValueError(f"backend {self.name!r}: a buffer of {size} bytes")
        self._check_room(size)

    def alloc_buffer(self, size: int) -> Buffer:
        """`size` zero bytes at a multiple of 64, a `buffer_class`."""
        self._check_size(size)
        buffer = self.buffer_class(self, allocate(size, self.name))
        self.buffer_sizes.add(buffer)
        return buffer

    def buffer_from_ptr(self, source: Memory, size: int | None = None, usage: str = "any") -> CpuBuffer:
        """A buffer over the caller's memory; the buffer keeps that memory alive and never frees it.

        `source` is a contiguous numpy array or anything else with the buffer protocol (read-only ones may hold
        weights), or an address with a `size` in bytes.  The buffer's `base` is the real address of this memory, aligned
        or not.
        """
        self._require_open()
        return self.buffer_class(self, wrap(source, size), usage)

    def cpy_tensor_from(self, src: Tensor, dst: Tensor) -> bool:
        return copy_on_host(src, dst)

    cpy_tensor_to = cpy_tensor_from

    @property
    def closed(self) -> bool:
        return self._closed

    def _require_open(self) -> None:
        if self._closed:
            raise BackendError(f"backend {self.name!r} is closed")


def _is_left_as(mine: object, base: type, names: tuple[str, ...]) -> bool:
    """Whether `mine` has these attributes exactly as the base class defines them: neither overridden nor set."""
    return not any(name in vars(mine) or getattr(type(mine), name) is not getattr(base, name) for name in names)


def address_of(array: np.ndarray) -> int:
    """The address of an array's first byte, also of an empty array, for which `array.ctypes.data` is arbitrary."""
    address: int = array.__array_interface__["data"][0]
    return address


def allocate(size: int, backend_name: str) -> np.ndarray:
    """`size` zero bytes at an address that is a multiple of 64; OutOfMemory."""
    try:
        block = np.zeros(size + ALIGNMENT, np.uint8)
    except (MemoryError, ValueError, OverflowError) as error:
        message = f"backend {backend_name!r}: the host gives no {size} bytes"
        raise OutOfMemory(message, backend_name, size) from error
    skip = -address_of(block) % ALIGNMENT
    return block[skip:][:size]      # two slices: one empty slice [skip:skip] would start at the block's own address


def wrap(source: Memory, size: int | None) -> np.ndarray:
    """The caller's memory as a uint8 array that keeps `source` alive and never frees it.

    `source` is anything with the buffer protocol, contiguous, or an address with a size.
    """
    if isinstance(source, int) or hasattr(source, "__index__") and not isinstance(source, np.ndarray):
        address = index(cast("SupportsIndex", source))
        if size is None:
            raise TypeError("memory given as an address needs a size in bytes")
        size = index(size)
        if not 0 <= size < 1 << 63 or address < 0 or address + size > 1 << 64:
            raise ValueError(f"{size} bytes at address {address:#x} are no range of memory")
        if size == 0:
            return np.empty(0, np.uint8)
        if address == 0:
            raise ValueError(f"{size} bytes at address 0")
        return np.frombuffer(memoryview((ctypes.c_ubyte * size).from_address(address)), np.uint8)
    memory = as_bytes(cast("Any", source))
    if size is None:
        return memory
    size = index(size)
    if not 0 <= size <= memory.nbytes:
        raise ValueError(f"{size} bytes of memory that holds {memory.nbytes}")
    return memory[:size]


def as_bytes(source: Bytes) -> np.ndarray:
    """A uint8 array over a contiguous buffer; TypeError without one, ValueError if it is not contiguous."""
    if isinstance(source, np.ndarray):
        if not source.flags.c_contiguous:
            raise ValueError(f"an array of strides {source.strides} is not contiguous")
        # memoryview supports neither float16 nor structured types, so view the array as bytes first.
        return source.reshape(-1).view(np.uint8) if source.size else np.empty(0, np.uint8)
    view = memoryview(source)
    if not view.c_contiguous:
        raise ValueError(f"a buffer of strides {view.strides} is not contiguous")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def copy_on_host(src: Tensor, dst: Tensor) -> bool:
    """Copy the elements of src to dst, not the gaps between them; False, without copying, unless both are in host
    memory that NumPy can access and have the same layout."""
    here, there = src.buffer, dst.buffer
    if here is None or there is None or not same_layout(src, dst):
        return False
    if not (here.backend.is_host and there.backend.is_host):
        return False
    a, b = getattr(here, "memory", None), getattr(there, "memory", None)
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray) or not b.flags.writeable:
        return False
    if src.nbytes > min(a.nbytes - src.offset, b.nbytes - dst.offset):
        return False
    # Either backend may have queued work on this memory.
    here.backend.synchronize()
    there.backend.synchronize()
    np.copyto(array_over(dst, b, dst.offset), array_over(src, a, src.offset))
    return True
