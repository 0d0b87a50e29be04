"""The table of slots: which experts of a model are in slots, and which have to be read or removed for the next use.

A table has numbers alone, no memory: execution and replays use the same class, so that a replay counts what a run would
have read.  Invariants: there are never more experts than slots, and no expert that a visit uses is removed during it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from ggml_sched.experts.policies import Policy

__all__ = ["Hits", "SlotTable"]


class Hits(NamedTuple):
    """How often experts were found in slots, in a run or in a replay."""

    hits: int
    """Uses of experts that were in a slot; an expert counts once in each visit."""
    misses: int
    """Uses of experts that were in no slot, and had to be read."""
    nbytes: int
    """Bytes of the experts that were read."""
    evictions: int
    """How often an expert gave up its slot."""

    @property
    def rate(self) -> float:
        """The part of the uses that were hits; 0 without uses."""
        return self.hits / max(self.hits + self.misses, 1)


class SlotTable:
    """`n_slots` slots for the experts of `n_banks` banks of at most `n_experts` experts.

    A bank is the weights of one layer that are read by expert; an expert is one matrix of each of these weights.
    """

    def __init__(self, n_banks: int, n_experts: int, n_slots: int, policy: Policy) -> None:
        self.n_slots = n_slots
        self.held: np.ndarray = np.zeros((n_banks, n_experts), bool)
        self._order = policy.begin(n_banks, n_experts, n_slots)
        self._hits = self._misses = self._evictions = 0

    def counted(self, nbytes: int) -> Hits:
        """What was counted so far; `nbytes`: the bytes read for the misses, which the caller has counted."""
        return Hits(self._hits, self._misses, nbytes, self._evictions)

    def visit(self, bank: int, experts: Iterable[int]) -> Iterator[tuple[int, tuple[int, int] | None]]:
        """Note that a visit uses these experts of a bank.  For each of them that is in no slot, in ascending order,
        yields (the expert, the (bank, expert) that gives up its slot for it; None if a slot is free).

        The expert that gives up its slot is out of the table then; call `put` when the new one was read into the slot.
        ValueError, with nothing changed, for more experts than slots.
        """
        used = np.unique(np.fromiter(experts, np.intp))
        if len(used) > self.n_slots:
            raise ValueError(f"{len(used)} experts of bank {bank} are used together, and there are {self.n_slots} "
                             "slots")
        self._order.use(bank, used)
        missing = used[~self.held[bank, used]]
        return self._exchange(bank, used, missing)

    def _exchange(self, bank: int, used: np.ndarray,
                  missing: np.ndarray) -> Iterator[tuple[int, tuple[int, int] | None]]:
        going = iter(self._going(bank, used, len(missing)))
        for expert in missing.tolist():
            gone = None
            self._misses += 1
            if int(self.held.sum()) >= self.n_slots:
                gone = next(going)
                self._evict(gone)
            yield expert, gone
        self._hits += len(used) - len(missing)

    def _going(self, bank: int, used: np.ndarray, n: int) -> list[tuple[int, int]]:
        """The (bank, expert) pairs that give up their slots, in this order, so that `n` missing experts get slots."""
        n -= self.n_slots - int(self.held.sum())
        if n <= 0:
            return []
        may_go = self.held.copy()
        may_go[bank, used] = False
        costs = np.broadcast_to(np.asarray(self._order.costs(bank), np.float64), may_go.shape)
        first = np.argsort(-costs[may_go], kind="stable")[:n]       # NaN last
        return [(int(b), int(e)) for b, e in np.argwhere(may_go)[first]]

    def free(self, bank: int, used: Iterable[int]) -> bool:
        """Make sure that a slot is free: if none is, the expert with the highest cost gives up its slot, but none of a
        bank that `used` names.  False if there is no other."""
        for gone in self._going(bank, np.fromiter(used, np.intp), 1):
            self._evict(gone)
        return int(self.held.sum()) < self.n_slots

    def _evict(self, gone: tuple[int, int]) -> None:
        self.held[gone] = False
        self._evictions += 1

    def put(self, bank: int, expert: int) -> None:
        """Note that an expert is in a slot now."""
        self.held[bank, expert] = True

    def clear(self) -> None:
        """Note that no expert is in a slot."""
        self.held[:] = False
