"""Slots for experts in plans without memory: which weights of a host are read expert by expert, and how many slots.

`Slots` and `Bank` are to a plan what `ExpertSlots` and `ExpertBank` (backends/store/slots.py) are to a loaded model:
the compiler fetches the experts of such a bank when nodes have chosen them, and `gs.price` counts those in no slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ggml_sched.backend import Backend
from ggml_sched.backends.store.slots import has_slots, slot_nbytes
from ggml_sched.placement.facts import share_of_experts
from ggml_sched.placement.residency import Read

__all__ = ["Bank", "ByExpert", "Slots", "by_expert", "can_have_slots", "may_have_slots"]


class ByExpert(NamedTuple):
    """A weight of which nodes read experts by their numbers, and nothing else."""

    bank: str
    """The name of its bank: of the first weight from which the same numbers choose."""
    n_experts: int
    nbytes: int
    """Bytes of one expert."""
    most: int
    """The most experts that one node can use."""
    used: tuple[float, ...]
    """For each graph how many different experts a node is expected to use; 0 where none reads the weight."""


def by_expert(graphs: Sequence[Sequence[Read]]) -> dict[str, ByExpert]:
    """The weights that are read by expert, by name, in the order of their first reads; without banks of which nodes
    also read other bytes, or which are not the same weights in all graphs.  `graphs`: the reads of each.
    """
    found: dict[str, ByExpert] = {}
    given_up: set[str] = set()
    for g, reads in enumerate(graphs):
        banks: dict[object, str] = {}
        for read in reads:
            if read.node.op != "MUL_MAT_ID" or read.slot:
                continue
            weight, ids = read.source, read.node.src[2]
            if weight is not weight.root or weight.ne[2] < 2:
                continue
            bank = banks.setdefault(ids, weight.name)
            n, most = weight.ne[2], min(weight.ne[2], ids.n_elements)
            used = n * share_of_experts(n, ids)
            old = found.get(weight.name, ByExpert(bank, n, weight.nb[2], 0, (0.0,) * len(graphs)))
            if old.bank != bank:
                given_up |= {old.bank, bank}
            found[weight.name] = old._replace(most=max(most, old.most), used=(
                *old.used[:g], max(used, old.used[g]), *old.used[g + 1 :]))
    others = {read.source.root.name for reads in graphs for read in reads
              if read.node.op != "MUL_MAT_ID" or read.slot or read.source is not read.source.root}
    n_experts: dict[str, int] = {}
    for entry in found.values():
        if n_experts.setdefault(entry.bank, entry.n_experts) != entry.n_experts:
            given_up.add(entry.bank)
    given_up |= {found[name].bank for name in others.intersection(found)}
    return {name: entry for name, entry in found.items() if entry.bank not in given_up}


def can_have_slots(host: Backend) -> bool:
    """Whether a host can have slots: this system gives pages back, and the backend computes on memory of its caller.  A
    host that is described by numbers alone counts as such a backend."""
    return has_slots() and (not host.has_memory or getattr(host, "buffer_from_ptr", None) is not None)


def may_have_slots(host: Backend, graphs: Sequence[Sequence[Read]]) -> dict[str, ByExpert]:
    """The weights of a host whose experts may have slots, by name; none where it cannot have slots.  `graphs`: the
    reads of each, of weights on the host.  For `gs.fit` and for `llama.load`, which so have slots for the same weights.
    """
    return by_expert(graphs) if can_have_slots(host) else {}


class Bank(NamedTuple):
    """The weights of a host from which the same numbers choose experts; `number`: its index in `slots.banks`."""

    slots: Slots
    number: int
    name: str
    weights: tuple[str, ...]
    n_experts: int

    @property
    def store(self) -> Backend:
        """The store that reads its experts."""
        return self.slots.store


class Slots:
    """Slots for the experts of some weights, at first the fewest with which every node finds those that it uses.

    `slot_nbytes`: the most bytes that an expert takes in memory, in whole pages.
    """

    def __init__(self, store: Backend, weights: Mapping[str, ByExpert]) -> None:
        self.store = store
        names: dict[str, list[str]] = {}
        for name, entry in weights.items():
            names.setdefault(entry.bank, []).append(name)
        self.banks: list[Bank] = [Bank(self, k, bank, tuple(members), weights[members[0]].n_experts)
                                  for k, (bank, members) in enumerate(names.items())]
        self.bank_of: dict[str, Bank] = {name: bank for bank in self.banks for name in bank.weights}
        self.n_experts: int = sum(bank.n_experts for bank in self.banks)
        self.slot_nbytes: int = max(slot_nbytes([weights[name].nbytes for name in bank.weights])
                                    for bank in self.banks)
        self.fewest: int = max(entry.most for entry in weights.values())
        self.n_slots: int = self.fewest

    @property
    def nbytes(self) -> int:
        """Bytes of memory that all slots take."""
        return self.n_slots * self.slot_nbytes

    def within(self, room: int) -> int:
        """The number of slots that `room` bytes hold: not less than the fewest, and at most one for each expert."""
        return max(self.fewest, min(room // self.slot_nbytes, self.n_experts))
