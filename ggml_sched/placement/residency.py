"""Which weights stay in memory, and which a store fetches in each compute: the choice for one device.

A fixed set of weights stays.  To evict and fetch on demand would not read fewer bytes, because every evaluation goes
through all weights in the same order.  As many bytes stay as the limit leaves beside the window, to which the other
weights are fetched one after another.  The fetched weights are spread evenly over the order, so that fetching and
computing overlap all the time.  Small weights are the first to stay, as each fetch has a price of its own, and so are
weights that several nodes read, as their copies would be in the window from the first of these nodes to the last.  The
window has room for any two fetched weights that follow each other: a node reads one while the other is fetched.  Larger
fetched weights need a larger window, and leave less memory for weights that stay; `choose` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ggml_sched._graph import Tensor

__all__ = ["Choice", "Read", "Use", "choose", "chosen", "least_choice", "most_whole_reads", "reads_of"]

LATENCY = 2e-4
"""Seconds that a fetch takes besides those for its bytes: about right for all kinds of disks."""
BANDWIDTH = 1e9
"""Bytes that a fetch reads in a second.  Which of two choices is better depends on LATENCY * BANDWIDTH alone."""


class Read(NamedTuple):
    """A source of a node that is a weight or a cache, or a view of one."""

    node: Tensor
    slot: int
    source: Tensor
    is_whole: bool
    """Whether the node reads it as a whole, and not single rows."""


def reads_of(nodes: Iterable[Tensor], residents: Mapping[str, Tensor],
             reads_rows: Callable[[Tensor], bool]) -> Iterator[Read]:
    """The reads of these weights and caches, in the order of the nodes.  `reads_rows`: whether a node reads single rows
    of its first source."""
    for node in nodes:
        for slot, s in enumerate(node.src if node.computes else ()):
            if s is not None and residents.get(s.root.name) is s.root:
                yield Read(node, slot, s, not (slot == 0 and reads_rows(node)))


def most_whole_reads(graphs: Iterable[Iterable[Read]]) -> dict[str, int]:
    """{name of each resident that is read: the most reads of it as a whole in one graph}, in the order of first reads;
    `graphs`: the reads of each graph."""
    most: dict[str, int] = {}
    for reads in graphs:
        here: dict[str, int] = {}
        for read in reads:
            name = read.source.root.name
            here[name] = here.get(name, 0) + read.is_whole
        for name, n in here.items():
            most[name] = max(most.get(name, 0), n)
    return most


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

    def taken(self, free: int = 0) -> int:
        """Bytes of the weights that stay and of the window, where `free` bytes of a window take no other memory."""
        return self.resident + max(0, self.window - free)

    @property
    def nbytes(self) -> int:
        """Bytes that each evaluation fetches."""
        return sum(use.nbytes for use in self.fetched)

    @property
    def seconds(self) -> float:
        """The estimated seconds of all fetches of an evaluation; the choice with the fewest is the best."""
        return sum(LATENCY + use.nbytes / BANDWIDTH for use in self.fetched)


def choose(uses: Sequence[Use], room: int, free: int = 0) -> Choice | None:
    """The choice of fewest `seconds` whose resident weights and window fit into `room` bytes; None if none fits.

    `uses` are in the order of an evaluation.  `free`: bytes besides those of `room` that the window alone can have.
    """
    total = sum(use.nbytes for use in uses)
    if total <= room:
        return Choice((), total, 0)
    best: Choice | None = None
    for candidates in _candidates(uses):
        found = _spread(uses, candidates, room, total, free)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
    return best


def chosen(uses: Sequence[Use], names: Collection[str]) -> Choice:
    """The choice that fetches the weights of these names."""
    picked = [k for k, use in enumerate(uses) if use.name in names]
    return _made(uses, picked, sum(use.nbytes for use in uses))


def least_choice(uses: Sequence[Use], free: int = 0) -> Choice:
    """The choice whose resident weights and window take the fewest bytes; `free`: see `choose`."""
    total = sum(use.nbytes for use in uses)
    found = [Choice((), total, 0), *(_made(uses, candidates, total) for candidates in _candidates(uses))]
    return min(found, key=lambda choice: choice.taken(free))


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


def _spread(uses: Sequence[Use], candidates: Sequence[int], room: int, total: int, free: int) -> Choice | None:
    """A choice that fetches some of the candidates, as few bytes as `room` allows, spread evenly over all uses.

    None if the rest does not fit into `room` even when all candidates are fetched.  `total`: bytes of all weights;
    `free`: see `choose`.
    """
    available = sum(uses[k].nbytes for k in candidates)
    everything = _made(uses, candidates, total)
    if everything.taken(free) > room:
        return None
    # The bytes to fetch if the window is that of all candidates; where it is larger, the loop below fetches more.
    wanted = min(total + max(0, everything.window - free) - room, available)
    picked: list[int] = []
    owed = 0.0
    for k in candidates:
        owed += wanted * uses[k].nbytes / available
        if owed >= uses[k].nbytes / 2:
            picked.append(k)
            owed -= uses[k].nbytes
    found = _made(uses, picked, total)
    taken = set(picked)
    rest = [k for k in candidates if k not in taken]
    while found.taken(free) > room:
        missing = found.taken(free) - room
        # Fetch one weight more: the smallest that frees enough bytes, or the largest if none does.
        rest.sort(key=lambda k: (uses[k].nbytes < missing, abs(uses[k].nbytes - missing)))
        picked = sorted([*picked, rest.pop(0)])
        found = _made(uses, picked, total)
    # Let picked weights stay where there is room for them, largest first.  If the weight is one of the only two that
    # need the window, the window shrinks, too.
    wide = _widest(uses, picked, found.window)
    for k in sorted(picked, key=lambda k: -uses[k].nbytes):
        left = room - found.taken(free)
        is_wide = k in wide and 2 * uses[k].fetched >= found.window
        if uses[k].nbytes > left + (found.window if is_wide else 0):
            continue
        fewer = _made(uses, [i for i in picked if i != k], total)
        if fewer.taken(free) <= room:
            picked.remove(k)
            found = fewer
            wide = _widest(uses, picked, found.window)
    return found


def _widest(uses: Sequence[Use], picked: Sequence[int], window: int) -> set[int]:
    """The weights without which the window of these would be smaller: those in all pairs that need all of it."""
    pairs = [{a, b} for a, b in pairwise(picked) if uses[a].fetched + uses[b].fetched == window]
    return set.intersection(*pairs) if pairs else set(picked)


def _made(uses: Sequence[Use], picked: Sequence[int], total: int) -> Choice:
    fetched = tuple(uses[k] for k in picked)
    window = max((a.fetched + b.fetched for a, b in pairwise(fetched)), default=max(
        (use.fetched for use in fetched), default=0))
    return Choice(fetched, total - sum(use.nbytes for use in fetched), window)
