"""Records which experts the layers of a model use, while batches are computed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.experts import Bank, Routing, Visit
from ggml_sched.llama.expert_slots import bank_name, banks_of

__all__ = ["Recorder"]


class Recorder:
    """Makes a `Routing`, `recording`: `ask` and `note` are the callbacks with which a scheduler observes nodes.

    `tensors`: the weights of the model, by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        banks = banks_of(tensors)
        self.recording: Routing = Routing([Bank(bank.name, bank.n_experts, bank.nbytes) for bank in banks])
        self._numbers = {bank.name: k for k, bank in enumerate(banks)}
        self._first: dict[str, str] = {}
        """{bank: its weight that a node reads first}."""

    def ask(self, node: Tensor) -> bool:
        """Whether to observe a node: True for the node of a layer that reads experts first."""
        if node.op != "MUL_MAT_ID":
            return False
        weight = node.src[0].root.name
        bank = bank_name(weight)
        return bank in self._numbers and self._first.setdefault(bank, weight) == weight

    def note(self, node: Tensor) -> None:
        """Record the experts that a computed node has read, from its third source, which is not overwritten yet."""
        numbers = np.asarray(node.src[2].numpy())
        tokens = numbers.reshape(-1, numbers.shape[-1]).tolist()
        number = self._numbers[bank_name(node.src[0].root.name)]
        self.recording.visits.append(Visit(number, tuple(map(tuple, tokens))))
