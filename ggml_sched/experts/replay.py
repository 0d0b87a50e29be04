"""Replays of recordings: how many experts a run would have found in a number of slots, and how many it would have read.

`bound` is what Belady's algorithm reads, which knows the future and gives up the expert that is used again last
(L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5, 1966): with
experts of one size no other choice reads less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggml_sched.experts.table import Hits, SlotTable

if TYPE_CHECKING:
    from ggml_sched.experts.policies import Order, Policy
    from ggml_sched.experts.routing import Routing

__all__ = ["bound", "replay"]


def replay(recording: Routing, policy: Policy, n_slots: int) -> Hits:
    """The hits, misses and bytes read of a run of the recorded visits with `n_slots` slots, which are empty at first.

    ValueError for a visit that uses more experts than there are slots, and for a bank or an expert that there is not.
    """
    recording.check()
    table = SlotTable(len(recording.banks), recording.n_experts, n_slots, policy)
    nbytes = 0
    for visit in recording.visits:
        for expert, _ in table.visit(visit.bank, visit.used):
            table.put(visit.bank, expert)
            nbytes += recording.banks[visit.bank].nbytes
    return table.counted(nbytes)


def bound(recording: Routing, n_slots: int) -> Hits:
    """The hits, misses and bytes read of Belady's algorithm with `n_slots` slots; raises as `replay`."""
    return replay(recording, _Belady(recording), n_slots)


class _Belady:
    """The policy of Belady's algorithm, which knows all visits: an expert's cost is the number of its next visit."""

    def __init__(self, recording: Routing) -> None:
        self._recording = recording

    def begin(self, n_banks: int, n_experts: int, n_slots: int) -> Order:
        return _Future(self._recording, n_banks, n_experts)


class _Future:
    def __init__(self, recording: Routing, n_banks: int, n_experts: int) -> None:
        visits = recording.visits
        self._next: np.ndarray = np.full((n_banks, n_experts), float(len(visits)))
        self._later: list[list[float]] = [[] for _ in visits]
        """For each visit and each expert that it uses: the number of the next visit that uses the same expert."""
        for k in range(len(visits) - 1, -1, -1):
            used = visits[k].used
            self._later[k] = self._next[visits[k].bank, used].tolist()
            self._next[visits[k].bank, used] = k
        self._now = 0

    def use(self, bank: int, experts: np.ndarray) -> None:
        self._next[bank, experts] = self._later[self._now]
        self._now += 1

    def costs(self, bank: int) -> np.ndarray:
        return self._next
