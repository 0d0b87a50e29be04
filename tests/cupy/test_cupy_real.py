"""The device layer over CuPy makes the calls that CUDA requires: checked on a stand-in that records them.  Tests of
their effects need a machine with a GPU.
"""

import ctypes
import gc
import os
import re
import sys
import threading
import weakref
from collections import defaultdict
from functools import partial
from itertools import count
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from interrupting import interrupted

import ggml_sched as gs
from ggml_sched.backends.cupy import real
from ggml_sched.backends.cupy.device import DeviceError, DeviceOutOfMemory, KernelArguments
from ggml_sched.backends.cupy.source import KERNELS, kernel_source


class Status(RuntimeError):
    """As CuPy's errors: a number and a text."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaErrorNumber{status}")
        self.status = status


CudaError, DriverError, BlasError = (type(f"{name}Error", (Status,), {}) for name in ("Cuda", "Driver", "Blas"))
CompileError = type("CompileError", (Exception,), {})
PRODUCT = (2, 3, 4, 1000, 40, 2000, 50, 3000, 60)
"""m, n and k of a matrix product, and the addresses and row lengths of its operands and its result."""


class Nvrtc:
    """NVRTC as CuPy binds it; the machine code of a source is its text."""

    NVRTCError = CompileError

    def __init__(self, cuda: "Cuda") -> None:
        self.getVersion = cuda.call("nvrtc", (13, 2), RuntimeError)
        self.sources = cuda.sources
        self.programs: dict[int, str] = {}

    def createProgram(self, text: str, name: str, headers: tuple, includes: tuple) -> int:
        self.sources.append(text)
        program = len(self.sources)
        self.programs[program] = text
        return program

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        assert options == ("--gpu-architecture=sm_90", "--std=c++17")
        if "broken" in self.programs[program]:
            raise CompileError(6)

    def getProgramLog(self, program: int) -> str:
        return "no such thing"

    def getCUBIN(self, program: int) -> bytes:
        return self.programs[program].encode()

    def destroyProgram(self, program: int) -> None:
        del self.programs[program]


class Cuda:
    """`calls` are (name, arguments); `failing[name]` is the status that a call raises from now on."""

    def __init__(self, count: int = 2) -> None:
        self.calls: list[tuple] = []
        self.failing: dict[str, int] = {}
        self.count = count
        self.capturing = False
        self.current = threading.local()        # CuPy's streams of this thread, the innermost last, and its device
        self.addresses = iter(range(1 << 20, 1 << 30, 1 << 12))
        self.freed: list[int] = []
        self.destroyed: list[str] = []          # by CuPy, with the last reference
        self.sources: list[str] = []

    def call(self, name: str, answer=None, error: type = CudaError):
        def function(*args):
            self.calls.append((name, *args))
            if name in self.failing:
                raise error(self.failing[name])
            return answer(*args) if callable(answer) else answer
        return function

    def product(self, name: str):
        """As CuPy's bindings of cuBLAS: each call brings its handle to the current stream of the thread first."""
        def function(handle, *args):
            self.calls.append(("setStream", handle, (getattr(self.current, "streams", None) or [0])[-1]))
            return self.call(name, error=BlasError)(handle, *args)
        return function

    def has_context(self) -> bool:
        """Whether the thread has one: not because it has a current device, 0, from the start."""
        return hasattr(self.current, "device")

    def set_context(self, context: int) -> None:
        if context:
            self.current.device = context - 100
        elif self.has_context():
            del self.current.device

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def asked(self) -> list[tuple]:
        """The recorded calls, without those that set the thread's device."""
        return [call for call in self.calls if call[0] not in ("ctxGetCurrent", "ctxSetCurrent", "setDevice")]

    def install(self, monkeypatch) -> None:
        cuda = self

        class PinnedMemory:
            def __init__(self, size, flags=0):
                cuda.call("hostAlloc")(size, flags)
                self.block = type("Block", (ctypes.c_char * size,), {})()
                self.block.memory = self            # a pointer keeps its memory
                self.ptr = ctypes.addressof(self.block)
                weakref.finalize(self, cuda.destroyed.append, "pinned").atexit = False

        class PinnedMemoryPointer:
            def __new__(cls, memory, offset):
                return memory.block

        class Stream:
            def __init__(self, non_blocking=False):
                assert non_blocking
                cuda.call("streamCreate")()
                self.ptr = next(cuda.addresses)

            def __enter__(self):
                cuda.current.__dict__.setdefault("streams", []).append(self.ptr)

            def __exit__(self, *what):
                cuda.current.streams.pop()

            def begin_capture(self, mode):
                cuda.call("begin_capture")(self.ptr, mode)

        class Event:
            def __init__(self, disable_timing=False):
                assert disable_timing
                cuda.call("eventCreate")()
                self.ptr = next(cuda.addresses)
                weakref.finalize(self, cuda.destroyed.append, "event").atexit = False

        class Module:
            def load(self, code):
                cuda.call("moduleLoad")(code)

            def get_function(self, name):
                cuda.call("getFunction", error=DriverError)(name)
                return SimpleNamespace(ptr=next(cuda.addresses))

        about = {"name": b"NVIDIA Test", "major": 9, "minor": 0, "multiProcessorCount": 132}
        answers = {
            "malloc": lambda size: next(cuda.addresses), "free": cuda.freed.append,
            "getDevice": lambda: getattr(cuda.current, "device", 0),
            "setDevice": lambda number: setattr(cuda.current, "device", number),
            "getDeviceCount": lambda: self.count, "runtimeGetVersion": 13020, "driverGetVersion": 13000,
            "memGetInfo": lambda: (1000, 5000),
            "deviceGetAttribute": 232_448, "getDeviceProperties": lambda number: about, "eventQuery": 600,
            "deviceCanAccessPeer": 1, "streamEndCapture": lambda stream: next(cuda.addresses),
            "graphInstantiate": lambda graph: graph + 1}
        functions = ["memcpyAsync", "memsetAsync", "eventRecord", "streamWaitEvent", "eventSynchronize",
                     "streamSynchronize", "deviceSynchronize", "deviceEnablePeerAccess", "graphLaunch", "graphDestroy",
                     "graphExecDestroy", *answers]
        runtime = SimpleNamespace(
            CUDARuntimeError=CudaError, memcpyHostToDevice=1, memcpyDeviceToHost=2, memcpyDefault=4,
            hostAllocPortable=1, streamCaptureModeRelaxed=2, cudaDevAttrMaxSharedMemoryPerBlockOptin=97,
            CUDA_R_16F=2, CUDA_R_32F=0, **{name: self.call(name, answers.get(name)) for name in functions})
        driver = SimpleNamespace(
            CUDADriverError=DriverError, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
            ctxGetCurrent=self.call("ctxGetCurrent", lambda: 100 + self.current.device if self.has_context() else 0),
            ctxSetCurrent=self.call("ctxSetCurrent", self.set_context, DriverError),
            launchKernel=self.call("launchKernel", error=DriverError), funcSetAttribute=self.call("funcSetAttribute"))
        cublas = SimpleNamespace(
            CUBLASError=BlasError, CUBLAS_OP_T=1, CUBLAS_OP_N=0, CUBLAS_COMPUTE_32F=68, CUBLAS_GEMM_DEFAULT=-1,
            create=self.call("create", 77, BlasError), destroy=self.call("destroy"), setStream=self.call("setStream"),
            gemmEx=self.product("gemmEx"), gemmStridedBatchedEx=self.product("gemmStridedBatchedEx"))
        module, parts, libraries = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy_backends.cuda.libs")
        parts.runtime, parts.driver = runtime, driver
        parts.PinnedMemory, parts.PinnedMemoryPointer = PinnedMemory, PinnedMemoryPointer
        parts.Stream, parts.Event = Stream, Event
        parts.function = SimpleNamespace(Module=Module)
        module.cuda, module.__version__ = parts, "14.2.0"
        libraries.cublas = cublas
        libraries.nvrtc = Nvrtc(self)
        for name, one in (("cupy", module), ("cupy.cuda", parts), ("cupy_backends", ModuleType("cupy_backends")),
                          ("cupy_backends.cuda", ModuleType("cupy_backends.cuda")),
                          ("cupy_backends.cuda.libs", libraries)):
            monkeypatch.setitem(sys.modules, name, one)


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    made = Cuda()
    made.install(monkeypatch)
    return made


@pytest.fixture
def device(cuda):
    with real.open_device(1) as made:
        cuda.calls.clear()
        yield made


# -- opening ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("number", "count", "failing", "said"), [
    (0, 2, {"getDeviceCount": 35}, r"no NVIDIA driver, or one that is too old: CuPy 14\.2\.0 was made for CUDA 13\.2; "
                                   r".*ggml-sched\[cuda12\]"),
    (0, 2, {"getDeviceCount": 100}, "no CUDA device 0: there is none"),
    (0, 2, {"getDeviceCount": 999}, "CUDA does not start: cudaErrorNumber999"),
    (0, 0, {}, "no CUDA device 0: there is none"), (1, 1, {}, "no CUDA device 1: there is only 0"),
    (-1, 4, {}, "no CUDA device -1: there are 0 to 3"),
    (0, 2, {"nvrtc": "no libnvrtc.so.13\nanywhere"},
     r"pip install 'cupy-cuda13x\[ctk\]', .* \(no libnvrtc\.so\.13\)$"),
    (0, 2, {"setDevice": 46}, "CUDA device 0 does not open: .*cudaErrorNumber46"),
    (0, 2, {"getDeviceProperties": 46}, "CUDA device 0 does not open: .*cudaErrorNumber46")])
def test_a_device_that_does_not_open_says_why(cuda, number, count, failing, said):
    cuda.count, cuda.failing = count, failing
    with pytest.raises(gs.BackendError, match=said):
        real.open_device(number)


def test_a_device_is_a_number(cuda):
    with pytest.raises(TypeError):
        real.open_device("cuda")


def test_what_a_device_says_of_itself(device):
    assert (device.name, device.arch, device.n_multiprocessors, device.max_shared) == (
        "NVIDIA Test", "sm_90", 132, 232_448)
    assert device.memory() == (1000, 5000)


# -- calls ------------------------------------------------------------------------------------------------------------

def test_every_entry_sets_the_device_of_its_thread(cuda, device):
    stream, event, memory, host = device.stream(), device.event(), device.alloc(64), np.zeros(8)
    packed = KernelArguments([np.int32(1)])
    function = real.CupyFunction(device, "a.b", SimpleNamespace(ptr=5))
    entries = [
        device.memory, lambda: device.alloc(8), lambda: device.pinned(8), device.stream, device.event,
        device.synchronize, stream.synchronize, lambda: stream.record(event), lambda: stream.wait(event),
        lambda: stream.copy_in(memory.ptr, host), lambda: stream.copy_out(host, memory.ptr),
        lambda: stream.pinned_in(memory.ptr, 4096, 8), lambda: stream.pinned_out(4096, memory.ptr, 8),
        lambda: stream.copy(memory.ptr, memory.ptr + 32, 32), lambda: stream.fill(memory.ptr, 1, 8),
        event.synchronize, event.query, stream.begin_capture, stream.end_capture,
        lambda: function.launch((1,), (32,), packed, 0, stream)]
    for entry in entries:
        cuda.calls.clear()
        thread = threading.Thread(target=entry)
        thread.start()
        thread.join()
        assert cuda.calls[:2] == [("ctxGetCurrent",), ("ctxSetCurrent", 101)] and cuda.asked()
        assert cuda.calls[-1] == ("ctxSetCurrent", 0)


def test_every_entry_leaves_the_callers_device_as_it_was(cuda, device):
    def current() -> int:
        return getattr(cuda.current, "device", 0)

    stream = device.stream()
    for before, calls in ((0, [("ctxGetCurrent",), ("ctxSetCurrent", 101), ("streamSynchronize", stream.ptr),
                               ("ctxSetCurrent", 100)]),
                          (1, [("ctxGetCurrent",), ("streamSynchronize", stream.ptr)])):
        cuda.current.device = before
        cuda.calls.clear()
        stream.synchronize()
        assert cuda.calls == calls and current() == before
        with device.entered, device.entered:
            assert current() == 1
        assert current() == before
    cuda.current.device = 0
    cuda.failing["streamSynchronize"] = 700
    with pytest.raises(DeviceError, match="cudaErrorNumber700"):
        stream.synchronize()
    assert current() == 0


def test_a_thread_that_never_chose_a_device_gets_a_context(cuda):
    """Launches need one, and device 0 is current without."""
    with real.open_device(0) as device:
        stream = device.stream()
        found = []
        thread = threading.Thread(target=lambda: found.extend((cuda.has_context(), stream.synchronize(),
                                                               cuda.has_context())))
        thread.start()
        thread.join()
        assert found == [False, None, True]


def test_a_context_that_was_destroyed_meanwhile_is_left(cuda, device, monkeypatch):
    def set_context(context):
        if context == 100:
            raise DriverError(201)
        cuda.set_context(context)

    cuda.current.device = 0
    monkeypatch.setattr(device.driver, "ctxSetCurrent", set_context)
    device.synchronize()
    assert cuda.current.device == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")     # an interrupt of a finalizer
@pytest.mark.parametrize("what", ["memory", "freeing", "dropping", "a graph", "cuBLAS"])
def test_an_interrupt_leaves_no_handle_without_an_owner(cuda, device, what):
    """Wherever it comes: what was made is given back with the last reference, once.  Functions of C stand for CUDA's,
    as no signal handler runs in these."""
    cublas = sys.modules["cupy_backends.cuda.libs"].cublas
    pairs = ((device.runtime, "malloc", "free"), (device.runtime, "streamEndCapture", "graphDestroy"),
             (device.runtime, "graphInstantiate", "graphExecDestroy"), (cublas, "create", "destroy"))
    for at in count(1):
        made, ended = defaultdict(count(256, 256).__next__), []
        for library, make, end in pairs:
            setattr(library, make, partial(made.__getitem__, *(("cuBLAS",) if make == "create" else ())))
            setattr(library, end, ended.append)
        held, stream = [device.alloc(64)] if what in ("freeing", "dropping") else [], device.stream()
        stream.begin_capture()
        device.capturing.clear()
        call = {"memory": lambda to: to.append(device.alloc(64)), "freeing": lambda to: to[0].free(),
                "dropping": lambda to: to[0].drop(), "cuBLAS": lambda to: to.append(device.blas()),
                "a graph": partial(lambda stream, to: to.append(stream.end_capture()), stream)}[what]
        where = interrupted(partial(call, held), at, "backends/cupy/real")
        held.clear()
        device.free_collected()
        gc.collect()
        assert sorted(made.values()) == sorted(ended), where
        if where is None:
            break
    assert made


def test_copies(cuda, device):
    stream, host = device.stream(), np.arange(6, dtype=np.float32)
    pinned = device.pinned(64)
    cuda.calls.clear()
    stream.copy_in(1000, host)
    stream.copy_in(2000, pinned[8:16])
    stream.copy_out(pinned[:8].view(np.int32), 3000)
    stream.copy(4000, 5000, 77)
    stream.fill(6000, 255, 9)
    stream.copy_in(0, host[:0])
    assert cuda.asked() == [
        ("memcpyAsync", 1000, host.ctypes.data, 24, 1, stream.ptr),
        ("memcpyAsync", 2000, pinned.ctypes.data + 8, 8, 1, stream.ptr),
        ("memcpyAsync", pinned.ctypes.data, 3000, 8, 2, stream.ptr),
        ("memcpyAsync", 4000, 5000, 77, 4, stream.ptr), ("memsetAsync", 6000, 255, 9, stream.ptr)]
    cuda.calls.clear()
    stream.copy_out(host, 7000)             # pageable: done when it returns
    assert [name for name, *_ in cuda.asked()] == ["memcpyAsync", "streamSynchronize"]
    with pytest.raises(ValueError, match="a byte"):
        stream.fill(1, 256, 1)


def test_events(cuda, device):
    stream, event = device.stream(), device.event()
    stream.record(event)
    stream.wait(event)
    assert ("eventRecord", event.ptr, stream.ptr) in cuda.calls
    assert ("streamWaitEvent", stream.ptr, event.ptr) in cuda.calls
    assert not event.query()
    device.runtime.eventQuery = lambda ptr: 0
    assert event.query()
    device.runtime.eventQuery = lambda ptr: 700
    with pytest.raises(DeviceError, match="error 700"):
        event.query()


def test_a_capture_is_of_its_thread_and_refuses_pageable_memory(cuda, device):
    stream, host, pinned, memory = device.stream(), np.zeros(8), device.pinned(64), device.alloc(8)
    stream.begin_capture()
    assert stream.is_capturing and ("begin_capture", stream.ptr, 2) in cuda.calls
    cuda.calls.clear()
    for refused in (lambda: stream.copy_in(1000, host), lambda: stream.copy_out(host, 1000), stream.begin_capture,
                    memory.free):
        with pytest.raises(DeviceError):
            refused()
    assert cuda.calls == []
    stream.copy_in(1000, pinned)
    graph = stream.end_capture()
    assert not stream.is_capturing
    graph.launch(stream)
    assert cuda.asked()[-1] == ("graphLaunch", graph.ptr, stream.ptr)
    graph.free()
    graph.free()
    assert cuda.asked()[-1] == ("graphExecDestroy", graph.ptr) and cuda.names().count("graphExecDestroy") == 1
    with pytest.raises(DeviceError, match="freed"):
        graph.launch(stream)
    with pytest.raises(DeviceError, match="without begin_capture"):
        stream.end_capture()


@pytest.mark.parametrize("call", ["streamEndCapture", "graphInstantiate"])
def test_a_capture_that_breaks_is_over(cuda, device, call):
    stream = device.stream()
    stream.begin_capture()
    cuda.failing[call] = 901
    with pytest.raises(DeviceError, match="cudaErrorNumber901"):
        stream.end_capture()
    assert not stream.is_capturing
    assert cuda.names().count("graphDestroy") == (call == "graphInstantiate")
    cuda.failing.clear()
    stream.begin_capture()
    stream.end_capture()


def test_memory(cuda, device):
    memory = device.alloc(100)
    assert memory.size == 100 and ("malloc", 100) in cuda.calls
    memory.free()
    memory.free()
    assert cuda.freed == [memory.ptr]
    assert device.alloc(0).size == 0
    cuda.failing["malloc"] = 2
    with pytest.raises(DeviceOutOfMemory) as caught:
        device.alloc(2000)
    assert (caught.value.needed, caught.value.free) == (2000, 1000)
    cuda.failing.clear()
    device.alloc(8)
    cuda.failing["hostAlloc"] = 2
    with pytest.raises(DeviceError, match="no 9 bytes of page-locked memory"):
        device.pinned(9)
    assert device.pinned(0).size == 0


def test_launches(cuda, device):
    stream, function = device.stream(), real.CupyFunction(
        device, "elementwise.f", SimpleNamespace(ptr=5))
    packed = function.pack([np.int32(1), np.float32(2)])
    cuda.calls.clear()
    function.launch((3, 2), (32, 4, 2), packed, 1024, stream)
    assert cuda.asked() == [
        ("launchKernel", 5, 3, 2, 1, 32, 4, 2, 1024, stream.ptr, packed.pointers.ctypes.data, 0)]
    for shared in (50_000, 60_000, 55_000):
        function.launch((1,), (32,), packed, shared, stream)
    assert [call for call in cuda.calls if call[0] == "funcSetAttribute"] == [
        ("funcSetAttribute", 5, 8, 50_000), ("funcSetAttribute", 5, 8, 60_000)]
    cuda.failing["launchKernel"] = 1
    with pytest.raises(DeviceError, match=r"elementwise\.f, grid \(1,\), block \(9999,\), 0 bytes.*cudaErrorNumber1"):
        function.launch((1,), (9999,), packed, 0, stream)


def test_a_launch_that_may_begin_early_has_the_attribute(cuda, monkeypatch):
    made, status = [], [0]

    def launch(config, function, arguments, extra):
        at = ctypes.cast(config, ctypes.POINTER(real.LaunchConfig))[0]
        sizes = [getattr(at, name) for name, _ in at._fields_[:7]]
        value = ctypes.string_at(at.attributes, 72)
        made.append((sizes, at.stream, at.n_attributes, value, function, arguments, extra))
        return status[0]

    monkeypatch.setattr(real, "extended_launch", lambda: launch)
    with real.open_device(0) as device:
        assert device.can_overlap
        stream, function = device.stream(), real.CupyFunction(device, "elementwise.f", SimpleNamespace(ptr=5))
        packed = function.pack([np.int32(1)])
        function.launch((3, 2), (32,), packed, 64, stream, True)
        attribute = np.array([6, 0, 1], "<i4").tobytes() + bytes(60)        # id, padding, the first of the value
        assert made == [([3, 2, 1, 32, 1, 1, 64], stream.ptr, 1, attribute, 5, packed.address, None)]
        status[0] = 1
        with pytest.raises(DeviceError, match="elementwise.f, grid"):
            function.launch((1,), (32,), packed, 0, stream, True)


@pytest.fixture
def texts(monkeypatch, tmp_path):
    """The sources of files of kernels, by their names."""
    made = {"first": "// text of first\n", "broken": "// broken\n"}
    lock = threading.Lock()         # several threads read sources

    def source(name: str, entry: str | None = None, overlap: bool = False) -> str:
        with lock:
            if name in made:
                (tmp_path / f"{name}.cu").write_text(made[name])
            return kernel_source(name, tmp_path, entry, overlap)

    monkeypatch.setattr(real, "kernel_source", source)
    real._entries.cache_clear()
    yield made
    real._entries.cache_clear()


@pytest.mark.parametrize("name", [path.stem for path in sorted(KERNELS.glob("*.cu"))])
def test_a_compiler_names_the_files_and_lines_of_kernels_as_they_are(name):
    """Each line of a kernel's text stands where the last `#line` says; every line comes once."""
    file, number, named = "", 0, {}
    for line in kernel_source(name).splitlines():
        if found := re.fullmatch(r'#line (\d+) "([^"]+)"', line):
            number, file = int(found[1]), found[2]
            continue
        if line:
            assert named.setdefault((file, number), line) is line, f"{file}, line {number}, comes twice"
        number += 1
    wanted = {(file, k): line for file in {file for file, _ in named}
              for k, line in enumerate((KERNELS / file).read_text(encoding="utf-8").splitlines(), 1)
              if line and not line.startswith(('#include "', "#pragma once"))}
    assert named == wanted


def compiled(cuda) -> list[str]:
    """The sources that were compiled, without the lines that name files."""
    return ["".join(line for line in text.splitlines(keepends=True) if not line.startswith("#line")).strip()
            for text in cuda.sources]


def test_modules_are_compiled_from_their_text(cuda, device, texts):
    assert device.function("first.f").name == "first.f" and device.function("first.g").name == "first.g"
    assert compiled(cuda) == ["// text of first"]
    with pytest.raises(DeviceError, match=r"broken\.cu does not compile for sm_90: no such thing"):
        device.function("broken.f")
    with pytest.raises(DeviceError, match="no kernels nowhere"):
        device.function("nowhere.f")


def test_of_a_list_of_kernels_only_the_entry_in_use_is_compiled(cuda, device, texts):
    texts["first"] = "#define LIST(X) X(a, 1) X(a_2, 2)\n#define MORE(X) \\\n    X(b, 3)\nMORE(LIST)"
    device.load(["first.packed_a_2_1", "first.packed_a_2_8", "first.b", "first.other"])
    assert sorted(compiled(cuda)) == sorted([
        "#define LIST(X)  X(a_2, 2)\n#define MORE(X) \\\n    \nMORE(LIST)",
        "#define LIST(X)  \n#define MORE(X) \\\n    X(b, 3)\nMORE(LIST)",
        "#define LIST(X)  \n#define MORE(X) \\\n    \nMORE(LIST)"])
    device.function("first.a_2")
    assert len(cuda.sources) == 3
    device.function("first.exact_a")
    assert compiled(cuda)[3].startswith("#define LIST(X) X(a, 1)")


@pytest.mark.parametrize(("n_cores", "n_programs", "at_once"), [(3, 3, 3), (2, 4, 2), (None, 2, 1)])
def test_programs_are_compiled_in_threads(cuda, device, texts, monkeypatch, n_cores, n_programs, at_once):
    """As many at once as there are cores: each waits for so many others, and none meets more."""
    monkeypatch.setattr(real.os, "cpu_count", lambda: n_cores)
    texts |= {f"f{i}": f"// text {i}" for i in range(n_programs)}
    barrier, running, most = threading.Barrier(at_once), [], []
    compile_program = Nvrtc.compileProgram

    def wait(self, program, options):
        running.append(program)
        most.append(len(running))
        barrier.wait(60)                    # broken where fewer compile at once
        compile_program(self, program, options)
        barrier.wait(60)
        running.remove(program)

    monkeypatch.setattr(Nvrtc, "compileProgram", wait)
    device.load([f"f{i}.kernel" for i in range(n_programs)])
    assert len(cuda.sources) == n_programs and max(most) <= at_once
    device.load([f"f{i}.kernel" for i in range(n_programs)])
    assert len(cuda.sources) == n_programs


def test_machine_code_is_kept_on_disk_until_the_source_changes(cuda, texts, tmp_path):
    def load() -> int:
        real._entries.cache_clear()
        with real.open_device(0) as device:
            device.load(["first.f"])
        return len(cuda.sources)

    assert load() == load() == 1
    kept, = (tmp_path / "kernels").glob("ggml-sched-first-*.cubin")
    kept.write_bytes(kept.read_bytes()[:-1])        # damaged: compiled anew
    assert load() == load() == 2
    texts["first"] = "// another text\n"
    assert load() == 3 and compiled(cuda)[2] == "// another text"


def test_without_a_folder_for_machine_code_each_device_compiles(cuda, texts, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    for n in (1, 2):
        with real.open_device(0) as made:
            made.load(["first.f"])
            assert len(cuda.sources) == n


def test_peers(cuda, device):
    other = real.open_device(0)
    cuda.calls.clear()
    assert device.can_access(other) and device.can_access(other) and device.can_access(device)
    assert cuda.asked() == [("deviceCanAccessPeer", 1, 0), ("deviceEnablePeerAccess", 0)]
    cuda.failing["deviceEnablePeerAccess"] = 704
    assert other.can_access(device)
    other.close()
    assert not device.can_access(object())


def test_matrix_products_give_rows_of_ours(cuda, device):
    stream, blas = device.stream(), device.blas()
    assert blas is not device.blas()        # a stream is set for a handle before each product: backends share none
    cuda.calls.clear()
    blas.gemm(stream, *PRODUCT)
    name, handle, *args = cuda.asked()[-1]
    alpha = args[5]
    assert (name, handle, args) == ("gemmEx", 77, [1, 0, 2, 3, 4, alpha, 1000, 2, 40, 2000, 2, 50, alpha + 4, 3000, 0,
                                                   60, 68, -1])
    assert np.ctypeslib.as_array(ctypes.cast(alpha, ctypes.POINTER(ctypes.c_float)), (2,)).tolist() == [1, 0]
    blas.gemm(stream, *PRODUCT, 5, 7, 8, 9)
    assert cuda.asked()[-1] == ("gemmStridedBatchedEx", 77, 1, 0, 2, 3, 4, alpha, 1000, 2, 40, 7, 2000, 2, 50, 8,
                              alpha + 4, 3000, 0, 60, 9, 5, 68, -1)
    stream.begin_capture()
    with pytest.raises(DeviceError, match="cuBLAS"):
        blas.gemm(stream, *PRODUCT)
    stream.end_capture()


@pytest.mark.parametrize("batch", [1, 5])
def test_matrix_products_run_on_the_stream_that_they_are_given(cuda, device, batch):
    """CuPy would run them on the current stream of the thread, which no stream of ours waits for."""
    streams, blas = [device.stream(), device.stream()], device.blas()
    for stream in (streams[0], streams[1], streams[0]):
        cuda.calls.clear()
        blas.gemm(stream, *PRODUCT, batch)
        product = next(i for i, name in enumerate(cuda.names()) if name.startswith("gemm"))
        before = [call for call in cuda.calls[:product] if call[0] == "setStream"]
        assert before[-1] == ("setStream", 77, stream.ptr)
        assert not cuda.current.streams         # the caller's own is current again
    cuda.failing["gemmEx"] = cuda.failing["gemmStridedBatchedEx"] = 13
    with pytest.raises(DeviceError):
        blas.gemm(streams[0], *PRODUCT, batch)
    assert not cuda.current.streams


def test_no_memory_for_cublas_is_no_memory(cuda, device):
    """The same number is another error of CUDA's own."""
    cuda.failing["create"] = 3
    with pytest.raises(DeviceOutOfMemory):
        device.blas()
    cuda.failing.clear()
    stream, blas = device.stream(), device.blas()
    cuda.failing["gemmEx"] = 3
    with pytest.raises(DeviceOutOfMemory):
        blas.gemm(stream, *PRODUCT)
    cuda.failing["gemmEx"] = 2
    cuda.failing["streamSynchronize"] = 3
    for call in (lambda: blas.gemm(stream, *PRODUCT), stream.synchronize):
        with pytest.raises(DeviceError) as caught:
            call()
        assert not isinstance(caught.value, DeviceOutOfMemory)
    cuda.failing.clear()
    cuda.failing["create"] = 3
    with real.open_device(0) as other, pytest.raises(gs.OutOfMemory, match="backend 'G'"):
        gs.CupyBackend(other, name="G")


def test_without_cublas_there_is_none(cuda, device, monkeypatch):
    """CuPy has the bindings of the library all the same; importing them loads the library, which fails."""
    libraries = sys.modules["cupy_backends.cuda.libs"]
    asked = []

    def load(name: str):
        if name != "cublas":
            raise AttributeError(name)
        asked.append(name)
        raise ImportError('Failure finding "libcublas.so.13"')

    assert isinstance(device.blas(), real.CupyBlas)
    libraries.__getattr__ = load
    monkeypatch.delattr(libraries, "cublas")
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.cublas", ModuleType("cupy_backends.cuda.libs.cublas"))
    assert device.blas() is None and asked
    with gs.CupyBackend(device) as backend:
        assert backend.blas is None


# -- the end ----------------------------------------------------------------------------------------------------------

def test_closing_gives_all_back(cuda):
    device = real.open_device(0)
    memory, stream, event = device.alloc(8), device.stream(), device.event()
    kept = device.alloc(8)
    device.blas()
    kept.free()
    device.close()
    device.close()
    assert sorted(cuda.freed) == sorted([memory.ptr, kept.ptr])
    assert "deviceSynchronize" in cuda.names() and ("destroy", 77) in cuda.calls
    memory.free()
    for use in (device.memory, stream.synchronize, lambda: device.alloc(1), event.query, device.synchronize):
        with pytest.raises(DeviceError, match="NVIDIA Test is closed"):
            use()


def test_closing_after_a_failure_gives_all_back(cuda):
    device = real.open_device(0)
    memory = device.alloc(8)
    cuda.failing["deviceSynchronize"] = 700
    with pytest.raises(DeviceError, match="cudaErrorNumber700"):
        device.close()
    device.close()
    assert cuda.freed == [memory.ptr]


def test_memory_without_references_is_given_back(cuda, device):
    address = device.alloc(8).ptr
    assert cuda.freed == [address]


def test_a_child_process_gives_nothing_back(cuda):
    """It has no CUDA: whatever is closed or dropped there is its parent's."""
    device = real.open_device(0)
    backend = gs.CupyBackend(device, name="G")
    buffer, memory, event, pinned = backend.alloc_buffer(64), device.alloc(8), device.event(), device.pinned(8)
    stream = device.stream()
    stream.begin_capture()
    graph = stream.end_capture()
    cuda.calls.clear()
    child = os.fork()
    if not child:
        status = 1
        try:
            buffer.close()
            memory.free()
            graph.free()
            backend.close()
            device.close()
            del memory, event, pinned, buffer, backend, graph, stream, device
            gc.collect()
            status = 2 * bool(cuda.calls or cuda.freed or cuda.destroyed)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    here = {memory.ptr, buffer.base}
    del event, pinned, stream, graph
    gc.collect()
    buffer.close()
    memory.free()
    assert here <= set(cuda.freed) and {"pinned", "event"} <= set(cuda.destroyed)
    backend.close()
    device.close()
