"""The time that each node takes on the CPU backend, as its compiled calls measure it while a measurement is open."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from ggml_sched._graph import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ggml_sched.backends.cpu._kernels import CallList

__all__ = ["NodeTime", "NodeTimes"]


@dataclass(frozen=True, slots=True)
class NodeTime:
    """The calls of one node, over all runs of a measurement."""

    node: Tensor
    """The node; for calls that compute several products of the same activations, the first of these."""
    runs: int
    """How often the node was computed, by all plans together; the run of a call that failed counts, too."""
    seconds: float
    """Seconds of the thread that computed the graph, waiting for other threads included."""
    busy: float
    """Seconds of all threads together in the kernels."""


class NodeTimes:
    """The times that `CpuBackend.node_times` measures.  It keeps the graphs that it has measured alive.

    Nodes that NumPy computes for want of a compiled kernel are not measured.
    """

    def __init__(self, n_threads: int) -> None:
        self.n_threads: int = n_threads
        self._lock = Lock()
        self._taken: dict[CallList, NDArray[np.int64]] = {}

    def add(self, calls: CallList, first: int, taken: bytearray) -> None:
        """Add a run of calls from number `first` on: nanoseconds (wall, busy) of each that ran, as int64."""
        times = np.frombuffer(taken, np.int64).reshape(-1, 2)
        with self._lock:
            found = self._taken.get(calls)
            if found is None:
                found = self._taken[calls] = np.zeros((calls.n_calls, 3), np.int64)
            found[first : first + len(times), :2] += times
            found[first : first + len(times), 2] += 1

    @property
    def nodes(self) -> list[NodeTime]:
        """The times of each node that was computed, in the order in which the nodes were compiled.  Products that one
        call computes have one entry."""
        with self._lock:
            taken = {calls: times.copy() for calls, times in self._taken.items()}
        wall: Counter[Tensor] = Counter()
        busy: Counter[Tensor] = Counter()
        runs: Counter[Tensor] = Counter()
        for calls, times in taken.items():
            of_list: dict[Tensor, int] = {}
            for i, (call_wall, call_busy, n) in enumerate(times.tolist()):
                node = calls.node_of(i)
                wall[node] += call_wall
                busy[node] += call_busy
                of_list[node] = max(n, of_list.get(node, 0))     # several calls may compute one node
            runs.update(of_list)
        return [NodeTime(node, n, wall[node] / 1e9, busy[node] / 1e9) for node, n in runs.items() if n]
