"""What binds the size of each arena: the peaks of its live bytes, and the tensors that must shrink together to lower
them.

Tensors whose names differ in numbers alone, with equal op, type and extents, are one series: `kq-0` .. `kq-31` of 32
layers peak one after the other, and only all of them together can lower the arena.  A cap is a set of series that must
shrink together: if one of them does not, a peak remains at which more bytes are alive.  All figures are bytes of live
memory, the lower bound of the arena; where a plan is `optimal` its arena shrinks by the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ggml_sched.planning.plan import Plan
from ggml_sched.planning.tables import table

__all__ = ["ArenaPeaks", "Cap", "Peak", "Series", "peaks_of", "series_of"]

_LARGEST = 4
"""The most series of a cap."""
_BEAM = 32
"""The search for caps extends at most this many sets of series of one size."""
_WIDTH = 16
"""The search for caps extends a set by at most this many series, the largest at the peak first."""
_SHOWN = 4
_WORTH = 0.01
"""The part of the live bytes that a cap has to save to be printed."""


@dataclass(frozen=True)
class Series:
    """Tensors of one arena that are alike: equal op, type and extents, and names that differ in numbers alone."""

    name: str
    """The name of the tensors, with # for each number, and "copy of" before it for copies."""
    op: str
    type: str
    ne: tuple[int, ...]
    count: int
    """The number of its tensors that have memory of their own in the arena."""

    @property
    def label(self) -> str:
        """The name, or, for tensors that the caller has not named, the op and the extents."""
        return f"{self.op} {'x'.join(map(str, self.ne))}" if self.name in ("", "node_#") else self.name

    def __str__(self) -> str:
        extents = "x".join(map(str, self.ne))
        count = f", {self.count} of them" if self.count > 1 else ""
        return f"{self.name or 'unnamed'} ({self.op} {self.type} {extents}{count})"


@dataclass(frozen=True)
class Peak:
    """A time at which most bytes are alive; later peaks with the same series are counted with the first (`times`)."""

    node: str
    """The name of the tensor, a node or a copy, that gets memory at this time."""
    position: int
    """The position of the peak in the sequence of copies and nodes."""
    times: int
    """How many peaks have the same series, this one included."""
    series: tuple[tuple[Series, int, int], ...]
    """(Series, its bytes alive at the peak, by how many bytes the arena would shrink if this series alone took none),
    largest first."""


@dataclass(frozen=True)
class Cap:
    """Series that must shrink together: if they took no memory, the live bytes would be lower by `saves`.

    Any set of some of them saves less.
    """

    series: tuple[Series, ...]
    saves: int


@dataclass(frozen=True)
class ArenaPeaks:
    """The peaks and caps of the arena of one backend."""

    backend: str
    arena: int
    """Bytes of the arena."""
    live: int
    """The most bytes that are alive at once."""
    peaks: tuple[Peak, ...]
    caps: tuple[Cap, ...]
    """For each number of series the caps that save most; each saves more than every cap of fewer series."""

    def __str__(self) -> str:
        """The peaks and the caps as tables."""
        lines = [f"{self.backend}: arena {self.arena:,} bytes, live {self.live:,}"]
        for peak in self.peaks[:_SHOWN]:
            like = f", and {peak.times - 1} more like it" if peak.times > 1 else ""
            lines += ["", f"peak at {peak.node or 'an unnamed tensor'}, position {peak.position}{like}"]
            alive = [(f"  {series}", f"{size:,}", f"{alone:,}") for series, size, alone in peak.series[:_SHOWN]]
            lines.append(table([("  alive", "bytes", "alone saves"), *alive], "<>>"))
        if len(self.peaks) > _SHOWN:
            lines.append(f"and {len(self.peaks) - _SHOWN} other peaks")
        rows = [(" and ".join(series.label for series in cap.series), f"{cap.saves:,}")
                for cap in self.caps if cap.saves >= _WORTH * self.live]
        if rows:
            lines += ["", table([("without memory for", "saves"), *rows], "<>")]
        return "\n".join(lines)


def peaks_of(plan: Plan) -> tuple[ArenaPeaks, ...]:
    """The peaks and caps of each arena of a plan, in the order of its backends."""
    owners: list[list[int]] = [[] for _ in plan.backends]
    data = plan.data
    for i in range(data.n_tensors + data.n_copies + len(data.slot_copies)):
        arena = data.memory_index(i)
        if arena >= 0 and data.size(i) and data.lifetime(i) is not None:
            owners[arena].append(i)
    return tuple(_arena(plan, b, found) for b, found in enumerate(owners))


def _arena(plan: Plan, b: int, owners: Sequence[int]) -> ArenaPeaks:
    """The peaks and caps of the arena of backend b; `owners`: the ids that have memory of their own there."""
    data = plan.data
    keys: dict[Series, list[int]] = {}
    for i in owners:
        keys.setdefault(series_of(plan, i), []).append(i)
    series = [replace(key, count=len(ids)) for key, ids in keys.items()]
    alive = np.zeros((len(series), len(data.sequence) + 2), np.int64)
    for row, ids in zip(alive, keys.values(), strict=True):
        for i in ids:
            for first, after, nbytes in _spans(plan, i):
                row[first] += nbytes
                row[after] -= nbytes
    alive = np.cumsum(alive, axis=1)
    arena = plan.buffer_sizes[b]
    total = alive.sum(axis=0)
    live = int(total.max(initial=0))
    if not live:
        return ArenaPeaks(plan.backends[b].name, arena, 0, (), ())
    alone = [live - int((total - row).max()) for row in alive]
    return ArenaPeaks(plan.backends[b].name, arena, live, tuple(_peaks(plan, series, alive, total, alone)),
                      tuple(Cap(tuple(series[k] for k in members), saves) for members, saves in _caps(alive, total)))


def series_of(plan: Plan, i: int) -> Series:
    """The series of id i, with a count of 1."""
    data, copy = plan.data, i >= plan.data.n_tensors
    if copy:
        c = i - data.n_tensors
        i = data.copies[c if c < data.n_copies else data.slot_copies[c - data.n_copies]][0]
    t = plan.graph.tensors[i]
    name = re.sub(r"\d+", "#", t.name)
    ne: tuple[int, ...] = t.ne
    while len(ne) > 1 and ne[-1] == 1:
        ne = ne[:-1]
    return Series(f"copy of {name or 'unnamed'}" if copy else name, t.op, str(t.type), ne, 1)


def _spans(plan: Plan, i: int) -> Iterator[tuple[int, int, int]]:
    """(first position, position after the last one, bytes) of the memory of id i: one range of positions, or two if its
    tail is freed earlier than the rest."""
    lifetime, trimmed = plan.data.lifetime(i), plan.data.trimmed(i)
    if lifetime is None:
        return
    birth, death = lifetime
    size = plan.data.size(i)
    if trimmed is None:
        yield birth, death + 1, size
        return
    position, rest = trimmed
    yield birth, death + 1, rest
    yield birth, position + 1, size - rest


def _peaks(plan: Plan, series: Sequence[Series], alive: NDArray[np.int64], total: NDArray[np.int64],
           alone: Sequence[int]) -> Iterator[Peak]:
    """The positions with the most live bytes: neighbouring ones with the same series are one peak, and later peaks with
    the same series are counted with the first."""
    found: dict[tuple[tuple[int, int], ...], list[int]] = {}
    last, before = -2, None
    for position in np.flatnonzero(total == total.max()).tolist():
        column = alive[:, position]
        members = np.flatnonzero(column)
        key = tuple(sorted(((int(column[k]), int(k)) for k in members), key=lambda pair: (-pair[0], pair[1])))
        if position != last + 1 or key != before:
            found.setdefault(key, []).append(position)
        last, before = position, key
    for key, positions in found.items():
        yield Peak(_made_at(plan, positions[0]), positions[0], len(positions),
                   tuple((series[k], nbytes, alone[k]) for nbytes, k in key))


def _made_at(plan: Plan, position: int) -> str:
    """The name of the tensor at a position of the sequence."""
    sequence = plan.data.sequence
    return plan.name_of(sequence[min(position, len(sequence) - 1)]) if sequence else ""


def _caps(alive: NDArray[np.int64], total: NDArray[np.int64]) -> list[tuple[tuple[int, ...], int]]:
    """Sets of rows of `alive` without which the maximum of `total` is lower, and by how much.

    `alive` has a row for each series: its live bytes at each position; `total` is the sum of all rows.  Without a set's
    rows the maximum is at another position; only a row with bytes there can save more.  So the search extends each set
    by such rows, at most as many as _LARGEST, _BEAM and _WIDTH allow.
    """
    live = int(total.max())

    def saved(members: Iterable[int]) -> int:
        return live - int((total - alive[list(members)].sum(axis=0)).max())

    found: list[tuple[tuple[int, ...], int]] = []
    beam: list[tuple[int, ...]] = [()]
    most = 0
    for _ in range(_LARGEST):
        extended: dict[tuple[int, ...], int] = {}
        for members in beam:
            left = total - alive[list(members)].sum(axis=0)
            column = alive[:, int(left.argmax())].copy()
            column[list(members)] = 0
            for k in np.argsort(-column, kind="stable")[:_WIDTH].tolist():
                if column[k]:
                    extended.setdefault(tuple(sorted((*members, k))), 0)
        for members in extended:
            extended[members] = saved(members)
        ranked = sorted(extended.items(), key=lambda item: (-item[1], item[0]))
        good = [(members, saves) for members, saves in ranked if saves > most
                and all(saved(set(members) - {k}) < saves for k in members)]
        found += good[:_LARGEST]
        most = max([most, *(saves for _, saves in good)])
        beam = [members for members, _ in ranked[:_BEAM]]
        if most == live:
            break
    return found
