"""The device layer: the calls that the backend makes on a GPU, and no more.  `real` implements it over CuPy.

Addresses are plain integers; sizes are bytes.  All work belongs to a stream and may run at any time until something
waits for it: host memory that is not pinned is read before `copy_in` returns, pinned memory when the copy runs, so
its bytes stay as they are until then.  What a GPU refuses while a stream is captured (waiting, allocating, pageable
copies) raises `DeviceError`, and so does everything else that a device refuses; nothing here knows tensors.

ggml's name for it: the part of ggml-cuda below its ops (ggml_backend_cuda_context, its streams, events and graphs).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import index

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
    "Module",
    "KernelArguments",
    "Stream",
    "block_of",
    "bytes_of",
]

ALIGNMENT = 256
"""Of every allocation: what cudaMalloc promises."""

MAX_ARGUMENTS = 4096
"""Bytes that the arguments of one kernel may take together."""


class DeviceError(BackendError):
    """A device refused or failed; the message names the kernel or the call."""


class DeviceOutOfMemory(DeviceError):
    """An allocation of `needed` bytes where `free` bytes are left."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"the device has no memory: {needed} bytes needed, {free} bytes free")
        self.needed = needed
        self.free = free

    def __reduce__(self):
        return type(self), (self.needed, self.free)


class Memory(ABC):
    """Bytes of the device, uninitialised at first.  `ptr` is a multiple of 256."""

    ptr: int
    size: int

    @abstractmethod
    def free(self) -> None:
        """Give it back, waiting for work of the device as cudaFree does.  Once is enough, twice does no harm."""


class KernelArguments:
    """The arguments of one launch, laid out once: a launch takes the values that stand here at that moment.

    `values[i]` is an array of shape (1,) over the bytes of argument i: writing `values[i][0]` changes the argument of
    later launches (not of captured ones).  `pointers` holds the address of each, and `address` is that of `pointers`:
    what cuLaunchKernel wants.
    """

    __slots__ = ("address", "block", "offsets", "pointers", "values")

    def __init__(self, args: Sequence[np.generic | np.ndarray], kernel: str = "a kernel") -> None:
        taken, offsets, end = [], [], 0
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
        self.block = space[skip:skip + end]
        self.offsets = np.array(offsets, np.uint32)
        self.values = tuple(self.block[at:at + arg.nbytes].view(arg.dtype)
                            for at, arg in zip(offsets, taken, strict=True))
        for value, arg in zip(self.values, taken, strict=True):
            value[0] = arg[0]
        self.pointers = self.offsets.astype(np.uint64) + np.uint64(self.block.ctypes.data)
        self.address = self.pointers.ctypes.data


class StreamEvent(ABC):
    """A place in a stream.  One that was never recorded counts as passed."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything before the place of the last `Stream.record` is done."""

    @abstractmethod
    def query(self) -> bool:
        """Whether that is so, without waiting."""


class CapturedGraph(ABC):
    """Captured work: the addresses and arguments of then, the memory's contents of each launch."""

    @abstractmethod
    def launch(self, stream: Stream) -> None:
        """Queue all of it."""

    @abstractmethod
    def free(self) -> None:
        """Forget it; once is enough."""


class Stream(ABC):
    """A queue of work, in order; nothing orders two streams but events and the host."""

    is_capturing: bool = False

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything queued so far; raises what went wrong in it."""

    @abstractmethod
    def record(self, event: StreamEvent) -> None:
        """Let the event stand for this place."""

    @abstractmethod
    def wait(self, event: StreamEvent) -> None:
        """Run nothing that is queued from now on before the event's present place is reached; the host goes on."""

    @abstractmethod
    def copy_in(self, memory_ptr: int, host: np.ndarray) -> None:
        """Host to device: the bytes of a contiguous array."""

    @abstractmethod
    def copy_out(self, host: np.ndarray, memory_ptr: int) -> None:
        """Device to host: fills a contiguous array, later if it is pinned, before returning otherwise."""

    @abstractmethod
    def copy(self, dst_ptr: int, src_ptr: int, n: int) -> None:
        """Device to device, within one or between two."""

    @abstractmethod
    def fill(self, ptr: int, value: int, n: int) -> None:
        """n bytes of one value."""

    @abstractmethod
    def begin_capture(self) -> None:
        """From now on record what this thread queues here, instead of running it."""

    @abstractmethod
    def end_capture(self) -> CapturedGraph:
        """What was recorded.  After an error in between this raises DeviceError, and the stream works again."""


class Function(ABC):
    """A kernel.  `name` is "module.function"."""

    name: str

    @abstractmethod
    def pack(self, args: Sequence[np.generic | np.ndarray]) -> KernelArguments:
        """Lay arguments out: NumPy scalars of the exact C type; arrays of size 1 are structs by value."""

    @abstractmethod
    def launch(
        self, grid: Sequence[int], block: Sequence[int], packed: KernelArguments, shared: int, stream: Stream
    ) -> None:
        """Queue it: blocks of the grid, threads of a block (x, y, z; what is left out is 1), `shared` bytes of
        dynamic shared memory."""


class Module(ABC):
    """Kernels of one or more sources, compiled when the first is looked up."""

    @abstractmethod
    def function(self, name: str) -> Function:
        """By its name, or "module.name".  DeviceError when there is none, or the source does not compile."""


class Blas(ABC):
    """Matrix products of the device's own library."""

    @abstractmethod
    def gemm(
        self, stream: Stream, m: int, n: int, k: int, a: int, lda: int, b: int, ldb: int, c: int, ldc: int,
        batch: int = 1, stride_a: int = 0, stride_b: int = 0, stride_c: int = 0,
    ) -> None:
        """c[j][i] = sum over l of a[i][l] * b[j][l], i < m, j < n, l < k: ggml's MUL_MAT of [k, m] and [k, n].

        a and b are f16, c is f32, sums are f32.  `a`, `b`, `c` are addresses; `lda`, `ldb`, `ldc` count elements from
        row to row, no fewer than a row has, the strides elements from one product of the batch to the next.  May not
        be captured.
        """


class Device(ABC):
    """One GPU, or what stands in for it.  Only the thread that works with it needs to hold still: objects of one
    device may be used from any thread, one at a time."""

    name: str
    arch: str
    """"sm_90", or "host"."""
    n_multiprocessors: int
    max_shared: int
    """Bytes of shared memory that one block may have, static and dynamic together."""

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
        """A new one, ordered with no other."""

    @abstractmethod
    def event(self) -> StreamEvent: ...

    @abstractmethod
    def module(self, names: Sequence[str]) -> Module:
        """The kernels of kernels/<name>.cu of each name."""

    @abstractmethod
    def can_access(self, other: Device) -> bool:
        """Whether copies between the two need no host."""

    def blas(self) -> Blas | None:
        """The device's library, where it has one."""
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything queued on it."""

    @abstractmethod
    def close(self) -> None:
        """Wait, and give everything back; once is enough."""

    def __enter__(self):
        return self

    def __exit__(self, *what: object) -> None:
        self.close()


def block_of(sizes: Sequence[int], kernel: str) -> tuple[int, int, int]:
    """Three sizes of a grid or block; those left out are 1."""
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
