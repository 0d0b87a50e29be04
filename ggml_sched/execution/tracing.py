"""Traces: when each step of a scheduler's computes began and ended, recorded while `Scheduler.trace` is on.

A recording has one clock reading for each step, and one more for each step that is issued on a thread of its backend.
Without a trace the only cost is to look whether there is one.  A step of an asynchronous backend ends, by the trace,
when it has been issued.  If the trace is `exact`, or records nodes, the host waits for the backends after each step,
which then ends when it is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from ggml_sched._graph import Tensor
from ggml_sched.backend import Backend, Event, GraphView, note_nodes, wait_for
from ggml_sched.execution._steps import BoundRun, BoundStep, Recorder, Recording
from ggml_sched.execution.pipeline import Action, KeepAlive, Task
from ggml_sched.planning.plan import Plan

if TYPE_CHECKING:
    from ggml_sched.execution.allocation import Allocation
    from ggml_sched.placement.devices import Device, LinkLike
    from ggml_sched.view.measured import Measured

__all__ = ["Span", "Trace", "TracedCompute", "register_trace_methods", "timed"]

_METHODS: dict[str, Callable[..., Any]] = {}
"""{method of Trace: the registered function that does its work}."""


def register_trace_methods(**functions: Callable[..., Any]) -> None:
    """For each NAME=function: make `trace.NAME(...)` call `function(trace, ...)`."""
    _METHODS.update(functions)


class Span(NamedTuple):
    """When one step, or one node, ran: seconds since the trace began."""

    number: int
    """The number of the step in the program, or the position of the node in the graph."""
    start: float
    stop: float


@dataclass(frozen=True)
class TracedCompute:
    """One compute of a trace; times are seconds since the trace began."""

    plan: Plan
    start: float
    issued: float
    """The time at which its last step had been issued (or queued); after that the host may have waited for the
    backends."""
    returned: float
    """The time at which the call had returned."""
    stop: float
    """The time at which its last step had ended, which may be after the call has returned."""
    steps: tuple[Span, ...]
    """The steps that ran, in the order in which they began, without steps that were left out because their data was in
    place."""
    nodes: tuple[Span, ...]
    """When each node ran; empty if nodes were not recorded."""
    failed: bool
    """Whether the compute raised an exception; its later steps did not run."""


class Trace(Recorder):
    """The times of a scheduler's computes, step by step; see `Scheduler.trace`.

    It can be read while it is recorded, and afterwards.  It keeps the graphs of its computes alive.
    """

    def __init__(self, backends: Sequence[Backend], nodes: bool, exact: bool) -> None:
        self.backends: tuple[Backend, ...] = tuple(backends)
        self.has_nodes: bool = nodes
        """Whether nodes are recorded: each runs alone, without fusion."""
        self.is_exact: bool = exact or nodes or not any(backend.asynchronous for backend in self.backends)
        """Whether the recorded end of every step is the time at which its backend had done the step."""
        self.waits_after_steps: bool = exact or nodes
        self._began = perf_counter_ns()
        self._plans: list[Plan] = []
        """The plans of the computes, each once."""
        self._nodes: dict[int, list[tuple[int, int, int]]] = {}
        """{id of a recording: (position, start, end) of each node}, where nodes are recorded."""

    @property
    def computes(self) -> tuple[TracedCompute, ...]:
        """The computes so far, in the order in which they began."""
        return tuple(self.each_compute())

    def each_compute(self) -> Iterator[TracedCompute]:
        """Iterate over `computes`, of which only one is made at a time."""
        return (_value(recording, self._nodes.get(id(recording), ()), self._began) for recording in self.recordings)

    def plan_of(self, allocation: Allocation) -> Plan:
        """The plan of an allocation: one object for all of its computes."""
        for plan in self._plans:
            if plan.data is allocation.data and plan.graph.tensors is allocation.tensors:
                return plan
        self._plans.append(allocation.new_plan())
        return self._plans[-1]

    def compute_nodes(self, recording: Recording, run: BoundRun) -> None:
        """Compute the nodes of a run one by one, with readings of the clock before and after each."""
        found = self._nodes.setdefault(id(recording), [])
        position = {node: k for k, node in enumerate(recording.plan.graph.nodes)}
        for node, twin in zip(run.nodes, run.twins, strict=True):
            start = perf_counter_ns()
            _compute(run.backend, twin)
            found.append((position[node], start, perf_counter_ns()))

    def save(self, path: str | os.PathLike[str], devices: Sequence[Device] | None = None, link: LinkLike = None,
             fill: float = 1.0) -> None:
        """Write the trace as JSON that https://ui.perfetto.dev and chrome://tracing open (the trace event format).

        It has rows for what each backend runs, sends, receives and waits for, and for nodes where they were recorded;
        loads and copies are arrows with their bytes.  With `devices` (and `link` and `fill`, as for `gs.price`) a
        further row has the times that `gs.price` predicts.  An existing file is replaced atomically.
        """
        _METHODS["save"](self, path, devices, link, fill)

    def measured(self, devices: Sequence[Device] | None = None, link: LinkLike = None,
                 fill: float = 1.0) -> tuple[Measured, ...]:
        """For each plan of the trace the times of its steps, medians over all computes; prints as a table.

        With `devices` (and `link` and `fill`, as for `gs.price`) the times that the model of cost predicts stand beside
        them.  The first compute of a plan, which prepares it, does not count unless it is the only one.
        """
        found: tuple[Measured, ...] = _METHODS["measured"](self, devices, link, fill)
        return found

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.measured())) or "no computes"

    def __repr__(self) -> str:
        names = ", ".join(backend.name for backend in self.backends)
        return f"<Trace of {len(self.recordings)} computes on {names}>"


def _value(recording: Recording, nodes: Sequence[tuple[int, int, int]], began: int) -> TracedCompute:
    """A compute as a value; times since `began`."""
    def seconds(reading: int) -> float:
        return (reading - began) / 1e9

    times = recording.times
    steps = [Span(k, seconds(times[2 * k]), seconds(times[2 * k + 1])) for k in range(recording.n_steps)
             if times[2 * k + 1]]
    last = max([recording.start, *times])
    returned = recording.stop or last
    # A queued step that has failed has begun and not ended; the steps after it, and later computes, have not begun.
    has_stopped = any(times[2 * k] and not times[2 * k + 1] for k in range(recording.n_steps))
    return TracedCompute(recording.plan, seconds(recording.start), seconds(min(last, returned)), seconds(returned),
                         seconds(max(last, returned)), tuple(sorted(steps, key=lambda span: span.start)),
                         tuple(Span(k, seconds(start), seconds(stop)) for k, start, stop in nodes),
                         recording.has_failed or has_stopped or not steps and recording.n_steps > 0)


def timed(trace: Trace, recording: Recording, tasks: Sequence[Task], steps: Sequence[BoundStep],
          is_observed: bool) -> list[Task]:
    """The tasks of a compute with actions that note when they begin and end.

    `is_observed`: the actions are those of an Observer, which runs nodes in its own way: no times of nodes are noted.
    """
    found = []
    for k, (task, bound) in enumerate(zip(tasks, steps, strict=True)):
        action = task.action
        if action is not None:
            by_node = bound if trace.has_nodes and not is_observed and isinstance(bound, BoundRun) else None
            action = _Timed(trace, recording, k, action, by_node).run
        found.append(Task(task.backend, action, task.waits, task.awaited))
    return found


class _Timed:
    """The action of step k of a compute, with readings of the clock before and after it.

    `by_node`: the run whose nodes are computed one by one instead of by `action`; None: `action` is called.
    """

    __slots__ = ("action", "by_node", "k", "recording", "trace")

    def __init__(self, trace: Trace, recording: Recording, k: int, action: Action, by_node: BoundRun | None) -> None:
        self.trace, self.recording, self.k, self.action, self.by_node = trace, recording, k, action, by_node

    def run(self, events: Sequence[Event], keep_alive: KeepAlive) -> Event | None:
        self.recording.note_start(self.k)
        end = None
        if self.by_node is None:
            end = self.action(events, keep_alive)
        else:
            for event in events:
                self.by_node.backend.event_wait(event)
            self.trace.compute_nodes(self.recording, self.by_node)
        if self.trace.waits_after_steps:
            for backend in self.trace.backends:
                wait_for(backend)
        self.recording.note_end(self.k)
        return end


def _compute(backend: Backend, twin: Tensor) -> None:
    """Compute one node and wait for it."""
    try:
        backend.graph_compute(GraphView((twin,)))
        wait_for(backend)
    except BaseException as error:
        note_nodes(error, backend, (twin,))
        raise
