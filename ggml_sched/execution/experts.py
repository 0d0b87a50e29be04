"""The bound step that lets a store read the experts of a bank that numbers name."""

from __future__ import annotations

from collections.abc import Sequence

from ggml_sched._graph import Tensor
from ggml_sched.backend import Backend, Event, note_copy
from ggml_sched.execution._steps import BoundStep
from ggml_sched.execution.pipeline import Action, KeepAlive

__all__ = ["BoundFetchExperts"]


class BoundFetchExperts(BoundStep):
    """Let the store `backend` read the missing experts of the bank of `weight` that the tensor `ids` names.

    `ids` is in memory of the host, which the store's thread reads after the events.
    """

    def __init__(self, backend: Backend, weight: Tensor, ids: Tensor) -> None:
        super().__init__(backend)
        self.weight, self.ids = weight, ids

    def due(self) -> Action:
        return self.fetch

    def fetch(self, events: Sequence[Event], keep_alive: KeepAlive) -> None:
        """The action of the step."""
        try:
            for event in events:
                self.backend.event_wait(event)
            bank = self.weight.buffer.experts
            bank.slots.fetch(bank, self.ids)
        except BaseException as error:
            note_copy(error, self.weight, self.backend, self.weight.backend)
            raise
