"""Which graph has its addresses in the arenas now, and which ones rest, prepared, to come back.

One allocation is current.  Others rest as long as the buffers do: coming back touches no device.  Invariant:
whoever is current has live addresses in open buffers; nothing queued uses the addresses of a resting one.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict

from ggml_sched._core import Request
from ggml_sched._graph import Graph
from ggml_sched.arenas import Arenas
from ggml_sched.backend import Buffer
from ggml_sched.executor import Allocation, each
from ggml_sched.pipeline import Pipeline
from ggml_sched.plan import Plan

__all__ = ["Allocations"]


class _Entry:
    """An allocation, and what must not have changed since."""

    __slots__ = ("allocation", "assignments", "epoch", "plan", "residents")

    def __init__(self, plan: Plan, allocation: Allocation, epoch: int, assignments: int,
                 residents: list[Buffer]) -> None:
        self.allocation = allocation
        self.plan = weakref.ref(plan)
        self.epoch = epoch
        self.assignments = assignments
        self.residents = residents


class Allocations:
    """The allocations of one scheduler; `capacity` of them may rest (0: none is ever used again)."""

    def __init__(self, arenas: Arenas, pipeline: Pipeline, capacity: int) -> None:
        self._arenas, self._pipeline, self._capacity = arenas, pipeline, capacity
        self._current: _Entry | None = None
        self._resting: OrderedDict[int, _Entry] = OrderedDict()
        self._assignments = 0
        """How often the caller has changed assignments."""

    @property
    def current(self) -> Allocation | None:
        return None if self._current is None else self._current.allocation

    def plan(self) -> Plan:
        """The current one's."""
        entry = self._current
        plan = entry.plan()
        if plan is None:
            plan = entry.allocation.new_plan()
            entry.plan = weakref.ref(plan)
        return plan

    def find(self, graph: Graph) -> Allocation | None:
        """Make the graph's allocation the current one, if it has one and nothing has changed since."""
        entry = self._current
        if entry is not None and entry.allocation.asked() is graph:
            if not self._is_fresh(entry, graph) or not entry.allocation.lease.alive:
                return None
            if entry.allocation.lease.displaced:
                # Another scheduler has addressed some of the tensors since: address them here again.
                self.drain()
                entry.allocation.rest()
                entry.allocation.resume()
            return entry.allocation
        entry = self._resting.get(id(graph))
        if entry is None or entry.allocation.asked() is not graph or not self._is_fresh(entry, graph):
            return None
        self._rest_current()
        del self._resting[id(graph)]
        self._current = entry
        entry.allocation.resume()
        return entry.allocation

    def put(self, plan: Plan, request: Request, asked: Graph) -> Allocation:
        """Give a plan addresses in the arenas as they are."""
        self._rest_current()
        stale = self._resting.pop(id(asked), None)
        if stale is not None:
            stale.allocation.release()
        self._trim()
        self._current = self._new_entry(plan, asked, request.buffers)
        return self._current.allocation

    def vacate(self) -> None:
        """End every allocation: the buffers are about to go."""
        self.drain()
        entries = [*self._resting.values()] + ([self._current] if self._current is not None else [])
        self._resting.clear()
        self._current = None
        each(entry.allocation.release for entry in entries)

    def restore(self, plan: Plan, asked: Graph, residents: list[Buffer]) -> None:
        """After a failure to exchange buffers: the same plan in the old ones, or in others of their size."""
        self._current = self._new_entry(plan, asked, residents)

    def snapshot(self) -> tuple[Plan, Graph, list[Buffer]] | None:
        """What `restore` takes for the current allocation; None without one, or whose graph is gone."""
        entry = self._current
        graph = None if entry is None else entry.allocation.asked()
        return None if graph is None else (self.plan(), graph, entry.residents)

    def forget_assignments(self) -> None:
        """The caller has changed an assignment: plans made before do not serve."""
        self._assignments += 1

    def drain(self) -> None:
        """Wait for queued computes; what they raised stays for `Pipeline.take_error`."""
        self._pipeline.drain()
        if self._pipeline.failed and self._current is not None:
            self._current.allocation.forget()

    def _new_entry(self, plan: Plan, asked: Graph, residents: list[Buffer]) -> _Entry:
        allocation = Allocation(plan, self._arenas.buffers, asked)
        return _Entry(plan, allocation, asked.residence_epoch(), self._assignments, residents)

    def _is_fresh(self, entry: _Entry, graph: Graph) -> bool:
        """Whether nothing has moved since: weights where they were, assignments and buffers as they were."""
        if not self._capacity or entry.epoch != graph.residence_epoch() or entry.assignments != self._assignments:
            return False
        if entry.allocation.buffers is not self._arenas.buffers:
            return False
        for buffer in entry.residents:
            if buffer.closed:
                return False
        return self._arenas.are_open()

    def _rest_current(self) -> None:
        if self._current is None:
            return
        self.drain()
        entry, self._current = self._current, None
        graph = entry.allocation.asked()
        if self._capacity and graph is not None and entry.allocation.buffers is self._arenas.buffers:
            entry.allocation.rest()
            self._resting[id(graph)] = entry
        else:
            entry.allocation.release()

    def _trim(self) -> None:
        """Release what nobody can ask for any more, and the oldest of too many."""
        gone = [key for key, entry in self._resting.items() if not entry.allocation.is_alive]
        gone += list(self._resting)[: max(0, len(self._resting) - self._capacity)]
        each(self._resting.pop(key).allocation.release for key in dict.fromkeys(gone))
