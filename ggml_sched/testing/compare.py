"""Compares the results of one graph on two backends, node by node.

As in ggml_backend_compare_graph_backend, a node reads the results of the same backend, so that differences accumulate
as they would in use.  Each backend computes a clone of the graph, in which every tensor has memory of its own; the
graph, its addresses and its data are not changed.

`gs.compare` is this module, and may be called: `gs.compare(graph, a, b)` is `gs.compare.compare(graph, a, b)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NamedTuple

import numpy as np

from ggml_sched._graph import Context, Graph, Tensor
from ggml_sched.backend import Backend, GraphView, checked_backends, note_nodes
from ggml_sched.errors import UnsupportedOp
from ggml_sched.execution._steps import is_false
from ggml_sched.graph.graphfile import graph_from_dict, graph_to_dict

__all__ = ["NodeDifference", "compare"]



class NodeDifference(NamedTuple):
    """The difference between two results of one node; its numbers are NaN if at some element only one result is NaN."""

    node: Tensor
    max_abs_diff: float
    nmse: float
    """sum((a - b)**2) / sum(a**2); infinite if `a` is all zeros and `b` is not."""


Callback = Callable[[Tensor, np.ndarray, np.ndarray], object]
"""Called with each node and its results on both backends; a return value of False stops the comparison."""


def compare(graph: Graph, a: Backend, b: Backend, callback: Callback | None = None,
            rtol: float | None = None) -> list[NodeDifference]:
    """Compute a graph on two backends and compare each node that is not a view.

    Leafs have their present data, or zeros if they were never set.  With `rtol`, only nodes whose nmse is above it (or
    NaN) are returned.  Raises UnsupportedOp, OutOfMemory, and the exceptions of the backends.
    """
    if not isinstance(graph, Graph):
        raise TypeError(f"not a Graph: {graph!r}")
    checked_backends((a, b), "compare takes two backends: compare(graph, a, b)")
    for node in graph.nodes:
        for backend in (a, b):
            if node.computes and not backend.supports_op(node):
                raise UnsupportedOp(f"{node!r}: backend {backend.name!r} does not support it")
    given = {i: data for i, leaf in enumerate(graph.tensors) if (data := _leaf_bytes(leaf)) is not None}
    found = []
    with _Clone(graph, a, given) as first, _Clone(graph, b, given) as second:
        for node in graph.nodes:
            if not node.computes:
                continue
            one, other = first.compute(node), second.compute(node)
            difference = NodeDifference(node, *distance(one, other))
            if rtol is None or not difference.nmse <= rtol:
                found.append(difference)
            if callback is not None and is_false(callback(node, one, other)):
                break
    return found


def _leaf_bytes(leaf: Tensor) -> bytes | bytearray | None:
    """The data of a leaf; None for a node, a view, or a leaf that was never set."""
    if leaf.op != "NONE" or leaf.view_src is not None:
        return None
    if leaf.buffer is None or (leaf.lease is not None and leaf.lease.stages):
        return leaf.stash
    data = bytearray(leaf.nbytes)
    leaf.backend.get_tensor(leaf, data)
    return data


class _Clone:
    """A copy of a graph and of its leafs' data on one backend, in which every tensor has memory of its own."""

    def __init__(self, graph: Graph, backend: Backend, given: Mapping[int, bytes | bytearray]) -> None:
        self.backend = backend
        self.ctx = Context(f"compare on {backend.name}")
        clone = graph_from_dict(graph_to_dict(graph), ctx=self.ctx)
        self.twins = dict(zip(graph.tensors, clone.tensors, strict=True))
        self.buffer = backend.alloc_tensors(self.ctx, usage="any")
        try:
            self.buffer.clear()
            for i, data in given.items():
                backend.set_tensor(clone.tensors[i], data)
        except BaseException:
            self.close()
            raise

    def compute(self, node: Tensor) -> np.ndarray:
        """Run one node of the graph; returns its values in double precision."""
        twin = self.twins[node]
        try:
            self.backend.graph_compute(GraphView((twin,)))
            self.backend.synchronize()
        except BaseException as error:
            note_nodes(error, self.backend, (twin,))
            raise
        return twin.numpy().astype(np.float64)

    def close(self) -> None:
        self.buffer.close()
        self.ctx.close()

    def __enter__(self) -> _Clone:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def distance(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """(largest |a - b|, nmse); elements that are NaN in both, or the same infinity, do not differ."""
    if not a.size:
        return 0.0, 0.0
    with np.errstate(all="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        apart = np.where(same, 0, a - b)
        error, power = float(np.sum(apart**2)), float(np.sum(np.where(same & ~np.isfinite(a), 0, a) ** 2))
    if error == 0:
        return 0.0, 0.0
    return float(np.max(np.abs(apart))), error / power if power else float("inf")


class _CallableModule(ModuleType):
    """The type of this module, so that `gs.compare(...)` can be called though `gs.compare` is a module."""

    def __call__(self, graph: Graph, a: Backend, b: Backend, callback: Callback | None = None,
                 rtol: float | None = None) -> list[NodeDifference]:
        return compare(graph, a, b, callback, rtol)


sys.modules[__name__].__class__ = _CallableModule
