"""Atoms: the residents of a stage, grouped into what is placed together.

* Residents that one node reads are one atom, and so are all caches of the stage.
* A weight is an atom of its own if it has at least 0.2 % of the stage's bytes, and is large (`stages.large_bytes`); the
  caches of the stage are an atom if they have at least 1/32 of these bytes.
* A smaller weight joins the atom of a matrix near the node that reads it: a bias joins the matrix before it, the weight
  of a norm the matrix after it.
* A small router of experts is an atom if the stage then has few atoms, `FEW_ATOMS` by default; otherwise it joins the
  smallest atom, such as an expert that every token uses.
* What the caller pinned to a device is an atom that can be on this device only.
* If there are more than `MAX_ATOMS` atoms, the smallest joins the smaller of its neighbours in the order of execution,
  until `MAX_ATOMS` are left.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ggml_sched.placement.outline import NODE, Nodes, Outline

__all__ = ["FEW_ATOMS", "MAX_ATOMS", "Atoms", "find_atoms"]

MAX_ATOMS = 7
"""The most atoms of a stage that are not pinned."""
FEW_ATOMS = 4
"""Small routers are atoms only in a stage that has at most this many unpinned atoms, the routers included."""
_SHARE, _CACHE_SHARE = 0.002, 1 / 32
_FARTHEST = 64      # nodes between a small weight and the atom that it joins, at most


@dataclass(frozen=True)
class Atoms:
    """The atoms of a stage; the first `free` are not pinned, the others are."""

    members: tuple[tuple[int, ...], ...]
    """For each atom its residents, as indices into `Outline.residents`."""
    pins: tuple[int, ...]
    """For each atom the device that it must be on; -1: any."""
    cache: int
    """The atom, not a pinned one, with the caches; -1: there is none."""
    of: tuple[int, ...]
    """For each resident its atom."""

    @property
    def free(self) -> int:
        """The number of atoms that are not pinned."""
        return sum(pin < 0 for pin in self.pins)


@dataclass(eq=False)
class _Group:
    """Residents that are placed together.  A group that becomes an atom is an anchor; a small group joins an anchor.

    `position`: the mean index of the nodes that read these residents, in the first graph that has such nodes.
    """

    members: list[int]
    pin: int
    nbytes: int
    cache: bool
    position: float
    router: bool
    nodes: list[tuple[int, int]] = field(default_factory=list)      # (graph, node) of each reader


def find_atoms(outline: Outline, large: int, with_routers: int = FEW_ATOMS) -> Atoms:
    """The atoms of a stage of a model in which residents of `large` bytes are large; small routers are atoms if the
    stage then has at most `with_routers` unpinned atoms."""
    groups = _together(outline)
    total = sum(group.nbytes for group in groups)
    anchors = [group for group in groups if group.pin >= 0
               or group.nbytes >= (_CACHE_SHARE * total if group.cache else max(large, _SHARE * total))]
    routers = [group for group in groups if group.router and group not in anchors]
    if sum(group.pin < 0 for group in anchors) + len(routers) <= with_routers:
        anchors = [group for group in groups if group in anchors or group in routers]
    if not anchors and groups:
        anchors = [max(groups, key=lambda group: group.nbytes)]
    small = [group for group in groups if group not in anchors]
    at = {r: anchor for anchor in anchors for r in anchor.members}
    near = [_near(nodes, at) for nodes in outline.graphs]
    for group, anchor in [(group, _anchor_of(near[group.nodes[0][0]], group, anchors)) for group in small]:
        _join(anchor, group)
    free = sorted((group for group in anchors if group.pin < 0), key=lambda group: group.position)
    while len(free) > MAX_ATOMS:
        k = min(range(len(free)), key=lambda k: free[k].nbytes)
        into = min((j for j in (k - 1, k + 1) if 0 <= j < len(free)), key=lambda j: free[j].nbytes)
        _join(free[into], free.pop(k))
    pinned: dict[int, _Group] = {}
    for group in anchors:
        if group.pin >= 0:
            if group.pin in pinned:
                _join(pinned[group.pin], group)
            else:
                pinned[group.pin] = group
    atoms = free + [pinned[device] for device in sorted(pinned)]
    of = [0] * len(outline.residents)
    for a, group in enumerate(atoms):
        for r in group.members:
            of[r] = a
    return Atoms(tuple(tuple(sorted(group.members)) for group in atoms), tuple(group.pin for group in atoms),
                 next((a for a, group in enumerate(free) if group.cache), -1), tuple(of))


def _join(into: _Group, group: _Group) -> None:
    """Add `group` to the group `into`, whose pin and position stay."""
    into.members += group.members
    into.nbytes += group.nbytes
    into.cache |= group.cache


def _together(outline: Outline) -> list[_Group]:
    """The residents in groups: those that one node reads are in one group, and so are all caches, except that residents
    with different pins are in different groups."""
    of = list(range(len(outline.residents)))
    pins = [resident.pin for resident in outline.residents]

    def unite(a: int, b: int) -> None:
        a, b = of[a], of[b]
        if a == b or pins[a] >= 0 and pins[b] >= 0 and pins[a] != pins[b]:
            return
        pins[a] = max(pins[a], pins[b])
        of[:] = [a if k == b else k for k in of]

    readers: list[list[tuple[int, int]]] = [[] for _ in of]
    for g, nodes in enumerate(outline.graphs):
        for i, own in enumerate(nodes.residents):
            for r in own:
                readers[r].append((g, i))
                unite(own[0], r)
    caches = [r for r, resident in enumerate(outline.residents) if resident.cache]
    for r in caches:
        unite(caches[0], r)
    groups = []
    for first in dict.fromkeys(of):
        members = [r for r in range(len(of)) if of[r] == first]
        residents = [outline.residents[r] for r in members]
        reading = sorted({reader for r in members for reader in readers[r]})
        mine = [i for g, i in reading if g == reading[0][0]]
        groups.append(_Group(members, pins[first], sum(r.nbytes for r in residents), any(r.cache for r in residents),
                             sum(mine) / len(mine), any(r.router for r in residents), reading))
    return groups


_Near = tuple[list[list[int]], list[list[int]], list[_Group | None]]
"""For each node of a graph: the nodes that it reads, its readers, the anchor that has its residents (None: no anchor).
"""


def _near(nodes: Nodes, at: dict[int, _Group]) -> _Near:
    """The lists of `_Near` for one graph; `at`: {resident: the anchor that has it}."""
    before = _before(nodes)
    return before, _after(before), [next((at[r] for r in own if r in at), None) for own in nodes.residents]


def _anchor_of(near: _Near, group: _Group, anchors: list[_Group]) -> _Group:
    """The anchor that a small group joins."""
    before, after, held = near
    _, node = group.nodes[0]
    if group.router:
        return min(anchors, key=lambda anchor: anchor.nbytes)
    for p in before[node]:
        if (anchor := held[p]) is not None:
            return anchor               # the group is a bias or a scale: the node before multiplies with the matrix
    return _search(after, held, node) or _search(before, held, node) or min(
        anchors, key=lambda anchor: abs(anchor.position - group.position))


def _before(nodes: Nodes) -> list[list[int]]:
    """For each node the nodes of the stage that it reads."""
    return [[nodes.values[v].number for v in reads if nodes.values[v].origin == NODE] for reads in nodes.reads]


def _after(before: list[list[int]]) -> list[list[int]]:
    """For each node its readers."""
    after: list[list[int]] = [[] for _ in before]
    for i, found in enumerate(before):
        for p in found:
            after[p].append(i)
    return after


def _search(near: list[list[int]], held: list[_Group | None], node: int) -> _Group | None:
    """The first anchor found from a node, depth first along `near` (for each node its neighbours), among `_FARTHEST`
    nodes; None if there is none."""
    seen, stack = {node}, list(reversed(near[node]))
    while stack and len(seen) < _FARTHEST:
        i = stack.pop()
        if i in seen:
            continue
        seen.add(i)
        if (anchor := held[i]) is not None:
            return anchor
        stack.extend(reversed(near[i]))
    return None
