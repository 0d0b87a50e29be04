"""ggml's own kernels: `GgmlBackend`, over the shared libraries of an installed ggml.

    library          finding, loading and querying the libraries; probe: checks the layout of their structs
    _ggml            a split as ggml graphs over the plan's addresses, compiled once; ids checked before each replay
    supported_ops.h  the nodes that ggml computes correctly
    rows.h           checks of row ids; ARGSORT, TOP_K and ARGMAX of this package
    abi.h            declarations of ggml's structs and functions
    buffer           host memory with repacked weights, or memory of a device
    backend          GgmlBackend
"""

from __future__ import annotations

from ggml_sched.backends.ggml.backend import GgmlBackend

__all__ = ["GgmlBackend"]
