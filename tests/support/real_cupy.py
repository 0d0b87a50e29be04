"""CUDA backends through the real CuPy, over the stub of CUDA: for tests where CuPy is installed and no GPU is.

The stub stays in the process, so one world serves all tests of it; `world(late)` sets it back.
"""

import gc
from functools import cache

import cuda_stub

import ggml_sched as gs

MISSING = cuda_stub.missing()
"""What the stub needs and is not there, or None."""


@cache
def _installed() -> cuda_stub.World:
    return cuda_stub.install(devices=2)


def world(late: bool = False) -> cuda_stub.World:
    """The stub's state, with nothing planted, nothing complained of and nothing left of other tests."""
    made = _installed()
    gc.collect()
    made.forget()
    made.late = late
    made.failing.clear()
    made.failing_once.clear()
    made.complaints.clear()
    made.counts.clear()
    made.launched.clear()
    made.early.clear()
    return made


def backend(number: int = 0, **options) -> gs.CupyBackend:
    return gs.CupyBackend(number, **{"staging": 1 << 16, **options})
