"""The device layer over CuPy: CUDA's runtime and driver, NVRTC, cuBLAS.  It has not run on a GPU yet: tests run it, and
CuPy itself, over a stub of CUDA.

Owns nothing but handles, and memory.  Each thread has its own current context of CUDA: every method that calls CUDA
sets it, and restores the one before.  CuPy's memory pool is not used, because it keeps freed arenas, nor are CuPy's
MemoryPointer copies, which refuse captures.  Launches call the driver itself, because CuPy's launches would pack every
argument again.  Invariant: a forked process gives nothing back, because the device is its parent's.
CuPy is imported when a device is opened, not before.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from itertools import starmap
from operator import index
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, cast

import numpy as np

from ggml_sched.backends.cupy.compiled import CompileError, machine_code
from ggml_sched.backends.cupy.device import (
    ALIGNMENT,
    Blas,
    CapturedGraph,
    Device,
    DeviceError,
    DeviceOutOfMemory,
    Function,
    KernelArguments,
    Memory,
    Stream,
    StreamEvent,
    block_of,
    bytes_of,
)
from ggml_sched.backends.cupy.source import entries, entry_of, kernel_source
from ggml_sched.errors import BackendError

__all__ = ["CupyDevice", "CupyFunction", "Program", "open_device", "program_of"]

PLAIN_SHARED = 48 << 10
"""The most bytes of dynamic shared memory for which no attribute of the kernel has to be set."""

NO_MEMORY = 2           # cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY
BLAS_NO_MEMORY = 3      # CUBLAS_STATUS_ALLOC_FAILED; from CUDA itself, 3 means that it is not initialised
NO_DRIVER = 35          # cudaErrorInsufficientDriver: no driver, or one that is too old
NO_DEVICE = 100         # cudaErrorNoDevice
IS_PEER = 704           # cudaErrorPeerAccessAlreadyEnabled


OVERLAPPING = 12030     # the first driver, CUDA 12.3, whose captured graphs keep that a launch may begin early
PROGRAMMATIC_SERIALIZATION = 6      # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes; `allowed`: its member
    programmaticStreamSerializationAllowed."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("allowed", ctypes.c_int),
                ("rest", ctypes.c_char * 60))

    def __init__(self, number: int, allowed: int) -> None:
        super().__init__(id=number, allowed=allowed)


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (*((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(LaunchAttribute)),
                ("n_attributes", ctypes.c_uint))


def extended_launch() -> Callable[..., int] | None:
    """The driver's cuLaunchKernelEx, which CuPy does not bind; None where the driver has none."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        found = library.cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_void_p,) * 4
    found.restype = ctypes.c_int
    return cast("Callable[..., int]", found)


def open_device(number: int = 0) -> CupyDevice:
    """GPU number `number`; BackendError says what is missing: CuPy, a driver, any GPU, this GPU, or NVRTC."""
    number = index(number)
    try:
        import cupy
        from cupy.cuda import runtime
    except ImportError as error:
        raise BackendError(f"a CUDA device needs CuPy: pip install ggml-sched[cuda13], or ggml-sched[cuda12] for "
                           f"drivers before 580 ({error})") from error
    except OSError as error:
        raise BackendError(f"CuPy does not start, because it cannot make its folder of compiled kernels: let "
                           f"CUPY_CACHE_DIR name one that can be written ({error})") from error
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        version = runtime.runtimeGetVersion()
        needed = f"CuPy {cupy.__version__} was made for CUDA {version // 1000}.{version % 1000 // 10}"
        if error.status == NO_DRIVER:
            raise BackendError(f"no NVIDIA driver, or one that is too old: {needed}; install a newer driver, or "
                               f"ggml-sched[cuda12] for an older one ({error})") from error
        if error.status != NO_DEVICE:
            raise BackendError(f"CUDA does not start: {error} ({needed})") from error
        count = 0
    if not 0 <= number < count:
        there = "there is none" if not count else f"there are 0 to {count - 1}" if count > 1 else "there is only 0"
        raise BackendError(f"no CUDA device {number}: {there} (CUDA_VISIBLE_DEVICES decides which are seen)")
    _check_compiler(runtime.runtimeGetVersion() // 1000)
    try:
        return CupyDevice(number)
    except (runtime.CUDARuntimeError, DeviceError) as error:
        raise BackendError(f"CUDA device {number} does not open: {error}") from error


def _check_compiler(major: int) -> None:
    """BackendError where CuPy's wheel came without NVRTC, and no CUDA toolkit is installed."""
    try:
        from cupy_backends.cuda.libs import nvrtc
        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise BackendError(f"CuPy finds no NVRTC, which compiles the kernels: pip install 'cupy-cuda{major}x[ctk]', or "
                           f"install CUDA {major} ({str(error).partition(chr(10))[0]})") from error


class Program(NamedTuple):
    """Kernels that are compiled together: those of one entry in the lists of kernels of a file, or, for entry "", those
    of no list (source.py).  `overlap`: see `Device.function`."""

    file: str
    entry: str
    overlap: bool

    @property
    def name(self) -> str:
        """The file, and the entry where there is one."""
        return "-".join(filter(None, (self.file, self.entry)))

    def compiled(self, nvrtc: ModuleType, arch: str) -> bytes:
        """The machine code: from CuPy's folder of kernels, or compiled; CompileError."""
        return machine_code(nvrtc, self.name, kernel_source(self.file, entry=self.entry, overlap=self.overlap), arch)


def program_of(kernel: str, overlap: bool) -> Program:
    """The program of a kernel "file.name"."""
    file, _, name = kernel.partition(".")
    return Program(file, entry_of(_entries(file), name), overlap)


@cache
def _entries(file: str) -> frozenset[str]:
    try:
        return entries(kernel_source(file))
    except OSError as error:
        raise DeviceError(f"no kernels {file}: {error}") from None


class _Entered:
    """In its `with` block the device is the thread's current one, and CUDA's errors are raised as DeviceErrors.

    Each object serves one `with`, because `before`, the context that was current before, is that of one thread.  A
    context is restored, not a device: that would make the device's context, of some 500 MB, if there was none.
    """

    __slots__ = ("before", "device")

    def __init__(self, device: CupyDevice) -> None:
        self.device: CupyDevice = device

    def __enter__(self) -> None:
        device = self.device
        if device.is_closed:
            raise DeviceError(f"{device.name} is closed")
        self.before: int | None = None
        try:
            before = device.driver.ctxGetCurrent()
            if not device.context:
                device.runtime.setDevice(device.number)
            elif before != device.context:
                device.driver.ctxSetCurrent(device.context)
            else:
                return
            # A thread without a context uses device 0 anyway: if this is device 0, nothing has to be restored.
            if before or device.number:
                self.before = before
        except device.errors as error:
            raise device.failure(error) from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        device = self.device
        failure = device.failure(error) if isinstance(error, device.errors) else None
        if self.before is not None:
            with suppress(*device.errors):      # fails if the context has been destroyed
                device.driver.ctxSetCurrent(self.before)
        if failure is not None:
            raise failure from error


class CupyDevice(Device):
    """One GPU.  `runtime` and `driver` are CuPy's bindings of CUDA."""

    def __init__(self, number: int) -> None:
        import cupy
        from cupy.cuda import driver, runtime
        self.cupy: ModuleType = cupy
        self.runtime: ModuleType = runtime
        self.driver: ModuleType = driver
        self.cuda_errors: tuple[type[Exception], ...] = (runtime.CUDARuntimeError, driver.CUDADriverError)
        self.errors: tuple[type[Exception], ...] = self.cuda_errors
        self.to_device: int = runtime.memcpyHostToDevice
        self.to_host: int = runtime.memcpyDeviceToHost
        self.number = number
        self.pid: int = os.getpid()
        self.is_closed: bool = False
        self.context: int = 0       # the device's primary context, which CUDA's runtime uses
        self.name: str = f"CUDA device {number}"
        with self.entered:
            self.context = driver.ctxGetCurrent()
            about = runtime.getDeviceProperties(number)
            self.name = about["name"].decode(errors="replace")
            self.arch: str = f"sm_{about['major']}{about['minor']}"
            self.n_multiprocessors: int = about["multiProcessorCount"]
            self.launch_early: Callable[..., int] | None = None
            if about["major"] >= 9 and runtime.driverGetVersion() >= OVERLAPPING:
                self.launch_early = extended_launch()
            self.can_overlap: bool = self.launch_early is not None
            self.max_shared: int = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, number)
        self.owned: weakref.WeakSet[_Owner | _Made] = weakref.WeakSet()
        self._programs: dict[Program, Any] = {}        # CuPy's modules
        self._pinned: list[tuple[weakref.ref[object], int, int]] = []
        self._peers: dict[int, bool] = {number: True}
        self.capturing: set[int] = set()        # ids of the threads that capture a stream of this device
        self.collected: list[int] = []          # addresses of memory to be freed when no stream is captured
        _keep_in_children(self)

    @property
    def entered(self) -> _Entered:
        """A new context manager, for one `with`: see `_Entered`."""
        return _Entered(self)

    def call(self, function: str, *args: object) -> Any:
        """Call a function of CUDA's runtime."""
        with self.entered:
            return getattr(self.runtime, function)(*args)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that opened the device."""
        return self.pid == os.getpid()

    def owners(self) -> list[object]:
        """The live objects that own memory or handles of CUDA, pinned memory included, which are given back with their
        last reference."""
        return [*self.owned, *(ref() for ref, _, _ in self._pinned)]

    def failure(self, error: Exception, needed: int = 0) -> DeviceError:
        """The DeviceError for an error of CUDA; `needed`: the bytes that an allocation wanted."""
        expected = NO_MEMORY if isinstance(error, self.cuda_errors) else BLAS_NO_MEMORY
        if getattr(error, "status", None) != expected:
            return DeviceError(f"{self.name}: {error}")
        try:
            return DeviceOutOfMemory(needed, self.runtime.memGetInfo()[0])
        except self.errors:
            return DeviceOutOfMemory(needed, 0)

    # -- memory --------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        free, total = self.call("memGetInfo")
        return int(free), int(total)

    def alloc(self, n: int) -> CupyMemory:
        if n < 0:
            raise ValueError(f"no memory has {n} bytes")
        with self.entered:
            try:
                return CupyMemory(self, n)
            except self.errors as error:
                raise self.failure(error, n) from error

    def pinned(self, n: int) -> np.ndarray:
        if n == 0:
            return np.empty(0, np.uint8)
        with self.entered:
            try:
                memory = self.cupy.cuda.PinnedMemory(n, self.runtime.hostAllocPortable)
            except self.runtime.CUDARuntimeError as error:
                raise DeviceError(f"no {n} bytes of page-locked memory: {error}") from error
            found = np.frombuffer(self.cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, n)
        self._pinned = [known for known in self._pinned if known[0]() is not None]
        self._pinned.append((weakref.ref(memory), memory.ptr, memory.ptr + n))
        return found

    def is_pinned(self, data: np.ndarray) -> bool:
        start = data.ctypes.data
        return any(first <= start and start + data.size <= end and ref() is not None
                   for ref, first, end in self._pinned)

    # -- the rest --------------------------------------------------------------------

    def stream(self) -> CupyStream:
        with self.entered:
            return CupyStream(self, self.cupy.cuda.Stream(non_blocking=True))

    def event(self) -> CupyStreamEvent:
        with self.entered:
            return CupyStreamEvent(self, self.cupy.cuda.Event(disable_timing=True))

    def function(self, name: str, *, overlap: bool = False) -> CupyFunction:
        kernel = name.partition(".")[2]
        self.load([name], overlap=overlap)
        with self.entered:
            try:
                return CupyFunction(self, name, self._programs[program_of(name, overlap)].get_function(kernel))
            except self.driver.CUDADriverError as error:
                if "NOT_FOUND" not in str(error):
                    raise
                raise DeviceError(f"no kernel {name}: not in {name.partition('.')[0]}.cu") from error

    def load(self, kernels: Iterable[str], *, overlap: bool = False) -> None:
        named = dict.fromkeys(program_of(kernel, overlap) for kernel in kernels)
        wanted = [program for program in named if program not in self._programs]
        if not wanted:
            return
        with ThreadPoolExecutor(min(len(wanted), os.cpu_count() or 1)) as pool:
            codes = list(pool.map(self._machine_code, wanted))
        with self.entered:
            for program, code in zip(wanted, codes, strict=True):
                module = self.cupy.cuda.function.Module()
                module.load(code)
                self._programs[program] = module

    def _machine_code(self, program: Program) -> bytes:
        from cupy_backends.cuda.libs import nvrtc
        try:
            return program.compiled(nvrtc, self.arch)
        except CompileError as error:
            raise DeviceError(f"{program.file}.cu does not compile for {self.arch}: {error}") from error

    def can_access(self, other: Device) -> bool:
        if not isinstance(other, CupyDevice):
            return False
        if other.number not in self._peers:
            with self.entered:
                is_peer = bool(self.runtime.deviceCanAccessPeer(self.number, other.number))
                if is_peer:
                    try:
                        self.runtime.deviceEnablePeerAccess(other.number)
                    except self.runtime.CUDARuntimeError as error:
                        if error.status != IS_PEER:
                            raise
            self._peers[other.number] = is_peer
        return self._peers[other.number]

    def blas(self) -> CupyBlas | None:
        """A new handle of cuBLAS.  None where cuBLAS is not installed: CuPy's wheels leave it out."""
        try:
            from cupy_backends.cuda.libs import cublas
        except ImportError:
            return None
        with self.entered:
            return CupyBlas(self, cublas)

    def synchronize(self) -> None:
        self.call("deviceSynchronize")

    def free_collected(self) -> None:
        """Free the memory in `collected`, unless a stream is captured."""
        while self.collected and not self.capturing and self.is_here:
            with suppress(IndexError, DeviceError), self.entered:   # another thread may have taken the last address
                _take(self.collected, self.runtime.free)

    def close(self) -> None:
        if self.is_closed:
            return
        if not self.is_here:
            self.is_closed = True
            return
        try:
            self.synchronize()
        finally:
            for owner in list(self.owned):
                owner.drop()
            self.owned.clear()
            self.is_closed = True


def _keep_in_children(device: CupyDevice) -> None:
    """Let each forked child process keep references to what the device has at the fork.  Without references CuPy would
    give these objects back, which calls CUDA, and CUDA does not work in a forked process."""
    opened = weakref.ref(device)
    kept: list[object] = []

    def keep() -> None:
        device = opened()
        if device is not None and not device.is_closed:
            kept.extend(device.owners())

    os.register_at_fork(after_in_child=keep)


class _Owner:
    """Owns a handle of CUDA, which is given back by `drop`, when the device closes, or with the last reference."""

    def _own(self, device: CupyDevice, give_back: Callable[[CupyDevice, list[int]], object],
             make: Callable[..., int], *args: object) -> int:
        """Make a handle by `make(*args)`; `give_back(device, handles)` gives those in a list back, and empties it.

        A handle is made and put into the list, from which the finalizer takes it, by one call of C, in which no signal
        handler runs: an interrupt finds no handle without an owner.
        """
        self._device: CupyDevice = device
        self._handles: list[int] = []
        self._end: Callable[[], object] = partial(give_back, device, self._handles)
        weakref.finalize(self, self._end).atexit = False
        device.owned.add(self)
        self._handles.extend(starmap(make, (args,)))
        return int(self._handles[0])

    def drop(self) -> None:
        self._end()


def _take(handles: list[int], function: Callable[[int], object]) -> None:
    """Take the last handle off a list, and call a function with it: by one call of C, as in `_own`.  IndexError if
    there is none."""
    next(map(function, iter(handles.pop, None)))


def _destroy(function: Callable[[int], object], device: CupyDevice, handles: list[int]) -> None:
    """Destroy an object of CUDA by `function(handle)`.  Errors are dropped, as finalizers have no caller for them."""
    if handles and device.is_here:
        with suppress(DeviceError, IndexError), device.entered:
            _take(handles, function)


class CupyMemory(_Owner, Memory):
    """Memory of cudaMalloc itself.  Unlike `drop`, `free` raises the errors of giving it back."""

    def __init__(self, device: CupyDevice, n: int) -> None:
        self.ptr: int = self._own(device, _give_back, device.runtime.malloc, max(n, 1))
        self.size = n
        if self.ptr % ALIGNMENT:
            self.drop()
            raise DeviceError(f"{device.name}: memory at {self.ptr:#x}, which is no multiple of {ALIGNMENT}")

    def free(self) -> None:
        device = self._device
        if not self._handles or device.is_closed or not device.is_here:
            return
        if threading.get_ident() in device.capturing:
            raise DeviceError("freeing memory while a stream is captured")
        with suppress(IndexError), device.entered:      # another thread may have freed it
            _take(self._handles, device.runtime.free)   # cudaFree waits for the device


def _give_back(device: CupyDevice, handles: list[int]) -> None:
    """Free memory without references, or of a device that closes; errors are dropped.

    The garbage collector may call this at any time.  During a capture, which a cudaFree could invalidate, the memory is
    freed only at the end of the capture."""
    with suppress(IndexError):
        _take(handles, device.collected.append)
    device.free_collected()


class _Made:
    """An object of a device that CuPy made, kept alive by `made`; `ptr` is CUDA's handle, where there is one."""

    def __init__(self, device: CupyDevice, made: Any) -> None:
        self._device = device
        self.made: Any = made
        self.ptr: int | None = getattr(made, "ptr", None)
        device.owned.add(self)

    def drop(self) -> None:
        self.made = None


class CupyStreamEvent(_Made, StreamEvent):
    def synchronize(self) -> None:
        self._device.call("eventSynchronize", self.ptr)

    def query(self) -> bool:
        status: int = self._device.call("eventQuery", self.ptr)
        if status not in (0, 600):          # cudaSuccess, cudaErrorNotReady
            raise DeviceError(f"{self._device.name}: querying an event gives CUDA error {status}")
        return status == 0


class CupyCapturedGraph(_Owner, CapturedGraph):
    """An executable graph.

    CuPy's own graph is not used, because it leaks what was captured if no executable graph can be made of it.
    """

    def __init__(self, device: CupyDevice, graph: int) -> None:
        runtime = device.runtime
        self.ptr: int = self._own(device, partial(_destroy, runtime.graphExecDestroy), runtime.graphInstantiate, graph)

    def launch(self, stream: Stream) -> None:
        if not self._handles:
            raise DeviceError("a graph is launched that was freed")
        self._device.call("graphLaunch", self.ptr, cast("CupyStream", stream).ptr)

    def free(self) -> None:
        self.drop()


class _Recorded(_Owner):
    """The graph, not executable, that the end of a stream's capture gives."""

    def __init__(self, device: CupyDevice, stream: int | None) -> None:
        runtime = device.runtime
        self.ptr: int = self._own(device, partial(_destroy, runtime.graphDestroy), runtime.streamEndCapture, stream)


class CupyStream(_Made, Stream):
    is_capturing: bool = False
    _thread = 0
    """The id of the thread that began the capture."""

    def synchronize(self) -> None:
        self._device.call("streamSynchronize", self.ptr)

    def record(self, event: StreamEvent) -> None:
        self._device.call("eventRecord", cast("CupyStreamEvent", event).ptr, self.ptr)

    def wait(self, event: StreamEvent) -> None:
        self._device.call("streamWaitEvent", self.ptr, cast("CupyStreamEvent", event).ptr)

    def _copy(self, to: int, start: int, n: int, kind: str) -> None:
        if n:
            self._device.call("memcpyAsync", int(to), int(start), int(n), getattr(self._device.runtime, kind), self.ptr)

    def copy_in(self, memory_ptr: int, host: np.ndarray) -> None:
        data = bytes_of(host)
        if self.is_capturing and not self._device.is_pinned(data):
            raise DeviceError("copying from pageable memory while the stream is captured")
        self._copy(memory_ptr, data.ctypes.data, data.size, "memcpyHostToDevice")

    def copy_out(self, host: np.ndarray, memory_ptr: int) -> None:
        data = bytes_of(host, writing=True)
        is_pinned = self._device.is_pinned(data)
        if self.is_capturing and not is_pinned:
            raise DeviceError("copying to pageable memory while the stream is captured")
        self._copy(data.ctypes.data, memory_ptr, data.size, "memcpyDeviceToHost")
        if data.size and not is_pinned:
            self.synchronize()

    def pinned_in(self, memory_ptr: int, host_ptr: int, n: int) -> None:
        device = self._device
        with _Entered(device):
            device.runtime.memcpyAsync(memory_ptr, host_ptr, n, device.to_device, self.ptr)

    def pinned_out(self, host_ptr: int, memory_ptr: int, n: int) -> None:
        device = self._device
        with _Entered(device):
            device.runtime.memcpyAsync(host_ptr, memory_ptr, n, device.to_host, self.ptr)

    def copy(self, dst_ptr: int, src_ptr: int, n: int) -> None:
        self._copy(dst_ptr, src_ptr, n, "memcpyDefault")      # CUDA finds the devices by the addresses

    def fill(self, ptr: int, value: int, n: int) -> None:
        if not 0 <= value < 256:
            raise ValueError(f"fill takes a byte, not {value}")
        if n:
            self._device.call("memsetAsync", int(ptr), int(value), int(n), self.ptr)

    def begin_capture(self) -> None:
        if self.is_capturing:
            raise DeviceError("beginning another capture of a stream")
        with self._device.entered:
            # Other modes refuse calls that Python's garbage collector may cause: freeing events and pinned memory.
            self.made.begin_capture(self._device.runtime.streamCaptureModeRelaxed)
        self.is_capturing = True
        self._thread = threading.get_ident()
        self._device.capturing.add(self._thread)

    def end_capture(self) -> CupyCapturedGraph:
        if not self.is_capturing:
            raise DeviceError("end_capture without begin_capture")
        self.is_capturing = False
        device = self._device
        try:
            with device.entered:
                graph = _Recorded(device, self.ptr)
                try:
                    return CupyCapturedGraph(device, graph.ptr)
                finally:
                    graph.drop()
        finally:
            device.capturing.discard(self._thread)
            device.free_collected()


class CupyFunction(Function):
    def __init__(self, device: CupyDevice, name: str, kernel: Any) -> None:
        self.name = name
        self._device = device
        self._kernel = kernel
        self._ptr = kernel.ptr
        self._launch = device.driver.launchKernel
        self._shared = PLAIN_SHARED

    def launch(
        self, grid: Sequence[int], block: Sequence[int], packed: KernelArguments, shared: int, stream: Stream,
        early: bool = False,
    ) -> None:
        try:
            with self._device.entered:
                if shared > self._shared:
                    self._device.driver.funcSetAttribute(
                        self._ptr, self._device.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
                    self._shared = shared
                sizes, to = (*block_of(grid, self.name), *block_of(block, self.name)), cast("CupyStream", stream).ptr
                launch_early = self._device.launch_early
                if not early or launch_early is None:
                    self._launch(self._ptr, *sizes, shared, to, packed.address, 0)
                    return
                attribute = LaunchAttribute(PROGRAMMATIC_SERIALIZATION, allowed=1)
                config = LaunchConfig(*sizes, shared, to, ctypes.pointer(attribute), 1)
                status = launch_early(ctypes.byref(config), self._ptr, packed.address, None)
                if status:
                    raise self._device.driver.CUDADriverError(status)
        except DeviceOutOfMemory:
            raise
        except DeviceError as error:
            raise DeviceError(f"{self.name}, grid {tuple(grid)}, block {tuple(block)}, {shared} bytes of shared "
                              f"memory: {error}") from error


class CupyBlas(_Owner, Blas):
    """A handle of cuBLAS.

    In every call CuPy's bindings set the stream of the handle to the thread's current stream, so `gemm` makes the
    product's stream the current one.  Setting the stream and multiplying are not atomic: so each backend has a handle
    of its own, which it uses under its lock.
    """

    def __init__(self, device: CupyDevice, cublas: ModuleType) -> None:
        self._cublas = cublas
        self._factors = np.array([1, 0], np.float32)        # alpha and beta, on the host
        if cublas.CUBLASError not in device.errors:
            device.errors = (*device.errors, cublas.CUBLASError)
        self._handle: int = self._own(device, partial(_destroy, cublas.destroy), cublas.create)

    def gemm(
        self, stream: Stream, m: int, n: int, k: int, a: int, lda: int, b: int, ldb: int, c: int, ldc: int,
        batch: int = 1, stride_a: int = 0, stride_b: int = 0, stride_c: int = 0,
    ) -> None:
        if stream.is_capturing:
            raise DeviceError("cuBLAS while the stream is captured")
        if not self._handles:
            raise DeviceError("a product by a handle of cuBLAS that is closed")
        lib, runtime, alpha = self._cublas, self._device.runtime, self._factors.ctypes.data
        half, single, beta = runtime.CUDA_R_16F, runtime.CUDA_R_32F, alpha + 4
        with self._device.entered, cast("CupyStream", stream).made:
            # cuBLAS stores matrices column by column: our rows are its columns, hence the transposed first operand.
            if batch == 1:
                lib.gemmEx(self._handle, lib.CUBLAS_OP_T, lib.CUBLAS_OP_N, m, n, k, alpha, a, half, lda, b, half, ldb,
                           beta, c, single, ldc, lib.CUBLAS_COMPUTE_32F, lib.CUBLAS_GEMM_DEFAULT)
            else:
                lib.gemmStridedBatchedEx(
                    self._handle, lib.CUBLAS_OP_T, lib.CUBLAS_OP_N, m, n, k, alpha, a, half, lda, stride_a, b, half,
                    ldb, stride_b, beta, c, single, ldc, stride_c, batch, lib.CUBLAS_COMPUTE_32F,
                    lib.CUBLAS_GEMM_DEFAULT)

    def close(self) -> None:
        self.drop()
