"""Sections: a plan's sequence of copies and nodes, cut into the layers of the model, which drawings can collapse.

The names of nodes, weights and caches have the number of their layer; a node without a number belongs to the layer of
the node before it, a copy to the layer that reads it.  Where no name has a number, sections are parts of equal length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from ggml_sched._graph import Tensor
from ggml_sched.planning.plan import Plan

__all__ = ["Section", "sections_of"]

_NUMBER = re.compile(r"(?:blk|layers?|blocks?|h)[._](\d+)\.|_l(\d+)\b|-(\d+)(?= |$|\))")
_BEFORE, _AFTER = -1, 1 << 30
"""The numbers that stand for the positions before the first layer, and after the last."""
_PARTS, _SHORTEST = 64, 64
"""For a plan without layers: the most parts of equal length, and the fewest positions of a part."""
_TORN = 4
"""A plan with more than this many runs of positions for each layer, on average, counts as one without layers."""


class Section(NamedTuple):
    """The positions [first, stop) of a plan's sequence."""

    label: str
    """The number of the layer, "in" before the first and "out" after the last layer, or "part N"."""
    first: int
    stop: int


def sections_of(plan: Plan) -> tuple[Section, ...]:
    """The sections of a plan, in order; together they cover its sequence.  A short plan without layers is one section.
    """
    layers = list(_layers(plan))
    runs = _runs(layers)
    numbers = {layer for layer, _, _ in runs} - {_BEFORE, _AFTER}
    if not numbers or len(runs) > _TORN * (len(numbers) + 2):
        return _parts(len(layers))
    words = {_BEFORE: "in", _AFTER: "out"}
    return tuple(Section(words.get(layer, str(layer)), first, stop) for layer, first, stop in runs)


def _runs(layers: Sequence[int]) -> list[tuple[int, int, int]]:
    """(layer, first position, position after the last) for each run of positions of one layer.  A few nodes of one
    layer among the nodes of another count as nodes of the other, such as a recurrent model's reads of the next layer's
    states."""
    every = [(layer, len(list(run))) for layer, run in groupby(layers)]
    longest: dict[int, int] = {}
    for layer, length in every:
        longest[layer] = max(length, longest.get(layer, 0))
    found: list[tuple[int, int, int]] = []
    position = 0
    for layer, length in every:
        stop = position + length
        if found and (2 * length < longest[layer] or layer == found[-1][0]):
            found[-1] = (*found[-1][:2], stop)
        else:
            found.append((layer, position, stop))
        position = stop
    return found


def _parts(n: int) -> tuple[Section, ...]:
    """The sections of a plan of `n` positions that has no layers: parts of equal length."""
    count = max(1, min(_PARTS, n // _SHORTEST))
    ends = [n * k // count for k in range(count + 1)]
    return tuple(Section(f"part {k + 1}" if count > 1 else "", ends[k], ends[k + 1]) for k in range(count))


def _layers(plan: Plan) -> Iterator[int]:
    """The layer of each position of the sequence."""
    data, tensors = plan.data, plan.graph.tensors
    current, pending = _BEFORE, 0
    for i in data.sequence:
        if i >= data.n_tensors:
            pending += 1        # a copy: it gets the layer of the next node
            continue
        own = _own(tensors[i], current)
        current = current if own is None else own
        yield from [current] * (pending + 1)
        pending = 0
    yield from [current] * pending


def _own(t: Tensor, current: int) -> int | None:
    """The number of the layer in a node's name, or in the names of the weights and caches that it reads.  Without such
    a number: _BEFORE or _AFTER for a node that reads weights or caches, None for other nodes."""
    number = _numbered(t.name)
    if number is not None:
        return number
    held = [s.root for s in t.src if s is not None and (s.root.is_resident or s.root.resident)]
    numbers = [n for n in map(_numbered, (s.name for s in held)) if n is not None]
    if numbers:
        return max(numbers)
    return (_BEFORE if current == _BEFORE else _AFTER) if held else None


def _numbered(name: str) -> int | None:
    found = _NUMBER.search(name)
    return None if found is None else int(next(n for n in found.groups() if n is not None))
