"""ggml's own kernels: `GgmlBackend`, over the shared libraries of an installed ggml.

    library          finds, loads and queries the libraries
    probe            checks that the library's tensors have the layout that abi.h declares
    _ggml            compiles a split once to ggml graphs over the plan's addresses, and runs them for each compute
    supported_ops.h  which nodes ggml computes correctly
    rows.h           checks of row ids, and this package's own ARGSORT, TOP_K and ARGMAX
    abi.h            declarations of ggml's structs and functions
    buffer           host memory with repacked weights, or memory of a device
    backend          GgmlBackend
"""

from __future__ import annotations

from ggml_sched.backends.ggml.backend import GgmlBackend

__all__ = ["GgmlBackend"]
