"""ggml's own kernels under our plans: `GgmlBackend`, over the shared libraries of an installed ggml.

    library          finding, loading and querying the libraries; probe: whether their structs are as declared here
    _ggml            a split as ggml graphs over our addresses, compiled once; ids checked before each replay
    supported_ops.h  which nodes ggml computes, and computes right
    rows.h           ids that name no row; our ARGSORT, TOP_K and ARGMAX
    abi.h            declarations of ggml's structs and functions
    buffer           host memory with repacked weights, or memory of a device
    backend          GgmlBackend
"""

from __future__ import annotations

from ggml_sched.backends.ggml.backend import GgmlBackend

__all__ = ["GgmlBackend"]
