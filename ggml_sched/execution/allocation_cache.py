"""Which graph has its addresses in the arenas now, and which allocations are suspended and can be restored.

One allocation is current.  Others stay suspended as long as the buffers do: restoring one touches no device.
Invariant: the current allocation has live addresses in open buffers; nothing queued uses those of a suspended one.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict

from ggml_sched._core import Devices
from ggml_sched._graph import Graph
from ggml_sched.backend import Buffer
from ggml_sched.errors import each
from ggml_sched.execution.allocation import Allocation
from ggml_sched.execution.arenas import Arenas
from ggml_sched.execution.pipeline import Pipeline
from ggml_sched.planning.plan import Plan

__all__ = ["Allocations"]


class _Tracked(Allocation):
    """An allocation, and what must not have changed since.  Its plan, and with it the graph, is kept while current."""

    epoch: int
    """The graph's residence epoch."""
    assignments: int
    """How often the caller had changed assignments."""
    residents: list[Buffer]
    """Where the graph's weights and caches live."""
    watched: list[Buffer]
    """Those, and the arenas."""
    support_epoch: int
    """The epoch of the support cache."""
    plan: Plan | None
    key: int
    """While it is suspended: the graph's id, as long as that is there."""
    end: weakref.ref[Graph]
    """While it is suspended: notes when the graph ends."""


class Allocations:
    """The allocations of one scheduler; `capacity` of them may be suspended (0: none is ever used again)."""

    def __init__(self, arenas: Arenas, pipeline: Pipeline, devices: Devices, capacity: int) -> None:
        self._arenas, self._pipeline, self._devices, self._capacity = arenas, pipeline, devices, capacity
        self.current: _Tracked | None = None
        self._suspended: OrderedDict[int, _Tracked] = OrderedDict()
        self._assignments = 0
        self._gone: list[int] = []
        """Keys of graphs that had an allocation, and have ended."""

    def find(self, graph: Graph) -> Allocation | None:
        """Make the graph's allocation the current one, if it has one and nothing has changed since."""
        current = self.current
        if current is not None and current.asked() is graph:
            if not self._is_fresh(current, graph) or not current.lease.alive:
                return None
            if current.lease.displaced:
                # Another scheduler has given some of the tensors other addresses: bind them here again.
                self.drain()
                current.suspend()
                current.restore()
            return current
        found = self._suspended.get(id(graph))
        if found is None or found.asked() is not graph or not self._is_fresh(found, graph):
            return None
        self._suspend_current()
        del self._suspended[id(graph)]
        try:
            found.restore()
        except BaseException:
            found.release()
            raise
        found.plan = found.new_plan()
        self.current = found
        return found

    def put(self, plan: Plan, residents: list[Buffer], support_epoch: int, asked: Graph) -> Allocation:
        """Give a plan addresses in the arenas as they are.

        `support_epoch` is that of the support cache when the graph was planned.
        """
        self._suspend_current()
        if self._suspended:
            self._trim(asked)
        new = _Tracked(plan, self._arenas.buffers, weakref.ref(asked))
        new.plan, new.residents, new.watched = plan, residents, residents + self._arenas.all
        new.epoch, new.support_epoch, new.assignments = asked.residence_epoch(), support_epoch, self._assignments
        self.current = new
        return new

    def invalidate(self) -> None:
        """End every allocation: the buffers are about to go."""
        self.drain()
        ended = [*self._suspended.values()] + ([self.current] if self.current is not None else [])
        self._suspended.clear()
        self.current = None
        each(allocation.release for allocation in ended)

    def snapshot(self) -> tuple[Plan, list[Buffer], int, Graph] | None:
        """What `put` takes to make the current allocation again; None without one, or whose graph is gone."""
        current = self.current
        graph = None if current is None else current.asked()
        return None if graph is None else (current.plan, current.residents, current.support_epoch, graph)

    def forget_assignments(self) -> None:
        """The caller has changed an assignment: plans made before do not serve."""
        self._assignments += 1

    def drain(self) -> None:
        """Wait for queued computes; what they raised stays for `Pipeline.take_error`."""
        self._pipeline.drain()
        if self._pipeline.failed and self.current is not None:
            self.current.forget(self._pipeline.last_failure)

    def _is_fresh(self, found: _Tracked, graph: Graph) -> bool:
        """Whether nothing has changed since: weights where they were, assignments, support and buffers as they were.

        The buffers are the same ones: before any is exchanged, every allocation ends (`invalidate`).
        """
        return (self._capacity > 0 and found.assignments == self._assignments
                and self._devices.unchanged(graph, found.watched, found.epoch, found.support_epoch))

    def _suspend_current(self) -> None:
        """Suspend the current allocation, if its graph is there and something was prepared for it."""
        if self.current is None:
            return
        self.drain()
        current, self.current = self.current, None
        current.plan = None
        graph = current.asked()
        if graph is not None and current.prepared is not None:
            key, gone = id(graph), self._gone
            current.key, current.end = key, weakref.ref(graph, lambda _: gone.append(key))
            current.suspend()
            self._suspended[key] = current
        else:
            current.release()

    def _trim(self, asked: Graph) -> None:
        """Release allocations whose graph is gone, the one about to be replaced, and the oldest beyond the capacity."""
        released = []
        while self._gone:
            # Another graph may have the same id by now.
            found = self._suspended.get(self._gone.pop())
            if found is not None and found.asked() is None:
                released.append(self._suspended.pop(found.key))
        if id(asked) in self._suspended:
            released.append(self._suspended.pop(id(asked)))
        while len(self._suspended) > self._capacity:
            released.append(self._suspended.popitem(last=False)[1])
        # Their addresses are void already.
        each([held.release for held in released if held.prepared is not None])
