"""Functions of CUDA's driver, cu*: contexts, modules and launches.

A module is a cubin of NVRTC.  A launch is checked against it, and then runs the kernel of the same name as the emulator
compiles it for the host, whose parameters and launch bound have to be those of the cubin.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_uint
from ctypes import c_void_p as pointer
from functools import cache
from typing import NamedTuple

from cuda_emulator.compile import compiler, kernels_of
from cuda_emulator.kernels import load

from cuda_stub import elf
from cuda_stub import world as codes
from cuda_stub.calls import Calls, store
from cuda_stub.runtime import MAX_SHARED, PLAIN_SHARED
from cuda_stub.world import CONTEXTS, NAMES, CudaError, World
from ggml_sched.backends.cupy.source import KERNELS, kernel_source

__all__ = ["DRIVER"]

DRIVER = Calls()
DYNAMIC_SHARED = 8      # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MAX_GRID = ((1 << 31) - 1, 65535, 65535)

_texts: dict[str, ctypes.Array] = {}


def _text(said: str) -> int:
    return ctypes.addressof(_texts.setdefault(said, ctypes.create_string_buffer(said.encode())))


class Loaded(NamedTuple):
    """A module: its kernels by name, and the library of the same kernels for the host; None: not of this package."""

    kernels: dict[str, elf.Kernel]
    library: ctypes.PyDLL | None


class Function:
    """A kernel of a module; `shared`: bytes of dynamic shared memory that a launch may have."""

    def __init__(self, name: str, about: elf.Kernel, library: ctypes.PyDLL | None) -> None:
        self.name = name
        self.about = about
        self.library = library
        self.shared = PLAIN_SHARED


@DRIVER(c_int, pointer)
def cuGetErrorName(world: World, status: int, result: int) -> None:
    store(result, _text(f"CUDA_ERROR_{NAMES.get(status, status)}"))


@DRIVER(c_int, pointer)
def cuGetErrorString(world: World, status: int, result: int) -> None:
    store(result, _text(f"the stub says {NAMES.get(status, status)}"))


@DRIVER(pointer)
def cuCtxGetCurrent(world: World, result: int) -> None:
    store(result, world.context)


@DRIVER(pointer)
def cuCtxSetCurrent(world: World, context: int) -> None:
    world.context = context


@DRIVER(pointer)
def cuCtxGetDevice(world: World, result: int) -> None:
    if not world.context:
        raise CudaError(codes.NO_CONTEXT)
    store(result, world.context - CONTEXTS, c_int)


# -- modules --------------------------------------------------------------------------------

_libraries: dict[str, ctypes.PyDLL] = {}


def _library(kernels: dict[str, elf.Kernel]) -> ctypes.PyDLL | None:
    """The host's library of the kernel file that has these kernels, and maybe others.  Where several files have kernels
    of the same names, their parameters decide."""
    found = None
    for path in sorted(KERNELS.glob("*.cu")):
        if kernels.keys() <= _names(path.stem):
            if path.stem not in _libraries:
                _libraries[path.stem] = load(path.stem, KERNELS, ())
            found = _libraries[path.stem]
            if all(_described(found, name)[0] == kernel.sizes for name, kernel in kernels.items()):
                break
    return found


@cache
def _names(file: str) -> frozenset[str]:
    return frozenset(kernels_of(compiler(), kernel_source(file)))


def _described(library: ctypes.PyDLL, kernel: str) -> tuple[tuple[int, ...], int]:
    """The bytes of each parameter of the host's kernel, and its launch bound."""
    sizes, kinds, threads = (c_uint * 256)(), ctypes.create_string_buffer(256), c_int()
    n = library[f"host_describe_{kernel}"](sizes, kinds, ctypes.byref(threads))
    return tuple(sizes[:n]), threads.value


@DRIVER(pointer, pointer)
def cuModuleLoadData(world: World, result: int, image: int) -> None:
    world.refuse_in_capture("cuModuleLoadData")
    if not world.context:
        raise CudaError(codes.NO_CONTEXT)
    size = elf.size_of_image(ctypes.string_at(image, 64), lambda n: ctypes.string_at(image, n))
    found = elf.kernels(ctypes.string_at(image, size))
    handle = world.handle()
    world.modules[handle] = Loaded(found, _library(found))
    store(result, handle)


@DRIVER(pointer)
def cuModuleUnload(world: World, module: int) -> None:
    if world.modules.pop(module, None) is None:
        raise CudaError(codes.BAD_HANDLE)


@DRIVER(pointer, pointer, c_char_p)
def cuModuleGetFunction(world: World, result: int, module: int, name: bytes) -> None:
    loaded = world.modules.get(module)
    if loaded is None:
        raise CudaError(codes.BAD_HANDLE)
    kernel = name.decode()
    if kernel not in loaded.kernels:
        raise CudaError(codes.NOT_FOUND, kernel)
    function = Function(kernel, loaded.kernels[kernel], loaded.library)
    _compare(world, function)
    handle = world.handle()
    world.functions[handle] = function
    store(result, handle)


def _compare(world: World, function: Function) -> None:
    """Complain where the cubin and the host's library disagree about a kernel's parameters or launch bound."""
    if function.library is None:
        return
    sizes, threads = _described(function.library, function.name)
    for what, there, here in (("bytes of parameters", function.about.sizes, sizes),
                              ("launch bound", function.about.most_threads, threads)):
        if there != here:
            world.complaints.append(f"{function.name}: {what} {there} in the cubin, {here} on the host")


@DRIVER(pointer, c_int, pointer)
def cuFuncGetAttribute(world: World, result: int, attribute: int, function: int) -> None:
    store(result, 0, c_int)


@DRIVER(pointer, c_int, c_int)
def cuFuncSetAttribute(world: World, function: int, attribute: int, value: int) -> None:
    found = world.functions.get(function)
    if found is None:
        raise CudaError(codes.BAD_HANDLE)
    if attribute == DYNAMIC_SHARED:
        if value + found.about.shared > MAX_SHARED:
            raise CudaError(codes.INVALID_VALUE, f"{value} bytes of shared memory")
        found.shared = value


# -- launches -------------------------------------------------------------------------------

@DRIVER(pointer, *[c_uint] * 7, pointer, pointer, pointer)
def cuLaunchKernel(world: World, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int,
                   stream: int, args: int, extra: int) -> None:
    _queue_launch(world, function, (gx, gy, gz), (bx, by, bz), shared, stream, args, early=False)


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_uint), ("value", c_int * 17))      # of the value, 64 bytes, all but the padding before it

    @property
    def first(self) -> int:
        """The first member of the value, which begins at a multiple of 8."""
        return self.value[1]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", pointer),
                ("attributes", ctypes.POINTER(LaunchAttribute)), ("n_attributes", c_uint))


PROGRAMMATIC_SERIALIZATION = 6      # of CUlaunchAttributeID
HOPPER = 90


@DRIVER(pointer, pointer, pointer, pointer)
def cuLaunchKernelEx(world: World, config: int, function: int, args: int, extra: int) -> None:
    how = ctypes.cast(config, ctypes.POINTER(LaunchConfig))[0]
    early = False
    for i in range(how.n_attributes):
        attribute = how.attributes[i]
        if attribute.id != PROGRAMMATIC_SERIALIZATION:
            raise CudaError(codes.NOT_SUPPORTED, f"launch attribute {attribute.id}")
        early = bool(attribute.first)
    if early and world.arch < HOPPER:
        raise CudaError(codes.NOT_SUPPORTED, f"programmatic launches on sm_{world.arch}")
    _queue_launch(world, function, tuple(how.grid), tuple(how.block), how.shared, how.stream or 0, args, early)


def _queue_launch(world: World, function: int, grid: tuple[int, ...], block: tuple[int, ...], shared: int,
                  stream: int, args: int, early: bool) -> None:
    (gx, gy, gz), (bx, by, bz) = grid, block
    found = world.functions.get(function)
    if found is None:
        raise CudaError(codes.BAD_HANDLE, "no function")
    if not world.context:
        raise CudaError(codes.NO_CONTEXT)
    if world.stream(stream).device != world.device:
        raise CudaError(codes.BAD_HANDLE, "a stream of another device")
    about: elf.Kernel = found.about
    if not all(1 <= n <= limit for n, limit in zip((gx, gy, gz), MAX_GRID, strict=True)):
        raise CudaError(codes.INVALID_VALUE, f"a grid of {gx}, {gy}, {gz}")
    if not 1 <= bx * by * bz <= min(about.most_threads, 1024):
        raise CudaError(codes.INVALID_VALUE, f"{bx * by * bz} threads, the bound is {about.most_threads}")
    if shared + about.shared > max(found.shared, PLAIN_SHARED):
        raise CudaError(codes.INVALID_VALUE, f"{shared} bytes of shared memory")
    world.launched[found.name] += 1
    if early:
        world.early[found.name] += 1
    addresses = ctypes.cast(args, ctypes.POINTER(ctypes.c_uint64))
    values = [ctypes.string_at(addresses[i], size) for i, size in enumerate(about.sizes)]
    world.queue(stream, f"launch {found.name}", _launch(world, found, (gx, gy, gz, bx, by, bz), shared, values, early))


def _launch(world: World, function: Function, sizes: tuple[int, ...], shared: int, values: list[bytes], early: bool):
    """The launch as a piece of work: arguments are those of the call.  Each thread of an `early` one has to wait for
    what is before it."""
    offsets, packed = [], b""
    for value in values:
        offsets.append(len(packed))
        packed += value + bytes(-len(value) % 16)
    arguments = (ctypes.c_uint32 * len(offsets))(*offsets)
    grid = (c_uint * 6)(*sizes)

    def run() -> None:
        library = function.library
        if library is None:
            return
        memory = ctypes.create_string_buffer(packed, len(packed) + 16)
        if early:
            library.host_cuda_early(None, c_uint(0))
        if library[f"host_launch_{function.name}"](grid, c_uint(shared), memory, arguments, c_uint(0), c_uint(0)):
            message = library.host_cuda_message().decode(errors="replace")
            world.complaints.append(f"{function.name}: {message}")
            raise CudaError(codes.BAD_ADDRESS, message)

    return run
