"""Compiles kernel sources by NVRTC, and keeps the machine code in CuPy's folder of kernels.

CuPy's own compiler wants CUDA's headers, which no kernel of this package includes.  The folder is what CUPY_CACHE_DIR
names, else ~/.cupy/kernel_cache; where it cannot be written, each process compiles.  A file has the SHA-256 of the
machine code, then the code; a program whose file does not match its SHA-256 is compiled anew.  The logger
"ggml_sched.cupy" says at level INFO when a compilation, which takes seconds, begins and ends.
Imports nothing of the package: tools/check_cuda.py compiles with the same options where the package is not built.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import ModuleType

__all__ = ["COMPILED", "COMPILING", "LOG", "CompileError", "machine_code", "options"]

LOG = logging.getLogger("ggml_sched.cupy")
COMPILING, COMPILED = "compiling %s.cu for %s", "compiled %s.cu for %s in %.1f s"
"""What is logged before and after the compilation of a program; the second only if it compiles."""

DIGEST = 32
"""Bytes of the SHA-256 with which a file begins."""


class CompileError(Exception):
    """NVRTC refuses a source; the message is NVRTC's log."""


def options(arch: str) -> tuple[str, ...]:
    """NVRTC's options for an architecture, such as "sm_90", or "compute_90" for PTX."""
    return f"--gpu-architecture={arch}", "--std=c++17"


def machine_code(nvrtc: ModuleType, name: str, text: str, arch: str) -> bytes:
    """The machine code (cubin) of a source for an architecture such as "sm_90": from CuPy's folder, or compiled.

    `nvrtc`: CuPy's bindings.  Raises CompileError.  Several threads may call this at once: NVRTC runs without the
    interpreter's lock.
    """
    key = sha256(repr((nvrtc.getVersion(), options(arch), text)).encode()).hexdigest()
    path = _folder() / f"ggml-sched-{name}-{key[:32]}.cubin"
    found = _read(path)
    if found is None:
        start = time.perf_counter()
        LOG.info(COMPILING, name, arch)
        found = _compile(nvrtc, name, text, arch)
        _write(path, found)
        LOG.info(COMPILED, name, arch, time.perf_counter() - start)
    return found


def _folder() -> Path:
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    code = data[DIGEST:]
    return code if sha256(code).digest() == data[:DIGEST] else None


def _write(path: Path, code: bytes) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, delete=False) as file:
            file.write(sha256(code).digest() + code)
        try:
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)


def _compile(nvrtc: ModuleType, name: str, text: str, arch: str) -> bytes:
    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, options(arch))
        except nvrtc.NVRTCError as error:
            raise CompileError(nvrtc.getProgramLog(program).strip() or str(error)) from error
        code: bytes = nvrtc.getCUBIN(program)
        return code
    finally:
        nvrtc.destroyProgram(program)
