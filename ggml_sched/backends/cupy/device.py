"""The device layer: an interface with just the calls that the backend makes on a GPU.  `real` implements it over CuPy.

Addresses are plain integers; sizes are bytes.  All work belongs to a stream and may run at any time until a wait for
the stream returns.  `copy_in` reads host memory that is not pinned before it returns, and pinned memory when the copy
runs: until then its bytes must not change.  A call that a device refuses raises `DeviceError`, as do waits, allocations
and pageable copies while a stream is captured.  This layer does not depend on tensors.

ggml's name for it: the part of ggml-cuda below its ops (ggml_backend_cuda_context, its streams, events and graphs).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from operator import index
from typing import Self

import numpy as np

from ggml_sched.errors import BackendError

__all__ = [
    "ALIGNMENT",
    "Blas",
    "Device",
    "DeviceError",
    "DeviceOutOfMemory",
    "StreamEvent",
    "Function",
    "CapturedGraph",
    "Memory",
    "KernelArguments",
    "Stream",
    "block_of",
    "bytes_of",
]

ALIGNMENT = 256
"""The alignment of every allocation in bytes, which cudaMalloc guarantees."""

MAX_ARGUMENTS = 4096
"""Bytes that the arguments of one kernel may take together."""


class DeviceError(BackendError):
    """A device refused a call, or failed; the message names the kernel or the call."""


class DeviceOutOfMemory(DeviceError):
    """An allocation of `needed` bytes where `free` bytes are left."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"the device has no memory: {needed} bytes needed, {free} bytes free")
        self.needed = needed
        self.free = free

    def __reduce__(self) -> tuple[type[Self], tuple[int, int]]:
        return type(self), (self.needed, self.free)


class Memory(ABC):
    """Bytes of the device, uninitialised at first.  `ptr` is a multiple of 256."""

    ptr: int
    size: int

    @abstractmethod
    def free(self) -> None:
        """Free it, after waiting for work of the device, as cudaFree does; idempotent."""


class KernelArguments:
    """The arguments of a kernel, packed once for any number of launches; each launch reads their present values.

    `values[i]` is an array of shape (1,) over the bytes of argument i: writing `values[i][0]` changes the argument of
    later launches (not of captured ones).  `pointers` holds the address of each, and `address` is that of `pointers`,
    for cuLaunchKernel.
    """

    __slots__ = ("address", "block", "offsets", "pointers", "values")

    def __init__(self, args: Sequence[np.generic | np.ndarray], kernel: str = "a kernel") -> None:
        taken: list[np.ndarray] = []
        offsets: list[int] = []
        end = 0
        for i, arg in enumerate(args):
            if not isinstance(arg, np.generic | np.ndarray) or arg.size != 1 or arg.dtype.hasobject:
                raise TypeError(f"{kernel}: argument {i} is a NumPy scalar or an array of size 1, not {arg!r:.80}")
            taken.append(np.asarray(arg).reshape(1))
            offsets.append(end)
            end += -(-arg.nbytes // 16) * 16
        if sum(arg.nbytes for arg in taken) > MAX_ARGUMENTS:
            raise DeviceError(f"{kernel}: more than {MAX_ARGUMENTS} bytes of arguments")
        space = np.zeros(end + 16, np.uint8)
        skip = -space.ctypes.data % 16
        self.block: np.ndarray = space[skip:skip + end]
        self.offsets: np.ndarray = np.array(offsets, np.uint32)
        self.values: tuple[np.ndarray, ...] = tuple(self.block[at:at + arg.nbytes].view(arg.dtype)
                                                    for at, arg in zip(offsets, taken, strict=True))
        for value, arg in zip(self.values, taken, strict=True):
            value[0] = arg[0]
        self.pointers: np.ndarray = self.offsets.astype(np.uint64) + np.uint64(self.block.ctypes.data)
        self.address: int = self.pointers.ctypes.data


class StreamEvent(ABC):
    """A point in a stream.  An event that was never recorded counts as passed."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work before the point of the last `Stream.record` is done."""

    @abstractmethod
    def query(self) -> bool:
        """Whether all work before the point of the last `Stream.record` is done; does not wait."""


class CapturedGraph(ABC):
    """Captured work.  A launch repeats it with the addresses and arguments of the capture, and reads memory anew."""

    @abstractmethod
    def launch(self, stream: Stream) -> None:
        """Queue all of it."""

    @abstractmethod
    def free(self) -> None:
        """Free it; idempotent."""


class Stream(ABC):
    """A queue of work, in order; nothing orders two streams but events and the host."""

    is_capturing: bool = False

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work queued so far; raises its errors."""

    @abstractmethod
    def record(self, event: StreamEvent) -> None:
        """Record the event at the present end of the queue."""

    @abstractmethod
    def wait(self, event: StreamEvent) -> None:
        """Make work queued from now on wait for the event's present point; the host does not wait."""

    @abstractmethod
    def copy_in(self, memory_ptr: int, host: np.ndarray) -> None:
        """Host to device: the bytes of a contiguous array."""

    @abstractmethod
    def copy_out(self, host: np.ndarray, memory_ptr: int) -> None:
        """Device to host: fills a contiguous array; if it is pinned, when the copy runs, else before this returns."""

    @abstractmethod
    def pinned_in(self, memory_ptr: int, host_ptr: int, n: int) -> None:
        """Host to device: n bytes, n > 0, from an address in pinned memory.  Whether it is pinned is not checked,
        unlike in `copy_in`."""

    @abstractmethod
    def pinned_out(self, host_ptr: int, memory_ptr: int, n: int) -> None:
        """Device to host: n bytes, n > 0, to an address in pinned memory.  Whether it is pinned is not checked, unlike
        in `copy_out`."""

    @abstractmethod
    def copy(self, dst_ptr: int, src_ptr: int, n: int) -> None:
        """Copy n bytes within a device or between two."""

    @abstractmethod
    def fill(self, ptr: int, value: int, n: int) -> None:
        """Set n bytes to one value."""

    @abstractmethod
    def begin_capture(self) -> None:
        """From now on record the work that this thread queues here, instead of running it."""

    @abstractmethod
    def end_capture(self) -> CapturedGraph:
        """End the capture, so that the stream is usable again; returns the work, or raises an error of the capture."""


class Function(ABC):
    """A kernel.  `name` is "module.function"."""

    name: str

    def pack(self, args: Sequence[np.generic | np.ndarray]) -> KernelArguments:
        """Pack arguments for launches: NumPy scalars of the exact C type; arrays of size 1 are structs by value."""
        return KernelArguments(args, self.name)

    @abstractmethod
    def launch(
        self, grid: Sequence[int], block: Sequence[int], packed: KernelArguments, shared: int, stream: Stream,
        early: bool = False,
    ) -> None:
        """Queue a launch: blocks of the grid, threads of a block (x, y, z; missing ones are 1), `shared` bytes of
        dynamic shared memory.  `early`, only for kernels made with `overlap` (`Device.function`): the launch may begin
        before the previous launch in the stream has ended, and its kernel waits for that end; no effect after work
        that is no launch."""


class Blas(ABC):
    """A handle of the device's own library of matrix products, used by one thread at a time."""

    @abstractmethod
    def gemm(
        self, stream: Stream, m: int, n: int, k: int, a: int, lda: int, b: int, ldb: int, c: int, ldc: int,
        batch: int = 1, stride_a: int = 0, stride_b: int = 0, stride_c: int = 0,
    ) -> None:
        """c[j][i] = sum over l of a[i][l] * b[j][l], i < m, j < n, l < k: ggml's MUL_MAT of [k, m] and [k, n].

        a and b are f16, c is f32, sums are f32.  `a`, `b`, `c` are addresses; `lda`, `ldb`, `ldc`: elements from row to
        row, no fewer than a row has; the strides: elements from one product of the batch to the next.  May not be
        captured.
        """

    def close(self) -> None:  # noqa: B027  # a device may have nothing to give back
        """Give the handle back; idempotent."""


class Device(ABC):
    """One GPU, or its simulation.  Objects of one device may be used from any thread, by one thread at a time."""

    name: str
    arch: str
    """"sm_90", or "host"."""
    n_multiprocessors: int
    max_shared: int
    """Bytes of shared memory that one block may have, static and dynamic together."""
    can_overlap: bool = False
    """Whether a launch may begin before the previous one has ended (`early` of `Function.launch`)."""

    @property
    def has_tensor_cores(self) -> bool:
        """Whether warps can multiply matrices of 8-bit integers and of f16 as tensor.cuh does: from sm_80 on."""
        number = self.arch.removeprefix("sm_")
        return not number.isdigit() or int(number) >= 80

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """(free, total) bytes."""

    @abstractmethod
    def alloc(self, n: int) -> Memory:
        """n bytes at a multiple of 256, uninitialised; DeviceOutOfMemory."""

    @abstractmethod
    def pinned(self, n: int) -> np.ndarray:
        """n bytes of page-locked host memory (uint8), freed with the last array over it."""

    @abstractmethod
    def stream(self) -> Stream:
        """A new stream, not ordered with any other."""

    @abstractmethod
    def event(self) -> StreamEvent: ...

    @abstractmethod
    def function(self, name: str, *, overlap: bool = False) -> Function:
        """The kernel "module.function" of kernels/<module>.cu, which is compiled when its first kernel is looked up.
        `overlap`: the kernel is made for launches that may overlap, if the device `can_overlap`.  DeviceError if there
        is no such kernel, or the source does not compile."""

    def load(self, kernels: Iterable[str], *, overlap: bool = False) -> None:  # noqa: B027  # `function` compiles, too
        """Compile in parallel what these kernels, "module.function", need: `function` would compile one after another.
        DeviceError if a source does not compile."""

    @abstractmethod
    def can_access(self, other: Device) -> bool:
        """Whether copies between the two devices work without host memory."""

    def blas(self) -> Blas | None:
        """A new handle of the device's library of matrix products, for one backend; None without a library."""
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work queued on the device."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all work, and free everything; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *what: object) -> None:
        self.close()


def block_of(sizes: Sequence[int], kernel: str) -> tuple[int, int, int]:
    """The three sizes of a grid or block; 1 for sizes that were left out."""
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"{kernel}: a grid or block has one to three sizes, not {sizes!r}")
    x, y, z = (*map(index, sizes), 1, 1)[:3]
    return x, y, z


def bytes_of(host: np.ndarray, writing: bool = False) -> np.ndarray:
    """The bytes of a contiguous array, as an array over the same memory."""
    if not isinstance(host, np.ndarray) or not host.flags.c_contiguous:
        raise ValueError("a copy takes a contiguous array")
    if writing and not host.flags.writeable:
        raise ValueError("a copy cannot write a read-only array")
    return host.reshape(-1).view(np.uint8)
