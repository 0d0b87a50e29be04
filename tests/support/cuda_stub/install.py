"""Puts the stub below CuPy: makes the shared libraries, and overwrites CUDA's runtime in CuPy's memory with jumps."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

from cuda_stub import elf
from cuda_stub.calls import Calls, address_of
from cuda_stub.cublas import CUBLAS
from cuda_stub.driver import DRIVER
from cuda_stub.runtime import DRIVER_VERSIONS, KEPT, RUNTIME
from cuda_stub.world import World

__all__ = ["install", "missing"]

JUMP = b"\x48\xb8", b"\xff\xe0"         # movabs rax, address; jmp rax
JUMP_SIZE = 12
READ_WRITE_RUN = 7


def missing() -> str | None:
    """What the stub needs and is not there; None: it can be installed."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the stub of CUDA is for x86-64 Linux"
    if importlib.util.find_spec("cupy") is None:
        return "needs CuPy: pip install cupy-cuda12x or cupy-cuda13x, with NVRTC and CUDA's headers"
    if shutil.which("gcc") is None or shutil.which("g++") is None:
        return "needs gcc and g++"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return "there is a driver of CUDA: the tests of the stub do not run beside it"


def install(devices: int = 1, memory: int = 2 << 30, arch: int = 90, late: bool = False, cublas: bool = True) -> World:
    """Make the stub CUDA of this process, before CuPy is imported; it stays until the process ends.  `cublas`: with
    a cuBLAS."""
    if "cupy" in sys.modules:
        raise RuntimeError("cuda_stub.install comes before `import cupy`")
    world = World(devices, memory, arch, late=late)
    folder = tempfile.mkdtemp(prefix="cuda-stub-")
    weakref.finalize(world, shutil.rmtree, folder, ignore_errors=True)
    backends = Path(importlib.util.find_spec("cupy_backends").origin).parent / "cuda"
    driver, = (backends / "api").glob("driver.*.so")
    names = re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", driver.read_bytes())
    _load(world, DRIVER, {name.decode() for name in names} | DRIVER.functions.keys(), "libcuda.so.1", Path(folder))
    if cublas:
        _load_cublas(world, backends, Path(folder))

    import cupy_backends.cuda.api.runtime as runtime
    _overwrite(world, Path(runtime.__file__))
    world.runtime_version = runtime.runtimeGetVersion()
    world.driver_version = DRIVER_VERSIONS[world.runtime_version // 1000]
    return world


def _load(world: World, calls: Calls, names: set[str], soname: str, folder: Path, version: str = "") -> None:
    """Make a shared library with these functions, and load it: its name is then taken."""
    ordered = sorted(names)
    # Each function jumps to the address in its slot.
    source = "".join(f"__attribute__((visibility(\"hidden\"))) void* slot_{name};\n"
                     f"__attribute__((naked)) int {name}(void) {{ __asm__(\"jmp *slot_{name}(%rip)\"); }}\n"
                     for name in ordered)
    source += "void** stub_slots[] = {" + ", ".join(f"&slot_{name}" for name in ordered) + "};\n"
    path = folder / soname
    flags = []
    if version:
        script = folder / f"{soname}.map"
        script.write_text(f"{version} {{ global: *; }};\n")
        flags = [f"-Wl,--version-script={script}"]
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{soname}", *flags, "-x", "c", "-", "-o", str(path)],
                   input=source, text=True, check=True)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    slots = (ctypes.POINTER(ctypes.c_void_p) * len(ordered)).in_dll(library, "stub_slots")
    for slot, name in zip(slots, ordered, strict=True):
        slot[0] = _callback(world, calls, name)


def _callback(world: World, calls: Calls, name: str) -> int:
    made = calls.callback(world, name)
    # Held for good: what is collected last, at the end of the process, calls it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return address_of(made)


def _load_cublas(world: World, backends: Path, folder: Path) -> None:
    """cuBLAS under its soname, with every function that CuPy's bindings need of it, and the library below it."""
    bindings = next((backends / "libs").glob("cublas.*.so"), None)
    if bindings is None:
        return
    data = bindings.read_bytes()
    soname = re.search(rb"\0(libcublas\.so\.\d+)\0", data)
    assert soname is not None
    names = {name.decode() for name in re.findall(rb"\0(cublas\w+)(?=\0)", data)}
    _load(world, CUBLAS, {"cublasLtGetVersion"}, soname[1].decode().replace("cublas", "cublasLt"), folder)
    _load(world, CUBLAS, names | CUBLAS.functions.keys(), soname[1].decode(), folder, version=soname[1].decode())


def _overwrite(world: World, path: Path) -> None:
    """Let each function cuda* that is linked into CuPy's runtime.so jump to the stub."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    base = min(int(line.split("-")[0], 16) for line in maps if line.endswith(str(path)))
    libc = ctypes.CDLL(None, use_errno=True)
    found = elf.functions(path.read_bytes())
    absent = RUNTIME.functions.keys() - found.keys() - {"cudaGetDeviceProperties_v2", "cudaGetDeviceProperties"}
    if absent:
        raise RuntimeError(f"{path.name} of CuPy has no function {', '.join(sorted(absent))}")
    for name, (offset, size) in found.items():
        if not re.fullmatch(r"cuda[A-Z]\w*", name) or name in KEPT or size < JUMP_SIZE:
            continue
        start = base + offset
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(start + JUMP_SIZE - page), READ_WRITE_RUN):
            raise OSError(ctypes.get_errno(), "mprotect")
        before, after = JUMP
        ctypes.memmove(start, before + struct.pack("<Q", _callback(world, RUNTIME, name)) + after, JUMP_SIZE)
