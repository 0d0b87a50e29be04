"""The allocations of a scheduler: the current one, whose tensors have addresses, and suspended ones.

A suspended allocation keeps its bound steps until the buffers of the arenas change; restoring it calls no device.
Invariant: the current allocation has valid addresses in open buffers; no queued step uses the addresses of a suspended
allocation.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict

from ggml_sched._core import Devices
from ggml_sched._graph import Graph
from ggml_sched.backend import Buffer
from ggml_sched.errors import each
from ggml_sched.execution.allocation import Allocation
from ggml_sched.execution.arenas import SchedulerArenas
from ggml_sched.execution.pipeline import Pipeline
from ggml_sched.planning.plan import Plan

__all__ = ["Allocations"]


class Tracked(Allocation):
    """An allocation, and the state for which it was made: if any of this state has changed, the allocation is stale.

    While it is the current allocation it keeps its plan alive, and through the plan the graph.
    """

    epoch: int
    """The graph's residence epoch at creation: a number that grows when a weight or cache gets or loses its memory."""
    assignments: int
    """How many times the caller had changed assignments when the allocation was made."""
    residents: list[Buffer]
    """The buffers of the graph's weights and caches."""
    watched: list[Buffer]
    """`residents` and the buffers of the arenas."""
    support_epoch: int
    """The epoch of the support cache at creation."""
    plan: Plan
    """The plan; deleted while the allocation is suspended."""
    key: int
    """`id(graph)`, set when the allocation is suspended."""
    end: weakref.ref[Graph]
    """A weak reference to the graph, made when the allocation is suspended: its callback puts `key` into
    `Allocations._gone` when the graph is freed."""


class Allocations:
    """The allocations of one scheduler, of which at most `capacity` are suspended.

    With a capacity of 0 even the current allocation is made anew by each call.
    """

    def __init__(self, arenas: SchedulerArenas, pipeline: Pipeline, devices: Devices, capacity: int) -> None:
        self._arenas, self._pipeline, self._devices, self._capacity = arenas, pipeline, devices, capacity
        self.current: Tracked | None = None
        self._suspended: OrderedDict[int, Tracked] = OrderedDict()
        self._assignments = 0
        self._gone: list[int] = []
        """Keys of graphs that had a suspended allocation and were freed."""

    def find(self, graph: Graph) -> Tracked | None:
        """Make the graph's allocation the current one, and return it; None if it has none, or a stale one."""
        current = self.current
        if current is not None and current.given_graph() is graph:
            if not self._is_fresh(current, graph) or not current.lease.alive:
                return None
            if current.lease.rebound:
                # Another scheduler has given some of the graph's tensors other addresses: restore those of `current`.
                self.drain()
                current.suspend()
                current.restore()
            return current
        found = self._suspended.get(id(graph))
        if found is None or found.given_graph() is not graph or not self._is_fresh(found, graph):
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

    def put(self, plan: Plan, residents: list[Buffer], support_epoch: int, given: Graph) -> Tracked:
        """Make a new allocation for a plan, in the present buffers of the arenas, and make it the current one.

        `support_epoch` is the epoch that the support cache had when the graph was planned.
        """
        self._suspend_current()
        if self._suspended:
            self._trim(given)
        new = Tracked(plan, self._arenas.buffers, weakref.ref(given))
        new.plan, new.residents, new.watched = plan, residents, residents + self._arenas.all
        new.epoch, new.support_epoch, new.assignments = given.residence_epoch(), support_epoch, self._assignments
        self.current = new
        return new

    def invalidate(self, why: str | None = None) -> None:
        """Release every allocation; called before buffers are closed.

        `why`: the reason that the error for a tensor without address names; None where only buffers are replaced.
        """
        self.drain()
        ended = [*self._suspended.values()] + ([self.current] if self.current is not None else [])
        self._suspended.clear()
        self.current = None
        for allocation in ended:
            allocation.lease.ended_by = why
        each(allocation.release for allocation in ended)

    def give_way(self) -> None:
        """Suspend the current allocation, after the computes that are queued: another scheduler is to use the
        arenas."""
        self.drain()
        self._suspend_current()

    def snapshot(self) -> tuple[Plan, list[Buffer], int, Graph] | None:
        """The arguments with which `put` makes the current allocation again; None if there is none, or its graph was
        freed."""
        current = self.current
        if current is None or (graph := current.given_graph()) is None:
            return None
        return current.plan, current.residents, current.support_epoch, graph

    def forget_assignments(self) -> None:
        """Make every allocation stale, after the caller changed an assignment."""
        self._assignments += 1

    def drain(self) -> None:
        """Wait for queued computes; their exception stays in the pipeline until `Pipeline.take_error`."""
        self._pipeline.drain()
        if self._pipeline.failed and self.current is not None:
            self.current.forget(self._pipeline.last_failure)

    def _is_fresh(self, found: Tracked, graph: Graph) -> bool:
        """Whether residents, assignments, support cache and buffers are as they were when the allocation was made.

        It need not check whether the arenas have other buffers now: `invalidate` releases all allocations before that.
        """
        return (self._capacity > 0 and found.assignments == self._assignments
                and self._devices.unchanged(graph, found.watched, found.epoch, found.support_epoch))

    def _suspend_current(self) -> None:
        """Suspend the current allocation, so that its bound steps can be used again; release it if its graph was freed,
        or if no step was bound yet."""
        if self.current is None:
            return
        self.drain()
        current, self.current = self.current, None
        del current.plan
        graph = current.given_graph()
        if graph is not None and current.prepared is not None:
            key, gone = id(graph), self._gone
            current.key, current.end = key, weakref.ref(graph, lambda _: gone.append(key))
            current.suspend()
            self._suspended[key] = current
        else:
            current.release()

    def _trim(self, given: Graph) -> None:
        """Release the allocations of freed graphs and of `given`, and the oldest ones beyond the capacity."""
        released = []
        while self._gone:
            # A new graph may have got the id of the freed one: then `found` is the new graph's allocation, and stays.
            found = self._suspended.get(self._gone.pop())
            if found is not None and found.given_graph() is None:
                released.append(self._suspended.pop(found.key))
        if id(given) in self._suspended:
            released.append(self._suspended.pop(id(given)))
        while len(self._suspended) > self._capacity:
            released.append(self._suspended.popitem(last=False)[1])
        # Suspended allocations have no addresses: only what backends prepared for bound steps has to be freed.
        each([held.release for held in released if held.prepared is not None])
