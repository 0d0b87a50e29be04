"""CUDA devices under our plans: `CupyBackend`, kernels of our own, over CuPy.

    device      the calls of a device, and its errors; real: over CuPy
    kernels     CUDA C++, one source for both
    ops, launch which nodes they compute, and with which launches
    staging     pinned memory between host and device
    buffer      memory of a device
    plan        the launches of a split, captured once and replayed
    backend     CupyBackend

Importing this needs neither CuPy nor a GPU; making a backend for a number does.
"""

from __future__ import annotations

from ggml_sched.backends.cupy.backend import CupyBackend

__all__ = ["CupyBackend"]
