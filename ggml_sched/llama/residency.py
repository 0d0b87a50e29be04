"""Which weights of a model stay in memory under a limit, and which a store fetches in each compute.

A fixed set of weights stays.  To evict and fetch on demand would not read fewer bytes, because every evaluation goes
through all weights in the same order.  As many bytes stay as the limit leaves beside the window, to which the other
weights are fetched one after another.  The fetched weights are spread evenly over the order, so that fetching and
computing overlap all the time.  Small weights are the first to stay, as each fetch has a price of its own, and so are
weights that several nodes read, as their copies would be in the window from the first of these nodes to the last.  The
window has room for any two fetched weights that follow each other: a node reads one while the other is fetched.  Larger
fetched weights need a larger window, and leave less memory for weights that stay; `choose` compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ggml_sched.llama.expert_slots import SlotsSpec

__all__ = ["Choice", "Residency", "Use", "choose", "least_choice"]

LATENCY = 2e-4
"""Seconds that a fetch takes besides those for its bytes: about right for all kinds of disks."""
BANDWIDTH = 1e9
"""Bytes that a fetch reads in a second.  Which of two choices is better depends on LATENCY * BANDWIDTH alone."""
GIB = 1 << 30


class Use(NamedTuple):
    """A weight that a choice keeps or fetches; uses are listed in the order of an evaluation.

    `nbytes`: bytes of the weight where it stays; `fetched`: bytes of its copy in a window; `n_uses`: the number of
    nodes that read the weight.
    """

    name: str
    nbytes: int
    fetched: int
    n_uses: int


class Choice(NamedTuple):
    """The weights that are fetched, in the order of their uses, and the bytes that the choice takes."""

    fetched: tuple[Use, ...]
    resident: int
    """Bytes of the weights that stay."""
    window: int
    """Bytes of the window: the most that two fetched weights that follow each other take."""

    @property
    def nbytes(self) -> int:
        """Bytes that each evaluation fetches."""
        return sum(use.nbytes for use in self.fetched)

    @property
    def seconds(self) -> float:
        """The estimated seconds of all fetches of an evaluation; the choice with the fewest is the best."""
        return sum(LATENCY + use.nbytes / BANDWIDTH for use in self.fetched)


def choose(uses: Sequence[Use], room: int) -> Choice | None:
    """The choice of fewest `seconds` whose resident weights and window fit into `room` bytes; None if none fits.

    `uses` are in the order of an evaluation.
    """
    total = sum(use.nbytes for use in uses)
    if total <= room:
        return Choice((), total, 0)
    best: Choice | None = None
    for candidates in _candidates(uses):
        found = _spread(uses, candidates, room, total)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
    return best


def least_choice(uses: Sequence[Use]) -> Choice:
    """The choice whose resident weights and window take the fewest bytes."""
    total = sum(use.nbytes for use in uses)
    found = [Choice((), total, 0), *(_made(uses, candidates, total) for candidates in _candidates(uses))]
    return min(found, key=lambda choice: choice.resident + choice.window)


def _candidates(uses: Sequence[Use]) -> Iterator[list[int]]:
    """Sets of weights that may be fetched, as indices of `uses`: for each range of sizes the weights in this range
    that only one node reads; at last all weights."""
    once = sorted({use.nbytes for use in uses if use.n_uses < 2 and use.nbytes})
    lows = [once[k] for k in range(0, len(once), max(len(once) // 8, 1))]
    for high in once:
        for low in lows:
            if low <= high:
                yield [k for k, use in enumerate(uses) if use.n_uses < 2 and low <= use.nbytes <= high]
    yield [k for k, use in enumerate(uses) if use.nbytes]


def _spread(uses: Sequence[Use], candidates: Sequence[int], room: int, total: int) -> Choice | None:
    """A choice that fetches some of the candidates, as few bytes as `room` allows, spread evenly over all uses.

    None if the rest does not fit into `room` even when all candidates are fetched.  `total`: bytes of all weights.
    """
    available = sum(uses[k].nbytes for k in candidates)
    everything = _made(uses, candidates, total)
    if everything.resident + everything.window > room:
        return None
    # The bytes to fetch if the window is that of all candidates; where it is larger, the loop below fetches more.
    wanted = min(total + everything.window - room, available)
    picked: list[int] = []
    owed = 0.0
    for k in candidates:
        owed += wanted * uses[k].nbytes / available
        if owed >= uses[k].nbytes / 2:
            picked.append(k)
            owed -= uses[k].nbytes
    found = _made(uses, picked, total)
    rest = [k for k in candidates if k not in set(picked)]
    while found.resident + found.window > room:
        missing = found.resident + found.window - room
        # Fetch one weight more: the smallest that frees enough bytes, or the largest if none does.
        rest.sort(key=lambda k: (uses[k].nbytes < missing, abs(uses[k].nbytes - missing)))
        picked = sorted([*picked, rest.pop(0)])
        found = _made(uses, picked, total)
    # Let picked weights stay where there is room for them, largest first.  If the weight is one of the two that need
    # the window, the window shrinks, too.
    for k in sorted(picked, key=lambda k: -uses[k].nbytes):
        left = room - found.resident - found.window
        if uses[k].nbytes > left + (found.window if 2 * uses[k].fetched >= found.window else 0):
            continue
        fewer = _made(uses, [i for i in picked if i != k], total)
        if fewer.resident + fewer.window <= room:
            picked.remove(k)
            found = fewer
    return found


def _made(uses: Sequence[Use], picked: Sequence[int], total: int) -> Choice:
    fetched = tuple(uses[k] for k in picked)
    window = max((a.fetched + b.fetched for a, b in pairwise(fetched)), default=max(
        (use.fetched for use in fetched), default=0))
    return Choice(fetched, total - sum(use.nbytes for use in fetched), window)


@dataclass(frozen=True)
class Residency:
    """Which weights of a loaded model stay in memory, and which are fetched; all figures are bytes.

    `limits` and `rooms` are by name of the backend: its limit, and the bytes of the limit that are left for weights,
    their window and slots, beside the cache, the rest of the arenas, and work memory.  `rows`: weights in the store of
    which nodes read single rows, and no node all.  `kept`: such weights that stay, where everything fits.
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
        more = choose(uses, self._room(backend) + GIB)
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
        more = choose(self.uses[home], self._room(home) + GIB)
        if more is not None:
            left = self.rooms[home] + GIB - more.resident - more.window
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
