"""Fusion groups, nodes that one kernel computes: found before a graph is planned, built where the plan has kept them.

Invariant: a result that the group does not write to memory is read by members of the group alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ggml_sched._graph import Tensor
from ggml_sched.backends.cupy.launch import Builder

__all__ = ["Group", "Wiring", "find", "group_of", "lies_apart"]


class Wiring:
    """Which tensors read which in a graph: its tensors in order, views included."""

    def __init__(self, nodes: Iterable[Tensor]) -> None:
        self.nodes: tuple[Tensor, ...] = tuple(nodes)
        self.position: dict[Tensor, int] = {node: i for i, node in enumerate(self.nodes)}
        self.readers: Counter[Tensor] = Counter(source for node in self.nodes for source in node.src
                                                if source is not None)

    def inner(self, t: Tensor | None, ops: Iterable[str]) -> Tensor | None:
        """t, if it is a node of these ops with memory of its own, which one node reads, and is no output; else None."""
        if t is None or t.op not in ops or t not in self.position or t.view_src is not None:
            return None
        return t if self.readers[t] == 1 and "output" not in t.flags else None

    def under_views(self, t: Tensor) -> Tensor | None:
        """The tensor under a chain of views; t itself if it is no view; None if a view is an output or has several
        readers."""
        while not t.computes and t.src:
            if self.readers[t] != 1 or "output" in t.flags:
                return None
            t = t.src[0]
        return t


class Group(NamedTuple):
    """A fused kernel, which computes several nodes, its members.  `ops`: for each member, in the order of the graph,
    the ops that it may have; no two kernels have the same `ops`.

    `find(node, wiring)`: the members of the group that ends with `node`, or None; `build`: appends launches that
    compute the members and write the results for which `Builder.is_needed` is true; returns False, and appends nothing,
    if memory overlaps, or for nodes of other types and layouts than `find` finds: a caller's groups need not be found
    ones, and no kernel may access memory outside of their tensors.
    """

    ops: tuple[frozenset[str], ...]
    find: Callable[[Tensor, Wiring], tuple[Tensor, ...] | None]
    build: Callable[[Builder, tuple[Tensor, ...]], bool]


def find(wiring: Wiring, groups: Iterable[Group]) -> list[tuple[int, ...]]:
    """Positions of the members of all groups in a graph, ascending.  Of groups that share a node only the one with more
    members is found, and of two groups of the same kernel only the one that ends first."""
    taken: set[Tensor] = set()
    found = []
    for group in sorted(groups, key=lambda group: -len(group.ops)):
        for node in wiring.nodes:
            members = group.find(node, wiring) if node.op in group.ops[-1] else None
            if members is not None and taken.isdisjoint(members):
                taken.update(members)
                found.append(tuple(sorted(wiring.position[member] for member in members)))
    return sorted(found)


def group_of(nodes: Sequence[Tensor], groups: Iterable[Group]) -> Group | None:
    """The fused kernel for nodes of these ops, in order; None if there is none."""
    for group in groups:
        if len(group.ops) == len(nodes) and all(t.op in ops for t, ops in zip(nodes, group.ops, strict=True)):
            return group
    return None


def lies_apart(b: Builder, results: Iterable[Tensor], sources: Iterable[Tensor], same: bool = False) -> bool:
    """Whether no result shares bytes with a source.  `same`: a result may have the very memory and layout of a source,
    as the kernel then reads each element before it writes it."""
    for result in results:
        start = b.region(result).address
        for source in sources:
            at = b.region(source).address
            if at >= start + result.nbytes or start >= at + source.nbytes:
                continue
            layouts = ((t.type, t.ne, t.nb) for t in (result, source))
            if not (same and at == start and next(layouts) == next(layouts)):
                return False
    return True
