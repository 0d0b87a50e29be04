"""Runs acts on the compiled core while its own malloc fails: at the n-th call, or from it on.

A program, run with failing_malloc.so preloaded: `python core_without_memory.py ACT ... [--step N]` runs each act
(acts.py) once for each n, both ways, and prints its name, how often it ran, and how often it failed.  A failure must
be an OutOfMemory that says what for, must leave nothing allocated, and the act must then still work.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
from pathlib import Path

from acts import ACTS

import ggml_sched as gs

LIBRARY = ctypes.CDLL(None)
for name, arguments in (("watch", [ctypes.c_void_p] * 2), ("fail", [ctypes.c_long] * 2), ("calls", []), ("held", [])):
    function = getattr(LIBRARY, f"failing_malloc_{name}")
    function.argtypes, function.restype = arguments, ctypes.c_long


def watch_the_core() -> None:
    """Make failing_malloc.so fail the calls of the compiled core only."""
    package = str(Path(gs.__file__).resolve().parent)
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, access, *_, path = line.split(maxsplit=5)
        if "x" in access and path.startswith(package):
            begin, end = (int(word, 16) for word in where.split("-"))
            LIBRARY.failing_malloc_watch(begin, end)


def fails(act, first: int, last: int) -> bool:
    """Whether an act fails when its calls from `first` to `last` do."""
    gc.collect()
    held, failed = LIBRARY.failing_malloc_held(), False
    LIBRARY.failing_malloc_fail(first, last)
    try:
        act()
    except gs.OutOfMemory as error:
        failed = True
        assert "the host gives no memory for" in str(error), error
    finally:
        LIBRARY.failing_malloc_fail(0, 0)
    gc.collect()
    leaked = LIBRARY.failing_malloc_held() - held
    assert leaked == 0, f"{leaked} blocks are still held after call {first} failed"
    return failed


def run(name: str, step: int) -> tuple[int, int]:
    """(number of runs, number of failures)."""
    act, runs, failures = ACTS[name], 0, 0
    act()       # creates what is cached on first use
    LIBRARY.failing_malloc_fail(0, 0)
    act()
    calls = LIBRARY.failing_malloc_calls()
    assert not fails(act, 0, 0)     # and nothing leaks
    for n in range(1, calls + 1, step):
        failures += fails(act, n, n)
        failures += fails(act, n, 1 << 30)
        runs += 2
        act()
    return runs, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("acts", nargs="+", choices=ACTS)
    parser.add_argument("--step", type=int, default=1, help="try only every N-th call")
    options = parser.parse_args()
    watch_the_core()
    for act in options.acts:
        print(act, *run(act, options.step), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
