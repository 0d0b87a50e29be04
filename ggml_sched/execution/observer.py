"""Computes with a callback: the actions of a program, with the callback called after each observed node.

The callback may read the node's data, so it is called when the data is in the node's own memory.  Nodes that are not
observed run together with the next observed node, in one call of the backend.  After the callback has returned False
every later action does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ggml_sched._graph import Tensor
from ggml_sched.backend import Event, GraphView, note_nodes, wait_for
from ggml_sched.execution._steps import BoundRun, BoundStep, BoundWriteBack, is_false
from ggml_sched.execution.pipeline import Action, KeepAlive
from ggml_sched.planning.program import Run, Step

__all__ = ["Ask", "Callback", "Observer"]

Callback = Callable[[Tensor], object]
"""Called with each node after it was computed; False stops the compute."""
Ask = Callable[[Tensor], object]
"""Called with each node before it is computed; if it returns False, the node is not observed."""


class Observer:
    """One observed compute; `stopped_at` is the node for which the callback returned False."""

    def __init__(self, callback: Callback, ask: Ask | None) -> None:
        self.stopped_at: Tensor | None = None
        self._callback, self._ask = callback, ask
        self._unwritten: Tensor | None = None
        """An observed node that was computed into a copy: the callback is called after the write-back of the copy."""

    def action(self, bound: BoundStep, step: Step) -> Action | None:
        """The action of a step, extended by calls of the callback; None if the step is left out."""
        if isinstance(bound, BoundRun):
            return partial(self._run, bound, isinstance(step, Run) and bool(step.into))
        action = bound.due()
        return None if action is None else partial(self._transfer, bound, action)

    def _run(self, bound: BoundRun, computes_into_copy: bool, events: Sequence[Event], keep_alive: KeepAlive) -> None:
        """The action of a Run: computes its nodes in parts that each end with an observed node, and calls the callback
        after each part.

        `computes_into_copy`: the last node's result is in a copy, and its callback is called after the write-back.
        """
        if self.stopped_at is not None:
            return
        for event in events:
            bound.backend.event_wait(event)
        for twins, node in bound.parts(self._ask):
            is_unwritten = computes_into_copy and node is bound.nodes[-1]
            try:
                bound.backend.graph_compute(GraphView(twins))
                if node is not None and not is_unwritten:
                    bound.backend.synchronize()
            except BaseException as error:
                note_nodes(error, bound.backend, twins)
                raise
            if is_unwritten:
                self._unwritten = node
            elif node is not None:
                self._call(node)
                if self.stopped_at is not None:
                    return

    def _transfer(self, bound: BoundStep, action: Action, events: Sequence[Event],
                  keep_alive: KeepAlive) -> Event | None:
        """The action of a step that is no Run: calls `action`, and after a write-back the callback that was put off."""
        if self.stopped_at is not None:
            return None
        end = action(events, keep_alive)
        if isinstance(bound, BoundWriteBack) and self._unwritten is bound.dst:
            self._unwritten = None
            wait_for(bound.backend)
            wait_for(bound.dst.backend)
            self._call(bound.dst)
        return end

    def _call(self, node: Tensor) -> None:
        if is_false(self._callback(node)):
            self.stopped_at = node
