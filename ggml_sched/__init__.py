"""ggml-sched: where every tensor of a graph lives, which device computes it, and running it."""

from __future__ import annotations

import os as _os
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

try:
    from ggml_sched._core import (
        Allocator,
        Context,
        Graph,
        GraphAllocator,
        Packing,
        Tensor,
        TensorAllocator,
        Type,
        pack,
    )
    from ggml_sched._core import register_host_memory as _register_host_memory
except ImportError as error:  # pragma: no cover - only without a compiled core
    raise ImportError(
        "ggml_sched._core is not compiled; run `pip install .` in the source tree "
        f"(and leave the tree before importing): {error}"
    ) from error

from ggml_sched.backend import Backend, Buffer, Event, GraphView, bind_resident, get_backend, tensor_copy
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
from ggml_sched.execution.scheduler import Scheduler
from ggml_sched.graph.graphfile import load_graph, save_graph
from ggml_sched.planning import report as _report  # noqa: F401 - registers methods of Plan, as planfile and verify do
from ggml_sched.planning import verify as _verify  # noqa: F401
from ggml_sched.planning.plan import Copy, Plan, Split
from ggml_sched.planning.planfile import load_plan
from ggml_sched.planning.program import Program
from ggml_sched.testing import compare
from ggml_sched.testing.compare import NodeDifference

__version__ = "0.1.0"

__all__ = [
    "Allocator",
    "Backend",
    "BackendError",
    "Buffer",
    "Context",
    "Copy",
    "CpuBackend",
    "CupyBackend",
    "DryBackend",
    "Error",
    "Event",
    "FileFormatError",
    "GgmlBackend",
    "Graph",
    "GraphAllocator",
    "GraphError",
    "GraphView",
    "HazardError",
    "NodeDifference",
    "OutOfMemory",
    "Packing",
    "PlacementError",
    "Plan",
    "Program",
    "Scheduler",
    "Split",
    "Tensor",
    "TensorAllocator",
    "Type",
    "UnsupportedOp",
    "bind_resident",
    "compare",
    "get_backend",
    "get_include",
    "load_graph",
    "load_plan",
    "pack",
    "save_graph",
    "tensor_copy",
]


def get_include() -> str:
    """The folder to add to a compiler's include path for `#include "ggml_sched/status.h"`."""
    here = _os.path.dirname(_os.path.abspath(__file__))
    installed = _os.path.join(here, "include")
    return installed if _os.path.isdir(installed) else _os.path.join(_os.path.dirname(here), "include")


def _host_memory(memory) -> Buffer:
    """The caller's memory as a buffer of a CPU backend."""
    from ggml_sched.backends.cpu import CpuBackend

    return CpuBackend().buffer_from_ptr(memory)


# What allocators need of a module above them: the compiled parts import none.
_register_host_memory(_host_memory)

# Planning needs neither kernels nor the runner: they load when first asked for.
_LAZY = {"CpuBackend": "ggml_sched.backends.cpu", "CupyBackend": "ggml_sched.backends.cupy",
         "GgmlBackend": "ggml_sched.backends.ggml", "llama": "ggml_sched.llama"}

if _TYPE_CHECKING:
    from ggml_sched import llama as llama
    from ggml_sched.backends.cpu import CpuBackend as CpuBackend
    from ggml_sched.backends.cupy import CupyBackend as CupyBackend
    from ggml_sched.backends.ggml import GgmlBackend as GgmlBackend


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _import_module(_LAZY[name])
    value = globals()[name] = getattr(module, name, module)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
