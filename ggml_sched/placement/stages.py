"""Stages: the nodes of all graphs of a model, cut where a single activation passes from the nodes before to the rest.

A vertex is a node that every path from the first to the last activation goes through (an articulation point).  A cut
is after a vertex, and all graphs have it: before it they have read the same residents.  So stages follow from which
nodes read what, not from names or positions.  A stage is the attention or the feed-forward of a sequential block, or a
whole layer where both run in parallel, or a layer of a recurrent model although its states are read early and written
late.

Nodes beside these paths: a node that only inputs and caches feed belongs to the stage of its first reader; a node
without readers to the stage of what it reads; a node that only shares a resident to the stage of that resident's other
readers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from ggml_sched.errors import GraphError
from ggml_sched.placement.wiring import Wiring

__all__ = ["LARGE", "Model", "Stage", "find_models", "large_bytes"]

LARGE = 256 << 10
"""From this many bytes on a resident of a large model gets a device of its own choice; see `large_bytes`."""


class Stage(NamedTuple):
    """One stage of a model; the tuples have an entry for each graph of the model."""

    nodes: tuple[list[int], ...]
    """Indices of nodes, in execution order."""
    incoming: tuple[int, ...]
    """The tensor, by id, that enters from the stage before; -1: none."""
    outgoing: tuple[int, ...]
    """The tensor, by id, that the next stage reads; -1: none."""


@dataclass(frozen=True)
class Model:
    """Graphs that share residents, and their stages in order."""

    graphs: tuple[int, ...]
    """Indices of the graphs."""
    stages: tuple[Stage, ...]
    stage_of: tuple[list[int], ...]
    """For each graph the stage of each node."""


class _Cuts(NamedTuple):
    """Every possible cut of one graph.  A segment is, in this file, the nodes between two possible cuts.  Cut j is
    after segment j, whose last node on the paths from the first to the last activation is vertices[j]."""

    vertices: list[int]
    segments: list[int]     # for each node the number of its segment


def large_bytes(total: int) -> int:
    """The bytes from which a resident counts as large in a model with residents of `total` bytes."""
    return max(1, min(LARGE, total >> 10))


def find_models(wirings: Sequence[Wiring]) -> list[Model]:
    """The models that graphs belong to, each with its stages; graphs belong to one model if they share a resident.

    Raises GraphError for residents of one name and different sizes.
    """
    sizes = _sizes(wirings)
    return [_model(graphs, [wirings[g] for g in graphs], sizes) for graphs in _groups(wirings)]


def _sizes(wirings: Sequence[Wiring]) -> dict[str, int]:
    """The bytes of each resident, by name."""
    sizes: dict[str, int] = {}
    for g, wiring in enumerate(wirings):
        for i, name in wiring.residents.items():
            nbytes = int(wiring.nbytes[i])
            if sizes.setdefault(name, nbytes) != nbytes:
                raise GraphError(f"graph {g}: the resident {name!r} has {nbytes} bytes, and {sizes[name]} in a graph "
                                 "before it")
    return sizes


def _groups(wirings: Sequence[Wiring]) -> list[tuple[int, ...]]:
    """Graphs by model: connected by names of residents.  A graph without residents is a model of its own."""
    of = list(range(len(wirings)))
    owner: dict[str, int] = {}
    for g, wiring in enumerate(wirings):
        for name in wiring.residents.values():
            a, b = of[owner.setdefault(name, g)], of[g]
            of = [min(a, b) if k in (a, b) else k for k in of]
    return [tuple(g for g, k in enumerate(of) if k == first) for first in sorted(set(of))]


# -- one graph ----------------------------------------------------------------------------


def _cuts(w: Wiring) -> _Cuts:
    """The vertices of one graph, and the segments between the cuts after them."""
    n = len(w)
    last = next((i for i in range(n - 1, -1, -1) if w.root[w.ids[i]] not in w.residents), -1)
    if last < 0:
        return _Cuts([], [0] * n)
    depth = [-1] * n                # for each node the length of the longest path to the last activation; -1: no path
    depth[last] = 0
    for i in range(last, -1, -1):
        if depth[i] >= 0:
            for p in w.before[i]:
                depth[p] = max(depth[p], depth[i] + 1)
    first = max(range(n), key=lambda i: (depth[i], -i))
    reached = [False] * n           # for each node whether a path from the first to the last activation has it
    reached[first] = True
    reader = [0] * n                # for each node its last reader that is on such a path
    for i in range(first + 1, last + 1):
        if depth[i] >= 0:
            for p in w.before[i]:
                if reached[p]:
                    reached[i] = True
                    reader[p] = i
    vertices: list[int] = []
    furthest = first
    segments = [-1] * n
    for i in range(first, last + 1):
        if not reached[i]:
            continue
        segments[i] = len(vertices)
        if furthest <= i:           # no edge leads from a node before i to one after i: every path goes through i
            vertices.append(i)
        furthest = max(furthest, reader[i])
    _spread(w, segments)
    return _Cuts(vertices, segments)


def _spread(w: Wiring, segments: list[int]) -> None:
    """Give a segment to the nodes beside the paths, whose segment is -1, by the rules at the beginning of this file."""
    n = len(w)
    readers: list[list[int]] = [[] for _ in range(n)]
    for i, before in enumerate(w.before):
        for p in before:
            readers[p].append(i)
    for _ in range(2):
        for i in range(n - 1, -1, -1):
            if segments[i] < 0:
                segments[i] = min((segments[k] for k in readers[i] if segments[k] >= 0), default=-1)
        for i in range(n):
            if segments[i] < 0:
                segments[i] = max((segments[p] for p in w.before[i]), default=-1)
        at: dict[int, int] = {}
        for i in range(n):
            for s in w.sources[i]:
                if segments[i] >= 0 and w.root[s] in w.residents:
                    at.setdefault(w.root[s], segments[i])
        for i in range(n):
            if segments[i] < 0:
                segments[i] = min((at[r] for r in _residents_of(w, i) if r in at), default=-1)
    here = 0
    for i in range(n):
        here = segments[i] = segments[i] if segments[i] >= 0 else here


def _residents_of(w: Wiring, node: int) -> list[int]:
    """The residents that a node reads or writes; a resident may come more than once."""
    return [r for s in (*w.sources[node], w.ids[node]) if (r := w.root[s]) in w.residents]


# -- all graphs of a model ----------------------------------------------------------------


def _model(graphs: tuple[int, ...], wirings: list[Wiring], sizes: dict[str, int]) -> Model:
    """The model of these graphs; `wirings`: for each graph its wiring; `sizes`: {resident: bytes}."""
    cuts = [_cuts(w) for w in wirings]
    reads = [_reads(w, c) for w, c in zip(wirings, cuts, strict=True)]
    kept = _common(wirings, cuts, reads)
    kept = _worth(kept, reads, sizes)
    stage_of = []
    for g, c in enumerate(cuts):
        ends = [cut[g] for cut in kept]
        stage_of.append([bisect_left(ends, s) for s in c.segments])
    stages = []
    through = [[w.ids[c.vertices[cut[g]]] for cut in kept] for g, (w, c) in enumerate(zip(wirings, cuts, strict=True))]
    nodes: list[list[list[int]]] = [[[] for _ in range(len(kept) + 1)] for _ in graphs]
    for g, of in enumerate(stage_of):
        for i, k in enumerate(of):
            nodes[g][k].append(i)
    for k in range(len(kept) + 1):
        stages.append(Stage(tuple(nodes[g][k] for g in range(len(graphs))),
                            tuple(through[g][k - 1] if k else -1 for g in range(len(graphs))),
                            tuple(through[g][k] if k < len(kept) else -1 for g in range(len(graphs)))))
    return Model(graphs, tuple(stages), tuple(stage_of))


def _reads(w: Wiring, cuts: _Cuts) -> list[set[str]]:
    """The names of the residents that each segment reads."""
    found: list[set[str]] = [set() for _ in range(max(1, len(cuts.vertices)))]
    for i, segment in enumerate(cuts.segments):
        found[segment].update(w.residents[r] for r in _residents_of(w, i))
    return found


def _common(wirings: list[Wiring], cuts: list[_Cuts], reads: list[list[set[str]]]) -> list[tuple[int, ...]]:
    """The cuts that all graphs have, in order; a cut is given by the number of the segment before it in each graph.

    Cuts are equal if, of the residents that all graphs read, the same ones are read before them.  Of several equal cuts
    of one graph the one counts where the fewest bytes pass; if several have as few, the last one, so that nodes without
    residents are in the stage of what they read.
    """
    names = set.intersection(*(set().union(*read) for read in reads))
    code = {name: int.from_bytes(blake2b(name.encode(), digest_size=16).digest()) for name in names}
    found: list[dict[int, int]] = []
    for w, c, read in zip(wirings, cuts, reads, strict=True):
        seen: set[str] = set()
        key, at = 0, dict[int, int]()
        for j, vertex in enumerate(c.vertices[:-1]):
            for name in (read[j] & names) - seen:
                key ^= code[name]
            seen |= read[j]
            if key and (key not in at or w.nbytes[w.ids[vertex]] <= w.nbytes[w.ids[c.vertices[at[key]]]]):
                at[key] = j
        found.append(at)
    return [tuple(at[key] for at in found) for key in found[0] if all(key in at for at in found)]


def _worth(cuts: list[tuple[int, ...]], reads: list[list[set[str]]], sizes: dict[str, int]) -> list[tuple[int, ...]]:
    """The cuts that remain after small stages are merged: a stage whose residents are less than `large_bytes` becomes a
    part of the next stage, and the cut between the two is dropped."""
    least = large_bytes(sum(sizes[name] for name in set().union(*(segment for read in reads for segment in read))))

    def small(start: Sequence[int], stop: Sequence[int]) -> bool:
        names = set().union(*(segment for read, a, b in zip(reads, start, stop, strict=True) for segment in read[a:b]))
        return sum(sizes[name] for name in names) < least

    kept: list[tuple[int, ...]] = []
    start: Sequence[int] = [0] * len(reads)
    for cut in cuts:
        stop = [j + 1 for j in cut]
        if not small(start, stop):
            kept.append(cut)
            start = stop
    if kept and small(start, [len(read) for read in reads]):
        kept.pop()
    return kept
