"""Small CUDA sources of tests, on emulated devices."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from cuda_emulator import EmulatedDevice
from cuda_emulator.compile import compiler

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels for the host")


class Bench:
    """An emulated device, a stream of it and the kernels of one source, which is written to `folder`."""

    def __init__(self, source: str, folder: Path, device: EmulatedDevice | None = None) -> None:
        (folder / "probe.cu").write_text(source, encoding="utf-8")
        self.device = device or EmulatedDevice()
        self.stream = self.device.stream()
        self.folder = folder

    def function(self, name: str):
        return self.device.function(f"probe.{name}", self.folder)

    def up(self, array: np.ndarray):
        memory = self.device.alloc(array.nbytes)
        self.stream.copy_in(memory.ptr, array)
        return memory

    def down(self, memory, like: np.ndarray) -> np.ndarray:
        out = np.empty_like(like)
        self.stream.copy_out(out, memory.ptr)
        return out

    def launch(self, name: str, grid: int | Sequence[int], block: int | Sequence[int], *args, shared: int = 0) -> None:
        """Queue a launch; an argument that is memory is passed as its address."""
        function = self.function(name)
        packed = function.pack([np.uint64(arg.ptr) if hasattr(arg, "ptr") else arg for arg in args])
        sizes = [(n,) if isinstance(n, int) else n for n in (grid, block)]
        function.launch(*sizes, packed, shared, self.stream)

    def run(self, name: str, grid, block, *args, shared: int = 0) -> None:
        self.launch(name, grid, block, *args, shared=shared)
        self.stream.synchronize()


def run_sanitized(kind: str, code: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python code in a process whose kernels are compiled with a sanitizer ("address", "undefined")."""
    env = os.environ | {"GGML_SCHED_EMULATOR_SANITIZE": kind, "UBSAN_OPTIONS": "print_stacktrace=1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    if "address" in kind:
        command = [*compiler(), "-print-file-name=libasan.so"]
        asan = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if not os.path.isabs(asan):
            pytest.skip("no libasan beside g++")
        env |= {"LD_PRELOAD": asan, "ASAN_OPTIONS": "detect_leaks=0:exitcode=77"}
    return subprocess.run([sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True)
