"""ggml-sched: where every tensor of a graph lives, which device computes it, and running it."""

from __future__ import annotations

import os as _os

try:
    from ggml_sched import _core
except ImportError as error:  # pragma: no cover - only without a compiled core
    raise ImportError(
        "ggml_sched._core is not compiled; run `pip install .` in the source tree "
        f"(and leave the tree before importing): {error}"
    ) from error

from ggml_sched._core import Allocator, Context, Graph, GraphAllocator, Packing, Tensor, TensorAllocator, Type, pack
from ggml_sched.backend import Backend, Buffer, GraphView, get_backend, tensor_copy
from ggml_sched.backends.dry import DryBackend
from ggml_sched.errors import (
    BackendError,
    Error,
    FileFormatError,
    GraphError,
    HazardError,
    OutOfMemory,
    PlacementError,
    UnsupportedOp,
)
from ggml_sched.graphfile import load_graph, save_graph
from ggml_sched.plan import Copy, Plan, Split
from ggml_sched.scheduler import Scheduler

__version__ = "0.1.0"

__all__ = [
    "Allocator",
    "Backend",
    "BackendError",
    "Buffer",
    "Context",
    "Copy",
    "CpuBackend",
    "DryBackend",
    "Error",
    "FileFormatError",
    "Graph",
    "GraphAllocator",
    "GraphError",
    "GraphView",
    "HazardError",
    "OutOfMemory",
    "Packing",
    "PlacementError",
    "Plan",
    "Scheduler",
    "Split",
    "Tensor",
    "TensorAllocator",
    "Type",
    "UnsupportedOp",
    "get_backend",
    "get_include",
    "load_graph",
    "pack",
    "save_graph",
    "tensor_copy",
]


def get_include() -> str:
    """The folder to add to a compiler's include path for `#include "ggml_sched/status.h"`."""
    here = _os.path.dirname(_os.path.abspath(__file__))
    installed = _os.path.join(here, "include")
    return installed if _os.path.isdir(installed) else _os.path.join(_os.path.dirname(here), "include")


def __getattr__(name: str):
    # The CPU backend and its kernels load when first asked for: planning does not need them.
    if name == "CpuBackend":
        from ggml_sched.backends.cpu import CpuBackend

        globals()[name] = CpuBackend
        return CpuBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
