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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_sched.planning.plan import Plan
from ggml_sched.planning.tables import printable, table

__all__ = ["ArenaPeaks", "Cap", "Peak", "Series", "peaks_of", "series_of"]

Ints = NDArray[np.int64]
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
            lines += ["", f"peak at {printable(peak.node) or 'an unnamed tensor'}, position {peak.position}{like}"]
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
    alive, total = _alive([[span for i in ids for span in _spans(plan, i)] for ids in keys.values()],
                          len(data.sequence) + 2)
    arena = plan.buffer_sizes[b]
    live = int(total.max(initial=0))
    if not live:
        return ArenaPeaks(plan.backends[b].name, arena, 0, (), ())
    return ArenaPeaks(plan.backends[b].name, arena, live, tuple(_peaks(plan, series, alive, total)),
                      tuple(Cap(tuple(series[k] for k in members), saves) for members, saves in _caps(alive, total)))


class _Alive(NamedTuple):
    """The live bytes of each series: ranges of positions with equal bytes, in the order of series and positions.  Those
    of one series follow one another and cover all positions; a table of series times positions would be too large."""

    bounds: Ints
    """The index of the first range of each series; at the end the number of ranges."""
    series: Ints
    first: Ints
    after: Ints
    nbytes: Ints

    def row(self, k: int) -> Ints:
        """The bytes of series k at each position."""
        those = slice(self.bounds[k], self.bounds[k + 1])
        return np.repeat(self.nbytes[those], self.after[those] - self.first[those])

    def at(self, position: int) -> tuple[Ints, Ints]:
        """The series with bytes at a position, and these bytes."""
        there = np.flatnonzero((self.first <= position) & (position < self.after) & (self.nbytes > 0))
        return self.series[there], self.nbytes[there]


def _alive(spans: Sequence[Sequence[tuple[int, int, int]]], n_positions: int) -> tuple[_Alive, Ints]:
    """The live bytes of each series and of all together at each position; `spans`: for each series its (first position,
    position after the last one, bytes)."""
    changes = np.array([(k, position, change) for k, of in enumerate(spans) for position, change in
                        ((0, 0), *((first, nbytes) for first, _, nbytes in of),
                         *((after, -nbytes) for _, after, nbytes in of))], np.int64).reshape(-1, 3)
    series, first, change = changes[np.lexsort((changes[:, 1], changes[:, 0]))].T
    total = np.zeros(n_positions, np.int64)
    np.add.at(total, first, change)
    last = np.flatnonzero((np.diff(series, append=-1) != 0) | (np.diff(first, append=-1) != 0))
    # Bytes of a series end at zero, so that the sums of the next one begin there.
    series, first, nbytes = series[last], first[last], np.cumsum(change)[last]
    bounds = np.searchsorted(series, np.arange(len(spans) + 1))
    after = np.append(first[1:], n_positions)
    after[bounds[1:] - 1] = n_positions
    return _Alive(bounds, series, first, after, nbytes), np.cumsum(total)


def _alone(alive: _Alive, total: Ints) -> Ints:
    """By how much the maximum of `total` is higher than without each series."""
    most = np.zeros_like(alive.first)
    # The largest total of each range is that of two ranges with a power of two positions, which overlap.
    largest, width, lengths = total, 1, alive.after - alive.first
    while True:
        those = np.flatnonzero((width <= lengths) & (lengths < 2 * width))
        most[those] = np.maximum(largest[alive.first[those]], largest[alive.after[those] - width])
        if 2 * width > len(total):
            break
        largest, width = np.maximum(largest[:-width], largest[width:]), 2 * width
    saves: Ints = total.max() - np.maximum.reduceat(most - alive.nbytes, alive.bounds[:-1])
    return saves


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


def _peaks(plan: Plan, series: Sequence[Series], alive: _Alive, total: Ints) -> Iterator[Peak]:
    """The positions with the most live bytes: neighbouring ones with the same series are one peak, and later peaks with
    the same series are counted with the first."""
    found: dict[tuple[tuple[int, int], ...], list[int]] = {}
    last, before = -2, None
    order = np.argsort(alive.first, kind="stable")
    begun = np.searchsorted(alive.first[order], np.arange(1, len(total) + 1)).tolist()
    changes = list(zip(alive.series[order].tolist(), alive.nbytes[order].tolist(), strict=True))
    now: dict[int, int] = {}
    done = 0
    for position in np.flatnonzero(total == total.max()).tolist():
        for k, nbytes in changes[done : begun[position]]:
            now[k] = nbytes
            if not nbytes:
                del now[k]
        done = begun[position]
        key = tuple(sorted(((nbytes, k) for k, nbytes in now.items()), key=lambda pair: (-pair[0], pair[1])))
        if position != last + 1 or key != before:
            found.setdefault(key, []).append(position)
        last, before = position, key
    alone, sequence = _alone(alive, total).tolist(), plan.data.sequence
    for key, positions in found.items():
        # The name of the tensor at this position of the sequence; the last one may be past its end.
        node = plan.name_of(sequence[min(positions[0], len(sequence) - 1)]) if sequence else ""
        yield Peak(node, positions[0], len(positions),
                   tuple((series[k], nbytes, alone[k]) for nbytes, k in key))


def _caps(alive: _Alive, total: Ints) -> list[tuple[tuple[int, ...], int]]:
    """Sets of series without which the maximum of `total` is lower, and by how much.

    Without a set of series the maximum is at another position; only a series with bytes there can save more.  So the
    search extends each set by such series, at most as many as _LARGEST, _BEAM and _WIDTH allow.
    """
    live = int(total.max())

    def left(members: Iterable[int]) -> Ints:
        """The live bytes at each position without these series."""
        rest = total.copy()
        for k in members:
            rest -= alive.row(k)
        return rest

    def saved(members: Iterable[int]) -> int:
        return live - int(left(members).max())

    found: list[tuple[tuple[int, ...], int]] = []
    beam: list[tuple[int, ...]] = [()]
    most = 0
    for _ in range(_LARGEST):
        extended: dict[tuple[int, ...], int] = {}
        for members in beam:
            there, nbytes = alive.at(int(left(members).argmax()))
            largest = [k for k in there[np.argsort(-nbytes, kind="stable")].tolist() if k not in members]
            for k in largest[:_WIDTH]:
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
