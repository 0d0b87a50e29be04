"""Compiles kernel sources, behind host_cuda.h, to shared libraries of the host with g++; caches them by content.

A library's file name is a hash of source, headers, compiler and flags.  The file is written elsewhere and renamed into
a folder that only this user can write, so that no process loads half a file; of processes that need it at the same
time one compiles it, and the others wait.

GGML_SCHED_EMULATOR_SANITIZE names sanitizers ("address", "undefined" or both with a comma); "address" wants libasan
preloaded.  GGML_SCHED_EMULATOR_STRICT makes warnings errors.  GGML_SCHED_EMULATOR_CACHE names another folder, CXX
another compiler.
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from zlib import crc32

from ggml_sched.backends.cupy.device import DeviceError

__all__ = ["cache_folder", "compiler", "kernels_of", "library", "sanitizers"]

HERE = Path(__file__).parent
LOCK = ".lock"
"""A file of which each library that is being compiled locks one byte."""
WARNINGS = ("-Wall", "-Wextra", "-Wno-unknown-pragmas")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing",
         *WARNINGS)
SANITIZE = {
    "address": ("-fsanitize=address", "-fsanitize-sections=host_shared"),
    # CUDA defines the shift of a sign bit; C++17 does not.
    "undefined": ("-fsanitize=undefined", "-fno-sanitize=shift-base,vptr", "-fno-sanitize-recover=all"),
}
_BOUND = r"host_cuda_bounds\s*\(((?:[^()]|\([^()]*\))*)\)"
_KERNEL = re.compile(rf"""extern\s*"C"\s*((?:(?:host_cuda_global|void|{_BOUND})\s*)+)\b(\w+)\s*\(""")


def compiler() -> list[str] | None:
    """The command of the C++ compiler, or None."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    path = shutil.which(command[0])
    return [path, *command[1:]] if path else None


def sanitizers() -> tuple[str, ...]:
    """The sanitizers that GGML_SCHED_EMULATOR_SANITIZE names."""
    names = tuple(sorted(filter(None, os.environ.get("GGML_SCHED_EMULATOR_SANITIZE", "").split(","))))
    unknown = [name for name in names if name not in SANITIZE]
    if unknown:
        raise DeviceError(f"GGML_SCHED_EMULATOR_SANITIZE: no sanitizer {', '.join(unknown)}, "
                          f"only {', '.join(SANITIZE)}")
    return names


def library(name: str, text: str, sanitize: tuple[str, ...] = ()) -> Path:
    """The library of a kernel source, compiled unless cached; raises DeviceError with the compiler's messages."""
    gxx = compiler()
    if gxx is None:
        raise DeviceError("the emulated device needs g++ to compile kernels, and there is none (CXX may name another)")
    if "address" in sanitize and not _has_asan():
        raise DeviceError("AddressSanitizer must be loaded first: set LD_PRELOAD to what "
                          "`g++ -print-file-name=libasan.so` says")
    flags = [*FLAGS, *(flag for kind in sanitize for flag in SANITIZE[kind])]
    if os.environ.get("GGML_SCHED_EMULATOR_STRICT"):
        flags.append("-Werror")
    if sanitize:
        flags += ["-O0", "-g1", "-fno-omit-frame-pointer", f"-DHOST_CUDA_STACK={256 << 10}"]
    path = cache_folder() / f"{name}-{_key(gxx, text, flags)}.so"
    if not path.exists():
        with open(path.parent / LOCK, "a") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX, 1, crc32(path.name.encode()))      # until the file is closed
            if not path.exists():
                _compile(gxx, name, text, flags, path)
    return path


def kernels_of(gxx: list[str], text: str) -> dict[str, str]:
    """{kernel: the expression of its launch bound in threads}, with macros expanded."""
    command = [*gxx, "-E", "-P", "-x", "c++", "-DHOST_CUDA=1", "-D__global__=host_cuda_global",
               "-D__launch_bounds__(...)=host_cuda_bounds(__VA_ARGS__)", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise DeviceError(f"{gxx[0]} -E: {_first_lines(done.stderr)}")
    found = {name: (bound or "1024").split(",")[0]
             for said, bound, name in _KERNEL.findall(done.stdout) if "host_cuda_global" in said}
    return found


def _compile(gxx: list[str], name: str, text: str, flags: list[str], path: Path) -> None:
    exports = "\n".join(f"HOST_CUDA_EXPORT({kernel}, {bound})" for kernel, bound in kernels_of(gxx, text).items())
    # In a namespace without a name nothing is shared with other libraries, and every __shared__ array has its section.
    whole = f'#include "host_cuda.h"\nnamespace {{\n{text}\n}}\n#line 1 "exports of {name}"\n{exports}\n'
    handle, half = tempfile.mkstemp(dir=path.parent, prefix=f"{name}-", suffix=".part")
    os.close(handle)
    try:
        done = subprocess.run([*gxx, *flags, f"-I{HERE}", "-x", "c++", "-", "-o", half], input=whole,
                              capture_output=True, text=True)
        if done.returncode:
            raise DeviceError(f"{name}.cu does not compile for the host: {_first_lines(done.stderr)}")
        os.replace(half, path)
    finally:
        Path(half).unlink(missing_ok=True)


def _first_lines(said: str, n: int = 20) -> str:
    return "\n".join(said.strip().splitlines()[:n])


def _key(gxx: list[str], text: str, flags: list[str]) -> str:
    about = os.stat(gxx[0])
    content = hashlib.sha256(repr((gxx, about.st_size, about.st_mtime_ns, flags)).encode())
    for part in (*(path.read_bytes() for path in sorted(HERE.glob("*.h"))), Path(__file__).read_bytes(), text.encode()):
        content.update(hashlib.sha256(part).digest())
    return content.hexdigest()[:24]


def _has_asan() -> bool:
    try:
        return "libasan" in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True         # the loader reports what is missing


def cache_folder() -> Path:
    """A folder that only this user can write; code is loaded from it."""
    named = os.environ.get("GGML_SCHED_EMULATOR_CACHE")
    path = Path(named or f"{tempfile.gettempdir()}/ggml-sched-emulator-{os.getuid()}")
    path.mkdir(mode=0o700, parents=bool(named), exist_ok=True)
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise DeviceError(f"{path} belongs to another user or can be written by others: "
                          f"let GGML_SCHED_EMULATOR_CACHE name a folder of your own")
    return path
