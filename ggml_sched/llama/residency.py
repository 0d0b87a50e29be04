"""Which weights of a model stay in memory under a limit, and which a store fetches in each compute: the answer.

placement/residency.py makes the choices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ggml_sched.placement.residency import Choice, Use, choose

if TYPE_CHECKING:
    from ggml_sched.llama.expert_slots import SlotsSpec

__all__ = ["Residency"]

GIB = 1 << 30


@dataclass(frozen=True)
class Residency:
    """Which weights of a loaded model stay in memory, and which are fetched; all figures are bytes.

    `limits`, `rooms` and `spare` are by name of the backend: its limit, the bytes of the limit that are left for
    weights, their window and slots, beside the cache, the rest of the arenas, and work memory, and the bytes besides
    these that the window alone can have, because they are free where weights are fetched.  `rows`: weights in the store
    of which nodes read single rows, and no node all.  `kept`: such weights that stay, where everything fits.
    """

    limits: dict[str, int]
    rooms: dict[str, int]
    uses: dict[str, tuple[Use, ...]] = field(repr=False)
    """{name of a backend: the weights on it that could be fetched, in the order of an evaluation}."""
    choices: dict[str, Choice] = field(repr=False)
    rows: tuple[str, ...] = ()
    store: str = ""
    """The name of the store; "" where all weights stay."""
    slots: SlotsSpec | None = None
    """The slots of weights that are read expert by expert; None where no weight is."""
    kept: tuple[str, ...] = ()
    spare: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """The names of all weights on backends with a limit: those that `explain` knows."""
        experts = () if self.slots is None else self.slots.names
        return frozenset((*self.rows, *self.kept, *experts, *(use.name for uses in self.uses.values() for use in uses)))

    @property
    def fetched(self) -> tuple[str, ...]:
        """The names of the weights that every evaluation fetches, in the order of their uses."""
        return tuple(use.name for choice in self.choices.values() for use in choice.fetched)

    @property
    def nbytes(self) -> int:
        """The bytes that every evaluation fetches."""
        return sum(choice.nbytes for choice in self.choices.values())

    @property
    def resident(self) -> int:
        """The bytes of the weights that stay."""
        return sum(choice.resident for choice in self.choices.values())

    def explain(self, name: str) -> str:
        """A text: whether a weight stays or is fetched, why, and what a GiB more would change.  KeyError for a name
        that is no weight on a backend with a limit."""
        if name in self.rows:
            return (f"{name}: in {self.store}, because nodes read single rows of it: each evaluation reads those that "
                    "it needs")
        if name in self.kept:
            return f"{name}: stays, because everything fits"
        if self.slots is not None and name in self.slots.names:
            return "\n  ".join(self._of_experts(name, self.slots))
        for backend, uses in self.uses.items():
            use = next((use for use in uses if use.name == name), None)
            if use is not None:
                return "\n  ".join(self._lines(backend, use))
        raise KeyError(name)

    def _lines(self, backend: str, use: Use) -> Iterable[str]:
        choice, uses, limit, slots = (self.choices[backend], self.uses[backend], self.limits[backend],
                                      self._slots_on(backend))
        if use not in choice.fetched:
            yield f"{use.name}: stays on {backend}, {use.nbytes:,} bytes, {self._why_resident(backend, use)}"
        else:
            total = sum(other.nbytes for other in uses)
            beside = "" if slots is None else f" and slots for experts of {slots.nbytes:,}"
            yield (f"{use.name}: fetched from {self.store} in each evaluation, {use.nbytes:,} bytes: of {total:,} "
                   f"bytes of weights {choice.resident:,} stay beside a window of {choice.window:,}{beside}, which is "
                   f"what the limit of {limit:,} on {backend} leaves")
        more = choose(uses, self._room(backend) + GIB, self.spare.get(backend, 0))
        if not choice.fetched or more is None:
            return
        saved = choice.nbytes - more.nbytes
        fate = "it would stay, too" if use in choice.fetched and use not in more.fetched else (
            "it would still be fetched" if use in choice.fetched else "it would stay")
        yield (f"with 1 GiB more {fate}, and an evaluation would fetch {more.nbytes:,} bytes instead of "
               f"{choice.nbytes:,} ({saved:,} less)")

    def _of_experts(self, name: str, slots: SlotsSpec) -> Iterable[str]:
        bank = next(bank for bank in slots.banks if name in bank.weights)
        home = slots.home.name
        yield (f"{name}: read from {self.store} expert by expert, when a node has chosen them: {slots.n_slots:,} slots "
               f"of {slots.slot_nbytes:,} bytes are for {slots.n_experts:,} experts, {bank.n_experts} of them of "
               f"{bank.name}, which is what the limit of {self.limits[home]:,} on {home} leaves")
        spare = self.spare.get(home, 0)
        more = choose(self.uses[home], self._room(home) + GIB, spare)
        if more is not None:
            left = self.rooms[home] + GIB - more.taken(spare)
            yield f"with 1 GiB more there would be {min(left // slots.slot_nbytes, slots.n_experts):,} slots"

    def _slots_on(self, backend: str) -> SlotsSpec | None:
        return None if self.slots is None or self.slots.home.name != backend else self.slots

    def _room(self, backend: str) -> int:
        """The bytes for weights and their window beside the fewest slots for experts."""
        slots = self._slots_on(backend)
        return self.rooms[backend] - (0 if slots is None else slots.fewest * slots.slot_nbytes)

    def _why_resident(self, backend: str, use: Use) -> str:
        choice = self.choices[backend]
        if not choice.fetched:
            return "because everything fits"
        smallest = min(other.nbytes for other in choice.fetched)
        if use.n_uses > 1:
            return f"because {use.n_uses} nodes read it"
        if use.nbytes < smallest:
            return "because it is small: each fetch has a price of its own"
        return f"one of those of its size that fit beside the {len(choice.fetched)} that are fetched"
