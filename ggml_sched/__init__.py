"""ggml-sched: where every tensor of a graph lives, which device computes it, and running it."""

from __future__ import annotations

import os as _os
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

try:
    from ggml_sched.core.graph.types import Type
except ImportError as _error:
    from ggml_sched._build_errors import raise_explained

    raise_explained(_error)

from ggml_sched._late import homes_of as _homes_of
from ggml_sched._late import late as _late
from ggml_sched.errors import (
    BackendError,
    BackendLost,
    Error,
    FetchError,
    FileFormatError,
    GraphError,
    HazardError,
    OutOfMemory,
    PlacementError,
    UnsupportedOp,
)

__version__ = "0.1.0"

__all__ = [
    "Allocator",
    "Arenas",
    "Backend",
    "BackendError",
    "BackendLost",
    "Buffer",
    "Context",
    "Copy",
    "CpuBackend",
    "CupyBackend",
    "Device",
    "DryBackend",
    "DryStore",
    "Error",
    "Event",
    "FetchError",
    "FileFormatError",
    "FileStore",
    "Fit",
    "GgmlBackend",
    "Graph",
    "GraphAllocator",
    "GraphError",
    "GraphView",
    "HazardError",
    "Link",
    "NodeDifference",
    "OutOfMemory",
    "Packing",
    "PlacementError",
    "Plan",
    "Price",
    "Program",
    "Scheduler",
    "Split",
    "Stock",
    "Store",
    "Tensor",
    "TensorAllocator",
    "Trace",
    "Type",
    "UnsupportedOp",
    "bind_resident",
    "compare",
    "fit",
    "get_backend",
    "get_cython_path",
    "get_include",
    "load_graph",
    "load_plan",
    "measure",
    "pack",
    "price",
    "save_graph",
    "tensor_copy",
]


def get_include() -> str:
    """The folder to add to a compiler's include path for `#include "ggml_sched/status.h"`."""
    here = _os.path.dirname(_os.path.abspath(__file__))
    installed = _os.path.join(here, "include")
    return installed if _os.path.isdir(installed) else _os.path.join(_os.path.dirname(here), "include")


def get_cython_path() -> str:
    """The folder to add to Cython's include path for `cimport ggml_sched` (`cythonize(..., include_path=[...])`).

    Cython finds an installed package without it, but not one that was installed with `pip install -e`.
    """
    return _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))


def _host_memory(memory: Memory) -> Buffer:
    """A buffer of a CPU backend over the caller's memory: `_core` hands this to the allocators of core/, which
    do not import backends."""
    from ggml_sched.backends.cpu import CpuBackend

    return CpuBackend().buffer_from_ptr(memory)


# All other names are imported when they are first used: the hook under llama.cpp needs few of them.
_HOMES = _homes_of({
    "ggml_sched._core": ("Allocator", "Context", "Graph", "GraphAllocator", "Packing", "Tensor", "TensorAllocator",
                         "pack"),
    "ggml_sched.backend": ("Backend", "Buffer", "Event", "GraphView", "bind_resident", "get_backend", "tensor_copy"),
    "ggml_sched.backends.cpu": ("CpuBackend",),
    "ggml_sched.backends.cupy": ("CupyBackend",),
    "ggml_sched.backends.dry": ("DryBackend", "DryStore"),
    "ggml_sched.backends.ggml": ("GgmlBackend",),
    "ggml_sched.backends.store": ("FileStore", "Store"),
    "ggml_sched.execution.scheduler": ("Scheduler",),
    "ggml_sched.execution.shared_arenas": ("Arenas",),
    "ggml_sched.execution.tracing": ("Trace",),
    "ggml_sched.graph.graphfile": ("load_graph", "save_graph"),
    "ggml_sched.placement.answer": ("Fit",),
    "ggml_sched.placement.devices": ("Device", "Link"),
    "ggml_sched.placement.fit": ("fit",),
    "ggml_sched.placement.measure": ("measure",),
    "ggml_sched.placement.pricing": ("Price", "price"),
    "ggml_sched.placement.stock": ("Stock",),
    "ggml_sched.planning.plan": ("Copy", "Plan", "Split"),
    "ggml_sched.planning.planfile": ("load_plan",),
    "ggml_sched.planning.program": ("Program",),
    "ggml_sched.testing.compare": ("NodeDifference",),
})
_MODULES = {"compare": "ggml_sched.testing.compare",
            **{name: f"ggml_sched.{name}" for name in ("backend", "backends", "execution", "graph", "llama",
                                                       "placement", "planning", "remote", "testing", "threads")}}

if _TYPE_CHECKING:
    from ggml_sched import llama as llama
    from ggml_sched._core import Allocator, Context, Graph, GraphAllocator, Packing, Tensor, TensorAllocator, pack
    from ggml_sched.backend import Backend, Buffer, Event, GraphView, bind_resident, get_backend, tensor_copy
    from ggml_sched.backends.cpu import CpuBackend
    from ggml_sched.backends.cpu.buffer import Memory
    from ggml_sched.backends.cupy import CupyBackend
    from ggml_sched.backends.dry import DryBackend, DryStore
    from ggml_sched.backends.ggml import GgmlBackend
    from ggml_sched.backends.store import FileStore, Store
    from ggml_sched.execution.scheduler import Scheduler
    from ggml_sched.execution.shared_arenas import Arenas
    from ggml_sched.execution.tracing import Trace
    from ggml_sched.graph.graphfile import load_graph, save_graph
    from ggml_sched.placement.answer import Fit
    from ggml_sched.placement.devices import Device, Link
    from ggml_sched.placement.fit import fit
    from ggml_sched.placement.measure import measure
    from ggml_sched.placement.pricing import Price, price
    from ggml_sched.placement.stock import Stock
    from ggml_sched.planning.plan import Copy, Plan, Split
    from ggml_sched.planning.planfile import load_plan
    from ggml_sched.planning.program import Program
    from ggml_sched.testing import compare
    from ggml_sched.testing.compare import NodeDifference


def __getattr__(name: str) -> object:
    try:
        if name not in _MODULES:
            return _late(__name__, _HOMES, name)
        value = globals()[name] = _import_module(_MODULES[name])
        return value
    except ImportError as error:
        from ggml_sched._build_errors import raise_explained

        raise_explained(error)


def __dir__() -> list[str]:
    return sorted([*__all__, "llama", "__version__"])
