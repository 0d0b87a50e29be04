"""Kernels are compiled for the host once for each content, into a folder that is the user's alone."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cuda_emulator import EmulatedDevice
from cuda_emulator.compile import LOCK, compiler, kernels_of, library
from cupy_sources import needs_compiler

from ggml_sched.backends.cupy.device import DeviceError
from ggml_sched.backends.cupy.source import KERNELS, kernel_source

pytestmark = needs_compiler

PLAIN = 'extern "C" __global__ void f(int* y) { *y = VALUE; }'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setenv("GGML_SCHED_EMULATOR_CACHE", str(path))
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.cu").write_text(f'#include "value.cuh"\n#include "value.cuh"\n{PLAIN}\n')
    (tmp_path / "value.cuh").write_text("#pragma once\n#include \"deeper/more.cuh\"\n")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "more.cuh").write_text("#define VALUE 3\n")
    return tmp_path


def libraries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.name != LOCK]


def value(folder: Path) -> int:
    with EmulatedDevice() as device:
        function, memory, stream = device.function("a.f", folder), device.alloc(4), device.stream()
        function.launch((1,), (1,), function.pack([np.uint64(memory.ptr)]), 0, stream)
        out = np.zeros(1, np.int32)
        stream.copy_out(out, memory.ptr)
        return int(out[0])


def test_a_content_is_compiled_once(cache, folder):
    assert value(folder) == 3
    made = {path: path.stat().st_mtime_ns for path in libraries(cache)}
    assert len(made) == 1
    assert value(folder) == 3
    assert {path: path.stat().st_mtime_ns for path in libraries(cache)} == made
    (folder / "deeper" / "more.cuh").write_text("#define VALUE 4\n")
    assert value(folder) == 4
    assert len(libraries(cache)) == 2


def test_the_folder_is_closed_to_others(cache, folder):
    value(folder)
    assert cache.stat().st_mode & 0o077 == 0
    cache.chmod(0o777)
    with pytest.raises(DeviceError, match="GGML_SCHED_EMULATOR_CACHE"):
        value(folder)
    cache.chmod(0o700)
    cache.rename(cache.with_name("real"))
    cache.symlink_to(cache.with_name("real"))
    with pytest.raises(DeviceError, match="GGML_SCHED_EMULATOR_CACHE"):
        value(folder)


def test_what_does_not_compile_leaves_nothing(cache, folder):
    (folder / "value.cuh").write_text("#define VALUE undeclared\n")
    with pytest.raises(DeviceError, match=r"a\.cu does not compile for the host:[\s\S]*value\.cuh:1:\d+: error: "
                                          r".*undeclared[\s\S]*a\.cu:3:\d+: "):
        value(folder)
    assert libraries(cache) == []
    (folder / "a.cu").write_text('extern "C" __global__ void f(int* y, int unused) { *y = 1; }')
    with pytest.raises(DeviceError, match="unused parameter"):
        value(folder)


def test_processes_may_race(cache, folder):
    code = ("import sys, test_emulator_compile as t; from pathlib import Path; print(t.value(Path(sys.argv[1])))")
    here = Path(__file__).parent
    code = f"import sys; sys.path[:0] = {[str(here), str(here.parent / 'support')]!r}; {code}"
    running = [subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
               for _ in range(3)]
    assert [process.communicate()[0] for process in running] == ["3\n"] * 3
    assert [path.suffix for path in libraries(cache)] == [".so"]


def test_without_a_compiler_it_says_so(folder, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(DeviceError, match=r"needs g\+\+"):
        value(folder)
    with EmulatedDevice() as device:                # copies need none
        stream, memory = device.stream(), device.alloc(8)
        stream.fill(memory.ptr, 1, 8)
        stream.synchronize()


def test_the_address_sanitizer_must_be_loaded_first(cache, folder, monkeypatch):
    monkeypatch.setenv("GGML_SCHED_EMULATOR_SANITIZE", "address")
    with pytest.raises(DeviceError, match="LD_PRELOAD"):
        value(folder)
    monkeypatch.setenv("GGML_SCHED_EMULATOR_SANITIZE", "addresses")
    with pytest.raises(DeviceError, match="no sanitizer addresses, only address, undefined"):
        EmulatedDevice()


def test_kernels_are_found_behind_macros():
    text = """
    #define BOUND 64
    #define KERNEL(kind) extern "C" __global__ void __launch_bounds__(2 * BOUND, 4) vec_##kind(int n) { (void)n; }
    KERNEL(a) KERNEL(b)
    extern "C" __global__ void __launch_bounds__((BOUND + 1)) c(int n) {}
    extern "C" __global__ __launch_bounds__(32) void d() {}
    extern "C" __global__ void e() {}
    __device__ void no() {}
    extern "C" void nor_this() {}
    """
    assert kernels_of(compiler(), text) == {
        "vec_a": "2 * 64", "vec_b": "2 * 64", "c": "(64 + 1)", "d": "32", "e": "1024"}


@pytest.mark.parametrize("name", sorted(path.stem for path in KERNELS.glob("*.cu")))
def test_kernels_of_the_package_compile_without_a_warning(name, monkeypatch):
    monkeypatch.setenv("GGML_SCHED_EMULATOR_STRICT", "1")
    text = kernel_source(name)
    assert library(name, text).is_file()
    assert kernels_of(compiler(), text)
