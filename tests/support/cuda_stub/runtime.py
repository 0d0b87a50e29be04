"""Functions of CUDA's runtime, cuda*: devices, memory, streams, events, captures and graphs."""

from __future__ import annotations

import ctypes
import threading
from ctypes import c_int, c_size_t, c_uint, c_ulonglong
from ctypes import c_void_p as pointer

from cuda_stub import world as codes
from cuda_stub.calls import Calls, store
from cuda_stub.world import Capture, CudaError, StreamState, World

__all__ = ["DRIVER_VERSIONS", "KEPT", "MAX_SHARED", "RUNTIME"]

RUNTIME = Calls()
KEPT = frozenset({"cudaGetErrorName", "cudaGetErrorString", "cudaRuntimeGetVersion"})
"""Functions that run as CuPy's wheel has them: they need no device."""
MAX_SHARED = 232_448
"""Bytes of shared memory that a block of sm_90 may have."""
PLAIN_SHARED = 49_152

DRIVER_VERSIONS = {12: 12080, 13: 13000}

# Offsets of fields of cudaDeviceProp; multiProcessorCount moved when CUDA 13 left the clock rate out.
TOTAL_MEMORY, SHARED, REGISTERS, WARP, THREADS, MAJOR, MINOR = 288, 296, 304, 308, 320, 360, 364
MULTIPROCESSORS = {12: 388, 13: 384}


@RUNTIME(pointer)
def cudaGetDeviceCount(world: World, count: int) -> None:
    if not world.n_devices:
        raise CudaError(codes.NO_DEVICE)
    store(count, world.n_devices, c_int)


@RUNTIME(pointer)
def cudaGetDevice(world: World, device: int) -> None:
    store(device, world.device, c_int)


@RUNTIME(c_int)
def cudaSetDevice(world: World, device: int) -> None:
    if not 0 <= device < world.n_devices:
        raise CudaError(codes.BAD_DEVICE)
    world.enter(device)


@RUNTIME(pointer, c_int)
def cudaGetDeviceProperties(world: World, about: int, device: int) -> None:
    if not 0 <= device < world.n_devices:
        raise CudaError(codes.BAD_DEVICE)
    major = world.runtime_version // 1000
    ctypes.memset(about, 0, 700)
    ctypes.memmove(about, b"Stub\0", 5)
    store(about + TOTAL_MEMORY, world.memory)
    store(about + SHARED, PLAIN_SHARED)
    for at, value in ((REGISTERS, 65536), (WARP, 32), (THREADS, 1024), (MAJOR, world.arch // 10),
                      (MINOR, world.arch % 10), (MULTIPROCESSORS[major], world.n_multiprocessors)):
        store(about + at, value, c_int)


RUNTIME(pointer, c_int, name="cudaGetDeviceProperties_v2")(cudaGetDeviceProperties)


@RUNTIME(pointer, c_int, c_int)
def cudaDeviceGetAttribute(world: World, value: int, attribute: int, device: int) -> None:
    known = {1: 1024, 8: PLAIN_SHARED, 16: world.n_multiprocessors, 41: 1, 75: world.arch // 10, 76: world.arch % 10,
             97: MAX_SHARED, 115: 1}
    store(value, known.get(attribute, 0), c_int)


@RUNTIME(pointer)
def cudaDriverGetVersion(world: World, version: int) -> None:
    store(version, world.driver_version, c_int)


@RUNTIME()
def cudaGetLastError(world: World) -> None:
    """No error is kept: each call returns its own."""


@RUNTIME()
def cudaDeviceSynchronize(world: World) -> None:
    world.refuse_in_capture("cudaDeviceSynchronize")
    world.enter()
    world.drain_all()


@RUNTIME(pointer, c_int, c_int)
def cudaDeviceCanAccessPeer(world: World, result: int, device: int, other: int) -> None:
    store(result, int(device != other), c_int)


@RUNTIME(c_int, c_uint)
def cudaDeviceEnablePeerAccess(world: World, other: int, flags: int) -> None:
    world.enter()
    pair = world.device, other
    if pair in world.peers:
        raise CudaError(codes.PEER_ALREADY)
    world.peers.add(pair)


# -- memory -------------------------------------------------------------------------------

@RUNTIME(pointer, c_size_t)
def cudaMalloc(world: World, result: int, size: int) -> None:
    world.refuse_in_capture("cudaMalloc")
    world.enter()
    store(result, world.allocate(size, world.device))


@RUNTIME(pointer)
def cudaFree(world: World, address: int) -> None:
    world.refuse_in_capture("cudaFree")
    world.enter()
    if address:
        world.free(address, on_device=True)


@RUNTIME(pointer, pointer)
def cudaMemGetInfo(world: World, free: int, total: int) -> None:
    world.enter()
    store(free, world.memory - sum(a.size for a in world.allocations.values() if a.device == world.device))
    store(total, world.memory)


@RUNTIME(pointer, c_size_t, c_uint)
def cudaHostAlloc(world: World, result: int, size: int, flags: int) -> None:
    world.refuse_in_capture("cudaHostAlloc")
    world.enter()
    store(result, world.allocate(size, -1))


@RUNTIME(pointer)
def cudaFreeHost(world: World, address: int) -> None:
    world.refuse_in_capture("cudaFreeHost")
    world.free(address, on_device=False)


HOST = ("pinned", "pageable")
KINDS = {1: (HOST, ("device",)), 2: (("device",), HOST), 3: (("device",), ("device",))}
"""{kind of a copy: where its source may lie, where its destination}; other kinds go by the addresses."""


@RUNTIME(pointer, pointer, c_size_t, c_int, pointer)
def cudaMemcpyAsync(world: World, to: int, start: int, size: int, kind: int, stream: int) -> None:
    world.enter()
    source, target = world.kind_of(start, size), world.kind_of(to, size)
    if kind in KINDS and not (source in KINDS[kind][0] and target in KINDS[kind][1]):
        raise CudaError(codes.INVALID_VALUE, f"a copy of kind {kind} from {source} to {target} memory")
    capture = world.stream(stream).capture
    if capture is not None and "pageable" in (source, target):
        capture.is_invalid = True
        raise CudaError(codes.CAPTURE_FORBIDS, "a copy of pageable memory while the stream is captured")
    what = f"copy from {source} to {target}"
    if source == "pageable":            # read before the call returns
        data = ctypes.string_at(start, size)
        world.queue(stream, what, lambda: _move(to, data, size))
    else:
        world.queue(stream, what, lambda: _move(to, start, size))


def _move(to: int, source: int | bytes, size: int) -> None:
    ctypes.memmove(to, source, size)


@RUNTIME(pointer, c_int, c_size_t, pointer)
def cudaMemsetAsync(world: World, to: int, value: int, size: int, stream: int) -> None:
    world.enter()
    if world.kind_of(to, size) != "device":
        raise CudaError(codes.INVALID_VALUE, "filling host memory")

    def fill() -> None:
        ctypes.memset(to, value, size)

    world.queue(stream, "fill", fill)


# -- streams and events -------------------------------------------------------------------

@RUNTIME(pointer, c_uint, name="cudaStreamCreateWithFlags")
@RUNTIME(pointer, name="cudaStreamCreate")
@RUNTIME(pointer, c_uint, c_int, name="cudaStreamCreateWithPriority")
def new_stream(world: World, result: int, flags: int = 0, priority: int = 0) -> None:
    world.enter()
    handle = world.handle()
    world.streams[handle] = StreamState(world.device)
    store(result, handle)


@RUNTIME(pointer)
def cudaStreamDestroy(world: World, stream: int) -> None:
    world.stream(stream)
    world.drain(stream)
    del world.streams[stream]


@RUNTIME(pointer)
def cudaStreamSynchronize(world: World, stream: int) -> None:
    world.enter()
    capture = world.stream(stream).capture
    if capture is not None:
        capture.is_invalid = True
        raise CudaError(codes.CAPTURE_FORBIDS, "waiting for a stream that is captured")
    world.drain(stream)


@RUNTIME(pointer, pointer, c_uint)
def cudaStreamWaitEvent(world: World, stream: int, event: int, flags: int) -> None:
    world.enter()
    if event not in world.events:
        raise CudaError(codes.BAD_HANDLE, f"event {event:#x}")
    mark = world.marks.get(event)
    if mark is not None and world.stream(stream).capture is None:
        world.queue(stream, "wait", lambda: world.drain(*mark))


@RUNTIME(pointer, pointer)
def cudaStreamIsCapturing(world: World, stream: int, result: int) -> None:
    capture = world.stream(stream).capture
    store(result, 0 if capture is None else 2 if capture.is_invalid else 1, c_int)


@RUNTIME(pointer, c_uint, name="cudaEventCreateWithFlags")
@RUNTIME(pointer, name="cudaEventCreate")
def new_event(world: World, result: int, flags: int = 0) -> None:
    world.enter()
    handle = world.handle()
    world.events[handle] = world.device
    store(result, handle)


@RUNTIME(pointer)
def cudaEventDestroy(world: World, event: int) -> None:
    if world.events.pop(event, None) is None:
        raise CudaError(codes.BAD_HANDLE)
    world.marks.pop(event, None)


@RUNTIME(pointer, pointer)
def cudaEventRecord(world: World, event: int, stream: int) -> None:
    world.enter()
    found = world.stream(stream)
    if world.events.get(event) != found.device:
        raise CudaError(codes.BAD_HANDLE, "an event and a stream of two devices")
    if found.capture is None:
        world.queue(stream, "record", lambda: None)
        world.marks[event] = stream, found.n_queued


@RUNTIME(pointer)
def cudaEventQuery(world: World, event: int) -> int | None:
    if event not in world.events:
        raise CudaError(codes.BAD_HANDLE)
    return None if world.has_passed(event) else codes.NOT_READY


@RUNTIME(pointer)
def cudaEventSynchronize(world: World, event: int) -> None:
    if event not in world.events:
        raise CudaError(codes.BAD_HANDLE)
    if event in world.marks:
        world.drain(*world.marks[event])


# -- captures and graphs ------------------------------------------------------------------

@RUNTIME(pointer, c_int)
def cudaStreamBeginCapture(world: World, stream: int, mode: int) -> None:
    world.enter()
    found = world.stream(stream)
    if found.capture is not None:
        raise CudaError(codes.INVALID_VALUE, "beginning another capture of a stream")
    found.capture = Capture(mode, threading.get_ident())


@RUNTIME(pointer, pointer)
def cudaStreamEndCapture(world: World, stream: int, result: int) -> None:
    found = world.stream(stream)
    capture, found.capture = found.capture, None
    store(result, 0)
    if capture is None:
        raise CudaError(codes.INVALID_VALUE, "ending no capture")
    if capture.mode != codes.RELAXED and capture.thread != threading.get_ident():
        raise CudaError(codes.OTHER_THREAD)
    if capture.is_invalid:
        raise CudaError(codes.CAPTURE_INVALID)
    handle = world.handle()
    world.graphs[handle] = capture.work
    store(result, handle)


@RUNTIME(pointer, pointer, c_ulonglong)
def cudaGraphInstantiate(world: World, result: int, graph: int, flags: int) -> None:
    world.refuse_in_capture("cudaGraphInstantiate")
    if graph not in world.graphs:
        raise CudaError(codes.BAD_HANDLE)
    handle = world.handle()
    world.executables[handle] = list(world.graphs[graph])
    store(result, handle)


@RUNTIME(pointer, pointer)
def cudaGraphLaunch(world: World, executable: int, stream: int) -> None:
    world.enter()
    if executable not in world.executables:
        raise CudaError(codes.BAD_HANDLE)
    for work in world.executables[executable]:
        world.queue(stream, *work)


@RUNTIME(pointer)
def cudaGraphDestroy(world: World, graph: int) -> None:
    if world.graphs.pop(graph, None) is None:
        raise CudaError(codes.BAD_HANDLE)


@RUNTIME(pointer)
def cudaGraphExecDestroy(world: World, executable: int) -> None:
    if world.executables.pop(executable, None) is None:
        raise CudaError(codes.BAD_HANDLE)
