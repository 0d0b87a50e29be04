"""Which weights of a model are read expert by expert, and how many slots a limit of memory leaves for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ggml_sched._graph import Context, Graph, Tensor
from ggml_sched.backend import Backend
from ggml_sched.backends.store import ExpertSlots, Stored
from ggml_sched.llama.weights import ELEMENT_ALIGNMENT, layout_of
from ggml_sched.placement.residency import reads_of
from ggml_sched.placement.slots import Slots, may_have_slots

if TYPE_CHECKING:
    from ggml_sched.backend import Buffer
    from ggml_sched.backends.cpu.buffer import HostBackend
    from ggml_sched.backends.store import Store
    from ggml_sched.experts import Policy
    from ggml_sched.llama.gguf import TensorInfo
    from ggml_sched.llama.weights import Weights

__all__ = ["BankSpec", "SlotsSpec", "bank_name", "banks_of", "least_slots", "make_slots"]

SUFFIX = "_exps.weight"


@dataclass(frozen=True)
class BankSpec:
    """A bank, described by its name and the names of its weights; `nbytes`: bytes of one expert, in all weights."""

    name: str
    weights: tuple[str, ...]
    n_experts: int
    nbytes: int


@dataclass(frozen=True)
class SlotsSpec:
    """How many slots a model's experts have on the backend `home`; a slot takes at most `slot_nbytes` bytes."""

    home: Backend
    banks: tuple[BankSpec, ...]
    n_slots: int
    fewest: int
    """The fewest slots with which the model's graphs can be computed."""
    slot_nbytes: int
    policy: Policy

    @property
    def names(self) -> frozenset[str]:
        """The names of all weights in banks."""
        return frozenset(name for bank in self.banks for name in bank.weights)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that all slots take."""
        return self.n_slots * self.slot_nbytes

    @property
    def n_experts(self) -> int:
        """Experts of all banks together."""
        return sum(bank.n_experts for bank in self.banks)

    def grown(self, room: int) -> SlotsSpec:
        """The same with as many slots more as fit into `room` bytes, and at most one for each expert."""
        return replace(self, n_slots=min(self.n_slots + room // self.slot_nbytes, self.n_experts))


def bank_name(weight: str) -> str:
    """The name of the bank of a weight: "blk.3" for "blk.3.ffn_up_exps.weight"."""
    return weight.rsplit(".ffn_", 1)[0]


def banks_of(tensors: Mapping[str, Tensor]) -> tuple[BankSpec, ...]:
    """The banks of a model, in the order of its weights; `tensors`: {name: weight}."""
    found: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if name.endswith(SUFFIX) and tensor.ne[2] > 1:
            found.setdefault(bank_name(name), []).append(name)
    return tuple(BankSpec(bank, tuple(names), tensors[names[0]].ne[2], sum(tensors[name].nb[2] for name in names))
                 for bank, names in found.items())


def least_slots(home: Backend, store: Store, tensors: Mapping[str, Tensor], infos: Mapping[str, TensorInfo],
                graphs: Sequence[Graph], policy: Policy) -> SlotsSpec | None:
    """The fewest slots with which the graphs can be computed, for the banks that nodes read by expert and nothing else;
    None where there is no such bank.  `tensors`: {name: weight} of the weights on the backend `home`.

    A bank with a weight that is not aligned in its file has none, because kernels get the weight as it lies there.
    """
    found = may_have_slots(home, [[*reads_of(graph.nodes, tensors, lambda node: False)] for graph in graphs])
    unaligned = {one.bank for name, one in found.items() if infos[name].offset % ELEMENT_ALIGNMENT}
    found = {name: one for name, one in found.items() if one.bank not in unaligned}
    if not found:
        return None
    slots = Slots(store, found)
    banks = tuple(BankSpec(bank_name(bank.name), bank.weights, bank.n_experts,
                           sum(found[name].nbytes for name in bank.weights)) for bank in slots.banks)
    return SlotsSpec(home, banks, slots.fewest, slots.fewest, slots.slot_nbytes, policy)


def make_slots(spec: SlotsSpec, store: Store, files: Sequence[Buffer], infos: Mapping[str, TensorInfo],
               weights: Weights) -> ExpertSlots:
    """Make the slots of a model, whose experts are read from the files of a store; adds the weights of the banks, with
    addresses, to `weights`."""
    context = weights.contexts.setdefault(store, Context(f"weights in {store.name}"))
    for name in (name for bank in spec.banks for name in bank.weights):
        info = infos[name]
        weights.tensors[name] = context.restore("NONE", *layout_of(info), name=name, resident="weight")
    banks = [(bank.name, [Stored(weights.tensors[name], files[infos[name].part], infos[name].offset)
                          for name in bank.weights]) for bank in spec.banks]
    home: HostBackend = spec.home       # type: ignore[assignment]
    return ExpertSlots(store, home, spec.n_slots, spec.policy, banks)
