"""How long NVRTC compiles what a model's first token needs, program by program: without a GPU, and without a driver.

    pip install cupy-cuda13x nvidia-cuda-nvrtc          # or cupy-cuda12x nvidia-cuda-nvrtc-cu12
    python bench/gpu_compile.py [MODEL ...] [--arch sm_90] [--tokens N] [--overlap]

The backend plans a token, and a prompt, on an emulated device; what their kernels need is compiled as on a GPU, in
threads, by the same code, and once more from a folder that has it ("warm").  CPU seconds are those of the thread that
compiles a program; wall seconds of all depend on the cores that the machine has, and on what else it does.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import NamedTuple
from unittest.mock import patch

import gpu_launches

from ggml_sched.backends.cupy.ops.library import PRODUCT
from ggml_sched.backends.cupy.real import Program, program_of
from ggml_sched.planning.tables import markdown

__all__ = ["TARGET", "Compiled", "compile_all", "kernels_of", "main"]

TARGET = 5.0
"""Seconds that the first token of a model never compiled before may take beyond loading."""

WEIGHTS = "repack.pack"
"""The kernel that loading weights needs."""


class Compiled(NamedTuple):
    """A program that was compiled: CPU seconds, and bytes of machine code."""

    program: Program
    seconds: float
    size: int


def kernels_of(model: str, n_tokens: int) -> list[str]:
    """The kernels of a token behind 255 others, of a prompt, and of the weights' loading: "module.function"."""
    found = [WEIGHTS]
    for rows, n in ((256, 1), (max(256, n_tokens), n_tokens)):
        found += [launch.kernel for launch in gpu_launches.launched(gpu_launches.graph_of(model, rows, n))]
    return [kernel for kernel in dict.fromkeys(found) if kernel != PRODUCT]


def compile_all(nvrtc: ModuleType, kernels: Iterable[str], arch: str, overlap: bool, folder: str
                ) -> tuple[list[Compiled], float]:
    """The programs of kernels, compiled together as by `CupyDevice.load` or read from a folder, and wall seconds."""
    programs = list(dict.fromkeys(program_of(kernel, overlap) for kernel in kernels))

    def one(program: Program) -> Compiled:
        start = time.thread_time()
        code = program.compiled(nvrtc, arch)
        return Compiled(program, time.thread_time() - start, len(code))

    with (patch.dict(os.environ, CUPY_CACHE_DIR=folder),
          ThreadPoolExecutor(min(len(programs), os.cpu_count() or 1)) as pool):
        start = time.perf_counter()
        return list(pool.map(one, programs)), time.perf_counter() - start


def bindings() -> ModuleType:
    """CuPy's bindings of NVRTC; ImportError without them."""
    from cupy_backends.cuda.libs import nvrtc
    found: ModuleType = nvrtc
    found.getVersion()
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["llama-2-7b"],
                        help=f"of {', '.join(gpu_launches.MODELS)} (default: llama-2-7b)")
    parser.add_argument("--arch", default="sm_90", help="the device's architecture (default sm_90)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the prompt (default 512)")
    parser.add_argument("--overlap", action="store_true", help="for launches that overlap")
    options = parser.parse_args(arguments)
    try:
        nvrtc = bindings()
    except (ImportError, RuntimeError, OSError) as error:
        print(f"no NVRTC: pip install cupy-cuda13x nvidia-cuda-nvrtc, or cupy-cuda12x nvidia-cuda-nvrtc-cu12 ({error})",
              file=sys.stderr)
        return 1
    for model in options.models:
        kernels = kernels_of(model, options.tokens)
        with tempfile.TemporaryDirectory() as folder:
            given = (nvrtc, kernels, options.arch, options.overlap, folder)
            (cold, wall), (warm, again) = compile_all(*given), compile_all(*given)
        total, longest = sum(one.seconds for one in cold), max(one.seconds for one in cold)
        print(f"{model} for {options.arch}{', launches that overlap' * options.overlap}, a token and a prompt of "
              f"{options.tokens}, by NVRTC {'.'.join(map(str, nvrtc.getVersion()))}: {len(cold)} programs, "
              f"{total:.1f} CPU seconds, the longest {longest:.1f}; {wall:.1f} s on {os.cpu_count()} cores, "
              f"{again:.2f} s warm; the target is {TARGET:g} s\n")
        needs = Counter(program_of(kernel, options.overlap) for kernel in kernels)
        rows = [[one.program.name, needs[one.program], f"{one.seconds:.2f}", f"{1e3 * kept.seconds:.1f}",
                 f"{one.size / 1e3:,.0f}"] for one, kept in zip(cold, warm, strict=True)]
        rows.sort(key=lambda row: -float(row[2]))
        print(markdown(["program", "kernels", "CPU s", "warm, ms", "KB"], rows), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
