"""Runs acts on the compiled core while Python's own allocator fails: once at its n-th call, or at some in a row.

A program, not a test: a crash would take the tests with it.  `python python_without_memory.py ACT ... [--step N]` runs
each act (acts.py) for n = 0, N, 2 N ... until it needs no more, and prints its name, how often it ran, and how often
it failed.  Anything but success or a MemoryError is a traceback; the act must then still work.
"""

from __future__ import annotations

import _testcapi
import argparse
import gc
import sys

from acts import ACTS

WIDE = 16
"""Allocations that fail in a row.  Not all from one on: without any memory CPython tries for ever to unwind a frame,
and with none for 32 calls it gives up making the exception."""


LOST = ("error return without exception set", "returned NULL without setting an exception")
"""CPython and NumPy drop a few MemoryErrors on the way: making the code object of a traceback, reducing an array."""


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that memory is missing."""
    words = str(error)
    return (isinstance(error, MemoryError) or words == "can't allocate lock"
            or isinstance(error, SystemError) and words.endswith(LOST))


def fails(act, start: int, stop: int) -> bool:
    """Whether an act fails for want of memory: Python's allocator gives none from call `start` to `stop`."""
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


def run(name: str, step: int, first: int) -> tuple[int, int]:
    """How many runs there were before the last five turns, which succeed, and how many failed."""
    act, runs, failures, start, idle = ACTS[name], 0, 0, first, 0
    act()       # creates what is cached on first use
    while idle < 5:
        failures += fails(act, start, start + 1)
        failed = fails(act, start, start + WIDE)
        runs, failures, start = runs + 2, failures + failed, start + step
        idle = 0 if failed else idle + 1
    gc.collect()
    act()
    return runs - 2 * idle, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("acts", nargs="+", choices=ACTS)
    parser.add_argument("--step", type=int, default=1, help="try only every N-th allocation")
    parser.add_argument("--first", type=int, default=0, help="from this one on")
    options = parser.parse_args()
    for act in options.acts:
        print(act, *run(act, options.step, options.first), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
