"""ggml's own kernels under our plans: `GgmlBackend`, over the shared libraries of an installed ggml.

    library     finding, loading and asking the libraries; probe: are its structs as we know them
    _ggml       a split as ggml graphs over our addresses, compiled once; ids checked before each replay
    table.h     which nodes ggml computes, and computes right
    rows.h      ids that name no row; our ARGSORT, TOP_K and ARGMAX
    abi.h       what we take ggml's structs and functions to be
    buffer      host memory with packed weights, or memory of a device
    backend     GgmlBackend
"""

from __future__ import annotations

from ggml_sched.backends.ggml.backend import GgmlBackend

__all__ = ["GgmlBackend"]
