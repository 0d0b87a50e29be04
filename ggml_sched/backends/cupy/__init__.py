"""CUDA devices: `CupyBackend`, with kernels of this package, over CuPy.

    device      the interface of a device, and its errors; real: its implementation over CuPy
    kernels     CUDA C++; tests compile the same source for the host
    ops, launch which nodes kernels compute, and with which launches
    staging     pinned memory, through which copies between host and device go
    buffer      memory of a device; packed, repack: weights in it whose blocks are rearranged
    plan        the launches of a split, captured once as a CUDA graph and replayed
    queue       the device's one queue: copies, launches, waits; fault: invalid data that kernels find
    backend     CupyBackend

Importing this package needs neither CuPy nor a GPU; making a backend for a number needs both.
"""

from __future__ import annotations

from ggml_sched.backends.cupy.backend import CupyBackend

__all__ = ["CupyBackend"]
