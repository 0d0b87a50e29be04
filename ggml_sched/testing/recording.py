"""Records the calls that a scheduler makes to a backend of yours: which data, nodes, copies and events, in which order.

    class Recorded(Recording, MyBackend):
        pass

    with Recorded("mine") as mine, gs.Scheduler([mine, cpu]) as scheduler:
        scheduler.compute(graph)
        print(*mine.calls, sep="\\n")

Only methods that `MyBackend` overrides are recorded: in place of a default method of `gs.Backend`, the scheduler may do
something else, without a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from ggml_sched._graph import Graph, Tensor
from ggml_sched.backend import Backend, Event, GraphView

__all__ = ["METHODS", "Call", "Recording"]

METHODS = ("alloc_buffer", "set_tensor_async", "get_tensor_async", "synchronize", "cpy_tensor_from", "cpy_tensor_to",
           "cpy_tensor_async", "event_new", "event_record", "event_wait", "event_synchronize", "compute_node",
           "graph_compute", "graph_plan_create", "graph_plan_compute", "graph_plan_free")
"""The methods that are recorded; support queries are not, because their answers are cached."""


class Call(NamedTuple):
    """A recorded call: the method's name and its positional arguments."""

    method: str
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.method}({', '.join(map(_shown, self.args))})"


class Recording:
    """A mixin before a backend class: `calls` are its recorded calls, the oldest first, in the order in which they
    began."""

    calls: list[Call]

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        for method in METHODS:
            found = getattr(cls, method, None)
            if callable(found) and found is not getattr(Backend, method) and not hasattr(found, "recorded"):
                setattr(cls, method, _recorded(method, found))

    def __init__(self, *args: Any, **options: Any) -> None:
        self.calls = []
        self._plans: list[tuple[Graph | GraphView, object]] = []
        """Each graph plan with its graph, until the call that freed it is taken."""
        self._freed: list[object] = []
        """The graph plans that were freed, without an error, since calls were taken."""
        super().__init__(*args, **options)

    def take(self) -> list[Call]:
        """Returns the calls so far, and empties `calls`."""
        calls, self.calls = self.calls, []
        freed, self._freed = {id(plan) for plan in self._freed}, []
        self._plans = [(graph, plan) for graph, plan in self._plans if id(plan) not in freed]
        return calls

    def count(self, method: str) -> int:
        """How many of the recorded calls are of this method; ValueError for a method that is not recorded."""
        if not hasattr(getattr(type(self), method, None), "recorded"):
            raise ValueError(f"{method!r} is not recorded: it is none of {', '.join(METHODS)}, or not overridden")
        return sum(call.method == method for call in self.calls)

    @property
    def computed(self) -> list[Tensor]:
        """The nodes that recorded calls have computed, without views, each as often as it was computed."""
        by_node = not hasattr(type(self).graph_compute, "recorded")  # type: ignore[attr-defined]
        found: list[Tensor] = []
        for call in self.calls:
            if call.method == "compute_node" and by_node:
                found += call.args
            elif call.method == "graph_compute":
                found += [node for node in call.args[0].nodes if node.computes]
            elif call.method == "graph_plan_compute":
                found += [node for graph, plan in self._plans if plan is call.args[0]
                          for node in graph.nodes if node.computes]
        return found


def _recorded(method: str, inherited: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inherited)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        given = (*args, *options.values())
        self.calls.append(Call(method, given))
        result = inherited(self, *args, **options)
        if method == "graph_plan_create" and result is not None:
            self._plans.append((given[0], result))
        elif method == "graph_plan_free":
            self._freed.append(given[0])
        return result

    call.recorded = True  # type: ignore[attr-defined]
    return call


def _shown(argument: object) -> str:
    """An argument in a few words: a tensor's name, the nodes of a graph, the number of bytes."""
    if isinstance(argument, Tensor):
        return repr(argument.name)
    if isinstance(argument, (Graph, GraphView)):
        names = [node.name or node.op for node in argument.nodes if node.computes]
        return f"{len(names)} nodes: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    if isinstance(argument, Event):
        return f"event of {argument.backend.name!r}"
    if isinstance(argument, (memoryview, bytes, bytearray)):
        return f"{len(argument)} bytes"
    return repr(argument) if isinstance(argument, (int, str)) else type(argument).__name__
