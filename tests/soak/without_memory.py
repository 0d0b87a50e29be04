"""Runs acts on the compiled core while allocations fail, of the core's own malloc or of Python's allocator.

A program, not a test: a crash would take the tests with it.  `python without_memory.py ALLOCATOR ACT ... [--step N]`
runs each act (acts.py) while its n-th allocation fails, and while more do, for n = 0, N, 2 N ...; it prints the act's
name, how often it ran, and how often it failed.  Each act must then still work.

malloc  failing_malloc.so is preloaded; the n-th call of the core fails, then all from it on.  A failure must be an
        OutOfMemory that says what for, and leave nothing allocated.
python  Python's allocator fails at its n-th call, then at some in a row.  A failure must be a MemoryError.
"""

import argparse
import ctypes
import gc
import sys
from pathlib import Path

from acts import ACTS

import ggml_sched as gs

WIDE = 16
"""Allocations of Python that fail in a row.  Not all from one on: without any memory CPython tries for ever to unwind a
frame, and with none for 32 calls it gives up making the exception."""
LACKING = ("the host gives no memory for", "no host memory")
LOST = ("error return without exception set", "returned NULL without setting an exception")
"""CPython and NumPy drop a few MemoryErrors on the way: making the code object of a traceback, reducing an array."""


class Malloc:
    """The compiled core's calls of malloc, by failing_malloc.so."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(None)
        for name, arguments in (("watch", [ctypes.c_void_p] * 2), ("fail", [ctypes.c_long] * 2), ("calls", []),
                                ("held", [])):
            function = getattr(self.library, f"failing_malloc_{name}")
            function.argtypes, function.restype = arguments, ctypes.c_long
        package = str(Path(gs.__file__).resolve().parent)
        for line in Path("/proc/self/maps").read_text().splitlines():
            where, access, *_, path = line.split(maxsplit=5)
            if "x" in access and path.startswith(package):
                self.library.failing_malloc_watch(*(int(word, 16) for word in where.split("-")))

    def fails(self, act, first: int, last: int) -> bool:
        """Whether an act fails when its calls from `first` to `last` do."""
        gc.collect()
        held, failed = self.library.failing_malloc_held(), False
        self.library.failing_malloc_fail(first, last)
        try:
            act()
        except gs.OutOfMemory as error:
            failed = True
            assert any(words in str(error) for words in LACKING), error
        finally:
            self.library.failing_malloc_fail(0, 0)
        gc.collect()
        leaked = self.library.failing_malloc_held() - held
        assert leaked == 0, f"{leaked} blocks are still held after call {first} failed"
        return failed

    def run(self, act, step: int, first: int) -> tuple[int, int]:
        """(number of runs, number of failures)."""
        runs, failures = 0, 0
        self.library.failing_malloc_fail(0, 0)
        act()
        calls = self.library.failing_malloc_calls()
        assert not self.fails(act, 0, 0)     # and nothing leaks
        for n in range(1 + first, calls + 1, step):
            failures += self.fails(act, n, n) + self.fails(act, n, 1 << 30)
            runs += 2
            act()
        return runs, failures


class PythonAllocator:
    """Python's own allocator."""

    def fails(self, act, start: int, stop: int) -> bool:
        """Whether an act fails for want of memory: the allocator gives none from call `start` to `stop`."""
        import _testcapi

        error = None
        _testcapi.set_nomemory(start, stop)
        try:
            act()
        except BaseException as caught:
            error = caught
        finally:
            _testcapi.remove_mem_hooks()
        if error is not None and not lacks_memory(error):
            raise error
        return error is not None

    def run(self, act, step: int, first: int) -> tuple[int, int]:
        """How many runs there were before the last five turns, which succeed, and how many failed."""
        runs, failures, start, idle = 0, 0, first, 0
        while idle < 5:
            failures += self.fails(act, start, start + 1)
            failed = self.fails(act, start, start + WIDE)
            runs, failures, start = runs + 2, failures + failed, start + step
            idle = 0 if failed else idle + 1
        gc.collect()
        return runs - 2 * idle, failures


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that memory is missing."""
    words = str(error)
    return (isinstance(error, MemoryError) or words == "can't allocate lock"
            or isinstance(error, SystemError) and words.endswith(LOST))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("allocator", choices=("malloc", "python"))
    parser.add_argument("acts", nargs="+", choices=ACTS)
    parser.add_argument("--step", type=int, default=1, help="try only every N-th allocation")
    parser.add_argument("--first", type=int, default=0, help="from this one on")
    options = parser.parse_args()
    allocator = Malloc() if options.allocator == "malloc" else PythonAllocator()
    for name in options.acts:
        act = ACTS[name]
        act()       # creates what is cached on first use
        print(name, *allocator.run(act, options.step, options.first), flush=True)
        act()
    return 0


if __name__ == "__main__":
    sys.exit(main())
