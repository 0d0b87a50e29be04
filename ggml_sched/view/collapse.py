"""Memory maps with collapsed layers: for each layer and each range of addresses the role that takes it longest.

A block that outlives the layer after its own, such as a mask, is not collapsed: it is drawn for closed layers, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ggml_sched.view.layers import Section
from ggml_sched.view.memory import Ints, MemoryMap

__all__ = ["Cell", "Collapsed", "collapse"]

_SHADES = 8
"""The parts of time that neighbouring ranges of bytes are taken are compared in this many steps: ranges of one role and
the same step become one cell."""


@dataclass(frozen=True)
class Cell:
    """The bytes [low, high) of an arena during one section (a layer)."""

    section: int
    low: int
    high: int
    role: int
    """The role that takes these bytes longest."""
    part: float
    """The part of the section's time in which any tensor takes these bytes, 0 to 1."""
    count: int
    """The number of blocks in the cell."""
    largest: int
    """The index, in the map, of the largest block in the cell."""


@dataclass(frozen=True, eq=False)
class Collapsed:
    """A memory map whose layers are collapsed."""

    cells: list[Cell]
    section: Ints
    """The section of each block of the map; -1 for a block that is always drawn."""


def collapse(of: MemoryMap, sections: Sequence[Section]) -> Collapsed:
    """Collapse all layers of a map; `sections`: the layers, with times in place of positions."""
    firsts = np.array([s.first for s in sections], np.int64)
    stops = np.array([s.stop for s in sections], np.int64)
    begun = np.searchsorted(firsts, of.first, "right") - 1
    ended = np.searchsorted(stops, of.stop, "left")
    long = np.searchsorted(np.unique(stops), of.stop, "left") - np.searchsorted(np.unique(stops), of.first, "right") > 1
    cells: list[Cell] = []
    # A section without time, in which nothing computes, has no cells, though a block may outlive it.
    for k in np.flatnonzero(firsts < stops).tolist():
        inside = np.flatnonzero(~long & (begun <= k) & (ended >= k) & (of.first < stops[k]) & (of.stop > firsts[k]))
        if len(inside):
            cells += _cells(of, k, sections[k], inside)
    return Collapsed(cells, np.where(long, -1, begun))


def _cells(of: MemoryMap, k: int, section: Section, inside: Ints) -> list[Cell]:
    """The cells of section `k`; `inside`: the indices of the blocks that are in it."""
    low, high = of.low[inside], of.high[inside]
    time = np.minimum(of.stop[inside], section.stop) - np.maximum(of.first[inside], section.first)
    edges = np.unique(np.concatenate([low, high]))
    roles, which = np.unique(of.role[inside], return_inverse=True)
    taken = np.zeros((len(roles), len(edges)), np.int64)
    np.add.at(taken, (which, np.searchsorted(edges, low)), time)
    np.subtract.at(taken, (which, np.searchsorted(edges, high)), time)
    taken = np.cumsum(taken, axis=1)[:, :-1]
    total = taken.sum(axis=0)
    role = roles[taken.argmax(axis=0)]
    shade = -(-_SHADES * total // (section.stop - section.first))
    # Neighbouring ranges of one role and one shade are one cell.
    new = np.flatnonzero(np.diff(role, prepend=-1) | np.diff(shade, prepend=-1))
    cells = []
    for j, end in zip(new, [*new[1:], len(total)], strict=True):
        if shade[j]:
            a, b = int(edges[j]), int(edges[end])
            there = inside[(low < b) & (high > a)]
            part = float((total[j:end] * np.diff(edges)[j:end]).sum() / ((b - a) * (section.stop - section.first)))
            largest = there[np.argmax(of.high[there] - of.low[there])]
            cells.append(Cell(k, a, b, int(role[j]), part, len(there), int(largest)))
    return cells
