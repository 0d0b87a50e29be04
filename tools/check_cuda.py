"""Compile the CUDA kernels for real GPUs without one, and fail on what would make them slow: spills and stack frames.

    pip install '.[nvrtc]'               # nvidia-cuda-nvrtc, of CUDA 13; nvidia-cuda-nvrtc-cu12 for CUDA 12
    python tools/check_cuda.py [--arch sm_80 --arch sm_90] [--overlap] [--all] [--syntax] [file.cu ...]

Needs NVRTC alone: no driver, no CuPy, and of ggml-sched only the sources.  The options are those of the package.  For
each architecture and kernel it gives registers, shared memory, stack and spills as ptxas reports them.  Exits with 1 if
a kernel does not compile, spills or has a stack frame, itself or in what it calls, or if ptxas names no kernel at all.
None has a stack by design.
`--overlap` compiles them for launches that overlap, which are possible from sm_90 on.
With `--syntax` it makes no machine code, and finds only what does not compile: in seconds instead of a minute.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "ggml_sched" / "backends" / "cupy" / "kernels"
ARCHITECTURES = ("sm_80", "sm_90")
MORE = dict.fromkeys(("mma_", "attention_mma"), ("sm_89", "sm_120"))
"""{how a file's name begins: further architectures, whose tensor cores its kernels use}, where NVRTC knows them."""
SYNTAX = "--fdevice-syntax-only"
VERBOSE = "--ptxas-options=-v"


class Usage(NamedTuple):
    """The resources of a kernel: registers by number, the others in bytes."""

    name: str
    registers: int
    shared: int
    stack: int
    spills: int


class Nvrtc:
    """The few calls of NVRTC that are needed."""

    def __init__(self, path: str) -> None:
        self._lib = ctypes.CDLL(path)
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = f"{major.value}.{minor.value}"

        n = ctypes.c_int()
        self._check(self._lib.nvrtcGetNumSupportedArchs(ctypes.byref(n)))
        numbers = (ctypes.c_int * n.value)()
        self._check(self._lib.nvrtcGetSupportedArchs(numbers))
        self.architectures = {f"sm_{number}" for number in numbers}

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(self._lib.nvrtcGetErrorString(status).decode())

    def compile(self, name: str, text: str, *options: str) -> tuple[bool, str, int]:
        """(whether it compiles, the compilers' messages, bytes of machine code)."""
        program = ctypes.c_void_p()
        self._check(self._lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None))
        try:
            status = self._lib.nvrtcCompileProgram(
                program, len(options), (ctypes.c_char_p * len(options))(*(option.encode() for option in options)))
            size = ctypes.c_size_t()
            self._check(self._lib.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            self._check(self._lib.nvrtcGetProgramLog(program, log))
            code = ctypes.c_size_t()
            if not status and SYNTAX not in options:
                self._check(self._lib.nvrtcGetCUBINSize(program, ctypes.byref(code)))
            return not status, log.value.decode(errors="replace"), code.value
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def ptx(self, name: str, text: str, arch: str) -> str:
        """The PTX of a source for an architecture, "compute_90"."""
        program = ctypes.c_void_p()
        self._check(self._lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None))
        try:
            given = [option.encode() for option in of_package("compiled").options(arch)]
            self._check(self._lib.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given)))
            size = ctypes.c_size_t()
            self._check(self._lib.nvrtcGetPTXSize(program, ctypes.byref(size)))
            found = ctypes.create_string_buffer(size.value)
            self._check(self._lib.nvrtcGetPTX(program, found))
            return found.value.decode()
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))


def find_nvrtc() -> str | None:
    """The library: of NVIDIA's wheels, or of a CUDA that is installed."""
    for folder in dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path)):
        found = sorted(Path(folder or ".").glob("nvidia/*/lib/libnvrtc.so.*"))
        # Beside it lie builtins and, for other linkers, an alternative.
        found = [path for path in found if re.fullmatch(r"libnvrtc\.so\.\d+", path.name)]
        if found:
            return str(found[-1])
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            ctypes.CDLL(name)
            return name
        except OSError:
            continue
    return None


def architectures(nvrtc: Nvrtc, file: Path) -> list[str]:
    """For which a file is compiled."""
    more = [arch for start, those in MORE.items() if file.name.startswith(start) for arch in those]
    return [*ARCHITECTURES, *(arch for arch in more if arch in nvrtc.architectures)]


def usages(log: str) -> list[Usage]:
    """Parses ptxas's output: for each kernel, the largest usage of itself and of the functions that it calls."""
    found = []
    for name, said in re.findall(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry function|\Z)", log, re.S):
        found.append(Usage(name, *(max(map(int, re.findall(rf"(\d+) {what}", said)), default=0) for what in (
            "registers", "bytes smem", "bytes (?:stack frame|cumulative stack)", "bytes spill (?:stores|loads)"))))
    return found


@cache
def of_package(name: str) -> ModuleType:
    """A module of the package's CUDA backend that imports nothing compiled."""
    spec = importlib.util.spec_from_file_location(f"cuda_{name}", ROOT / "ggml_sched/backends/cupy" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_of(path: Path, overlap: bool = False) -> str:
    """The text of a source with its includes, as the package reads it."""
    return of_package("source").kernel_source(path.stem, path.parent, overlap=overlap)


def compiled(nvrtc: Nvrtc, file: Path, options: Sequence[str], cache: Path | None, overlap: bool = False
             ) -> tuple[bool, str, int]:
    """`Nvrtc.compile` of a file; with a cache, equal sources are compiled once by each version of NVRTC."""
    text = source_of(file, overlap)
    key = hashlib.sha256(repr((nvrtc.version, options, file.name, text)).encode()).hexdigest()[:24]
    kept = None if cache is None else cache / f"nvrtc-{key}.json"
    if kept is not None and kept.is_file():
        return tuple(json.loads(kept.read_text(encoding="utf-8")))
    result = nvrtc.compile(file.name, text, *options)
    if kept is not None:
        half = kept.with_suffix(f".{os.getpid()}.part")
        half.write_text(json.dumps(result), encoding="utf-8")
        half.replace(kept)          # no reader sees half a file
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="sources (default: the package's kernels)")
    parser.add_argument("--arch", action="append",
                        help=f"default: {' and '.join(ARCHITECTURES)}, more for tensor cores")
    parser.add_argument("--overlap", action="store_true", help="for launches that overlap")
    parser.add_argument("--all", action="store_true", help="list every kernel, not only those in trouble")
    parser.add_argument("--syntax", action="store_true", help="make no machine code, and look for no spills")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="a folder for results, reused for equal sources")
    options = parser.parse_args(arguments)
    path = find_nvrtc()
    if path is None:
        print("no NVRTC: pip install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12", file=sys.stderr)
        return 2
    nvrtc = Nvrtc(path)
    files = options.files or sorted(KERNELS.glob("*.cu"))
    more = [VERBOSE, *([SYNTAX] if options.syntax else [])]
    bad = kernels = 0
    jobs = [(file, arch) for file in files for arch in options.arch or architectures(nvrtc, file)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda job: compiled(nvrtc, job[0], [*of_package("compiled").options(job[1]), *more],
                                                options.cache, options.overlap), jobs)
        for (file, arch), (good, log, size) in zip(jobs, results, strict=True):
            found = usages(log)
            if not good or not (found or options.syntax):
                bad += 1
                print(f"{file.name} for {arch} {'has no kernel' if good else 'does not compile'} "
                      f"(NVRTC {nvrtc.version}):\n{log}")
                continue
            kernels += len(found)
            print(f"{file.name} for {arch}: {len(found)} kernels, {size} bytes")
            for usage in found:
                is_bad = bool(usage.stack or usage.spills)
                bad += is_bad
                if is_bad or options.all:
                    print(f"    {usage.name:<40} {usage.registers:3} registers, {usage.shared:6} bytes shared, "
                          f"stack {usage.stack}, spills {usage.spills}{'   <--' if is_bad else ''}")
    fine = "all compile" if options.syntax else "no spills, no stack"
    print(f"{kernels} kernels of {len(files)} files by NVRTC {nvrtc.version}: {f'{bad} in trouble' if bad else fine}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
