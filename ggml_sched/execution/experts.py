"""The bound step for which a store reads the experts that nodes have chosen, as far as they are in no slot."""

from __future__ import annotations

from collections.abc import Sequence

from ggml_sched._graph import Tensor
from ggml_sched.backend import Backend, Event, note_copy
from ggml_sched.execution._steps import BoundStep
from ggml_sched.execution.pipeline import Action, KeepAlive

__all__ = ["BoundFetchExperts"]


class BoundFetchExperts(BoundStep):
    """Let the store `backend` read those experts of the bank of `weight` that `ids` names and that are in no slot.

    `ids` is a tensor in the host's memory; the thread of the store reads it after the events.
    """

    def __init__(self, backend: Backend, weight: Tensor, ids: Tensor) -> None:
        super().__init__(backend)
        self.weight, self.ids = weight, ids

    def due(self) -> Action:
        return self.fetch

    def fetch(self, events: Sequence[Event], keep_alive: KeepAlive) -> None:
        """The action of the step: let the store read the experts after the events."""
        try:
            for event in events:
                self.backend.event_wait(event)
            bank = self.weight.buffer.experts
            bank.slots.fetch(bank, self.ids)
        except BaseException as error:
            note_copy(error, self.weight, self.backend, self.weight.backend)
            raise
