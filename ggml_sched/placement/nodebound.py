"""A bound that holds for every placement, on whichever devices each weight, cache and node is.

A plan's price is at least that of a relaxation, which counts fewer copies: of an activation the copy for one of its
readers, of a resident the copy for its largest reader.  What the relaxation counts is a forest: its entries are nodes
and residents, an edge has a price for each pair of devices at its ends, and the cheapest devices are found exactly.
Along one path of dependent nodes each change of device begins a split, and these splits count.  Multipliers, which
cutting planes choose as for chains (`solve.bound`), hold the bytes of the residents to the budgets.  In the relaxation
a resident may be on different devices in the graphs that read it: its bytes are divided among these graphs.

A graph of weight 0 in the goal costs no seconds, but memory: while one of its products (`PRODUCTS`) runs, the arena
holds what the product reads and writes.  Products of the other graphs are counted in the same way.  The placements are
divided into cases by the largest product on each device; the bound is the least of the bounds of all cases.

Assumptions: a device reads the memory of another one only through a copy; inputs, leafs with the input flag, start on
the host, which is the last backend of a plan; products of graphs of weight 0 run on the device of their largest
resident.  A placement that runs such a product elsewhere, where its time does not count, may be below the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ggml_sched._graph import Tensor
from ggml_sched.placement.devices import Device, Links
from ggml_sched.placement.facts import Facts
from ggml_sched.placement.solve._chain import cheapest_labels
from ggml_sched.placement.solve.master import Master

__all__ = ["NodeBound", "node_bound"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Key: TypeAlias = "str | tuple[int, str] | Tensor"

EPSILON = float(np.finfo(np.float64).eps)
CLOSE = 1e-6
"""Cutting planes end when the bound that they promise is above the present bound by at most this part of it."""
STEEPEST = 1e6
"""The largest multiplier, in units of the seconds of the dearest placement over the bytes of all residents."""


@dataclass(frozen=True)
class NodeBound:
    """What every placement costs at least."""

    seconds: float
    """Infinite if it is proven that the residents do not fit."""
    multipliers: tuple[float, ...]
    """For each device the seconds that one more byte is worth at the bound."""


def node_bound(graphs: Sequence[Facts], weights: Sequence[float], devices: Sequence[Device], links: Links,
               room: Sequence[int], allowed: Mapping[Key, Sequence[bool]] | None = None,
               models: Sequence[int] | None = None) -> NodeBound:
    """A bound for every placement within `room`: of the sum of `weights[i]` times the seconds of `graphs[i]`.

    `room`: bytes of each device for residents and arenas.  `allowed`: {name of a resident: for each device whether it
    may hold the resident}; without an entry all devices may.  A graph of weight 0 counts with its residents, and with
    what its products hold in the arena of their largest resident's device.  `models`: for each graph the number of its
    model, if there are several: equal names in two models are two residents, and `allowed` is {(model, name): ...}.

    Raises ValueError where the arguments' lengths differ, or for a weight that is negative or no number.
    """
    if len(graphs) != len(weights) or len(devices) != len(room):
        raise ValueError(f"{len(graphs)} graphs with {len(weights)} weights, {len(devices)} devices with room on "
                         f"{len(room)}")
    if not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"weights are {list(weights)}; a weight is finite and not negative")
    keys = keys_of(graphs, models)
    wired = [_Wired(graph, weight, devices, keys) for graph, weight in zip(graphs, weights, strict=True) if weight > 0]
    shares = shares_of(wired)
    needs = held_by_products([graph for graph, weight in zip(graphs, weights, strict=True) if not weight], keys)
    sizes = {keys[root]: root.nbytes for graph in graphs for roots in graph.residents for root in roots}
    both = [[each.readers(by_bytes) for each in wired] for by_bytes in (True, False)]
    forests = [Forest(devices, links, allowed or {}, wired, readers, shares, needs, sizes)
               for readers in both[:1 + (both[0] != both[1])]]
    lowest: NodeBound | None = None
    for case in cases(forests[0], room):
        best = NodeBound(-math.inf, (0.0,) * len(devices))
        for forest in forests:
            banned = forest.needs[:, None] > np.array([above for _, above in case])
            found = relaxed(forest, [bytes_ - int(held) for bytes_, (held, _) in zip(room, case, strict=True)],
                            np.where(banned, np.inf, 0.0), math.inf if lowest is None else lowest.seconds)
            best = found if found.seconds > best.seconds else best
        if lowest is None or best.seconds < lowest.seconds:
            lowest = best
    assert lowest is not None
    return lowest


MOST_CASES = 64
"""The most combinations of levels, one for each device whose budget may bind, that `cases` makes."""


def held_by_products(graphs: Sequence[Facts], keys: Mapping[Tensor, Key]) -> dict[Key, float]:
    """{resident: the bytes in its device's arena while the largest of its products runs}.  A product of a resident is
    one that reads no other resident of as many bytes."""
    needs: dict[Key, float] = {}
    for graph in graphs:
        nodes = set(graph.nodes)
        for node, residents, activations in zip(graph.nodes, graph.residents, graph.activations, strict=True):
            if not residents:
                continue
            largest, *others = sorted(residents, key=lambda root: -root.nbytes)
            if others and others[0].nbytes == largest.nbytes:
                continue
            key = keys[largest]
            needs[key] = max(needs.get(key, 0.0), held_by(node, activations, nodes))
    return needs


def held_by(node: Tensor, activations: Sequence[Tensor], nodes: set[Tensor]) -> float:
    """Bytes that an arena holds at least while `node` runs: its result, and what it reads of other nodes; 0 for a node
    that is no product."""
    if node.op not in PRODUCTS:
        return 0.0
    return float(node.nbytes) + sum(read(node, root) for root in activations if root in nodes)


PRODUCTS = {"MUL_MAT", "MUL_MAT_ID"}
"""The matrix products: their results never take the memory of what they read."""


def cases(forest: Forest, room: Sequence[int]) -> list[tuple[tuple[float, float], ...]]:
    """The cases: for each device (the least bytes of its arena, the most that `Forest.held` may be for an entry on this
    device).  A device whose budget cannot bind has one range in all cases."""
    values = np.unique(np.append(forest.needs, 0.0))
    tight = [bytes_ < forest.fixed_bytes + values[-1] for bytes_ in room]
    levels = int(MOST_CASES ** (1 / max(1, sum(tight))) + 1e-9)
    begins = np.sort(np.argsort(-np.diff(values), kind="stable")[:levels - 1]) + 1 if levels > 1 else np.zeros(0, int)
    bounds = [0, *begins.tolist(), len(values)]
    spans = [(float(values[one]), float(values[two - 1])) for one, two in pairwise(bounds)]
    return list(product(*(spans if flag else [(0.0, math.inf)] for flag in tight)))


class _Wired:
    """A graph of the goal: what its nodes take, and which nodes read what; `weight`: its weight."""

    def __init__(self, graph: Facts, weight: float, devices: Sequence[Device], keys: Mapping[Tensor, Key]) -> None:
        self.graph: Facts = graph
        self.weight: float = weight
        n, nodes = len(devices), set(graph.nodes)
        self.seconds: Floats = weight * np.array([graph.seconds(device) for device in devices]).reshape(
            n, len(graph.nodes)).T
        self.held: list[float] = [held_by(node, activations, nodes)
                                  for node, activations in zip(graph.nodes, graph.activations, strict=True)]
        self.readers_of: dict[Tensor, list[int]] = {}
        """{a root that is no resident: the nodes that read it}."""
        self.accessors: dict[Key, tuple[Tensor, list[int]]] = {}
        """{key of a resident: (the resident, the nodes that read or write it)}."""
        for i, (roots, residents) in enumerate(zip(graph.activations, graph.residents, strict=True)):
            for root in roots:
                self.readers_of.setdefault(root, []).append(i)
            for root in residents:
                self.accessors.setdefault(keys[root], (root, []))[1].append(i)
        self.producer: dict[Tensor, int] = {node: i for i, node in enumerate(graph.nodes)}
        self._heavy: list[float] = [sum(min(root.nbytes, nbytes) for root in roots)
                                    for roots, nbytes in zip(graph.residents, graph.nbytes.tolist(), strict=True)]

    def readers(self, by_bytes: bool) -> dict[int, tuple[int, float]]:
        """{node: (one later node that reads its result, the bytes that it reads)}: the reader that reads most bytes of
        residents, or, not `by_bytes`, the first one."""
        found: dict[int, tuple[int, float]] = {}
        for root, of in self.readers_of.items():
            i = self.producer.get(root, len(self.graph.nodes))
            reader = max(of, key=lambda i: (self._heavy[i], -i)) if by_bytes else of[0]
            if reader > i:
                found[i] = reader, read(self.graph.nodes[reader], root)
        return found


class Forest:
    """The nodes and residents of all graphs of the goal, as the entries of a forest: each has a parent or is a root.

    `wired`: the graphs of the goal; `readers`: for each of them {node: (its parent, the bytes that this one reads)}.
    `shares`: see `shares_of`; `needs`: `held_by_products` of the other graphs; `sizes`: {resident of any graph: bytes}.
    """

    def __init__(self, devices: Sequence[Device], links: Links, allowed: Mapping[Key, Sequence[bool]],
                 wired: Sequence[_Wired], readers: Sequence[Mapping[int, tuple[int, float]]],
                 shares: Mapping[Key, Sequence[float]], needs: Mapping[Key, float], sizes: Mapping[Key, int]) -> None:
        self.devices: Sequence[Device] = devices
        self.links: Links = links
        n = len(devices)
        self.own: list[Floats] = []
        """For each entry its seconds on each device."""
        self.under: list[tuple[int, Floats] | None] = []
        """For each entry (its parent, seconds of the edge to it [device of the entry, device of the parent]); None for
        a root."""
        self.nbytes: list[float] = []
        """For each entry its bytes; 0 for a node.  A resident that several graphs use has an entry in each, and its
        bytes are divided among these entries (`shares_of`)."""
        self.held: list[float] = []
        """For each entry the bytes that the arena of its device holds at least, because of this entry."""
        for number, (each, above) in enumerate(zip(wired, readers, strict=True)):
            self._add_graph(each, above, {key: share[number] for key, share in shares.items()}, needs, allowed)
        for key in sizes.keys() - shares.keys():        # residents that only graphs of weight 0 read
            self._add(may_hold(key, allowed, n), float(sizes[key]), needs.get(key, 0.0))
        self._order()
        self.fixed_bytes: float = float(sum(sizes.values()))

    def _add(self, own: Floats, nbytes: float = 0.0, held: float = 0.0) -> int:
        """Add an entry, as a root, to the lists `own`, `under`, `nbytes` and `held`; returns its index."""
        self.own.append(own)
        self.under.append(None)
        self.nbytes.append(nbytes)
        self.held.append(held)
        return len(self.own) - 1

    def _copied(self, nbytes: float, weight: float) -> Floats:
        """The seconds of a copy of `nbytes` bytes, times the graph's weight [from, to]."""
        return weight * (self.links.latency + self.links.per_byte * nbytes)

    def _add_graph(self, wired: _Wired, above: Mapping[int, tuple[int, float]], shares: Mapping[Key, float],
                   needs: Mapping[Key, float], allowed: Mapping[Key, Sequence[bool]]) -> None:
        n, graph, weight = len(self.devices), wired.graph, wired.weight
        at = [self._add(row, held=held) for row, held in zip(wired.seconds, wired.held, strict=True)]
        for i, (reader, nbytes) in above.items():
            self.under[at[i]] = at[reader], self._copied(nbytes, weight)
        for root, found in wired.readers_of.items():
            if root not in wired.producer and "input" in root.flags:
                self._add_input(graph, root, found, at, weight)
        self._add_splits({i: reader for i, (reader, _) in above.items()}, at, weight)
        for key, (root, found) in wired.accessors.items():
            reader = max(found, key=lambda i: (graph.nbytes[i], -i))
            entry = self._add(may_hold(key, allowed, n), shares[key] * root.nbytes, needs.get(key, 0.0))
            self.under[entry] = (at[reader], self._copied(read(graph.nodes[reader], root), weight))
            for i in found:
                node = graph.nodes[i]
                if i != reader and node.root is root and self.under[at[i]] is None and not self._is_below(at[reader],
                                                                                                        at[i]):
                    self.under[at[i]] = (entry, self._copied(node.nbytes, weight))      # the result is written back

    def _is_below(self, entry: int, other: int) -> bool:
        """Whether `other` is `entry` or one of its ancestors."""
        while entry != other:
            link = self.under[entry]
            if link is None:
                return False
            entry = link[0]
        return True

    def _add_input(self, graph: Facts, root: Tensor, found: list[int], at: list[int], weight: float) -> None:
        """Add the seconds of copying an input from the host to the seconds of its readers, divided among them; a reader
        on the host adds none."""
        host = next((i for i, device in enumerate(self.devices) if device.host), None)
        if host is None:
            return
        least = min(read(graph.nodes[i], root) for i in found)
        for i in found:
            self.own[at[i]] = self.own[at[i]] + self._copied(least, weight)[host] / len(found)

    def _add_splits(self, above: Mapping[int, int], at: list[int], weight: float) -> None:
        """Add the seconds of the splits that begin along the longest path of nodes to the edges of this path; `above`:
        {node: the reader that is its parent}."""
        if not at:
            return
        length, below = np.ones(len(at), np.int64), [-1] * len(at)
        for i in range(len(at)):
            if i in above and length[i] + 1 > length[above[i]]:
                length[above[i]], below[above[i]] = length[i] + 1, i
        begin = weight * np.array([device.split for device in self.devices])
        changes = begin[None, :] * (1 - np.eye(len(begin)))
        i = int(length.argmax())
        while below[i] >= 0:
            link = self.under[at[below[i]]]
            assert link is not None
            self.under[at[below[i]]] = (link[0], link[1] + changes)
            i = below[i]
        self.own[at[i]] = self.own[at[i]] + begin

    def _order(self) -> None:
        """Make arrays of the lists that `_add` fills, with each entry after its parent."""
        n, count = len(self.devices), len(self.own)
        children: list[list[int]] = [[] for _ in range(count)]
        order = []
        for i, link in enumerate(self.under):
            if link is None:
                order.append(i)
            else:
                children[link[0]].append(i)
        for i in order:
            order += children[i]
        place = np.empty(count, np.int64)
        place[order] = np.arange(count)
        links = [self.under[i] for i in order]
        self.parent: Ints = np.array([-1 if link is None else place[link[0]] for link in links], np.int64)
        none = np.zeros((n, n))
        self.edge: Floats = np.array([none if link is None else link[1] for link in links]).reshape(-1, n, n)
        self.prices: Floats = np.array([self.own[i] for i in order]).reshape(-1, n)
        self.sizes: Floats = np.array([self.nbytes[i] for i in order])
        self.needs: Floats = np.array([self.held[i] for i in order])


def relaxed(forest: Forest, room: Sequence[int], more: Floats, enough: float) -> NodeBound:
    """The bound of a forest by multipliers that are nearly the best.

    `room`: bytes of each device for residents; `more` [entries, devices]: seconds that are added to those of each
    entry, infinite where it may not be.  The search for multipliers ends once the bound is `enough` seconds.
    """
    n = len(room)
    prices = forest.prices + more
    finite = np.where(np.isfinite(prices), prices, 0.0)
    dearest = float(finite.max(1).sum() + forest.edge.max((1, 2), initial=0.0).sum()) if n else 0.0
    budget = np.array([float(bytes_) for bytes_ in room])
    scarce = np.flatnonzero(budget < forest.fixed_bytes)
    best, worth = -math.inf, np.zeros(n)
    unit, seconds = max(forest.fixed_bytes, 1.0), max(dearest, 1e-300)
    master, multipliers = Master(len(scarce), STEEPEST), np.zeros(n)
    for _ in range(30 + 20 * len(scarce)):
        total, labels = cheapest_labels(forest.parent, prices + forest.sizes[:, None] * multipliers, forest.edge)
        if total == math.inf:
            return NodeBound(math.inf, tuple(multipliers.tolist()))
        used = np.bincount(labels, forest.sizes, minlength=n)
        allowed = float(multipliers @ budget)
        error = 4 * (len(labels) + n + 2) * EPSILON * (abs(total) + abs(allowed))
        if total - allowed - error > best:
            best, worth = total - allowed - error, multipliers
        if best >= enough:
            break
        if best > dearest * (1 + 1e-9):
            return NodeBound(math.inf, tuple(worth.tolist()))
        cost = total - float(multipliers @ used)
        master.add(cost / seconds, (used - budget)[scarce] / unit)
        promised, scaled = master.solve()
        if promised * seconds - best <= CLOSE * abs(best):
            break
        multipliers = np.zeros(n)
        multipliers[scarce] = scaled * seconds / unit
    return NodeBound(max(best, 0.0), tuple(worth.tolist()))


def keys_of(graphs: Sequence[Facts], models: Sequence[int] | None) -> dict[Tensor, Key]:
    """The key of each resident, which is equal in all graphs: its name, or (number of its model, name) if there are
    several models; the tensor itself if it has no name."""
    found: dict[Tensor, Key] = {}
    for graph, model in zip(graphs, models or (None,) * len(graphs), strict=True):
        for roots in graph.residents:
            for root in roots:
                found[root] = root if not root.name else root.name if model is None else (model, root.name)
    return found


def may_hold(key: Key, allowed: Mapping[Key, Sequence[bool]], n: int) -> Floats:
    """0 for each device that may hold a resident, infinite for others."""
    flags = allowed.get(key)
    return np.zeros(n) if flags is None else np.where(np.asarray(flags, bool), 0.0, np.inf)


def read(node: Tensor, root: Tensor) -> float:
    """Bytes of the smallest source of `node` that is `root` or a view of it: a copy for the node has at least these."""
    return float(min((source.nbytes for source in node.src if source is not None and source.root is root),
                     default=0))


def shares_of(wired: Sequence[_Wired]) -> dict[Key, list[float]]:
    """{resident: for each graph of the goal the part of the resident's bytes that it counts}; the parts sum to 1.  They
    are in proportion to the seconds by which the time of a reader differs between devices, for the graph's reader where
    it differs most."""
    matters: dict[Key, list[float]] = {}
    for number, each in enumerate(wired):
        spread = np.ptp(each.seconds, axis=1).tolist() if each.seconds.size else [0.0] * len(each.seconds)
        for key, (_, found) in each.accessors.items():
            share = matters.setdefault(key, [0.0] * len(wired))
            share[number] = max(1e-15, *(spread[i] for i in found))
    return {key: [part / sum(share) for part in share] for key, share in matters.items()}
