"""The costs of one class of stage: for every pattern its bytes, its seconds, and what arenas need at least.

A site is what a pattern puts on a device: an atom, the activation that comes in from the stage before, or the host
(patterns.py).  A graph's nodes are summed by site first, and so are the splits between two sites and the copies from
one site to others, so that each pattern costs a few look-ups.  A variant is a rule of patterns.py, and for graphs of
many tokens also a device to which weights on the host are streamed, and where their nodes then run.  Seconds are exact
for the variant:

* nodes: `Facts.seconds` of the device of their site;
* copies: once for each tensor and device that reads it; an input that several stages read counts in each of them with
  its part of the price.  Inputs that only nodes with caches read are left to tables.py (`held_back`): their price
  depends on which devices hold caches, not on how many stages do.  So are the inputs `copied`, for which `Costs.reads`
  says which variants read them where;
* splits: where the device changes between a node and the node that runs before it.  A node before that is of another
  stage is taken to be on the device of the incoming activation.

What arenas need is a lower bound: the bytes that are alive at once among what the stage makes, reads and copies, where
a result may reuse in place the memory of a source whose last reader it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.atoms import Atoms
from ggml_sched.placement.devices import Links
from ggml_sched.placement.outline import (
    COMES_IN,
    FROM_EARLIER,
    FROM_LATER,
    GLOBAL,
    NODE,
    RESIDENT,
    Nodes,
    Outline,
    Value,
)
from ggml_sched.placement.solve._chain import unbeaten

__all__ = ["Costs", "Known", "Machine", "Where", "costs", "needs", "undominated"]

Where: TypeAlias = list[NDArray[np.int8]]
"""For each site its device, as an array that broadcasts to [patterns, devices of the incoming activation]."""
Streamed: TypeAlias = tuple[int, NDArray[np.bool_], NDArray[np.float64]]
"""Weights of an atom that may be streamed: (the device that they are copied to, whether they are streamed [patterns,
in], how many of their bytes each node reads [nodes]).  An axis `in` has the devices that the incoming activation may be
on."""


Known: TypeAlias = dict[tuple[tuple[int, ...], frozenset[int]], NDArray[np.int64]]
"""{(the site of each node, lasting inputs that the nodes read): bytes, where no weight is streamed}"""


@dataclass(frozen=True)
class Machine:
    """The devices as costs need them; the host is the one that holds inputs."""

    count: int
    host: int
    split: NDArray[np.float64]
    """Seconds to begin a split [devices]."""
    links: Links


@dataclass(frozen=True)
class Costs:
    """The costs of one graph in a class of stages, by variant, pattern, and device of the incoming activation."""

    rule: tuple[int, ...]
    """For each variant the index of its rule."""
    streams_to: tuple[int, ...]
    """The device to which each variant streams weights of the host; -1: none."""
    seconds: NDArray[np.float64]
    """Seconds [variants, patterns, in]; infinite where a variant that streams has nothing to stream."""
    out: NDArray[np.int8]
    """The device of the activation that passes to the next stage [variants, patterns, in]."""
    needs: NDArray[np.int64]
    """Bytes that the arena of each device has to hold at least [variants, patterns, in, devices]."""
    reads: dict[int, NDArray[np.bool_]]
    """{input, by id: whether a device reads it [variants, patterns, in, devices]}; `seconds` has no copies of these."""


def where(patterns: NDArray[np.int8], atoms: Atoms, ins: Sequence[int], host: int) -> Where:
    """The device of each site: of atoms without a pin, pinned atoms, the incoming activation, the host."""
    found: Where = [patterns[:, a, None] for a in range(atoms.free)]
    found += [np.full((1, 1), pin, np.int8) for pin in atoms.pins if pin >= 0]
    return [*found, np.array([ins], np.int8), np.full((1, 1), host, np.int8)]


def costs(nodes: Nodes, rules: Sequence[tuple[int, ...]], outline: Outline, atoms: Atoms, patterns: NDArray[np.int8],
          ins: Sequence[int], seconds: NDArray[np.float64], machine: Machine, parts: Mapping[int, float],
          stream_to: Sequence[int], copied: Collection[int] = (), known: Known | None = None) -> Costs:
    """The costs of one graph's nodes.

    `rules`: for each rule the site of each node.  `ins`: the devices that the incoming activation may be on.
    `seconds` [nodes, devices].  `parts`: for each input that several stages read the part of its price that counts
    in this stage.  `stream_to`: devices that weights may be streamed to.  `copied`: inputs, by id, whose copies do not
    count.  `known`: see `needs`.
    """
    parts = {**parts, **dict.fromkeys(copied, 0.0)}
    at = where(patterns, atoms, ins, machine.host)
    shape = (len(patterns), len(ins))
    variants = [(rule, -1) for rule in range(len(rules))]
    variants += [(rule, device) for device in stream_to for rule in range(len(rules))]
    taken = np.full((len(variants), *shape), np.inf)
    out = np.zeros((len(variants), *shape), np.int8)
    need = np.zeros((len(variants), *shape, machine.count), np.int64)
    reads: dict[int, NDArray[np.bool_]] = {s: np.zeros(need.shape, bool) for s in copied}
    for v, (rule, device) in enumerate(variants):
        sites = rules[rule]
        ledger = _Ledger(nodes, sites, len(at), seconds, parts)
        streamed: list[Streamed] = []
        if device < 0:
            here = at
            taken[v] = ledger.price(at, shape, machine)
        else:
            here, extra, moved, streamed = _stream(nodes, sites, outline, atoms, at, machine, device)
            taken[v] = np.where(moved, ledger.price(here, shape, machine) + extra, np.inf)
        last = _out_site(nodes, sites, len(at) - 2)
        out[v] = np.broadcast_to(here[last], shape) if last >= 0 else machine.host
        need[v] = needs(nodes, sites, here, shape, machine.count, native=at if device >= 0 else None,
                        streamed=streamed, known=known if device < 0 else None)
        for s, there in reads.items():
            for c in _reading(nodes, sites, s):
                there[v] |= here[c][..., None] == np.arange(machine.count)
    return Costs(tuple(rule for rule, _ in variants), tuple(device for _, device in variants), taken, out, need,
                 {s: there for s, there in reads.items() if there.any()})


def _out_site(nodes: Nodes, sites: Sequence[int], comes_in: int) -> int:
    """The site of the activation that passes to the next stage; -1: none passes."""
    return -1 if nodes.out == -1 else sites[nodes.out] if nodes.out >= 0 else comes_in


def _reading(nodes: Nodes, sites: Sequence[int], s: int) -> set[int]:
    """The sites of the nodes that read an input, by id."""
    own = {v for v, value in enumerate(nodes.values) if value.origin == GLOBAL and value.number == s}
    return {site for site, reads in zip(sites, nodes.reads, strict=True) if own.intersection(reads)}


def _source(value: Value, sites: Sequence[int], comes_in: int) -> int:
    """The site that holds a value: that of the node that computes it, the incoming activation, or, for inputs, the
    host.  For residents, too, the result is the host; callers do not use it."""
    return sites[value.number] if value.origin == NODE else comes_in + (value.origin != COMES_IN)


_POSITIONS = 32     # the most nodes of a stage for which the bytes alive while they run are counted


class _Ledger:
    """The nodes, splits and copies of one graph under one rule, summed by site."""

    def __init__(self, nodes: Nodes, sites: Sequence[int], n_sites: int, seconds: NDArray[np.float64],
                 parts: Mapping[int, float]) -> None:
        comes_in = n_sites - 2
        self.nodes = np.zeros((n_sites, seconds.shape[1]))
        np.add.at(self.nodes, list(sites), seconds)
        self.used = sorted(set(sites))
        last = _out_site(nodes, sites, comes_in)
        follows = {FROM_EARLIER: comes_in, FROM_LATER: last if last >= 0 else comes_in}
        # {(site of the node that runs before, or -1: none does; site of a node): number of such nodes}
        self.begun: Counter[tuple[int, int]] = Counter()
        for i, p in enumerate(nodes.previous):
            self.begun[sites[p] if p >= 0 else follows.get(p, -1), sites[i]] += 1
        readers: list[set[int]] = [set() for _ in nodes.values]
        for i, reads in enumerate(nodes.reads):
            for v in reads:
                readers[v].add(sites[i])
        # {(site that holds values, other sites that read them): (number of copies, their bytes)}
        self.copies: dict[tuple[int, tuple[int, ...]], tuple[float, float]] = {}
        for value, to in zip(nodes.values, readers, strict=True):
            source = _source(value, sites, comes_in)
            part = parts.get(value.number, 1.0) if value.origin == GLOBAL else 1.0
            to.discard(source)
            if value.origin != RESIDENT and to and part:
                key = source, tuple(sorted(to))
                count, nbytes = self.copies.get(key, (0.0, 0.0))
                self.copies[key] = count + part, nbytes + part * value.nbytes

    def price(self, at: Where, shape: tuple[int, int], machine: Machine) -> NDArray[np.float64]:
        """Seconds [patterns, in] with each site on its device `at`."""
        total = np.zeros(shape)
        for c in self.used:
            total += self.nodes[c][at[c]]
        for (before, c), count in self.begun.items():
            if before < 0:
                total += count * machine.split[at[c]]
            elif before != c:
                total += np.where(at[before] != at[c], count * machine.split[at[c]], 0.0)
        for (source, readers), (copies, nbytes) in self.copies.items():
            price = machine.links.latency * copies + machine.links.per_byte * nbytes
            for d in range(machine.count):
                read = at[readers[0]] == d
                for c in readers[1:]:
                    read = read | (at[c] == d)
                total += np.where(read, price[at[source], d], 0.0)     # from d to d there is no copy: its price is 0
        return total


def _stream(nodes: Nodes, sites: Sequence[int], outline: Outline, atoms: Atoms, at: Where, machine: Machine,
            device: int) -> tuple[Where, NDArray[np.float64], NDArray[np.bool_], list[Streamed]]:
    """Stream all weights on the host to `device`; returns (the new device of each site, seconds of the copies and of
    further splits, whether any weight is streamed, the streamed weights).  `sites`: the site of each node.

    A streamed weight opens a split of its own, so that all streamed weights can use the same memory.
    """
    here = list(at)
    extra: NDArray[np.float64] = np.zeros((1, 1))
    moved: NDArray[np.bool_] = np.zeros((1, 1), bool)
    streamed: list[Streamed] = []
    weights = [{v for v in reads if nodes.values[v].origin == RESIDENT
                and not outline.residents[nodes.values[v].number].cache} for reads in nodes.reads]
    streams: dict[int, NDArray[np.bool_]] = {}
    for a, members in enumerate(atoms.members):
        read = {v for i, own in enumerate(weights) if sites[i] == a for v in own}
        if not read or any(outline.residents[r].cache for r in members):
            continue
        on_host = at[a] == machine.host
        streams[a] = on_host
        here[a] = np.where(on_host, np.int8(device), at[a])
        nbytes = [nodes.values[v].nbytes for v in read]
        price = (machine.links.latency[machine.host, device] * len(nbytes)
                 + machine.links.per_byte[machine.host, device] * sum(nbytes))
        extra = extra + np.where(on_host, price, 0.0)
        moved = moved | on_host
        while_read = np.array([sum(nodes.values[v].nbytes for v in own) if sites[i] == a else 0
                               for i, own in enumerate(weights)], np.float64)
        streamed.append((device, on_host, while_read))
    # A second streamed weight in a split opens another split.  The first one of a stage is taken to open none: whether
    # the stage before has streamed a weight in the same split is not known.
    has: NDArray[np.bool_] = np.zeros((1, 1), bool)
    for i, own in enumerate(weights):
        p, at_ = nodes.previous[i], here[sites[i]]
        has = has & (at_ == device) & (here[sites[p]] == device) if p == i - 1 and p >= 0 else has & False
        if own and sites[i] in streams:
            extra = extra + np.where(streams[sites[i]] & has, machine.split[device], 0.0)
            has = has | streams[sites[i]]
    return here, extra, moved, streamed


# -- arenas -------------------------------------------------------------------------------


def needs(nodes: Nodes, sites: Sequence[int], at: Where, shape: tuple[int, int], devices: int,
          lasting: frozenset[int] = frozenset(), native: Where | None = None, streamed: Sequence[Streamed] = (),
          known: Known | None = None) -> NDArray[np.int64]:
    """Bytes that the arena of each device has to hold at once in the stage [patterns, in, devices].

    `sites`: the site of each node; `at`: the device of each site; `shape`: (patterns, in).  `lasting`: inputs, by
    id, whose copies are alive before and after the stage.  `native`: the device of each site without streaming; None
    if no weight may be streamed.  `streamed`: the streamed weights, each of which may open a split.  `known`: where no
    weight is streamed, results of earlier calls with the same nodes and devices, to which this one is added; read only.
    """
    if known is not None:
        lasting &= {value.number for value in nodes.values if value.origin == GLOBAL}
        key = tuple(sites), lasting
        if key not in known:
            known[key] = needs(nodes, sites, at, shape, devices, lasting)
        return known[key]
    if not len(nodes.kinds):
        return np.zeros((*shape, devices), np.int64)
    rows, conditions = _alive(nodes, sites, len(at), lasting, native is not None)
    rows += [row for _, _, row in streamed]
    if not rows:
        return np.zeros((*shape, devices), np.int64)
    live = _fullest(np.array(rows, np.float64))
    if native is None or not streamed and all(one is other for one, other in zip(at, native, strict=True)):
        # The bytes depend on which sites share a device, not on which device that is: so few combinations differ.
        together = _Together(at, sorted(set(sites) | {len(at) - 2, len(at) - 1}), shape, devices)
        held = _held(conditions, together.on, together.on, together.pair)
        return together.spread((np.stack(np.broadcast_arrays(*held), 0).reshape(len(held), -1).T @ live).max(1))
    found = np.zeros((*shape, devices), np.int64)
    same = _Same(at)
    for d in range(devices):
        held = _held(conditions, [a == d for a in at], [a == d for a in native], same.pair)
        held += [moved & (to == d) for to, moved, _ in streamed]
        weights = np.array([np.broadcast_to(flags, shape).reshape(-1) for flags in held], np.float64)
        found[..., d] = (weights.T @ live).max(1).reshape(shape)
    return found


def _fullest(live: NDArray[np.float64]) -> NDArray[np.float64]:
    """The part of `live`, bytes alive [conditions, nodes], for the nodes with the most bytes: at most `_POSITIONS`
    nodes, none of which has for all conditions at most the bytes of another.  Each node gives a lower bound, so others
    may be left out."""
    live = live[:, np.argsort(-live.sum(0), kind="stable")]
    kept = np.flatnonzero(unbeaten(np.ascontiguousarray(-live.T)))[:_POSITIONS]
    return np.ascontiguousarray(live[:, kept])


def _held(conditions: Sequence[_Condition], on: Sequence[NDArray[np.bool_]], own: Sequence[NDArray[np.bool_]],
          pair: Callable[[int, int], NDArray[np.bool_]]) -> list[NDArray[np.bool_]]:
    """For each condition whether it is met on a device.  `on`: for each site whether it is there; `own`: the same
    if no weight were streamed; `pair`: whether two sites are on one device."""
    found = []
    for key in conditions:
        if isinstance(key, int):
            held = on[key]
        elif isinstance(key, _Kept):
            held = on[key.source] & key.still(pair)
        else:
            held = _any(on, key.before) & _any(on, key.after) if key.before else np.zeros((1, 1), bool)
            for together, still in key.ahead:
                held = held | _all(on, together) & _all(own, still)
            held = held & ~on[key.source]
        found.append(held)
    return found


class _Together:
    """The distinct ways in which sites share devices.  A block is all sites on one device, whichever device that is;
    `on` has for each site whether it is in a block [ways, blocks]."""

    def __init__(self, at: Where, used: Sequence[int], shape: tuple[int, int], devices: int) -> None:
        self._shape, self._devices = shape, devices
        flat = [np.broadcast_to(at[c], shape).reshape(-1) for c in used]
        block: list[NDArray[np.int64]] = []         # for each site of `used` the number of its block, counted from 0
        count = np.zeros(len(flat[0]), np.int64)
        self._block_of = np.full((len(flat[0]), devices), -1, np.int64)
        cells = np.arange(len(flat[0]))
        for here in flat:
            known = self._block_of[cells, here]
            fresh = known < 0
            block.append(np.where(fresh, count, known))
            self._block_of[cells, here] = block[-1]
            count += fresh
        blocks = int(count.max())
        code = np.zeros(len(cells), np.int64)
        for each in block:
            code = code * blocks + each
        _, first, self._way = np.unique(code, return_index=True, return_inverse=True)
        self._blocks = blocks
        ways = {c: each[first] for c, each in zip(used, block, strict=True)}
        self._ways = ways
        none: NDArray[np.bool_] = np.zeros((len(first), blocks), bool)
        self.on: list[NDArray[np.bool_]] = [ways[c][:, None] == np.arange(blocks) if c in ways else none
                                            for c in range(len(at))]

    def pair(self, one: int, two: int) -> NDArray[np.bool_]:
        """Whether two sites are in one block [ways, 1]."""
        found: NDArray[np.bool_] = (self._ways[one] == self._ways[two])[:, None]
        return found

    def spread(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Values of blocks [ways * blocks] as values of devices [patterns, in, devices]; 0 for one without a site."""
        by_block = values.reshape(-1, self._blocks)[self._way.reshape(-1)]
        found = np.where(self._block_of < 0, 0,
                         np.take_along_axis(by_block, np.maximum(self._block_of, 0), 1)).astype(np.int64)
        return found.reshape(*self._shape, self._devices)


def _any(on: Sequence[NDArray[np.bool_]], sites: Sequence[int]) -> NDArray[np.bool_]:
    """Where at least one of these sites is on a device; `on`: for each site where it is."""
    found = on[sites[0]]
    for c in sites[1:]:
        found = found | on[c]
    return found


def _all(on: Sequence[NDArray[np.bool_]], sites: Sequence[int]) -> NDArray[np.bool_]:
    """Where all of these sites are on a device; `on`: for each site where it is."""
    found: NDArray[np.bool_] = np.ones((1, 1), bool)
    for c in sites:
        found = found & on[c]
    return found


_Run: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""(The sites of consecutive nodes; the sites of those after the first whose weights could be streamed.)  The nodes are
in one split if all are on one device and none of these weights is streamed: a streamed weight opens another split."""


class _Copy(NamedTuple):
    """When copies of values of one site are on a device while some node (the present one) runs: if a site of `before`
    and one of `after` are on the device, or a run of `ahead` is one split on it."""

    source: int
    """The site that holds the values themselves."""
    before: tuple[int, ...]
    """The sites of the nodes up to the present one that read the values."""
    after: tuple[int, ...]
    """The sites of the nodes from the present one on that read the values."""
    ahead: tuple[_Run, ...]
    """Runs from the present node to a later reader: a copy is made when the split of its reader begins."""


class _Copied(NamedTuple):
    """A copy of a result for a reader that runs after the present node.  The copy exists already if a site of `before`
    is on the reader's device, or if all of `between` are."""

    to: int
    """The site of the reader."""
    before: tuple[int, ...]
    """The sites that read the result before this reader."""
    between: tuple[int, ...]
    """The sites of the nodes from the present one to the one before the reader."""


class _Kept(NamedTuple):
    """When results of the site `source` take memory while some node (the present one) runs, after the last reader that
    has this site."""

    source: int
    readers: tuple[int, ...]
    """Sites of nodes from the present one on that read the results; on `source`'s device they read without a copy."""
    copied: tuple[_Copied, ...]
    """Copies of the results for readers on other devices: the results are needed until all copies are made."""

    def still(self, pair: Callable[[int, int], NDArray[np.bool_]]) -> NDArray[np.bool_]:
        """Where the results still take memory; `pair`: whether two sites are on one device."""
        found: NDArray[np.bool_] = np.zeros((1, 1), bool)
        for c in self.readers:
            found = found | pair(self.source, c)
        for to, before, between in self.copied:
            other = ~pair(between[0], to)
            for c in between[1:]:
                other = other | ~pair(c, to)
            for c in before:
                other = other & ~pair(c, to)
            found = found | other & ~pair(self.source, to)
        return found


_Condition: TypeAlias = "int | _Copy | _Kept"
"""The condition for bytes to be on a device.  A number: the site of this number is on the device."""


class _Same:
    """Where two sites are on one device [patterns, in]; each pair is compared once."""

    def __init__(self, at: Where) -> None:
        self._at = at
        self._known: dict[tuple[int, int], NDArray[np.bool_]] = {}

    def pair(self, one: int, two: int) -> NDArray[np.bool_]:
        key = min(one, two), max(one, two)
        if key not in self._known:
            self._known[key] = self._at[one] == self._at[two]
        return self._known[key]


_MOST_JOINED = 5        # runs with more different sites than this are left out
_SMALL_COPY = 1 / 1024  # of the largest value: copies of less count from their first reader on, not from its split on


def _runs_to(nodes: Nodes, sites: Sequence[int], i: int, streams: bool) -> list[tuple[int, _Run]]:
    """(Node t, the run of the nodes t .. i) for each earlier node t such that t .. i may be one split.

    `streams`: whether weights may be streamed, each of which may open a split.  A node with several residents is taken
    to end a split, because it may write to memory of another device.
    """
    found = []
    joined, still, t = {sites[i]}, set[int](), i
    while t > 0 and nodes.previous[t] == t - 1 and len(nodes.residents[t - 1]) <= 1:
        if streams and nodes.residents[t]:
            still.add(sites[t])
        t -= 1
        joined.add(sites[t])
        if len(joined) > _MOST_JOINED:
            break
        found.append((t, (tuple(sorted(joined)), tuple(sorted(still)))))
    return found


def _alive(nodes: Nodes, sites: Sequence[int], n_sites: int, lasting: frozenset[int], streams: bool) -> tuple[
        list[NDArray[np.float64]], list[_Condition]]:
    """(For each condition the bytes alive where it is met, while each node runs [nodes]; the conditions.)  A copy is on
    a device from the beginning of the split of its first reader there to its last reader.  A result stays until its
    last reader on its device, and until its copies are made."""
    n, comes_in = len(nodes.kinds), n_sites - 2
    own = np.zeros((n_sites, n))
    held: dict[_Copy | _Kept, NDArray[np.float64]] = {}
    freed: list[int] = [0] * n      # for each node the bytes of the largest value of which it is the last reader
    read_by: list[dict[int, tuple[int, int]]] = [{} for _ in nodes.values]     # {site: (first reader, last reader)}
    views: list[list[int]] = [[] for _ in range(n + 1)]  # for each node the values in its result; last: what comes in
    for i, reads in enumerate(nodes.reads):
        for v in reads:
            value = nodes.values[v]
            if not read_by[v] and (value.origin == NODE or value.origin == COMES_IN and value.number == 0):
                views[value.number if value.origin == NODE else n].append(v)
            first, _ = read_by[v].get(sites[i], (i, i))
            read_by[v][sites[i]] = (first, i)
    runs: dict[int, list[tuple[int, _Run]]] = {}
    largest = max((value.nbytes for value in nodes.values if value.origin != RESIDENT), default=0)
    for v, value in enumerate(nodes.values):
        if value.origin == RESIDENT:
            continue
        lasts = value.origin == GLOBAL and value.number in lasting
        if lasts:
            read_by[v] = dict.fromkeys(read_by[v], (0, n - 1))
        else:
            for _, stop in read_by[v].values():
                freed[stop] = max(freed[stop], value.nbytes)
        source = _source(value, sites, comes_in)
        spans = [(c, start, stop) for c, (start, stop) in read_by[v].items() if c != source]
        ahead: dict[int, set[_Run]] = {}
        if value.nbytes >= _SMALL_COPY * largest:
            for _, start, _ in spans:
                if start not in runs:
                    runs[start] = _runs_to(nodes, sites, start, streams)
                for t, run in runs[start]:
                    if source not in run[0]:
                        ahead.setdefault(t, set()).add(run)
        edges = sorted({at for _, start, stop in spans for at in (start, stop + 1)} | ahead.keys()
                       | {t + 1 for t in ahead})
        for start, stop in pairwise(edges):
            before = tuple(sorted(c for c, first, _ in spans if first <= start))
            after = tuple(sorted(c for c, _, end in spans if end >= start))
            key = _Copy(source, before, after, tuple(sorted(ahead.get(start, ()))))
            if before and after or key.ahead:
                held.setdefault(key, np.zeros(n))[start:stop] += value.nbytes
    until = list(range(n))                      # for each node the last one that writes to the memory of its result
    for i, written in enumerate(nodes.writes):
        if written >= 0:
            until[written] = i
    stream_bytes = max((nodes.values[v].nbytes for v in views[n]), default=0)
    for i, nbytes, source in [*zip(range(n), nodes.memory, sites, strict=True), (n, stream_bytes, comes_in)]:
        others = [{c: span for c, span in read_by[v].items() if c != source} for v in views[i]]
        stop = max([until[i] if i < n else -1, *(read_by[v][source][1] for v in views[i] if source in read_by[v])])
        own[source, (i if i < n else 0):stop + 1] += nbytes
        if i < n and nodes.reuses[i]:
            own[source, i] -= min(nbytes, freed[i])
        if nbytes:
            for t in range(stop + 1, max((last for of in others for _, last in of.values()), default=-1) + 1):
                kept = _kept(source, others, t, sites, nbytes >= _SMALL_COPY * largest)
                held.setdefault(kept, np.zeros(n))[t] += nbytes
    used = [c for c in range(n_sites) if own[c].any()]
    return [*(own[c] for c in used), *held.values()], [*used, *held]


def _kept(source: int, spans: Sequence[Mapping[int, tuple[int, int]]], t: int, sites: Sequence[int],
          is_large: bool) -> _Kept:
    """When a result of the site `source` takes memory while node t runs; `spans`: for each view of the result {site:
    (first reader, last reader)}."""
    readers = {c for of in spans for c, (_, last) in of.items() if last >= t}
    copied = []
    for of in spans if is_large else ():
        for c, (first, _) in of.items():
            if first > t:
                before = tuple(sorted(other for other, (begun, _) in of.items() if begun < first))
                copied.append(_Copied(c, before, tuple(sorted(set(sites[t:first])))))
    return _Kept(source, tuple(sorted(readers)), tuple(sorted(set(copied))))


# -- pruning ------------------------------------------------------------------------------


def undominated(cost: NDArray[np.float64], memory: NDArray[np.int64]) -> NDArray[np.intp]:
    """Rows that no other row beats: with no higher cost for any pair of states and no more bytes on any device.

    `cost` [rows, ...], `memory` [rows, devices].  Of equal rows the first is kept.  Rows that are infinite everywhere
    are left out, unless there are no others: then the first is kept.
    """
    rows = np.concatenate([cost.reshape(len(cost), -1), memory.astype(np.float64)], axis=1)
    possible = np.flatnonzero(np.isfinite(cost.reshape(len(cost), -1)).any(1))
    if not len(possible):
        return np.zeros(min(1, len(cost)), np.intp)
    _, first = np.unique(rows[possible], axis=0, return_index=True)
    left = possible[np.sort(first)]
    scale = np.where(np.isfinite(rows), rows, 0).max(0)
    order = np.argsort(np.where(np.isfinite(rows[left]), rows[left] / np.maximum(scale, 1e-300), 1e3).sum(1),
                       kind="stable")
    # A row that beats another has a smaller sum, so that it comes first.
    left = left[order]
    return np.sort(left[unbeaten(np.ascontiguousarray(rows[left]))]).astype(np.intp)
