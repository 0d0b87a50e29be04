"""CUDA devices: `CupyBackend`, with kernels of this package, over CuPy.

    device      the interface of a device, and its errors; real: its implementation over CuPy
    kernels     CUDA C++, one source for GPUs and for the host
    ops, launch the nodes that kernels compute, and their launches
    staging     pinned memory between host and device
    buffer      memory of a device
    plan        the launches of a split, captured once and replayed
    backend     CupyBackend

Importing this needs neither CuPy nor a GPU; making a backend for a number does.
"""

from __future__ import annotations

from ggml_sched.backends.cupy.backend import CupyBackend

__all__ = ["CupyBackend"]
