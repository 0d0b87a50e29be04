"""Today's ggml in this process: `Peer(graph, backends)` plans the same graphs, `Builder(shape)` builds one.

Owns the ctypes side of peer.cpp and builder.cpp.  `python bench/peer/build.py` makes the library; without it, or if a
source has changed since, `available()` is False.  ggml aborts the process on what it cannot plan.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np

import ggml_sched as gs
from peer.build import LIBRARY, OURS

__all__ = ["Builder", "Peer", "available", "version"]

RECORD = np.dtype([
    ("ne", "i8", 4), ("nb", "i8", 4), ("view_offs", "i8"),
    ("op", "i4"), ("type", "i4"), ("flags", "i4"), ("view_src", "i4"),
    ("src", "i4", 10), ("op_params", "i4", 16), ("device", "i4"), ("is_weight", "i4"), ("name", "S64"),
], align=True)
"""`peer_tensor` of peer.cpp."""
FLAGS = {"input": 1, "output": 2}


def available() -> bool:
    """Whether the library is there, and not older than its sources."""
    return LIBRARY.exists() and all(LIBRARY.stat().st_mtime >= path.stat().st_mtime for path in OURS)


def version() -> str:
    return _library().peer_version().decode()


class Peer:
    """A graph that today's ggml plans over fake devices: those of `backends`, best first, the host last.

    Resident tensors live where they live now.  The devices support all ops, or with `asks_cpu` those of ggml's CPU
    backend.  Each of `reserve`, `alloc` and `gallocr` runs once and returns microseconds.  A context manager.
    """

    def __init__(self, graph: gs.Graph, backends: Sequence[gs.Backend], alignment: int = 32,
                 asks_cpu: bool = False) -> None:
        self._library = _library()
        self._ids = ids = {t: i for i, t in enumerate(graph.tensors)}
        records = np.zeros(len(graph.tensors), RECORD)
        for record, t in zip(records, graph.tensors, strict=True):
            _fill(record, t, ids, backends)
        nodes = np.array([ids[t] for t in graph.nodes], np.int32)
        leafs = np.array([ids[t] for t in graph.leafs], np.int32)
        self._devices = len(backends)
        self._pointer = self._library.peer_new(
            len(backends), alignment, asks_cpu, records.ctypes.data, len(records),
            nodes.ctypes.data, len(nodes), leafs.ctypes.data, len(leafs))
        if not self._pointer:
            raise RuntimeError("today's ggml cannot reserve this graph")

    def reserve(self) -> float:
        """ggml_backend_sched_reserve: plan from scratch, on several devices."""
        return self._library.peer_reserve(self._pointer)

    def alloc(self) -> float:
        """ggml_backend_sched_alloc_graph of a graph that was reserved."""
        return self._library.peer_alloc(self._pointer)

    def gallocr(self) -> float:
        """ggml_gallocr_reserve: one arena, no scheduler."""
        return self._library.peer_gallocr(self._pointer)

    def address(self, t: gs.Tensor) -> int:
        """The address that the last `alloc` gave a tensor of the graph."""
        return self._library.peer_address(self._pointer, self._ids[t])

    @property
    def n_splits(self) -> int:
        return self._library.peer_splits(self._pointer)

    @property
    def buffer_sizes(self) -> tuple[int, ...]:
        return tuple(self._library.peer_buffer_size(self._pointer, i) for i in range(self._devices))

    def close(self) -> None:
        if self._pointer:
            self._library.peer_free(self._pointer)
            self._pointer = None

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class Builder:
    """A model's graph built by ggml's C calls, again and again, on one device.

    `shape` has the numbers of `peer_shape` in builder.cpp, in its order.  A context manager.
    """

    def __init__(self, shape: Sequence[int], alignment: int = 32) -> None:
        self._library = _library()
        given = np.array(shape, np.int32)
        self._pointer = self._library.peer_builder_new(given.ctypes.data, alignment)
        if not self._pointer:
            raise RuntimeError("today's ggml cannot reserve this graph")

    def run(self, allocates: bool = True) -> float:
        """Microseconds for building the graph, and for allocating it if `allocates`."""
        return self._library.peer_builder_run(self._pointer, allocates)

    @property
    def ops(self) -> list[str]:
        """ggml's op names of the nodes, in order; for UNARY and GLU the name of the kind."""
        return [self._library.peer_builder_op(self._pointer, i).decode()
                for i in range(self._library.peer_builder_nodes(self._pointer))]

    def close(self) -> None:
        if self._pointer:
            self._library.peer_builder_free(self._pointer)
            self._pointer = None

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def _fill(record: np.void, t: gs.Tensor, ids: dict, backends: Sequence[gs.Backend]) -> None:
    library = _library()
    record["ne"], record["nb"], record["view_offs"] = t.ne, t.nb, t.view_offs
    record["op"] = library.peer_op(t.op.partition(":")[0].encode())
    record["type"] = library.peer_type(str(t.type).encode())
    if record["op"] < 0 or record["type"] < 0:
        raise ValueError(f"today's ggml does not know {t!r}")
    record["flags"] = sum(FLAGS[flag] for flag in t.flags)
    record["view_src"] = -1 if t.view_src is None else ids[t.view_src]
    record["src"] = [ids.get(s, -1) for s in (*t.src, *[None] * (10 - len(t.src)))]
    record["op_params"][: len(t.op_params)] = t.op_params
    is_resident = t.view_src is None and t.is_resident
    record["device"] = backends.index(t.backend) if is_resident else -1
    record["is_weight"] = is_resident and t.buffer.usage == "weights"
    record["name"] = t.name.encode()[:63]


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    for name, result, arguments in (
        ("peer_version", ctypes.c_char_p, []),
        ("peer_op", i32, [ctypes.c_char_p]),
        ("peer_type", i32, [ctypes.c_char_p]),
        ("peer_new", pointer, [i32, i64, i32, pointer, i32, pointer, i32, pointer, i32]),
        ("peer_free", None, [pointer]),
        ("peer_reserve", ctypes.c_double, [pointer]),
        ("peer_alloc", ctypes.c_double, [pointer]),
        ("peer_gallocr", ctypes.c_double, [pointer]),
        ("peer_address", ctypes.c_size_t, [pointer, i32]),
        ("peer_splits", i32, [pointer]),
        ("peer_buffer_size", i64, [pointer, i32]),
        ("peer_builder_new", pointer, [pointer, i64]),
        ("peer_builder_free", None, [pointer]),
        ("peer_builder_run", ctypes.c_double, [pointer, i32]),
        ("peer_builder_nodes", i32, [pointer]),
        ("peer_builder_op", ctypes.c_char_p, [pointer, i32]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
